"""Whole models: contexts by sizes for each call, what memory they need, and how they compare with another's model."""

import math
from dataclasses import replace

from lmsys.bench.fields import Field
from lmsys.reports import plots
from lmsys.reports.cells import SPEEDUP, base_of, compared
from lmsys.reports.tables import Block, Chapter, Items, Table, endings, listing, pivot
from lmsys.reports.versus import means
from lmsys.reports.views import KEPT, View, with_kept
from lmsys.reports.words import OUTCOMES, number

PHASES = ("train_forward", "backward", "optimizer", "step")  # modes: what a step consists of, and the whole of it
AXES = ("precision", "compile", "checkpoint", "residual", "impl")  # may stand side by side in one cell
SETTINGS = ("compile", "checkpoint", "residual")  # one model runs in each of their values
SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "num_parameters")  # what a size stands for
DRAWN = ("mfu", "matmul_ceiling_fraction", "total_bytes")  # by context
OF_A_STEP = ("tokens_per_s", "mfu", "total_bytes", "peak_bytes")  # read at once where only whole steps were timed
# The tables that a mode shows first, by section. In all other sections the times come first.
LEAD = {"fits": ("predicted", "total_bytes", "peak_bytes")}
TOGETHER = ("peers",)  # few shapes in many ways, as in `_in_many_ways`
BESIDE = {"tokens_per_s": "rate", "mfu": "MFU", "total_bytes": "memory"}  # of our model and a peer's
ABOUT = "Memory in all: weights, gradients and optimizer state live before, and the peak above them"
STREAM = "A narrow residual stream is held in the dtype of matmuls, a wide one in float32"
TOTAL = Field(
    "total_bytes", "B", "Memory in all", "metric", ABOUT, "GiB", lambda case: case["held_bytes"] + case["peak_bytes"]
)
PREDICTED = "predicted_bytes"
VERDICTS = {True: "fits", False: "too large"}


def chapters(view: View) -> list[Chapter]:
    """A chapter for each grid, then one of all models."""
    view = with_kept(view).checked(("batch", "context", "vocab_size"), ("section", "size", *AXES, "mode")).quiet(*SHAPE)
    view = view.labelled(impl="attention", vocab_size="vocabulary", warmup_steps="warm-up", mean_s="Time, mean ± std")
    view = view.with_fields(TOTAL)  # older files do not have it
    view = view.ordered("section", "mode", *AXES, "num_parameters", "size", "context", "batch", "warmup_steps")
    sizes = replace(view, cases=[one.cases[0] for one in view.groups("size", "vocab_size").values()])
    sizes = sizes.labelled(num_layers="layers", num_heads="heads", num_parameters="parameters").ordered(SHAPE[-1])
    last = [
        listing(sizes, ("size", "vocab_size", *SHAPE), (), "model-sizes", "Sizes", "The models that were run"),
        endings(view.ordered(*AXES), *_shown(view), word="model-outcomes", title="How the cases ended"),
    ]
    found = [
        Chapter(f"Model: {own.text('section', section)}", _section(section, own))
        for (section,), own in view.groups("section").items()
    ]
    return [*found, Chapter("Model: all that were run", [Block("", last)])]


def _section(section: str, own: View) -> list[Block]:
    """A glance at all modes, then a block for each."""
    glance: Items = []
    blocks = []
    several = ("-V{vocab_size}", "vocabulary {vocab_size}") if own.varies("vocab_size") else ("", "")
    for part in own.cut("model-{section}" + several[0], several[1]):
        if section == "warmup":  # its cases differ in steps of warm-up, which no other table shows
            keys, about = (
                ["size", "context", "warmup_steps"],
                "Mean ± standard deviation of the time after that warm-up",
            )
            cuts = [_named(one, one) for one in part.groups(*AXES).values()]
            blocks.append(Block(part.title, [pivot(cut, "mean_s", keys, "mode", about=about) for cut in cuts]))
            continue
        modes = part.cut("{mode}", "{mode}")
        together = section in TOGETHER or _in_many_ways(part)
        glance += [*([] if together else [_beside(modes[-1]), _best(part)]), _summary(part)]
        blocks.append(Block(f"Step by phase{part.heading and ', '}{part.heading}", _phases(part)))
        for mode in modes:
            if together:
                beside, listed = _beside(mode), _listed(mode)
                blocks.append(Block(mode.title, [beside or listed], [listed] if beside else []))
                continue
            items: dict[str, Items] = {
                "beside": [_beside(mode)],
                "time_s": _times(mode),
                "predicted": [_predicted(mode, section)],
            }
            items |= {metric: _metric(mode, metric) for metric in mode.metrics() if metric != "time_s"}
            first = LEAD.get(section, ("beside", "time_s", *OF_A_STEP * (len(modes) == 1)))
            lead = [item for name in first for item in items.pop(name, [])]
            blocks.append(Block(mode.title, lead, [item for rest in items.values() for item in rest]))
    return [Block("", glance), *blocks]


