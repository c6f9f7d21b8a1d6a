"""Chapters of a few tables each: losses, tokenizers, collectives, precision, training steps; energy, and any other.

Each function takes all cases of a benchmark on a machine.
"""

from collections.abc import Sequence
from dataclasses import replace

from lmsys.bench.fields import Field, Record, grouped
from lmsys.cost.communication import fit_latency_bandwidth
from lmsys.reports import plots, versus
from lmsys.reports.cells import SPEEDUP, base_of, bases_of, compared
from lmsys.reports.tables import Block, Chapter, Plot, Table, listing, pivot
from lmsys.reports.views import KEPT, View, with_kept
from lmsys.reports.words import COMPILED, sentence

# Of losses and tokenizers


def loss(view: View) -> list[Chapter]:
    """The head and loss: time and memory by vocabulary, ours beside all logits at once."""
    view = view.checked(("tokens", "d_model", "vocab_size"), ("section", "precision"))
    view = view.labelled(impl="implementation", vocab_size="vocabulary")
    view = view.ordered("section", "precision", "tokens", "d_model", "vocab_size", "impl")
    stem = "loss-{section}-{precision}-N{tokens}-M{d_model}"
    blocks = []
    for part in view.cut(stem, "{section}, {precision}, {tokens} tokens, d_model {d_model}"):
        table = _over_bases(part, ("vocab_size", "impl"), bases_of(part), "Time, speed and peak memory", shares=True)
        bars = [plots.bars(part, metric, "vocab_size") for metric in ("time_s", "peak_bytes")]
        blocks.append(Block(part.title, [table, *bars]))
    return [Chapter("Head and loss", [*blocks, Block("", [versus.same_bits(view, "loss-same-bits")])])]


def tokenizer(view: View) -> list[Chapter]:
    """Tokenizers: how fast each trains and encodes, and in how much memory."""
    view = view.checked(("vocab_size", "processes"), ("section", "task"))
    view = view.read_as(task={"train": "training", "encode": "encoding"}).labelled(impl="implementation")
    view = view.ordered("section", "vocab_size", "text_bytes", "task", "impl")
    stem = "tokenizer-{section}-V{vocab_size}-{text_bytes}B"
    blocks = []
    for part in view.cut(stem, "{section}, vocabulary {vocab_size}, {text_bytes}"):
        styles = part.styles["impl"]
        bases = bases_of(part, otherwise=[row for row in styles if styles[row].dashed])
        table = _over_bases(part, ("task", "impl", "processes"), bases, "Time, rate, speed and memory", ("task",))
        blocks.append(Block(part.title, [table, plots.bars(part, "bytes_per_s", "task", word="rate")]))
    return [Chapter("Tokenizers", blocks)]


def _over_bases(
    part: View, keys: Sequence[str], bases: Sequence[str], title: str, same: Sequence[str] = (), shares: bool = False
) -> Table | None:
    """All metrics, with the speed over each base; with `shares` also the peak of memory beside that of the base."""
    own, (first, *others) = part, part.metrics()
    for base in bases:
        own = compared(own, base, name=f"speedup_over_{base}", same=same)
        own = own.with_fields(
            Field(
                f"peak_of_{base}",
                label=f"peak, share of {own.text('impl', base)}",
                shown="%",
                of=lambda case: case["peak_bytes"] / case["beside"]["peak_bytes"],
            )
        )
    peaks = [f"peak_of_{base}" for base in bases if shares]
    return listing(own, keys, [first, *(f"speedup_over_{base}" for base in bases), *others, *peaks], "", title)


# Of collectives

BANDWIDTH = "algorithm_bytes_per_s"
FITTED = (Field("latency_s", "s", "o", shown="µs"), Field("bytes_per_s", "B/s", "w", shown="GB/s"))
ABOUT_FIT = "o and w of t = o + bytes / w, least squares of relative errors over the sizes that were timed"


def collectives(view: View) -> list[Chapter]:
    """Collectives: time and bandwidth by size and number of ranks, with a fitted latency and bandwidth."""
    view = view.checked(("megabytes", "world_size"), ("section", "backend")).labelled(impl="operation")
    sizes = {size: f"{size:,} MB" for size in view.values("megabytes")}
    view = view.read_as(megabytes=sizes).ordered("section", "backend", "impl", "world_size", "megabytes")
    parts = view.cut("collectives-{section}-{backend}", "{section}, {backend}")
    return [Chapter("Collectives", [_operations(part) for part in parts])]


