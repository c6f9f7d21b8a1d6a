"""The anatomy of a model: by kernel and part of the model where time goes, and by phase where memory goes."""

from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.ticker import FuncFormatter

from lmsys.bench.fields import Field, Record
from lmsys.reports import plots
from lmsys.reports.tables import Block, Chapter, Plot, Table, listing, pivot
from lmsys.reports.views import LIMIT, View
from lmsys.reports.words import filled, number

GIB = 2**30
CALLS = {"forward": "inference", "step": "step"}  # modes, as they are read
KINDS = ("matmul", "attention", "elementwise", "reduction", "copy", "communication", "other")  # of kernels
PHASES = {"forward": "#2563eb", "backward": "#dc2626", "optimizer": "#16a34a"}
HELD = "#9ca3af"
MEASURED = ("parameters", "gradients", "optimizer", "activations")
INSIDE = ("scores", "softmax", "values")  # parts of plain attention
PARTS = (
    *("forward", "norms", "projections", "rotation", "attention", *INSIDE),
    *("feed-forward", "head and loss", "backward", "optimizer"),
)  # in the order of a step
PART_FIELDS = (
    Field("name", label="part"),
    Field("total_s", "s", "time", shown="ms"),
    Field("backward_s", "s", "backward", shown="ms"),
)
SOFTMAX_OPERATIONS = 5  # for each score: greatest, minus, exp, sum, divide
SHAPE = ("batch", "context", "d_model", "num_layers", "num_heads")
REST = ("d_ff", "num_parameters")  # of what a size stands for
KERNELS = (
    "kernels",
    (
        Field("name", label="kernel"),
        Field("kind"),
        Field("total_s", "s", "time", shown="ms"),
        Field("count", label="launches", of=lambda one: int(one["count"]) if one["count"] % 1 == 0 else one["count"]),
        Field("share", shown="%", of=lambda one: one["total_s"] / one["kernel_s"]),
    ),
    "Longest kernels",
    "The {lines} kernels of one call with most time in all: time and launches in one call, and the share of the time "
    "of all kernels",
)
ALLOCATIONS = (
    "allocations",
    (
        Field("where", label="line"),
        Field("function"),
        Field("bytes", "B", "size of each", shown="MiB"),
        Field("count"),
        Field("at_peak", label="at the peak"),
    ),
    "Largest allocations",
    "The largest allocations of one call; how many of that size the line made, and how many of them were live when "
    "most memory was in use. Line: the innermost that is not torch's; a backward on a GPU has none, and of compiled "
    "code none may be known",
)
CASE = ("{mode}-{compile}-{impl}", "{mode}, {compile}, {impl}")


def chapters(view: View) -> list[Chapter]:
    """All cases beside one another, then each setting for itself."""
    view = view.checked(SHAPE, ("size", "precision", "mode", "compile")).read_as(mode=CALLS).quiet(*SHAPE[2:], *REST)
    view = (
        view.labelled(impl="attention", mode="call")
        .read_as(name={name: name for name in PARTS})
        .with_fields(
            Field("variant", role="detail", of=lambda case: f"{case['compile']}, {view.text('impl', case['impl'])}")
        )
    )
    view = view.ordered("size", "context", "batch", LIMIT, "precision", "mode", "compile", "impl")
    stem, heading = (
        "anatomy-{size}-S{context}B{batch}-{precision}",
        "{size}, context {context}, batch {batch}, {precision}",
    )
    time, memory = [Block("", [_shares(view), _clocks(view)])], [Block("", [_peaks(view), _predictions(view)])]
    for part in view.cut(stem, heading):
        cases = part.cut(*CASE)
        lead = [_parts(part, "step"), _parts(part, "forward"), _inside(part), _share_bars(part)]
        time.append(Block(part.title, lead, [_lines(own, *KERNELS) for own in cases]))
        cases.sort(key=lambda own: own.cases[0]["mode"] != "step")
        memory.append(
            Block(part.title, [_timeline(own) for own in cases], [_lines(own, *ALLOCATIONS) for own in cases])
        )
    return [Chapter("Where time goes", time), Chapter("Where memory goes", memory)]


def _keys(view: View) -> list[str]:
    """The axes in which the cases differ, and always how a model is run."""
    settings = ("size", "context", "batch", "precision", LIMIT, "mode")
    return [*(name for name in settings if view.varies(name)), "compile", "impl"]


