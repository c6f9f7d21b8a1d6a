"""Ideas of the peers' own tests of attention, restated for `flash_torch` and `flash_triton`.

A docstring begins with the peer that has such a test.

Sources: pytorch/pytorch test/test_transformers.py; Dao-AILab/flash-attention tests/test_flash_attn.py;
fla-org/flash-linear-attention tests/ops/test_attn.py. docs/kernel.md lists what does not apply, with the reason.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmsys.attention import AttentionCase, Documents, Pattern, attention
from lmsys.testing import Inputs, Oracle, make_inputs
from tests.support.attention_rows import Row, assert_within_budget

NAMES = "flash_torch", "flash_triton"
rows = pytest.mark.parametrize(
    "row",
    [
        pytest.param(Row("flash_torch", "cpu"), id="flash_torch-cpu"),
        pytest.param(Row("flash_triton", "cpu"), id="flash_triton-cpu", marks=pytest.mark.on_request),  # interpreted
        *(pytest.param(Row(name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu) for name in NAMES),
    ],
)
on_gpus = pytest.mark.parametrize(
    "row", [pytest.param(Row(name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu) for name in NAMES]
)
causals = pytest.mark.parametrize("causal", [False, True])


def by_row(row: Row, interpreted: list[Any], cpu: list[Any], cuda: list[Any]) -> list[Any]:
    """Picks the list of sizes that this row runs quickly: for the interpreter, another CPU row, or a GPU."""
    return cuda if row.device == "cuda" else interpreted if row.interpreted else cpu


def checked(
    row: Row, case: AttentionCase, inputs: Inputs, scale: float | None = None, **options: Any
) -> dict[str, Tensor]:
    """Runs the row forward and backward, compares o, dq, dk, dv and lse with the float64 oracle, and returns them."""
    if reason := row.why_not(case):
        pytest.skip(reason)
    pattern = Pattern(causal=case.causal, **options) if options else None
    found = row.run(case, inputs, scale=scale, pattern=pattern)
    ratios = Oracle(case, inputs, scale, pattern=pattern).error_ratios(found)
    assert max(ratios.values()) <= 1, (str(case), ratios)
    return found


def case_of(row: Row, queries: int, keys: int, head_dim: int = 16, **fields: Any) -> AttentionCase:
    """A case of the row with gradients, unless `fields` say otherwise."""
    return row.case(**{"queries": queries, "keys": keys, "head_dim": head_dim, "grad": True, **fields})


# Values and gradients by shape ---------------------------------------------------------------------------------------


@rows
@causals
def test_lengths_that_no_tile_divides_and_lengths_of_both_sides(row: Row, causal: bool) -> None:
    """torch and flash-attn: one query of many keys, many of one, a few more than a tile, and twice as many."""
    sizes = by_row(
        row,
        [(1, 39), (39, 1), (17, 33)],
        [(1, 239), (239, 1), (3, 199), (97, 97), (113, 211), (143, 64), (64, 187)],
        [
            (1, 239),
            (239, 1),
            (3, 799),
            (799, 3),
            (97, 97),
            (128, 217),
            (257, 257),
            (143, 587),
            (1023, 1024),
            (1024, 128),
        ]
        + [(2048, 2048), (1025, 1025), (108, 256)],
    )
    for queries, keys in sizes:
        for dtype in row.dtypes[1:]:
            case = case_of(row, queries, keys, 32, dtype=dtype, causal=causal)
            checked(row, case, make_inputs(case, seed=queries))


@rows
@pytest.mark.parametrize("head_dim", [8, 21, 40, 59, 72, 100, 111, 128, 203, 256])
def test_head_dimensions_that_are_no_power_of_two(row: Row, head_dim: int) -> None:
    """torch, flash-attn and flash-linear-attention: any even or odd one; also with a scale of its own, 1 / D."""
    if row.interpreted and head_dim > 72:
        pytest.skip("the interpreter takes long: asked on a GPU")
    length = by_row(row, [33], [65], [401])[0]
    for scale in (None, 1 / head_dim):
        case = case_of(row, length, length, head_dim, causal=scale is None)
        checked(row, case, make_inputs(case, seed=head_dim), scale)


@rows
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 3), (2, 2)])
def test_queries_that_share_keys(row: Row, heads: int, kv_heads: int) -> None:
    for queries, keys in by_row(row, [(17, 33)], [(65, 100)], [(111, 111), (1024, 513)]):
        case = case_of(row, queries, keys, heads=heads, kv_heads=kv_heads, causal=True)
        found = checked(row, case, make_inputs(case, seed=heads))
        assert found["dk"].shape[1] == found["dv"].shape[1] == kv_heads


@rows
@pytest.mark.parametrize("scale", [-1e4, -0.3, 1.0])
def test_a_scale_that_is_negative_or_large(row: Row, scale: float) -> None:
    """torch: products divided by -0.0001. A kernel that takes the maximum before it scales is wrong there."""
    length = by_row(row, [33], [64], [300])[0]
    case = case_of(row, length, length, dtype="float32", grad=False)
    inputs = make_inputs(case, seed=0)
    checked(row, case, replace(inputs, k=inputs.q.clone(), v=inputs.q.clone()), scale)


@rows
@causals
@pytest.mark.parametrize("queries", [1, 2, 5, 17, 128])
def test_large_inputs_shorter_than_a_tile_do_not_overflow(row: Row, queries: int, causal: bool) -> None:
    """flash-attn: memory past the last key once made dq NaN."""
    if row.interpreted and queries > 17:
        pytest.skip("the interpreter takes long: asked on a GPU")
    case = case_of(row, queries, queries, batch=2, causal=causal)
    inputs = make_inputs(case, seed=queries)
    inputs = replace(inputs, q=inputs.q * 5, k=inputs.k * 3, v=inputs.v * 3)
    found = checked(row, case, inputs)
    assert all(bool(x.isfinite().all()) for x in found.values())


@rows
def test_the_largest_scores_give_the_value_and_no_nan(row: Row) -> None:
    """torch: q = k = v = 133,120 in bfloat16. In float16 256 is used, so that sums of 64 products stay small enough.

    `flash_triton` is given 8,192: its kernel scales scores and subtracts their maximum in one instruction. The rounding
    error of that maximum, up to 32 at 2^29, would become an exponent of 2.
    """
    dtype, size = ("float16", 256.0) if row.interpreted else ("bfloat16", 133_120.0)
    size = 8_192.0 if row.name == "flash_triton" and not row.interpreted else size
    case = case_of(row, 1, 1, 64, dtype=dtype)
    inputs = make_inputs(case, seed=0)
    inputs = replace(inputs, **{name: torch.full_like(inputs.q, size) for name in ("q", "k", "v")})
    found = row.run(case, inputs)
    assert torch.equal(found["o"], inputs.v) and all(bool(x.isfinite().all()) for x in found.values())


def test_gradients_in_float64_are_those_of_differences() -> None:
    """torch: gradcheck, here on a packed projection. `flash_triton` is not tested, since it has no float64."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 4, 3, 2, 8, dtype=torch.float64, generator=generator, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return attention(*x.permute(2, 0, 3, 1, 4), causal=True, impl="flash_torch")

    assert torch.autograd.gradcheck(attend, packed)


