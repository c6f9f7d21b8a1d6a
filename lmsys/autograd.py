"""Marks of functions whose derivatives are written by hand, where torch.autograd leaves something open."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd Function whose gradients have no derivatives: RuntimeError where they might be taken.

    torch's decorator of this name speaks up only where its own node is reached: `torch.autograd.grad` goes around it on
    the way to its inputs, and the derivatives were taken for zero.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{type(ctx).__name__.removesuffix('Backward').lstrip('_')} is differentiable once: its backward cannot"
                " be run with create_graph=True"
            )
        return backward(ctx, *grads)

    return checked


def no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    """The `jvp` of an autograd Function that has none: NotImplementedError."""
    raise NotImplementedError("this attention has no forward-mode derivatives (jvp); impl='naive' has them")


def is_transformed() -> bool:
    """True inside of `torch.func.grad`, `vjp`, `vmap` and the like, which see into plain PyTorch."""
    return torch._C._are_functorch_transforms_active()


def is_watched() -> bool:
    """True where more than autograd looks at what is called: torch.compile, torch.func, a dispatch mode.

    Selective checkpointing, counters of operations and fake tensors are such modes. All of them see operators alone.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or is_transformed()
