"""Ideas of Liger-Kernel's tests of its cross-entropies, restated for ours.

Source: linkedin/Liger-Kernel, test/transformers/test_cross_entropy.py and test_fused_linear_cross_entropy.py.
docs/kernel.md lists which of them do not apply; those on z-losses and weights of tokens are in the law of
test_loss_options.py. `of_head` and `of_logits` call our two losses on equal inputs.

Legend: N tokens, V vocabulary, M d_model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.model.loss import IGNORED, REDUCTIONS, cross_entropy, linear_cross_entropy
from lmsys.testing import error_ratio
from tests.model.test_loss_options import formula

WIDTH = 32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = {"cpu": [(24, 96), (47, 31)], "cuda": [(512, 4096), (423, 32_000), (1269, 123)]}
DTYPES = torch.float32, torch.bfloat16, torch.float16
Loss = Callable[..., Any]


def of_head(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
    return linear_cross_entropy(hidden, weight, targets, max(1, len(targets) // 3), **options)


def of_logits(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
    return cross_entropy(F.linear(hidden, weight), targets, **options)


LOSSES = [of_head, of_logits]
both = pytest.mark.parametrize("loss", LOSSES)
everywhere = pytest.mark.parametrize("device", DEVICES)


def drawn(device: str, tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (N, M), weight (V, M), targets (N); logits are about standard normal."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, WIDTH).to(dtype), (torch.randn(vocabulary, WIDTH) * WIDTH**-0.5).to(dtype)
    return hidden.to(device), weight.to(device), torch.randint(vocabulary, (tokens,)).to(device)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, /, softcap: float | None = None, **options: Any) -> Tensor:
    """torch's cross-entropy, from logits in at least float32."""
    logits = F.linear(hidden, weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide if softcap is None else softcap * torch.tanh(wide / softcap), targets, **options)


def results(call: Loss, dtype: torch.dtype, inputs: Sequence[Tensor], /, upstream: float = 1.0, **options: Any) -> Any:
    """[the loss, the gradients of hidden states and of the weight], computed in `dtype`.

    The gradient that comes in is `upstream` times a factor that differs from token to token.
    """
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:2]]
    value = call(*leaves, inputs[2], **options)
    factors = torch.linspace(0.5, 1.5, value.numel(), device=value.device).view(value.shape)
    return [value.detach(), *torch.autograd.grad(value, leaves, (upstream * factors).to(value.dtype))]


def agree(results: Sequence[Tensor], exact: Sequence[Tensor], low: Sequence[Tensor], dtype: torch.dtype) -> None:
    """AssertionError unless each tensor is as exact as `low`, the result of plain PyTorch, rounded to `dtype`."""
    for x, reference, lost in zip(results, exact, low, strict=True):
        assert error_ratio(x, reference, lost.to(dtype)) <= 1


# Values and gradients, one option after another and some together; test_loss_options.py has the others ----------------


SMOOTHED = {"label_smoothing": 0.1, "ignore_index": 1}
OPTIONS: list[dict[str, Any]] = [
    *({"reduction": name} for name in REDUCTIONS),
    *({"reduction": name, "ignore_index": ignored} for name in REDUCTIONS for ignored in (IGNORED, -123, 2)),
    *({"label_smoothing": share, **more} for share in (0.1, 0.5) for more in ({}, {"ignore_index": 1})),
    *({"reduction": name, "softcap": 2.0} for name in REDUCTIONS),
    *({"reduction": name, "upstream": 3 * 0.7310586} for name in ("mean", "sum")),  # it is not the last function
    *({"reduction": name, "upstream": 3 * 0.7310586, "softcap": 5.0, **SMOOTHED} for name in ("mean", "sum")),
]


