"""Compares a run with an earlier one, for `lmsys report --before`: a verdict on each case, and a page with both runs.

A case is one record of a result file: one row (an implementation) in one setting. `__main__` calls `read_both` for the
files of two runs, or `read_one` for the file of one run with --against, in which each row took turns, round by round,
with the same row of an earlier commit. Then it calls `write` for the page. An ordinary report of a file with --against
gets the same tables by `in_turns` and `block_and_chapters`. `lmsys.bench.changes` computes intervals and verdicts; a
new verdict also needs a sentence in MEANINGS.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from lmsys.bench import fields, record
from lmsys.bench.changes import (
    BROKEN,
    FASTER,
    MENDED,
    ONLY_NOW,
    SAME,
    SLOWER,
    UNCLEAR,
    Change,
    compare,
    compare_in_turns,
    counts_of,
    of_one_run,
    of_them_disturbed,
)
from lmsys.reports import cells, items, load, page, words
from lmsys.values import hold, sentences_of

DECIDE = ("torch", "triton", "cuda", "float32_matmul")  # facts of a run: runs that differ in one are not compared
ADVICE = ": measure both alike, or ask for --anyway"  # ends messages on such runs
FACTS = ("date", "commit", "driver", "torch", "command")  # facts of a run that the table of the two runs has
# "beside" is the anchor of `lmsys.bench.changes`: a row that took turns with this one in both runs. If the clock of the
# machine changed, both rows changed with it, so the change of their ratio is what counts.
COLUMNS = ["case", "row", "before, µs", "after, µs", "time after / before", "95 %", "beside", "verdict"]
MEANINGS = {  # of verdicts, for the table that counts them
    BROKEN: "right before, and not after",
    SLOWER: "slower by more than the margin",
    FASTER: "faster by more than the margin",
    MENDED: "right after, and not before",
    ONLY_NOW: "right after, and could not be run before",
    UNCLEAR: "more rounds would tell, or no peer took turns with it",
    SAME: "its interval lies within the margin",
}


@dataclass(frozen=True)
class Compared:
    """Two runs of one machine, "before" and "after", and the changes of the cases that both runs have.

    sides     {"before": ..., "after": ...}, in this order: the machine with the records of that run alone
    margin    a share of the time, such as 0.05: a smaller change counts as none
    in_turns  True: both sides are from one run, in which each row took turns with the same row of an earlier commit
    """

    sides: Mapping[str, load.Machine]
    changes: Sequence[Change]
    margin: float
    in_turns: bool = False


def read_both(old: Sequence[Path], new: Sequence[Path], margin: float, anyway: bool) -> Compared:
    """Compares two runs. ValueError if they share no case, or differ in machine or versions and not `anyway`."""
    before, after = machine_of(old), machine_of(new)
    if not anyway:
        hold_alike(before, after)
    changes = compare(before.records, after.records, margin)
    hold((changes, "nothing to compare: no case was timed in both runs"))
    return Compared({"before": before, "after": after}, changes, margin)


def read_one(path: Path, margin: float | None) -> Compared:
    """Compares the two states of the code that one run measured. ValueError if it was not a run with --against."""
    if (pair := in_turns(machine_of([path]), margin)) is None:
        raise load.InputError(f"{path}: it has no rows as they were: name the run after, too")
    hold((pair.changes, "nothing to compare: no case was timed in both states"))
    return pair


def in_turns(machine: load.Machine, margin: float | None = None) -> Compared | None:
    """Compares rows of today with the same rows of an earlier commit, in a run with --against; None for other runs."""
    # A record's "against" names the earlier state of which its row is: {"name", "commit", "margin"}; None: of today.
    if not (earlier := [case for case in machine.records if case["against"]]):
        return None
    states = [case["against"] for case in earlier]
    commits = sorted({state["commit"] or state["name"] for state in states})
    runs = [run | {"commit": " and ".join(commits), "dirty": False} for run in machine.runs]
    records = [record.today(case) | {"against": None} for case in earlier]  # under the names of today
    today = [case for case in machine.records if not case["against"]]
    sides = {"before": replace(machine, runs=runs, records=records), "after": replace(machine, records=today)}
    margin = margin or max(state["margin"] for state in states)
    return Compared(sides, compare_in_turns(machine.records, margin), margin, in_turns=True)


def machine_of(paths: Sequence[Path]) -> load.Machine:
    """The machine that these result files come from; ValueError if they come from several."""
    machines = load.read(paths)
    titles = " and ".join(machine.title for machine in machines)
    hold((len(machines) == 1, f"{', '.join(map(str, paths))}: a run of one machine is compared, these are {titles}"))
    return machines[0]


def hold_alike(before: load.Machine, after: load.Machine) -> None:
    """ValueError unless the two runs have the same machine and versions, and timed each case by the same clock.

    On a CPU they must also have run as many threads: more threads help some rows more than others.
    """
    hold((before.title == after.title, f"before ran on {before.title}, after on {after.title}{ADVICE}"))
    for name in DECIDE + ("threads",) * (after.runs[0].get("device") != "cuda"):
        was, now = (" and ".join(sorted({str(run.get(name)) for run in side.runs})) for side in (before, after))
        hold((was == now, f"before has {name} {was}, after has {name} {now}{ADVICE}"))
    clocks = {(case["benchmark"], case["id"]): case["clock"] for case in before.records if case["clock"]}
    for case in after.records:
        old, new = clocks.get((case["benchmark"], case["id"])), case["clock"]
        law = f"{case['id']} was timed by the clock {old!r} before, and by {new!r} after{ADVICE}"
        hold((old == new or not old or not new, law))


def of_one_side(pair: Compared) -> Iterator[str]:
    """Yields a line for each run with cases that the other run lacks: how many they are, and the first of them."""
    for run, cases in zip(pair.sides, of_one_run(*(side.records for side in pair.sides.values())), strict=True):
        if cases:
            several = len(cases) > 1
            yield f"{len(cases)} case{'s' * several} only in the run {run}: {cases[0]['id']}{', ...' * several}"


def write(pair: Compared, out: Path) -> Path:
    """Writes the page of both runs into a folder, and returns the path of the page."""
    answers, chapters = block_and_chapters(pair)
    records = [{"run": name} | case for name, side in pair.sides.items() for case in side.records]
    return page.write(out, [(pair.sides["after"], answers, chapters)], items.csv_of(records), list(of_one_side(pair)))


def block_and_chapters(pair: Compared) -> tuple[items.Block, list[items.Chapter]]:
    """(a block with a table of verdicts and one of the two runs, chapters on what changed and on all cases)."""
    slug = pair.sides["after"].slug
    source = " ".join(f"{name.title()}: {side.about(side.records)}" for name, side in pair.sides.items())
    counts = counts_of(pair.changes).items()
    verdicts = items.Table(
        name=f"{slug}-verdicts",
        title="Verdicts",
        caption=_caption(pair),
        columns=["verdict", "cases", "meaning"],
        rows=[[name, f"{cases}{of_them_disturbed(count)}", MEANINGS[name]] for name, (cases, count) in counts],
        data=[{"verdict": name, "cases": cases, "disturbed": count} for name, (cases, count) in counts],
        keys=3,
        source=source,
    )
    facts = []
    for name, side in pair.sides.items():
        for run in side.runs:
            facts.append(
                {"run": name, "machine": load.title_of(run)} | {fact: str(run.get(fact) or "unknown") for fact in FACTS}
            )
    runs = items.Table(
        name=f"{slug}-runs",
        title="The two runs",
        caption="",
        columns=["run", "machine", "date", "commit", "driver", "torch"],
        rows=[
            [run["run"], run["machine"], run["date"][:10], run["commit"][:10], run["driver"], run["torch"]]
            for run in facts
        ],
        data=facts,
        keys=6,
    )
    changed = [change for change in pair.changes if change.is_changed]
    by_benchmark = fields.grouped((str(change.new["benchmark"]), change) for change in pair.changes)
    tables = [("What changed", "changed", changed)] * bool(changed) + [
        (f"All cases: {name.replace('_', ' ')}", f"all-{load.file_name(name)}", cases)
        for name, cases in by_benchmark.items()
    ]
    return items.Block("", [verdicts, runs]), [
        items.Chapter(title, [items.Block("", [_table(f"{slug}-{name}", title, cases, source)])])
        for title, name, cases in tables
    ]


def _caption(pair: Compared) -> str:
    """The caption of the table of verdicts: the margin, and how cases were compared."""
    spreads = [
        case["between_runs"] for side in pair.sides.values() for case in side.records if case.get("between_runs")
    ]
    return " ".join(
        sentences_of(
            (True, f"The margin is {100 * pair.margin:.3g} %."),
            (
                pair.in_turns,
                "Each row took turns with itself as it was, and is compared by its own ratio, round by round;",
            ),
            (
                not pair.in_turns,
                "Each row is compared by its ratio, round by round, to the row that stands as “beside”;",
            ),
            (True, "intervals are of 95 %. Of the changes, at most one in twenty is expected to be false."),
            (
                spreads,
                f"Cases that were measured repeatedly differ by {100 * median(spreads or [0]):.2g} % between runs."
                " Intervals are wider by that.",
            ),
            (
                any(change.disturbed for change in pair.changes),
                "The verdict on a case that was disturbed may come from the disturbance: measure it again.",
            ),
        )
    )


def _table(name: str, title: str, changes: Sequence[Change], source: str) -> items.Table:
    """A table with a line for each change."""
    rows, data, notes = list[list[str]](), list[fields.Record](), cells.Notes()
    for change in changes:
        old, new, (low, high) = change.old, change.new, change.interval or (None, None)
        data.append(
            {
                "benchmark": new["benchmark"],
                "id": new["id"],
                "impl": new["impl"],
                "before_s": old.get("time_s"),
                "after_s": new.get("time_s"),
                "ratio": change.ratio,
                "low": low,
                "high": high,
                "beside": change.beside,
                "verdict": change.verdict,
                "disturbed": change.disturbed,
            }
        )
        times = [words.number(1e6 * side["time_s"]) if side.get("time_s") else side["outcome"] for side in (old, new)]
        marks = "".join(
            cells.mark(notes, f"{words.sentence(remark)}.")
            for remark in filter(None, (change.of_anchor, change.disturbed))
        )
        endings = [change.beside or "nothing", change.verdict + marks]
        rows.append(
            [str(new["id"]).removesuffix(f"-{new['impl']}"), new["impl"]] + times + list(change.texts) + endings
        )  # in the order of COLUMNS; `change.texts` are the ratio and its interval
    return items.Table(
        name=name,
        title=title,
        caption="Times are in microseconds. Where clocks moved, the ratio of the times is not the ratio that counts.",
        columns=COLUMNS,
        rows=rows,
        data=data,
        keys=2,
        notes=cells.below(notes, rows),
        source=source,
    )
