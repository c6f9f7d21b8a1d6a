"""Training on several ranks: steps by strategy, and whole trainings of attention rows by strategies.

Each function takes all cases of a benchmark on a machine.
"""

import re
from dataclasses import replace

from lmsys.bench.fields import Field, Record
from lmsys.reports import plots
from lmsys.reports.cells import SPEEDUP, beside
from lmsys.reports.tables import Block, Chapter, Plot, Table, listing, pivot
from lmsys.reports.versus import rivals
from lmsys.reports.views import KEPT, LIMIT, View, with_kept
from lmsys.reports.words import COMPILED

# Of data parallelism

PARTS = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
COLOURS = {"computation": "#2563eb", "communication": "#dc2626"}
SETTING = ("size", "batch", "context", "precision", "compile", "world_size", *KEPT, LIMIT)
TRAINING = ("{size} b{batch} s{context}, {precision}, ", "{world_size} ranks{how}")  # geometric means are by the second
ORDER = ("section", "num_parameters", "precision", "context", "compile", "batch", "world_size", "impl")
HELD = {"bits": "the same bits", "unknown": "not known"}


def data_parallel(view: View) -> list[Chapter]:
    """A chapter for each grid: a step by strategy, what communication costs, memory, and ours beside torch's."""
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
            *COMPILED,
        )
    )
    view = (
        view.labelled(impl="strategy", mean_s="step, mean ± std").styled("impl", "strategy", "called").ordered(*ORDER)
    )
    stem = "data-parallel-{section}-{size}-S{context}-{precision}{way}"
    found = []
    for (section,), own in view.groups("section").items():
        blocks = [_strategies(part) for part in own.cut(stem, "{size}, context {context}, {precision}{how}")]
        alike = own.only(lambda case: not case["sharded_optimizer"] and case["comm_dtype"] != "bfloat16")
        several = alike.only(lambda case: case["world_size"] > 1)
        peers = rivals(
            several,
            SETTING,
            TRAINING,
            f"data-parallel-{section}-peers",
            f"Speed of ours, × of the row beside it · {section}",
        )
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


def _strategies(part: View) -> Block:
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
        plots.bars(largest, "tokens_per_s", "batch", word="rate"),
        plots.bars(largest, "exposed_s", "batch", word="exposed"),
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
    """Bytes of each kind in memory, and the peak of a step; a bar for each strategy."""
    names = (*PARTS, "peak_bytes")
    cases = [{**case, "what": name.removesuffix("_bytes"), "bytes": case[name]} for name in names for case in own.cases]
    own = replace(own, cases=cases).with_fields(Field("what"), Field("bytes", "B", "Memory of a rank", shown="GiB"))
    return plots.bars(
        own,
        "bytes",
        "what",
        word="memory",
        head="Memory of a rank by kind",
        about="Parameters, gradients and optimizer state after a step and activations after a forward; and a "
        "step's peak",
    )


def _scaling(own: View) -> Plot | None:
    """Scaling efficiency against the number of ranks."""
    alone = [{**case, "world_size": 1, "scaling_efficiency": 1.0} for case in own.cases]
    return plots.lines(replace(own, cases=[*alone, *own.cases]), "scaling_efficiency", "world_size", word="scaling")


def _timelines(own: View) -> Plot:
    """Draws when a step computes and when it communicates, a pair of lanes for each strategy."""
    axes = plots.canvas(0.45 * len(own.cases) + 0.6)
    for lane, case in enumerate(own.cases):
        for (what, color), top in zip(COLOURS.items(), (lane - 0.36, lane - 0.02), strict=True):
            spans = [(1e3 * start, 1e3 * (end - start)) for kind, start, end in case["timeline"] if kind == what]
            axes.broken_barh(spans, (top, 0.34), color=color, linewidth=0, label=what if lane == 0 else None)
    axes.set_yticks(range(len(own.cases)), [case["impl"] for case in own.cases], fontsize=8)
    axes.set(ylim=(len(own.cases) - 0.5, -0.5), xlabel="ms")
    return plots.drawn(
        own,
        axes,
        "A step's timeline",
        "timeline",
        own.caption("From a profiler's trace of one step on rank 0: above what computes, below what communicates"),
    )


# Of whole trainings

NUMBERS = ("context", "batch", "num_ranks", "train_tokens", "val_tokens", "epochs")
WORDS = ("section", "size", "attention", "strategy", "row", "precision", "compile")
QUIET = ("attention_label", "attention_peer", "strategy_peer", "global_batch", "world_size", "bucket_mb", "vocab_size")
SINGLE = "none"  # one process, which accumulates the batches of all ranks
SAME = ("attention", "comparison")
SUFFIX = "-reproducible"  # of a row's name
TABLES = {"tokens_per_s": "rate", SPEEDUP: "speedup", "mean_s": "time", "peak_bytes": "memory"}
ABOUT = (
    "Loss after the last epoch on {val_tokens} held-out tokens, nats; in brackets how far the loss of a step was at"
    " most from that of naive attention in one process, over the first 100 steps"
)
FILES = {"curve_losses": "curves", "curve_differences": "differences"}
CURVES = {
    one.name: one
    for one in (
        Field(
            "curve_losses", "nats", "Loss by step", about="The loss over the global batch by step, with one attention"
        ),
        Field(
            "curve_differences",
            "nats",
            "Loss beside the reference",
            about="How far the loss of a step is from that of naive attention in one process, for each strategy with"
            " the attention row that is farthest; where there is no point it is equal",
        ),
    )
}