def _in_many_ways(part: View) -> bool:
    """True of one shape by what blocks keep, or by residual stream: a table of each way would have one line."""
    return len(part.distinct("size", "context", "batch")) == 1 and any(part.varies(name) for name in KEPT)


def _cuts(part: View, axis: str) -> list[View]:
    """The cases that differ in no other of AXES."""
    return list(part.groups(*(name for name in AXES if name != axis)).values())


def _shown(part: View) -> list[str]:
    """AXES, without what blocks keep and the stream where these are the defaults."""
    return [name for name in AXES if part.values(name) != [KEPT.get(name)]]


def _named(part: View, own: View) -> View:
    """The cut, whose files are named by the axes it holds constant; its heading names those that the part varies."""
    plain = [name for name, value in KEPT.items() if not part.varies(name) and own.cases[0][name] == value]
    fixed = [f"{{{name}}}" for name in AXES if not own.varies(name) and name not in plain]
    return own.cut("-".join(fixed), ", ".join(name for name in fixed if part.varies(name[1:-1])), tail=True)[0]


def _grid(part: View, own: View, metric: str, inside: str = "compile", word: str = "") -> Table | None:
    """Rows: contexts; columns: sizes."""
    return pivot(_named(part, own), metric, ["context", *["batch"] * own.varies("batch")], "size", inside, word)


def _metric(part: View, metric: str) -> Items:
    """Tables, and of some also plots by context: a line for each size and way of running."""
    found: Items = []
    for own in _cuts(part, "compile"):
        found.append(_grid(part, own, metric))
        lines = _with_lines(_named(part, own))
        facets = lines.cut("B{batch}", "batch {batch}", tail=True) if own.varies("batch") else [lines]
        found += [plots.lines(facet, metric, "context", "line") for facet in facets if metric in DRAWN]
    return found


def _with_lines(own: View) -> View:
    """Adds a field that says which line a case is a point of."""
    names = ["size", "compile"] if own.varies("compile") else ["size"]
    line = Field("line", role="detail", of=lambda case: ", ".join(case[name] for name in names))
    return own.with_fields(line).styled("line", row="size")


def _times(part: View) -> Items:
    """The times and speedups of every cut in which one of AXES varies alone; then the times of all other cases."""
    pairs = [(axis, own) for axis in AXES for own in _cuts(part, axis) if own.varies(axis)]
    seen = {case["id"] for _, own in pairs for case in own.cases}
    alone = part.only(lambda case: case["id"] not in seen)
    tables = [table for axis, own in pairs for table in (_grid(part, own, "time_s", axis), _speeds(part, own, axis))]
    return [*tables, *(_grid(part, own, "time_s") for own in _cuts(alone, "compile"))]


def _speeds(part: View, own: View, axis: str) -> Table | None:
    """Speedups over eager, over fp32, or over a row of the table, else over somebody else's."""
    peers = [case["impl"] for case in own.cases if case["peer"]]
    base = base_of(own, otherwise=peers) if axis == "impl" else next(iter(own.words[axis]))
    own = compared(own, base, axis, medians=True).only(lambda case: case[axis] != base)
    return _grid(part, own, SPEEDUP, axis, f"speedup-over-{base}")


def _summary(part: View) -> Table | None:
    """The geometric mean of the speedups of compiled over eager, by mode."""
    names = ["precision", *["impl"] * part.varies("impl")]
    own = compared(part, "eager", "compile", medians=True).only(lambda case: case["compile"] == "compiled")
    own = own.with_fields(Field("way", of=lambda case: ", ".join(part.text(name, case[name]) for name in names)))
    section = part.text("section", part.cases[0]["section"])
    return means(own, "mode", "way", "summary", f"Speedup of compiled over eager, geometric mean · {section}")


def _best(part: View) -> Table | None:
    """The case of most tokens per second of each size: of whole steps, or of the last phase that was timed."""
    timed = part.only(lambda case: case["tokens_per_s"])
    last = timed.only(lambda case: case["mode"] == timed.values("mode")[-1])
    best = [max(own.cases, key=lambda case: case["tokens_per_s"]) for own in last.groups("size").values()]
    metrics = [name for name in ("time_s", *OF_A_STEP) if part.has(name)]
    title, about = "Most tokens per second of each size: {mode}", "Of all that was timed, by size"
    return listing(
        replace(part, cases=best), ("size", *_shown(part), "batch", "context"), metrics, "best", title, about
    )


