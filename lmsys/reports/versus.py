"""Tables that hold rows beside others: strategies beside their rivals, means of speedups, and whose bits come again."""

from collections.abc import Sequence
from itertools import compress

from lmsys.bench import fields, verdict
from lmsys.reports import cells, contest, items, tables, views, words

ASIDE = " Disturbed cases count only where a row has no others."


def rivals(
    view: views.View, settings: Sequence[str], names: tuple[str, str], word: str, title: str
) -> items.Table | None:
    """How much faster than its rivals, as the table names them, each strategy is: rows: settings; columns: pairs that
    were timed.

    `names` are templates of a row's name; last, geometric means of those rows whose names end alike.
    """
    pairs = [(ours, theirs) for ours, row in view.table("strategy").items() for theirs in row.get("rivals") or ()]
    data, alike = list[fields.Record](), dict[str, list[fields.Record]]()
    for part in view.only("time_s").groups(*settings).values():
        ratios = {f"{ours} / {theirs}": contest.ratio_of_best(part.cases, ours, theirs) for ours, theirs in pairs}
        if any(ratios.values()):
            start, end = (words.filled(text, part.first) for text in names)
            data.append({"training": start + end} | ratios)
            alike.setdefault(end, []).append(ratios)
    heads = [head for head in data[0] if any(line[head] for line in data)][1:] if data else []
    if not heads:
        return None
    rows = [[line["training"], *(words.number(line[head]) if line[head] else "" for head in heads)] for line in data]
    for end, lines in alike.items():
        rows.append([f"geometric mean, {end}", *(cells.mean_text(line[head] for line in lines) for head in heads)])
    return items.Table(
        name=view.file(words.filled(word, view.first)),
        title=words.filled(title, view.first),
        caption="Median of step-time ratios, steps alternating; of the best bucket size of each. Above 1: ours is "
        "faster." + ASIDE * view.has("disturbed"),
        source=view.machine.about(view.cases),
        columns=["training", *heads],
        rows=rows,
        data=[{name: line[name] for name in ("training", *heads)} for line in data],
    )


def means(view: views.View, row: str, column: str, word: str, title: str) -> items.Table | None:
    """Geometric means of the speedups by two fields, with how many each is of; None without any."""
    compared = view.only(cells.SPEEDUP)
    if not compared.cases:
        return None
    heads, data = compared.values(column), list[fields.Record]()
    rows = {value: dict.fromkeys(heads, "") for value in compared.values(row)}
    for (value, head), part in compared.groups(row, column).items():
        ratios = [case[cells.SPEEDUP] for case in verdict.undisturbed(part.cases)]
        mean, count = cells.geometric_mean(ratios)
        data.append({"row": compared.text(row, value), "column": head, "speedup": mean, "cells": count})
        rows[value][head] = cells.mean_text(ratios)
    return items.Table(
        name=view.file(words.filled(word, view.first)),
        title=view.filled(title),
        caption="Geometric mean of the speedups, with how many it is of in brackets. Compare two rows only if these "
        "counts are equal." + ASIDE * view.has("disturbed"),
        source=view.machine.about(view.cases),
        columns=["", *heads],
        rows=[[compared.text(row, value), *texts.values()] for value, texts in rows.items()],
        data=data,
    )


ABOUT_BITS = (
    "Same bits. Repeated: whether several calls on the same inputs gave the same bits; alone: whether an element of "
    "the batch gave the same bits without the others. No: the tensors that did not. In brackets: cases"
)
QUESTIONS = {"repeated": (fields.REPEATABLE.name, "differ"), "alone": (fields.BATCH_INVARIANT.name, "alone")}
FLAT = (
    fields.Field("calls", role="detail", of=lambda case: case["same_bits"]["calls"]),
    fields.Field("differing", role="detail", of=lambda case: " ".join(case["same_bits"]["differ"])),
    fields.Field(
        "largest_difference", role="detail", of=lambda case: max(case["same_bits"]["differ"].values(), default=None)
    ),
    fields.Field("differing_alone", role="detail", of=lambda case: " ".join(case["same_bits"]["alone"])),
)


def same_bits(view: views.View, word: str, by: Sequence[Sequence[str]] = (("", "True"),)) -> items.Table | None:
    """A line for each row, of what was called again; `by`: the heads of columns, and tests of the cases of each."""
    view = view.only("outcome == 'ok' and same_bits")
    view = view.with_fields(fields.REPEATABLE, fields.BATCH_INVARIANT, *FLAT).ordered("impl")
    heads, notes, rows = view.labels(["impl"]), cells.Notes(), list[list[str]]()
    for head, _ in by:
        heads += [f"{head}, {question}".lstrip(", ") for question in QUESTIONS]
    for (impl,), part in view.groups("impl").items():
        rows.append([view.text("impl", impl)])
        for _, test in by:
            rows[-1] += [_cell(part.only(test).cases, *names, notes) for names in QUESTIONS.values()]
    used = [any(column) for column in zip(*rows, strict=True)]
    if not used:
        return None
    lines = [list(compress(row, used)) for row in rows]
    return items.Table(
        name=view.file(word),
        title="Same bits",
        caption=view.caption(ABOUT_BITS),
        columns=list(compress(heads, used)),
        rows=lines,
        data=tables.data_of(view, fields.REPEATABLE.name, fields.BATCH_INVARIANT.name, *(field.name for field in FLAT)),
        notes=cells.below(notes, lines),
        source=view.machine.about(view.cases),
    )


def _cell(cases: Sequence[fields.Record], answer: str, tensors: str, notes: cells.Notes) -> str:
    """yes (12), or no: dq (3 of 12); notes say by how much, and what failed. Empty where no case was asked."""
    known = [case for case in cases if case[answer] is not None]
    bad = [case for case in known if not case[answer]]
    failures = {case["same_bits"].get("failure"): None for case in cases if case[answer] is None}
    untold = "".join(cells.mark(notes, f"Not known of all cases: {why}.") for why in failures if why)
    if not bad:
        return (f"yes ({len(known)})" if known else "") + untold
    sizes = fields.grouped(pair for case in bad for pair in case["same_bits"][tensors].items())
    most = {name: max(distances_of_tensor) for name, distances_of_tensor in sizes.items()}
    distances = ", ".join(f"{name} by at most {words.number(size)}" for name, size in most.items())
    return f"no: {', '.join(most)} ({len(bad)} of {len(known)})" + cells.mark(notes, f"Differs: {distances}.") + untold
