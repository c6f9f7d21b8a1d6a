"""Laws of attention: properties that every row of the table must have, in its result and in all gradients.

`law` (`tests/support/attention_rows.py`) calls a test for each row that this machine can run, with drawn cases and
seeds. A new row is tested without a change here.
"""

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import assume

from lmsys.attention import ATTENTION, AttentionCase, Pattern, attention
from lmsys.attention.flash_torch import FlashTorch
from lmsys.measure.compare import release_memory
from lmsys.testing import Inputs, Oracle, make_inputs, run, saved_lse
from tests.support.attention_rows import (
    KEEPS_LSE,
    Row,
    assert_agree,
    assert_within_budget,
    law,
    quantised_inputs,
    skip_unless_it_runs,
)
from tests.support.variants import few_by_default

# Rows whose tile can be chosen, and sizes (queries, keys) to choose; the first row's tiles are square.
TILES = {
    "flash_torch": [(16, 16), (32, 32), (64, 64), (128, 128)],
    "flash_triton": [(16, 16), (32, 16), (16, 64), (64, 32)],
    "flash_cuda": [(64, 16), (128, 32)],  # each is compiled for seconds
}


def with_tile(row: Row, size: tuple[int, int]) -> Callable[..., torch.Tensor]:
    """The function of a row, with tiles of `size` (queries, keys) instead of those that it chooses."""

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None,
        pattern: Pattern | None = None,
    ) -> torch.Tensor:
        if row.name == "flash_torch":
            return FlashTorch.apply(q, k, v, causal, scale, size[0], pattern)
        if row.name == "flash_cuda":
            from lmsys.attention import flash_cuda

            tile = flash_cuda.Tile(*size, warps=4, at_once=16, kept=False, blocks=1)
            owns_keys = tile._replace(block_q=tile.block_k, block_k=tile.block_q)
            return flash_cuda.FlashCuda.apply(q, k, v, causal, scale, flash_cuda.Tiles(tile, tile, owns_keys), pattern)
        from lmsys.attention.flash_triton import FlashTriton
        from lmsys.attention.tuning import Tile

        return FlashTriton.apply(q, k, v, causal, scale, Tile(*size, 4, 1), pattern)

    return call


def split(inputs: Inputs, at: int, dim: int, *names: str) -> tuple[Inputs, Inputs]:
    """The inputs with the tensors `names` cut in two along `dim`."""
    first = {name: getattr(inputs, name).narrow(dim, 0, at) for name in names}
    second = {name: (x := getattr(inputs, name)).narrow(dim, at, x.shape[dim] - at) for name in names}
    return replace(inputs, **first), replace(inputs, **second)


@law(compiled_on_cpu=True)
def test_matches_the_oracle(row: Row, case: AttentionCase, seed: int) -> None:
    """o, dq, dk, dv and the saved log-sum-exp, at any length, grouped or not, on views, at several scales."""
    scale = row.scale(case, seed)
    inputs = make_inputs(case, seed, memory="" if seed % 2 else "transposed")
    before = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.do)]
    outputs = row.run(case, inputs, scale=scale)
    assert_within_budget(Oracle(case, inputs, scale).error_ratios(outputs, rms=not row.has_float32))
    assert all(torch.equal(x, y) for x, y in zip(before, (inputs.q, inputs.k, inputs.v, inputs.do), strict=True))
    assert outputs["o"].dtype == inputs.q.dtype and outputs["o"].shape == inputs.q.shape
    if row.name in KEEPS_LSE and case.grad:
        assert outputs["lse"].dtype == torch.promote_types(inputs.q.dtype, torch.float32)