# Memory --------------------------------------------------------------------------------------------------------------


def views(row: Row, case: AttentionCase, kind: str) -> Inputs:
    """Inputs of a case, as views of the `kind` that programs have: one of KINDS."""
    inputs = make_inputs(case, seed=1)
    if kind == "one projection":  # (B, S, 3, H, D)
        packed = torch.stack([x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)], dim=2)
        q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    elif kind == "keys and values together":  # (B, S, 2, H, D)
        packed = torch.stack([x.transpose(1, 2) for x in (inputs.k, inputs.v)], dim=2)
        q, (k, v) = inputs.q, (x.transpose(1, 2) for x in packed.unbind(2))
    elif kind == "the last dimension apart":
        q, k, v = (x.mT.contiguous().mT for x in (inputs.q, inputs.k, inputs.v))
    elif kind == "one key head for all":
        q, k, v = inputs.q, inputs.k[:, :1].expand_as(inputs.k), inputs.v[:, :1].expand_as(inputs.v)
    elif kind == "an element later":
        q, k, v = (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (inputs.q, inputs.k, inputs.v))
    else:
        assert kind == "a gradient with gaps"
        q, k, v = inputs.q, inputs.k, inputs.v
        inputs = replace(inputs, do=inputs.do.repeat_interleave(2, dim=0)[::2])
    return replace(inputs, q=q, k=k, v=v)


