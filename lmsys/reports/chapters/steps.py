"""Training steps of large models, each row alone: speed, share of what GPUs reach, memory, where the time goes."""

from dataclasses import replace

from lmsys.bench.fields import Field
from lmsys.reports import plots
from lmsys.reports.canvas import Plot
from lmsys.reports.tables import Block, Chapter, listing
from lmsys.reports.views import KEPT, View, with_kept
from lmsys.reports.words import COMPILED

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


def chapters(view: View) -> list[Chapter]:
    """A chapter for each grid: one table per question, of all its models, and how the losses of each fall."""
    view = with_kept(replace(view, also="each row had the GPUs to itself, one after another"))
    view = view.with_fields(Field("model", role="axis", of=lambda case: case.get("model") or OURS))
    view = view.read_as(model={name: name for name in (OURS, *view.values("model"))})
    view = view.checked(NUMBERS, WORDS).with_fields(*COMPILED).styled("impl", "strategy")
    view = view.ordered("section", "num_parameters", *NUMBERS, *ROW)
    return [
        Chapter(f"Training steps: {own.text('section', section)}", [_block(own)])
        for (section,), own in view.groups("section").items()
    ]


def _block(own: View) -> Block:
    losses = [
        _losses(_timed(part)) for part in own.cut("steps-{section}-{size}-S{context}", "{size}, context {context}")
    ]
    own = replace(own, stem=f"{own.stem}-steps-{own.cases[0]['section']}")
    timed, keys = _timed(own), ("size", "context", *_row(own))
    known = [name for name in SENSED if any(case.get(name) is not None for case in timed.cases)]
    lead = [
        listing(_with_peers(own), keys, SPEED, "speed", "Speed, and share of what the GPUs reach"),
        listing(timed, keys, MEMORY, "memory", "Memory of a rank, and the losses"),
        listing(timed, keys, ("profiled_s", *KINDS, *known), "kinds", "Where the time goes"),
    ]
    return Block("", lead, losses)


def _timed(view: View) -> View:
    return view.only(lambda case: case["time_s"])


def _row(view: View) -> list[str]:
    """The fields that tell rows apart; what is the same in all, the caption says."""
    return [name for name in ROW if name == "strategy" or len(view.values(name)) > 1]


def _losses(timed: View) -> Plot | None:
    points = [
        {**case, "step": step, "loss": loss}
        for case in timed.cases
        for step, loss in enumerate(case["losses"] or (), start=1)
    ]
    about = "Loss of each timed step, all on one batch: of a right step it falls"
    fields = Field("step", label="step"), Field("loss", "nats", "Loss", about=about)
    return plots.lines(replace(timed, cases=points).with_fields(*fields), "loss", "step", word="losses", xlabel="step")


def _with_peers(part: View) -> View:
    """Adds the time of the fastest row of somebody else of each model."""
    times: dict[str, list[float]] = {}
    for case in part.cases:
        if case["peer"] and case["time_s"]:
            times.setdefault(case["comparison"], []).append(case["time_s"])
    cases = [{**case, "peer_s": min(times.get(case["comparison"], ()), default=None)} for case in part.cases]
    return replace(part, cases=cases).with_fields(OVER_PEER)
