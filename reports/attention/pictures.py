"""Plots of attention: time, rate and memory against length, tiers, speedup, roofline."""

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from reports import plots, tables
from reports.attention.cases import PEAK, RATE, ROOFLINE, SHAPE, SPEEDUP, TIME, Metric, Slice, axis, columns
from reports.plots import Plot


def against_length(part: Slice, metrics: Sequence[Metric] = (TIME, RATE, PEAK)) -> Iterator[Plot | None]:
    """Time, rate and memory by sequence length, one plot for each head dimension (and batch and heads)."""
    square = part.frame[part.frame["queries"] == part.frame["keys"]]
    peak = part.machine.ceiling(part.frame, part.frame["dtype"].iloc[0])
    ceiling = (f"matmul {tables.number(peak / 1e12)} TFLOP/s", peak / 1e12) if peak else None
    for suffix, title, facet in _facets(square):
        for metric in metrics:
            series = {impl: _series(facet, metric, impl) for impl in part.impls()}
            yield plots.lines(
                name=f"{part.stem}-{metric.stem}{suffix}",
                title=f"{metric.short} · {part.heading}{title}",
                caption=part.caption(metric, facet) + _ended(part, facet),
                series=series,
                style=part.looks,
                unit=metric.unit,
                log=metric is not RATE,
                ceiling=ceiling if metric is RATE else None,
            )


def tiers(part: Slice) -> Iterator[Plot | None]:
    """Time in groups of bars, a group for each Q:K."""
    for suffix, title, facet in _facets(part.frame):
        shapes = tables.distinct(facet, ["queries", "keys"])
        cases = tables.by_key(facet, ["queries", "keys", "impl"])
        impls = [impl for impl in part.impls() if impl in set(facet["impl"])]
        grid = {impl: [cases.get((*shape, impl)) for shape in shapes] for impl in impls}
        yield plots.bars(
            name=f"{part.stem}-bars{suffix}",
            title=f"{TIME.short} · {part.heading}{title}",
            caption=part.caption(TIME, facet),
            tiers=[_tier(*shape) for shape in shapes],
            values={i: [case.time_s * TIME.scale if case else math.nan for case in line] for i, line in grid.items()},
            words={
                i: [tables.WORDS.get(case.outcome, "") if case else "" for case in line] for i, line in grid.items()
            },
            style=part.looks,
            unit=TIME.unit,
        )


def speedups(part: Slice) -> Iterator[Plot]:
    """The heat map of speedups by sequence length, one for each head dimension; by shape where the length is one."""
    by_length = len(tables.distinct(part.frame, ["queries", "keys"])) > 1
    length = "sequence length S" if (part.frame["queries"] == part.frame["keys"]).all() else "Q:K"
    base = part.looks[part.baseline].label if part.baseline else ""
    for suffix, title, facet in _facets(part.frame) if by_length else [("", "", part.frame)]:
        having = set(facet["impl"][facet["speedup"].notna()])
        impls = [impl for impl in part.impls() if impl in having]
        if len(impls) < 2:  # the baseline beside nothing
            continue
        cases, heads = tables.by_key(facet, [*SHAPE, "impl"]), columns(facet)
        shapes = tables.distinct(facet, SHAPE)
        grid = [[cases.get((*shape, impl)) for shape in shapes] for impl in impls]
        named = [", ".join(f"{head} {axis(name, shape)}" for name, head in heads.items()) for shape in shapes]
        yield plots.heat_map(
            name=f"{part.stem}-heat{suffix}",
            title=f"Speedup over {base} · {part.heading}{title}",
            caption=f"Blue is faster than {base}. {part.caption(SPEEDUP, facet)}",
            values=[[case.speedup if case else math.nan for case in line] for line in grid],
            words=[[tables.WORDS.get(case.outcome, "") if case else tables.NOT_RUN for case in line] for line in grid],
            rows=[part.looks[impl].label for impl in impls],
            columns=[_tier(shape[3], shape[4]) for shape in shapes] if by_length else named,
            xlabel=length if by_length else "",
        )


def roofline(part: Slice) -> Plot | None:
    """Every timed case under the measured ceilings of matmul and copy."""
    rows = part.frame[(part.frame["bytes"] > 0) & (part.frame["flops_per_s"] > 0)]
    points: dict[str, list[tuple[float, float]]] = {impl: [] for impl in part.impls()}
    for row in rows.itertuples():
        points[row.impl].append((row.flops / row.bytes, row.flops_per_s / 1e12))
    return plots.roofline(
        name=f"{part.stem}-roofline",
        title=f"Roofline · {part.heading}",
        caption=f"{part.caption(ROOFLINE, rows)} Bytes are ideal: each input read once, each output written once."
        if len(rows)
        else "",
        points=points,
        style=part.looks,
        matmul=part.machine.ceiling(part.frame, part.frame["dtype"].iloc[0]),
        copy=part.machine.ceiling(part.frame),
    )


def _facets(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """File suffix, title and cases of each plot: by head dimension, and by batch and heads where they vary freely."""
    keys, names = ["head_dim"], ["D"]
    if frame.duplicated(["head_dim", "queries", "keys", "impl"]).any():
        keys, names = ["batch", "heads", "kv_heads", "head_dim"], ["B", "H", "D"]
    varying = [name for name in names if name in columns(frame)] if len(frame) else []
    for _, facet in frame.groupby(keys, sort=True):
        shape = next(facet[SHAPE].itertuples(index=False, name=None))
        said = [(name, axis(name, shape)) for name in varying]
        suffix = "".join(f"-{name}{value.replace(':', 'x')}" for name, value in said)
        yield suffix, "".join(f", {name} {value}" for name, value in said), facet


def _tier(queries: int, keys: int) -> str:
    return plots.short(queries) if queries == keys else f"{plots.short(queries)}:{plots.short(keys)}"


def _series(frame: pd.DataFrame, metric: Metric, impl: str) -> dict[int, float]:
    rows = frame[(frame["impl"] == impl) & (frame[metric.field] > 0)].sort_values("queries")
    return {row.queries: getattr(row, metric.field) * metric.scale for row in rows.itertuples()}


def _ended(part: Slice, frame: pd.DataFrame) -> str:
    """Where an implementation has no point because it ran out of memory."""
    lost = frame[frame["outcome"] == "oom"]
    found = [
        f"{part.looks[impl].label} at S {', '.join(f'{length:,}' for length in sorted(set(rows['queries'])))}"
        for impl in part.impls()
        if len(rows := lost[lost["impl"] == impl])
    ]
    return f" Out of memory: {'; '.join(found)}." if found else ""
