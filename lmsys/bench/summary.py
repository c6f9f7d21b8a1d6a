"""The end of a run in the terminal: counts, the fastest rows, what was wrong and what could not run, and why."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from lmsys.bench.fields import Record
from lmsys.bench.record import OUTCOMES

MOST_REASONS = 8  # of rows that could not run; a report lists them all


def lines(records: Iterable[Record], contends: Callable[[Record], bool] = lambda _: True) -> Iterator[str]:
    """`contends`: of rows that do the same work as the others of their comparison."""
    records = list(records)
    counts = Counter(one["outcome"] for one in records)
    if counts:
        yield ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    yield from _fastest([one for one in records if contends(one)])
    yield from _not_run(records)
    for one in records:
        if one["outcome"] in ("wrong", "error"):
            ratio = f" (error ratio {one['error_ratio']:.3g})" if one.get("error_ratio") is not None else ""
            yield f"{one['outcome']} {one['id']}{ratio}: {one['reason']}"


def _fastest(records: list[Record]) -> Iterator[str]:
    """How many comparisons each row came first in, by benchmark and by direction or mode."""
    together: dict[tuple[str, str], list[Record]] = {}
    for one in records:
        if one["outcome"] == "ok" and one.get("time_s"):
            together.setdefault((one["benchmark"], one["comparison"]), []).append(one)
    wins: dict[str, Counter[str]] = {}
    for (benchmark, _), rows in together.items():
        if len(rows) > 1:
            first = min(rows, key=lambda one: float(one["time_s"]))
            what = " ".join([benchmark.replace("_", " "), *filter(None, [first.get("direction") or first.get("mode")])])
            wins.setdefault(what, Counter())[first["impl"]] += 1
    for what, rows_ in wins.items():
        total = sum(rows_.values())
        told = ", ".join(f"{row} in {count}" for row, count in rows_.most_common())
        yield f"fastest, {what}: {told} of {total} comparison{'s' if total > 1 else ''}"


def _not_run(records: list[Record]) -> Iterator[str]:
    """Each reason once, with its rows."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for one in records:
        if one["outcome"] in ("unsupported", "oom"):
            rows.setdefault((one["outcome"], one["reason"] or "no reason"), Counter())[one["impl"]] += 1
    for (outcome, reason), found in list(rows.items())[:MOST_REASONS]:
        count = sum(found.values())
        yield f"{outcome}, {count} case{'s' if count > 1 else ''} of {', '.join(found)}: {reason}"
    if (left := len(rows) - MOST_REASONS) > 0:
        yield f"... and {left} more reasons: the report lists them"
