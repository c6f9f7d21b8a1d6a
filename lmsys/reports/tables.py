"""Makes tables of a view by `pivot`, `listing`, `endings`, `means` and `same_bits`, which are steps of layouts.

A view is some cases of one benchmark (views.py); a case is one record of a result file, of one row (an implementation).
`pivot` spreads one metric over lines and columns, `listing` has a line for each case with all its metrics, `endings`
counts how cases ended, `means` has geometric means of speedups, and `same_bits` says which rows give the same bits
when they are called again. Each returns an `items.Table`, or None if there is nothing to show. The table has texts of
cells (cells.py) and the data of its CSV file; `pivot` and `listing` also mark the best figure of each line.

`steps` calls these functions with a layout's arguments: `word` ends the name of the table's file, and `word` and
`title` may have names of fields in braces. `answers`, `plots`, `special` and `terminal` use the helpers. A new kind of
table is a function here that returns an `items.Table`, and an entry of `steps.STEPS`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lmsys.bench import fields, verdict
from lmsys.reports import cells, expressions, items, load, views, words

ENDINGS = ["timed", "verified, untimed"] + list(words.MEANINGS.values())  # how a case may end, in words
LEFT_OUT = "Left out, as no case of it could run"  # begins a note
Place = tuple[int, int]  # a cell's line and column
# Ends captions if a case was disturbed: the machine was busy or slowed while the case was measured.
ASIDE = " Disturbed cases count only where a row has no others."
SPREAD = ["mean_s", "std_s", "p20_s", "p80_s", "rounds"]  # fields that a CSV has beside the time
Line = Sequence[fields.Record | None]  # the cases in the cells of a line; None for one that was not run


def data_of(view: views.View, names: Sequence[str]) -> list[fields.Record]:
    """The data of a table's CSV: a record for each case, with the declared axes, how it ended, and these fields."""
    declared = view.machine.fields[view.benchmark].values()
    axes = [field.name for field in declared if field.role == "axis" and field.name not in views.OF_THE_ROW]
    return lines_of(view.cases, list(filter(view.has, axes)) + ["outcome"] + list(names))


def lines_of(cases: Iterable[fields.Record], names: Sequence[str]) -> list[fields.Record]:
    """A record for each case with these fields alone; None in place of a field that a case does not have."""
    return [dict(zip(names, map(case.get, names), strict=True)) for case in cases]


