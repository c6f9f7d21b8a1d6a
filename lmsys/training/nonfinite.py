"""Where a NaN comes from: the first module, in the order of the forward, whose output is not finite."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteError(ValueError):
    """The loss is NaN or inf; the message names the step and where it began."""


def check_loss(loss: Tensor, step: int, model: nn.Module | None = None, again: Callable[[], Any] | None = None) -> None:
    """NonFiniteError, with the step, unless the loss is finite; waits for the device.

    With `model` and `again`, a function that runs the same forward once more, the error also names the first module
    that gave something that is not finite.
    """
    if bool(loss.isfinite().all()):
        return
    where = ""
    if model is not None and again is not None:
        name = first_nonfinite(model, again)
        where = f"; first not finite: {name}" if name else "; every module's output is finite, so it is the loss itself"
    raise NonFiniteError(f"the loss is {loss.item()} at step {step}{where}")


def first_nonfinite(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """The name and class of the first module whose output holds NaN or inf while `forward` runs, or None."""
    eager = torch.compiler.set_stance("force_eager")  # a compiled graph holds no hooks
    with _watched(model) as found, torch.no_grad(), eager:
        forward()
    return found[0] if found else None


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    found: list[str] = []

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
                found.append(f"{name or 'the whole'} ({type(module).__name__})")

        return hook

    handles = [module.register_forward_hook(hook_of(name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
