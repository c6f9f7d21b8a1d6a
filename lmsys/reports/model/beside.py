"""Tables that set two figures side by side: our model's and a peer's, memory as predicted and as measured."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.load import GIB
from lmsys.reports.metrics import Metric
from lmsys.reports.model.cases import (
    AXES,
    FITS,
    MFU,
    ROW,
    TIME,
    TOKENS,
    TOTAL,
    Slice,
    groups,
    ordered,
    sizes,
    with_speedups,
)
from lmsys.reports.tables import Footnotes, Table

CASE = ["size", *ROW, "precision", "compile"]
VERDICTS = {True: "fits", False: "too large"}
HEADS = {TOKENS: "tokens/s", MFU: "MFU, %", TOTAL: "memory, GiB"}
RATIOS = {TOKENS: "speedup, ×", TOTAL: "memory, ×"}  # stand behind ours and the peer's


def peer(part: Slice) -> Table | None:
    """Rows: our cases, of one mode; columns: speed and memory of ours and of a peer's whole model. None without one."""
    theirs = ordered("impl", part.frame["impl"][part.frame["peer"]])
    if not theirs or part.frame["peer"].all():
        return None
    compared = [with_speedups(frame, "impl", theirs[0]) for frame in groups(part.frame, ["impl"])]
    frame = pd.concat(compared, ignore_index=True)
    others, ours = tables.by_key(frame[frame["impl"] == theirs[0]], CASE), frame[~frame["peer"]]
    keys, notes, rows, raw = _keys(ours), Footnotes(), [], []
    metrics = [metric for metric in HEADS if frame[metric.field].notna().any()]
    for case in _in_order(ours):
        other = others.get(tuple(getattr(case, field) for field in CASE))
        rows.append([*_said(case, keys), *_compared(case, other, metrics, notes)])
        raw.append(_numbers(case, other))
    name, short = part.word("impl", theirs[0]), theirs[0].capitalize()
    heads = [[HEADS[metric], f"{short} {HEADS[metric]}", RATIOS.get(metric, "")] for metric in metrics]
    how = "median of rounds sampled side by side" if ours["paired"].any() else "ratio of medians, not sampled together"
    what = f"Ours beside {name}. Speedup: time of {name} divided by time of ours, {how}. {TOTAL.title}"
    return Table(
        name=f"{part.stem}-beside-{theirs[0]}",
        title=f"Ours beside {name} · {part.heading}",
        caption=part.caption(TIME, frame, what),
        columns=[*_heads(keys), *(head for three in heads for head in three if head)],
        rows=rows,
        frame=pd.DataFrame(raw),
        notes=notes.notes() + tables.legend(rows),
        keys=len(keys),
    )


def _compared(case: Any, other: Any, metrics: list[Metric], notes: Footnotes) -> Iterator[str]:
    for metric in metrics:
        values = [getattr(one, metric.field, math.nan) * metric.scale for one in (case, other)]
        yield from (tables.cell(one, value, notes) for one, value in zip((case, other), values, strict=True))
        if metric is TOKENS:
            yield _number(case.speedup) + (notes.mark(case.remark) if case.remark else "")
        elif metric in RATIOS:
            yield _number(values[0] / values[1])


def _numbers(case: Any, other: Any) -> dict[str, Any]:
    fields = [metric.field for metric in (TIME, TOKENS, MFU, TOTAL)]
    found = {field: getattr(case, field) for field in [*CASE, "impl", *fields]}
    found |= {f"peer_{field}": getattr(other, field, None) for field in fields}
    return found | {"speedup": case.speedup, "paired": case.paired}


def predicted(part: Slice) -> Table | None:
    """Rows: our cases, of one mode; columns: memory as predicted and as measured. None where nothing was predicted.

    Where what fits is the question, what was to fit stands beside what did: the memory limit, else the device's.
    """
    frame = part.frame[part.frame["predicted_bytes"].notna()]
    if frame.empty:
        return None
    limit = frame["memory_limit_bytes"].iloc[0]
    room = limit or min(run.get("memory_bytes") or 0 for run in part.machine.runs_of(frame))
    asked = limit > 0 or (part.section == FITS and room > 0)
    keys, notes, rows, agree = _keys(frame), Footnotes(), [], []
    for case in _in_order(frame):
        share = 100 * case.total_bytes / case.predicted_bytes
        line = [tables.number(case.predicted_bytes / GIB), tables.cell(case, case.total_bytes / GIB, notes)]
        verdicts = [VERDICTS[case.predicted_bytes <= room], _tried(case)]
        if verdicts[1]:
            agree.append(verdicts[0] == verdicts[1])
        rows.append([*_said(case, keys), *line, _number(share), *verdicts])
    what = "Memory of a step in all (live before, and the peak above), as the shapes predict it and as measured"
    if asked:
        what += f". Room for {tables.number(room / GIB)} GiB: {sum(agree)} of {len(agree)} cases ended as predicted"
    heads = [*_heads(keys), "predicted, GiB", "measured, GiB", "measured / predicted, %", "predicted", "tried"]
    return Table(
        name=f"{part.stem}-predicted",
        title=f"Memory predicted and measured · {part.heading}",
        caption=part.caption(TOTAL, frame, what),
        columns=heads if asked else heads[:-2],
        rows=rows if asked else [row[:-2] for row in rows],
        frame=frame[["size", *ROW, *AXES, "outcome", "predicted_bytes", "total_bytes", "memory_limit_bytes"]],
        notes=notes.notes(),
        keys=len(keys),
    )


def _number(value: float) -> str:
    return tables.number(value) if pd.notna(value) else ""


def _tried(case: Any) -> str:
    """What became of it; "" when it was not asked of the device, or failed of something else."""
    return VERDICTS[False] if case.outcome == "oom" else VERDICTS[True] if pd.notna(case.total_bytes) else ""


def _keys(frame: pd.DataFrame) -> list[str]:
    """The columns that say what a row is: size and batch, and what differs from row to row."""
    return [field for field in [*CASE, "impl"] if field in ("size", "batch") or frame[field].nunique() > 1]


def _heads(keys: list[str]) -> list[str]:
    return ["attention" if key == "impl" else key for key in keys]


def _said(case: Any, keys: list[str]) -> list[str]:
    said = {field: getattr(case, "label" if field == "impl" else field) for field in keys}
    return [f"{value:,}" if field in ROW else value for field, value in said.items()]


def _in_order(frame: pd.DataFrame) -> Iterator[Any]:
    for size in sizes(frame):
        yield from frame[frame["size"] == size].itertuples(index=False)
