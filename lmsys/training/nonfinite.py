"""Where a NaN comes from: the first module, in the order of the forward, whose output is not finite."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook


class NonFiniteError(ValueError):
    """The loss is NaN or inf; the message names the step and where it began."""


def first_nonfinite(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """The name and class of the first module whose output holds NaN or inf while `forward` runs, or None."""
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        floating = isinstance(output, Tensor) and output.is_floating_point()
        if module in names and floating and not output.isfinite().all():
            found.append(f"{names[module] or 'the whole'} ({type(module).__name__})")

    eager = torch.compiler.set_stance("force_eager")  # a compiled graph holds no hooks
    with register_module_forward_hook(hook), torch.no_grad(), eager:
        forward()
    return found[0] if found else None
