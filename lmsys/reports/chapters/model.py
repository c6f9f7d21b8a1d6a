"""Whole models: contexts by sizes for each call, what memory they need, and how they compare with another's model."""

from dataclasses import replace

from lmsys.bench.fields import Field
from lmsys.reports import plots
from lmsys.reports.canvas import Plot
from lmsys.reports.page import Block, Chapter
from lmsys.reports.speedups import SPEEDUP, base_of, besides, compared
from lmsys.reports.tables import Table, endings, listing, means, pivot
from lmsys.reports.views import View
from lmsys.reports.words import OUTCOMES, number

WARM_UP = "warmup"  # its cases differ in steps of warm-up, which no other table shows
FITS = "fits"  # asks for memory: that is read before times
PEERS = "peers"  # sets our model beside another's, which is read in one table
SECTIONS = {  # in page order
    "default": "Everyday sizes",
    PEERS: "Beside Hugging Face Llama",
    "sizes": "Sizes by context",
    WARM_UP: "Warm-up study",
    FITS: "What fits a card",
    "smoke": "Smoke test",
}
MODES = {
    "forward": "Forward (inference)",
    "train_forward": "Forward (training)",
    "backward": "Backward",
    "optimizer": "Optimizer",
    "step": "Whole step",
}
PHASES = {"train_forward": "forward", "backward": "backward", "optimizer": "optimizer"}  # what a step consists of
AXES = ("precision", "compile", "impl")  # may stand side by side in one cell
SAME = ("mode", "size", "context", "batch")
SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "num_parameters")  # what a size stands for
DRAWN = ("mfu", "matmul_ceiling_fraction", "total_bytes")  # by context
LEAD = {PEERS: ("beside",), FITS: ("predicted", "total_bytes", "peak_bytes")}  # what is read at once
OTHERWISE = ("beside", "time_s")
OF_A_STEP = ("tokens_per_s", "mfu", "total_bytes", "peak_bytes")  # too, where nothing but whole steps was timed
VERDICTS = {True: "fits", False: "too large"}
TOTAL = Field(
    "total_bytes",
    "B",
    "Memory in all",
    about="Memory in all: weights, gradients and optimizer state live before, and the peak above them",
    shown="GiB",
    of=lambda case: case["held_bytes"] + case["peak_bytes"],
)
Items = list[Table | Plot | None]


def chapters(view: View) -> list[Chapter]:
    """An overview, then a chapter for each grid."""
    view = view.checked(("batch", "context", "vocab_size"), ("section", "size", *AXES, "mode"))
    view = view.read_as(section=SECTIONS, mode=MODES).with_fields(TOTAL).quiet(*SHAPE)
    view = view.labelled(impl="attention", vocab_size="vocabulary")
    view = view.ordered("section", "mode", *AXES, "num_parameters", "size", "context", "batch", "warmup_steps")
    overview = [
        Block(
            "", [_sizes(view), endings(view.ordered(*AXES), *AXES, word="model-outcomes", title="How the cases ended")]
        )
    ]
    found = [Chapter("Model", overview)]
    for (section,), own in view.groups("section").items():
        name, blocks, glance = own.text("section", section), [], []
        several = ("-V{vocab_size}", "vocabulary {vocab_size}") if own.varies("vocab_size") else ("", "")
        for part in own.cut("model-{section}" + several[0], several[1]):
            modes = part.cut("{mode}", "{mode}")
            if section == WARM_UP:
                blocks.append(Block(part.title, [_warm_up(one) for one in part.groups(*AXES).values()]))
                continue
            glance += [_beside(modes[-1]), _best(part) if section != PEERS else None]
            blocks += [Block(f"Step by phase{part.heading and ', '}{part.heading}", _phases(part))]
            blocks += [_block(mode, section, whole=len(modes) == 1) for mode in modes]
        glance += [_summary(own, section)] if section != WARM_UP else []
        if any(glance):
            overview.insert(-1, Block(name, glance, chapter=f"Model: {name}"))
        found.append(Chapter(f"Model: {name}", [block for block in blocks if any((*block.lead, *block.more))]))
    return found


def _sizes(view: View) -> Table | None:
    """What the names of sizes stand for."""
    own = replace(view, cases=[one.cases[0] for one in view.groups("size", "vocab_size").values()])
    own = own.ordered("num_parameters").labelled(num_layers="layers", num_heads="heads", num_parameters="parameters")
    return listing(own, ("size", "vocab_size", *SHAPE), (), "model-sizes", "Sizes", "The models that were run")


def _block(part: View, section: str, whole: bool) -> Block:
    """One mode: what is read at once, then the rest."""
    items: dict[str, Items] = {
        "beside": [_beside(part)],
        "time_s": _times(part),
        "predicted": [_predicted(part, section)],
    }
    for metric in part.metrics():
        if metric != "time_s":
            items[metric] = [_grid(part, own, metric) for own in _cuts(part, "compile")]
            items[metric] += _by_context(part, metric) if metric in DRAWN else []
    first = LEAD.get(section, (*OTHERWISE, *OF_A_STEP) if whole else OTHERWISE)
    lead = [item for name in first for item in items.get(name, [])]
    return Block(part.title, lead, [item for name, own in items.items() if name not in first for item in own])


