"""`lmsys.model.loss_triton`: the loss's kernel against torch, on a CPU in Triton's interpreter, compiled on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmsys.model.loss import IGNORED, LossOptions, linear_cross_entropy
from lmsys.testing import error_ratio

triton = pytest.importorskip("triton", reason="pip install triton==3.6.0 to run the kernel in its interpreter")
loss_triton = pytest.importorskip("lmsys.model.loss_triton")

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="Triton compiles here: see the cuda test")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
TILE = loss_triton.TILE
EDGES = (1, 2, 15, 16, 17, 511, 512, 513, 1535, 1536, 1537, 10_000, TILE - 1, TILE, TILE + 1, 2 * TILE + 5)
# Triton's interpreter computes bfloat16 wrongly, without a word.
DTYPES = {"cpu": [torch.float32, torch.float16], "cuda": [torch.float32, torch.float16, torch.bfloat16]}


def losses_of(logits: Tensor, labels: Tensor, factors: Tensor | None = None) -> Tensor:
    """The losses of the kernel, which replaces the logits by their gradients."""
    return loss_triton.replace_by_gradient(logits, labels, factors, LossOptions())[0]


def reference(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """torch's loss of each row, and the gradient of their sum."""
    leaf = logits.detach().requires_grad_()
    losses = F.cross_entropy(leaf, labels, ignore_index=IGNORED, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


@pytest.mark.parametrize("device", DEVICES)
def test_loss_and_gradient_equal_those_of_torch(device: str) -> None:
    @settings(max_examples=60 if device == "cuda" else 25)
    @given(
        vocabulary=st.one_of(st.sampled_from(EDGES), st.integers(1, 3000)),
        rows=st.integers(1, 5),
        gap=st.integers(0, 20),
        std=st.sampled_from([0.01, 1.0, 30.0]),
        ignored=st.booleans(),
        dtype=st.sampled_from(DTYPES[device]),
        seed=st.integers(0, 2**31),
    )
    def holds(vocabulary: int, rows: int, gap: int, std: float, ignored: bool, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        room = torch.full((rows + 1, vocabulary + gap), float("nan"), dtype=dtype, device=device)
        logits = room[:rows, :vocabulary].normal_(std=std, generator=generator)
        labels = torch.randint(vocabulary, (2 * rows,), device=device, generator=generator)[::2]
        if ignored:
            labels[:: 1 + seed % 3] = IGNORED
        exact, plain = reference(logits.double(), labels), reference(logits.float(), labels)
        copy = room.clone()[:rows, :vocabulary]  # of one stride, by which the compiler orders the sums of a row
        losses, again = losses_of(logits, labels), losses_of(copy, labels, torch.ones(len(labels), device=device))
        torch.testing.assert_close((again, copy), (losses, logits), rtol=0, atol=0)
        assert losses.dtype == torch.float32 and error_ratio(losses, exact[0], plain[0]) <= 1
        assert error_ratio(logits, exact[1], plain[1].to(dtype)) <= 1
        assert not losses[labels == IGNORED].any() and not logits[labels == IGNORED].any()
        assert room[rows].isnan().all(), "the kernel writes past its last row"

    holds()


@pytest.mark.parametrize("device", DEVICES)
def test_a_label_that_is_no_class_makes_its_row_nan(device: str) -> None:
    logits, labels = torch.ones(4, 40, device=device), torch.tensor([40, -1, IGNORED, 39], device=device)
    losses = losses_of(logits, labels)
    for by_row in (losses, logits.sum(1)):
        assert by_row.isnan().tolist() == [True, True, False, False]


@pytest.mark.gpu
def test_rows_beyond_two_billion_logits() -> None:
    vocabulary, rows = 2**16, 2**15 + 4
    logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device="cuda")
    logits[-1, 7] = 5.0
    labels = torch.full((rows,), 7, device="cuda")
    exact, _ = reference(logits[-2:].double(), labels[-2:])
    losses = losses_of(logits, labels)
    assert error_ratio(losses[-2:], exact, exact.float()) <= 1
    assert torch.equal(logits[0], logits[-2]) and logits[-1, 7] > logits[-2, 7] and (logits[:, 7] < 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_loss_in_chunks_with_the_kernels_and_without(
    dtype: torch.dtype, has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tile divides the vocabulary, some targets are ignored, and the weight has the dtype of the matmuls."""
    monkeypatch.setattr("lmsys.model.loss.HAS_TRITON", has_triton)
    torch.manual_seed(0)
    leaves = [torch.randn(n, 128, device="cuda").to(dtype) for n in (700, 1001)]
    leaves[1] *= 0.1
    targets = torch.randint(1001, (700,), device="cuda")
    targets[::5] = IGNORED

    def results(compute: torch.dtype, chunk: int | None) -> list[Tensor]:
        typed = [x.to(compute).requires_grad_() for x in leaves]
        if chunk:
            value = linear_cross_entropy(*typed, targets, chunk)
        else:
            value = F.cross_entropy(F.linear(*typed), targets, ignore_index=IGNORED)
        return [value.detach(), *torch.autograd.grad(value, typed)]

    exact, plain = results(torch.float64, None), results(dtype, None)
    for chunk in (100, 700):
        for x, ref, low in zip(results(dtype, chunk), exact, plain, strict=True):
            assert error_ratio(x, ref, low) <= 1
