"""x Wᵀ under autocast, with weight gradients that no rounding to the narrow dtype has touched.

Autocast turns the weights W (O, M) and the input x into copies of a narrow dtype, multiplies those, rounds the weight's
gradient to the narrow dtype too, and widens it again. A matmul unit adds up in float32 anyway: here it writes that
sum, which is more exact, moves fewer bytes and needs no kernel to widen it. And as each weight is copied in any case,
several weights that read one input are copied side by side, for one matmul in place of several.

A weight may have such a copy beside it, as its attribute `rounded`: then that is read, and nothing is cast. Copies that
lie side by side in memory are read as one. The gradient is the weight's all the same, in float32.

Legend: T tokens, M input features, O output features.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.autograd import is_transformed, once_differentiable


def linear(x: Tensor, *weights: Tensor) -> Tensor:
    """x (..., M), weights (O1, M), (O2, M), ... -> (..., O1 + O2 + ...): each x Wᵀ, side by side. Differentiable once.

    Where autocast would cast float32 weights: one matmul in the autocast dtype, and float32 weight gradients, of which
    those of one call are rows of one tensor. Elsewhere `F.linear` for each weight, in the dtype that it is given.
    """
    if (dtype := _cast_to(x, weights)) is not None and not is_transformed():
        return _NarrowLinear.apply(x, dtype, [rounded(w, dtype) for w in weights], *weights)
    return F.linear(x, *weights) if len(weights) == 1 else torch.cat([F.linear(x, w) for w in weights], dim=-1)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives x for a matmul."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The copy of that dtype which is kept beside a weight, where there is one, else the weight itself."""
    copy = getattr(weight, "rounded", None)
    return copy if copy is not None and copy.dtype == dtype else weight


def _cast_to(x: Tensor, weights: Sequence[Tensor]) -> torch.dtype | None:
    """The narrow dtype to which autocast would cast float32 weights, or None."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and all(t.dtype == torch.float32 for t in weights):
        dtype = torch.get_autocast_dtype(device)
        if dtype.itemsize < 4 and x.dtype != torch.float64:  # autocast, too, leaves float64 alone
            return dtype
    return None


class _NarrowLinear(torch.autograd.Function):
    """`sources` have the values of the weights: themselves, or their copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, sources: list[Tensor], *weights: Tensor) -> Tensor:
        narrow, weight = x.reshape(-1, x.shape[-1]).to(dtype), _side_by_side(sources, dtype)  # (T, M), (O, M)
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        kept = sources if all(w.dtype == dtype for w in sources) else [weight]  # copies are there anyway
        ctx.save_for_backward(narrow if any(needs_weights) else None, *(kept if needs_x else ()))
        ctx.wide, ctx.rows = x.dtype, [len(w) for w in weights]
        return (narrow @ weight.mT).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        narrow, *kept = ctx.saved_tensors
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        grad = grads[0].reshape(-1, grads[0].shape[-1])  # (T, O)
        dx, d_weights = None, [None] * len(needs_weights)
        if needs_x:
            weight = _side_by_side(kept, grad.dtype)
            dx = (grad @ weight).to(ctx.wide).view(*grads[0].shape[:-1], weight.shape[-1])
        if any(needs_weights):
            d_weights = wide_mm(grad.mT, narrow).split(ctx.rows)
        return dx, None, None, *(d if need else None for d, need in zip(d_weights, needs_weights, strict=True))


def _side_by_side(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One copy of all rows. A compiler fuses cast and copy by itself; without one, `out` makes them one pass."""
    if len(weights) == 1:
        return weights[0].to(dtype)
    if torch.compiler.is_compiling():
        return torch.cat([w.to(dtype) for w in weights])
    rows, width = sum(len(w) for w in weights), weights[0].shape[-1]
    if all(w.dtype == dtype for w in weights) and _follow_each_other(weights):
        return weights[0].as_strided((rows, width), (width, 1))
    return torch.cat(weights, out=weights[0].new_empty(rows, width, dtype=dtype))


def _follow_each_other(weights: Sequence[Tensor]) -> bool:
    """True for contiguous tensors of one memory, each of which begins where the one before ends."""
    one_memory = len({w.untyped_storage().data_ptr() for w in weights}) == 1
    return (
        one_memory
        and all(w.is_contiguous() for w in weights)
        and all(after.data_ptr() - before.data_ptr() == before.nbytes for before, after in pairwise(weights))
    )


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32 of bfloat16 or float16 a (I, J) and b (J, K); on CUDA rounded nowhere on the way."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a, b).float()
