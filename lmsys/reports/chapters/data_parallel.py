"""Data parallelism: a step by strategy, what communication costs, memory, and ours beside torch's."""

import re
from dataclasses import replace

from lmsys.bench.fields import Field, Record
from lmsys.reports import plots
from lmsys.reports.canvas import Plot, canvas
from lmsys.reports.tables import Block, Chapter, Table, listing, pivot
from lmsys.reports.versus import rivals
from lmsys.reports.views import KEPT, LIMIT, Style, View, with_kept
from lmsys.reports.words import COMPILED

PARTS = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
COLOURS = {"computation": "#2563eb", "communication": "#dc2626"}
SETTING = ("size", "batch", "context", "precision", "compile", "world_size", *KEPT, LIMIT)
TRAINING = ("{size} b{batch} s{context}, {precision}, ", "{world_size} ranks{how}")  # geometric means are by the second
ORDER = ("section", "num_parameters", "precision", "context", "compile", "batch", "world_size", "impl")
HELD = {"bits": "the same bits", "unknown": "not known"}
STYLE = {"held": Style("held, by kind (line: peak of a step)", COLOURS["computation"])}


def chapters(view: View) -> list[Chapter]:
    """A chapter for each grid."""
    compiled = view.fields["compile"].called(of=lambda case: case["compile"] or "eager")  # older files do not say
    exposed = view.fields["predicted_exposed_s"]  # of copy engines older files predict it by the times of NCCL
    copied = {name for name, row in view.table("strategy").items() if row.get("all_reduce_model") is False}
    predicted = Field("predicted_bytes", "B", "predicted without activations", "detail", shown="GiB")
    view = (
        with_kept(view)
        .checked(("context", "batch", "world_size"), ("section", "size", "precision", "strategy"))
        .with_fields(
            compiled,
            exposed.called(of=lambda case: None if case["strategy"] in copied else case["predicted_exposed_s"]),
            predicted.called(of=lambda case: sum(case[f"predicted_{name}"] for name in PARTS[:3])),
            Field("called", role="detail", of=_called),
            Field("held", role="detail", of=lambda case: "held"),
            *COMPILED,
        )
    )
    view = (
        view.labelled(impl="strategy", mean_s="step, mean ± std").styled("impl", "strategy", "called").ordered(*ORDER)
    )
    stem = "data-parallel-{section}-{size}-S{context}-{precision}{way}"
    found = []
    for (section,), own in view.groups("section").items():
        blocks = [_block(part) for part in own.cut(stem, "{size}, context {context}, {precision}{how}")]
        alike = own.only(lambda case: not case["sharded_optimizer"] and case["comm_dtype"] != "bfloat16")
        several = alike.only(lambda case: case["world_size"] > 1)
        title = f"Speed of ours, × of the row beside it · {section}"
        peers = rivals(several, SETTING, TRAINING, f"data-parallel-{section}-peers", title)
        blocks.insert(0, Block("Beside torch's own", [peers]))
        found.append(Chapter(f"Data parallel: {own.text('section', section)}", blocks))
    return found


def _called(case: Record) -> str:
    """How a table calls a row: its name, with the size of its buckets and what else is its own."""
    extra = case["impl"].removeprefix(case["strategy"])
    if case["checkpoint"] != KEPT["checkpoint"]:
        extra = re.sub(r"-C\w+", f"-{case['checkpoint']}", extra)
    extra = extra.strip("-").replace("-", ", ").replace("MiB", " MiB")
    if extra.startswith("auto"):
        extra = extra.replace("auto", f"auto ({case['bucket_mb'] or 0:.0f} MiB)", 1)
    return ", ".join(filter(None, [case["strategy"], extra]))


