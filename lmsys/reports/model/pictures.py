"""Plots of models: the phases of a step as stacked bars, and a metric against context."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from lmsys.reports import bars, plots, tables
from lmsys.reports.load import file_name
from lmsys.reports.metrics import Metric
from lmsys.reports.model.cases import ORDER, PHASES, ROW, TIME, Slice, groups, ordered, sizes
from lmsys.reports.plots import Plot, assign_looks


def phases(part: Slice) -> Iterator[Plot | None]:
    """The phases of a step as one bar for each size, precision and way of running; a plot for each context."""
    rows = part.frame[part.frame["mode"].isin([*PHASES, "step"])]
    variants = [f"{precision}, {way}" for precision in ORDER["precision"] for way in ORDER["compile"]]
    for frame in groups(rows, ["precision", "compile"]):
        for (context, batch), facet in frame.groupby(ROW, sort=True):
            cases = tables.by_key(facet, ["size", "precision", "compile", "mode"])
            named = {f"{p}, {c}": (p, c) for p, c in tables.distinct(facet, ["precision", "compile"])}
            columns = [size for size in sizes(facet) if any(key[0] == size for key in cases)]
            stacks = {
                name: [[cases.get((size, *pair, phase)) for phase in PHASES] for size in columns]
                for name, pair in named.items()
            }
            steps = {name: [cases.get((size, *pair, "step")) for size in columns] for name, pair in named.items()}
            suffix = f"S{context}" + (f"-B{batch}" if frame["batch"].nunique() > 1 else "")
            impl = part.word("impl", facet["impl"].iloc[0])
            yield bars.stacked(
                name=file_name(f"{part.stem}-phases-{facet['impl'].iloc[0]}-{suffix}"),
                title=f"Time of a step by phase · context {context:,}, batch {batch}, {impl}",
                caption=part.caption(TIME, facet, "Median times of the phases, ms, one upon another; their sum above")
                + " The black line is the whole step timed as one. No bar without all three phases.",
                groups=columns,
                stacks={name: [[_ms(case) for case in stack] for stack in line] for name, line in stacks.items()},
                words={name: [_word(stack) for stack in line] for name, line in stacks.items()},
                marks={name: [_ms(case) for case in line] for name, line in steps.items()},
                style=assign_looks({name: (name, False) for name in named}, variants),
                layers=["forward", "backward", "optimizer"],
                unit=TIME.unit,
            )


def _ms(case: Any) -> float:
    return float(case.time_s) * TIME.scale if case else math.nan


def _word(stack: list[Any]) -> str:
    """Why a bar is missing: the first phase that failed."""
    return next((tables.WORDS[case.outcome] for case in stack if case and case.outcome != "ok"), "")


def against_context(part: Slice, metric: Metric) -> Iterator[Plot | None]:
    """A metric by context, a line for each size (dashed: eager); a plot for each precision, attention row and batch."""
    known = ORDER["size"]
    for frame in groups(part.frame, ["compile"]):
        for batch, facet in frame.groupby("batch", sort=True):
            both = facet["compile"].nunique() > 1
            style, series = {}, {}
            looks = assign_looks({size: (size, False) for size in sizes(facet)}, known)
            for size in looks:
                for way in ordered("compile", facet["compile"]):
                    name = f"{size}, {way}" if both else size
                    style[name] = plots.Look(name, looks[size].color, both and way == "eager", looks[size].marker)
                    own = facet[(facet["size"] == size) & (facet["compile"] == way)]
                    series[name] = _points(own, metric)
            values = [value for points in series.values() for value in points.values()]
            fixed = part.constants(facet)
            suffix = [*fixed.values(), *([f"B{batch}"] if frame["batch"].nunique() > 1 else [])]
            said = [part.word(axis, value) for axis, value in fixed.items()]
            yield plots.lines(
                name=file_name("-".join([part.stem, metric.stem, *suffix])),
                title=f"{metric.short} · {part.heading}, {', '.join(said)}, batch {batch}",
                caption=part.caption(metric, facet) + _lost(facet),
                series=series,
                style=style,
                unit=metric.unit,
                xlabel="context",
                log=max(values, default=0) >= 10 * min(values, default=0) and metric.unit != "%",
                ceiling=None,
            )


def _points(frame: pd.DataFrame, metric: Metric) -> dict[int, float]:
    rows = frame[frame[metric.field] > 0].sort_values("context")
    return {row.context: getattr(row, metric.field) * metric.scale for row in rows.itertuples()}


def _lost(frame: pd.DataFrame) -> str:
    """Where a line has no point because the case ran out of memory."""
    lost = frame[frame["outcome"] == "oom"].sort_values(["num_parameters", "context"])
    cells = [f"{case.size} {case.compile} at {case.context:,}" for case in lost.itertuples()]
    return f" Out of memory: {', '.join(cells)}." if cells else ""
