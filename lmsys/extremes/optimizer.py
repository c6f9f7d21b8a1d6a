"""Gradients as training has them and a normal draw has not: rows of zeros, and rows near 1e-20 and near 1e+20.

All are made by exact operations, so they are the same on every machine. The square of HUGE is beyond float32, which
ends at 2**128; the 1 - beta2 = 0.001 of it that AdamW adds to its second moment is not: the order of the products
decides. The square of TINY lies below the smallest normal number, 2**-126, and is nothing beside any eps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

TINY, HUGE = 2.0**-66, 2.0**66  # 1.4e-20 and 7.4e+19
FACTORS = {"zero": 0.0, "1e-20": TINY, "1e+20": HUGE}
PLANTED = tuple(FACTORS.values())  # the values of the rows that `plant` writes, in this order


def extreme(gradient: Tensor, size: str) -> Tensor:
    """`gradient` times the factor of a size: "zero", "1e-20" or "1e+20", or "mixed", where each row has the next of
    these, and every fourth row stays as it is. Exact in float32 and bfloat16."""
    if size != "mixed":
        return gradient * FACTORS[size]
    factors = torch.tensor([*FACTORS.values(), 1.0], dtype=gradient.dtype, device=gradient.device)
    of_rows = factors[torch.arange(len(gradient), device=gradient.device) % len(factors)]
    return gradient * of_rows.view(-1, *[1] * (gradient.dim() - 1))


def plant(gradient: Tensor, rows: Sequence[int], scale: float = 1.0) -> None:
    """Fills the first rows of `rows` in place: one of zeros, one of TINY, one of HUGE, times a loss scale."""
    for row, value in zip(rows, PLANTED, strict=False):
        gradient[row] = value * scale