def _block(part: View) -> Block:
    graphed = part.cases[0]["compile"] == "graphed"
    memory = "; memory is that of a step launched call by call, before one is recorded" if graphed else ""
    part = replace(part, also=f"batch is that of each rank{memory}")
    largest = part.only(lambda case: case["world_size"] == max(part.values("world_size")))
    sizes = [name for name in part.metrics() if part.fields[name].unit == "B" or name == "optimizer_fraction"]
    costs = [name for name in part.metrics() if name not in (*sizes, "time_s")]
    keys = ("batch", "world_size", "impl")
    held, measured = (own.only(lambda case: case["peak_bytes"]) for own in (largest, part))
    scaled = part.only(lambda case: case["scaling_efficiency"] and case["world_size"] > 1)
    traced = largest.only(lambda case: any(kind == "communication" for kind, _, _ in case["timeline"] or ()))
    lead = [
        pivot(largest, "time_s", ["batch"], word="by-batch") if largest.varies("batch") else None,
        listing(part, keys, ["mean_s", *costs], "step", "Step by strategy"),
        plots.bars(largest, ["tokens_per_s"], "batch", word="rate"),
        plots.bars(largest, ["exposed_s"], "batch", word="exposed"),
    ]
    more = [
        listing(measured, keys, [*sizes, "predicted_bytes"], "memory", "Memory of a rank"),
        _pairs(part),
        *map(_memory, held.cut("", "batch {batch}")[-1:]),
        *map(_scaling, scaled.cut("", "batch {batch}")[-1:]),
        *map(_timelines, traced.cut("", "batch {batch}")[:1]),
    ]
    return Block(part.title, lead, more)


def _pairs(part: View) -> Table | None:
    """Rows and columns: strategies; cells: what holds the steps of two of them together."""
    cases = [
        {**case, "other": other, "held": HELD.get(how, how)}
        for case in part.cases
        if case.get("held_by")
        for other, how in {case["impl"]: "itself", **case["held_by"]}.items()
    ]
    about = (
        "What holds two strategies together after the steps of one pass: the same bits, in the rows of the weights that"
        " were looked at, or the tolerance, by which each of them is held to plain steps in float64"
    )
    own = replace(part, cases=cases).with_fields(Field("other", label="beside"), Field("held", label="Held by"))
    return pivot(own, "held", ["batch", "world_size", "impl"], "other", word="pairs", about=about) if cases else None


def _memory(own: View) -> Plot | None:
    """A stack for each strategy, the peak of a step as a line."""
    own = replace(own, styles={**own.styles, "held": STYLE, "impl": {}})  # labels are too long for an axis
    about = "Parameters, gradients and optimizer state after a step and activations after a forward; "
    about += "the line is the peak of a whole step"
    return plots.bars(own, PARTS, "impl", "held", "memory", "peak_bytes", "Memory of a rank by kind", about)


def _scaling(own: View) -> Plot | None:
    """Scaling efficiency against the number of ranks."""
    alone = [{**case, "world_size": 1, "scaling_efficiency": 1.0} for case in own.cases]
    return plots.lines(replace(own, cases=[*alone, *own.cases]), "scaling_efficiency", "world_size", word="scaling")


def _timelines(own: View) -> Plot:
    """Draws when a step computes and when it communicates, a pair of lanes for each strategy."""
    axes = canvas(0.45 * len(own.cases) + 0.6)
    for lane, case in enumerate(own.cases):
        for (what, color), top in zip(COLOURS.items(), (lane - 0.36, lane - 0.02), strict=True):
            spans = [(1e3 * start, 1e3 * (end - start)) for kind, start, end in case["timeline"] if kind == what]
            axes.broken_barh(spans, (top, 0.34), color=color, linewidth=0, label=what if lane == 0 else None)
    axes.set_yticks(range(len(own.cases)), [case["impl"] for case in own.cases], fontsize=8)
    axes.set(ylim=(len(own.cases) - 0.5, -0.5), xlabel="ms")
    about = "From a profiler's trace of one step on rank 0: above what computes, below what communicates"
    return plots.drawn(own, axes, "A step's timeline", "timeline", own.caption(about))
