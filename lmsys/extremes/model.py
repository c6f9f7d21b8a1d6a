"""Extreme rows for norms, rotary embedding and gates, written in place by exact operations.

Squares of huge rows overflow float16, and so do those of an outlier channel. An exponential of a saturated gate
overflows float32, of one sign or of both.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

HUGE = 2.0**12
GATE = 2.0**8


def zeros(x: Tensor) -> None:
    """Every row of x (N, M) is zero."""
    x.zero_()


def huge(x: Tensor) -> None:
    """Every row of x (N, M) is HUGE times as large."""
    x.mul_(HUGE)


def outlier(x: Tensor) -> None:
    """A channel of x (N, M), in one row of each sign, is HUGE; the others are as they were."""
    channel = x.shape[-1] // 3
    x[..., channel] = HUGE
    x[1::2, ..., channel] = -HUGE


def large_mean(x: Tensor) -> None:
    """Every row of x (N, M) has a mean beside which its deviations are small."""
    x.add_(HUGE)


def saturated(x: Tensor) -> None:
    """Gates (N, F) of hundreds, in neighbouring columns of either sign."""
    x.abs_().add_(1.0).mul_(GATE / 2)
    x[..., 1::2].neg_()


ROWS: dict[str, Callable[[Tensor], Any]] = {
    "rows of zeros": zeros,
    "huge rows": huge,
    "rows with an outlier channel": outlier,
}
GATES: dict[str, Callable[[Tensor], Any]] = {"saturated gates": saturated, "gates of zero": zeros}
