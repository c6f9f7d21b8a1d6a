"""The answers that the page begins with: the fastest row of each question, what was wrong, and what could not run."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from lmsys.bench.fields import Record
from lmsys.bench.verdict import not_run
from lmsys.reports.fastest import FAILED, QUESTIONS, fastest_of, reading_order
from lmsys.reports.load import Machine, commands
from lmsys.reports.tables import Block, Table
from lmsys.reports.words import MEANINGS


def answers(machine: Machine) -> Block:
    tables = [fastest_of(machine, question) for question in QUESTIONS]
    return Block("", [*tables, _wrong(machine), _not_run(machine)])


def _wrong(machine: Machine) -> Table:
    """Rows that were wrong or failed, with the first reason of each; a line that says so where there are none."""
    found: dict[tuple[str, ...], list[Record]] = {}
    failed = [one for one in machine.records if one["outcome"] in FAILED]
    for one in failed:
        found.setdefault((one["outcome"], one["impl"], one["benchmark"]), []).append(one)
    columns = ["row", "how", "in", "cases", "the first of them"]
    rows = [
        [impl, MEANINGS[outcome], benchmark.replace("_", " "), str(len(cases)), str(cases[0]["reason"] or "")]
        for (outcome, impl, benchmark), cases in found.items()
    ]
    if not rows:
        count = sum(one["outcome"] == "ok" for one in machine.records)
        of = f"{count:,} of {len(machine.records):,} cases"
        columns, rows = ["cases"], [[f"nothing was wrong: {of} ran, and all of these were right"]]
    made = commands(machine, (one["run"] for one in failed))
    runs = [(f"Run of {name}", command) for name, command in made.values()]
    return replace(_listed(machine, "wrong", "Wrong or failed", columns, rows), notes=[*_right(machine)], runs=runs)


def _right(machine: Machine) -> Iterator[str]:
    """For each dtype the rows of attention that were right in all cases: of others nothing is known."""
    ended: dict[str, dict[str, set[str]]] = {}
    for one in machine.records:
        if one["benchmark"] == "attention" and one.get("dtype"):
            ended.setdefault(str(one["dtype"]), {}).setdefault(str(one["impl"]), set()).add(one["outcome"])
    for dtype, rows in sorted(ended.items(), key=lambda one: reading_order([one[0]])):
        names = [name for name, outcomes in rows.items() if "ok" in outcomes and not outcomes & {*FAILED}]
        if names:
            yield f"Attention that was right in {dtype}, in every case that ran: {', '.join(names)}."


def _not_run(machine: Machine) -> Table | None:
    """Each reason once, with the rows that it holds for, and those of them that other runs of this machine have."""
    lines = []
    for reason, rows in not_run(machine.records).items():
        of = [one for one in machine.records if one["impl"] in rows]
        without = {one["run"] for one in of if one["outcome"] == "unsupported" and one["reason"] == reason}
        others = {one["run"] for one in of if without} - without
        elsewhere = sorted(_ran(of, others) - _ran(of, without))
        also = [f"in another run {', '.join(elsewhere)} ran"] if elsewhere else []
        lines.append([", ".join(rows), "; ".join([reason, *also]), str(rows.total())])
    return _listed(machine, "not-run", "Not run here", ["row", "why", "cases"], lines) if lines else None


def _ran(cases: Sequence[Record], runs: Container[int]) -> set[str]:
    """The rows of which a case was right in one of these runs."""
    return {str(one["impl"]) for one in cases if one["outcome"] == "ok" and one["run"] in runs}


def _listed(machine: Machine, word: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    data = [dict(zip(columns, row, strict=True)) for row in rows]
    source = machine.about(machine.records)
    return Table(f"{machine.slug}-{word}", title, "", columns, rows, data, keys=len(columns), source=source)