@law()
def test_values_of_one_give_one(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = make_inputs(case, seed, std=2.0)
    inputs.v.fill_(1.0)
    o = row.run(replace(case, grad=False), inputs)["o"]
    error = (o.double() - 1).abs().max().item() / torch.finfo(o.dtype).eps
    assert error <= 4 + case.keys**0.5  # the sum of K weights, each rounded


@law(compiled_on_cpu=True)
def test_large_logits_stay_finite(row: Row, case: AttentionCase, seed: int) -> None:
    """Logits in the hundreds, far beyond what exp can hold; o stays within the values."""
    inputs = make_inputs(case, seed, std=16.0)
    outputs = row.run(case, inputs)
    assert all(bool(x.isfinite().all()) for x in outputs.values())
    largest = inputs.v.abs().max().item()
    assert outputs["o"].abs().max().item() <= largest * (1 + 4 * torch.finfo(inputs.q.dtype).eps)


@law(square=True, causal=True)
def test_a_causal_prefix_does_not_change(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = make_inputs(case, seed)
    length = max(1, seed % case.queries)
    forward = replace(case, grad=False)
    assume(row.why_not(replace(forward, queries=length, keys=length)) is None)
    prefix, _ = split(inputs, length, 2, "q", "k", "v", "do")
    whole, part = row.run(forward, inputs)["o"], row.run(forward, prefix)["o"]
    assert_agree({"o": whole[:, :, :length]}, {"o": part}, *2 * [Oracle(forward, inputs)])


@law()
def test_one_vector_added_to_all_keys_changes_nothing(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = quantised_inputs(case, seed)
    shift = inputs.k[:1, :1, :1].neg()
    moved = replace(inputs, k=inputs.k + shift)
    forward = row.run(case, inputs), row.run(case, moved)
    for outputs in forward:
        outputs.pop("lse", None)  # moves by q · shift
    assert_agree(*forward, Oracle(case, inputs), Oracle(case, moved))


@law(causal=False)
def test_the_order_of_keys_does_not_matter(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = make_inputs(case, seed)
    order = torch.randperm(case.keys, generator=torch.Generator().manual_seed(seed)).to(case.device)
    found = row.run(case, replace(inputs, k=inputs.k[:, :, order], v=inputs.v[:, :, order]))
    expected = row.run(case, inputs)
    expected |= {name: expected[name][:, :, order] for name in expected.keys() & {"dk", "dv"}}
    assert_agree(found, expected, *2 * [Oracle(case, inputs)])


@law(batch=2, heads=2, kv_heads=2)
def test_batch_entries_and_heads_are_independent(row: Row, case: AttentionCase, seed: int) -> None:
    inputs, other = make_inputs(case, seed), make_inputs(case, seed + 1)
    for name in ("q", "k", "v", "do"):
        getattr(other, name)[1, 0] = getattr(inputs, name)[1, 0]
    outputs = [{name: x[1, 0] for name, x in row.run(case, drawn).items()} for drawn in (inputs, other)]
    assert_agree(*outputs, Oracle(case, inputs), Oracle(case, other))


@law(heads=4, kv_heads=2)
def test_grouped_heads_equal_repeated_keys(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = make_inputs(case, seed)
    repeated = replace(inputs, **{name: getattr(inputs, name).repeat_interleave(2, dim=1) for name in "kv"})
    expected = row.run(replace(case, kv_heads=4), repeated)
    for name in expected.keys() & {"dk", "dv"}:
        expected[name] = expected[name].double().unflatten(1, (2, 2)).sum(dim=2)
    oracle, ungrouped = Oracle(case, inputs), Oracle(replace(case, kv_heads=4), repeated)
    # Each of the two summed gradients may be wrong by its budget.
    assert_agree(row.run(case, inputs), expected, oracle, ungrouped, ungrouped)


@law(only=KEEPS_LSE, causal=False)
def test_split_keys_merged_by_log_sum_exp_equal_the_whole(row: Row, case: AttentionCase, seed: int) -> None:
    case = replace(case, keys=case.keys + 1)
    inputs = make_inputs(case, seed)
    whole = row.run(case, inputs)
    parts = split(inputs, 1 + seed % (case.keys - 1), 2, "k", "v")
    first, second = (row.run(case, part) for part in parts)
    lse = torch.logaddexp(first["lse"].double(), second["lse"].double())
    merged = sum(part["o"].double() * (part["lse"] - lse).exp().unsqueeze(-1) for part in (first, second))
    oracles = [Oracle(case, inputs), *(Oracle(replace(case, keys=part.k.shape[2]), part) for part in parts)]
    assert_agree({"o": merged, "lse": lse}, {"o": whole["o"], "lse": whole["lse"]}, *oracles)


@law(only=tuple(TILES), head_dim=64)
def test_the_tile_size_does_not_matter(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = make_inputs(case, seed)
    oracle = Oracle(case, inputs)
    for size in TILES[row.name]:
        ratios = oracle.error_ratios(run(with_tile(row, size), inputs, causal=case.causal, grad=case.grad))
        assert max(ratios.values()) <= 1, (size, ratios)


@law(only=KEEPS_LSE)
def test_repeats_are_bitwise_equal(row: Row, case: AttentionCase, seed: int) -> None:
    """In torch's deterministic mode every sum has one order: rows use no atomic additions, or make them take turns."""
    inputs = make_inputs(case, seed)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # matmuls ask for CUBLAS_WORKSPACE_CONFIG
    try:
        first, second = row.run(case, inputs), row.run(case, inputs)
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(first[name], second[name]) for name in first)


@law(heads=1, kv_heads=1)
def test_three_dimensions_equal_four(row: Row, case: AttentionCase, seed: int) -> None:
    inputs = make_inputs(case, seed)
    flat = [x[:, 0] for x in (inputs.q, inputs.k, inputs.v)]
    with torch.no_grad():
        o = attention(*flat, causal=case.causal, impl=row.name)
        expected = attention(inputs.q, inputs.k, inputs.v, causal=case.causal, impl=row.name)
    assert o.shape == flat[0].shape
    assert_agree({"o": o.unsqueeze(1)}, {"o": expected}, *2 * [Oracle(case, inputs, grad=False)])


@pytest.mark.parametrize("shape", [(2, 50, 16), (2, 3, 50, 16), (2, 2, 3, 50, 16)])
def test_flash_torch_apply_takes_any_rank_and_keeps_one_log_sum_exp(shape: tuple[int, ...]) -> None:
    """CS336's tests call `.apply(q, k, v, is_causal)`, and then look for one saved tensor of shape q.shape[:-1]."""
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(3))
    o = FlashTorch.apply(q, k, v, True)
    lse = saved_lse(o, q)
    o.sum().backward()
    assert o.shape == q.shape and all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))
    scores = (q @ k.mT * shape[-1] ** -0.5).masked_fill(~torch.ones(50, 50, dtype=torch.bool).tril(), float("-inf"))
    assert lse.dtype == torch.float32
    assert (lse - scores.logsumexp(-1)).abs().max() <= 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("causal", few_by_default([True, False], one_in=2))
def test_float64_gradients_are_those_of_finite_differences(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 7, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(partial(_apply_with_tile_of_two, causal=causal), (q, k, v))


def _apply_with_tile_of_two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return FlashTorch.apply(q, k, v, causal, None, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["flash_torch", "flash_triton", "flash_cuda", "flash_gluon"])
def test_very_long_sequences(name: str, dtype: str) -> None:
    """65,536 queries and keys: a matrix of scores would be 16 GiB for each head."""
    row = Row(name, "cuda")
    case = row.case(heads=1, kv_heads=1, queries=65536, keys=65536, head_dim=128, dtype=dtype, causal=True, grad=True)
    skip_unless_it_runs(row, case)
    inputs = make_inputs(case, 0)
    assert_within_budget(Oracle(case, inputs).error_ratios(row.run(case, inputs)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_triton", "flash_cuda"])
def test_a_backward_may_be_the_first_cuda_work_of_its_thread(name: str) -> None:
    """Autograd runs backwards in threads of its own, which may have no CUDA context yet."""
    case = Row(name, "cuda").case(queries=128, keys=128, head_dim=64)
    if reason := ATTENTION[name].why_not(case):
        pytest.skip(reason)
    module = importlib.import_module(f"lmsys.attention.{name}")
    _forward, _backward = module._forward, module._backward

    x = make_inputs(case, 0)
    o, lse = _forward(x.q, x.k, x.v, True, 0.125)
    arguments = x.q, x.k, x.v, o, lse, x.do, True, 0.125, None
    torch.cuda.synchronize()
    with ThreadPoolExecutor(max_workers=1) as fresh_thread:
        found = fresh_thread.submit(_backward, *arguments).result()
    assert all(torch.equal(one, other) for one, other in zip(found, _backward(*arguments), strict=True))


def test_calls_from_two_threads_leave_torchs_choice_of_kernels_as_it_was() -> None:
    """torch's `sdpa_kernel` sets flags of the whole process. Without turns one pair of calls in ten left them off."""
    x = torch.randn(1, 2, 16, 32)
    calls = [partial(attention, x, x, x, impl="sdpa_math"), partial(attention, x, x, x, impl="sdpa_flash")]
    for _ in range(70):
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(call) for call in calls]:
                done.result()
        flags = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
        assert flags == (True, True)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["flash_torch", "flash_triton", "flash_cuda", "flash_gluon"])
def test_tensors_of_more_than_2_to_the_31_elements(name: str, transposed: bool) -> None:
    row = Row(name, "cuda")
    case = row.case(batch=192, heads=96, kv_heads=96, queries=1024, keys=1024, head_dim=128, causal=True, grad=True)
    skip_unless_it_runs(row, case)
    assert case.batch * case.heads * case.queries * case.head_dim > 2**31
    release_memory()
    if (free := torch.cuda.mem_get_info()[0]) < 120 * 2**30:
        pytest.skip(f"needs 120 GiB of GPU memory to itself; {free / 2**30:.0f} GiB are free")
    inputs = make_inputs(case, 0, memory="transposed" if transposed else "")
    outputs = row.run(case, inputs)
    assert_within_budget(Oracle(case, inputs).error_ratios(outputs))
