"""The end of a run in the terminal: counts, the fastest rows, what was wrong and what could not run, and why."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from lmsys.bench.fields import Record
from lmsys.bench.record import OUTCOMES
from lmsys.bench.verdict import NEAR_TEXT, fastest, not_run

MOST_REASONS = 8  # of rows that could not run; a report lists them all


def lines(records: Iterable[Record], contends: Callable[[Record], bool] = lambda _: True) -> Iterator[str]:
    """`contends`: of rows that do the same work as the others of their comparison."""
    records = list(records)
    counts = Counter(one["outcome"] for one in records)
    if counts:
        yield ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    yield from _fastest([one for one in records if contends(one)])
    yield from _not_run(records)
    if disturbed := [one["disturbed"] for one in records if one.get("disturbed")]:
        several = f"{len(disturbed)} cases are" if len(disturbed) > 1 else "1 case is"
        yield f"{several} flagged, because the machine was disturbed: {Counter(disturbed).most_common(1)[0][0]}"
    for one in records:
        if one["outcome"] in ("wrong", "error"):
            ratio = f" (error ratio {one['error_ratio']:.3g})" if one.get("error_ratio") is not None else ""
            yield f"{one['outcome']} {one['id']}{ratio}: {one['reason']}"


def _fastest(records: list[Record]) -> Iterator[str]:
    """The fastest row by benchmark, and by direction or mode."""
    together: dict[str, dict[str, list[Record]]] = {}
    for one in records:
        if one["outcome"] == "ok" and one.get("time_s"):
            mode = one.get("direction") or one.get("mode") or ""
            what = f"{one['benchmark'].replace('_', ' ')} {mode}".strip()
            together.setdefault(what, {}).setdefault(one["comparison"], []).append(one)
    for what, comparisons in together.items():
        if several := [rows for rows in comparisons.values() if len({one["impl"] for one in rows}) > 1]:
            found = fastest(several)
            counted = f"{found.comparisons} comparison{'s' if found.comparisons > 1 else ''}"
            told = f"{found.row}, first or within {NEAR_TEXT} in {found.first} of {counted}"
            yield f"fastest, {what}: {told if found.first else f'not settled, no row was first in {counted}'}"


def _not_run(records: list[Record]) -> Iterator[str]:
    """Each reason once, with its rows."""
    reasons = [*not_run(records).items()]
    for reason, rows in reasons[:MOST_REASONS]:
        yield f"not run, {rows.total()} case{'s' if rows.total() > 1 else ''} of {', '.join(rows)}: {reason}"
    if (left := len(reasons) - MOST_REASONS) > 0:
        yield f"... and {left} more {'reason' if left == 1 else 'reasons'}: the report lists them"
