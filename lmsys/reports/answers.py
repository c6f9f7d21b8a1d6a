"""The answers that the page begins with: the fastest row of each question, what was wrong, and what could not run.

Behind them stands one table of all training steps: their model FLOP utilisation, beside what of the large matmul each
reaches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lmsys.bench import fields, verdict
from lmsys.reports import fastest, items, load, tables, views, words

KEYS = {  # of a row's case, and the heads of their columns
    "size": "model",
    "context": "context",
    "batch": "batch",
    "world_size": "ranks",
    "precision": "precision",
    "compile": "compile",
    "checkpoint": "checkpoint",
    "residual": "residual",
}
BY = "num_parameters", *KEYS, "benchmark", "impl"  # lines stand in this order
PLAIN = {"checkpoint": "none", "residual": "wide", "compile": "eager", "world_size": 1}  # of a case that does not say
SHARES = {
    "mfu": "MFU, %",
    "matmul_ceiling_fraction": "Short ceiling, %",
    "sustained_ceiling_fraction": "Sustained ceiling, %",
}
MOST_LINES = 24  # of an answer: of more settings, numbers count as shapes, over which a line is the mean
ABOUT = (
    "The arithmetic of a training step by the formula over its median time, as a share of three rates. MFU: of the peak"
    " that the device's maker states. Short ceiling: of a large matmul of this run, which is over before the device is"
    " hot. Sustained ceiling: of one that is kept up for seconds, under the limit of power. Of several ranks it is one"
    " rank's share. Blank: the rate is not known, as the sustained one where no sweep or option asked for it."
)


def step_chapters(machine: load.Machine) -> list[items.Chapter]:
    """A chapter that is one table: a line for each timed step of any benchmark, models by size.

    None where no step has a share.
    """
    steps = (one for one in machine.records if one.get("mode") in (None, "step") and one.get("time_s"))  # whole ones
    cases = [one for one in steps if "mfu" in one and any(one.get(name) is not None for name in SHARES)]
    if not cases:
        return []
    known = machine.words_of(*machine.layouts)
    cases.sort(key=lambda one: fastest.reading_order(known, [_value(one, name) for name in BY]))
    names = "benchmark", "section", *KEYS, "impl", "time_s", *SHARES
    data: list[fields.Record] = [{name: _value(one, name) for name in names} for one in cases]
    shares = [name for name in SHARES if any(line[name] is not None for line in data)]
    shown = [name for name in KEYS if len({line[name] for line in data}) > 1]
    rows = []
    for line in data:
        keys = [f"{one:,}" if type(one) is int else str(one or "") for one in map(line.get, [*shown, "impl"])]
        percents = ["" if line[share] is None else words.number(100 * line[share]) for share in shares]
        where = f"{line['benchmark']}, {line['section']}".replace("_", " ")
        rows.append([where, *keys, words.number(1e3 * line["time_s"]), *percents])
    most = max(tables.contending(machine, cases), key=lambda case: case.get(shares[0]) or 0)
    alike = ", ".join(f"{head} {data[0][name]}" for name, head in KEYS.items() if name not in shown)
    table = items.Table(
        name=f"{machine.slug}-mfu",
        title="MFU of every step, and its shares of what this machine reaches",
        caption=f"{ABOUT} All: {alike}." if alike else ABOUT,
        columns=["in", *map(KEYS.__getitem__, shown), "row", "Time, ms", *map(SHARES.__getitem__, shares)],
        rows=rows,
        data=data,
        keys=2 + len(shown),
        source=machine.about(cases),
        answer=f"highest: {words.number(100 * most[shares[0]])} %, {most['impl']}, {most['size']}",
    )
    return [items.Chapter("Training steps: MFU", [items.Block("", [table])])]


def _value(case: fields.Record, name: str) -> object:
    return PLAIN.get(name) if case.get(name) is None else case[name]


def questions(machine: load.Machine) -> Iterator[fastest.Question]:
    """That of each layout that asks one, in its words, and one for each benchmark without a layout.

    That is who is fastest in each setting: settings are the axes in which the benchmark's cases differ.
    """
    for name in machine.benchmarks:
        if asked := machine.layouts.get(name, {}).get("fastest"):
            yield fastest.Question(name, **asked, words=machine.words_of(name))
        if name in machine.layouts:
            continue
        view = views.view_of(machine, name)
        keys = [axis for axis in view.axes() if axis not in (*views.UNSAID, "impl") and view.varies(axis)]
        if len(view.distinct(keys)) > MOST_LINES:
            keys = [axis for axis in keys if isinstance(view.first[axis], str)]
        yield fastest.Question(
            benchmark=name,
            word=load.file_name(name),
            title=f"Fastest {name.replace('_', ' ')}",
            keys=dict(zip(keys or ["section"], view.labels(keys or ["section"]), strict=True)),
            bases=[row for row, facts in view.table().items() if facts.get("baseline")],
            kind=next((kind for kind, rows in machine.rows.items() if view.values("impl")[0] in rows), ""),
            of_ours=True,
            words=view.words,
        )


def answers(machine: load.Machine) -> items.Block:
    with load.drawn_by_layout(" or ".join(machine.layouts)):
        tables = [fastest.fastest_of(machine, question) for question in questions(machine)]
    return items.Block("", [*tables, _wrong(machine)], [_not_run(machine)])


def _wrong(machine: load.Machine) -> items.Table:
    """Rows that were wrong or failed, with the first reason of each; a line that says so where there are none."""
    columns, rows, runs = ["row", "how", "in", "cases", "the first of them"], list[list[str]](), list[int]()
    for (outcome, impl, benchmark), cases in verdict.failed(machine.records).items():
        where, first = benchmark.replace("_", " "), str(cases[0]["reason"] or "")
        rows.append([impl, words.MEANINGS[outcome], where, str(len(cases)), first])
        runs += [case["run"] for case in cases]
    if not rows:
        count = sum(case["outcome"] == "ok" for case in machine.records)
        rows = [[f"nothing was wrong: {count:,} of {len(machine.records):,} cases ran, and all of these were right"]]
        columns = ["cases"]
    made = [(f"Run of {name}", command) for name, command in load.commands(machine, runs).values()]
    return replace(_listed(machine, "wrong", "Wrong or failed", columns, rows), notes=[*_right(machine)], runs=made)


def _right(machine: load.Machine) -> Iterator[str]:
    """For each dtype the rows of attention that were right in all cases: of others nothing is known."""
    by_dtype = fields.grouped(
        (str(case["dtype"]), case) for case in machine.records if case["benchmark"] == "attention" and case.get("dtype")
    )
    for dtype in sorted(by_dtype, key=lambda dtype: fastest.reading_order({}, [dtype])):
        ended = fields.grouped((str(case["impl"]), case["outcome"]) for case in by_dtype[dtype])
        names = [name for name, outcomes in ended.items() if "ok" in outcomes and not {*outcomes} & {*verdict.FAILED}]
        if names:
            yield f"Attention that was right in {dtype}, in every case that ran: {', '.join(names)}."


def _not_run(machine: load.Machine) -> items.Table | None:
    """Each reason once, with the rows that it holds for, and those of them that other runs of this machine have."""
    lines = []
    for reason, rows in verdict.not_run(machine.records).items():
        of = [case for case in machine.records if case["impl"] in rows]
        without = {case["run"] for case in of if case["outcome"] == "unsupported" and case["reason"] == reason}
        right = fields.grouped((case["run"] in without, str(case["impl"])) for case in of if case["outcome"] == "ok")
        elsewhere = sorted({*right.get(False, ())} - {*right.get(True, ())}) if without else []
        also = f"; in another run {', '.join(elsewhere)} ran" * bool(elsewhere)
        lines.append([", ".join(rows), reason + also, str(rows.total())])
    return _listed(machine, "not-run", "Not run here", ["row", "why", "cases"], lines) if lines else None


def _listed(
    machine: load.Machine, word: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> items.Table:
    return items.Table(
        f"{machine.slug}-{word}",
        title,
        "",
        columns,
        rows,
        [dict(zip(columns, row, strict=True)) for row in rows],
        keys=len(columns),
        source=machine.about(machine.records),
    )
