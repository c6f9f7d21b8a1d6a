"""Tables of who is how much faster than whom: strategies beside their rivals, and means of speedups."""

from collections.abc import Sequence

from lmsys.bench.verdict import ratio_of
from lmsys.reports.cells import SPEEDUP, geometric_mean, mean_text
from lmsys.reports.tables import Table
from lmsys.reports.views import View
from lmsys.reports.words import filled, number


def rivals(view: View, settings: Sequence[str], names: tuple[str, str], word: str, title: str) -> Table | None:
    """How much faster than its rivals, as the table names them, each strategy is: rows: settings; columns: pairs that
    were timed.

    `names` are templates of a row's name; last, geometric means of those rows whose names end alike.
    """
    pairs = [(ours, theirs) for ours, row in view.table("strategy").items() for theirs in row.get("rivals") or ()]
    parts = view.groups(*settings).values()
    speeds = {pair: [_fastest_ratio(own, *pair) for own in parts] for pair in pairs}
    speeds = {pair: ratios for pair, ratios in speeds.items() if any(ratios)}
    found: dict[str, list[float | None]] = {}
    alike: dict[str, list[list[float | None]]] = {}
    for own, *ratios in zip(parts, *speeds.values(), strict=True):
        if any(ratios):
            start, end = (filled(text, own.cases[0]) for text in names)
            found[start + end] = ratios
            alike.setdefault(end, []).append(ratios)
    if not found:
        return None
    heads = [f"{ours} / {theirs}" for ours, theirs in speeds]
    rows = [[name, *("" if ratio is None else number(ratio) for ratio in ratios)] for name, ratios in found.items()]
    rows += [[f"geometric mean, {end}", *map(mean_text, zip(*lines, strict=True))] for end, lines in alike.items()]
    return Table(
        name=view.file(word),
        title=title,
        caption="Median of step-time ratios, steps alternating; of the best bucket size of each. Above 1: ours is "
        "faster.",
        source=view.source,
        columns=["training", *heads],
        rows=rows,
        data=[{"training": name, **dict(zip(heads, ratios, strict=True))} for name, ratios in found.items()],
    )


def _fastest_ratio(own: View, ours: str, theirs: str) -> float | None:
    """Theirs over ours, of the fastest case of each strategy."""
    timed = [[case for case in own.cases if case["strategy"] == name and case["time_s"]] for name in (ours, theirs)]
    return ratio_of(*(min(cases, key=lambda case: case["time_s"]) for cases in timed)) if all(timed) else None


def means(view: View, row: str, column: str, word: str, title: str) -> Table | None:
    """Geometric means of the speedups by two fields, with how many each is of; None without any."""
    own = view.only(lambda case: case[SPEEDUP])
    found = {key: [case[SPEEDUP] for case in one.cases] for key, one in own.groups(row, column).items()}
    heads = own.values(column)
    if not found:
        return None
    return Table(
        name=view.file(word),
        title=title,
        caption="Geometric mean of the speedups, with how many it is of in brackets. Compare two rows only if these "
        "counts are equal.",
        source=view.source,
        columns=["", *heads],
        rows=[
            [own.text(row, value), *(mean_text(found.get((value, head), ())) for head in heads)]
            for value in own.values(row)
        ],
        data=[
            {"row": own.text(row, value), "column": head, "speedup": geometric_mean(values)[0], "cells": len(values)}
            for (value, head), values in found.items()
        ],
    )