def _cuts(part: View, axis: str) -> list[View]:
    """The cases that differ in no other of AXES."""
    return list(part.groups(*(name for name in AXES if name != axis)).values())


def _named(part: View, own: View) -> View:
    """A cut of a part: its files are named by what is constant in it, its heading by what is so only in it."""
    fixed = [name for name in AXES if not own.varies(name)]
    heading = ", ".join(f"{{{name}}}" for name in fixed if part.varies(name))
    return own.cut("-".join(f"{{{name}}}" for name in fixed), heading, tail=True)[0]


def _grid(part: View, own: View, metric: str, inside: str = "compile") -> Table | None:
    """Rows: contexts; columns: sizes."""
    rows = ["context", "batch"] if own.varies("batch") else ["context"]
    return pivot(_named(part, own), metric, rows, "size", inside if own.varies(inside) else "")


def _times(part: View) -> Items:
    """The times of every cut in which one of AXES varies alone, with speedups; then of what has nothing beside it."""
    found: Items = []
    seen = set()
    for axis in AXES:
        for own in _cuts(part, axis):
            if own.varies(axis):
                seen |= {case["id"] for case in own.cases}
                found += [_grid(part, own, "time_s", axis), _speedups(part, own, axis)]
    alone = part.only(lambda case: case["id"] not in seen)
    return found + [_grid(part, own, "time_s") for own in _cuts(alone, "compile")]


def _base(own: View, axis: str) -> str | None:
    """What others are compared with along an axis: eager, fp32, a row of the table, else somebody else's."""
    if axis == "impl":
        return base_of(own, otherwise=[case["impl"] for case in own.cases if case["peer"]])
    first = next(iter(own.words[axis]))
    return first if any(case[axis] == first and case["time_s"] for case in own.cases) else None


def _speedups(part: View, own: View, axis: str) -> Table | None:
    base = _base(own, axis)
    found = compared(own, base, axis, SAME, medians=True).only(lambda case: case[axis] != base)
    return _grid(part, found, SPEEDUP, axis) if base else None


def _summary(own: View, section: str) -> Table | None:
    """The geometric mean of the speedups of compiled over eager, by mode."""
    found = {}
    for mode in own.cut("{mode}", "{mode}"):
        for (precision, impl), cut in mode.groups("precision", "impl").items():
            pairs = compared(cut, _base(cut, "compile"), "compile", SAME, medians=True)
            head = f"{precision}, {cut.text('impl', impl)}" if own.varies("impl") else precision
            found[mode.title, head] = [case[SPEEDUP] for case in pairs.cases if case["compile"] == "compiled"]
    title = f"Speedup of compiled over eager, geometric mean · {own.text('section', section)}"
    return means(own, found, f"model-{section}-summary", title)


def _best(part: View) -> Table | None:
    """The case of most tokens per second of each size: of whole steps, or of the last phase that was timed."""
    timed = part.only(lambda case: case["tokens_per_s"])
    if not timed.cases:
        return None
    mode = timed.values("mode")[-1]
    sizes = timed.only(lambda case: case["mode"] == mode).groups("size").values()
    best = [max(own.cases, key=lambda case: case["tokens_per_s"]) for own in sizes]
    metrics = [name for name in ("time_s", *OF_A_STEP) if part.has(name)]
    title = f"Most tokens per second of each size, {MODES.get(mode, mode).lower()}"
    about = "Of all that was timed, by size"
    return listing(replace(part, cases=best), ("size", *AXES, "batch", "context"), metrics, "best", title, about)


def _warm_up(own: View) -> Table | None:
    """Rows: sizes, contexts and steps of warm-up; columns: modes; cells: mean ± standard deviation."""
    rows = ["size", "context", *(["batch"] if own.varies("batch") else []), "warmup_steps"]
    own = own.ordered(*rows).labelled(mean_s="Time, mean ± std", warmup_steps="warm-up")
    about = "Mean ± standard deviation of the time after that many steps of warm-up"
    return pivot(_named(own, own), "mean_s", rows, "mode", about=about)


