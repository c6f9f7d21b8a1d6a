"""Tables that hold rows beside others: strategies beside their rivals, means of speedups, and whose bits come again."""

from collections.abc import Sequence

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
    parts = view.only("time_s").groups(*settings).values()
    speeds = {pair: [contest.ratio_of_best(own.cases, *pair) for own in parts] for pair in pairs}
    speeds = {pair: ratios for pair, ratios in speeds.items() if any(ratios)}
    found: dict[str, list[float | None]] = {}
    alike: dict[str, list[list[float | None]]] = {}
    for own, *ratios in zip(parts, *speeds.values(), strict=True):
        if any(ratios):
            start, end = (words.filled(text, own.cases[0]) for text in names)
            found[start + end] = ratios
            alike.setdefault(end, []).append(ratios)
    if not found:
        return None
    heads = [f"{ours} / {theirs}" for ours, theirs in speeds]
    rows = [
        [name, *("" if ratio is None else words.number(ratio) for ratio in ratios)] for name, ratios in found.items()
    ]
    rows += [
        [f"geometric mean, {end}", *map(cells.mean_text, zip(*lines, strict=True))] for end, lines in alike.items()
    ]
    return items.Table(
        name=view.file(words.filled(word, view.cases[0])),
        title=words.filled(title, view.cases[0]),
        caption="Median of step-time ratios, steps alternating; of the best bucket size of each. Above 1: ours is "
        "faster." + ASIDE * view.has("disturbed"),
        source=view.machine.about(view.cases),
        columns=["training", *heads],
        rows=rows,
        data=[{"training": name, **dict(zip(heads, ratios, strict=True))} for name, ratios in found.items()],
    )


def means(view: views.View, row: str, column: str, word: str, title: str) -> items.Table | None:
    """Geometric means of the speedups by two fields, with how many each is of; None without any."""
    own = view.only(lambda case: case[cells.SPEEDUP])
    found = {
        key: [case[cells.SPEEDUP] for case in verdict.undisturbed(one.cases)]
        for key, one in own.groups(row, column).items()
    }
    heads = own.values(column)
    if not found:
        return None
    return items.Table(
        name=view.file(words.filled(word, view.cases[0])),
        title=view.filled(title),
        caption="Geometric mean of the speedups, with how many it is of in brackets. Compare two rows only if these "
        "counts are equal." + ASIDE * view.has("disturbed"),
        source=view.machine.about(view.cases),
        columns=["", *heads],
        rows=[
            [own.text(row, value), *(cells.mean_text(found.get((value, head), ())) for head in heads)]
            for value in own.values(row)
        ],
        data=[
            {
                "row": own.text(row, value),
                "column": head,
                "speedup": cells.geometric_mean(values)[0],
                "cells": len(values),
            }
            for (value, head), values in found.items()
        ],
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
    view = view.only(lambda case: case["outcome"] == "ok" and case.get("same_bits"))
    view = view.with_fields(fields.REPEATABLE, fields.BATCH_INVARIANT, *FLAT).ordered("impl")
    columns = [
        (f"{head}, {question}".lstrip(", "), test, answer, tensors)
        for head, test in by
        for question, (answer, tensors) in QUESTIONS.items()
    ]
    notes: cells.Notes = {}
    rows = [
        [view.text("impl", impl)]
        + [_cell(own.only(test).cases, answer, tensors, notes) for _, test, answer, tensors in columns]
        for (impl,), own in view.groups("impl").items()
    ]
    heads = [words.label_of(view.fields["impl"]), *(head for head, *_ in columns)]
    used = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    if not used:
        return None
    lines = [[row[at] for at in used] for row in rows]
    return items.Table(
        name=view.file(word),
        title="Same bits",
        caption=view.caption(ABOUT_BITS),
        columns=[heads[at] for at in used],
        rows=lines,
        data=tables.data_of(view, fields.REPEATABLE.name, fields.BATCH_INVARIANT.name, *(one.name for one in FLAT)),
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
    most = {name: max(found) for name, found in sizes.items()}
    told = ", ".join(f"{name} by at most {words.number(size)}" for name, size in most.items())
    return f"no: {', '.join(most)} ({len(bad)} of {len(known)})" + cells.mark(notes, f"Differs: {told}.") + untold
