"""Plots of attention: time, rate and memory against length, tiers, speedup, roofline."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from lmsys.reports import bars, plots, tables
from lmsys.reports.attention.cases import PEAK, RATE, ROOFLINE, SPEEDUP, TIME, Slice
from lmsys.reports.attention.shapes import SHAPE, axis, columns, tokens
from lmsys.reports.metrics import Metric
from lmsys.reports.plots import Plot

NO_BASE = "no base"
FACETS = {"D": ["head_dim"], "H": ["heads", "kv_heads"], "B": ["batch"]}


def against_length(part: Slice, metrics: Sequence[Metric] = (TIME, RATE, PEAK)) -> Iterator[Plot | None]:
    """Time, rate and memory by sequence length, one plot for each head dimension (and batch and heads)."""
    square = part.frame[part.frame["queries"] == part.frame["keys"]]
    peak = part.machine.ceiling(part.frame, part.frame["dtype"].iloc[0])
    ceiling = (f"matmul {tables.number(peak / 1e12)} TFLOP/s", peak / 1e12) if peak else None
    for suffix, title, facet in _facets(square):
        xlabel = "sequence length S" + (f" (B·S = {tokens(facet)})" if tokens(facet) else "")
        for metric in metrics:
            series = {impl: _series(facet, metric, impl) for impl in part.impls()}
            values = [value for points in series.values() for value in points.values()]
            flat = metric is PEAK and max(values, default=0) < 10 * min(values, default=0)
            yield plots.lines(
                name=f"{part.stem}-{metric.stem}{suffix}",
                title=f"{metric.short} · {part.heading}{title}",
                caption=part.caption(metric, facet) + _apart(metric, facet) + _ended(part, facet),
                series=series,
                style=part.looks,
                unit=metric.unit,
                xlabel=xlabel,
                log=metric is not RATE and not flat,
                ceiling=ceiling if metric is RATE else None,
            )


def tiers(part: Slice) -> Iterator[Plot | None]:
    """Time in groups of bars, a group for each Q:K."""
    for suffix, title, facet in _facets(part.frame):
        shapes = tables.distinct(facet, ["queries", "keys"])
        cases = tables.by_key(facet, ["queries", "keys", "impl"])
        impls = [impl for impl in part.impls() if impl in set(facet["impl"])]
        grid = {impl: [cases.get((*shape, impl)) for shape in shapes] for impl in impls}
        yield bars.bars(
            name=f"{part.stem}-bars{suffix}",
            title=f"{TIME.short} · {part.heading}{title}",
            caption=part.caption(TIME, facet) + _apart(TIME, facet),
            tiers=[_tier(*shape) for shape in shapes],
            values={i: [case.time_s * TIME.scale if case else math.nan for case in line] for i, line in grid.items()},
            words={
                i: [tables.WORDS.get(case.outcome, "") if case else "" for case in line] for i, line in grid.items()
            },
            style=part.looks,
            unit=TIME.unit,
        )


def speedups(part: Slice) -> Iterator[Plot]:
    """The heat map of speedups by sequence length, one for each head dimension; by shape where the length is one.

    An implementation without any speedup is there too: its words say why.
    """
    by_length = len(tables.distinct(part.frame, ["queries", "keys"])) > 1
    length = "sequence length S" if (part.frame["queries"] == part.frame["keys"]).all() else "Q:K"
    for suffix, title, facet in _facets(part.frame) if by_length else [("", "", part.frame)]:
        if facet["impl"][facet["speedup"].notna()].nunique() < 2:  # the baseline beside nothing
            continue
        impls = [impl for impl in part.impls() if impl in set(facet["impl"])]
        cases, heads = tables.by_key(facet, [*SHAPE, "impl"]), columns(facet)
        shapes = tables.distinct(facet, SHAPE)
        grid = [[cases.get((*shape, impl)) for shape in shapes] for impl in impls]
        bases = [cases.get((*shape, part.baseline)) for shape in shapes]
        texts = [[_text(part, *pair) for pair in zip(line, bases, strict=True)] for line in grid]
        named = [", ".join(f"{head} {axis(name, shape)}" for name, head in heads.items()) for shape in shapes]
        caption = f" Blue is faster, red slower, full colour from {plots.FULL_COLOUR:g}×."
        caption += f" No base: {part.base} has no time there." if any(NO_BASE in line for line in texts) else ""
        caption += f" Blank: not sampled together with {part.base}." if any("" in line for line in texts) else ""
        yield plots.heat_map(
            name=f"{part.stem}-heat{suffix}",
            title=f"Speedup over {part.base} · {part.heading}{title}",
            caption=part.caption(SPEEDUP, facet) + caption,
            values=[[case.speedup if case else math.nan for case in line] for line in grid],
            texts=texts,
            rows=[part.looks[impl].label for impl in impls],
            columns=[_tier(shape[3], shape[4]) for shape in shapes] if by_length else named,
            xlabel=length if by_length else "",
        )


def _text(part: Slice, case: Any, base: Any) -> str:
    """What stands in a cell of the heat map: the speedup, or why there is none."""
    if case is None:
        return tables.NOT_RUN
    if case.outcome != "ok":
        return tables.WORDS[case.outcome]
    if math.isfinite(case.speedup):
        return f"{case.speedup:.2f}" if case.speedup < 10 else f"{case.speedup:.0f}"
    if pd.isna(case.time_s):
        return "untimed"
    return NO_BASE if part.no_base(base) else ""


def roofline(part: Slice) -> Iterator[Plot | None]:
    """The timed cases under the measured ceilings of matmul and copy, one plot for each head dimension."""
    timed = part.frame[(part.frame["bytes"] > 0) & (part.frame["flops_per_s"] > 0)]
    for suffix, title, facet in _facets(timed):
        points: dict[str, list[tuple[float, float]]] = {impl: [] for impl in part.impls()}
        for row in facet.itertuples():
            points[row.impl].append((row.flops / row.bytes, row.flops_per_s / 1e12))
        yield plots.roofline(
            name=f"{part.stem}-roofline{suffix}",
            title=f"Roofline · {part.heading}{title}",
            caption=f"{part.caption(ROOFLINE, facet)} Bytes are ideal: each input read once, each output written once."
            + _apart(ROOFLINE, facet),
            points=points,
            style=part.looks,
            matmul=part.machine.ceiling(facet, facet["dtype"].iloc[0]),
            copy=part.machine.ceiling(facet),
        )


def _facets(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """File suffix, title and cases of each plot: by head dimension, and by heads and batch where they vary freely."""
    free = columns(frame) if len(frame) else {}
    several = frame.duplicated(["head_dim", "queries", "keys", "impl"]).any()
    varying = [name for name in (FACETS if several else ["D"]) if name in free]
    keys = [key for name in varying for key in FACETS[name]]
    for _, facet in frame.groupby(keys or ["head_dim"], sort=True):
        shape = next(facet[SHAPE].itertuples(index=False, name=None))
        said = [(name, axis(name, shape)) for name in varying]
        suffix = "".join(f"-{name}{value.replace(':', 'x')}" for name, value in said)
        yield suffix, "".join(f", {name} {value}" for name, value in said), facet


def _tier(queries: int, keys: int) -> str:
    return plots.short(queries) if queries == keys else f"{plots.short(queries)}:{plots.short(keys)}"


def _series(frame: pd.DataFrame, metric: Metric, impl: str) -> dict[int, float]:
    rows = frame[(frame["impl"] == impl) & (frame[metric.field] > 0)].sort_values("queries")
    return {row.queries: getattr(row, metric.field) * metric.scale for row in rows.itertuples()}


def _apart(metric: Metric, frame: pd.DataFrame) -> str:
    """A warning where the points of one shape were not sampled together."""
    timed = frame[frame["time_s"].notna()]
    if not metric.clocked or timed.groupby(SHAPE)["comparison"].nunique().max() < 2:
        return ""
    return " Points of one shape come from several runs: not comparable within a few per cent."


def _ended(part: Slice, frame: pd.DataFrame) -> str:
    """Where an implementation has no point because it ran out of memory."""
    lost = frame[frame["outcome"] == "oom"]
    found = [
        f"{part.looks[impl].label} at S {', '.join(f'{length:,}' for length in sorted(set(rows['queries'])))}"
        for impl in part.impls()
        if len(rows := lost[lost["impl"] == impl])
    ]
    return f" Out of memory: {'; '.join(found)}." if found else ""