def pivot(
    view: views.View,
    metric: str,
    rows: Sequence[str],
    columns: str = "impl",
    inside: str = "",
    word: str = "",
    about: str = "",
    data: Sequence[str] = (),
) -> items.Table | None:
    """A table of one metric.

    rows     fields, as in `View.chosen`: a line for each combination of their values; every other axis that is needed
             to tell cases apart is added to them
    columns  a field: a column for each of its values
    inside   a field: a cell has the metric for each of its values, as "a / b"
    word     ends the file's name; by default the metric's word in `words.FILES`
    about    the caption's first sentence; by default what the metric's declaration says
    data     fields of the CSV, by default the metric

    None if there is no number to show; but the time always has a table, since its cells tell how cases ended.
    """
    field, is_speedup = view.fields[metric], metric == cells.SPEEDUP
    if metric != "time_s" and not view.has(metric) or is_speedup and not cells.is_compared(view):
        return None
    rows = view.identifying(view.chosen(rows), (columns, inside)) or ["section"]
    cases = view.index(rows + [columns, inside] if inside else rows + [columns])
    view, left_out = _without_unsupported(view, columns)
    heads = view.values(columns)
    # The last parts of the keys of `cases`: one for each case of a cell, or () if a cell has a single case.
    inner: list[views.Key] = [(value,) for value in view.values(inside)] if inside else [()]
    is_single, clocked, notes = len(inner) == 1, words.is_clocked(field), cells.Notes()
    compares = clocked and not is_speedup and "impl" in (columns, inside)
    # By place, `best` has the best cases, and `details` the texts for a reader who points there.
    lines, best, details = list[list[str]](), dict[Place, fields.Record](), dict[Place, str]()
    for key, part in view.ordered(*rows).groups(rows).items():
        groups = []  # the cases of each cell of this line; `line` has the cases of all its cells
        for head in heads:
            groups.append([cases.get(key + (head,) + value) for value in inner])
        line, texts = sum(groups, []), view.texts(rows, part.first)
        winners = _best(view, field, line) if is_single and columns == "impl" else []
        for place, case in enumerate(line, len(rows)):
            if case in winners:
                best[len(lines), place] = case
            if clocked and is_single:
                details[len(lines), place] = cells.detail(view, case)
        for group in groups:
            # The base is looked for in the cell if the cell compares rows, else in the line if the line compares rows.
            beside = group if inside == "impl" else line if compares else []
            texts.append(_group(view, metric, group, beside, notes))
        lines.append(texts)
    footnotes = cells.below(notes, lines)
    if is_speedup and columns == "impl":
        if any("" in line for line in lines):
            footnotes.append(f"Blank: not sampled together with {view.text('impl', view.base)}.")
        means = [cells.mean_text(ratios_of(view.having("impl", [head]))) for head in heads]
        lines.append(["geometric mean (cells)"] + [""] * (len(rows) - 1) + means)
    title, caption = words.head_of(field), view.caption(about or about_of(field), clocked)
    if not is_single:
        several = " / ".join(view.text(inside, value) for (value,) in inner)
        title, caption = f"{title} ({several})", f"{caption}\nIn each cell: {several}."
    return items.Table(
        name=view.file(word or words.FILES.get(metric, metric)),
        title=titled(title, view),
        caption=caption,
        columns=view.labels(rows) + [value_head(view, columns, head) for head in heads],
        rows=lines,
        data=data_of(view, data or [metric] + SPREAD * (metric in ("time_s", "mean_s"))),
        notes=footnotes + left_out,
        keys=len(rows),
        source=view.machine.about(view.cases),
        best=frozenset(best),
        details=details,
        answer=_answer(view, field, list(best.values()), len(lines)),
    )


def ratios_of(view: views.View) -> list[float]:
    """The speedups that count in a mean: those of undisturbed cases, or all if every case was disturbed."""
    return view.of(verdict.undisturbed(view.only(cells.SPEEDUP).cases)).column(cells.SPEEDUP)


def _answer(view: views.View, field: fields.Field, winners: Sequence[fields.Record], lines: int) -> str:
    """A sentence: which row is the best in most lines of a table, and its figures there.

    winners  the best case of each line
    lines    the number of lines

    "" if a benchmark with a layout has no peer (somebody else's row), since the best of our own rows may still be slow.
    """
    if not winners or view.machine.layouts.get(view.benchmark) and not view.has_any("peer"):
        return ""
    part = view.of(winners)
    ((row, count),) = Counter(part.column("impl")).most_common(1)
    part = part.having("impl", [row])
    values = sorted(part.column(field.name))
    figures = words.span([words.number(words.scaled(field, value)) for value in (values[0], values[-1])])
    what = words.inside_a_sentence(words.label_of(field).partition(",")[0])
    where = f" in {count} of {lines} lines" if lines > 1 else ""
    answer = f"best {what}: {view.text('impl', row)}{where}, {figures} {words.unit_of(field)[0]}"
    return answer + ", disturbed" * part.has_any("disturbed")


def _without_unsupported(view: views.View, columns: str) -> tuple[views.View, list[str]]:
    """(the view, [a note]): if columns are rows, the view loses those that support no case, and the note names them."""
    supported = view.only("outcome != 'unsupported'").values(columns)
    unsupported = [row for row in view.values(columns) if row not in supported]
    if columns != "impl" or not unsupported or not supported:
        return view, []
    names = ", ".join(view.text(columns, row) for row in unsupported)
    return view.having(columns, supported), [f"{LEFT_OUT}: {names}. “Not run here” says why."]


