"""Tensors side by side in a flat one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmsys.parallel.buckets import offsets

PART_MULTIPLE = 8  # elements


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a flat one of `length` elements: the shape, strides and start of each.

    It is made once and gives the views of every step's flat tensor, since a step often waits for the host.
    """

    places: tuple[tuple[torch.Size, tuple[int, ...], int], ...]
    length: int

    @classmethod
    def of(cls, like: Sequence[Tensor]) -> "Layout":
        """The layout of tensors like these, one behind the other."""
        return cls.at(like, *offsets([x.numel() for x in like]))

    @classmethod
    def at(cls, like: Sequence[Tensor], starts: Sequence[int], length: int) -> "Layout":
        return cls(tuple((x.shape, _strides(x.shape), start) for x, start in zip(like, starts, strict=True)), length)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors in flat (length,)."""
        return [flat.as_strided(shape, strides, start) for shape, strides, start in self.places]

    def part(self, world_size: int) -> int:
        """Elements of one of world_size equal parts: where an element has 2 bytes or more, multiples of 16 bytes."""
        return -(-self.length // (world_size * PART_MULTIPLE)) * PART_MULTIPLE

    def gaps(self, numel: int) -> list[slice]:
        """The ranges that hold no tensor, in a flat one of `numel` elements, `length` or more."""
        ends = [0, *(start + math.prod(shape) for shape, _, start in self.places)]
        starts = [*(start for _, _, start in self.places), numel]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@torch.no_grad()
def pack(params: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Copies gradients into a new flat tensor of `dtype`, zero where there is none. Returns it and its views.

    No copy where they already are views of such a tensor, as after `zero_grad(set_to_none=False)`.
    """
    flat = _whole(params, layout, dtype)
    if flat is not None:
        return flat, [p.grad for p in params if p.grad is not None]
    flat = params[0].new_empty(layout.length, dtype=dtype)
    views = layout.views(flat)
    copy_gradients(params, views)
    return flat, views


def copy_gradients(params: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Copies gradients into `views`, in one kernel; zero where a parameter has no gradient."""
    grads = [p.grad for p in params]
    there = [grad for grad in grads if grad is not None]
    if len(there) == len(params):
        torch._foreach_copy_(views, there)
        return
    if there:
        torch._foreach_copy_([view for view, grad in zip(views, grads, strict=True) if grad is not None], there)
    torch._foreach_zero_([view for view, grad in zip(views, grads, strict=True) if grad is None])


@torch.no_grad()
def widen(params: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Copies gradients back from the dtype in which they were sent."""
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    torch._foreach_copy_([p.grad for p in params], views)


def _whole(params: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor | None:
    """The flat tensor of which all gradients are views, each in its place; None when there is no such."""
    first = params[0].grad
    flat = None if first is None else first._base
    if flat is None or flat.dim() != 1 or flat.numel() != layout.length or flat.dtype != dtype:
        return None
    for p, (_, _, start) in zip(params, layout.places, strict=True):
        grad = p.grad
        if grad is None or grad._base is not flat or grad.storage_offset() != start or not grad.is_contiguous():
            return None
    return flat
