"""Tables of attention: shapes by implementations, and the source documents' head dimension by length."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from reports import tables
from reports.attention.cases import SHAPE, SPEEDUP, TIME, Metric, Slice, axis, columns
from reports.load import Machine
from reports.plots import Look
from reports.tables import Footnotes, Table


def _value(case: Any, metric: Metric) -> float:
    return math.nan if case is None else float(getattr(case, metric.field))


def pivot(part: Slice, metric: Metric) -> Table | None:
    """Rows: shapes; columns: implementations. None without a number to show, unless it is the table of times."""
    frame = part.frame
    if metric is not TIME and not frame[metric.field].notna().any():
        return None
    cases, impls, heads, notes = tables.by_key(frame, [*SHAPE, "impl"]), part.impls(), columns(frame), Footnotes()
    rows, raw, values = [], [], []
    for shape in tables.distinct(frame, SHAPE):
        line = [cases.get((*shape, impl)) for impl in impls]
        value = [_value(case, metric) for case in line]
        shown = [tables.cell(case, x * metric.scale, notes) for case, x in zip(line, value, strict=True)]
        rows.append([*(axis(name, shape) for name in heads), *shown])
        raw.append([*shape, *(tables.value_or_word(case, x) for case, x in zip(line, value, strict=True))])
        values.append(value)
    below = notes.notes()
    if metric is SPEEDUP:
        if any("" in row for row in rows):
            below.append(f"Blank: not sampled together with {part.looks[part.baseline].label}.")
        means = [tables.geometric_mean(column) for column in zip(*values, strict=True)]
        shown = [f"{tables.number(mean)} ({n})" if n else "" for mean, n in means]
        rows.append(["geometric mean (cells)", *[""] * (len(heads) - 1), *shown])
    return Table(
        name=f"{part.stem}-{metric.stem}",
        title=f"{metric.head} · {part.heading}",
        caption=part.caption(metric, frame),
        columns=[*heads.values(), *(part.looks[impl].label for impl in impls)],
        rows=rows,
        frame=pd.DataFrame(raw, columns=[*SHAPE, *impls]),
        notes=below + tables.legend(rows),
        keys=len(heads),
    )


def joined(part: Slice, metric: Metric, wanted: Sequence[str]) -> Table | None:
    """Rows: head dimensions; columns: lengths; a cell holds the implementations' numbers, as `a / b / c`."""
    frame = part.frame[part.frame["impl"].isin(wanted) & (part.frame["queries"] == part.frame["keys"])]
    impls = [impl for impl in wanted if impl in set(frame["impl"])]
    if len(impls) < 2 or not frame[metric.field].notna().any():
        return None
    cases, notes = tables.by_key(frame, [*SHAPE, "impl"]), Footnotes()
    heads = {name: head for name, head in columns(frame).items() if name != "S"} | {"D": "D"}
    lengths = sorted(set(frame["queries"]))
    rows, raw = [], []
    for batch, num_heads, kv_heads, dim in tables.distinct(frame, ["batch", "heads", "kv_heads", "head_dim"]):
        line = []
        for length in lengths:
            shape = (batch, num_heads, kv_heads, length, length, dim)
            found = [cases.get((*shape, impl)) for impl in impls]
            value = [_value(case, metric) for case in found]
            pairs = list(zip(found, value, strict=True))
            line.append(" / ".join(tables.cell(case, x * metric.scale, notes) or "·" for case, x in pairs))
            raw.append([*shape, *(tables.value_or_word(case, x) for case, x in pairs)])
        rows.append([*(axis(name, shape) for name in heads), *line])
    order = " / ".join(part.looks[impl].label for impl in impls)
    return Table(
        name=f"{part.stem}-{metric.stem}-by-dim",
        title=f"{metric.head} ({order}) · {part.heading}",
        caption=f"In each cell: {order}. {part.caption(metric, frame)}",
        columns=[*heads.values(), *(f"S {length:,}" for length in lengths)],
        rows=rows,
        frame=pd.DataFrame(raw, columns=[*SHAPE, *impls]),
        notes=notes.notes() + tables.legend(rows),
        keys=len(heads),
    )


def implementations(machine: Machine, looks: dict[str, Look]) -> Table:
    """The rows that were run, and how their cases ended."""
    frame = machine.frame
    timed = frame["time_s"].notna()
    heads = ["cases", "timed", "verified, untimed", *tables.MEANINGS.values()]
    rows, raw = [], []
    for impl, look in looks.items():
        own = frame["impl"] == impl
        ok = own & (frame["outcome"] == "ok")
        counts = [own, ok & timed, ok & ~timed, *(own & (frame["outcome"] == word) for word in tables.MEANINGS)]
        line = [int(rows.sum()) for rows in counts]
        rows.append([impl, look.label, "peer" if look.dashed else "ours", *(f"{n:,}" if n else "" for n in line)])
        raw.append([impl, look.label, look.dashed, *line])
    return Table(
        name=f"{machine.slug}-attention-implementations",
        title="Implementations",
        caption=f"How the cases of each implementation ended. {machine.about(frame)}",
        columns=["name", "label", "whose", *heads],
        rows=rows,
        frame=pd.DataFrame(raw, columns=["impl", "label", "peer", *heads]),
        keys=3,
    )


def summary(machine: Machine, looks: dict[str, Look], parts: Sequence[Slice]) -> Table | None:
    """The geometric mean of the speedups of each slice, by implementation."""
    rows, raw = [], []
    for part in parts:
        speedups = part.frame["speedup"]
        means = [tables.geometric_mean(speedups[part.frame["impl"] == impl]) for impl in looks]
        if sum(n > 0 for _, n in means) < 2:  # nothing beside the baseline itself
            continue
        section = part.frame["section"].iloc[0]
        base = part.looks[part.baseline].label
        rows.append([section, part.heading, base, *(f"{tables.number(mean)} ({n})" if n else "" for mean, n in means)])
        raw.append([part.stem, part.baseline, *(mean for mean, _ in means)])
    if not rows:
        return None
    return Table(
        name=f"{machine.slug}-attention-summary",
        title="Speedup over the baseline, geometric mean",
        caption="Geometric mean of the speedups (medians of per-round ratios) over the cells sampled together with the "
        "baseline; how many in brackets. Only means over the same cells compare. " + machine.about(machine.frame),
        columns=["section", "case", "baseline", *(look.label for look in looks.values())],
        rows=rows,
        frame=pd.DataFrame(raw, columns=["slice", "baseline", *looks]),
        keys=3,
    )
