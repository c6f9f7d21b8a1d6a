"""Where time goes: kinds of kernels, the longest kernels, parts of the model, and how the clocks compare."""

from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.anatomy.cases import (
    KEYS,
    KINDS,
    SECONDS,
    SHARES,
    VARIANT,
    View,
    case_name,
    keys_of,
    outcome,
    variant,
)
from lmsys.reports.metrics import timing
from lmsys.reports.tables import Footnotes, Table

PARTS = (  # in the order of a step
    "forward",
    "norms",
    "projections",
    "rotation",
    "attention",
    "scores",
    "softmax",
    "values",
    "feed-forward",
    "head and loss",
    "backward",
    "optimizer",
)
INSIDE = ("scores", "softmax", "values")  # parts of plain attention
INSIDE_FIELDS = ["inference_s", "matmul_s", "step_forward_s", "step_backward_s", "forward_flops"]
SOFTMAX_OPERATIONS = 5  # for each score: greatest, minus, exp, sum, divide


def shares(view: View) -> Table:
    """Rows: cases; columns: the time of all kernels, and the share of each kind."""
    kinds = [kind for kind in KINDS if (view.frame[f"{kind}_share"] > 0).any()]
    heads, notes, rows = view.heads, Footnotes(), []
    for case in view.cases:
        word = outcome(case, notes)
        shown = [] if word else [f"{100 * getattr(case, f'{kind}_share'):.1f}" for kind in kinds]
        rows.append([*keys_of(case, heads), word or _ms(case.kernel_s), *(shown or [""] * len(kinds))])
    return Table(
        name=view.stem("anatomy-shares"),
        title="Time by kind of kernel",
        caption=view.caption(
            "Time of all kernels of one call, ms, and the share of each kind, %: an inference, or a step of training "
            "(forward, backward, optimizer). Kinds are told by the kernels' names; on a CPU a kernel is an operator, "
            "without those that it calls."
        ),
        columns=[*(KEYS[key] for key in heads), "kernels, ms", *(f"{kind}, %" for kind in kinds)],
        rows=rows,
        frame=view.frame[[*KEYS, "outcome", "kernel_s", *SHARES]],
        notes=notes.notes(),
        keys=len(heads),
    )


def clocks(view: View) -> Table:
    """Rows: cases; columns: the same call by each clock."""
    heads, notes, rows = view.heads, Footnotes(), []
    for case in view.cases:
        word = outcome(case, notes)
        times = [_ms(case.kernel_s), _ms(case.profiled_s)]
        told = [*times, f"{case.profiled_s / case.time_s:.2f}", f"{case.num_launches:,.0f}"] if not word else [""] * 4
        rows.append([*keys_of(case, heads), word or _ms(case.time_s), *told])
    return Table(
        name=view.stem("anatomy-clocks"),
        title="Profiled against clocked",
        caption=view.caption(
            "Time of one call, ms: clocked as in the tables of models, with the gaps in which a GPU waits for its next "
            "kernel; all kernels added up; and the wall time under the profiler. "
            + timing(view.frame)
            + "The rest is the mean of three calls. Launches: kernels, copies and fills of one call."
        ),
        columns=[*(KEYS[key] for key in heads), *"clocked,kernels,profiled,profiled / clocked".split(",")]
        + ["launches"],
        rows=rows,
        frame=view.frame[[*KEYS, "outcome", *SECONDS, "num_launches"]],
        notes=notes.notes(),
        keys=len(heads),
    )


def parts(view: View, mode: str) -> Table | None:
    """Rows: parts of the model; columns: the variants of one setting; None without parts."""
    cases = [case for case in view.cases if case.mode == mode and case.parts]
    found = [{one["name"]: one for one in case.parts} for case in cases]
    names = sorted({name for one in found for name in one}, key=_place)
    if not names:
        return None
    raw = [
        {**_key(case), "part": name, "time_s": one[name]["total_s"], "backward_s": one[name]["backward_s"]}
        for case, one in zip(cases, found, strict=True)
        for name in names
        if name in one
    ]
    return Table(
        name=view.stem(setting_stem(view), mode, "parts"),
        title=f"Parts of {'a step' if mode == 'step' else 'an inference'}, ms · {view.heading}",
        caption=view.caption(
            "Time of the kernels that each part launches"
            + (" / of their backward" if mode == "step" else "")
            + ", ms. "
            "Parts nest: scores, softmax and values are inside attention, and all down to head and loss inside "
            "forward. Inside compiled blocks there are none."
        ),
        columns=["part", *(variant(case) for case in cases)],
        rows=[[name, *(_part(one.get(name)) for one in found)] for name in names],
        frame=pd.DataFrame(raw),
    )


