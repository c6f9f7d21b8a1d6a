"""Plots of data parallelism: rates, exposed communication, memory by kind, scaling, and a step's timeline."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from lmsys.reports import bars
from lmsys.reports.load import GIB
from lmsys.reports.parallel.cases import ORDER, PARTS, Slice
from lmsys.reports.plots import Look, Plot, assign_looks, canvas, lines, to_svg
from lmsys.reports.tables import WORDS, by_key

COLOURS = {"computation": "#2563eb", "communication": "#dc2626"}


def _looks(frame: pd.DataFrame) -> dict[str, Look]:
    named = {case.impl: (case.row, case.peer) for case in frame.itertuples()}
    order = sorted(named, key=lambda impl: (_place(frame, impl), impl))
    return assign_looks(named, order)


def _place(frame: pd.DataFrame, impl: str) -> int:
    strategy = frame.loc[frame["impl"] == impl, "strategy"].iloc[0]
    return ORDER.index(strategy) if strategy in ORDER else len(ORDER)


def _largest(part: Slice) -> pd.DataFrame:
    """The cases on most ranks."""
    return part.frame[part.frame["world_size"] == part.frame["world_size"].max()]


def by_strategy(part: Slice, field: str, scale: float, unit: str, title: str, name: str) -> Plot | None:
    """A metric by batch, a bar for each strategy."""
    frame = _largest(part)
    cases, batches = by_key(frame, ["impl", "batch"]), sorted(set(frame["batch"]))
    lines_ = {impl: [cases.get((impl, batch)) for batch in batches] for impl in dict.fromkeys(frame["impl"])}
    positive = {impl: [_positive(case, field, scale) for case in line] for impl, line in lines_.items()}
    return bars.bars(
        name=f"{part.stem}-{name}",
        title=f"{title} · {part.heading}, {frame['world_size'].max()} ranks",
        caption=part.caption(f"{title} by batch of a rank, on {frame['world_size'].max()} ranks.", clocked=True),
        tiers=[f"batch {batch}" for batch in batches],
        values=positive,
        words={impl: [WORDS.get(case.outcome, "") if case else "" for case in line] for impl, line in lines_.items()},
        style=_looks(frame),
        unit=unit,
    )


def _positive(case: Any, field: str, scale: float) -> float:
    value = math.nan if case is None else float(getattr(case, field)) * scale
    return value if value > 0 else math.nan


def memory_by_kind(part: Slice) -> Plot | None:
    """A stack for each strategy at the largest batch that ran, the peak of a step as a line."""
    frame = _largest(part)
    frame = frame[frame["peak_bytes"].notna()]
    if frame.empty:
        return None
    frame = frame[frame["batch"] == frame["batch"].max()]
    layers = [[getattr(case, field) / GIB for field in PARTS] for case in frame.itertuples()]
    peaks = [case.peak_bytes / GIB for case in frame.itertuples()]
    looks = {"held": Look("held, by kind (line: peak of a step)", "#2563eb", False, "o")}
    plot = bars.stacked(
        name=f"{part.stem}-memory",
        title=f"Memory of a rank by kind · {part.heading}, batch {frame['batch'].max()}",
        caption=part.caption(
            f"Parameters, gradients and optimizer state after a step and activations after a forward, on "
            f"{frame['world_size'].max()} ranks, batch {frame['batch'].max()}; the line is the peak of a whole step."
            f"{part.unrecorded}"
        ),
        groups=[str(impl) for impl in frame["impl"]],
        stacks={"held": layers},
        words={"held": [""] * len(frame)},
        marks={"held": peaks},
        style=looks,
        layers=list(PARTS.values()),
        unit="GiB",
    )
    return plot


def scaling(part: Slice) -> Plot | None:
    """Scaling efficiency against the number of ranks."""
    frame = part.frame[part.frame["scaling_efficiency"].notna() & (part.frame["strategy"] != "none")]
    frame = frame[frame["batch"] == frame["batch"].max()]
    series = {
        impl: {1: 100.0} | dict(zip(rows["world_size"], 100 * rows["scaling_efficiency"], strict=True))
        for impl, rows in frame.groupby("impl", sort=False)
    }
    if not series:
        return None
    return lines(
        name=f"{part.stem}-scaling",
        title=f"Scaling efficiency · {part.heading}, batch {frame['batch'].max()}",
        caption=part.caption("Tokens/s over those of as many ranks alone, by number of ranks.", clocked=True),
        series=series,
        style=_looks(frame),
        unit="%",
        xlabel="ranks",
        log=False,
    )


def timelines(part: Slice) -> Plot | None:
    """When a step computes and when it communicates, a pair of lanes for each strategy."""
    frame = _largest(part)
    frame = frame[(frame["batch"] == frame["batch"].min()) & frame["timeline"].map(_has_communication)]
    if frame.empty:
        return None
    figure, axes = canvas(f"A step's timeline · {part.heading}", 0.45 * len(frame) + 0.9)
    for lane, case in enumerate(frame.itertuples()):
        for what, colour in COLOURS.items():
            spans = [(1e3 * a, 1e3 * (b - a)) for kind, a, b in case.timeline if kind == what]
            axes.broken_barh(spans, (lane - (0.36 if what == "computation" else 0.02), 0.34), color=colour, linewidth=0)
    for what, colour in COLOURS.items():
        axes.broken_barh([], (0, 0), color=colour, label=what)
    axes.set_yticks(range(len(frame)), list(frame["impl"]), fontsize=8)
    axes.set_ylim(len(frame) - 0.5, -0.5)
    axes.set_xlabel("ms")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25 / (0.1 * len(frame) + 0.5)), ncols=2)
    name = f"{part.stem}-timeline"
    return Plot(
        name,
        f"A step's timeline · {part.heading}",
        part.caption(
            f"From a profiler's trace of one step on rank 0, batch {frame['batch'].min()}: above what computes, below "
            "what communicates."
        ),
        to_svg(figure, name),
    )


def _has_communication(timeline: Any) -> bool:
    return isinstance(timeline, Sequence) and any(row[0] == "communication" for row in timeline)