def _best(view: views.View, field: fields.Field, line: Line) -> list[fields.Record]:
    """The cases with the best value of a field, among those of a line that were sampled together with its base.

    [] if it is not known whether more or less of the field is better, or if fewer than two cases were sampled together.
    Cases that do not do the benchmark's whole work (see `contending`) count only if no case does.
    """
    timed = [case for case in line if case and case["time_s"] and case.get(field.name) is not None]
    base = _base(view, timed)
    together = [case for case in timed if base and case["comparison"] == base["comparison"]]
    more_is_better = field.unit.endswith("/s") or field.name in (cells.SPEEDUP, "mfu", *cells.CEILINGS)
    if len(together) < 2 or field.unit not in ("s", "B") and not more_is_better:
        return []
    contenders = view.of(contending(view.machine, together))
    values = view.of(verdict.undisturbed(contenders.cases)).column(field.name)
    return list(contenders.having(field.name, [max(values) if more_is_better else min(values)]).cases)


def contending(machine: load.Machine, cases: Sequence[fields.Record]) -> Sequence[fields.Record]:
    """The cases that pass the expression `contends` of their layout's "fastest"; all cases if none does."""
    tests = {name: layout.get("fastest", {}).get("contends", "True") for name, layout in machine.layouts.items()}
    return [case for case in cases if expressions.value_of(tests.get(case["benchmark"], "True"), case)] or cases


def value_head(view: views.View, name: str, value: Any) -> str:
    """The head of a column for a field's value. A number, or a yes or no, has the field's label in front of it."""
    is_bare = isinstance(value, int | float) and value not in view.words.get(name, ())
    return f"{words.label_of(view.fields[name])} " * is_bare + view.text(name, value)


def _group(view: views.View, metric: str, group: Line, beside: Line, notes: cells.Notes) -> str:
    """The text of one cell: the metric of each case of `group`, as "a / b".

    beside  the cases among which the base is looked for; a footnote marks timed cases that are not sampled with it
    notes   the table's footnotes, to which those of this cell are added
    """
    timed = [case for case in beside if case and case["time_s"] is not None]
    base, texts = _base(view, timed), []
    for case in group:
        text = cells.cell(view, metric, case, notes)
        if base and case in timed and case["comparison"] != base["comparison"]:
            other = view.text("impl", base["impl"])
            text += cells.mark(notes, f"measured in another run than {other}: not comparable within a few per cent")
        texts.append(text)
    if len(group) == 1:
        return texts[0]
    return " / ".join(text or "·" for text in texts) if any(group) else cells.NOT_RUN


def _base(view: views.View, timed: Sequence[fields.Record]) -> fields.Record | None:
    """The case that others are to be compared with: that of the view's base, else the first; None without cases."""
    bases = view.of(timed).having("impl", [view.base]).cases or timed
    return bases[0] if bases else None


def about_of(field: fields.Field) -> str:
    """A sentence on a field for a caption, with its unit."""
    return ", ".join(filter(None, [field.about or words.sentence(words.label_of(field)), words.unit_of(field)[0]]))


def titled(head: str, view: views.View) -> str:
    """The title of a table or plot: its head, and what its cases have in common."""
    return " · ".join(filter(None, [head, words.sentence(view.heading)]))


