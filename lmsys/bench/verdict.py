"""Which row is fastest, and which could not run: what a run's end in the terminal and a report's first screen say."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from lmsys.bench.fields import Record, grouped
from lmsys.bench.record import OUTCOMES

NEAR = 1.02  # within so much of the fastest, a row is as fast
FAILED = "wrong", "error"
NEAR_TEXT = f"{100 * (NEAR - 1):.0f} %"


@dataclass(frozen=True)
class Fastest:
    """A row; in how many comparisons it was sampled, and in how many of them it was first or near."""

    row: str
    first: int
    comparisons: int


def undisturbed(cases: Sequence[Record]) -> Sequence[Record]:
    """The cases that were measured on a machine as it should be; all of them where none was."""
    return [one for one in cases if not one.get("disturbed")] or cases


def deciding(
    comparisons: Iterable[Sequence[Record]], says_something: Callable[[Sequence[Record]], bool]
) -> list[Sequence[Record]]:
    """The cases of comparisons that answer a question: those that were not disturbed, or all if none was.

    A comparison of which too few are left to say something is left out.
    """
    several = [cases for cases in comparisons if says_something(cases)]
    kept = {id(one) for one in undisturbed([one for cases in several for one in cases])}
    left = ([one for one in cases if id(one) in kept] for cases in several)
    return [cases for cases in left if says_something(cases)]


def ratio_of(ours: Record, theirs: Record) -> float | None:
    """Their time over ours: the median over rounds, None where the two were not sampled together.

    Cases measured at different times, under different clocks, have no ratio.
    """
    if not ours.get("comparison") or ours["comparison"] != theirs.get("comparison"):
        return None
    rounds = zip(ours.get("samples_s") or (), theirs.get("samples_s") or (), strict=False)
    ratios = [b / a for a, b in rounds if a > 0]
    return median(ratios) if ratios else None


def fastest(comparisons: Iterable[Sequence[Record]]) -> Fastest:
    """The row than which fewest are faster, by geometric means, where both were sampled; then the one sampled most.

    comparisons  timed cases that were sampled together; of a row that has several the fastest counts
    """
    rows = [{one["impl"]: one for one in sorted(cases, key=lambda one: -one["time_s"])} for cases in comparisons]

    def slowness(ours: str, theirs: str) -> float:
        return geometric_mean([_slowness(one[ours], one[theirs]) for one in rows if ours in one and theirs in one])

    def rank(name: str) -> tuple[int, int, float]:
        own = [one for one in rows if name in one]
        slower = sum(slowness(name, other) > NEAR for other in {other for one in own for other in one})
        return slower, -len(own), geometric_mean([max(_slowness(one[name], x) for x in one.values()) for one in own])

    row = min(sorted({name for one in rows for name in one}), key=rank)
    own = [one for one in rows if row in one]
    first = sum(all(_slowness(one[row], other) <= NEAR for other in one.values()) for one in own)
    return Fastest(row, first, len(own))


def _slowness(ours: Record, theirs: Record) -> float:
    """Our time over theirs, by rounds that were sampled together where there are any."""
    ratio = ratio_of(ours, theirs)
    return 1 / ratio if ratio else time_of(ours) / time_of(theirs)


def time_of(one: Record) -> float:
    return float(one["time_s"])


def not_run(records: Iterable[Record]) -> dict[str, Counter[str]]:
    """Cases by row, for each reason for which rows could not run here; "out of memory" is one, by limit."""
    found: dict[str, Counter[str]] = {}
    for one in records:
        if one["outcome"] in ("unsupported", "oom"):
            limit = one.get("memory_limit_bytes")
            under = f" under the limit of {limit / 2**30:g} GiB that was asked for" if limit else ""
            reason = f"out of memory{under}" if one["outcome"] == "oom" else str(one["reason"] or "not supported")
            found.setdefault(reason, Counter())[one["impl"]] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1].total()))


MOST_REASONS = 8  # of rows that could not run; a report lists them all


def lines(records: Sequence[Record]) -> Iterator[str]:
    """How a run's cases ended: counts, what could not run, what was disturbed, and what was wrong."""
    counts = Counter(one["outcome"] for one in records)
    yield ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    yield from _not_run(records)
    if disturbed := [one["disturbed"] for one in records if one.get("disturbed")]:
        several = f"{len(disturbed)} cases are" if len(disturbed) > 1 else "1 case is"
        yield f"{several} flagged, because the machine was disturbed: {Counter(disturbed).most_common(1)[0][0]}"
    for (outcome, impl, _), (first, *others) in failed(records).items():
        ratio = f" (error ratio {first['error_ratio']:.3g})" if first.get("error_ratio") is not None else ""
        more = f"; and {len(others)} more of {impl}" if others else ""
        yield f"{outcome} {first['id']}{ratio}: {first['reason']}{more}"


def failed(records: Iterable[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """The cases that were wrong or failed, by how they ended, their row and their benchmark."""
    return grouped(
        ((one["outcome"], one["impl"], one["benchmark"]), one) for one in records if one["outcome"] in FAILED
    )


def _not_run(records: Sequence[Record]) -> Iterator[str]:
    """Each reason once, with its rows."""
    reasons = [*not_run(records).items()]
    yield from (
        f"not run, {rows.total()} case{'s' if rows.total() > 1 else ''} of {', '.join(rows)}: {reason}"
        for reason, rows in reasons[:MOST_REASONS]
    )
    if (left := len(reasons) - MOST_REASONS) > 0:
        yield f"... and {left} more {'reason' if left == 1 else 'reasons'}: the report lists them"
