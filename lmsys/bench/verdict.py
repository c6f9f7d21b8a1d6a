"""Which row is fastest, and which could not run: what a run's end in the terminal and a report's first screen say."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from lmsys.bench.fields import Record

NEAR = 1.02  # within so much of the fastest, a row is as fast
NEAR_TEXT = f"{100 * (NEAR - 1):.0f} %"


@dataclass(frozen=True)
class Fastest:
    """A row; in how many comparisons it was sampled, and in how many of them it was first or near."""

    row: str
    first: int
    comparisons: int


def fastest(comparisons: Iterable[Sequence[Record]]) -> Fastest:
    """The row than which fewest are faster, by geometric means, where both were sampled; then the one sampled most.

    comparisons  timed cases that were sampled together; of a row that has several the fastest counts
    """
    times: list[dict[str, float]] = []  # of each row, by comparison
    for cases in comparisons:
        times.append({one["impl"]: one["time_s"] for one in sorted(cases, key=lambda one: -one["time_s"])})

    def mean(ours: str, theirs: str) -> float:
        return geometric_mean([one[ours] / one[theirs] for one in times if ours in one and theirs in one])

    def rank(name: str) -> tuple[int, int, float]:
        own = [one for one in times if name in one]
        slower = sum(mean(name, other) > NEAR for other in {other for one in own for other in one})
        return slower, -len(own), geometric_mean([one[name] / min(one.values()) for one in own])

    row = min(sorted({name for one in times for name in one}), key=rank)
    own = [one for one in times if row in one]
    return Fastest(row, sum(one[row] <= NEAR * min(one.values()) for one in own), len(own))


def not_run(records: Iterable[Record]) -> dict[str, Counter[str]]:
    """Cases by row, for each reason for which rows could not run here; "out of memory" is one for all."""
    found: dict[str, Counter[str]] = {}
    for one in records:
        if one["outcome"] in ("unsupported", "oom"):
            reason = "out of memory" if one["outcome"] == "oom" else str(one["reason"] or "not supported")
            found.setdefault(reason, Counter())[one["impl"]] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1].total()))
