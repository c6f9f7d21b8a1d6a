"""Windows and documents in the kernels of `flash_gluon`, simulated on a CPU: results, visited tiles, fixed order.

The interval of a query is the range of keys that it sees, from `first` to before `end`. A plan is a choice of tiles and
warps. `tests/support/gluon_simulator.py` runs the kernels.
"""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("triton", reason="pip install triton==3.6.0 for the Gluon kernels")

import torch  # noqa: E402
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lmsys.attention import AttentionCase, Documents, Pattern  # noqa: E402
from lmsys.attention.flash_gluon import plans  # noqa: E402
from lmsys.kernels.launch import INTERPRETED  # noqa: E402
from lmsys.kernels.tritons import KNOWN_TRITON, is_known  # noqa: E402
from lmsys.testing import Inputs, make_inputs  # noqa: E402
from tests.support import gluon_simulator  # noqa: E402
from tests.support.gluon_simulator import assert_right, gluon, plans_taken, simulated  # noqa: E402
from tests.support.hidden import assert_reaches_only_what_sees_it  # noqa: E402
from tests.support.patterns import document_lengths, make_pattern  # noqa: E402
from tests.support.variants import few_by_default  # noqa: E402

known = pytest.mark.skipif(not is_known(), reason=f"pip install triton=={KNOWN_TRITON[0]}, for which they are written")
CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**31)
lengths = st.one_of(st.sampled_from([1, 64, 128, 129, 192, 193, 257]), st.integers(1, 300))


@st.composite
def patterned(draw: st.DrawFn) -> AttentionCase:
    """Cases with a window, documents or both, and with one or three query heads for each key head."""
    window = draw(st.none() | st.integers(1, 320))
    documents = window is None or draw(st.booleans())
    keys = draw(lengths)
    queries = keys if documents else draw(lengths)
    heads, kv_heads = draw(st.sampled_from([(2, 2), (3, 1)]))
    head_dim, causal = draw(st.sampled_from([64, 128])), window is not None or draw(st.booleans())
    batch = draw(st.integers(1, 2))
    return AttentionCase(
        batch, heads, kv_heads, queries, keys, head_dim, "bfloat16", causal, grad=True, window=window,
        documents=documents,
    )  # fmt: skip


# By place: batch, heads, key/value heads, queries, keys, head_dim, dtype, causal. In WIDE a window is wider than a tile
# of 128 keys. In BLIND the queries from 179 on see no key.
WIDE = AttentionCase(1, 2, 1, 280, 280, 64, "bfloat16", True, grad=True, window=130)
BLIND = AttentionCase(1, 1, 1, 250, 130, 128, "bfloat16", True, grad=True, window=50)
# In ONE_TILE each of several heads has one tile of 64 queries.
ONE_TILE = AttentionCase(2, 3, 1, 48, 48, 128, "bfloat16", True, grad=True, window=20)


@known
@settings(max_examples=1)
@given(case=patterned(), seed=SEEDS)
@example(case=WIDE, seed=0)
@example(case=BLIND, seed=1)
@example(case=ONE_TILE, seed=2)
def test_simulated_kernels_match_the_oracle(case: AttentionCase, seed: int) -> None:
    assert_right(case, make_inputs(case, seed), make_pattern(case, seed), fixed_orders=[False, True])


@known
@pytest.mark.parametrize("head_dim", [64, 128])
def test_intervals_may_end_before_they_begin(head_dim: int) -> None:
    """Queries whose window lies beyond a short cache have such intervals, and so have the keys beyond that cache."""
    pattern = Pattern(causal=True, window=30, key_lengths=torch.tensor([70, 250]))
    assert (pattern.bounds(250, 250, CPU).end < pattern.bounds(250, 250, CPU).first).any()
    case = AttentionCase(2, 2, 1, 250, 250, head_dim, "bfloat16", True, grad=True, window=30, key_lengths=True)
    assert_right(case, make_inputs(case, 0), pattern, fixed_orders=[False, True])


interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 lets kernels of flash_triton run on a CPU")


def answer(x: Inputs, case: AttentionCase, pattern: Pattern, fixed: bool) -> dict[str, torch.Tensor]:
    """The results of simulated kernels by name. fixed: additions to dq have a fixed order."""
    given, scale = [t.detach() for t in (x.q, x.k, x.v)], case.head_dim**-0.5
    with simulated():
        o, lse = gluon()._forward(*given, case.causal, scale, pattern=pattern)
        grads = gluon()._backward(*given, o, lse, x.do, case.causal, scale, fixed, pattern=pattern)
    return dict(zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True))


