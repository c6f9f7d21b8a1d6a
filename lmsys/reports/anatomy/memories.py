"""Where memory goes: the peak of each phase, what is held, predicted beside measured, and the largest allocations."""

from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.anatomy.cases import CALLS, KEYS, MEASURED, View, case_name, keys_of, memory_unit, outcome
from lmsys.reports.tables import Footnotes, Table

COLUMNS = (  # of the peaks: the call, and what was in use in it
    ("forward", "held"),
    ("forward", "forward"),
    ("step", "held"),
    ("step", "forward"),
    ("step", "backward"),
    ("step", "optimizer"),
)


def peaks(view: View) -> Table | None:
    """Rows: variants; columns: the peak of an inference, and of each phase of a step; None without any."""
    heads = [key for key in view.heads if key != "call"]
    rows, raw, notes = [], [], Footnotes()
    unit, scale = memory_unit((view.frame["held_bytes"] + view.frame["peak_bytes"]).max())
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for case in view.cases:
        found.setdefault(tuple(keys_of(case, heads)), {})[case.mode] = case
    for key, cases in found.items():
        words = {mode: outcome(case, notes) for mode, case in cases.items()}
        values = [_in_use(cases.get(mode), what) for mode, what in COLUMNS]
        texts = [
            words.get(mode, tables.NOT_RUN) if value is None else tables.number(value / scale)
            for (mode, _), value in zip(COLUMNS, values, strict=True)
        ]
        rows.append([*key, *texts])
        raw.append([*key, *values])
    if not any(case.phases for case in view.cases):
        return None
    return Table(
        name=view.stem("anatomy-peaks"),
        title=f"Peak by phase, {unit}",
        caption=view.caption(
            f"The most memory in use during each phase, {unit}, with what was held before: weights, and in a step the "
            "optimizer's state. An inference is a forward without gradients; before a step there are no gradients yet."
        ),
        columns=[*(KEYS[key] for key in heads), *(f"{CALLS[mode]}: {what}" for mode, what in COLUMNS)],
        rows=rows,
        frame=pd.DataFrame(raw, columns=[*heads, *(f"{CALLS[mode]}_{what}_bytes" for mode, what in COLUMNS)]),
        notes=notes.notes() + tables.legend(rows),
        keys=len(heads),
    )


def _in_use(case: Any, what: str) -> float | None:
    """Bytes held before a call, or in use at the peak of one of its phases."""
    above = {"held": 0, **{one["name"]: one["peak_bytes"] for one in case.phases}} if case and case.phases else {}
    return float(case.held_bytes + above[what]) if what in above else None


def predictions(view: View) -> Table | None:
    """Rows: steps; columns: what memory holds, measured / predicted and the deviation; None without any."""
    view = view.only((view.frame["mode"] == "step") & view.frame["predicted_parameters_bytes"].notna())
    if view.frame.empty:
        return None
    heads, rows, raw = view.heads, [], []
    unit, scale = memory_unit(view.frame[[f"{name}_bytes" for name in MEASURED]].max().max())
    for case in view.cases:
        row, line = keys_of(case, heads), [getattr(case, key) for key in KEYS]
        for name in MEASURED:
            measured, predicted = getattr(case, f"{name}_bytes"), getattr(case, f"predicted_{name}_bytes")
            deviation = predicted / measured - 1
            row.append(
                f"{tables.number(measured / scale)} / {tables.number(predicted / scale)} ({100 * deviation:+.1f} %)"
            )
            line += [measured, predicted, deviation]
        rows.append(row)
        raw.append(line)
    fields = [f"{name}_{what}" for name in MEASURED for what in ("bytes", "predicted_bytes", "deviation")]
    return Table(
        name=view.stem("anatomy-predicted"),
        title=f"What memory holds, {unit}: measured / predicted (deviation)",
        caption=view.caption(
            f"{unit}. Activations: what a forward leaves for its backward, and the head's gradient, made there. "
            "They are predicted for blocks in eager mode and for attention that keeps no scores: what plain "
            "attention keeps, and what a compiler does not, is not in the prediction."
        ),
        columns=[*(KEYS[key] for key in heads), *MEASURED],
        rows=rows,
        frame=pd.DataFrame(raw, columns=[*KEYS, *fields]),
        keys=len(heads),
    )


def allocations(view: View, case: Any) -> Table | None:
    """The largest allocations of one case, with the line that asked for them; None without any."""
    if not case.allocations:
        return None
    unit, scale = memory_unit(max(one["bytes"] for one in case.allocations))
    own = view.only(view.frame["id"] == case.id)
    return Table(
        name=own.stem(case.id, "allocations"),
        title=f"Largest allocations, {case_name(case)} · {view.heading}",
        caption=own.caption(
            f"The largest allocations of one call, {unit} each; how many of that size the line made, and how many of "
            "them were live when most memory was in use. Line: the innermost that is not torch's; a backward on a GPU "
            "has none, and of compiled code none may be known."
        ),
        columns=["line", "function", unit, "count", "at the peak"],
        rows=[
            [one["where"] or "unknown", one["function"], tables.number(one["bytes"] / scale), f"{one['count']:,}"]
            + [f"{one['at_peak']:,}"]
            for one in case.allocations
        ],
        frame=pd.DataFrame(case.allocations, columns=["where", "function", "bytes", "count", "at_peak"]),
        keys=2,
    )
