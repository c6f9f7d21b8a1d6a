"""q, k and v that are parts of one tensor, as a projection writes them: their gradients are parts of one tensor too.

A later kernel can then read the three gradients as one. `custom_ops.whole_of` finds the tensor whose parts they are,
`custom_ops.gradients_like` makes the gradients.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmsys.attention import ATTENTION
from lmsys.attention.contract import AttentionCase
from lmsys.attention.custom_ops import gradients_like, whole_of
from lmsys.kernels import HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="pip install triton to test its kernels")
sizes = st.tuples(*(st.integers(1, n) for n in (2, 5, 2, 2)), st.sampled_from([4, 8, 16]))  # B, S, Hkv, H / Hkv, D


def parts_of(whole: Tensor, kv_heads: int) -> list[Tensor]:
    """q, k and v (B, H, S, D) as views of (B, S, H + 2 Hkv, D)."""
    heads = whole.shape[2] - 2 * kv_heads
    return [x.transpose(1, 2) for x in whole.split([heads, kv_heads, kv_heads], dim=2)]


def drawn(size: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """(the whole tensor, its parts q, k, v), of random numbers; `size` is one of `sizes`."""
    batch, length, kv_heads, group, head_dim = size
    whole = torch.randn(batch, length, (group + 2) * kv_heads, head_dim, generator=torch.Generator().manual_seed(1))
    return whole, parts_of(whole, kv_heads)


@given(sizes)
def test_the_tensor_is_found_from_its_parts(size: tuple[int, ...]) -> None:
    whole, parts = drawn(size)
    found = whole_of(*parts)
    assert found is not None
    assert (found.data_ptr(), found.shape, found.is_contiguous()) == (whole.data_ptr(), whole.shape, True)


@given(size=sizes, number=st.integers(0, 2))
def test_other_tensors_are_not_taken_for_parts_of_one(size: tuple[int, ...], number: int) -> None:
    """One of three is a copy, has fewer rows, or is expanded over columns; or k and v are exchanged or elsewhere."""
    whole, parts = drawn(size)
    part = parts[number]
    for other in (part.clone(), part[:, :, :-1], part[..., :1].expand_as(part)):
        assert whole_of(*(other if index == number else x for index, x in enumerate(parts))) is None
    assert whole_of(parts[0], parts[2], parts[1]) is None
    parts_of_a_copy = parts_of(whole.clone(), size[2])
    assert whole_of(parts[0], *parts_of_a_copy[1:]) is None


@given(sizes)
def test_gradients_are_parts_of_one_tensor_if_their_inputs_are(size: tuple[int, ...]) -> None:
    _, parts = drawn(size)
    of_parts = gradients_like(*parts, torch.empty_like)
    assert whole_of(*of_parts) is not None
    of_copies = gradients_like(*(x.clone() for x in parts), torch.empty_like)
    assert whole_of(*of_copies) is None
    for gradients in (of_parts, of_copies):
        assert [x.shape for x in gradients] == [x.shape for x in parts]


def test_gradients_are_separate_if_no_descriptor_can_address_them() -> None:
    """Kernels read tensors by descriptors, which need rows of a multiple of 16 bytes. Two float32 are 8 bytes."""
    _, parts = drawn((1, 3, 1, 1, 2))
    assert whole_of(*gradients_like(*parts, torch.empty_like)) is None


def assert_same_bits(whole: Tensor, kv_heads: int, run: Callable[..., Sequence[Tensor]]) -> None:
    """`run`(q, k, v), which returns o and three gradients, gives equal bits for parts of one tensor and for copies."""
    results = []
    for copies in (False, True):
        o, *grads = run(*(x.clone() if copies else x for x in parts_of(whole, kv_heads)))
        assert (whole_of(*grads) is None) == copies
        results.append([o, *grads])
    assert all(map(torch.equal, *results))


def run_of_row(name: str) -> Callable[..., Sequence[Tensor]]:
    """A function (q, k, v) -> (o, dq, dk, dv) of the row."""

    def run(*parts: Tensor) -> Sequence[Tensor]:
        leaves = [x.detach().requires_grad_() for x in parts]
        o = ATTENTION[name].load()(*leaves, causal=True)
        return o, *torch.autograd.grad(o, leaves, torch.ones_like(o))

    return run


@needs_triton
@settings(max_examples=5)
@given(size=sizes, dtype=st.sampled_from([torch.float32, torch.float16]))
def test_flash_triton_has_the_same_bits_for_parts_and_copies(
    size: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    size = (*size[:4], 16)
    assert_same_bits(drawn(size)[0].to(device, dtype), size[2], run_of_row("flash_triton"))


@needs_triton
def test_operators_return_results_in_the_layout_that_they_declare(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom operator declares the layout of its results to torch.compile: no result has to be copied into it."""
    from lmsys.attention import custom_ops, flash_triton

    def laid_out(x: Tensor) -> Tensor:
        """In place of the function that copies a result unless it has the declared layout."""
        assert x.transpose(1, 2).is_contiguous()
        return x

    monkeypatch.setattr(custom_ops, "_laid_out", laid_out)
    monkeypatch.setattr(custom_ops, "is_watched", lambda: True)
    leaves = [x.detach().requires_grad_() for x in parts_of(drawn((2, 40, 1, 2, 16))[0].to(device), 1)]
    o = flash_triton.flash_triton(*leaves, causal=True, scale=0.25)
    torch.autograd.grad(o, leaves, torch.ones_like(o))


@needs_triton
def test_flash_gluon_in_a_simulation_has_the_same_bits_for_parts_and_copies() -> None:
    from lmsys.attention.flash_gluon import launch
    from lmsys.kernels.tritons import KNOWN_TRITON, is_known
    from tests.support.gluon_simulator import simulated

    if not is_known():
        pytest.skip(f"pip install triton=={KNOWN_TRITON[0]}, for which it is written")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        with simulated():
            o, lse = launch._forward(q, k, v, True, 0.125)
            return o, *launch._backward(q, k, v, o, lse, torch.ones_like(o), True, 0.125, True)

    assert_same_bits(drawn((2, 150, 1, 2, 64))[0].half(), 1, run)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_gluon_has_the_same_bits_for_parts_and_copies(head_dim: int) -> None:
    capability = torch.cuda.get_device_capability()
    case = AttentionCase(2, 4, 2, 300, 300, head_dim, "bfloat16", True, True, "cuda", capability)
    if reason := ATTENTION["flash_gluon"].why_not(case):
        pytest.skip(reason)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(drawn((2, 300, 2, 2, head_dim))[0].to("cuda", torch.bfloat16), 2, run_of_row("flash_gluon"))
    finally:
        torch.use_deterministic_algorithms(before)