def training(view: View) -> list[Chapter]:
    """A chapter for each grid: attention rows by strategies, their speed, memory and loss curves."""
    also = f"one process ({SINGLE}) accumulates the batches of all ranks; cases run one after another"
    view = replace(view, also=also).checked(NUMBERS, WORDS).quiet(*QUIET).with_fields(*COMPILED)
    view = view.styled("attention").styled("row", "strategy", "row")
    view = view.ordered("section", "size", *NUMBERS, "precision", "compile", "attention", "row")
    stem = "training-{section}-{size}-S{context}B{batch}-{precision}{way}-W{num_ranks}-T{train_tokens}x{epochs}"
    heading = "{size}, context {context}, batch {batch} of each of {num_ranks} ranks, {precision}{how}"
    return [
        Chapter(f"Training: {own.text('section', section)}", [_trainings(part) for part in own.cut(stem, heading)])
        for (section,), own in view.groups("section").items()
    ]


def _trainings(part: View) -> Block:
    """Rows of tables: attention; their columns: strategies, by name, since labels are too long."""
    budget = max((case["curve_budget"] or 0 for case in part.cases), default=0)
    about = ABOUT + (f" (right: {budget:g} or less)" if budget else "")
    part = _with_speeds(part).with_fields(Field("ended", label="Loss", role="detail", of=_ended))
    tables = {name: pivot(part, name, ["attention"], "row", word=word) for name, word in TABLES.items()}
    bars = {name: plots.bars(part, name, "row", "attention", TABLES[name]) for name in TABLES.keys() - {SPEEDUP}}
    chain = plots.lines(part, SPEEDUP, "row", "attention", "chain", ceiling=("", 1.0))
    numbers = ("valid_loss", "loss", "curve_difference", "norm_difference")
    losses = pivot(part, "ended", ["attention"], "row", word="loss", about=about, data=numbers)
    allowed = ("allowed", budget) if budget else None
    drawn = [_by_step(part, "curve_losses", False), _by_step(part, "curve_differences", True, allowed)]
    costs = _with_cost(part)
    cost = pivot(costs, "cost", ["attention"], "row", word="cost", data=("weights",)) if costs.cases else None
    lead = [tables["tokens_per_s"], bars["tokens_per_s"], tables[SPEEDUP], chain, cost, losses, *drawn]
    metrics = ["mean_s", SPEEDUP, "efficiency", *(name for name in part.metrics() if name not in ("time_s", "mean_s"))]
    runs = listing(part, ("attention", "row"), metrics, "runs", "Every run")
    return Block(part.title, lead, [tables["mean_s"], bars["mean_s"], tables["peak_bytes"], bars["peak_bytes"], runs])


def _with_cost(part: View) -> View:
    """Adds what it costs to have the same weights, bit for bit, everywhere."""
    plain = {(*(case[name] for name in SAME), case["row"]): case for case in part.cases}
    rows = [(case, case["row"].removesuffix(SUFFIX)) for case in part.cases]
    about = "Median time of an epoch over that of the same row without --reproducible"
    cost = Field(
        "cost", "", "Cost of the same bits", "detail", about, "×", lambda case: case["time_s"] / case["plain_s"]
    )
    cases = [
        {**case, "plain_s": plain.get((*(case[name] for name in SAME), row), {}).get("time_s")}
        for case, row in rows
        if row != case["row"]
    ]
    return replace(part, cases=cases).with_fields(cost)


def _with_speeds(part: View) -> View:
    """Adds speeds over the table's baseline and over one process alone: ratios of medians, not sampled together."""
    base = next((name for name, row in part.table("strategy").items() if row.get("baseline")), "")
    about = f"Median time of an epoch by the strategy {base} over that of the row"
    speedup = Field(SPEEDUP, "", f"Speed-up over {base}", "detail", about, "×", _ratio)
    about = f"Tokens/s of a rank over those of {SINGLE}"
    scaling = Field("efficiency", "", "scaling", "detail", about, "%", lambda case: _ratio(case) / case["world_size"])
    return beside(beside(part, base, "strategy", SAME).with_fields(speedup), SINGLE, "strategy", SAME).with_fields(
        scaling
    )


def _ratio(case: Record) -> float:
    return case["beside"]["time_s"] / case["time_s"]


def _ended(case: Record) -> str:
    """The held-out loss, and in brackets how far the curve was at most from the reference's."""
    loss = "" if case["valid_loss"] is None else f"{case['valid_loss']:.4f}"
    return loss + f" ({case['curve_difference']:.1e})"


def _by_step(part: View, name: str, worst: bool, ceiling: tuple[str, float] | None = None) -> Plot | None:
    """A line for each strategy: of its first attention row, or with `worst` of what is farthest in any of them."""
    points: dict[tuple[str, int], Record] = {}
    for case in part.cases:
        for step, value in zip(case["curve_steps"] or (), case[name] or (), strict=False):
            point = {**case, "step": step, name: abs(value or 0)}
            before = points.setdefault((case["row"], step), point)
            if worst and point[name] > before[name]:
                points[case["row"], step] = point
    own = replace(part, cases=[*points.values()]).with_fields(Field("step"), CURVES[name])
    return plots.lines(own, name, "step", "row", FILES[name], ceiling=ceiling)