def listing(
    view: views.View,
    keys: Sequence[str],
    metrics: Sequence[str],
    word: str,
    title: str,
    about: str = "",
    data: Sequence[str] = (),
) -> items.Table | None:
    """A table with a line for each case; None without cases.

    keys     fields of the first columns, as in `View.chosen`, and every other axis that is needed to tell cases apart
    metrics  fields of the other columns; the cell of the first also tells how a case ended
    word     ends the file's name; `title`, `about`: the title, and the caption's first sentence
    data     fields of the CSV, by default the metrics
    """
    if not view.cases:
        return None
    keys, metrics, notes = view.identifying(view.chosen(keys)), view.chosen(metrics), cells.Notes()
    shown = list(map(view.fields.__getitem__, metrics))
    rows, best, details = list[list[str]](), dict[Place, fields.Record](), dict[Place, str]()
    clocked = list(filter(words.is_clocked, shown))
    for case in view.cases:
        texts = view.of([case]).texts(keys, case)
        for name, field in zip(metrics, shown, strict=True):
            if field in clocked:
                details[len(rows), len(texts)] = cells.detail(view, case)
            texts.append(cells.cell(view, name, case, notes, ending=name == metrics[0]))
        rows.append(texts)
    is_single = len(view.groups(["id"])) == len(view.cases)  # else a case has several lines
    for part in view.groups(["comparison"]).values() if is_single else ():
        for column, field in enumerate(shown, len(keys)):
            for case in _best(view, field, part.cases):
                best[view.cases.index(case), column] = case
    first_clocked = len(keys) + shown.index(clocked[0]) if clocked else None  # the column that the answer is about
    winners = [case for (_, column), case in best.items() if column == first_clocked]
    abouts = [_explained(words.sentence(words.label_of(field)), field.about) for field in shown if field.about]
    return items.Table(
        name=view.file(view.filled(word)),
        title=titled(view.filled(title), view),
        caption=view.caption(about or ". ".join(abouts), bool(clocked)),
        columns=view.labels(keys) + list(map(words.head_of, shown)),
        rows=rows,
        data=data_of(view, list(data or metrics) + SPREAD * any(name in metrics for name in ("time_s", "mean_s"))),
        notes=cells.below(notes, rows),
        keys=len(keys),
        source=view.machine.about(view.cases),
        best=frozenset(best),
        details=details,
        answer=_answer(view, clocked[0], winners, len(view.groups(["comparison"]))) if clocked else "",
    )


def _explained(label: str, about: str) -> str:
    """The meaning of a label: "Label: about", without the label twice."""
    return about if about.startswith(f"{label}:") else f"{label}: {words.inside_a_sentence(about)}"


def endings(view: views.View, *keys: str, word: str, title: str) -> items.Table:
    """A table with a line for each combination of values of the fields `keys`: how many cases ended in which way."""
    chosen, heads = view.chosen(keys), ["cases"] + ENDINGS
    data, rows = list[fields.Record](), list[list[str]]()
    for key, part in view.groups(chosen).items():
        counts = Counter({"cases": len(part.cases)})
        for case in part.cases:
            # A case that is "ok" has no entry in MEANINGS: it was timed, or verified without a time.
            counts[words.MEANINGS.get(case["outcome"], ENDINGS[case["time_s"] is None])] += 1
        data.append(dict(zip(chosen, key, strict=True)) | {head: counts[head] for head in heads})
        rows.append(part.texts(chosen, part.first) + [f"{counts[head]:,}" if counts[head] else "" for head in heads])
    return items.Table(
        name=view.file(word),
        title=title,
        caption="How the cases ended.",
        source=view.machine.about(view.cases),
        columns=view.labels(chosen) + list(heads),
        rows=rows,
        data=data,
        keys=len(chosen),
    )


def means(view: views.View, row: str, column: str, word: str, title: str) -> items.Table | None:
    """A table of geometric means of speedups, each with the number of speedups that it is a mean of.

    row, column  fields: there is a line for each value of `row`, and a column for each value of `column`
    """
    compared = view.only(cells.SPEEDUP)
    if not compared.cases:
        return None
    heads, data = compared.values(column), list[fields.Record]()
    rows = {value: dict.fromkeys(heads, "") for value in compared.values(row)}
    for (value, head), part in compared.groups((row, column)).items():
        ratios = ratios_of(part)
        mean, count = cells.geometric_mean(ratios)
        data.append({"row": compared.text(row, value), "column": head, "speedup": mean, "cells": count})
        rows[value][head] = cells.mean_text(ratios)
    return items.Table(
        name=view.file(words.filled(word, view.first)),
        title=view.filled(title),
        caption="Geometric mean of the speedups, with how many it is of in brackets. Compare two rows only if these "
        "counts are equal." + ASIDE * view.has("disturbed"),
        source=view.machine.about(view.cases),
        columns=[""] + heads,
        rows=[[compared.text(row, value)] + list(texts.values()) for value, texts in rows.items()],
        data=data,
    )


