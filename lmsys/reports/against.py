"""A run against an earlier one: the verdict on each case in a terminal, and a page that shows the two side by side."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmsys.bench.changes import BAD, BROKEN, MENDED, SAME, UNCLEAR, VERDICTS, Change, compare, spread_between
from lmsys.bench.fields import Record
from lmsys.reports import page
from lmsys.reports.load import InputError, Machine, read
from lmsys.reports.page import Block, Chapter
from lmsys.reports.tables import Table, csv_of
from lmsys.reports.words import number

DECIDE = ("torch", "triton", "cuda", "float32_matmul")  # of a run: with another, times are of something else
MOST_LINES = 20  # of changes in a terminal
COLUMNS = ["case", "row", "before", "after", "time after / before", "95 %", "beside", "verdict"]
MEANINGS = {
    "broken": "right before, and wrong, failed or out of memory after",
    "slower": "slower by more than the margin",
    "faster": "faster by more than the margin",
    "mended": "wrong, failed or out of memory before, and right after",
    "unclear": "more rounds would tell, or nothing ran beside it",
    "same": "its interval lies within the margin",
}


def report(
    old: Sequence[Path], new: Sequence[Path], out: Path, margin: float, repeats: Sequence[Path], anyway: bool
) -> tuple[list[str], bool]:
    """Lines for a terminal, and True where a case is slower or broken. The page is in `out`.

    InputError where the runs are of two machines or versions, unless `anyway`, and where they share no case.
    """
    before, after = _machine(old), _machine(new)
    if not anyway and (why := _why_not(before, after)):
        raise InputError(f"{why}: measure both alike, or ask for --anyway")
    between = spread_between([_machine([path]).records for path in repeats])
    changes = compare(before.records, after.records, margin, between)
    if not changes:
        raise InputError("nothing to compare: no case was timed in both runs")
    lines = [*_told(changes, margin)]
    written = _page(out, before, after, changes, margin, between)
    return [*lines, str(written)], any(one.verdict in BAD for one in changes)


def _machine(paths: Sequence[Path]) -> Machine:
    machines = read(paths)
    if len(machines) > 1:
        told = " and ".join(one.title for one in machines)
        raise InputError(f"{', '.join(map(str, paths))}: a run of one machine is compared, and these are {told}")
    return machines[0]


def _why_not(before: Machine, after: Machine) -> str:
    """Why the two cannot be compared, if they cannot."""
    if before.title != after.title:
        return f"before ran on {before.title}, after on {after.title}"
    for name in DECIDE:
        was, now = (" and ".join(sorted({str(run.get(name)) for run in side.runs})) for side in (before, after))
        if was != now:
            return f"before has {name} {was}, after has {name} {now}"
    clocks = {(one["benchmark"], one["id"]): one["clock"] for one in before.records if one["clock"]}
    for one in after.records:
        clock = clocks.get((one["benchmark"], one["id"]))
        if clock and one["clock"] and clock != one["clock"]:
            return f"{one['id']} was timed by the clock {clock!r} before, and by {one['clock']!r} after"
    return ""


def _told(changes: Sequence[Change], margin: float) -> Iterator[str]:
    counts = Counter(one.verdict for one in changes)
    yield f"{', '.join(f'{counts[name]} {name}' for name in VERDICTS if counts[name])}, by a margin of {margin:.3g}"
    changed = [one for one in changes if one.verdict not in (SAME, UNCLEAR)]
    for one in changed[:MOST_LINES]:
        yield f"{one.verdict}: {one.new['id']}{_said(one)}"
    if len(changed) > MOST_LINES:
        yield f"and {len(changed) - MOST_LINES} more, in the page"


def _said(change: Change) -> str:
    if change.verdict in (BROKEN, MENDED):
        reason = change.new["reason"] if change.verdict == BROKEN else change.old["reason"]
        return f", {reason}" if reason else ""
    low, high = change.interval or (0.0, 0.0)
    return f", {number(change.ratio or 0.0)} times the time ({number(low)} to {number(high)}), beside {change.beside}"


def _page(out: Path, before: Machine, after: Machine, changes: Sequence[Change], margin: float, between: float) -> Path:
    source = f"Before: {before.about(before.records)} After: {after.about(after.records)}"
    changed = [one for one in changes if one.verdict not in (SAME, UNCLEAR)]
    counts = Counter(one.verdict for one in changes)
    caption = (
        f"The margin is {100 * margin:.3g} %. Each row is compared by its ratio, round by round, to the row that "
        "stands as “beside”; intervals are of 95 %, and at most one change in twenty is expected to be none."
    )
    if between:
        caption += f" Runs of one commit differ by {100 * between:.2g} % here, which the intervals have in them."
    verdicts = Table(
        name=f"{after.slug}-verdicts",
        title="Verdicts",
        caption=caption,
        columns=["verdict", "cases", "meaning"],
        rows=[[name, str(counts[name]), MEANINGS[name]] for name in VERDICTS if counts[name]],
        data=[{"verdict": name, "cases": counts[name]} for name in VERDICTS if counts[name]],
        source=source,
    )
    tables = [("What changed", "changed", changed)] if changed else []
    for name in dict.fromkeys(str(one.new["benchmark"]) for one in changes):
        own = [one for one in changes if one.new["benchmark"] == name]
        tables.append((f"All cases: {name.replace('_', ' ')}", name, own))
    chapters = [
        Chapter(title, [Block("", [_table(f"{after.slug}-changes-{name}", title, own, source)])])
        for title, name, own in tables
    ]
    answers = Block("", [verdicts, _runs(before, after)])
    records = [{"run": name, **one} for name, side in _sides(before, after) for one in side.records]
    return page.write(out, [(after, answers, chapters)], csv_of(records), [])


def _sides(before: Machine, after: Machine) -> list[tuple[str, Machine]]:
    return [("before", before), ("after", after)]


def _runs(before: Machine, after: Machine) -> Table:
    names = ("date", "commit", "driver", "command")
    facts = [
        {"run": name, **{fact: str(run.get(fact) or "unknown") for fact in names}}
        for name, side in _sides(before, after)
        for run in side.runs
    ]
    rows = [[one["run"], one["date"][:10], one["commit"][:10], one["driver"]] for one in facts]
    return Table(f"{after.slug}-runs", "The two runs", "", ["run", "date", "commit", "driver"], rows, facts, keys=4)


def _table(name: str, title: str, changes: Sequence[Change], source: str) -> Table:
    data: list[Record] = [
        {
            "benchmark": one.new["benchmark"],
            "id": one.new["id"],
            "impl": one.new["impl"],
            "before_s": one.old.get("time_s"),
            "after_s": one.new.get("time_s"),
            "ratio": one.ratio,
            "low": one.interval[0] if one.interval else None,
            "high": one.interval[1] if one.interval else None,
            "beside": one.beside,
            "verdict": one.verdict,
        }
        for one in changes
    ]
    return Table(
        name=name,
        title=title,
        caption="Times are in microseconds. Where clocks moved, the ratio of the times is not the ratio that counts.",
        columns=COLUMNS,
        rows=[_row(one) for one in changes],
        data=data,
        keys=2,
        source=source,
    )


def _row(change: Change) -> list[str]:
    times = [number(1e6 * one["time_s"]) if one.get("time_s") else one["outcome"] for one in (change.old, change.new)]
    interval = " to ".join(map(number, change.interval)) if change.interval else ""
    ratio = number(change.ratio) if change.ratio else ""
    impl = str(change.new["impl"])
    case = str(change.new["id"]).removesuffix(f"-{impl}")
    return [case, impl, *times, ratio, interval, change.beside or "nothing", change.verdict]
