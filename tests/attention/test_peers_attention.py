"""Ideas of the peers' own tests of attention, restated for `flash_torch` and `flash_triton`.

Most names in ASKED, and docstrings, begin with the peers that have such a test. A `Row` is an implementation on a
device (tests/support/attention_rows.py).

Sources: pytorch/pytorch test/test_transformers.py; Dao-AILab/flash-attention tests/test_flash_attn.py;
fla-org/flash-linear-attention tests/ops/test_attn.py. docs/kernel.md lists what does not apply, with the reason.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lmsys.attention import AttentionCase, Documents, Pattern, attention
from lmsys.testing import Inputs, Oracle, make_inputs
from tests.support.attention_rows import Row, skip_unless_it_runs
from tests.support.patterns import SHAPES, make_pattern, spelled

NAMES = "flash_torch", "flash_triton"
ON_A_GPU = [pytest.param(Row(name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu) for name in NAMES]
on_a_gpu = pytest.mark.parametrize("row", ON_A_GPU)
rows = pytest.mark.parametrize(
    "row",
    [
        pytest.param(Row("flash_torch", "cpu"), id="flash_torch-cpu"),
        pytest.param(Row("flash_triton", "cpu"), id="flash_triton-cpu", marks=pytest.mark.on_request),  # interpreted
        *ON_A_GPU,
    ],
)
causals = pytest.mark.parametrize("causal", [False, True])


def by_row(row: Row, interpreted: list[Any], cpu: list[Any], cuda: list[Any]) -> list[Any]:
    """Picks the list of sizes that this row runs quickly: for the interpreter, another CPU row, or a GPU."""
    return cuda if row.device == "cuda" else interpreted if row.interpreted else cpu


def checked(row: Row, case: AttentionCase, inputs: Inputs, pattern: Pattern | None = None) -> None:
    """AssertionError unless o, dq, dk, dv and lse are those of the float64 oracle.

    Under a pattern, results are zeros for queries that see nothing, and for keys that no query sees.
    """
    skip_unless_it_runs(row, case)
    found = row.run(case, inputs, scale=case.scale, pattern=pattern)
    ratios = Oracle(case, inputs, case.scale, pattern=pattern).error_ratios(found)
    assert max(ratios.values()) <= 1, (str(case), ratios)
    if pattern is not None:
        sees = spelled(pattern, case)
        blind, unseen = ~sees.any(-1), ~sees.unflatten(1, (case.kv_heads, -1)).any(dim=(2, 3))
        hidden = {"o": blind, "dq": blind, "dk": unseen, "dv": unseen}
        assert not any(x[hidden[name]].any() for name, x in found.items() if name in hidden), str(case)


def case_of(row: Row, queries: int, keys: int, head_dim: int = 16, **fields: Any) -> AttentionCase:
    """A case of the row with gradients, unless `fields` say otherwise."""
    return row.case(**{"queries": queries, "keys": keys, "head_dim": head_dim, "grad": True, **fields})


def multiplied(inputs: Inputs, factors: dict[str, float]) -> Inputs:
    """The inputs, with each tensor that `factors` names multiplied by its factor."""
    return replace(inputs, **{name: inputs.tensors[name] * factor for name, factor in factors.items()})


# Values and gradients by shape and by option -------------------------------------------------------------------------

CAUSALS = {"": {}, ", causal": {"causal": True}}
LARGE = {"q": 5.0, "k": 3.0, "v": 3.0}
LENGTHS = (
    [(1, 39), (39, 1), (17, 33)],
    [(1, 239), (239, 1), (3, 199), (97, 97), (113, 211), (143, 64), (64, 187)],
    [(1, 239), (239, 1), (3, 799), (799, 3), (97, 97), (128, 217), (257, 257), (143, 587), (1023, 1024), (1024, 128)]
    + [(2048, 2048), (1025, 1025), (108, 256)],
)
DIMENSIONS = 8, 21, 40, 59, 72, 100, 111, 128, 203, 256
CACHES = {"batch": 3, "heads": 6, "kv_heads": 3, "head_dim": 32, "grad": False}


def square(*lengths: int) -> list[list[tuple[int, int]]]:
    """Sizes for `by_row` with as many keys as queries, one for each kind of row; 0 for none."""
    return [[(length, length)] if length else [] for length in lengths]


# {who asks what: (sizes (queries, keys) for `by_row`, fields of the case)}. The offset "end" is keys - queries, and
# "times" is no field, but the factors for `multiplied`.
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    # One query of many keys, many of one, a few more than a tile, and twice as many.
    **{f"torch, flash-attn: lengths{name}": (LENGTHS, {"head_dim": 32, **fields}) for name, fields in CAUSALS.items()},
    # Any even or odd head dimension; also with a scale of its own, 1 / D.
    **{
        f"torch, flash-attn, fla: head dimension {n}{name}": (
            square(33 if n <= 72 else 0, 65, 401),
            {"head_dim": n, **({"causal": True} if name == "" else {"scale": 1 / n})},
        )
        for n in DIMENSIONS
        for name in ("", ", a scale of its own")
    },
    **{
        f"queries that share keys: {heads}": (
            ([(17, 33)], [(65, 100)], [(111, 111), (1024, 513)]),
            {"heads": heads[0], "kv_heads": heads[1], "causal": True},
        )
        for heads in ((6, 1), (6, 3), (2, 2))
    },
    # Memory past the last key once made dq NaN.
    **{
        f"flash-attn: {n} large queries{name}": (
            square(n if n <= 17 else 0, n, n),
            {"batch": 2, "times": LARGE, **fields},
        )
        for n in (1, 2, 5, 17, 128)
        for name, fields in CAUSALS.items()
    },
    # Causal at the bottom right; with more queries than keys the first see nothing.
    **{
        f"torch, flash-attn: {name}": (
            ([(23, 36), (33, 17)], [(23, 56), (128, 65), (113, 211)], [(128, 256), (256, 128), (1023, 1024)]),
            {"causal": True, "offset": offset},
        )
        for name, offset in (("causal at the top left", 0), ("causal at the bottom right", "end"))
    },
    # A band of 10 in 600, whose rows begin with tiles of nothing.
    **{
        f"torch, flash-attn, fla: window {n}": (
            square(65, 300, 600),
            {"heads": 4, "kv_heads": 2, "causal": True, "window": n},
        )
        for n in (1, 10, 32)
    },
    # Left and right of the query, also with other lengths of queries and keys.
    **{
        f"flash-attn: window of two sides {sides}": (
            ([(33, 17)], [(97, 97), (65, 130)], [(384, 384), (113, 1024)]),
            {"window": sides},
        )
        for sides in ((0, 0), (7, 3), (40, 0), (3, 40))
    },
    # Queries are so large that scores reach the cap.
    **{
        f"flash-attn: soft cap {cap}": (
            square(33, 97, 384),
            {"causal": True, "softcap": cap, "times": {"q": min(cap, 8.0)}},
        )
        for cap in (1.0, 50.0)
    },
    # Split keys, and caches: keys beyond a cache's length are not read.
    **{
        f"flash-attn: {n} queries of {name}": (([(n, 70)], [(n, 300)], [(n, 3131)]), CACHES | fields)
        for n in (1, 3, 16)
        for name, fields in (
            ("a long cache", {}),
            ("caches of other lengths", {"key_lengths": True}),
            ("a long cache, at its end", {"causal": True, "offset": "end"}),
        )
    },
    # Padding after sequences: its keys are hidden, and get no gradient.
    "flash-attn: padding": (square(33, 97, 257), {"batch": 2, "key_lengths": True}),
    # More queries than keys, and fewer.
    **{
        f"flash-attn: alibi{name}": (
            ([(33, 17)], [(97, 65), (65, 97)], [(200, 200), (113, 203), (1024, 513)]),
            {"alibi": True, **fields},
        )
        for name, fields in CAUSALS.items()
    },
    # Additive masks, by `make_pattern` of each shape that broadcasts.
    **{
        f"torch: bias {n}": (([(33, 17)], [(64, 32)], [(512, 400)]), {"batch": 2, "bias": True})
        for n in range(len(SHAPES))
    },
    # The logit of one more key in each head.
    "fla: sinks": (square(33, 111, 1024), {"heads": 4, "kv_heads": 2, "causal": True, "sinks": True}),
}


@rows
@pytest.mark.parametrize("name", ASKED)
def test_what_the_peers_ask_is_right(row: Row, name: str) -> None:
    """Each call is judged in every dtype but float32, the first. `make_pattern` draws what options need."""
    sizes, fields = ASKED[name]
    if not (sizes := by_row(row, *sizes)):
        pytest.skip("the interpreter takes long: asked on a GPU")
    seed, others = [*ASKED].index(name), {key: value for key, value in fields.items() if key != "times"}
    for (queries, keys), dtype in product(sizes, row.dtypes[1:]):
        offset = keys - queries if fields.get("offset") == "end" else 0
        case = case_of(row, queries, keys, **others | {"dtype": dtype, "offset": offset})
        inputs = multiplied(make_inputs(case, seed), fields.get("times", {}))
        checked(row, case, inputs, make_pattern(case, seed) if case.options else None)


@rows
@pytest.mark.parametrize("scale", [-1e4, -0.3, 1.0])
def test_a_scale_that_is_negative_or_large(row: Row, scale: float) -> None:
    """torch: products divided by -0.0001. A kernel that takes the maximum before it scales is wrong there."""
    length = by_row(row, [33], [64], [300])[0]
    case = case_of(row, length, length, dtype="float32", grad=False, scale=scale)
    inputs = make_inputs(case, seed=0)
    checked(row, case, replace(inputs, k=inputs.q.clone(), v=inputs.q.clone()))


@rows
def test_the_largest_scores_give_the_value_and_no_nan(row: Row) -> None:
    """torch: q = k = v = 133,120 in bfloat16. In float16 256 is used, so that sums of 64 products stay small enough.

    `flash_triton` is given 8,192: its kernel computes 2^(score · scale - maximum), where only the maximum is rounded.
    Near 2^29 it is off by up to 32, and 2^32 is divided out again. With 133,120 it is off by 2^13: that is infinity.
    """
    dtype, size = ("float16", 256.0) if row.interpreted else ("bfloat16", 133_120.0)
    size = 8_192.0 if row.name == "flash_triton" and not row.interpreted else size
    case = case_of(row, queries=1, keys=1, head_dim=64, dtype=dtype)
    inputs = make_inputs(case, seed=0)
    inputs = replace(inputs, **{name: torch.full_like(inputs.q, size) for name in ("q", "k", "v")})
    found = row.run(case, inputs)
    assert torch.equal(found["o"], inputs.v) and all(bool(x.isfinite().all()) for x in found.values())


@rows
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("factors", [{}, LARGE], ids=["usual", "large"])
def test_packed_sequences_of_a_token_a_tile_and_longer(row: Row, window: int | None, factors: dict[str, float]) -> None:
    """flash-attn's and fla's variable lengths, torch's nested tensors. dq was NaN where a document ended in a tile."""
    packings = by_row(
        row,
        [[1, 15, 30], [1, 2, 5, 40]],
        [[15, 85, 1, 99], [1, 2, 5, 120]],
        [[15], [256, 244, 500], [15, 85, 200, 900, 800], [1] * 40, [1, 2, 5, 248]],
    )
    for lengths in packings:
        case = case_of(row, sum(lengths), sum(lengths), causal=True, documents=True, window=window)
        inputs = multiplied(make_inputs(case, seed=sum(lengths)), factors)
        checked(row, case, inputs, Pattern(causal=True, window=window, documents=Documents(lengths, row.device)))