# {head of a column of `same_bits`: (the field that answers its question, the key under which a case's `same_bits` has
# the tensors that differ)}
QUESTIONS = {"repeated": (fields.REPEATABLE.name, "differ"), "alone": (fields.BATCH_INVARIANT.name, "alone")}


def _bits_of(case: fields.Record) -> fields.Record:
    """Fields for the CSV of `same_bits`: how the bits of a case's results differ, as `lmsys.bench.trial` found it."""
    differ, alone = case["same_bits"]["differ"], case["same_bits"]["alone"]
    return {
        "calls": case["same_bits"]["calls"],
        "differing": " ".join(differ),
        "largest_difference": max(differ.values(), default=None),
        "differing_alone": " ".join(alone),
    }


def same_bits(view: views.View, word: str, by: Sequence[Sequence[str]] = (("", "True"),)) -> items.Table | None:
    """A table with a line for each row that was called again on the same inputs: did it give the same bits?

    by  for each group of columns its head, and an expression (expressions.py) that is true of its cases
    """
    view = view.only("outcome == 'ok' and same_bits").ordered("impl")
    view = view.with_fields([fields.REPEATABLE, fields.BATCH_INVARIANT]).adding(_bits_of)
    notes, columns = cells.Notes(), dict[str, list[str]]()
    for (impl,), part in view.groups(["impl"]).items():
        columns.setdefault(words.label_of(view.fields["impl"]), []).append(view.text("impl", impl))
        for head, test in by:
            for question, (answer, tensors) in QUESTIONS.items():
                columns.setdefault(f"{head}, {question}".lstrip(", "), []).append(
                    _same_bits_cell(part.only(test), answer, tensors, notes)
                )
    columns = {head: texts for head, texts in columns.items() if any(texts)}
    if not columns:
        return None
    rows = list(zip(*columns.values(), strict=True))
    return items.Table(
        name=view.file(word),
        title="Same bits",
        caption=view.caption(
            "Same bits. Repeated: whether several calls on the same inputs gave the same bits; alone: whether an "
            "element of the batch gave the same bits without the others. No: the tensors that did not. In brackets: "
            "cases"
        ),
        columns=list(columns),
        rows=rows,
        data=data_of(view, [answer for answer, _ in QUESTIONS.values()] + list(_bits_of(view.first))),
        notes=cells.below(notes, rows),
        source=view.machine.about(view.cases),
    )


def _same_bits_cell(view: views.View, answer: str, tensors: str, notes: cells.Notes) -> str:
    """The text of a cell of `same_bits`: "yes (12)", "no: dq (3 of 12)", or "" if no case was asked.

    Footnotes say by how much tensors differ, and why a call failed. `answer` and `tensors` are an entry of QUESTIONS.
    """
    unknown, good, bad = (view.having(answer, [value]).cases for value in (None, True, False))
    failures = dict.fromkeys(case["same_bits"].get("failure") for case in unknown)
    reasons = "".join(cells.mark(notes, f"Not known of all cases: {why}.") for why in failures if why)
    if not bad:
        return (f"yes ({len(good)})" if good else "") + reasons
    most: dict[str, float] = {}
    for case in bad:
        for name, size in case["same_bits"][tensors].items():
            most[name] = max(size, most.get(name, 0.0))
    distances = ", ".join(f"{name} by at most {words.number(size)}" for name, size in most.items())
    count = f" ({len(bad)} of {len(good) + len(bad)})"
    return f"no: {', '.join(most)}{count}" + cells.mark(notes, f"Differs: {distances}.") + reasons
