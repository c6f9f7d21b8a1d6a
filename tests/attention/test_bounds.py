"""`Bounds`: its intervals are those of the pattern, flash rows visit no tile outside of them, off by one is noticed."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmsys.attention import AttentionCase, Documents, Pattern, flash_torch, peers
from lmsys.attention.bounds import Bounds
from lmsys.attention.documents import keep
from lmsys.testing import Oracle, make_inputs, run
from tests.attention.test_attention import with_tile
from tests.support.attention_rows import Row, skip_unless_it_runs
from tests.support.patterns import document_lengths, make_pattern, spelled

CPU = torch.device("cpu")
TILE, LENGTH = 16, 96
LENGTHS, SEEDS = st.integers(1, 20), st.integers(0, 2**31)
PATTERNS = {
    "full": Pattern(),
    "causal": Pattern(True),
    "window within a tile": Pattern(True, 5),
    "window of two tiles": Pattern(True, 2 * TILE),
    "window over edges": Pattern(True, 2 * TILE + 1),
    "offset": Pattern(True, 20, offset=TILE - 1),
    "documents": Pattern(documents=Documents([TILE, 1, TILE - 1, 2 * TILE + 1, LENGTH - 4 * TILE - 1])),
    "causal documents": Pattern(True, documents=Documents([3, 3 * TILE - 3, TILE + 1, LENGTH - 4 * TILE - 1])),
    "two sides": Pattern(False, (TILE + 1, 3)),
    "prefix": Pattern(True, prefix=2 * TILE + 1),
    "more keys": Pattern(True, documents=Documents([TILE + 5, LENGTH - TILE - 5], keys=Documents([25, LENGTH - 25]))),
    "offset of each entry": Pattern(True, 9, torch.tensor([3])),
    "key lengths": Pattern(key_lengths=torch.tensor([TILE + 1])),
}


@st.composite
def drawn(draw: st.DrawFn) -> tuple[AttentionCase, int]:
    """(a case with options whose queries see intervals of keys, a seed for their values)."""
    keys = draw(LENGTHS)
    documents, causal = draw(st.booleans()), draw(st.booleans())
    case = AttentionCase(2, 1, 1, draw(LENGTHS), keys, 16, "float32", causal, documents=documents)
    prefix = draw(st.none() | st.integers(1, 25)) if causal else None
    window = None
    if prefix is None:
        window = draw(st.none() | st.tuples(*2 * [st.integers(0, 25)]) | (st.integers(1, 25) if causal else st.none()))
    offset = draw(st.just(True) | st.integers(-25, 25))
    case = replace(case, window=window, prefix=prefix, offset=offset, key_lengths=draw(st.booleans()))
    return case, draw(SEEDS)


@given(drawn())
def test_bounds_say_what_is_seen_by_queries_and_by_keys(drawn: tuple[AttentionCase, int]) -> None:
    case, seed = drawn
    pattern = make_pattern(case, seed)
    seen = pattern.seen(case.queries, case.keys, CPU).expand(case.batch, 1, -1, -1)[:, 0]
    assert torch.equal(seen, spelled(pattern, case)[:, 0])
    bounds = pattern.bounds(case.queries, case.keys, CPU)
    rows, columns = slice(0, case.queries), slice(0, case.keys)
    assert torch.equal(bounds.visible(rows, columns).expand_as(seen), seen)
    assert torch.equal(bounds.of_keys.visible(columns, rows).expand_as(seen.mT), seen.mT)
    for one in (bounds, bounds.of_keys):
        assert all(bool((edge.diff(dim=1) >= 0).all()) for edge in (one.first, one.end))


def expected(pattern: Pattern) -> tuple[int, int]:
    """(visited, masked): tiles in which some query sees some key, and those of them that hide some key."""
    tiles = pattern.seen(LENGTH, LENGTH, CPU).expand(1, 1, -1, -1).reshape(-1, TILE, LENGTH // TILE, TILE)
    some, every = tiles.any(3).any(1), tiles.all(3).all(1)
    return int(some.sum()), int((some & ~every).sum())


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Mock:
    """A mock in place of a function of the module: it calls the function, and counts its calls."""
    counting = Mock(wraps=getattr(module, name))
    monkeypatch.setattr(module, name, counting)
    return counting


@pytest.mark.parametrize("name", PATTERNS)
def test_flash_torch_visits_tiles_that_are_seen_and_masks_those_at_an_edge(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = PATTERNS[name]
    dots, hides = (counted(monkeypatch, flash_torch, one) for one in ("_dot", "_hide"))
    x = make_inputs(AttentionCase(1, 1, 1, LENGTH, LENGTH, 16, "float32", grad=True), 0)
    visited, masked = expected(pattern)
    o, lse = flash_torch.flash_forward(x.q, x.k, x.v, False, 0.25, TILE, pattern)
    dots_forward = 2 * visited  # Q Kᵀ and P V
    assert (dots.call_count, hides.call_count) == (dots_forward, masked)
    flash_torch.flash_backward(x.q, x.k, x.v, o, lse, x.do, False, 0.25, TILE, pattern)
    dots_backward = 5 * visited  # Q Kᵀ, dO Vᵀ, Pᵀ dO, dSᵀ Q and dS K
    assert (dots.call_count, hides.call_count) == (dots_forward + dots_backward, masked + masked)


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in ("full", "causal")])
def test_flash_triton_visits_tiles_that_are_seen_and_masks_those_at_an_edge(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("flash_triton", "cpu")
    skip_unless_it_runs(row, row.case())
    from lmsys.attention import flash_triton, flash_triton_kernels
    from lmsys.attention.tuning import Tile

    pattern, tile = PATTERNS[name], Tile(TILE, TILE, 4, 1)
    loads, masks = (counted(monkeypatch, flash_triton_kernels, one) for one in ("_load", "_within"))
    x = make_inputs(AttentionCase(1, 1, 1, LENGTH, LENGTH, 16, "float32", grad=True), 0)
    visited, masked = expected(pattern)
    o, lse = flash_triton._forward(x.q, x.k, x.v, False, 0.25, tile, pattern)
    query_tiles = key_tiles = LENGTH // TILE
    loads_forward = query_tiles + 2 * visited  # q; k and v
    assert (loads.call_count, masks.call_count) == (loads_forward, masked)
    flash_triton._backward(x.q, x.k, x.v, o, lse, x.do, False, 0.25, tile, pattern)
    padded_query_tiles = flash_triton._padded(LENGTH) // TILE  # padded, as the dq kernel also writes vectors
    loads_dq = 3 * padded_query_tiles + 2 * visited  # q, do and o; k and v
    loads_dkdv = 2 * key_tiles + 2 * visited  # k and v; q and do
    assert (loads.call_count, masks.call_count) == (loads_forward + loads_dq + loads_dkdv, 3 * masked)


def moved(documents: Documents, by: int) -> Documents:
    """Documents whose first one is longer by `by` tokens, and the second shorter."""
    first, second, *rest = documents.lengths[0]
    return Documents([first + by, second - by, *rest])


def off_documents(right: Pattern, by: int) -> Pattern:
    return replace(right, documents=moved(right.documents, by))


PACKED = Pattern(True, documents=Documents([20, 20, 24]))
OFF: dict[str, tuple[Pattern, Callable[[Pattern, int], Pattern]]] = {  # a pattern, and a function that moves its edge
    "window": (Pattern(True, 9), lambda right, by: replace(right, window=right.window + by)),
    "causal": (Pattern(True, offset=3), lambda right, by: replace(right, offset=right.offset + by)),
    "documents": (PACKED, off_documents),
    "whole documents": (replace(PACKED, causal=False), off_documents),
    "key lengths": (
        Pattern(key_lengths=torch.tensor([33])),
        lambda right, by: replace(right, key_lengths=right.key_lengths + by),
    ),
}


@pytest.mark.parametrize("impl", ["naive", "flash_torch", "flash_triton"])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("name", OFF)
def test_a_bound_that_is_off_by_one_is_caught(name: str, by: int, impl: str) -> None:
    row = Row(impl, "cpu")
    case = row.case(batch=1, heads=1, kv_heads=1, dtype="float16", grad=True)
    skip_unless_it_runs(row, case)
    right, off = OFF[name]
    inputs = make_inputs(case, 0)
    oracle = Oracle(case, inputs, pattern=right)
    wrong = oracle.error_ratios(row.run(case, inputs, pattern=off(right, by)))
    assert min(wrong.values()) > 1, wrong
    assert max(oracle.error_ratios(row.run(case, inputs, pattern=right)).values()) <= 1


# By edge: its place in `Bounds._edges`, and the direction in which a move makes results wrong.
EDGES = {"low": (0, 1), "full from": (1, -1), "full to": (2, 1), "high": (3, -1)}


@pytest.mark.parametrize("edge", EDGES)
def test_an_edge_of_tiles_that_is_off_by_one_is_caught(edge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of three patterns the moved edge makes the result wrong: a document begins one key before a tile, at its
    first key, or one key later."""
    edges, (moved_edge, by) = Bounds._edges.func, EDGES[edge]
    row = Row("flash_torch", "cpu")
    case = row.case(batch=1, heads=1, kv_heads=1, queries=LENGTH, keys=LENGTH, dtype="float32", grad=True)
    inputs = make_inputs(case, 0)

    def off(bounds: Bounds) -> list[list[int]]:
        all_edges: list[list[int]] = edges(bounds)
        all_edges[moved_edge] = [key + by for key in all_edges[moved_edge]]
        return all_edges

    monkeypatch.setattr(Bounds, "_edges", property(off))
    ratios = []
    for first in (3 * TILE - 1, 3 * TILE, 3 * TILE + 1):
        pattern = Pattern(documents=Documents([first, LENGTH - first]))
        found = run(with_tile(row, (TILE, TILE)), inputs, pattern=pattern)
        ratios.append(max(Oracle(case, inputs, pattern=pattern).error_ratios(found).values()))
    assert max(ratios) > 1, ratios