def _operations(part: View) -> Block:
    keys = ("impl", "world_size")
    fitted = [fit for own in part.groups(*keys).values() for fit in _fit(own)]
    fits = replace(part, cases=fitted, said=(*part.said, "megabytes")).with_fields(*FITTED)
    table = listing(fits, keys, ("latency_s", "bytes_per_s"), "fit", "Fitted latency and bandwidth", ABOUT_FIT)
    ranks = part.cut("W{world_size}", "{world_size} ranks")
    drawn = [plots.lines(own, BANDWIDTH, "megabytes", word="bandwidth", xlabel="message, MB") for own in ranks]
    timed = part.only(lambda case: case["time_s"] is not None)
    return Block(
        part.title,
        [pivot(part, "time_s", keys, "megabytes"), table, *drawn],
        [listing(timed, (*keys, "megabytes"), timed.metrics(), "rates", "Bandwidth by size")],
    )


def _fit(own: View) -> list[Record]:
    """Latency and bandwidth, where at least two sizes were timed and the larger takes longer."""
    timed = [case for case in own.cases if case["time_s"]]
    try:
        latency_s, bytes_per_s = fit_latency_bandwidth(*([case[key] for case in timed] for key in ("bytes", "time_s")))
    except ValueError:
        return []
    return [{**own.cases[0], "latency_s": latency_s, "bytes_per_s": bytes_per_s}]


# Of mixed precision

DTYPES = {name: name for name in ("float32", "float16", "bfloat16")}  # in reading order
SUMS = (Field("accumulator", label="sum"), Field("addend"), Field("result"), Field("error"))
ABOUT_TENSORS = "Tensors of one training step of a model of one block, and the dtype that each has under autocast"


def precision(view: View) -> list[Chapter]:
    """The effect of rounding on a long sum, and the dtype that autocast gives each tensor, by the dtype asked of it."""
    view = replace(view.read_as(impl=DTYPES), styles={}, stem=f"{view.stem}-precision").ordered("impl")
    own = view.unfolded("tensors", Field("name", label="tensor"), Field("dtype", label="Dtypes under autocast"))
    own = own.labelled(impl="autocast to")
    tensors = pivot(own, "dtype", ["name"], word="autocast", about=ABOUT_TENSORS, data=("name", "dtype"))
    return [Chapter("Mixed precision", [Block("", [_sums(view), tensors])])]


def _sums(view: View) -> Table | None:
    """Rows: the dtypes of a running sum and of its addends; columns: what came out, and the error."""
    view = view.only(lambda case: case["sums"])
    if not view.cases:
        return None
    addend, times = view.cases[0]["addend"], view.cases[0]["times"]
    own, keys = view.unfolded("sums", *SUMS), [one.name for one in SUMS]
    own = replace(own, cases=[one.cases[0] for one in own.groups(*keys).values()]).with_fields(
        Field("sum", label="result", of=lambda case: f"{case['result']:.5f}"),
        Field("off", label="error", of=lambda case: f"{case['error']:+.1e}"),
    )
    return listing(
        own,
        keys[:2],
        ("sum", "off"),
        "accumulation",
        f"{addend:g} added {times:,} times",
        f"The running sum and the addend, by dtype; the sum is {addend * times:g} without rounding. What the addend "
        "lost when it was rounded no accumulator brings back; a sum that is itself rounded after each step loses far "
        "more",
        data=keys,
    )


# Of training steps of large models, each row alone

NUMBERS = ("context", "batch", "world_size", "steps")
WORDS = ("section", "size", "precision", "compile", "strategy")
OURS = "ours"  # whose model it is where a file does not say
ROW = ("strategy", "model", *KEPT, "compile")  # what a row is
SPEED = ("time_s", "tokens_per_s", "over_peer", "mfu", "matmul_ceiling_fraction", "sustained_ceiling_fraction")
MEMORY = ("held_bytes", "peak_bytes", "total_bytes", "first_loss", "last_loss")
KINDS = tuple(
    f"{kind}_s" for kind in "matmul attention elementwise reduction copy other optimizer exposed".split()
)  # whose sum is about a step
SENSED = ("power_w", "sm_clock_mhz")  # while the steps were timed
OVER_PEER = Field(
    "over_peer",
    "",
    "Speed over torch's",
    "detail",
    "Time of torch's fastest row of this model over that of the row; they ran one after another",
    "×",
    lambda case: case["peer_s"] / case["time_s"],
)
LOSSES = (
    Field("step", label="step"),
    Field("loss", "nats", "Loss", about="Loss of each timed step, all on one batch: of a right step it falls"),
)


def steps(view: View) -> list[Chapter]:
    """A chapter for each grid: one table per question, of all its models, and how the losses of each fall."""
    view = with_kept(replace(view, also="each row had the GPUs to itself, one after another"))
    view = view.with_fields(Field("model", role="axis", of=lambda case: case.get("model") or OURS))
    view = view.read_as(model={name: name for name in (OURS, *view.values("model"))})
    view = view.checked(NUMBERS, WORDS).with_fields(*COMPILED).styled("impl", "strategy")
    view = view.ordered("section", "num_parameters", *NUMBERS, *ROW)
    return [
        Chapter(f"Training steps: {own.text('section', section)}", [_steps(own, section)])
        for (section,), own in view.groups("section").items()
    ]


