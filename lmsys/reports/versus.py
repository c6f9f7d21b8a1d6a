"""Three tables that are steps of layouts, listed in `steps.STEPS`: `rivals`, `means` and `same_bits`.

They show strategies beside their rivals, geometric means of speedups, and which rows give the same bits again. Each is
given a view and the layout's arguments, and returns a table, or None where there is nothing to show. Of the arguments
`word` ends the name of the table's file; `word` and `title` may have names of fields in braces (`words.filled`).
"""

from collections.abc import Sequence

from lmsys.bench import fields
from lmsys.reports import cells, contest, items, tables, views, words

ASIDE = " Disturbed cases count only where a row has no others."  # ends captions if a case was disturbed


def rivals(
    view: views.View, settings: Sequence[str], names: tuple[str, str], word: str, title: str
) -> items.Table | None:
    """How much faster each strategy is than its rivals, which its trait `rivals` names.

    A line for each combination of values of the fields `settings`, a column for each pair that was timed. Below these
    lines stand geometric means of the lines whose names have the same end.

    names  templates of the beginning and of the end of a line's name, with names of fields in braces
    """
    data, by_end = list[fields.Record](), dict[str, list[fields.Record]]()
    pairs: dict[str, tuple[str, str]] = {}
    for ours, row in view.table("strategy").items():
        pairs |= {f"{ours} / {theirs}": (ours, theirs) for theirs in row.get("rivals") or ()}
    for part in view.only("time_s").groups(settings).values():
        ratios = {head: contest.ratio_of_best(part.cases, *pair) for head, pair in pairs.items()}
        if any(ratios.values()):
            start, end = (words.filled(text, part.first) for text in names)
            data.append({"training": start + end} | ratios)
            by_end.setdefault(end, []).append(ratios)
    heads = list(filter(view.of(data).has_any, pairs))  # of the pairs that were timed
    if not heads:
        return None
    rows = []
    for line in data:
        rows.append([line["training"]] + [words.number(line[head]) if line[head] else "" for head in heads])
    for end, lines in by_end.items():
        rows.append([f"geometric mean, {end}"] + [cells.mean_text(view.of(lines).column(head)) for head in heads])
    return items.Table(
        name=view.file(words.filled(word, view.first)),
        title=words.filled(title, view.first),
        caption="Median of step-time ratios, steps alternating; of the best bucket size of each. Above 1: ours is "
        "faster." + ASIDE * view.has("disturbed"),
        source=view.machine.about(view.cases),
        columns=["training"] + heads,
        rows=rows,
        data=tables.lines_of(data, ["training"] + heads),
    )


def means(view: views.View, row: str, column: str, word: str, title: str) -> items.Table | None:
    """Geometric means of the speedups, each with its number of speedups: a line for each value of the field `row`, a
    column for each of the field `column`."""
    compared = view.only(cells.SPEEDUP)
    if not compared.cases:
        return None
    heads, data = compared.values(column), list[fields.Record]()
    rows = {value: dict.fromkeys(heads, "") for value in compared.values(row)}
    for (value, head), part in compared.groups((row, column)).items():
        ratios = tables.ratios_of(part)
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


ABOUT_BITS = (
    "Same bits. Repeated: whether several calls on the same inputs gave the same bits; alone: whether an element of "
    "the batch gave the same bits without the others. No: the tensors that did not. In brackets: cases"
)
# By the head of a column: the field that answers its question, and the key of `same_bits` with tensors that differ.
QUESTIONS = {"repeated": (fields.REPEATABLE.name, "differ"), "alone": (fields.BATCH_INVARIANT.name, "alone")}


def _flat(case: fields.Record) -> fields.Record:
    """The fields of a case that only the CSV has: how its bits differ, as `lmsys.bench.findings.same_bits` found."""
    differ, alone = case["same_bits"]["differ"], case["same_bits"]["alone"]
    return {
        "calls": case["same_bits"]["calls"],
        "differing": " ".join(differ),
        "largest_difference": max(differ.values(), default=None),
        "differing_alone": " ".join(alone),
    }


def same_bits(view: views.View, word: str, by: Sequence[Sequence[str]] = (("", "True"),)) -> items.Table | None:
    """A table with a line for each row that was called again on the same inputs.

    by  for each group of columns its head, and an expression that is true of its cases
    """
    view = view.only("outcome == 'ok' and same_bits").ordered("impl")
    view = view.with_fields([fields.REPEATABLE, fields.BATCH_INVARIANT]).adding(_flat)
    notes, columns = cells.Notes(), dict[str, list[str]]()
    for (impl,), part in view.groups(["impl"]).items():
        columns.setdefault(words.label_of(view.fields["impl"]), []).append(view.text("impl", impl))
        for head, test in by:
            tested = part.only(test)
            for question, (answer, tensors) in QUESTIONS.items():
                texts = columns.setdefault(f"{head}, {question}".lstrip(", "), [])
                texts.append(_cell(tested, answer, tensors, notes))
    columns = {head: texts for head, texts in columns.items() if any(texts)}
    if not columns:
        return None
    rows = list(zip(*columns.values(), strict=True))
    return items.Table(
        name=view.file(word),
        title="Same bits",
        caption=view.caption(ABOUT_BITS),
        columns=list(columns),
        rows=rows,
        data=tables.data_of(view, [answer for answer, _ in QUESTIONS.values()] + list(_flat(view.first))),
        notes=cells.below(notes, rows),
        source=view.machine.about(view.cases),
    )


def _cell(view: views.View, answer: str, tensors: str, notes: cells.Notes) -> str:
    """The text of a cell: "yes (12)", "no: dq (3 of 12)" or "" where nobody asked. Footnotes say by how much tensors
    differ, and why a call failed.

    `answer` and `tensors` are the entries of QUESTIONS.
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