KINDS = (
    "one projection",
    "keys and values together",
    "the last dimension apart",
    "one key head for all",
    "an element later",
    "a gradient with gaps",
)


@rows
@pytest.mark.parametrize("kind", KINDS)
def test_views_as_programs_have_them(row: Row, kind: str) -> None:
    """torch's packed, strided, expanded and unaligned inputs, and flash-attn's gradient that is not contiguous."""
    length = by_row(row, [33], [97], [200])[0]
    case = case_of(row, length, length, batch=2, causal=True)
    checked(row, case, views(row, case, kind))


@rows
def test_a_gradient_reaches_a_packed_projection(row: Row) -> None:
    """flash-attn's packed calls: the gradients of q, k and v are parts of one tensor."""
    length = by_row(row, [33], [97], [257])[0]
    case = case_of(row, length, length)
    inputs = make_inputs(case, seed=2)
    packed = torch.stack([inputs.q, inputs.k, inputs.v]).requires_grad_()
    o = attention(*packed, causal=True, impl=row.name)
    (found,) = torch.autograd.grad(o, packed, inputs.do)
    apart = row.run(replace(case, causal=True), inputs)
    assert all(torch.equal(x, apart[name]) for x, name in zip(found, ("dq", "dk", "dv"), strict=True))


@rows
def test_a_head_dimension_of_one_has_any_stride(row: Row) -> None:
    q = torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float16, device=row.device).mT
    one = torch.ones(1, 1, 1, 1, dtype=torch.float16, device=row.device)
    assert torch.equal(attention(q, one, one, impl=row.name), torch.ones_like(q))


# What a query sees ---------------------------------------------------------------------------------------------------


@rows
def test_causal_is_aligned_at_the_top_left_and_by_offset_at_the_bottom_right(row: Row) -> None:
    """torch's two causal variants; flash-attn's alignment, where with more queries than keys the first see nothing."""
    sizes = by_row(row, [(23, 36), (33, 17)], [(23, 56), (128, 65), (113, 211)], [(128, 256), (256, 128), (1023, 1024)])
    for queries, keys in sizes:
        case = case_of(row, queries, keys, causal=True)
        inputs = make_inputs(case, seed=keys)
        checked(row, case, inputs)
        case = replace(case, offset=keys - queries)
        found = checked(row, case, inputs, offset=keys - queries)
        blind = max(0, queries - keys)
        assert not found["o"][:, :, :blind].any() and not found["dq"][:, :, :blind].any()


@rows
@pytest.mark.parametrize("window", [1, 10, 32])
def test_a_window_hides_whole_tiles(row: Row, window: int) -> None:
    """torch: a band of 10 in 600, whose rows begin with tiles of nothing; flash-attn's and fla's local attention."""
    length = by_row(row, [65], [300], [600])[0]
    case = case_of(row, length, length, heads=4, kv_heads=2, causal=True, window=window)
    checked(row, case, make_inputs(case, seed=window), window=window)


@rows
@pytest.mark.parametrize("window", [None, 16])
def test_packed_sequences_equal_separate_ones(row: Row, window: int | None) -> None:
    """flash-attn's and fla's variable lengths, torch's nested tensors: sequences of a token, a tile, and longer."""
    packings = by_row(row, [[1, 15, 30]], [[15, 85, 1, 99]], [[15], [256, 244, 500], [15, 85, 200, 900, 800], [1] * 40])
    for lengths in packings:
        total = sum(lengths)
        case = case_of(row, total, total, causal=True, documents=True, window=window)
        inputs = make_inputs(case, seed=total)
        found = checked(row, case, inputs, documents=Documents(lengths, row.device), window=window)
        end = sum(lengths[:2])
        part = slice(lengths[0], end) if len(lengths) > 1 else slice(0, total)
        one = replace(inputs, **{name: x[:, :, part].clone() for name, x in inputs.tensors.items()})
        alone = replace(case, queries=part.stop - part.start, keys=part.stop - part.start, documents=False)
        oracle = Oracle(alone, one, pattern=Pattern(causal=True, window=window))
        assert_within_budget(oracle.error_ratios({name: found[name][:, :, part] for name in ("o", "dq", "dk", "dv")}))