@known
@interpreted
@settings(max_examples=3)
@given(case=patterned(), seed=SEEDS, fixed=st.booleans())
@example(case=ONE_TILE, seed=2, fixed=False)  # NaN in q
def test_a_bad_value_reaches_only_queries_that_see_it(case: AttentionCase, seed: int, fixed: bool) -> None:
    """Kernels of `flash_triton`, in the interpreter, compute spoilt tiles again; it cannot compute bfloat16."""
    case = replace(case, dtype="float16")
    pattern = make_pattern(case, seed).simplest(case.queries, case.keys)
    if pattern.bounded:
        assert_reaches_only_what_sees_it(lambda x: answer(x, case, pattern, fixed), case, pattern, seed)


# (queries, keys, window, tensor, place of its NaN). The query that has it sees no key, so only dk shows it; nobody sees
# the key that has it, so only dq shows it.
UNSEEN = (100, 30, 40, "q", (0, 1, 80, 3)), (30, 100, 40, "k", (0, 0, 50, 3))


@known
@interpreted
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys", "window", "name", "place"), UNSEEN)
def test_a_vector_that_no_other_sees_may_hold_nan(
    queries: int, keys: int, window: int, name: str, place: tuple[int, ...], head_dim: int
) -> None:
    case = AttentionCase(1, 2, 1, queries, keys, head_dim, "float16", True, grad=True, window=window)
    inputs, dirty, pattern = make_inputs(case, 0), make_inputs(case, 0), Pattern(True, window=window)
    dirty.tensors[name][place] = float("nan")
    clean = answer(inputs, case, pattern, False)
    for output, x in answer(dirty, case, pattern, False).items():
        torch.testing.assert_close(x, clean[output], rtol=2e-2, atol=2e-2, msg=output)


@known
@settings(max_examples=3)
@given(case=patterned(), seed=SEEDS)
def test_no_flag_is_set_where_all_is_finite(case: AttentionCase, seed: int) -> None:
    flags: list[int] = []
    mends = {  # what they are given: (tensors, lse, flag, ...) and (tensors, (..., flag), ...)
        "mend_forward": lambda *given: flags.append(given[2].item()),
        "mend_backward": lambda *given: flags.append(given[1][-1].item()),
    }
    with simulated(), patch.multiple(gluon().flash_triton, **mends):
        x, pattern = make_inputs(case, seed), make_pattern(case, seed)
        o, lse = gluon()._forward(x.q, x.k, x.v, case.causal, 0.1, pattern=pattern)
        gluon()._backward(x.q, x.k, x.v, o, lse, x.do, case.causal, 0.1, False, pattern=pattern)
    assert flags == [0, 0]


EDGES = [  # (head dimension, pattern): some query sees a single key of a tile, or a few keys of its second half
    (64, Pattern(causal=True, window=191)),
    (128, Pattern(causal=True, window=63)),
    (128, Pattern(documents=Documents([70, 57, 65, 8]))),
]


@known
@pytest.mark.parametrize(("head_dim", "pattern"), EDGES)
def test_a_key_too_many_or_too_few_shows(head_dim: int, pattern: Pattern) -> None:
    """Queries are zero, so each gets the mean of the values that it sees. Values are large: one more or less shows."""
    case = AttentionCase(
        1, 1, 1, 200, 200, head_dim, "bfloat16", pattern.causal, window=pattern.window,
        documents=pattern.documents is not None,
    )  # fmt: skip
    x = make_inputs(case, 0)
    x.q.zero_()
    x.v.copy_(64 * x.v.sign())
    assert_right(case, x, pattern)


PLANS = [(head_dim, plan) for head_dim in (64, 128) for plan in plans.bounded_plans(head_dim)]  # under patterns


@known
@settings(max_examples=1)
@given(queries=lengths, keys=lengths, window=st.integers(1, 200), seed=SEEDS)
@example(queries=600, keys=600, window=100, seed=0)
@pytest.mark.parametrize(("head_dim", "plan"), few_by_default(PLANS, one_in=4) if is_known() else [])
def test_every_plan_skips_tiles_on_either_side(
    head_dim: int, plan: Any, queries: int, keys: int, window: int, seed: int
) -> None:
    """A GPU of two multiprocessors is simulated: a CTA takes several tiles, and its consumers see different keys."""
    case = AttentionCase(1, 2, 2, queries, keys, head_dim, "bfloat16", True, window=window)
    with patch.object(gluon_simulator, "PROCESSORS", 2):
        assert_right(case, make_inputs(case, seed), make_pattern(case, seed), plan)


@settings(max_examples=20)
@given(case=patterned(), seed=SEEDS)
def test_no_query_sees_more_than_the_span(case: AttentionCase, seed: int) -> None:
    """`Pattern.span` is the most keys that a query may see. Without a causal mask some query sees exactly as many."""
    pattern = make_pattern(case, seed)
    most = int(pattern.seen(case.queries, case.keys, CPU).sum(-1).max())
    assert most <= pattern.span(case.keys)
    if not case.causal:
        assert most == pattern.span(case.keys)