def _place(name: str) -> tuple[int, str]:
    return (PARTS.index(name) if name in PARTS else len(PARTS), name)


def _part(one: Any) -> str:
    if one is None:
        return tables.NOT_RUN
    return f"{_ms(one['total_s'])} / {_ms(one['backward_s'])}" if one["backward_s"] else _ms(one["total_s"])


def inside_attention(view: View) -> Table | None:
    """Softmax against matmul: rows: parts of plain attention; columns: their times, and their arithmetic."""
    variants: dict[tuple[str, ...], dict[str, Any]] = {}
    for case in view.cases:
        variants.setdefault(tuple(keys_of(case, VARIANT)), {})[case.mode] = case
    raw = [[*key, name, *_inside(cases, name)] for key, cases in variants.items() for name in INSIDE]
    frame = pd.DataFrame(raw, columns=[*VARIANT, "part", *INSIDE_FIELDS]).dropna(subset=["matmul_s"])
    if frame.empty:
        return None
    heads = ["inference, ms", "of it matmul kernels, ms", "step: forward, ms", "step: backward, ms", "forward, GFLOP"]
    scales = [1e3] * 4 + [1e-9]
    rows = [
        [*line[:3], *("" if pd.isna(v) else tables.number(v * s) for v, s in zip(line[3:], scales, strict=True))]
        for line in frame.itertuples(index=False, name=None)
    ]
    return Table(
        name=view.stem(setting_stem(view), "softmax"),
        title=f"Softmax against matmul inside attention · {view.heading}",
        caption=view.caption(
            "Kernel time of one call over all layers, ms, of the parts of plain attention: scores are Q Kᵀ, scaled and "
            "masked, values the product with V. Arithmetic of the forward: 2 B H S² D for each product, "
            f"{SOFTMAX_OPERATIONS} B H S² for softmax, times the layers."
        ),
        columns=[*(KEYS[key] for key in VARIANT), "part", *heads],
        rows=rows,
        frame=frame,
        keys=3,
    )


def _inside(cases: dict[str, Any], name: str) -> list[float | None]:
    """INSIDE_FIELDS of a part in the inference and the step of one variant, as far as they have it."""
    found = {mode: one for mode, case in cases.items() for one in case.parts if one["name"] == name}
    inference, step = found.get("forward", {}), found.get("step", {})
    matmul = (inference or step)["kinds"].get("matmul", 0.0) if found else None
    operations = attention_flops(next(iter(cases.values())), name)
    return [inference.get("total_s"), matmul, step.get("total_s"), step.get("backward_s"), operations]


def attention_flops(case: Any, name: str) -> int:
    """Operations of a part of plain attention in one forward: the whole square of scores, as it is computed."""
    scores = case.num_layers * case.batch * case.num_heads * case.context**2
    return int(scores * (SOFTMAX_OPERATIONS if name == "softmax" else 2 * case.d_model // case.num_heads))


def kernels(view: View, case: Any) -> Table:
    """The longest kernels of one case."""
    rows = [
        [
            one["name"],
            one["kind"],
            _ms(one["total_s"]),
            _count(one["count"]),
            f"{100 * one['total_s'] / case.kernel_s:.1f}",
        ]
        for one in case.kernels
    ]
    own = view.only(view.frame["id"] == case.id)
    return Table(
        name=own.stem(case.id, "kernels"),
        title=f"Longest kernels, {case_name(case)} · {view.heading}",
        caption=own.caption(
            f"The {len(rows)} kernels of one call with most time in all: ms and launches in one call, and the share of "
            "the time of all kernels."
        ),
        columns=["kernel", "kind", "ms", "launches", "%"],
        rows=rows,
        frame=pd.DataFrame(case.kernels, columns=["name", "kind", "total_s", "count"]),
        keys=2,
    )


def _count(count: float) -> str:
    return f"{count:,.0f}" if count == round(count) else f"{count:,.1f}"


def setting_stem(view: View) -> str:
    """What the names of a setting's files begin with."""
    first = view.cases[0]
    limit = [first.limit] if first.limit else []
    return "-".join(["anatomy", first.size, f"S{first.context}B{first.batch}", first.precision, *limit])


def _key(case: Any) -> dict[str, Any]:
    return {key: getattr(case, key) for key in KEYS}


def _ms(seconds: float) -> str:
    return tables.number(1e3 * seconds)
