"""Where a result is wrong, in words."""

from collections.abc import Sequence

import torch
from torch import Tensor

AXES = ("batch", "head", "row", "column")


def where(wrong: Tensor, axes: Sequence[str] = AXES) -> str:
    """The axes of a mask, by default (B, H, S, D), on which only some elements are wrong: "rows 214 to 236 of 237, the
    last 23"."""
    parts = []
    for axis, name in enumerate(axes):
        others = [other for other in range(len(axes)) if other != axis]
        at = (wrong.amax(dim=others) if others else wrong).nonzero().flatten().tolist()
        if len(at) < wrong.shape[axis]:
            parts.append(_of_axis(name, at, wrong.shape[axis]))
    return f"{', '.join(parts) or 'everywhere'} ({100 * wrong.float().mean().item():.3g} % of the elements)"


def _of_axis(name: str, at: Sequence[int], size: int) -> str:
    first, last = at[0], at[-1]
    if len(at) == 1:
        return f"{name} {first} of {size}"
    names = "batches" if name == "batch" else f"{name}s"
    if len(at) == last - first + 1:
        tail = f", the last {len(at)}" if last == size - 1 else f", the first {len(at)}" if first == 0 else ""
        return f"{names} {first} to {last} of {size}{tail}"
    steps = {b - a for a, b in zip(at, at[1:], strict=False)}
    if len(steps) == 1:
        return f"{names} {first}, {first + steps.pop()}, ... {last} of {size}"
    return f"{len(at)} of {size} {names}, from {first} to {last}"


def worst(found: Tensor, expected: Tensor) -> tuple[int, ...]:
    """The index of the largest error; what is not finite is the largest."""
    error = (found.double() - expected).abs().nan_to_num(nan=float("inf"))
    return tuple(int(index) for index in torch.unravel_index(error.argmax(), error.shape))