@known
@pytest.mark.parametrize(("head_dim", "most"), [(64, 2560), (128, 512)])
def test_a_short_span_has_a_plan_of_its_own(head_dim: int, most: int) -> None:
    x = make_inputs(AttentionCase(1, 1, 1, 2700, 2700, head_dim, "bfloat16", True), 0)
    with plans_taken("_Forward") as taken:
        for window in (most, most + 1):
            pattern = Pattern(causal=True, window=window)
            gluon()._forward(x.q, x.k, x.v, causal=True, scale=1.0, pattern=pattern)
    assert taken == [plans.SHORT_SPAN_PLAN[head_dim], plans.forward_plan(head_dim, True, 2700)]


def bounds_of(length: int, window: int | None, causal: bool, documents: bool, seed: int) -> tuple[Pattern, Any]:
    """(a pattern, the intervals of its queries and keys)."""
    packed = Documents(document_lengths(length, seed)) if documents else None
    pattern = Pattern(causal or window is not None, window, documents=packed)
    return pattern, pattern.bounds(length, length, CPU)


def extent_of(bounds: Any) -> Any:
    """The intervals as the kernels read them, for batch entry 0."""
    first, end = (gluon_simulator.Pointer(x.data_ptr(), torch.int32) for x in (bounds.first, bounds.end))
    return gluon_simulator.kernels("intervals")["Extent"](first, end, torch.tensor(0))


drawn = given(
    length=st.integers(1, 900), window=st.none() | st.integers(1, 500), causal=st.booleans(), documents=st.booleans(),
    seed=SEEDS, block_q=st.sampled_from([64, 128]),
)  # fmt: skip


@settings(max_examples=8)
@drawn
def test_tiles_without_visible_keys_are_skipped_and_only_edges_are_masked(
    length: int, window: int | None, causal: bool, documents: bool, seed: int, block_q: int
) -> None:
    """Tiles are visited from the first to the last in which a query sees a key. A mask is used where one does not."""
    pattern, bounds = bounds_of(length, window, causal, documents, seed)
    seen = pattern.seen(length, length, CPU).expand(1, 1, length, length)[0, 0]
    backward, forward = gluon_simulator.kernels("backward"), gluon_simulator.kernels("forward")
    for n in range((length + 127) // 128):  # the number of a tile of 128 keys, then of one of 128 queries
        keys, queries = slice(128 * n, 128 * n + 128), slice(128 * n, 128 * n + 128)
        low, end, masked_until, masked_from = (
            int(x)
            for x in backward["_visited"](
                extent_of(bounds.of_keys), batch=0, n=torch.tensor(n), K=length, BLOCK_Q=block_q
            )
        )
        tiles = seen[:, keys].split(block_q)
        some_see = [m for m, tile in enumerate(tiles) if tile.any()]
        assert (low, end) == (some_see[0], some_see[-1] + 1)
        ragged = 128 * (n + 1) > length
        for m in some_see:
            last = block_q * (m + 1) > length  # rows past the end have weights of zero
            assert (m < masked_until or m >= masked_from) == (not tiles[m].all()) or ragged or last
        low, high = forward["key_tiles"](
            extent_of(bounds), bh=torch.tensor(0), H=1, tile=torch.tensor(n), Q=length, K=length,
            CAUSAL=True, TILE_Q=128, BLOCK_K=128,
        )  # fmt: skip
        some_see = [j for j, tile in enumerate(seen[queries].split(128, 1)) if tile.any()]
        assert (int(low), int(high)) == (some_see[0], some_see[-1] + 1)


@settings(max_examples=8)
@drawn
def test_a_key_tile_waits_only_for_higher_ones(
    length: int, window: int | None, causal: bool, documents: bool, seed: int, block_q: int
) -> None:
    """In the deterministic mode key tiles add to a tile of queries in order, from the highest one down. The value for
    which a key tile waits counts those before it: 0, 1, 2 and so on."""
    _, bounds = bounds_of(length, window, causal, documents, seed)
    backward = gluon_simulator.kernels("backward")
    ends = extent_of(bounds).end
    visits = Counter[int]()
    for n in reversed(range((length + 127) // 128)):
        low, end, *_ = backward["_visited"](
            extent_of(bounds.of_keys), batch=0, n=torch.tensor(n), K=length, BLOCK_Q=block_q
        )
        for m in range(int(low), int(end)):
            value = backward["semaphore_value"](
                n, torch.tensor(m), num_key_tiles=0, ends=ends, Q=length, CAUSAL=True, BLOCK_Q=block_q
            )
            assert int(value) == visits[m]
            visits[m] += 1
