"""Checks that a result is a plain tensor with memory of its own, of the promised shape, dtype and device.

Benchmarks call `check_plain` on what a row (an implementation under test) returns, before its values are judged.
`lmsys.bench.foreign` calls it, too, for rows that run in processes of their own. To refuse one more kind of result, add
a check to `check_plain`.
"""

from collections.abc import Iterable
from typing import Any

import torch

from lmsys.measure.step import Failed


def check_plain(name: str, x: Any, like: torch.Tensor, inputs: Iterable[torch.Tensor]) -> None:
    """Raises Failed, "wrong", unless `x` is a plain tensor with memory of its own, of `like`'s shape, dtype and device.

    The reasons: a subclass of torch.Tensor could postpone work until it is read, after its time was taken; a tensor
    whose elements share memory, such as an expanded one, holds fewer numbers than its shape says; a result that
    overlaps an input changes with that input. Two results of a row may overlap each other here: the values of each are
    judged later.

    name    what messages call `x`
    like    a tensor with the shape, dtype, device and layout that `x` must have
    inputs  tensors whose memory `x` may not overlap
    """
    if type(x) is not torch.Tensor:
        raise Failed("wrong", f"{name} must be a plain torch.Tensor; got {type(x).__module__}.{type(x).__qualname__}")
    for fact in ("shape", "dtype", "device", "layout"):
        if (value := getattr(x, fact)) != (right := getattr(like, fact)):
            raise Failed("wrong", f"{name} must have {fact} {_as_shown(right)}; got {_as_shown(value)}")
    # empty_like returns the strides of `x` only if `x` is contiguous in some order of its dimensions, without gaps.
    if torch.empty_like(x, device="meta").stride() != x.stride():
        raise Failed(
            "wrong",
            f"{name} must have memory for each element, without gaps; got strides {x.stride()} of shape"
            f" {tuple(x.shape)}",
        )
    begin, end = memory_of(x)
    if any(begin < last and first < end for first, last in map(memory_of, inputs)):
        raise Failed("wrong", f"{name} must have memory of its own; it overlaps an input")


def _as_shown(fact: Any) -> Any:
    """A fact about a tensor as a message shows it: a shape as a tuple."""
    return tuple(fact) if isinstance(fact, torch.Size) else fact


def memory_of(x: torch.Tensor) -> tuple[int, int]:
    """(first address, address after the last) of the memory that x's elements span."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + span * x.element_size()
