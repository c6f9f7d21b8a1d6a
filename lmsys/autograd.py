"""Marks backwards that are written by hand, where torch.autograd leaves something open."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd Function whose gradients have no derivatives: RuntimeError where one is taken.

    torch's decorator of this name says so only where the incoming gradient itself can be differentiated. That of a sum
    is a constant, and with `create_graph=True` the derivatives were taken for zero.
    """
    marked = function.once_differentiable(backward)

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = tuple(grad if grad is None else grad.detach().requires_grad_() for grad in grads)
        return marked(ctx, *grads)

    return checked