@both
@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_alone_and_together_equal_torchs(
    loss: Loss, device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Gradients that come in differ from token to token: a loss that uses only the first of them is wrong.

    A third of the targets is ignored where `ignore_index` is given, which may be a class.
    """
    for shape in SHAPES[device]:
        inputs = drawn(device, *shape, dtype)
        if "ignore_index" in options:
            inputs[2][::3] = options["ignore_index"]
        calls = (loss, dtype), (plain, torch.float64), (plain, dtype)
        agree(*(results(call, precision, inputs, **options) for call, precision in calls), dtype)


# Evaluation, dtypes, what is no class --------------------------------------------------------------------------------


@both
@everywhere
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_forward_alone_gives_the_same_and_no_gradient(loss: Loss, device: str, reduction: str) -> None:
    options = {"reduction": reduction, "z_loss": 1e-3, "softcap": 5.0, "return_z_loss": True}
    hidden, weight, targets = drawn(device, *SHAPES[device][1], torch.float32)
    expected = loss(hidden.requires_grad_(), weight.requires_grad_(), targets, **options)
    with torch.no_grad():
        outputs = loss(hidden, weight, targets, **options)
        assert torch.equal(outputs[0], loss(hidden, weight, targets, **options | {"return_z_loss": False}))
    assert all(map(torch.equal, outputs, expected)) and not outputs[0].requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        outputs[0].sum().backward()


@everywhere
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_inside_all_is_float32(device: str, dtype: torch.dtype) -> None:
    """Logits in a narrow dtype give the loss of their float32 copies, and its gradient rounded once."""
    logits = torch.randn(4, 128_256, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    targets = torch.arange(4, device=device) * 1000
    narrow, wide = logits.clone().requires_grad_(), logits.float().requires_grad_()
    values = [cross_entropy(x, targets, label_smoothing=0.1, z_loss=1e-4, softcap=30.0) for x in (narrow, wide)]
    assert torch.equal(*values)
    (of_narrow,), (of_wide,) = (torch.autograd.grad(value, x) for value, x in zip(values, (narrow, wide), strict=True))
    assert of_narrow.dtype == dtype and torch.equal(of_narrow, of_wide.to(dtype))


@everywhere
@pytest.mark.parametrize("ignore_index", [2, -123])
@pytest.mark.parametrize("target", [96, -1, -99, IGNORED])
def test_a_target_out_of_bounds_is_an_error_or_nan(device: str, ignore_index: int, target: int) -> None:
    """On a GPU the loss of the head is NaN instead, since an error would have to wait for the GPU."""
    inputs = drawn(device, 24, 96, torch.bfloat16)
    inputs[2][:8], inputs[2][8:12] = ignore_index, target
    if device == "cuda":
        losses = of_head(*inputs, ignore_index=ignore_index, reduction="none")
        assert losses.isnan().tolist() == [8 <= token < 12 for token in range(24)]
        return
    for loss in LOSSES:
        message = f"targets must be class indices from 0 to 95, or {ignore_index}; got {target}"
        with pytest.raises(ValueError, match=message):
            loss(*inputs, ignore_index=ignore_index)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_at_targets_that_are_all_but_certain(device: str, dtype: torch.dtype, smoothing: float) -> None:
    """There p - 1 cancels. It must be computed before anything is rounded, and be exact relative to its own size."""
    weight = torch.eye(512).to(device, dtype)
    logits = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    targets, rows = torch.arange(128) * 3, torch.arange(128)
    logits[rows, targets] = logits.amax(dim=-1) + 10
    hidden, targets = logits.to(device, dtype), targets.to(device)
    wide = hidden.double().requires_grad_()
    reference = F.cross_entropy(wide, targets, label_smoothing=smoothing, reduction="sum")
    (exact,) = torch.autograd.grad(reference, wide)
    for loss in LOSSES:
        leaf = hidden.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf, weight, targets, label_smoothing=smoothing, reduction="sum"), leaf)
        right = exact[rows, targets]
        relative = (gradient[rows, targets].double() - right).abs() / right.abs()
        assert relative.max() < torch.finfo(dtype).eps


@both
@everywhere
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_under_autocast_from_float32_parameters(loss: Loss, device: str, dtype: torch.dtype) -> None:
    hidden, weight, targets = drawn(device, *SHAPES[device][0], torch.float32)

    def cast(*tensors: Any, call: Loss, **options: Any) -> Any:
        with torch.autocast(device, dtype):
            return call(*tensors, **options)

    inputs, options = (hidden, weight, targets), {"label_smoothing": 0.1, "z_loss": 1e-3}
    tested = results(cast, torch.float32, inputs, call=loss, **options)
    low = results(cast, torch.float32, inputs, call=lambda *x, **o: formula(*x, **o)[0], **options)
    exact = results(lambda *x, **o: formula(*x, **o)[0], torch.float64, inputs, **options)
    assert all(x.dtype == torch.float32 for x in tested)
    logits = F.linear(hidden.to(dtype), weight.to(dtype)).double()  # only the rounding of logits may be lost
    value = cross_entropy(logits, targets, **options)
    if device == "cpu":  # on a CPU both matmuls round alike
        assert error_ratio(tested[0], value, value.float()) <= 1
    agree(tested, exact, low, dtype)
