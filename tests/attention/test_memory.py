"""The memory layout of inputs, gradients and `key_lengths` never changes a result; empty inputs and extreme values.

`law` makes a function of (row, case, seed) a test of every row on drawn cases (tests/support/attention_rows.py).
"""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from lmsys.attention import AttentionCase, attention
from lmsys.attention.contract import aligned, with_aligned_gradient
from lmsys.testing import MEMORY, Oracle, make_inputs, run
from tests.support.attention_rows import Row, assert_within_budget, law
from tests.support.patterns import make_pattern, patterned


@law()
def test_rows_read_inputs_and_gradients_of_any_layout(row: Row, case: AttentionCase, seed: int) -> None:
    memory = [*MEMORY][seed % len(MEMORY)]
    inputs = make_inputs(case, seed, memory=memory)
    ratios = Oracle(case, inputs).error_ratios(row.run(case, inputs))
    assert max(ratios.values()) <= 1, (memory, ratios)


@law(of=patterned, key_lengths=True, batch=2)
def test_key_lengths_have_any_layout(row: Row, case: AttentionCase, seed: int) -> None:
    inputs, pattern = make_inputs(case, seed), make_pattern(case, seed)
    room = torch.tensor([[0, case.keys, 0]] * case.batch, device=case.device)
    for lengths in (room[:, 1], room[0, 1:2].expand(case.batch)):  # strides of 3 and of 0
        pattern = replace(pattern, key_lengths=lengths)
        assert_within_budget(Oracle(case, inputs, pattern=pattern).error_ratios(row.run(case, inputs, pattern=pattern)))


@given(
    shape=st.tuples(*[st.integers(1, 3)] * 3, st.sampled_from([1, 4, 8, 15, 16])),
    more=st.integers(0, 9),
    offset=st.integers(0, 9),
    order=st.permutations([0, 1, 2]),
    expands=st.sets(st.integers(0, 3)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_aligned_copies_tensors_whose_rows_are_not_aligned(
    shape: tuple[int, ...], more: int, offset: int, order: list[int], expands: set[int], dtype: torch.dtype
) -> None:
    """x begins at element `offset` of a buffer, has `more` elements between rows, and strides of 0 for `expands`."""
    sizes = [1 if at in expands else n for at, n in enumerate(shape)]
    room = torch.randn(*(sizes[at] for at in order), sizes[3] + more).to(dtype)
    flat = torch.cat([torch.zeros(offset, dtype=dtype), room.flatten()])[offset:].view(room.shape)
    x = flat[..., : sizes[3]].permute(*(order.index(at) for at in range(3)), 3).expand(shape)
    found = aligned(x)
    assert torch.equal(found, x)
    assert found.data_ptr() % 16 == 0 and 0 not in [s for s, n in zip(found.stride(), shape, strict=True) if n > 1]
    if not found.is_contiguous():
        assert all(n == 1 or s * x.element_size() % 16 == 0 for s, n in zip(x.stride()[:3], shape[:3], strict=True))
    steps = [step * x.element_size() for step in x.stride()[:3]]
    fits = x.is_contiguous() or (x.stride(3) == 1 and all(step and step % 16 == 0 for step in steps))
    assert (found is x) == (fits and x.data_ptr() % 16 == 0)
    if found is not x:
        assert found.is_contiguous()


class Probe(torch.autograd.Function):
    """Keeps the gradient that reaches its backward, as `Probe.found`."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        Probe.found = grads[0]
        return grads[0]


def test_a_gradient_is_aligned_before_a_backward_reads_it() -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    with_aligned_gradient(Probe.apply(x)).sum().backward()
    assert Probe.found.is_contiguous()
    rows = torch.randn(2, 3, 9)[..., 1:]
    with_aligned_gradient(Probe.apply(x)).backward(rows)
    assert Probe.found.is_contiguous() and torch.equal(Probe.found, rows)
    right = torch.randn(3, 2, 8).transpose(0, 1)
    with_aligned_gradient(Probe.apply(x)).backward(right)
    assert Probe.found.data_ptr() == right.data_ptr()


@pytest.mark.parametrize("impl", ["auto", "naive", "vectorized", "flash_torch", "flash_triton", "sdpa", "sdpa_flash"])
def test_a_head_dimension_of_one_has_any_stride(impl: str) -> None:
    q, k, v = (torch.randn(2, 3, 1, 8, requires_grad=True) for _ in range(3))
    found = attention(q.mT, k.mT, v.mT, causal=True, impl=impl)
    expected = attention(*(x.reshape(2, 3, 8, 1) for x in (q, k, v)), causal=True, impl=impl)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, *(torch.autograd.grad(o.sum(), (q, k, v)) for o in (found, expected))))


EMPTY = [  # (shape of q, shape of k and v)
    ((2, 3, 0, 8), (2, 3, 5, 8)),
    ((2, 4, 5, 8), (2, 2, 0, 8)),
    ((0, 3, 5, 8), (0, 3, 5, 8)),
    ((0, 2, 3, 5, 8), (0, 2, 3, 5, 8)),
    ((2, 5, 8), (2, 0, 8)),
]


@pytest.mark.parametrize(("of_q", "of_k"), EMPTY)
@pytest.mark.parametrize("impl", ["auto", "naive", "flash_torch", "flash_triton", "sdpa"])
def test_without_queries_keys_or_entries_there_is_nothing_to_compute(
    impl: str, of_q: tuple[int, ...], of_k: tuple[int, ...]
) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in (of_q, of_k, of_k))
    for options in ({}, {"causal": True}, {"causal": True, "window": 3}):
        o = attention(q, k, v, impl=impl, **options)
        grads = torch.autograd.grad(o.sum(), (q, k, v))
        assert o.shape == q.shape and not o.any() and not any(x.any() for x in grads)


@pytest.mark.parametrize("impl", ["auto", "naive", "vectorized", "flash_torch", "flash_triton", "sdpa"])
def test_scores_beyond_float16_do_not_become_infinite(impl: str) -> None:
    """All scores are 80 · 256² / √80, about 586,000; float16 ends at 65,504."""
    q, k, v = (torch.full((1, 2, 8, 80), 256.0, dtype=torch.float16) for _ in range(3))
    assert torch.equal(attention(q, k, v, impl=impl), v)


@pytest.mark.parametrize("impl", ["auto", "naive", "vectorized", "flash_torch", "flash_triton"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("softcap", [1e5, 1e12, 3e38])
def test_a_softcap_may_be_huge(impl: str, dtype: str, softcap: float) -> None:
    case = AttentionCase(batch=1, heads=2, kv_heads=2, queries=9, keys=9, head_dim=16, dtype=dtype, grad=True)
    inputs = make_inputs(case, 0)
    found = run(lambda q, k, v, **_: attention(q, k, v, softcap=softcap, impl=impl), inputs)
    assert max(Oracle(case, inputs).error_ratios(found).values()) <= 1
