"""Two versions of a training step, held to each other: by their bits where these must agree, else by the tolerance.

Both take the same steps from the same weights on the same batches: see `benchmarks.data_parallel.passes`, which also
says how each is held to plain steps in float64. A pair whose bits agree needs no tolerance, whatever was expected.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from benchmarks.data_parallel.cases import ParallelCase

BITS, TOLERANCE, WRONG, UNKNOWN = "bits", "tolerance", "wrong", "unknown"


@dataclass(frozen=True)
class Steps:
    """Steps that a version has taken.

    bits    sha256 of the weights, or of those rows of them that are looked at
    ratios  errors against float64 over their budgets, by parameter; None where plain steps find no room
    """

    case: ParallelCase
    bits: str
    ratios: Mapping[str, float] | None

    @property
    def error_ratio(self) -> float | None:
        return None if self.ratios is None else max(self.ratios.values())


@dataclass(frozen=True)
class Pair:
    """Two versions, what holds them together (BITS or TOLERANCE), or why nothing does (WRONG) or may (UNKNOWN)."""

    first: Steps
    second: Steps
    held_by: str
    why: str


def pair(first: Steps, second: Steps) -> Pair:
    if first.bits == second.bits:
        return Pair(first, second, BITS, "")
    if first.case.same_bits(second.case):
        return Pair(first, second, WRONG, "their weights must have the same bits, and have not")
    for one in (first, second):
        beyond = {name: ratio for name, ratio in (one.ratios or {}).items() if not ratio <= 1}
        for name, ratio in beyond.items():
            return Pair(first, second, WRONG, f"{one.case.impl}: {name} is {ratio:.3g} times the allowed error off")
    if first.ratios is None or second.ratios is None:
        return Pair(first, second, UNKNOWN, "plain steps in float64 do not fit in this memory")
    return Pair(first, second, TOLERANCE, "")


def pairs(versions: Iterable[Steps]) -> list[Pair]:
    """All pairs of versions on as many ranks: others have other batches."""
    both = combinations(versions, 2)
    return [pair(*two) for two in both if len({one.case.world_size for one in two}) == 1]
