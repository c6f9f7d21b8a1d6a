"""The log-sum-exp of attention as a result with a gradient, and `merge`, which combines partial results by it.

`merge` is public. A *flash row* is an implementation in table.py that `custom_ops.flash` has made. For the options in
NEEDS, it calls its kernels by `attend_with_lse` instead of by its own autograd Function, which has no gradients of the
log-sum-exp, of sinks and of a bias. A new option with a gradient of its own is added to NEEDS and to `WithLse`.

Legend: B batch, H query heads, Q queries, K keys, D head dimension, Dv that of the values.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.pattern import Pattern
from lmsys.autograd import no_forward_mode, once_differentiable

NEEDS = {"return_lse", "sinks", "bias"}  # options under which a flash row is called by `attend_with_lse`


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention over two sets of keys, from the results for each set: o (..., Q, Dv) and lse (..., Q).

    Each pair is what `attention(..., return_lse=True)` returns for the same queries. The result is differentiable in
    all four arguments, and o has the dtype of o1. A query that sees nothing in both sets has zeros and -inf. ValueError
    if shapes do not fit together.
    """
    if not (o1.shape == o2.shape and o1.shape[:-1] == lse1.shape == lse2.shape):
        raise ValueError(
            "o1, lse1, o2, lse2 must be (..., Q, Dv), (..., Q), and again; got shapes"
            f" {[tuple(x.shape) for x in (o1, lse1, o2, lse2)]}"
        )
    top = torch.maximum(lse1, lse2).detach()
    top = top.masked_fill(top == -torch.inf, 0)
    first, second = torch.exp(lse1 - top), torch.exp(lse2 - top)
    total = first + second
    blind = total == 0
    total = total.masked_fill(blind, 1)
    o = o1 * (first / total).unsqueeze(-1) + o2 * (second / total).unsqueeze(-1)
    return o.to(o1.dtype), (top + total.log()).masked_fill(blind, -torch.inf)


class WithLse(torch.autograd.Function):
    """`.apply(kernels, q, k, v, bias, sinks, scale, pattern)` -> (o, log-sum-exp), on 4-D tensors.

    `kernels` is a pair: a forward, and a backward that takes `dlse` and returns the gradient of a bias, if there is
    one, as its fourth result. Kernels know no sinks: these are merged into o and the log-sum-exp afterwards. The
    backward kernel computes the softmax weights from the merged log-sum-exp, and so they are right for all keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        scale: float,
        pattern: Pattern,
    ) -> tuple[Tensor, Tensor]:
        forward, ctx.run = kernels
        o, lse = forward(q, k, v, pattern.causal, scale, pattern=pattern)
        if sinks is not None:
            no_value = o.new_zeros(1).expand_as(o)
            logit = sinks.unsqueeze(-1).to(lse.dtype).expand_as(lse)
            o, lse = merge(o, lse, no_value, logit)
        # The pattern is kept without its bias, which `save_for_backward` keeps.
        ctx.scale, ctx.pattern = scale, replace(pattern, bias=None)
        ctx.save_for_backward(q, k, v, o, lse, bias, sinks, *pattern.read_again)
        return o, lse

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, o, lse, bias, sinks, *_ = ctx.saved_tensors
        do, dlse = grads
        pattern = replace(ctx.pattern, bias=bias)
        dq, dk, dv, *dbias = ctx.run(q, k, v, o, lse, do, pattern.causal, ctx.scale, pattern=pattern, dlse=dlse)
        dsinks = None
        if sinks is not None:
            p = torch.exp(sinks.unsqueeze(-1) - lse)
            delta = (o.to(lse.dtype) * do).sum(dim=-1)
            dsinks = (p * (dlse - delta)).sum(dim=-1).sum_to_size(sinks.shape).to(sinks.dtype)
        # In the order of the arguments of `forward`.
        return None, dq, dk, dv, dbias[0] if dbias else None, dsinks, None, None


def attend_with_lse(eager: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, pattern: Pattern) -> Any:
    """The result of a flash row for a pattern with one of NEEDS: o, or (o, log-sum-exp) with `return_lse`.

    `eager` is the row's autograd Function, whose `kernels` are launched.
    """
    o, lse = WithLse.apply(eager.kernels, q, k, v, pattern.bias, pattern.sinks, scale, pattern)
    return (o, lse) if pattern.return_lse else o