@rows
def test_short_documents_of_large_numbers_do_not_overflow(row: Row) -> None:
    """flash-attn: dq was NaN where a document ended within a tile."""
    length = by_row(row, [48], [128], [256])[0]
    case = case_of(row, length, length, causal=True, documents=True)
    inputs = make_inputs(case, seed=7)
    inputs = replace(inputs, q=inputs.q * 5, k=inputs.k * 3, v=inputs.v * 3)
    checked(row, case, inputs, documents=Documents([1, 2, 5, length - 8], row.device))


@rows
@pytest.mark.parametrize("softcap", [1.0, 50.0])
def test_a_soft_cap_of_scores_that_reach_it(row: Row, softcap: float) -> None:
    """flash-attn: queries are so large that scores reach the cap."""
    length = by_row(row, [33], [97], [384])[0]
    case = case_of(row, length, length, causal=True, softcap=softcap)
    inputs = make_inputs(case, seed=3)
    checked(row, case, replace(inputs, q=inputs.q * min(softcap, 8.0)), softcap=softcap)


@rows
@pytest.mark.parametrize("queries", [1, 3, 16])
def test_few_queries_of_long_caches_of_different_lengths(row: Row, queries: int) -> None:
    """flash-attn's split keys and caches: keys beyond a cache's length are not read."""
    keys = by_row(row, [70], [300], [3131])[0]
    case = case_of(row, queries, keys, 32, batch=3, heads=6, kv_heads=3, grad=False, key_lengths=True)
    inputs = make_inputs(case, seed=queries)
    lengths = torch.tensor([keys, 1, keys // 2], device=row.device)
    checked(row, case, inputs, key_lengths=lengths)
    checked(row, replace(case, key_lengths=False), inputs)
    checked(row, replace(case, key_lengths=False, causal=True, offset=keys - queries), inputs, offset=keys - queries)


@rows
def test_padding_after_sequences_has_no_gradient(row: Row) -> None:
    """flash-attn's padding masks: keys of the padding are hidden, and get no gradient."""
    length = by_row(row, [33], [97], [257])[0]
    case = case_of(row, length, length, batch=2, key_lengths=True)
    lengths = torch.tensor([length - 16, length], device=row.device)
    found = checked(row, case, make_inputs(case, seed=5), key_lengths=lengths)
    assert not found["dk"][0, :, length - 16 :].any() and not found["dv"][0, :, length - 16 :].any()


# What is added, and partial results ---------------------------------------------------------------------------------


@rows
@causals
def test_alibi_takes_slopes_times_distances(row: Row, causal: bool) -> None:
    """flash-attn: slopes of heads, or of each batch entry; more queries than keys and fewer."""
    for queries, keys in by_row(row, [(33, 17)], [(97, 65), (65, 97)], [(200, 200), (113, 203), (1024, 513)]):
        case = case_of(row, queries, keys, causal=causal, alibi=True)
        slopes = torch.tensor([[0.3, 0.07]], device=row.device)
        checked(row, case, make_inputs(case, seed=queries), alibi=slopes)


@rows
@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_a_bias_of_any_shape_that_broadcasts(row: Row, dims: int) -> None:
    """torch's additive masks: from one row for all queries up to one matrix for each batch entry and head."""
    queries, keys = by_row(row, [(33, 17)], [(64, 32)], [(512, 400)])[0]
    case = case_of(row, queries, keys, batch=2, bias=True)
    inputs = make_inputs(case, seed=dims)
    shape = (2, case.heads, queries, keys)[4 - dims :]
    bias = torch.randn(shape, device=row.device)
    checked(row, case, inputs, bias=bias[(None,) * (4 - dims)])


@rows
def test_sinks_beside_the_keys(row: Row) -> None:
    """flash-linear-attention: the logit of one more key in each head."""
    length = by_row(row, [33], [111], [1024])[0]
    case = case_of(row, length, length, heads=4, kv_heads=2, causal=True, sinks=True)
    checked(row, case, make_inputs(case, seed=4), sinks=torch.randn(1, 4, device=row.device))


@rows
@pytest.mark.parametrize("window", [(0, 0), (7, 3), (40, 0), (3, 40)])
def test_windows_of_two_sides(row: Row, window: tuple[int, int]) -> None:
    """flash-attn's local attention: left and right of the query, also with other lengths of queries and keys."""
    for queries, keys in by_row(row, [(33, 17)], [(97, 97), (65, 130)], [(384, 384), (113, 1024)]):
        case = case_of(row, queries, keys, window=window)
        checked(row, case, make_inputs(case, seed=queries), window=window)


@rows
def test_split_keys_merge_by_the_log_sum_exp(row: Row) -> None:
    """flash-attn's split keys: two halves, each with its log-sum-exp, are the whole."""
    length = by_row(row, [33], [97], [513])[0]
    case = case_of(row, 3, length, grad=False)
    inputs = make_inputs(case, seed=6)
    parts = [slice(0, length // 3), slice(length // 3, length)]
    found = [
        attention(inputs.q, inputs.k[:, :, part], inputs.v[:, :, part], return_lse=True, impl=row.name)
        for part in parts
    ]
    whole = torch.stack([lse for _, lse in found]).logsumexp(dim=0)
    merged = sum(o.double() * (lse - whole).exp().unsqueeze(-1) for o, lse in found)
    assert_within_budget(Oracle(case, inputs).error_ratios({"o": merged.to(inputs.q.dtype), "lse": whole}))


# Repeats, graphs, refusals -------------------------------------------------------------------------------------------


@rows
@causals
def test_repeats_have_the_same_bits(row: Row, causal: bool) -> None:
    """flash-attn's races and deterministic backwards: many batch entries, forward and backward, again and again."""
    batch, times = by_row(row, [(2, 2)], [(4, 5)], [(60, 100)])[0]
    for queries, keys in by_row(row, [(17, 33)], [(97, 97)], [(1, 239), (239, 1), (257, 257), (1024, 128)]):
        case = case_of(row, queries, keys, batch=batch, heads=4, kv_heads=4, causal=causal)
        inputs = make_inputs(case, seed=0)
        first = row.run(case, inputs)
        for _ in range(times):
            assert all(torch.equal(x, first[name]) for name, x in row.run(case, inputs).items())


@on_gpus
@causals
def test_a_cuda_graph_gives_the_same_bits_and_reads_new_inputs(row: Row, causal: bool) -> None:
    """torch: captured forward and backward, replayed."""
    case = case_of(row, 256, 512, 64, batch=2, causal=causal)
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
def test_tensors_that_do_not_fit_together_are_refused(row: Row) -> None:
    """torch's failure modes: dtypes, ranks, batches and head dimensions that differ, and two devices."""
    q = torch.randn(2, 4, 8, 16, device=row.device)
    bad: list[tuple[tuple[Tensor, Tensor, Tensor], str]] = [
        ((q, q.half(), q.half()), "q, k, v must have one dtype"),
        ((q[0, 0, 0], q[0, 0], q[0, 0]), "q, k, v must have one rank of at least 3"),
        ((q[:1], q, q), "q and k must have the same batch dimensions"),
        ((q, q[..., :8], q), "q and k must have one head dimension"),
        ((q, q[:, :3], q[:, :3]), r"query heads \(4\) must be a multiple of key/value heads \(3\)"),
        ((q, q, q[:, :, :4]), "k and v must have one shape"),
        ((q.to(torch.int32), q.to(torch.int32), q.to(torch.int32)), "q, k, v must have one dtype"),
    ]
    if row.device == "cuda":
        bad.append(((q, q.cpu(), q.cpu()), "q, k, v must be on one device"))
    for inputs, message in bad:
        with pytest.raises(ValueError, match=message):
            attention(*inputs, impl=row.name)


@rows
def test_a_row_that_cannot_run_a_case_says_why(row: Row) -> None:
    """torch: a forced backend refuses a mask, a dtype or a head dimension, and no other backend replaces it."""
    q = torch.randn(1, 1, 8, 16, device=row.device)
    with pytest.raises(ValueError, match=f"{row.name}.*mask"):
        attention(q, q, q, mask=torch.ones(8, 8, dtype=torch.bool, device=row.device), impl=row.name)
    if row.name == "flash_triton":
        with pytest.raises(ValueError, match="float64 has no tensor-core path"):
            attention(*3 * [q.double()], impl=row.name)
        wide = torch.randn(1, 1, 8, 257, device=row.device)
        with pytest.raises(ValueError, match="head_dim 257 is above 256"):
            attention(wide, wide, wide, impl=row.name)