def _beside(part: View) -> Table | None:
    """Rows: our cases, of one mode; columns: speed and memory of ours and of a peer's model. None without one."""
    theirs = next((case["impl"] for case in part.cases if case["peer"]), None)
    if theirs is None or all(case["peer"] for case in part.cases):
        return None
    same = (*SAME, "precision", "compile")
    own = compared(part, theirs, same=same, medians=True)
    others = besides(own, theirs, same=same)
    columns: list[str] = []
    for name, label in (("tokens_per_s", "rate"), ("mfu", "MFU"), ("total_bytes", "memory")):
        other = own.fields[name].called(
            name=f"peer_{name}",
            label=f"{theirs.capitalize()} {label}",
            of=lambda case, name=name: OUTCOMES.get(others[case["id"]]["outcome"], others[case["id"]][name]),
        )
        own = own.labelled(**{name: label}).with_fields(other)
        columns += [name, other.name]
    columns.insert(2, SPEEDUP)
    ratio = Field(
        "memory_ratio", label="memory", shown="×", of=lambda case: case["total_bytes"] / case["peer_total_bytes"]
    )
    own = (
        own.with_fields(ratio).labelled(speedup="speedup").ordered("size", "batch").only(lambda case: not case["peer"])
    )
    name = part.text("impl", theirs)
    about = f"Ours beside {name}. {own.fields[SPEEDUP].about}. {TOTAL.about}"
    varying = [axis for axis in ("context", *AXES) if own.varies(axis)]
    return listing(
        own, ("size", "batch", *varying), [*columns, ratio.name], f"beside-{theirs}", f"Ours beside {name}", about
    )


def _predicted(part: View, section: str) -> Table | None:
    """Rows: our cases; columns: memory as measured and as predicted. None where nothing was predicted.

    Where what fits is the question, what was to fit stands beside what did: the memory limit, else the device's.
    """
    own = part.only(lambda case: case["predicted_bytes"]).ordered("size", "batch")
    if not own.cases:
        return None
    limit = own.cases[0]["memory_limit_bytes"]
    room = limit or min(run.get("memory_bytes") or 0 for run in part.machine.runs_of(own.cases))
    own = own.labelled(total_bytes="measured", predicted_bytes="predicted").with_fields(
        Field(
            "share",
            label="measured / predicted",
            shown="%",
            of=lambda case: case["total_bytes"] / case["predicted_bytes"],
        ),
        Field("on_paper", label="on paper", of=lambda case: VERDICTS[case["predicted_bytes"] <= room]),
        Field(
            "tried", of=lambda case: VERDICTS[False] if case["outcome"] == "oom" else VERDICTS[case["total_bytes"] > 0]
        ),
    )
    asked = limit or (section == FITS and room)
    columns = ["total_bytes", "predicted_bytes", "share", *(["on_paper", "tried"] if asked else [])]
    told = [case["on_paper"] == case["tried"] for case in own.cases if case["tried"]]
    about = "Memory of a step in all (live before, and the peak above), as measured and as the shapes predict it"
    about += (
        f". Room for {number(room / 2**30)} GiB: {sum(told)} of {len(told)} cases ended as predicted" if asked else ""
    )
    keys = ("size", "batch", *(axis for axis in ("context", *AXES) if own.varies(axis)))
    return listing(own, keys, columns, "predicted", "Memory measured and predicted", about)


def _phases(part: View) -> Items:
    """The phases of a step as one bar for each size, precision and way of running; a plot for each context."""
    cases = []
    for own in part.groups(*AXES, *SAME[1:]).values():
        by_mode = {case["mode"]: case for case in own.cases}
        lost = [by_mode[phase]["outcome"] for phase in PHASES if phase in by_mode and by_mode[phase]["outcome"] != "ok"]
        times = {mode: by_mode[mode]["time_s"] if mode in by_mode else None for mode in (*PHASES, "step")}
        cases.append({**own.cases[0], **times, "outcome": lost[0] if lost else "ok"})
    time = part.fields["time_s"]
    phases = [time.called(name=mode, label=label) for mode, label in {**PHASES, "step": "step"}.items()]
    variant = Field("variant", role="detail", of=lambda case: f"{case['precision']}, {case['compile']}")
    whole = replace(part, cases=cases).with_fields(*phases, variant).styled("variant", row="precision")
    about = (
        "Median times of the phases, ms, one upon another; their sum above. The black line is the whole step timed as "
        "one. No bar without all three phases"
    )
    return [
        plots.bars(facet, list(PHASES), "size", "variant", "phases", "step", "Time of a step by phase", about)
        for facet in whole.cut("{impl}-S{context}-B{batch}", "context {context}, batch {batch}, {impl}", tail=True)
    ]


def _by_context(part: View, metric: str) -> Items:
    """A metric by context, a line for each size and way of running; a plot for each precision, row and batch."""
    found: Items = []
    for own in (_named(part, _with_lines(own)) for own in _cuts(part, "compile")):
        facets = own.cut("B{batch}", "batch {batch}", tail=True) if own.varies("batch") else [own]
        found += [plots.lines(facet, metric, "context", "line") for facet in facets]
    return found


def _with_lines(own: View) -> View:
    """With a field that says which line a case is a point of."""
    names = ["size", "compile"] if own.varies("compile") else ["size"]
    line = Field("line", role="detail", of=lambda case: ", ".join(case[name] for name in names))
    return own.with_fields(line).styled("line", row="size")
