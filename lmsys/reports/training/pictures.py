"""Plots of whole trainings: bars by strategy, the chain of speed-ups, curves and how far they are apart."""

import math
from typing import Any

import pandas as pd
from matplotlib.ticker import FuncFormatter

from lmsys.reports import bars
from lmsys.reports.metrics import Metric
from lmsys.reports.parallel.cases import ORDER
from lmsys.reports.plots import (
    CEILING,
    Look,
    Plot,
    add_legend,
    assign_looks,
    canvas,
    crowded,
    legend_height,
    plain,
    to_svg,
)
from lmsys.reports.tables import WORDS, by_key
from lmsys.reports.training.cases import ATTENTION_ORDER, BASE, SPEED, Slice


def _attention_looks(frame: pd.DataFrame) -> dict[str, Look]:
    named = {case.attention: (case.attention_label, case.attention_peer) for case in frame.itertuples()}
    return assign_looks(named, ATTENTION_ORDER)


def _strategy_looks(frame: pd.DataFrame) -> dict[str, Look]:
    named = {case.row: (case.row, case.strategy_peer) for case in frame.itertuples()}
    known = [row for name in ORDER for row in (_of_strategy(frame, name) or [name])]
    return assign_looks(named, known)


def _of_strategy(frame: pd.DataFrame, name: str) -> list[str]:
    return sorted(set(frame["row"][frame["strategy"] == name]))


def by_strategy(part: Slice, metric: Metric) -> Plot | None:
    """A metric by strategy, a bar for each attention row."""
    frame, rows = part.frame, part.strategies
    cases = by_key(frame, ["attention", "row"])
    found = {name: [cases.get((name, row)) for row in rows] for name in dict.fromkeys(frame["attention"])}
    return bars.bars(
        name=f"{part.stem}-{metric.stem}",
        title=f"{metric.short} by strategy · {part.heading}",
        caption=part.caption(f"{metric.title}, by strategy.", metric.clocked),
        tiers=rows,
        values={name: [_value(case, metric) for case in line] for name, line in found.items()},
        words={name: [WORDS.get(case.outcome, "") if case else "" for case in line] for name, line in found.items()},
        style=_attention_looks(frame),
        unit=metric.unit,
    )


def _value(case: Any, metric: Metric) -> float:
    return math.nan if case is None else float(getattr(case, metric.field)) * metric.scale


def chain(part: Slice) -> Plot | None:
    """From one process over BASE to the others: how much faster each strategy is than BASE, a line for each row."""
    frame = part.frame
    timed = frame[frame["speedup"].notna()]
    if timed["row"].nunique() < 2:
        return None
    style = _attention_looks(frame)
    places = [row for row in part.strategies if row in set(timed["row"])]
    slanted = crowded(places)
    height = 3.0 + 0.8 * slanted + legend_height(timed["attention"].nunique())
    figure, axes = canvas(f"Speed-up over {BASE} · {part.heading}", height)
    for name, own in timed.groupby("attention", sort=False):
        values = dict(zip(own["row"], own["speedup"], strict=True))
        at = [index for index, row in enumerate(places) if row in values]
        axes.plot(at, [values[places[index]] for index in at], **style[str(name)].line())
    axes.axhline(1.0, **CEILING)
    axes.set_xticks(range(len(places)), places, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    axes.set_ylim(0, 1.1 * timed["speedup"].max())
    axes.set_ylabel(f"× of {BASE}")
    add_legend(figure, axes)
    name, text = f"{part.stem}-chain", f"{SPEED.title}, strategy by strategy."
    return Plot(name, f"Speed-up over {BASE} · {part.heading}", part.caption(text, True), to_svg(figure, name))


Points = dict[int, float]  # by step


def curves(part: Slice) -> Plot | None:
    """The loss of every cell: right ones have one curve."""
    series = [(str(case.row), _points(case, case.curve_losses)) for case in part.frame.itertuples()]
    text = "The loss over the global batch by step; a line for each attention row and strategy, coloured by strategy."
    return _by_step(part, "curves", "Loss by step", text, series, None)


def differences(part: Slice) -> Plot | None:
    """How far from the reference's each loss is, for each strategy at the attention row that is farthest."""
    worst: dict[str, Points] = {}
    for case in part.frame.itertuples():
        own = worst.setdefault(str(case.row), {})
        for step, value in _points(case, case.curve_differences).items():
            own[step] = max(own.get(step, 0.0), abs(value))
    nonzero = [(row, {step: value for step, value in own.items() if value}) for row, own in worst.items()]
    text = (
        "How far the loss of a step is from that of naive attention in one process, for each strategy with the "
        "attention row that is farthest; where there is no point it is equal."
    )
    return _by_step(part, "differences", "Loss beside the reference", text, nonzero, part.frame["curve_budget"].max())


def _points(case: Any, values: Any) -> Points:
    """Of a curve; none of a cell that has none."""
    if not isinstance(values, list):
        return {}
    pairs = zip(case.curve_steps, values, strict=False)
    return {step: value for step, value in pairs if value is not None}


def _by_step(
    part: Slice, stem: str, title: str, text: str, series: list[tuple[str, Points]], budget: float | None
) -> Plot | None:
    """Lines coloured by strategy; with a budget on a logarithmic axis, and below it."""
    series = [(row, points) for row, points in series if points]
    if not series:
        return None
    style, labelled = _strategy_looks(part.frame), set()
    figure, axes = canvas(f"{title} · {part.heading}", 3.0 + legend_height(len({row for row, _ in series})))
    for index, (row, points) in enumerate(series):
        line = style[row].line() | {"marker": "", "linewidth": 2.6 - 1.8 * index / len(series)}  # one below still shows
        line["label"] = "_" if row in labelled else style[row].label
        labelled.add(row)
        axes.plot(list(points), list(points.values()), **line)
    if budget is not None:
        axes.set_yscale("log")
        axes.axhline(budget, **CEILING)
        place: dict[str, Any] = {"textcoords": "offset points", "xycoords": ("axes fraction", "data")}
        axes.annotate("allowed", (1, budget), xytext=(0, -11), ha="right", fontsize=9, **place)
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.set(xlabel="step", ylabel="nats")
    add_legend(figure, axes)
    name = f"{part.stem}-{stem}"
    return Plot(name, f"{title} · {part.heading}", part.caption(text), to_svg(figure, name))
