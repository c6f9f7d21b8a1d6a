"""Tables of attention: shapes by implementations, and the source documents' head dimension by length."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.attention.cases import RATE, SPEEDUP, TIME, Slice, section_title
from lmsys.reports.attention.shapes import CASE, SHAPE, axis, columns
from lmsys.reports.load import Machine, file_name
from lmsys.reports.metrics import Metric
from lmsys.reports.plots import Look
from lmsys.reports.tables import Footnotes, Table


def _value(case: Any, metric: Metric) -> float:
    return math.nan if case is None else float(getattr(case, metric.field))


def _cells(part: Slice, metric: Metric, line: dict[str, Any], notes: Footnotes) -> list[str]:
    """One row's texts, given its cases by implementation: what does not compare with the others is marked so."""
    shown = [tables.cell(case, _value(case, metric) * metric.scale, notes) for case in line.values()]
    base = line.get(part.baseline)
    if metric is SPEEDUP:
        why = part.no_base(base)
        return [text or (f"no baseline{notes.mark(why)}" if why else "") for text in shown]
    timed = [case for case in (base, *line.values()) if case is not None and pd.notna(case.time_s)]
    if metric not in (TIME, RATE) or not timed:
        return shown
    together, label = str(timed[0].comparison), part.looks[timed[0].impl].label
    apart = f"measured in another run than {label}: not comparable within a few per cent"
    strangers = [case in timed and str(case.comparison) != together for case in line.values()]
    return [text + notes.mark(apart) if strange else text for text, strange in zip(shown, strangers, strict=True)]


def pivot(part: Slice, metric: Metric) -> Table | None:
    """Rows: shapes; columns: implementations. None without a number to show, unless it is the table of times."""
    frame = part.frame
    if not (part.compared() if metric is SPEEDUP else metric is TIME or frame[metric.field].notna().any()):
        return None
    cases, impls, heads, notes = tables.by_key(frame, [*CASE, "impl"]), part.impls(), columns(frame), Footnotes()
    rows, raw, values = [], [], []
    for shape in tables.distinct(frame, CASE):
        line = {impl: cases.get((*shape, impl)) for impl in impls}
        value = [_value(case, metric) for case in line.values()]
        rows.append([*(axis(name, shape) for name in heads), *_cells(part, metric, line, notes)])
        raw.append([*shape, *map(tables.value_or_word, line.values(), value)])
        values.append(value)
    below = notes.notes()
    if metric is SPEEDUP:
        if any("" in row for row in rows):
            below.append(f"Blank: not sampled together with {part.base}.")
        means = [tables.geometric_mean(column) for column in zip(*values, strict=True)]
        shown = [f"{tables.number(mean)} ({n})" if n else "" for mean, n in means]
        rows.append(["geometric mean (cells)", *[""] * (len(heads) - 1), *shown])
    return Table(
        name=f"{part.stem}-{metric.stem}",
        title=f"{metric.head} · {part.heading}",
        caption=part.caption(metric, frame),
        columns=[*heads.values(), *(part.looks[impl].label for impl in impls)],
        rows=rows,
        frame=pd.DataFrame(raw, columns=[*CASE, *impls]),
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
            found = {impl: cases.get((*shape, impl)) for impl in impls}
            line.append(" / ".join(text or "·" for text in _cells(part, metric, found, notes)))
            raw.append([*shape, *(tables.value_or_word(case, _value(case, metric)) for case in found.values())])
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
    rows, raw = [], []
    for impl, look in looks.items():
        line = tables.endings(frame[frame["impl"] == impl])
        rows.append([impl, look.label, "peer" if look.dashed else "ours", *tables.counts(line)])
        raw.append([impl, look.label, look.dashed, *line])
    return Table(
        name=f"{machine.slug}-attention-implementations",
        title="Implementations",
        caption=f"How the cases of each implementation ended. {machine.about(frame)}",
        columns=["name", "label", "whose", *tables.ENDINGS],
        rows=rows,
        frame=pd.DataFrame(raw, columns=["impl", "label", "peer", *tables.ENDINGS]),
        keys=3,
    )


def summary(parts: Sequence[Slice]) -> Table | None:
    """The geometric mean of the speedups of each slice of one section, by implementation."""
    parts = [part for part in parts if part.compared()]
    if not parts:
        return None
    first = parts[0]
    frame = pd.concat([part.frame for part in parts], ignore_index=True)
    impls = [impl for impl in first.looks if frame["speedup"][frame["impl"] == impl].notna().any()]
    found = {
        impl: [tables.geometric_mean(part.frame["speedup"][part.frame["impl"] == impl]) for part in parts]
        for impl in impls
    }
    bases = list(dict.fromkeys(part.base for part in parts))
    heads = [part.heading if len(bases) == 1 else f"{part.heading}, over {part.base}" for part in parts]
    return Table(
        name=f"{first.machine.slug}-{file_name(first.section)}-summary",
        title=f"Speedup over {' or '.join(bases)}, geometric mean · {section_title(first.section)}",
        caption="Geometric mean of the speedups (medians of per-round ratios) over the cells sampled together with the "
        f"baseline; how many in brackets. Only means over the same cells compare. {first.machine.about(frame)}",
        columns=["", *heads],
        rows=[
            [first.looks[impl].label, *(f"{tables.number(mean)} ({n})" if n else "" for mean, n in means)]
            for impl, means in found.items()
        ],
        frame=pd.DataFrame(
            [[impl, *(mean for mean, _ in means)] for impl, means in found.items()],
            columns=["impl", *(part.stem for part in parts)],
        ),
    )
