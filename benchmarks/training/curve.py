"""The curve of a training, and how far it is from the reference's: see `lmsys.testing`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.training.rank import Epoch
from lmsys.bench import Record
from lmsys.testing import CURVE_BUDGET, CURVE_STEPS, curve_ratios

CURVE_POINTS = 100  # of a curve that travels with a record


@dataclass
class Curve:
    """The loss over the global batch and the norm of the gradient, by step; the loss on held-out text at the end.

    weights  of a reference: by attention row, the sha256 that every reproducible training has ended with, and of which
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    valid_loss: float | None = None
    weights: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, epoch: Epoch) -> None:
        self.losses += epoch.losses
        self.norms += epoch.norms

    def ratios(self, reference: "Curve", dtype: str) -> Mapping[str, float]:
        return curve_ratios(self.losses, reference.losses, self.norms[0], reference.norms[0], dtype)

    def fields(self, reference: "Curve", dtype: str) -> Record:
        """At most CURVE_POINTS losses, each with its difference to the reference's as far as that goes."""
        apart = [a - b for a, b in zip(self.losses[:CURVE_STEPS], reference.losses, strict=False)]
        every = -(-len(self.losses) // CURVE_POINTS)
        places = sorted({*range(0, len(self.losses), every), len(self.losses) - 1})
        return {
            "steps": len(self.losses),
            "curve_steps": [place + 1 for place in places],
            "curve_losses": [_finite(self.losses[place]) for place in places],
            "curve_differences": [_finite(apart[place]) for place in places if place < len(apart)],
            "curve_difference": _finite(max(map(abs, apart))),
            "curve_budget": CURVE_BUDGET[dtype],
            "norm_difference": _finite(abs(self.norms[0] / reference.norms[0] - 1)),
            "loss": _finite(self.losses[-1]),
            "valid_loss": None if self.valid_loss is None else _finite(self.valid_loss),
        }


def _finite(value: float) -> float | None:
    """Rounds to six digits; None for what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