def _steps(own: View, section: str) -> Block:
    is_timed = lambda case: case["time_s"]  # noqa: E731
    parts = own.cut("steps-{section}-{size}-S{context}", "{size}, context {context}")
    losses = [_losses(part.only(is_timed)) for part in parts]
    own = replace(own, stem=f"{own.stem}-steps-{section}")
    timed = own.only(is_timed)
    keys = ("size", "context", *(name for name in ROW if name == "strategy" or own.varies(name)))
    known = [name for name in SENSED if timed.has(name)]
    lead = [
        listing(_with_peers(own), keys, SPEED, "speed", "Speed, and share of what the GPUs reach"),
        listing(timed, keys, MEMORY, "memory", "Memory of a rank, and the losses"),
        listing(timed, keys, ("profiled_s", *KINDS, *known), "kinds", "Where the time goes"),
    ]
    return Block("", lead, losses)


def _losses(timed: View) -> Plot | None:
    points = [
        {**case, "step": step, "loss": value}
        for case in timed.cases
        for step, value in enumerate(case["losses"] or (), start=1)
    ]
    return plots.lines(replace(timed, cases=points).with_fields(*LOSSES), "loss", "step", word="losses", xlabel="step")


def _with_peers(part: View) -> View:
    """Adds the time of the fastest row of somebody else of each model."""
    times = grouped((case["comparison"], case["time_s"]) for case in part.cases if case["peer"] and case["time_s"])
    cases = [{**case, "peer_s": min(times.get(case["comparison"], ()), default=None)} for case in part.cases]
    return replace(part, cases=cases).with_fields(OVER_PEER)


# Of any benchmark

SHOWN = (
    *("energy_j", "energy_per_token_j", "energy_power_w", "energy_call_s", "flops_per_j"),
    "sustained_ceiling_fraction",
)
ABOUT_ENERGY = (
    "Calls followed one another for a second or more on inputs that were drawn once. Energy: of a call, by the counter "
    "of the device; a note says where the integral of its power is more than 3 % away. Pace: the time from one call to "
    "the next meanwhile. Work for energy: the arithmetic of the formula over the energy"
)


def energy(view: View) -> list[Chapter]:
    """The energy of a call and of a token: a table for each grid; nothing where none was measured."""
    if not view.has("energy_j"):
        return []
    labels = {"impl": "row", "causal": "mask"}
    view = view.labelled(**{name: label for name, label in labels.items() if name in view.fields})
    asked = view.only(lambda case: case["energy_j"] is not None or case["energy_note"])
    keys = [name for name in view.axes() if name not in ("section", "label", "peer")]
    blocks = []
    for part in asked.ordered("section", *keys).cut(f"{view.benchmark}-{{section}}", "{section}"):
        shown = [name for name in SHOWN if part.has(name)]
        blocks.append(Block(part.title, [listing(part, [], shown, "energy", "Energy", ABOUT_ENERGY)]))
    return [Chapter(f"Energy of {view.benchmark.replace('_', ' ')}", blocks)]


def any_other(view: View) -> list[Chapter]:
    """A benchmark that has no chapter of its own: a block for each grid, by the fields that it declares."""
    axes = [name for name in view.axes() if name not in ("section", "impl", "label", "peer")]
    heading = "{section}" if view.varies("section") else ""
    parts = view.ordered("section", *axes, "impl").cut(f"{view.benchmark}-{{section}}", heading)
    last = Block("", [versus.same_bits(view, f"{view.benchmark}-same-bits")])
    return [Chapter(sentence(view.benchmark.replace("_", " ")), [*(_grid(part, axes) for part in parts), last])]


def _grid(part: View, axes: list[str]) -> Block:
    """A table of each metric, rows of the table side by side; of one row a table of all metrics."""
    free = [name for name in axes if part.varies(name)]
    rows = part.values("impl")
    part = compared(part, base_of(part, otherwise=sorted(rows, key=lambda row: not part.styles["impl"][row].dashed)))
    metrics = part.metrics()
    if len(rows) == 1:
        tables = [listing(part, free, metrics, word="metrics", title="Metrics")]
    else:
        tables = [pivot(part, metric, free) for metric in [*metrics[:1], SPEEDUP, *metrics[1:]]]
    return Block(part.title, [*tables, *_lines(part, free, metrics)])


def _lines(part: View, free: list[str], metrics: list[str]) -> list[Plot | None]:
    """Each metric against the axis that has most numbers, a plot for each setting of the others."""
    numbers = [name for name in free if all(type(value) in (int, float) for value in part.values(name))]
    if not numbers:
        return []
    axis = max(numbers, key=lambda name: len(part.values(name)))
    others = [name for name in free if name != axis]
    facets = part.cut("-".join(f"{{{n}}}" for n in others), ", ".join(f"{n} {{{n}}}" for n in others), tail=True)
    return [plots.lines(facet, metric, axis) for metric in metrics for facet in facets]
