"""By how much two sets of timings differ: an estimate and its error from ranks, which a few slow rounds do not move.

Source: Hodges and Lehmann 1963, "Estimates of Location Based on Rank Tests"; intervals by inverting the rank test of
Mann and Whitney, or where the two took turns that of Wilcoxon. Rounds that follow one another resemble one another,
which widens the error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Z = NormalDist().inv_cdf(0.975)  # of a two-sided interval of 95 %
FEWEST = 5  # rounds; of fewer nothing is said
MOST = 1000  # rounds; all pairs of them are looked at
MOST_ALIKE = 0.9  # neighbouring rounds, as correlation


@dataclass(frozen=True)
class Shift:
    """The natural logarithm of new over old: an estimate, and its standard error."""

    estimate: float
    error: float

    def widened(self, error: float) -> "Shift":
        """With another error, independent of its own."""
        return Shift(self.estimate, math.hypot(self.error, error))

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of 95 %."""
        return self.estimate - Z * self.error, self.estimate + Z * self.error

    def p_beyond(self, margin: float) -> float:
        """The chance of an estimate so far from zero, or farther, on either side, if the true one is the margin."""
        if self.error == 0:
            return 0.0 if abs(self.estimate) > margin else 1.0
        near, far = ((one * margin - abs(self.estimate)) / self.error for one in (1, -1))
        return NormalDist().cdf(near) + NormalDist().cdf(far)


def between(old: Sequence[float], new: Sequence[float]) -> Shift | None:
    """The shift of two samples that were taken apart, as logarithms; None of fewer than five rounds."""
    if min(len(old), len(new)) < FEWEST:
        return None
    x, y = (np.asarray(values[:MOST], dtype=float) for values in (old, new))
    spread = math.sqrt(len(x) * len(y) * (len(x) + len(y) + 1) / 12)
    return _shift(np.subtract.outer(y, x).ravel(), spread, max(_alike(x), _alike(y)))


def paired(differences: Sequence[float]) -> Shift | None:
    """The shift of two samples that took turns, from new less old, round by round, as logarithms; None of fewer than
    five rounds."""
    if len(differences) < FEWEST:
        return None
    x = np.asarray(differences[:MOST], dtype=float)
    spread = math.sqrt(len(x) * (len(x) + 1) * (2 * len(x) + 1) / 24)
    means = np.add.outer(x, x)[np.triu_indices(len(x))] / 2  # of Walsh: of each two rounds, and of each alone
    return _shift(means, spread, _alike(x))


def _shift(candidates: np.ndarray, spread: float, alike: float) -> Shift:
    """Their median, and half of what lies between the two that the rank test does not tell from it, by its spread."""
    ordered = np.sort(candidates)
    place = max(0, math.floor(len(ordered) / 2 - Z * spread))
    error = float(ordered[-1 - place] - ordered[place]) / (2 * Z)
    return Shift(float(np.median(ordered)), error * math.sqrt((1 + alike) / (1 - alike)))


def _alike(values: np.ndarray) -> float:
    """The correlation of ranks with those of the round before, from 0 to `MOST_ALIKE`."""
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)
    if len(ranks) < FEWEST or not np.ptp(values):
        return 0.0
    return min(MOST_ALIKE, max(0.0, float(np.corrcoef(ranks[:-1], ranks[1:])[0, 1])))


def discoveries(p_values: Sequence[float], rate: float) -> list[bool]:
    """Which of many tests count, so that at most that share of them is expected to be false.

    Source: Benjamini and Hochberg 1995, "Controlling the False Discovery Rate".
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    last = max((rank for rank, place in enumerate(order, 1) if p_values[place] <= rate * rank / len(order)), default=0)
    counted = set(order[:last])
    return [place in counted for place in range(len(p_values))]
