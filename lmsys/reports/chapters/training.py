"""Whole trainings: attention rows by strategies, their speed, memory and loss curves."""

from dataclasses import replace

from matplotlib.ticker import FuncFormatter

from lmsys.bench.fields import Field, Record
from lmsys.reports import plots
from lmsys.reports.canvas import CEILING, Plot, canvas, plain, scale_values
from lmsys.reports.cells import SPEEDUP, beside
from lmsys.reports.tables import Block, Chapter, listing, pivot
from lmsys.reports.views import View
from lmsys.reports.words import COMPILED

NUMBERS = ("context", "batch", "num_ranks", "train_tokens", "val_tokens", "epochs")
WORDS = ("section", "size", "attention", "strategy", "row", "precision", "compile")
QUIET = ("attention_label", "attention_peer", "strategy_peer", "global_batch", "world_size", "bucket_mb", "vocab_size")
SINGLE = "none"  # one process, which accumulates the batches of all ranks
SAME = ("attention", "comparison")
SUFFIX = "-reproducible"  # of a row's name
TABLES = {"tokens_per_s": "rate", SPEEDUP: "speedup", "mean_s": "time", "peak_bytes": "memory"}
ABOUT = {
    "loss": "Loss after the last epoch on {val_tokens} held-out tokens, nats; in brackets how far the loss of a step "
    "was at most from that of naive attention in one process, over the first 100 steps",
    "curves": "The loss over the global batch by step; a line for each attention row and strategy, coloured by "
    "strategy",
    "differences": "How far the loss of a step is from that of naive attention in one process, for each strategy with "
    "the attention row that is farthest; where there is no point it is equal",
}
Points = dict[int, float]  # by step


def chapters(view: View) -> list[Chapter]:
    """A chapter for each grid."""
    also = f"one process ({SINGLE}) accumulates the batches of all ranks; cases run one after another"
    view = replace(view, also=also).checked(NUMBERS, WORDS).quiet(*QUIET).with_fields(*COMPILED)
    view = view.styled("attention").styled("row", "strategy", "row")
    view = view.ordered("section", "size", *NUMBERS, "precision", "compile", "attention", "row")
    stem = "training-{section}-{size}-S{context}B{batch}-{precision}{way}-W{num_ranks}-T{train_tokens}x{epochs}"
    heading = "{size}, context {context}, batch {batch} of each of {num_ranks} ranks, {precision}{how}"
    return [
        Chapter(f"Training: {own.text('section', section)}", [_block(part) for part in own.cut(stem, heading)])
        for (section,), own in view.groups("section").items()
    ]


def _block(part: View) -> Block:
    """Rows of tables: attention; their columns: strategies, by name, since labels are too long."""
    budget = max((case["curve_budget"] or 0 for case in part.cases), default=0)
    about = ABOUT["loss"] + (f" (right: {budget:g} or less)" if budget else "")
    part = _with_speeds(part).with_fields(Field("ended", label="Loss", role="detail", of=_ended))
    tables = {name: pivot(part, name, ["attention"], "row", word=word) for name, word in TABLES.items()}
    bars = {name: plots.bars(part, [name], "row", "attention", TABLES[name]) for name in TABLES.keys() - {SPEEDUP}}
    chain = plots.lines(part, SPEEDUP, "row", "attention", "chain", ceiling=("", 1.0))
    numbers = ("valid_loss", "loss", "curve_difference", "norm_difference")
    losses = pivot(part, "ended", ["attention"], "row", word="loss", about=about, data=numbers)
    curves = [(case["row"], _points(case, "curve_losses")) for case in part.cases]
    worst = [(row, _worst(own)) for (row,), own in part.groups("row").items()]
    drawn = [_by_step(part, "curves", "Loss by step", curves)]
    drawn.append(_by_step(part, "differences", "Loss beside the reference", worst, budget))
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


def _points(case: Record, name: str) -> Points:
    pairs = zip(case["curve_steps"] or (), case[name] or (), strict=False)
    return {step: value for step, value in pairs if value is not None}


def _worst(own: View) -> Points:
    """How far from the reference's the loss of a strategy is, at the attention row that is farthest."""
    found: Points = {}
    for step, value in (point for case in own.cases for point in _points(case, "curve_differences").items()):
        found[step] = max(abs(value), found.get(step, 0.0))
    return {step: found[step] for step in sorted(found) if found[step]}


def _by_step(part: View, word: str, title: str, lines: list[tuple[str, Points]], budget: float = 0) -> Plot | None:
    """Lines coloured by strategy; with a budget on a logarithmic axis, and below it."""
    lines = [(row, points) for row, points in lines if points]
    if not lines:
        return None
    axes = canvas(3.0)
    for place, (row, points) in enumerate(lines):
        label = part.text("row", row) if row not in dict(lines[:place]) else "_"
        look = {"label": label, "marker": "", "linewidth": 2.6 - 1.8 * place / len(lines)}  # one below still shows
        axes.plot(list(points), list(points.values()), **{**part.style("row", row).line(), **look})
    if budget:
        scale_values(axes, [budget, *(value for _, points in lines for value in points.values())], True, 1)
        axes.axhline(budget, **CEILING)
        at = {"textcoords": "offset points", "xycoords": ("axes fraction", "data")}
        axes.annotate("allowed", (1, budget), (0, -11), ha="right", fontsize=9, **at)
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.set(xlabel="step", ylabel="nats")
    return plots.drawn(part, axes, title, word, part.caption(ABOUT[word]))