# Memory --------------------------------------------------------------------------------------------------------------


def of_a_projection(x: Tensor) -> Tensor:
    """x as a part of a tensor (B, S, 2, H, D), in which a projection has written two such parts side by side."""
    return torch.stack([x.transpose(1, 2)] * 2, dim=2)[:, :, 0].transpose(1, 2)


def last_dimension_apart(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def of_one_head(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x)


def an_element_later(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def with_gaps(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=0)[::2]


VIEWS = {  # {view: (function that makes it, of which tensors)}
    "one projection": (of_a_projection, "q k v"),
    "keys and values together": (of_a_projection, "k v"),
    "the last dimension apart": (last_dimension_apart, "q k v"),
    "one key head for all": (of_one_head, "k v"),
    "an element later": (an_element_later, "q k v"),
    "a gradient with gaps": (with_gaps, "do"),
}


@rows
@pytest.mark.parametrize("kind", VIEWS)
def test_views_as_programs_have_them(row: Row, kind: str) -> None:
    """torch's packed, strided, expanded and unaligned inputs, and flash-attn's gradient that is not contiguous."""
    length, (view, names) = by_row(row, [33], [97], [200])[0], VIEWS[kind]
    case = case_of(row, length, length, batch=2, causal=True)
    inputs = make_inputs(case, seed=1)
    checked(row, case, replace(inputs, **{name: view(inputs.tensors[name]) for name in names.split()}))


@on_a_gpu
def test_a_head_dimension_of_one_has_any_stride(row: Row) -> None:
    """test_memory.py asks this of rows on a CPU."""
    q = torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float16, device=row.device).mT
    one = torch.ones(1, 1, 1, 1, dtype=torch.float16, device=row.device)
    assert torch.equal(attention(q, one, one, impl=row.name), torch.ones_like(q))


# Repeats, graphs, refusals -------------------------------------------------------------------------------------------


@on_a_gpu
@causals
def test_repeats_have_the_same_bits(row: Row, causal: bool) -> None:
    """flash-attn's races and deterministic backwards: many batch entries, forward and backward, again and again."""
    for queries, keys in ((1, 239), (239, 1), (257, 257), (1024, 128)):
        case = case_of(row, queries, keys, batch=60, heads=4, kv_heads=4, causal=causal)
        inputs = make_inputs(case, seed=0)
        first = row.run(case, inputs)
        for _ in range(100):
            assert all(torch.equal(x, first[name]) for name, x in row.run(case, inputs).items())


@on_a_gpu
@causals
def test_a_cuda_graph_gives_the_same_bits_and_reads_new_inputs(row: Row, causal: bool) -> None:
    """torch: captured forward and backward, replayed."""
    case = case_of(row, queries=256, keys=512, head_dim=64, batch=2, causal=causal)
    inputs = make_inputs(case, seed=0)
    for _ in range(3):
        row.run(case, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = row.run(case, inputs)
    for seed in (0, 1):
        inputs.redraw_(seed)
        graph.replay()
        expected = row.run(case, inputs)
        assert all(torch.equal(x, expected[name]) for name, x in found.items())


@rows
def test_a_row_that_cannot_run_a_case_says_why(row: Row) -> None:
    """torch: a forced backend refuses a mask, a dtype or a head dimension, and no other backend replaces it."""
    q = torch.randn(1, 1, 8, 16, device=row.device)
    refused = [(q, {"mask": torch.ones(8, 8, dtype=torch.bool, device=row.device)}, f"{row.name}.*mask")]
    if row.name == "flash_triton":
        refused += [
            (q.double(), {}, "float64 has no tensor-core path"),
            (q.repeat(1, 1, 1, 17), {}, "head_dim 272 is above 256"),
        ]
    for x, options, message in refused:
        with pytest.raises(ValueError, match=message):
            attention(x, x, x, **options, impl=row.name)