def _shares(view: View) -> Table | None:
    """Rows: cases; columns: the time of all kernels, and the share of each kind."""
    shares = [name for name in view.metrics() if name.endswith("_share") and any(case[name] for case in view.cases)]
    return listing(
        view,
        _keys(view),
        ["kernel_s", *shares],
        "anatomy-shares",
        "Time by kind of kernel",
        "Time of all kernels of one call, and the share of each kind: an inference, or a step of training (forward, "
        "backward, optimizer). Kinds are told by the kernels' names; on a CPU a kernel is an operator, without those "
        "that it calls",
    )


def _clocks(view: View) -> Table | None:
    """Rows: cases; columns: the same call by each clock."""
    view = view.with_fields(
        Field("slowdown", label="profiled / clocked", of=lambda case: case["profiled_s"] / case["time_s"])
    )
    metrics = [one for one in view.metrics() if not one.endswith("_share") and view.fields[one].unit != "B"]
    return listing(
        view,
        _keys(view),
        metrics,
        "anatomy-clocks",
        "Profiled against clocked",
        "Time of one call: clocked as in the tables of models, with the gaps in which a GPU waits for its next "
        "kernel; all kernels added up; and the wall time under the profiler. All but the first are means of three "
        "calls",
    )


def _parts(part: View, mode: str) -> Table | None:
    """Rows: parts of the model; columns: the variants of one setting."""
    own_s = Field("own_s", label=f"Parts of one {CALLS[mode]}, ms", of=_own_time)
    own = part.only(lambda case: case["mode"] == mode).unfolded("parts", *PART_FIELDS, own_s)
    return pivot(
        own,
        "own_s",
        ["name"],
        "variant",
        word=f"{mode}-parts",
        about="Time of the kernels that each part launches, of a step also of their backward, ms. Parts nest: scores, "
        "softmax and values are inside attention, and all down to head and loss inside forward. Inside compiled "
        "blocks there are none",
        data=("name", "total_s", "backward_s"),
    )


def _own_time(one: Record) -> str:
    backward = f" / {number(1e3 * one['backward_s'])}" if one["backward_s"] else ""
    return number(1e3 * one["total_s"]) + backward


def _inside(part: View) -> Table | None:
    """Softmax against matmul: rows: parts of plain attention; columns: their times, and their arithmetic."""
    matmul = Field("matmul_s", "s", "of it matmul kernels", shown="ms", of=lambda one: one["kinds"].get("matmul", 0.0))
    flops = Field("forward_flops", "FLOP", "forward", shown="GFLOP", of=_attention_flops)
    own = part.unfolded("parts", *PART_FIELDS, matmul, flops).only(lambda one: one["name"] in INSIDE)
    about = (
        "Kernel time of one call over all layers, of the parts of plain attention: scores are Q Kᵀ, scaled and masked, "
        "values the product with V. Arithmetic of the forward: 2 B H S² D for each product, "
        f"{SOFTMAX_OPERATIONS} B H S² for softmax, times the layers"
    )
    metrics = ("total_s", "matmul_s", "backward_s", "forward_flops")
    title, keys = "Softmax against matmul inside attention", ("mode", "compile", "impl", "name")
    return listing(own, keys, metrics, "softmax", title, about, ("name", *metrics))


