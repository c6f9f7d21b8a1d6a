"""Tables of models: contexts by sizes as in the source document, what they were, how they ended, warm-up."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.load import GIB, Machine, file_name
from lmsys.reports.metrics import Metric
from lmsys.reports.model.cases import (
    AXES,
    MODES,
    ROW,
    SPEEDUP,
    SPREAD,
    TIME,
    Slice,
    base_of,
    groups,
    ordered,
    section_title,
    sizes,
    with_speedups,
)
from lmsys.reports.tables import Footnotes, Table

SPREAD_FIELDS = ["time_s", "mean_s", "std_s", "p20_s", "p80_s", "rounds"]


def grid(part: Slice, metric: Metric, frame: pd.DataFrame, axis: str, head: str = "", what: str = "") -> Table | None:
    """Rows: contexts; columns: sizes; a cell holds the values of `axis`, as `a / b`. None without a number to show.

    The table of times says how cases ended, so it is there without a number too, unless memory was all that was asked.
    The CSV has a line for each case; that of times has the mean and the standard deviation too.
    """
    shown = frame[[metric.field, *(["peak_bytes"] if metric is TIME else [])]].notna().any()
    if not shown[metric.field] and (metric is not TIME or shown["peak_bytes"]):
        return None
    cases, notes, heads = tables.by_key(frame, [*ROW, "size", axis]), Footnotes(), _row_heads(frame)
    values, columns, rows = ordered(axis, frame[axis]), sizes(frame), []
    for row in sorted(tables.distinct(frame, ROW)):
        line = []
        for size in columns:
            found = [cases.get((*row, size, value)) for value in values]
            texts = [_cell(case, metric, notes) or "·" * (len(values) > 1) for case in found]
            line.append(" / ".join(texts) if any(found) else tables.NOT_RUN)
        rows.append([*_row(heads, row), *line])
    fields = SPREAD_FIELDS if metric is TIME else [metric.field, *(["paired"] if metric is SPEEDUP else [])]
    return Table(
        name=_named(part, metric, frame),
        title=_titled(part, head or metric.head, frame, axis),
        caption=(f"In each cell: {part.words(frame, axis)}. " if len(values) > 1 else "")
        + part.caption(metric, frame, what),
        columns=[*heads, *columns],
        rows=rows,
        frame=frame[[*ROW, "size", *AXES, "mode", "outcome", *fields]],
        notes=notes.notes() + tables.legend(rows),
        keys=len(heads),
    )


def _cell(case: Any, metric: Metric, notes: Footnotes) -> str:
    if case is None:
        return tables.NOT_RUN
    shown = tables.cell(case, getattr(case, metric.field) * metric.scale, notes)
    remark = case.remark if metric is SPEEDUP else ""
    return (shown or "no baseline") + notes.mark(remark) if remark else shown


def _row_heads(frame: pd.DataFrame) -> list[str]:
    return ROW if frame["batch"].nunique() > 1 else ROW[:1]


def _row(heads: Sequence[str], row: tuple[int, ...]) -> list[str]:
    return [f"{value:,}" for value in row[: len(heads)]]


def _named(part: Slice, metric: Metric, frame: pd.DataFrame) -> str:
    return file_name("-".join([part.stem, metric.stem, *part.constants(frame).values()]))


def _titled(part: Slice, head: str, frame: pd.DataFrame, axis: str) -> str:
    """The head, what stands in one cell, and the constants that other tables beside it have otherwise."""
    several = [part.words(frame, axis)] if frame[axis].nunique() > 1 else []
    fixed = part.constants(frame)
    said = several + [part.word(name, fixed[name]) for name in AXES if name in fixed and part.frame[name].nunique() > 1]
    return f"{head} ({'; '.join(said)}) · {part.heading}" if said else f"{head} · {part.heading}"


def speedup(part: Slice, frame: pd.DataFrame, axis: str, baseline: str | None) -> Table | None:
    """The speedups along one axis over its base; None without a base, or with nothing beside it."""
    base = base_of(frame, axis, baseline)
    found = with_speedups(frame, axis, base)
    found = found[found[axis] != base]
    if not base or not found["speedup"].notna().any():
        return None
    how = "median of rounds sampled side by side" if found["paired"].any() else "ratio of medians, not sampled together"
    what = f"Time of {part.word(axis, base)} divided by time of {part.words(found, axis)}, {how}"
    return grid(part, SPEEDUP, found, axis, f"Speedup over {part.word(axis, base)}, ×", what)


def summary(parts: Sequence[Slice]) -> Table | None:
    """The geometric mean of the speedups of compiled over eager, by mode; None without any."""
    rows: dict[str, dict[str, str]] = {}
    raw, several = [], len(parts[0].labels) > 1
    for part in parts:
        for mode in part.modes():
            own = part.of_mode(mode)
            for frame in groups(own.frame, ["compile"]):
                found = with_speedups(frame, "compile", base_of(frame, "compile", None))
                mean, count = tables.geometric_mean(found["speedup"][found["compile"] == "compiled"])
                setting = {name: value for name, value in own.constants(frame).items() if name in ("precision", "impl")}
                if count:
                    head = ", ".join(
                        own.word(name, value) for name, value in setting.items() if name != "impl" or several
                    )
                    rows.setdefault(own.heading, {})[head] = f"{tables.number(mean)} ({count})"
                    raw.append({"stem": own.stem, **setting, "speedup": mean, "cells": count})
    if not rows:
        return None
    first, heads = parts[0], list(dict.fromkeys(head for line in rows.values() for head in line))
    frame = pd.concat([part.frame for part in parts], ignore_index=True)
    return Table(
        name=f"{first.machine.slug}-model-{file_name(first.section)}-summary",
        title=f"Speedup of compiled over eager, geometric mean · {section_title(first.section)}",
        caption="Geometric mean over the contexts and sizes that both have a time for; how many in brackets. Only "
        "means over the same cells compare. " + first.machine.about(frame),
        columns=["", *heads],
        rows=[[name, *(line.get(head, "") for head in heads)] for name, line in rows.items()],
        frame=pd.DataFrame(raw),
    )


def best(part: Slice) -> Table | None:
    """The case of most tokens per second of each size: of whole steps, or of the last phase that was timed."""
    timed = part.frame[part.frame["tokens_per_s"].notna()]
    if timed.empty:
        return None
    mode = ordered("mode", timed["mode"])[-1]
    own = timed[timed["mode"] == mode]
    found = own.loc[[own["tokens_per_s"][own["size"] == size].idxmax() for size in sizes(own)]]
    rows = []
    for case in found.itertuples():
        numbers = [case.time_s * 1e3, case.tokens_per_s, case.mfu * 100, case.peak_bytes / GIB, case.total_bytes / GIB]
        setting = [case.precision, case.compile, case.label]
        shape = [_millions(case.num_parameters), f"{case.batch:,}", f"{case.context:,}"]
        shown = [tables.number(value) if pd.notna(value) else "" for value in numbers]
        rows.append([case.size, *setting, *shape, *shown])
    return Table(
        name=f"{part.stem}-best",
        title=f"Most tokens per second of each size, {MODES.get(mode, mode).lower()} · {section_title(part.section)}",
        caption=part.caption(TIME, own, "Of all that was timed, by size"),
        columns="size,precision,compile,attention,parameters,batch,context,ms,tokens/s,MFU %,peak GiB,in all GiB".split(
            ","
        ),
        rows=rows,
        frame=found[
            [
                "size",
                *AXES,
                "num_parameters",
                *ROW,
                "mode",
                "time_s",
                "tokens_per_s",
                "mfu",
                "peak_bytes",
                "total_bytes",
            ]
        ],
        keys=4,
    )


def warm_up(part: Slice, frame: pd.DataFrame) -> Table:
    """Rows: sizes, contexts and steps of warm-up; columns: modes; cells: mean ± standard deviation, milliseconds."""
    keys = ["size", *_row_heads(frame), "warmup_steps"]
    modes, notes = ordered("mode", frame["mode"]), Footnotes()
    cases, rows = tables.by_key(frame, [*keys, "mode"]), []
    for size in sizes(frame):
        for _, *row in sorted(tables.distinct(frame[frame["size"] == size], keys)):
            found = [cases.get((size, *row, mode)) for mode in modes]
            rows.append([size, *(f"{value:,}" for value in row), *(_mean(case, notes) for case in found)])
    return Table(
        name=_named(part, SPREAD, frame),
        title=_titled(part, SPREAD.head, frame, "compile"),
        caption=part.caption(SPREAD, frame),
        columns=[*keys[:-1], "warm-up", *(MODES.get(mode, mode).lower() for mode in modes)],
        rows=rows,
        frame=frame[["size", *ROW, "warmup_steps", "mode", *AXES, "outcome", *SPREAD_FIELDS]],
        notes=notes.notes() + tables.legend(rows),
        keys=len(keys),
    )


def _mean(case: Any, notes: Footnotes) -> str:
    if case is None or pd.isna(case.mean_s):
        return tables.cell(case, float("nan"), notes)
    return f"{tables.number(case.mean_s * 1e3)} ± {tables.number(case.std_s * 1e3)}"


def shapes(machine: Machine) -> Table:
    """The sizes: what their names stand for."""
    fields = ["size", "d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "num_parameters"]
    found = machine.frame[fields].drop_duplicates().sort_values(["num_parameters", "size", "vocab_size"])
    return Table(
        name=f"{machine.slug}-model-sizes",
        title="Sizes",
        caption=f"The models that were run. {machine.about(machine.frame)}",
        columns=["size", "d_model", "d_ff", "layers", "heads", "vocabulary", "parameters"],
        rows=[
            [row.size, *(f"{value:,}" for value in row[1:-1]), _millions(row.num_parameters)]
            for row in [*found.itertuples(index=False)]
        ],
        frame=found,
    )


def _millions(count: int) -> str:
    return f"{tables.number(count / 1e6)} M"


def outcomes(machine: Machine) -> Table:
    """How the cases of each attention row, precision and way of running ended."""
    rows, raw = [], []
    for own in groups(machine.frame, []):
        case, line = own.iloc[0], tables.endings(own)
        rows.append([case["label"], case["precision"], case["compile"], *tables.counts(line)])
        raw.append([*case[["impl", "precision", "compile"]], *line])
    return Table(
        name=f"{machine.slug}-model-outcomes",
        title="How the cases ended",
        caption=f"Cases by attention row, precision and way of running. {machine.about(machine.frame)}",
        columns=["attention", "precision", "compile", *tables.ENDINGS],
        rows=rows,
        frame=pd.DataFrame(raw, columns=["impl", "precision", "compile", *tables.ENDINGS]),
        keys=3,
    )