def _listed(part: View) -> Table | None:
    """Rows: cases, without ways of running that a model does not have; columns: all that was measured."""
    own = part.only(lambda case: case["outcome"] != "unsupported").ordered("size", "batch")
    metrics = ["time_s", *(name for name in own.metrics() if name != "time_s")]
    if own.varies("checkpoint"):
        own = compared(own, KEPT["checkpoint"], "checkpoint", medians=True)
        metrics.insert(1, SPEEDUP)
    return listing(own, ("size", "batch", "impl"), metrics, "all", "All cases that the models have")


def _beside(part: View) -> Table | None:
    """Rows: our cases, of one mode; columns: speed and memory of ours and of a peer's model, in the way of running it
    that is its fastest. None without a peer."""
    theirs = next((case["impl"] for case in part.cases if case["peer"]), "")
    same = [name for name in part.axes() if name not in (*SETTINGS, "impl", "label", "peer")]
    part = _with_fastest(part, theirs, same)
    own = compared(part, theirs, same=same, medians=True).labelled(speedup="speedup").ordered("size", "batch")
    for name, label in BESIDE.items():
        peers = own.fields[name].called(
            name=f"peer_{name}",
            label=f"{theirs.capitalize()} {label}",
            of=lambda case, name=name: OUTCOMES.get(case["beside"]["outcome"], case["beside"][name]),
        )
        own = own.labelled(**{name: label}).with_fields(peers)
    own = own.only(lambda case: theirs and not case["peer"]).with_fields(
        Field(
            "peer_compile",
            label=f"{theirs.capitalize()} run as",
            of=lambda case: case["beside"]["compile"] if case["beside"]["time_s"] else "",
        ),
        Field(
            "memory_ratio",
            "",
            f"memory over {theirs.capitalize()}'s",
            shown="×",
            of=lambda case: case["total_bytes"] / case["peer_total_bytes"],
        ),
    )
    columns = [SPEEDUP, "peer_compile", "tokens_per_s", "peer_tokens_per_s", "mfu", "peer_mfu"]
    columns += ["total_bytes", "peer_total_bytes", "memory_ratio"]
    title = f"Ours beside {part.text('impl', theirs)}"
    about = f"{title}, which stands here by the fastest of the ways in which it was run. {own.fields[SPEEDUP].about}."
    return listing(own, ("size", "batch"), columns, f"beside-{theirs}", title, f"{about} {STREAM}. {ABOUT}")


def _with_fastest(part: View, name: str, same: list[str]) -> View:
    """Drops cases of the row of that name: of those that are alike on the axes `same` the fastest stays, and one where
    none has a time."""
    groups = part.only(lambda case: case["impl"] == name).groups(*same).values()
    fastest = [min(one.cases, key=lambda case: case["time_s"] or math.inf)["id"] for one in groups]
    return part.only(lambda case: case["impl"] != name or case["id"] in fastest)


def _predicted(part: View, section: str) -> Table | None:
    """Memory as measured and as predicted; where what fits is the question, what was to fit beside what did."""
    limit = part.cases[0]["memory_limit_bytes"]
    room = limit or min(run.get("memory_bytes") or 0 for run in part.machine.runs_of(part.cases))
    share = Field("share", "", "measured / predicted", shown="%", of=lambda case: case["total_bytes"] / case[PREDICTED])
    paper = Field("on_paper", label="on paper", of=lambda case: VERDICTS[case[PREDICTED] <= room])
    tried = Field("tried", of=lambda case: VERDICTS[case["outcome"] != "oom" and case["total_bytes"] > 0])
    own = part.only(lambda case: case[PREDICTED]).ordered("size", "batch").with_fields(share, paper, tried)
    columns = ["total_bytes", PREDICTED, "share"]
    about = "Memory of a step in all (live before, and the peak above), as measured and as the shapes predict it"
    if limit or (section == "fits" and room):
        columns += ["on_paper", "tried"]
        told = [case["on_paper"] == case["tried"] for case in own.cases if case["tried"]]
        about += f". Room for {number(room / 2**30)} GiB: {sum(told)} of {len(told)} cases ended as predicted"
    own = own.labelled(total_bytes="measured", predicted_bytes="predicted")
    return listing(own, ("size", "batch"), columns, "predicted", "Memory measured and predicted", about)


def _phases(part: View) -> Items:
    """The phases of a step, and the whole step timed as one; a plot for each size and context."""
    variant = Field("variant", role="detail", of=lambda case: f"{case['precision']}, {case['compile']}")
    whole = part.only(lambda case: case["mode"] in PHASES).with_fields(variant).styled("variant", row="precision")
    facets = whole.cut(
        "{impl}-{size}-S{context}-B{batch}", "{size}, context {context}, batch {batch}, {impl}", tail=True
    )
    about = "Median times of the phases, and of the whole step timed as one, ms"
    head = "Time of a step by phase"
    return [plots.bars(facet, "time_s", "mode", "variant", "phases", head, about) for facet in facets]
