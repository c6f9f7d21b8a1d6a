"""Plots of whole trainings: bars by strategy, the chain of speed-ups, curves and how far they are apart."""

import math
from typing import Any

import pandas as pd
from matplotlib.ticker import FuncFormatter

from reports import bars
from reports.metrics import Metric
from reports.parallel.cases import ORDER
from reports.plots import CEILING, Look, Plot, add_legend, assign_looks, canvas, legend_height, plain, to_svg
from reports.tables import WORDS, by_key
from reports.training.cases import ATTENTION_ORDER, BASE, SPEED, Slice


def _attention_looks(frame: pd.DataFrame) -> dict[str, Look]:
    named = {case.attention: (case.attention_label, case.attention_peer) for case in frame.itertuples()}
    return assign_looks(named, ATTENTION_ORDER)


def _strategies(frame: pd.DataFrame) -> list[str]:
    """Rows in reading order; their names, since labels are too long for an axis."""
    return list(dict.fromkeys(frame.sort_values(["place", "bucket_mb", "row"], kind="stable")["row"]))


def _strategy_looks(frame: pd.DataFrame) -> dict[str, Look]:
    named = {case.row: (case.label, case.strategy_peer) for case in frame.itertuples()}
    known = [row for name in ORDER for row in (_of_strategy(frame, name) or [name])]
    return assign_looks(named, known)


def _of_strategy(frame: pd.DataFrame, name: str) -> list[str]:
    return sorted(set(frame["row"][frame["strategy"] == name]))


def by_strategy(part: Slice, metric: Metric) -> Plot | None:
    """A metric by strategy, a bar for each attention row."""
    frame, rows = part.frame, _strategies(part.frame)
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
    frame, rows = part.frame, _strategies(part.frame)
    timed = frame[frame["speedup"].notna()]
    if timed["row"].nunique() < 2:
        return None
    style = _attention_looks(frame)
    figure, axes = canvas(f"Speed-up over {BASE} · {part.heading}", 3.0 + legend_height(timed["attention"].nunique()))
    places = [row for row in rows if row in set(timed["row"])]
    for name, own in timed.groupby("attention", sort=False):
        values = dict(zip(own["row"], own["speedup"], strict=True))
        at = [index for index, row in enumerate(places) if row in values]
        axes.plot(at, [values[places[index]] for index in at], **style[str(name)].line())
    axes.axhline(1.0, **CEILING)
    slanted = sum(map(len, places)) > 45
    axes.set_xticks(range(len(places)), places, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    axes.set_ylim(0, 1.1 * timed["speedup"].max())
    axes.set_ylabel(f"× of {BASE}")
    add_legend(figure, axes)
    name, text = f"{part.stem}-chain", f"{SPEED.title}, strategy by strategy."
    return Plot(name, f"Speed-up over {BASE} · {part.heading}", part.caption(text, True), to_svg(figure, name))


def curves(part: Slice) -> Plot | None:
    """The loss of every cell by step, one colour a strategy: right cells have one curve."""
    return _by_step(
        part, "curve_losses", "curves", "Loss by step", "nats", "The loss over the global batch by step", False
    )


def differences(part: Slice) -> Plot | None:
    """How far from the reference's each loss is."""
    text = "How far the loss of a step is from that of naive attention in one process; points at zero are left out"
    return _by_step(part, "curve_differences", "differences", "Loss beside the reference", "nats", text, True)


def _by_step(part: Slice, field: str, stem: str, title: str, unit: str, text: str, apart: bool) -> Plot | None:
    frame = part.frame[part.frame[field].map(lambda values: isinstance(values, list) and len(values) > 1)]
    if frame.empty:
        return None
    style, told = _strategy_looks(frame), set()
    figure, axes = canvas(f"{title} · {part.heading}", 3.0 + legend_height(frame["row"].nunique()))
    shown = 0
    for place, case in enumerate(frame.itertuples()):
        points = [
            (step, _shown(value, apart)) for step, value in zip(case.curve_steps, getattr(case, field), strict=False)
        ]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        if not points:
            continue
        look = style[case.row].line() | {"marker": "none", "linewidth": 2.6 - 1.8 * place / len(frame)}
        look["label"] = "_" if case.row in told else look["label"]
        told.add(case.row)
        shown += len(points)
        axes.plot(*zip(*points, strict=True), **look)
    if not shown:
        return None
    budget = frame["curve_budget"].max()
    if apart:
        axes.set_yscale("log")
        if math.isfinite(budget):
            axes.axhline(budget, **CEILING)
            axes.annotate(
                "allowed", (1, budget), (0, -11), ("axes fraction", "data"), "offset points", ha="right", fontsize=9
            )
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.set(xlabel="step", ylabel=unit)
    add_legend(figure, axes)
    name = f"{part.stem}-{stem}"
    caption = part.caption(f"{text}; a line for each attention row and strategy, coloured by strategy.")
    return Plot(name, f"{title} · {part.heading}", caption, to_svg(figure, name))


def _shown(value: float | None, apart: bool) -> float:
    if value is None:
        return math.nan
    return (abs(value) or math.nan) if apart else value