MADE: dict[str, Callable[[Documents], Any]] = {
    "intervals": lambda documents: Pattern(True, 3, documents=documents).bounds(LENGTH, LENGTH, CPU),
    "block mask": lambda documents: peers._block_mask_of(Pattern(True, documents=documents), LENGTH, LENGTH, CPU),
    "cu_seqlens": lambda documents: documents.cu_seqlens(1),
}


class Emptied(dict[Any, Any]):
    """A dict whose entries another thread drops as soon as they are there."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.clear()


def test_what_another_thread_drops_is_returned_all_the_same() -> None:
    assert keep(Emptied(), "key", lambda: 3, torch.device("cpu")) == 3


@pytest.mark.parametrize("what", MADE)
def test_what_is_kept_on_documents_is_made_once_and_freed_with_them(what: str) -> None:
    """In packed training each batch has other documents: if they were held, memory would grow."""
    documents, others = Documents([TILE, LENGTH - TILE]), Documents([1, LENGTH - 1])
    made = MADE[what](documents)
    assert MADE[what](documents) is made and MADE[what](others) is not made
    gone = weakref.ref(documents)
    del documents
    assert gone() is None


def test_a_call_of_attention_does_not_hold_its_documents() -> None:
    x = make_inputs(AttentionCase(1, 1, 1, LENGTH, LENGTH, 16, "float32", grad=True), 0)
    documents = Documents([TILE, LENGTH - TILE])
    run(flash_torch.flash_torch, x, pattern=Pattern(True, documents=documents))
    gone = weakref.ref(documents)
    del documents
    assert gone() is None


@given(SEEDS, st.integers(1, 300))
def test_drawn_documents_fill_their_sequence(seed: int, tokens: int) -> None:
    assert sum(document_lengths(tokens, seed)) == tokens