def _attention_flops(one: Record) -> float:
    """Operations of a part of plain attention in one forward: the whole square of scores, as it is computed."""
    scores = one["num_layers"] * one["batch"] * one["num_heads"] * one["context"] ** 2
    return scores * (SOFTMAX_OPERATIONS if one["name"] == "softmax" else 2 * one["d_model"] // one["num_heads"])


def _lines(own: View, name: str, fields: tuple[Field, ...], title: str, about: str) -> Table | None:
    """A table of a list that one case holds; the first two fields say what a line is."""
    own, names = own.unfolded(name, *fields), [one.name for one in fields]
    return listing(own, names[:2], names[2:], name, title, filled(about, {"lines": len(own.cases)}), names)


def _peaks(view: View) -> Table | None:
    """Rows: variants; columns: what was held before a call, and the peak of each of its phases."""
    in_use = Field(
        "in_use_bytes", "B", "Peak by phase", shown="GiB", of=lambda one: one["held_bytes"] + one["peak_bytes"]
    )
    what = Field("what", role="detail", of=lambda one: f"{view.text('mode', one['mode'])}: {one['name']}")
    own = view.with_fields(Field("phases", role="detail", of=_held_and_phases)).unfolded("phases", in_use, what)
    about = (
        "The most memory in use during each phase, with what was held before: weights, and in a step the optimizer's "
        "state. An inference is a forward without gradients; before a step there are no gradients yet"
    )
    keys = [name for name in _keys(view) if name != "mode"]
    return pivot(own, "in_use_bytes", keys, "what", word="anatomy-peaks", about=about, data=("what", "in_use_bytes"))


def _held_and_phases(case: Record) -> list[dict[str, Any]]:
    """The phases of a call after what was held before; of one that was not opened, without their peaks."""
    names = PHASES if case["mode"] == "step" else ("forward",)
    phases = case["phases"] or [{"name": name, "peak_bytes": None} for name in names]
    return [{"name": "held", "peak_bytes": 0 if case["phases"] else None}, *phases]


def _predictions(view: View) -> Table | None:
    """Rows: steps; columns: what memory holds, measured / predicted and the deviation."""
    view = view.only(lambda case: case["mode"] == "step" and case["predicted_parameters_bytes"] is not None)
    view = view.with_fields(*(Field(name, of=partial(_deviation, name)) for name in MEASURED))
    about = (
        "GiB. Activations: what a forward leaves for its backward, and the head's gradient, made there. They are "
        "predicted for blocks in eager mode and for attention that keeps no scores: what plain attention keeps, and "
        "what a compiler does not, is not in the prediction"
    )
    data = [f"{way}{name}_bytes" for name in MEASURED for way in ("", "predicted_")]
    return listing(
        view,
        _keys(view),
        MEASURED,
        "anatomy-predicted",
        "What memory holds, GiB: measured / predicted (deviation)",
        about,
        data,
    )


def _deviation(name: str, case: Record) -> str:
    measured, predicted = case[f"{name}_bytes"], case[f"predicted_{name}_bytes"]
    return f"{number(measured / GIB)} / {number(predicted / GIB)} ({100 * (predicted / measured - 1):+.1f} %)"


def _share_bars(part: View) -> Plot | None:
    """The share of each kind of kernel, a bar for each way in which the model runs."""
    cases = [
        {**case, "kind": kind} for case in part.cases if case["kernel_s"] for kind in KINDS if case[f"{kind}_share"]
    ]
    share = Field("share", "", "Time by kind of kernel", shown="%", of=lambda case: case[f"{case['kind']}_share"])
    way = Field("way", of=lambda case: f"{part.text('mode', case['mode'])}, {case['variant']}")
    own = replace(part, cases=cases).with_fields(share, way, Field("kind")).styled("way", "impl")
    return plots.bars(
        own,
        "share",
        "kind",
        "way",
        "shares",
        head="Time by kind of kernel, %",
        about="Share of the time of all kernels in one call",
    )


def _timeline(own: View) -> Plot | None:
    """Memory in use in the course of a call, a colour for each phase; None where none was recorded."""
    case, phases = own.cases[0], own.cases[0]["timeline"] or ()
    points = [point for phase in phases for point in phase["points"]]
    if len(points) < 2:
        return None
    held = (case["held_bytes"] or 0) / GIB
    most, end = held + max(size for _, size in points) / GIB, 1e3 * points[-1][0]
    head = f"Memory in the course of one {own.text('mode', case['mode'])}, GiB"
    axes = plots.canvas(2.6)
    axes.fill_between([0, end], held, color=HELD, alpha=0.55, linewidth=0, label="held before")
    last = (0.0, held)
    for phase in phases:
        xs, ys = zip(last, *((1e3 * at, held + size / GIB) for at, size in phase["points"]), strict=True)
        color, last = PHASES.get(phase["name"], plots.INK), (xs[-1], ys[-1])
        axes.plot(xs, ys, drawstyle="steps-post", linewidth=1.0, color=color)
        axes.fill_between(xs, held, ys, step="post", alpha=0.3, linewidth=0, color=color, label=phase["name"])
    axes.axhline(most, **plots.CEILING)
    axes.text(0, most, f" peak {number(most)} GiB", va="bottom", fontsize=9)
    axes.set(xlim=(0, end), ylim=(0, 1.14 * most), xlabel="ms", ylabel="GiB")
    axes.xaxis.set_major_formatter(FuncFormatter(plots.plain))
    axes.yaxis.set_major_formatter(FuncFormatter(plots.plain))
    return plots.drawn(
        own,
        axes,
        head,
        "timeline",
        own.caption(
            "Memory in use after each event of the allocator, the first at 0 ms; held before are the weights and, in a "
            "step, the optimizer's state. Time is the host's, slowed by the recording. Of many events the extremes are "
            "drawn"
        ),
    )
