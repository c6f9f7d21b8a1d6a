"""The beginning of the page: for each question a table of the fastest rows, then what was wrong, and what did not run.

A case is one record of a result file: one row (an implementation) as it was measured with one value for each axis. A
setting is a group of cases, such as those of one dtype and direction, in which rows are ranked. Rows "took turns" if
they were sampled together, round by round, in one run.

`__main__.build` calls two functions. `answers` makes the tables named above; contest.py decides which row is fastest.
To ask another question, declare it in a benchmark's layout, under "fastest" (`contest.Question`). `step_chapters`
makes one table of all training steps: their model FLOP utilisation (MFU), and their shares of the rate that large
matmuls reached on the machine. To add a column there, extend KEYS or SHARES.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter

from lmsys.bench import fields, verdict
from lmsys.reports import cells, items, load, plots, tables, views, words
from lmsys.reports.contest import Question, reading_order

FEW = 4  # if fewer rows took turns, a line says how many
# The facts of a table's line that its CSV leaves out; `Contest.line` explains all facts of a line. `over_as` and
# `next_as` are texts for `over`, the row that speeds are relative to, and for `next`, the second fastest row. `named`
# lists the rows that the legend explains, and `details` is the text for a reader who points at a figure.
INNER = "details", "run", "named", "unsteady", "rivals", "over_as", "next_as", "measured", "standing"
ABOUT = (
    "The rows of a line took turns in one run; (of 2 rows) says that only two did. 1.5 × NAME means 1.5 times as fast"
    " as the row NAME, in the geometric mean over the shapes of the run. Time and rate are the fastest row's in the"
    " shape that took it longest. Point at a figure, or click on it: it names the rows,"
    f" and says in how many shapes no other row was more than {verdict.NEAR_TEXT} faster."
)
# DISTURBED, RIVALS and UNSTEADY are footnotes.
DISTURBED = "Cases that were disturbed decide nothing here, because others were not."
RIVALS = "In another run, which took no turns with this one, these took less time: {}."
UNSTEADY = (
    f"Unsteady: from p20 to p80 the samples of one of the two spread over more than {cells.STEADY:.0%} of the median."
)
WAYS = {  # for captions: {value of a model's field `compile`: how its steps ran}
    "compiled": "by torch.compile",
    "graphed": "compiled, and replayed as one CUDA graph",
    "fused": "by kernels of lmsys in place of a compiler, and replayed",
    "eager": "PyTorch's own kernels, one after another",
}
# Columns of the tables of `fastest_of` that are empty in a line without a fastest row.
FIGURES = ["time", "rate", "speed", "over the next fastest"]
OPTIONAL = {"over the next fastest", "MFU"}  # columns that a table leaves out where all lines are empty there
LINE_IN = 0.29  # height of a plot's strip for one setting, in inches
KEYS = {  # fields that say what a training step was, and the heads of their columns
    "size": "model",
    "context": "context",
    "batch": "batch",
    "world_size": "ranks",
    "precision": "precision",
    "compile": "compile",
    "checkpoint": "checkpoint",
    "residual": "residual",
}
# {field of KEYS: the value of a case that lacks it}
PLAIN = {"checkpoint": "none", "residual": "wide", "compile": "eager", "world_size": 1}
SHARES = {  # fields of a step that are shares of a rate, and the heads of their columns
    "mfu": "MFU",
    "matmul_ceiling_fraction": "Short ceiling",
    "sustained_ceiling_fraction": "Sustained ceiling",
}
STEP_FIELDS = {  # declarations of the fields that the table of training steps shows
    "benchmark": fields.Field("benchmark"),
    "section": fields.Field("section"),
    **{name: fields.Field(name, label=label) for name, label in KEYS.items()},
    "impl": fields.Field("impl", label="row"),
    "time_s": fields.Field("time_s", "s", "Time", shown="ms"),
    **{name: fields.Field(name, label=label, shown="%") for name, label in SHARES.items()},
}
# For a benchmark without a layout: if the combinations of values would give more lines than this, only axes whose
# values are texts make settings, and a line is a mean over the other axes.
MOST_LINES = 24
ABOUT_STEPS = (
    "The arithmetic of a training step by the formula over its median time, as a share of three rates. MFU: of the peak"
    " that the device's maker states. Short ceiling: of a large matmul of this run, which is over before the device is"
    " hot. Sustained ceiling: of one that is kept up for seconds, under the limit of power. Of several ranks it is one"
    " rank's share. Blank: the rate is not known, as the sustained one where no sweep or option asked for it."
)


def answers(machine: load.Machine) -> items.Block:
    """The first block of a machine's part of the page."""
    # A question's fields and expressions come from a result file: a mistake in them is reported as the layout's.
    with load.drawn_by_layout(" or ".join(machine.benchmarks), known=set[str]().union(*machine.fields.values())):
        fastest = list(map(partial(fastest_of, machine), questions(machine)))
    return items.Block("", fastest + [_wrong(machine)], [_not_run(machine)])


