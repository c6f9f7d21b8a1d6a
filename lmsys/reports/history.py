"""The result files of a folder over their commits: a line for each case, and how the last differs from the first."""

import json
from datetime import UTC, datetime
from pathlib import Path

from lmsys.bench.changes import Change, compare, of_one_run
from lmsys.reports import against, plots
from lmsys.reports.load import InputError, Machine, file_name
from lmsys.reports.tables import Block, Chapter, Plot

NAMED = 6  # lines of a plot; the others are grey
LABELS = 20  # of commits below a plot


def write(folder: Path, out: Path, margin: float) -> list[str]:
    """Writes a page about those of a folder's *.json that can be compared with the last; returns lines for a terminal.

    InputError for a file that is no result, and where no two of them can be compared.
    """
    runs = [run for _, run in sorted(map(_dated, folder.glob("*.json")), key=lambda dated: dated[0])]
    reasons = [against.why_not(run, runs[-1]) for run in runs]
    alike = [run for run, reason in zip(runs, reasons, strict=True) if not reason]
    since = [compare(alike[0].records, run.records, margin) for run in alike[1:]]
    if not since or not since[-1]:
        raise InputError(f"{folder}: nothing to compare: a history takes *.json of one machine, with the same cases")
    first, last = alike[0], alike[-1]
    found = against.Compared(first, last, since[-1], *of_one_run(first.records, last.records), margin)
    drawn = [_plot(name, alike, since) for name in {str(one.new["benchmark"]): 0 for one in since[-1]}]
    path = against.write(found, out, [Chapter("Over commits", [Block("", drawn)])])
    left_out = [f"left out: {reason}" for reason in dict.fromkeys(reasons) if reason]
    return [*left_out, f"{len(alike)} runs, the last beside the first", *against.told(found), str(path)]


def _dated(path: Path) -> tuple[datetime, Machine]:
    """When the commit of a file was made, or where the file does not say that when its run began; and the run."""
    machine = against.machine_of([path])
    info = json.loads(path.read_text(encoding="utf-8")).get("commit_info") or {}
    return datetime.fromisoformat(str(info.get("time") or machine.runs[0].get("date"))).astimezone(UTC), machine


def _plot(benchmark: str, runs: list[Machine], since: list[list[Change]]) -> Plot:
    """A line for each case that the first and the last run have."""
    axes = plots.canvas(3.0)
    cases = [one for one in since[-1] if one.new["benchmark"] == benchmark]
    for order, case in enumerate(cases):
        same = [(at, one.ratio) for at, changes in enumerate(since, 1) for one in changes if one.old is case.old]
        axes.plot(
            *zip((0, 1.0), *same, strict=True),
            marker="o",
            label=case.new["id"][-55:] if order < NAMED else None,  # the end of an id has the row
            color=f"C{order}" if order < NAMED else "0.7",
            linestyle="-" if case.beside else ":",
            zorder=3 - order / len(cases),
        )
    axes.axhline(1, **plots.CEILING)
    some = 1 + len(runs) // LABELS
    plots.add_places(axes, ["" if at % some else str(run.runs[0].get("commit"))[:7] for at, run in enumerate(runs)])
    axes.set_ylabel("time / time in the first run")
    name, title = f"{runs[-1].slug}-history-{file_name(benchmark)}", f"{benchmark.replace('_', ' ')}: time by commit"
    return Plot(
        name,
        title,
        f"Times as those of the rows beside were; dotted where no row stood beside, so that the clock's moves show. "
        f"The {NAMED} cases that changed most are named.",
        plots.to_svg(axes, name, title),
    )
