"""Helpers of hand-written autograd Functions: to refuse derivatives that they lack, and to ask if torch traces them.

The Functions of `lmsys.attention` and `lmsys.model` use this module. With `--against` an earlier state of the code uses
its own version of this file (`lmsys.bench.checkout.ROWS`).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd Function without second derivatives: RuntimeError with create_graph=True.

    Under create_graph=True torch runs a backward with gradients enabled; the decorated function checks for that.

    torch's own `once_differentiable` raises only when a second backward reaches the Function's node in the graph. A
    `torch.autograd.grad` for other inputs never visits that node, and silently counts its derivatives as zero.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # torch names the class of ctx after the Function, with "Backward" behind the name.
            raise RuntimeError(
                f"{type(ctx).__name__.removesuffix('Backward').lstrip('_')} is differentiable once: its backward cannot"
                " be run with create_graph=True"
            )
        return backward(ctx, *grads)

    return checked


def no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    """The `jvp` of attention Functions without forward-mode derivatives: raises NotImplementedError."""
    raise NotImplementedError("this attention has no forward-mode derivatives (jvp); impl='naive' has them")


def is_transformed() -> bool:
    """True inside of `torch.func.grad`, `vjp`, `vmap` and the like, which transform plain PyTorch operators."""
    return torch._C._are_functorch_transforms_active()


def is_watched() -> bool:
    """True where torch.compile, torch.func or a dispatch mode records or changes the operators that are called.

    Selective checkpointing, counters of operations and fake tensors are dispatch modes. All of these see only calls of
    registered operators.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or is_transformed()