def questions(machine: load.Machine) -> Iterator[Question]:
    """Yields the question that each layout asks under "fastest", if any, and one for each benchmark without a layout.

    Without a layout, a setting is a combination of values of the axes in which the benchmark's cases differ.
    """
    for name in machine.benchmarks:
        if name in machine.layouts:
            if declared := machine.layouts[name].get("fastest"):
                yield Question(name, **declared)
            continue
        view = views.view_of(machine, name)
        keys = view.chosen(["@?", "-impl", "-device"])  # the axes that differ between cases, without impl and device
        if len(view.groups(keys)) > MOST_LINES:
            keys = [axis for axis in keys if isinstance(view.first[axis], str)]
        keys = keys or ["section"]
        yield Question(
            benchmark=name,
            word=load.file_name(name),
            title=f"Fastest {name.replace('_', ' ')}",
            keys=dict(zip(keys, view.labels(keys), strict=True)),
            bases=[row for row, facts in view.table().items() if facts.get("baseline")],
            kind=next((kind for kind, rows in machine.rows.items() if view.values("impl")[0] in rows), ""),
            of_ours=True,
        )


def fastest_of(machine: load.Machine, question: Question) -> items.Table | None:
    """A table with a line for each setting: the row that is fastest there; None if no setting has enough rows."""
    settings, lines = question.settings(machine), list[fields.Record]()
    for key, cases in settings.items():
        if facts := question.answer(machine, cases):
            lines.append(dict(zip(question.keys, key, strict=True)) | facts)
    if not lines:
        return None
    in_order = enumerate(dict.fromkeys(map(itemgetter("run"), lines)))
    # The letter of each run: A to Z, A1, B1, ...
    runs = {run: chr(ord("A") + place % 26) + str(place // 26 or "") for place, run in in_order}
    shown = _shown_keys(question, lines, list(settings))
    heads = [_setting(machine, question, line, shown) for line in lines]
    marks, texts = cells.Notes(), list[dict[str, str]]()  # texts: for each line, {column: text of its cell}
    for head, line in zip(heads, lines, strict=True):
        mfu = f"{words.number(100 * line['mfu'])}\N{NO-BREAK SPACE}%" if question.mfu and line["mfu"] else ""
        texts.append({"setting": head} | _texts(line, marks) | {"MFU": mfu, "run": runs[line["run"]]})
    columns = [column for column in texts[0] if column not in OPTIONAL or any(line[column] for line in texts)]
    rows = [[line[column] for column in columns] for line in texts]
    name = f"{machine.slug}-fastest-{load.file_name(question.word)}"
    dates_of, commands = load.run_names(machine, runs), load.commands(machine, runs)
    # A line's `compile` may name several ways, such as "compiled or graphed", so the texts of all lines are searched.
    compiled = " ".join(str(line.get("compile")) for line in lines)
    ways = words.sentence("; ".join(f"{name}: {about}" for name, about in WAYS.items() if name in compiled))
    dates = ", ".join(f"{letter} of {dates_of[run]}" for run, letter in runs.items())
    return items.Table(
        name=name,
        title=question.title,
        caption=ABOUT
        + question.about
        + f" {ways}." * bool(ways)
        + " MFU is that of the fastest row, in the shape where it is highest." * ("MFU" in columns),
        columns=columns,
        rows=rows,
        data=tables.lines_of(lines, [name for name in lines[0] if name not in INNER]),
        notes=cells.below(marks, rows)
        + [f"Runs: {dates}."]
        + load.legend(machine, question.kind, set[str]().union(*map(itemgetter("named"), lines))),
        keys=2,
        source=machine.about(sum(settings.values(), [])),  # the cases of all settings
        # Column 2 is the time: the best figure; columns 0 and 1 are keys, and all others have details.
        best=frozenset((at, 2) for at, line in enumerate(lines) if line["fastest"]),
        details={(at, column): line["details"] for at, line in enumerate(lines) for column in range(2, len(columns))},
        plot=standing(machine, lines, heads, question.title, name, question.kind),
        runs=[(f"Run {letter}, of {commands[run][0]}", commands[run][1]) for run, letter in runs.items()],
    )


def _shown_keys(question: Question, lines: Sequence[fields.Record], settings: Sequence[Sequence[object]]) -> list[str]:
    """The keys whose values a line shows as its setting: those in which lines differ, or else the first key.

    A key of `question.told` is shown even if all lines have the same value of it, provided that `settings` differ in
    it: these include settings that got no line.
    """
    shown = [name for name in question.keys if len({line[name] for line in lines}) > 1] or list(question.keys)[:1]
    for name, values in zip(question.keys, zip(*settings, strict=True), strict=True):
        if name in question.told and name not in shown and len(set(values)) > 1:
            shown.append(name)
    return shown


def _setting(machine: load.Machine, question: Question, line: fields.Record, names: Sequence[str]) -> str:
    """A line's values of the keys `names`, in words; the label of the key stands before a number."""
    known, texts = machine.words_of(question.benchmark), []
    for name in names:
        head = f"{question.keys[name]}\N{NO-BREAK SPACE}" if type(line[name]) in (int, float) else ""
        texts.append(head + known.get(name, {}).get(line[name], str(line[name] or "")))
    return ", ".join(filter(None, texts))


def _texts(line: fields.Record, notes: cells.Notes) -> dict[str, str]:
    """The texts of a line by column.

    The columns are the fastest row, its time, its rate, its speed over the base, and its speed over the next fastest
    row, which is empty if that row is the base.
    """
    disturbed = ", all of them disturbed" * (line["disturbed"] == "all")
    if line["disturbed"] == "some":
        disturbed = cells.mark(notes, DISTURBED)
    if not line["fastest"]:  # `contest.UNSETTLED`; or each row was slower than some other one, as samples spread
        return {"fastest row": f"not settled{disturbed}"} | dict.fromkeys(FIGURES, "")
    row = line["called"] + f" (of {line['rows']} rows)" * (line["rows"] < FEW) + disturbed
    if line["rivals"]:
        row += cells.mark(notes, RIVALS.format(", ".join(line["rivals"])))
    speed = _times(line["speedup"], line["over_as"])
    if speed and line["unsteady"]:
        speed += cells.mark(notes, UNSTEADY)
    figures = line["measured"] + [speed, _times(line["lead"], line["next_as"]) * (line["next"] != line["over"])]
    return {"fastest row": row} | dict(zip(FIGURES, figures, strict=True))


def _times(speed: float | None, name: str) -> str:
    """A speed over the row `name` in words: "1.5 × NAME"; "" for None."""
    return f"{words.number(speed)}\N{NO-BREAK SPACE}× {name}" if speed else ""


def standing(
    machine: load.Machine, lines: Sequence[fields.Record], heads: Sequence[str], title: str, name: str, kind: str
) -> items.Plot | None:
    """A plot with a strip for each setting, and on it a dot for each row at its share of the fastest row's speed.

    lines, heads  the lines of a table of `fastest_of`, and their settings in words
    title, name   of the plot, and the stem of its file's name
    kind          the table that has the rows' colours

    None if there is only one row.
    """
    rows = set[str]().union(*map(itemgetter("standing"), lines))
    if len(rows) < 2:
        return None
    peers = {str(case.get("strategy") or case["impl"]): bool(case.get("peer")) for case in machine.records}
    looks = [{"row": row, "peer": peers[row]} for row in rows]
    axes = plots.canvas(LINE_IN * len(lines) + 0.4)
    for row, style in words.styles_of(looks, name="row", row="row", label="", table=machine.rows.get(kind, {})).items():
        places = [at for at, line in enumerate(lines) if row in line["standing"]]
        speeds = [100 * lines[at]["standing"][row] for at in places]
        axes.plot(speeds, places, **style.line() | {"linestyle": "none", "alpha": 0.85, "clip_on": False})
    for place, head in enumerate(heads):
        axes.text(0, place - 0.17, head, va="bottom", fontsize=8)
    axes.set(xlim=(0, 104), ylim=(len(lines) - 0.5, -0.9), yticks=range(len(lines)), yticklabels=[], xlabel="%")
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    return items.Plot(
        name=name,
        title=title,
        caption="Speed of each row as a share of the speed of the fastest one, %, by rounds in which both took turns; "
        "over several shapes, the geometric mean. Further right is faster.",
        svg=plots.to_svg(axes, name, title),
    )


def _wrong(machine: load.Machine) -> items.Table:
    """A table of rows that were wrong or failed, with the first reason of each; one line that says so if none did."""
    columns, rows, runs = ["row", "how", "in", "cases", "the first of them"], list[list[str]](), list[int]()
    for (outcome, impl, benchmark), cases in verdict.failed(machine.records).items():
        where, first = benchmark.replace("_", " "), str(cases[0]["reason"] or "")
        rows.append([impl, words.MEANINGS[outcome], where, str(len(cases)), first])
        runs += map(itemgetter("run"), cases)
    if not rows:
        ran = [case.get("error_ratio") for case in machine.records if case["outcome"] == "ok"]
        unchecked = ran.count(None)
        right = (
            f"{len(ran) - unchecked:,} were right, {unchecked:,} were not checked"
            if unchecked
            else "all of these were right"
        )
        rows = [[f"nothing was wrong: {len(ran):,} of {len(machine.records):,} cases ran, and {right}"]]
        columns = ["cases"]
    commands = [(f"Run of {name}", command) for name, command in load.commands(machine, runs).values()]
    return _table_of_texts(machine, "wrong", "Wrong or failed", columns, rows, list(_right(machine)), commands)


def _right(machine: load.Machine) -> Iterator[str]:
    """Yields a sentence for each dtype of each benchmark with an axis `dtype`: which rows were right in all cases."""
    axes = {name for name, known in machine.fields.items() if "dtype" in known and known["dtype"].role == "axis"}
    cases = [case for case in machine.records if case["benchmark"] in axes and case.get("dtype")]
    by_dtype = fields.grouped(((case["benchmark"], str(case["dtype"])), case) for case in cases)
    for benchmark, dtype in sorted(by_dtype, key=partial(reading_order, {})):
        by_row = fields.grouped((str(case["impl"]), case["outcome"]) for case in by_dtype[benchmark, dtype])
        rows = [row for row, ends in by_row.items() if "ok" in ends and not set(ends).intersection(verdict.FAILED)]
        if rows and rows != [dtype]:  # rows may be dtypes themselves
            what = f"{words.sentence(benchmark.replace('_', ' '))} that was right in {dtype}"
            yield f"{what}, in every case that ran: {', '.join(rows)}."


def _not_run(machine: load.Machine) -> items.Table | None:
    """A table of the reasons why rows could not run: for each its rows, and those that ran in another run."""
    lines = []
    for reason, rows in verdict.not_run(machine.records).items():
        cases = [case for case in machine.records if case["impl"] in rows]
        refused = {case["run"] for case in cases if case["outcome"] == "unsupported" and case["reason"] == reason}
        # {True: rows that were right in a run in which a row was refused for this reason, False: in other runs}
        right = fields.grouped((case["run"] in refused, str(case["impl"])) for case in cases if case["outcome"] == "ok")
        elsewhere = sorted(set(right.get(False, ())).difference(right.get(True, ()))) if refused else []
        also = f"; in another run {', '.join(elsewhere)} ran" * bool(elsewhere)
        lines.append([", ".join(rows), reason + also, str(rows.total())])
    return _table_of_texts(machine, "not-run", "Not run here", ["row", "why", "cases"], lines) if lines else None


def _table_of_texts(
    machine: load.Machine,
    word: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    runs: Sequence[tuple[str, str]] = (),
) -> items.Table:
    """A table without figures; `word` ends its file's name."""
    return items.Table(
        name=f"{machine.slug}-{word}",
        title=title,
        caption="",
        columns=columns,
        rows=rows,
        data=[dict(zip(columns, row, strict=True)) for row in rows],
        notes=notes,
        keys=len(columns),
        runs=runs,
        source=machine.about(machine.records),
    )


def step_chapters(machine: load.Machine) -> list[items.Chapter]:
    """[a chapter with one table: a line for each timed training step of any benchmark, sorted by the model's size].

    [] if no step has one of SHARES.
    """
    cases = []
    for case in machine.records:
        is_step = case.get("mode") in (None, "step") and case.get("time_s") and "mfu" in case
        if is_step and any(case.get(share) is not None for share in SHARES):
            cases.append(PLAIN | {name: value for name, value in case.items() if value is not None})
    if not cases:
        return []
    known = machine.words_of(*machine.layouts)
    cases.sort(
        key=lambda case: reading_order(known, list(map(case.get, ("num_parameters", *KEYS, "benchmark", "impl"))))
    )
    data = tables.lines_of(cases, list(STEP_FIELDS))
    view = views.View(machine, benchmark="", fields=STEP_FIELDS, cases=data, words={})
    shown, shares = list(filter(view.varies, KEYS)), list(filter(view.has, SHARES))
    rows = []
    for line in data:
        figures = [cells.shown(view, name, line) for name in ["time_s"] + shares]
        place = f"{line['benchmark']}, {line['section']}".replace("_", " ")
        rows.append([place] + view.texts(shown + ["impl"], line) + figures)
    highest = max(tables.contending(machine, cases), key=lambda case: case.get(shares[0], 0))
    alike = ", ".join(f"{head} {data[0][name]}" for name, head in KEYS.items() if name not in shown)
    table = items.Table(
        name=f"{machine.slug}-mfu",
        title="MFU of every step, and its shares of what this machine reaches",
        caption=f"{ABOUT_STEPS} All: {alike}." if alike else ABOUT_STEPS,
        columns=["in"] + [words.head_of(STEP_FIELDS[name]) for name in shown + ["impl", "time_s"] + shares],
        rows=rows,
        data=data,
        keys=2 + len(shown),
        source=machine.about(cases),
        answer=f"highest: {words.number(100 * highest[shares[0]])} %, {highest['impl']}, {highest['size']}",
    )
    return [items.Chapter("Training steps: MFU", [items.Block("", [table])])]
