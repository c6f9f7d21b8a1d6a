"""Gradients as training has them and a normal draw has not: zeros, tiny ones near 1e-20, huge ones near 1e+20.

All are made by exact operations, so they are the same on every machine. The square of HUGE is beyond float32, which
ends at 2**128; the 1 - beta2 = 0.001 of it that AdamW adds to its second moment is not: the order of the products
decides. The square of TINY lies below the smallest normal number, 2**-126, and is nothing beside any eps.

torch's CUDA kernels square a gradient before they scale it: from HUGE they make moments of inf, the fused ones NaN
(torch 2.11, one H200), where those of a CPU are right. Code that follows the papers, v = β2 v + (1 - β2) g², does so
on a CPU too. So what is held to torch on a GPU gets LARGE, whose square float32 has, and so does what `lmsys.check` is
asked about.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

TINY, LARGE, HUGE = 2.0**-66, 2.0**62, 2.0**66  # 1.4e-20, 4.6e+18 and 7.4e+19
SIZES = "zero", "tiny", "huge", "mixed"


def planted(held_by_torch: bool) -> tuple[float, ...]:
    """The values of the rows that `plant` writes, in this order. held_by_torch: that torch's kernels on a GPU hold."""
    return 0.0, TINY, LARGE if held_by_torch else HUGE


def extreme(gradient: Tensor, size: str, held_by_torch: bool) -> Tensor:
    """`gradient` times a value of `planted`, for a size of "zero", "tiny" or "huge". Exact in float32.

    In "mixed" the rows have these factors in turn, and every fourth row stays as it is.
    """
    factors = dict(zip(SIZES, planted(held_by_torch), strict=False))
    if size != "mixed":
        return gradient * factors[size]
    in_turn = torch.tensor([*factors.values(), 1.0], dtype=gradient.dtype, device=gradient.device)
    of_rows = in_turn[torch.arange(len(gradient), device=gradient.device) % len(in_turn)]
    return gradient * of_rows.view(-1, *[1] * (gradient.dim() - 1))


def plant(gradient: Tensor, rows: Sequence[int], values: Sequence[float], scale: float = 1.0) -> None:
    """Fills rows of a gradient in place, each with its value times a loss scale."""
    for row, value in zip(rows, values, strict=True):
        gradient[row] = value * scale
