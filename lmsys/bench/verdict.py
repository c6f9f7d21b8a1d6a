"""Finds which row is fastest, and which rows could not run.

A *row* is an implementation under test. A *case* here is the record of one row with one set of sizes. A *comparison* is
the cases of several rows with the same sizes, sampled together. `lmsys.bench.results` prints `lines` at the end of a
run. `lmsys.reports` asks `fastest`, `deciding` and `ratio_of` for its answers. To change when two rows count as equally
fast, edit NEAR.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from statistics import geometric_mean, median

from lmsys.bench import fields, record

NEAR = 1.02  # a row that takes at most this times the fastest row's time counts as equally fast
FAILED = "wrong", "error"  # outcomes that `failed` lists
NEAR_TEXT = f"{100 * (NEAR - 1):.0f} %"  # for sentences of reports


def undisturbed(cases: Sequence[fields.Record]) -> Sequence[fields.Record]:
    """The cases during which the machine was not disturbed; all cases if it was disturbed in each of them."""
    return [case for case in cases if not case.get("disturbed")] or cases


def deciding(
    comparisons: Iterable[Sequence[fields.Record]], says_something: Callable[[Sequence[fields.Record]], bool]
) -> list[Sequence[fields.Record]]:
    """The undisturbed cases of each comparison; all of its cases if no case of any comparison was undisturbed.

    says_something  True if these cases of a comparison are enough for an answer; other comparisons are left out
    """
    several = [cases for cases in comparisons if says_something(cases)]
    kept = {id(case) for case in undisturbed(list(chain.from_iterable(several)))}
    calm = ([case for case in cases if id(case) in kept] for cases in several)
    return [cases for cases in calm if says_something(cases)]


def ratio_of(ours: fields.Record, theirs: fields.Record) -> float | None:
    """Their time over ours: the median over rounds; None if the two were not sampled together.

    Cases that were measured at different times, with the device's clock perhaps at another rate, have no ratio. Cases
    that were timed alone have none, either.
    """
    if not ours.get("comparison") or ours["comparison"] != theirs.get("comparison") or ours.get("alone"):
        return None
    rounds = zip(ours.get("samples_s") or (), theirs.get("samples_s") or (), strict=False)
    ratios = [b / a for a, b in rounds if a > 0]
    return median(ratios) if ratios else None


def fastest(comparisons: Iterable[Sequence[fields.Record]]) -> tuple[str, int, int]:
    """(the fastest row, in how many comparisons it was first or near, in how many it was sampled).

    The fastest row is the one that the fewest other rows beat: by a factor above NEAR, as a geometric mean over the
    comparisons that both rows are in. If several rows are beaten by equally few, the one in more comparisons counts;
    then the one with the smaller mean time over that of each comparison's fastest row. A row is near in a comparison if
    it took at most NEAR times the time of the comparison's fastest row.

    comparisons  the timed cases of each; if a row has several cases in one comparison, its fastest one counts
    """
    rows = [{case["impl"]: case for case in sorted(cases, key=time_of, reverse=True)} for cases in comparisons]

    def slowness(ours: str, theirs: str) -> float:
        """Our time over theirs, as a geometric mean over the comparisons that have both rows."""
        return geometric_mean([_slowness(both[ours], both[theirs]) for both in rows if {ours, theirs} <= both.keys()])

    def over_fastest(name: str, cases: dict[str, fields.Record]) -> float:
        """The row's time over that of the fastest row of one comparison."""
        return max(_slowness(cases[name], other) for other in cases.values())

    def rank(name: str) -> tuple[int, int, float]:
        """The key of `min`: (rows that beat it, minus the number of its comparisons, mean time over the fastest's)."""
        shared = [cases for cases in rows if name in cases]
        slower = sum(slowness(name, other) > NEAR for other in set().union(*shared))
        return slower, -len(shared), geometric_mean([over_fastest(name, cases) for cases in shared])

    row = min(sorted(set().union(*rows)), key=rank)
    shared = [cases for cases in rows if row in cases]
    return row, sum(over_fastest(row, cases) <= NEAR for cases in shared), len(shared)


def _slowness(ours: fields.Record, theirs: fields.Record) -> float:
    """Our time over theirs: by `ratio_of` if the two were sampled together, else by their `time_s`."""
    ratio = ratio_of(ours, theirs)
    return 1 / ratio if ratio else time_of(ours) / time_of(theirs)


def time_of(case: fields.Record) -> float:
    return float(case["time_s"])


def not_run(records: Iterable[fields.Record]) -> dict[str, Counter[str]]:
    """{reason why rows could not run: {row: number of its cases}}, the most frequent reason first.

    Cases that were out of memory under different memory limits have different reasons.
    """
    rows: dict[str, Counter[str]] = {}
    for case in records:
        if case["outcome"] in ("unsupported", "oom"):
            limit = case.get("memory_limit_bytes")
            under = f" under the limit of {limit / 2**30:g} GiB that was asked for" if limit else ""
            reason = f"out of memory{under}" if case["outcome"] == "oom" else str(case["reason"] or "not supported")
            rows.setdefault(reason, Counter())[case["impl"]] += 1
    return dict(sorted(rows.items(), key=lambda item: -item[1].total()))


MOST_REASONS = 8  # the most reasons why rows could not run that `lines` gives; a report lists them all


def lines(records: Sequence[fields.Record]) -> Iterator[str]:
    """Yields lines on how a run's cases ended: counts, what could not run, what was disturbed, and what was wrong."""
    counts = Counter(case["outcome"] for case in records)
    yield ", ".join(f"{counts[outcome]} {outcome}" for outcome in record.OUTCOMES if counts[outcome])
    reasons = not_run(records)
    for reason, rows in islice(reasons.items(), MOST_REASONS):
        yield f"not run, {rows.total()} case{'s' if rows.total() > 1 else ''} of {', '.join(rows)}: {reason}"
    if (left := len(reasons) - MOST_REASONS) > 0:
        yield f"... and {left} more {'reason' if left == 1 else 'reasons'}: the report lists them"
    if disturbed := [case["disturbed"] for case in records if case.get("disturbed")]:
        several = f"{len(disturbed)} cases are" if len(disturbed) > 1 else "1 case is"
        yield f"{several} flagged, because the machine was disturbed: {Counter(disturbed).most_common(1)[0][0]}"
    for (outcome, impl, _), (first, *others) in failed(records).items():
        ratio = f" (error ratio {first['error_ratio']:.3g})" if first.get("error_ratio") is not None else ""
        more = f"; and {len(others)} more of {impl}" if others else ""
        yield f"{outcome} {first['id']}{ratio}: {first['reason']}{more}"


def failed(records: Iterable[fields.Record]) -> dict[tuple[str, str, str], list[fields.Record]]:
    """{(outcome, row, benchmark): cases} of the cases that were wrong or raised an error."""
    return fields.grouped(
        ((case["outcome"], case["impl"], case["benchmark"]), case) for case in records if case["outcome"] in FAILED
    )
