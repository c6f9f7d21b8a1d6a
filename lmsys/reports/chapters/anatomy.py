"""The anatomy of a model: by kernel and part of the model where time goes, and by phase where memory goes."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from matplotlib.ticker import FuncFormatter

from lmsys.bench.fields import Field, Record
from lmsys.reports import plots
from lmsys.reports.canvas import CEILING, Plot, add_legend, canvas, legend_height, plain
from lmsys.reports.page import Block, Chapter
from lmsys.reports.tables import Table, listing, pivot, titled
from lmsys.reports.views import LIMIT, View
from lmsys.reports.words import number, scaled

CALLS = {"forward": "inference", "step": "step"}  # modes, as they are read
COLOURS = dict(
    zip(
        "matmul attention elementwise reduction copy communication other".split(),
        "#2563eb #9333ea #b45309 #dc2626 #0891b2 #16a34a #9ca3af".split(),
        strict=True,
    )
)  # of the kinds of kernels
PHASES = {"forward": "#2563eb", "backward": "#dc2626", "optimizer": "#16a34a"}
HELD = "#9ca3af"
PHASES_OF = {"forward": ("forward",), "step": tuple(PHASES)}
MEASURED = ("parameters", "gradients", "optimizer", "activations")
INSIDE = ("scores", "softmax", "values")  # parts of plain attention
PARTS = (
    "forward",
    "norms",
    "projections",
    "rotation",
    "attention",
    *INSIDE,
    "feed-forward",
    "head and loss",
    "backward",
    "optimizer",
)
SOFTMAX_OPERATIONS = 5  # for each score: greatest, minus, exp, sum, divide
NARROW = 0.06  # a segment with less of the bar has no room for its number
SHAPE = ("batch", "context", "d_model", "num_layers", "num_heads")


def chapters(view: View) -> list[Chapter]:
    """All cases beside one another, then each setting for itself."""
    view = view.checked(SHAPE, ("size", "precision", "mode", "compile")).read_as(mode=CALLS)
    view = view.ordered("size", "context", "batch", LIMIT, "precision", "mode", "compile", "impl").with_fields(
        Field("variant", role="detail", of=lambda case: f"{case['compile']}, {view.text('impl', case['impl'])}")
    )
    stem, heading = (
        "anatomy-{size}-S{context}B{batch}-{precision}",
        "{size}, context {context}, batch {batch}, {precision}",
    )
    parts = view.cut(stem, heading)
    time = [Block("", [_shares(view), _clocks(view)]), *map(_time, parts)]
    memory = [Block("", [_peaks(view), _predictions(view)]), *map(_memory, parts)]
    return [Chapter("Where time goes", time), Chapter("Where memory goes", memory)]


def _keys(view: View) -> list[str]:
    """What differs among the cases, and always how a model is run."""
    settings = ("size", "context", "batch", "precision", LIMIT, "mode")
    return [*(name for name in settings if view.varies(name)), "compile", "impl"]


def _time(part: View) -> Block:
    cases = part.cut("{mode}-{compile}-{impl}", "{mode}, {compile}, {impl}")
    return Block(
        part.title,
        [_parts(part, "step"), _parts(part, "forward"), _inside(part), _share_bars(part)],
        list(map(_kernels, cases)),
    )


def _memory(part: View) -> Block:
    cases = part.cut("{mode}-{compile}-{impl}", "{mode}, {compile}, {impl}")
    cases.sort(key=lambda own: own.cases[0]["mode"] != "step")
    return Block(part.title, list(map(_timeline, cases)), list(map(_allocations, cases)))


def _shares(view: View) -> Table | None:
    """Rows: cases; columns: the time of all kernels, and the share of each kind."""
    shares = [name for name in view.metrics() if name.endswith("_share") and any(case[name] for case in view.cases)]
    about = (
        "Time of all kernels of one call, and the share of each kind: an inference, or a step of training (forward, "
        "backward, optimizer). Kinds are told by the kernels' names; on a CPU a kernel is an operator, without those that it calls"
    )
    return listing(view, _keys(view), ["kernel_s", *shares], "anatomy-shares", "Time by kind of kernel", about)


def _clocks(view: View) -> Table | None:
    """Rows: cases; columns: the same call by each clock."""
    ratio = Field("slowdown", label="profiled / clocked", of=lambda case: case["profiled_s"] / case["time_s"])
    view = view.with_fields(ratio)
    metrics = [name for name in view.metrics() if not name.endswith("_share")]
    about = (
        "Time of one call: clocked as in the tables of models, with the gaps in which a GPU waits for its next kernel; all "
        "kernels added up; and the wall time under the profiler. All but the first are means of three calls"
    )
    return listing(view, _keys(view), metrics, "anatomy-clocks", "Profiled against clocked", about)


def _parts(part: View, mode: str) -> Table | None:
    """Rows: parts of the model; columns: the variants of one setting."""
    own = part.only(lambda case: case["mode"] == mode).read_as(name={name: name for name in PARTS})
    own = own.unfolded(
        "parts", Field("name", label="part"), Field("total_s", "s", shown="ms"), Field("backward_s", "s", shown="ms")
    )
    name = "step" if mode == "step" else "inference"
    own = own.with_fields(Field("own_s", label=f"Parts of one {name}, ms", of=_told))
    about = (
        "Time of the kernels that each part launches" + " / of their backward" * (mode == "step") + ", ms. Parts nest: "
        "scores, softmax and values are inside attention, and all down to head and loss inside forward. Inside compiled "
        "blocks there are none"
    )
    data = ("name", "total_s", "backward_s")
    return pivot(own, "own_s", ["name"], "variant", word=f"{mode}-parts", about=about, data=data)


def _told(one: Record) -> str:
    backward = f" / {number(1e3 * one['backward_s'])}" if one["backward_s"] else ""
    return number(1e3 * one["total_s"]) + backward


def _inside(part: View) -> Table | None:
    """Softmax against matmul: rows: parts of plain attention; columns: their times, and their arithmetic."""
    cases = []
    for own in part.groups("compile", "impl").values():
        found = {(case["mode"], one["name"]): one for case in own.cases for one in case["parts"] or ()}
        for name in INSIDE:
            forward, step = found.get(("forward", name)), found.get(("step", name))
            if forward or step:
                cases.append(
                    {
                        **own.cases[0],
                        "name": name,
                        "inference_s": forward and forward["total_s"],
                        "matmul_s": (forward or step)["kinds"].get("matmul", 0.0),
                        "step_forward_s": step and step["total_s"],
                        "step_backward_s": step and step["backward_s"],
                        "forward_flops": _attention_flops(own.cases[0], name),
                    }
                )
    times = {
        "inference_s": "inference",
        "matmul_s": "of it matmul kernels",
        "step_forward_s": "step: forward",
        "step_backward_s": "step: backward",
    }
    fields = [Field(name, "s", label, shown="ms") for name, label in times.items()]
    fields += [Field("forward_flops", "FLOP", "forward", shown="GFLOP"), Field("name", label="part")]
    about = (
        "Kernel time of one call over all layers, of the parts of plain attention: scores are Q Kᵀ, scaled and masked, "
        "values the product with V. Arithmetic of the forward: 2 B H S² D for each product, "
        f"{SOFTMAX_OPERATIONS} B H S² for softmax, times the layers"
    )
    metrics = [*times, "forward_flops"]
    own = replace(part, cases=cases).with_fields(*fields)
    return listing(
        own,
        ("compile", "impl", "name"),
        metrics,
        "softmax",
        "Softmax against matmul inside attention",
        about,
        ("name", *metrics),
    )


def _attention_flops(case: Record, name: str) -> float:
    """Operations of a part of plain attention in one forward: the whole square of scores, as it is computed."""
    scores = case["num_layers"] * case["batch"] * case["num_heads"] * case["context"] ** 2
    return scores * (SOFTMAX_OPERATIONS if name == "softmax" else 2 * case["d_model"] // case["num_heads"])


def _kernels(own: View) -> Table | None:
    """The longest kernels of one case."""
    share = Field("share", label="share", shown="%", of=lambda case: case["total_s"] / case["kernel_s"])
    count = Field(
        "count", label="launches", of=lambda one: int(one["count"]) if one["count"] % 1 == 0 else one["count"]
    )
    own = own.unfolded(
        "kernels", Field("name", label="kernel"), Field("kind"), Field("total_s", "s", "time", shown="ms")
    )
    about = f"The {len(own.cases)} kernels of one call with most time in all: time and launches in one call, and the share of the time of all kernels"
    metrics = ("total_s", "count", "share")
    return listing(
        own.with_fields(count, share),
        ("name", "kind"),
        metrics,
        "kernels",
        "Longest kernels",
        about,
        ("name", "kind", *metrics),
    )


def _peaks(view: View) -> Table | None:
    """Rows: variants; columns: what was held before a call, and the peak of each of its phases."""
    cases = []
    for case in view.cases:
        held, peaks = case["held_bytes"], {one["name"]: one["peak_bytes"] for one in case["phases"] or ()}
        for name in ("held", *PHASES_OF.get(case["mode"], peaks)):
            above = 0 if name == "held" else peaks.get(name)
            used = None if above is None or held is None else held + above
            cases.append({**case, "what": f"{CALLS.get(case['mode'], case['mode'])}: {name}", "in_use_bytes": used})
    shown = memory_unit(case["in_use_bytes"] for case in cases)
    own = replace(view, cases=cases).with_fields(
        Field("in_use_bytes", "B", "Peak by phase", shown=shown), Field("what", role="detail")
    )
    about = (
        "The most memory in use during each phase, with what was held before: weights, and in a step the optimizer's state. "
        "An inference is a forward without gradients; before a step there are no gradients yet"
    )
    keys = [name for name in _keys(view) if name != "mode"]
    return pivot(own, "in_use_bytes", keys, "what", word="anatomy-peaks", about=about, data=("what", "in_use_bytes"))


def memory_unit(sizes: Iterable[float | None]) -> str:
    """The unit that sizes up to these are read in."""
    return "GiB" if max((size or 0 for size in sizes), default=0) >= 2**30 else "MiB"


def _predictions(view: View) -> Table | None:
    """Rows: steps; columns: what memory holds, measured / predicted and the deviation."""
    view = view.only(lambda case: case["mode"] == "step" and case["predicted_parameters_bytes"] is not None)
    shown = memory_unit(case[f"{name}_bytes"] for case in view.cases for name in MEASURED)
    told = [
        Field(name, label=name, of=_deviation(view.fields[f"{name}_bytes"].called(shown=shown))) for name in MEASURED
    ]
    title = f"What memory holds, {shown}: measured / predicted (deviation)"
    about = (
        f"{shown}. Activations: what a forward leaves for its backward, and the head's gradient, made there. They are predicted "
        "for blocks in eager mode and for attention that keeps no scores: what plain attention keeps, and what a compiler "
        "does not, is not in the prediction"
    )
    data = [f"{way}{name}_bytes" for name in MEASURED for way in ("", "predicted_")]
    return listing(view.with_fields(*told), _keys(view), MEASURED, "anatomy-predicted", title, about, data)


def _deviation(field: Field):
    """Measured / predicted (deviation)."""

    def told(case: Record) -> str:
        measured, predicted = case[field.name], case[f"predicted_{field.name}"]
        return f"{number(scaled(field, measured))} / {number(scaled(field, predicted))} ({100 * (predicted / measured - 1):+.1f} %)"

    return told


def _allocations(own: View) -> Table | None:
    """The largest allocations of one case, with the line that asked for them."""
    fields = [
        Field("where", label="line"),
        Field("function"),
        Field("count"),
        Field("at_peak", label="at the peak"),
    ]
    shown = memory_unit(one["bytes"] for one in own.cases[0]["allocations"] or ())
    own = own.unfolded("allocations", *fields, Field("bytes", "B", "size of each", shown=shown))
    about = (
        "The largest allocations of one call; how many of that size the line made, and how many of them were live when most "
        "memory was in use. Line: the innermost that is not torch's; a backward on a GPU has none, and of compiled code none "
        "may be known"
    )
    metrics = ("bytes", "count", "at_peak")
    return listing(
        own,
        ("where", "function"),
        metrics,
        "allocations",
        "Largest allocations",
        about,
        ("where", "function", *metrics),
    )


def _share_bars(part: View) -> Plot | None:
    """A bar for each case of one setting, divided by kind of kernel."""
    own = part.only(lambda case: case["kernel_s"])
    if not own.cases:
        return None
    kinds = [kind for kind in COLOURS if any(case[f"{kind}_share"] for case in own.cases)]
    head = "Time by kind of kernel, %"
    figure, axes = canvas(titled(head, own), 0.52 * len(own.cases) + legend_height(len(kinds)) + 0.4)
    for row, case in enumerate(own.cases):
        left = 0.0
        for kind in kinds:
            share = case[f"{kind}_share"]
            axes.barh(row, share, 0.5, left, color=COLOURS[kind], label=kind if row == 0 else None)
            if share >= NARROW:
                at = {"ha": "center", "va": "center", "color": "white"}
                axes.text(left + share / 2, row, f"{100 * share:.0f}", fontsize=8.5, **at)
            left += share
        axes.text(0, row - 0.3, f"{own.text('mode', case['mode'])}, {case['variant']}", va="bottom", fontsize=8.5)
        axes.text(1, row - 0.3, f"{number(1e3 * case['kernel_s'])} ms", va="bottom", ha="right", fontsize=8.5)
    axes.set(xlim=(0, 1), ylim=(len(own.cases) - 0.6, -0.75), yticks=[])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    add_legend(figure, axes)
    about = "Share of the time of all kernels in one call; that time to the right above each bar"
    return plots.drawn(own, figure, head, "shares", own.caption(about))


def _timeline(own: View) -> Plot | None:
    """Memory in use in the course of a call, a colour for each phase; None where none was recorded."""
    case, phases = own.cases[0], own.cases[0]["timeline"] or ()
    points = [(at, size) for one in phases for at, size in one["points"]]
    if len(points) < 2:
        return None
    held, most = case["held_bytes"], case["held_bytes"] + max(size for _, size in points)
    unit = memory_unit([most])
    scale = 2**30 if unit == "GiB" else 2**20
    head = f"Memory in the course of one {own.text('mode', case['mode'])}, {unit}"
    figure, axes = canvas(titled(head, own), 2.6 + legend_height(1 + len(phases)))
    end, before = 1e3 * points[-1][0], (0.0, held / scale)
    axes.fill_between([0, end], held / scale, color=HELD, alpha=0.55, linewidth=0, label="held before")
    for one in phases:
        xs, ys = zip(before, *((1e3 * at, (held + size) / scale) for at, size in one["points"]), strict=True)
        look = {"color": PHASES.get(one["name"], "#111827")}
        axes.plot(xs, ys, drawstyle="steps-post", linewidth=1.0, **look)
        axes.fill_between(xs, held / scale, ys, step="post", alpha=0.3, linewidth=0, label=one["name"], **look)
        before = xs[-1], ys[-1]
    axes.axhline(most / scale, **CEILING)
    axes.text(0, most / scale, f" peak {number(most / scale)} {unit}", va="bottom", fontsize=9)
    axes.set(xlim=(0, end), ylim=(0, 1.14 * most / scale), xlabel="ms", ylabel=unit)
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    add_legend(figure, axes)
    about = (
        "Memory in use after each event of the allocator, the first at 0 ms; held before are the weights and, in a step, the "
        "optimizer's state. Time is the host's, slowed by the recording. Of many events the extremes are drawn"
    )
    return plots.drawn(own, figure, head, "timeline", own.caption(about))
