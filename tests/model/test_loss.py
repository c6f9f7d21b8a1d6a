"""`linear_cross_entropy`: its memory, repeated backwards (retain_graph=True), and targets that are no class."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmsys.measure import memory
from lmsys.model import loss
from lmsys.model.loss import CHUNK_LOGITS, CHUNK_MULTIPLE, linear_cross_entropy

TOKENS, VOCABULARY, WIDTH = 1024, 500, 32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def head(device: str, dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden (T, M), weight (V, M), targets (T,)); the first two are leaves that require gradients."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, device=device).to(dtype).requires_grad_() for n in (tokens, VOCABULARY))
    return hidden, weight, torch.randint(VOCABULARY, (tokens,), device=device)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction: str) -> None:
    hidden, weight, targets = head("cpu")
    value = linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="LinearCrossEntropy is differentiable once"):
        torch.autograd.grad(value, hidden, create_graph=True)


@given(tokens=st.integers(0, 10**6), vocabulary=st.integers(1, 10**6))
def test_chunks_are_even_and_few(tokens: int, vocabulary: int) -> None:
    chunk = loss._even_chunk(tokens, vocabulary)
    needed = math.ceil(tokens * vocabulary / CHUNK_LOGITS)
    assert 1 <= chunk <= max(1, tokens) + CHUNK_MULTIPLE
    assert math.ceil(tokens / chunk) <= max(1, needed)
    if chunk > CHUNK_MULTIPLE:
        assert chunk % CHUNK_MULTIPLE == 0 and (chunk - CHUNK_MULTIPLE) * vocabulary <= CHUNK_LOGITS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(dtype: torch.dtype, device: str) -> None:
    hidden, weight, targets = head(device, dtype)
    value = linear_cross_entropy(hidden, weight, targets, chunk=300)
    first, second, doubled, last = (
        torch.autograd.grad(factor * value, (hidden, weight), retain_graph=keep)
        for factor, keep in ((1, True), (1, True), (2, True), (1, False))
    )
    for x, again, two, end in zip(first, second, doubled, last, strict=True):
        assert torch.equal(x, again) and torch.equal(x, end) and x.count_nonzero()
        if dtype != torch.float16:  # its smallest numbers are rounded, so doubling is not exact
            assert torch.equal(2 * x, two)


@given(width=st.integers(1, 100))
def test_between_rows_of_logits_there_are_zeros(width: int) -> None:
    """Fresh memory here is full of NaN, and some matmuls read between rows: so zeros must be written there."""
    rows = loss._rows(3, width, torch.zeros((), dtype=torch.bfloat16))
    between = rows.as_strided((3, rows.stride(0)), rows.stride())[:, width:]
    assert rows.stride(0) - width < loss.STRIDE_MULTIPLE and rows.stride(0) % loss.STRIDE_MULTIPLE == 0
    assert not between.count_nonzero()


@pytest.mark.parametrize(("reduction", "most"), [("mean", 1.5), ("sum", 1.5), ("none", 1.7)])
def test_forward_and_backward_hold_one_chunk_of_logits_and_one_gradient_of_each(reduction: str, most: float) -> None:
    """The backward of "none", which computes logits again, holds one chunk, too. That of a mean holds no logits."""
    (hidden, weight, targets), chunk = head("cpu"), 64
    step = partial(linear_cross_entropy, hidden, weight, targets, chunk, reduction=reduction)
    peak = memory.peak_bytes(lambda: step().sum().backward(), "cpu")
    assert peak - hidden.nbytes - weight.nbytes < most * 4 * chunk * VOCABULARY
    weight.grad = hidden.grad = None
    value = step()
    assert reduction == "none" or memory.peak_bytes(value.backward, "cpu") < weight.nbytes / 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_holds_one_chunk_of_logits_and_no_gradient(mode: Any) -> None:
    hidden, weight, targets = head("cpu", tokens=64)
    wide = torch.randn(20 * VOCABULARY, WIDTH, requires_grad=True)
    with mode():
        peak = memory.peak_bytes(lambda: linear_cross_entropy(hidden, wide, targets, 1), "cpu")
    assert peak < wide.nbytes / 2
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), targets), hidden)
    assert gradient.count_nonzero()


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [2**17, 2**17 - 1])
def test_memory_on_cuda(vocabulary: int) -> None:
    """Beside gradients, a step holds a chunk of logits, the weight in the autocast dtype, and a few small tensors."""
    weight = torch.randn(vocabulary, WIDTH, device="cuda", requires_grad=True)
    hidden, targets = torch.randn(4096, WIDTH, device="cuda", requires_grad=True), torch.arange(4096, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            linear_cross_entropy(hidden, weight, targets).backward()

    step()
    weight.grad = hidden.grad = None
    above = memory.peak_bytes(step, "cuda") - weight.nbytes - hidden.nbytes
    assert above < 1.02 * (2 * CHUNK_LOGITS + weight.nbytes / 2) + 2**22
