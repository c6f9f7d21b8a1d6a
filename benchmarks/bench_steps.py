"""Training steps of large models, each row with the GPUs to itself: time, MFU, memory, and where the time goes.

Two rows of a model of 8 billion parameters do not fit beside each other, so each is measured alone, in its turn. It is
first held to one process, as in `benchmarks/bench_data_parallel.py`. Then it trains on one batch, step after step, and
must bring the loss down.
"""

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks import axes, bench_data_parallel, models
from benchmarks.data_parallel import alone, check
from benchmarks.data_parallel.cases import MODELS, StepsCase
from benchmarks.data_parallel.steps_layout import STEPS as LAYOUT
from lmsys.bench import Axis, Candidate, Field, Grid, Record, Settings, bench, fields, one_of, positive
from lmsys.bench.ranks import backend_of, world_sizes
from lmsys.bench.trial import NOT_TIMED
from lmsys.checkpointing import FIT
from lmsys.measure.sensors import state_of
from lmsys.parallel import STRATEGIES

STEPS = 20
KINDS = {  # of a step's time, beside the optimizer's
    "matmul": "matmuls",
    "attention": "attention",
    "elementwise": "elementwise",
    "reduction": "reductions",
    "copy": "copies",
    "other": "other kernels",
}


class TrainingSteps(bench_data_parallel.ParallelBenchmark):
    """Each case alone is checked, then trains."""

    name = "steps"
    layout = LAYOUT
    case_type = StepsCase
    tables = {"strategy": STRATEGIES}
    streams = True
    axes: tuple[Axis, ...] = (
        *axes.named("--size", "--context", "--batch", "--precision", "--compile", "--strategy"),
        *axes.named("--world-size", "--checkpoint", "--residual"),
        Axis("model", one_of(*MODELS), ("ours",), help="ours, and beside torch's strategies llama, Hugging Face's"),
        Axis("steps", positive, STEPS, single=True, help="of each row, timed; their losses must fall"),
    )
    fields: tuple[Field, ...] = (
        *fields.axes("strategy", "size", "context", "batch", "precision", "compile"),
        Field("model", role="axis", about="Whose model is trained: ours, or Hugging Face's Llama"),
        Field("world_size", label="ranks", role="axis"),
        *models.WHAT_IS_KEPT,
        *fields.axes("backend"),
        Field("num_nodes", label="nodes", role="axis"),
        Field("num_parameters", label="parameters", role="axis"),
        fields.TIME.called(about="Median time of a step, of the slowest rank", shown="s"),
        Field("tokens_per_s", "tokens/s", "Rate", about="Tokens of all ranks' batches over the median time of a step"),
        fields.MFU.called(
            about="Model FLOP utilisation: the arithmetic of the formula over median time, as a share of the peak that"
            " the devices' maker states for all ranks"
        ),
        fields.MATMUL_FRACTION.called(
            about="The arithmetic of the formula on a rank over median time, as a share of the large matmul measured in"
            " this run"
        ),
        fields.SUSTAINED_FRACTION.called(role="metric"),
        fields.RATE.called(role="detail", about="The arithmetic of the formula on a rank over median time"),
        Field(
            "held_bytes",
            "B",
            "Held",
            about="Weights and optimizer state that are live before a step, on the rank with most",
            shown="GiB",
        ),
        fields.PEAK.called(about="Peak memory of a step above what was held, on the rank with most", shown="GiB"),
        Field(
            "total_bytes",
            "B",
            "Memory in all",
            about="What is held before a step, and the peak above it, on the rank with most",
            shown="GiB",
        ),
        Field("first_step_s", "s", "First step", "detail", "Time of the first step, which compiles and tunes", "s"),
        Field("first_loss", "nats", "First loss", about="Loss of the first timed step, on the batch of all steps"),
        Field("last_loss", "nats", "Last loss", about="Loss of the last timed step"),
        *(
            Field(f"{kind}_s", "s", label, about=f"Time of {label} in a step, without the optimizer's", shown="ms")
            for kind, label in KINDS.items()
        ),
        Field("optimizer_s", "s", "optimizer", about="Time of clipping and the optimizer's kernels", shown="ms"),
        Field(
            "exposed_s",
            "s",
            "exposed communication",
            about="Time of a step with a collective in flight and nothing computing",
            shown="ms",
        ),
        Field(
            "communication_s", "s", "communication", "detail", "Time of a step with a collective in flight", shown="ms"
        ),
        Field("profiled_s", "s", "profiled", "detail", "Wall time of a step under the profiler", "ms"),
        Field("steps", role="axis", about="Timed steps"),
        Field("losses", role="detail", about="Loss of each timed step, all on one batch"),
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[StepsCase]:
        """Rows that synchronize, on two ranks or more."""
        sizes = [size for size in world_sizes(grid, backend_of(settings.device)) if size > 1]
        rows = [row for row in STRATEGIES.select(grid["strategy"]) if row.trait("synchronizes", True)]
        works = grid.product("size", "context", "batch", "precision", "compile")
        for work, world_size, row, model, kept, residual in product(
            works, sizes, rows, grid["model"], grid["checkpoint"], grid["residual"]
        ):
            if row.peer or model == "ours":  # somebody else's model is there as its users train it
                asked = (grid.name, row, settings.device, *work, world_size)
                yield StepsCase(*asked, checkpoint=kept, residual=residual, steps=grid["steps"], model=model)

    def check_all(self, candidates: Sequence[Candidate], setup: Any, runner: Any) -> None:
        for candidate in candidates:
            case = candidate.case
            ranks = candidate.attempt(
                runner.ranks.run, case.world_size, case.backend, check.gate, case, runner.settings.seed
            )
            if ranks:
                candidate.judge(ranks[0], "float32")

    def sample(self, turn: Sequence[StepsCase], trial: Any) -> None:
        (case,) = turn
        candidate = trial.candidate(case)
        if trial.settings.timed:
            candidate.attempt(self._train, case, candidate, trial)
        place = f"[{trial.cases.index(case) + 1}/{len(trial.cases)}]"
        trial.runner.say(f"  {place} {case.impl}: {self._told(case, candidate, trial)}")

    def _train(self, case: StepsCase, candidate: Candidate, trial: Any) -> None:
        start = case.world_size, case.backend
        ranks: list[alone.Alone] = trial.runner.ranks.run(
            *start, alone.train_alone, case, trial.settings.seed, case.steps
        )
        if reason := alone.why_wrong(ranks):
            candidate.failed("wrong", reason)
            return
        measurement = trial.measurements[case.id]
        measurement.samples = [max(samples) for samples in zip(*(one.samples for one in ranks), strict=True)]
        measurement.record = found_by(ranks) | {"levels": ranks[0].levels if case.checkpoint == FIT else None}

    def _told(self, case: StepsCase, candidate: Candidate, trial: Any) -> str:
        """How the case has ended, in a line."""
        one = trial.measurements[case.id]
        if candidate.outcome != "ok" or not one.samples:
            return f"{candidate.outcome}: {candidate.reason or NOT_TIMED}"
        losses, memory = one.record["losses"], one.record["total_bytes"] / 2**30
        return (
            f"{statistics.median(one.samples):.4g} s a step, {memory:.3g} GiB, loss {losses[0]:.4f} to {losses[-1]:.4f}"
        )


def found_by(ranks: Sequence[alone.Alone]) -> Record:
    """The fields of what the ranks have found; kernels are those of the rank that waits least for the others."""
    one = min(ranks, key=lambda rank: rank.times["communication_s"])
    most = {name: max(rank.most[name] for rank in ranks) for name in one.most}
    return {
        **most,
        "peak_bytes": most["total_bytes"] - most["held_bytes"],
        "losses": [float(f"{loss:.6g}") for loss in one.losses],
        "first_loss": one.losses[0],
        "last_loss": one.losses[-1],
        **one.times,
        **state_of([reading for rank in ranks for reading in rank.readings]),
    }


test_steps = bench(TrainingSteps)
