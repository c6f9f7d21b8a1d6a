"""Tensors side by side in a flat one."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lmsys.parallel.buckets import offsets


def views_of(flat: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Views of flat (N,) with the shapes of `like`, each from its start on."""
    return [flat.as_strided(x.shape, _strides(x.shape), start) for x, start in zip(like, starts, strict=True)]


@lru_cache(maxsize=1024)
def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@torch.no_grad()
def pack(params: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Copies gradients into a new flat tensor of `dtype`, zero where there is none: it, and the view for each.

    No copy where they already are views of such a tensor, as after `zero_grad(set_to_none=False)`.
    """
    starts, length = offsets([p.numel() for p in params])
    flat = _whole(params, starts, length, dtype)
    if flat is not None:
        return flat, [p.grad for p in params if p.grad is not None]
    flat = params[0].new_empty(length, dtype=dtype)
    views = views_of(flat, params, starts)
    copy_gradients(params, views)
    return flat, views


def copy_gradients(params: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Into `views`, in one kernel; zero where a parameter has no gradient."""
    there = [(view, p.grad) for p, view in zip(params, views, strict=True) if p.grad is not None]
    if there:
        torch._foreach_copy_([view for view, _ in there], [grad for _, grad in there])
    if len(there) < len(params):
        torch._foreach_zero_([view for p, view in zip(params, views, strict=True) if p.grad is None])


def _whole(params: Sequence[Tensor], starts: Sequence[int], length: int, dtype: torch.dtype) -> Tensor | None:
    """The flat tensor of which all gradients are views, each in its place; None when there is no such."""
    first = params[0].grad
    flat = None if first is None else first._base
    if flat is None or flat.dim() != 1 or flat.numel() != length or flat.dtype != dtype:
        return None
    for p, start in zip(params, starts, strict=True):
        grad = p.grad
        if grad is None or grad._base is not flat or grad.storage_offset() != start or not grad.is_contiguous():
            return None
    return flat
