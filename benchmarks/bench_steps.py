"""Training steps of large models, one strategy at a time on the GPUs: time, MFU, memory, and where the time goes.

A row is a strategy of `lmsys.parallel.STRATEGIES` with its options. Two rows of a model of 8 billion parameters do not
fit in memory together, so each is measured alone. A row is first checked against training in one process, as in
`benchmarks/bench_data_parallel.py`. Then it trains on one batch, step after step, and its loss must fall. Gradients are
clipped, and the learning rate depends on the model's width. MFU is model FLOP utilisation.

`train_alone` runs on the ranks and measures; `TrainingSteps` calls it there, and makes the record. The runner calls the
methods of `TrainingSteps`: they override hooks of `lmsys.bench.Benchmark`, which says when each is called and what it
returns.

To report something new, measure it in `train_alone`, add it to `Alone` and `findings_of`, and declare a `Field` in
`TrainingSteps.fields`.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks import axes, bench_data_parallel, models
from benchmarks.data_parallel import check, passes, rank, steps_layout
from benchmarks.data_parallel.cases import MODELS, ParallelCase, StepsCase
from lmsys import attention, checkpointing, parallel, traits
from lmsys.bench import (
    Axis,
    Candidate,
    Field,
    Grid,
    Record,
    Settings,
    Step,
    Traits,
    bench,
    fields,
    one_of,
    positive,
    ranks,
)
from lmsys.bench.trial import NOT_TIMED
from lmsys.measure import memory, profile, sensors
from lmsys.parallel.group import device
from lmsys.training.optimizer import clip_factor, scale_gradients, whole_norm

KERNELS = {  # {kind of kernels with a field of its own: its label}; the optimizer's kernels have another field
    "matmul": "matmuls",
    "attention": "attention",
    "elementwise": "elementwise",
    "reduction": "reductions",
    "copy": "copies",
    "other": "other kernels",
}
MAX_NORM = 1.0  # gradients of a larger norm are scaled down to this one
UPDATE = "optimizer"  # the name, in a profile, of the part of a step that clips gradients and updates weights
STAGES = 4  # stretches of the timed steps: the mean loss must fall from each to the next


class TrainingRig(rank.Rig):
    """A model with its strategy and optimizer. Its steps clip gradients, and are all on the first batch."""

    def __init__(self, case: ParallelCase, seed: int):
        super().__init__(
            case,
            # No slices of weights are taken, and no batch but the first is used.
            passes.Pass(seed=seed, draw=seed, key=0, steps=0),
            # A quarter of the usual learning rate for this width, since there is no warm-up.
            {"lr": 0.25 * models.LR_BY_WIDTH / case.config.d_model, "betas": (0.9, 0.95)},
        )

    def update(self) -> None:
        """Clips gradients and steps the optimizer, in place of the base's `update`, which `Rig.step` calls."""
        with profile.part(UPDATE):
            if self.case.traits.fused_adamw:  # this row's parameters are DTensors, whose norm torch can compute
                torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
            else:
                group, divided = ranks.subgroup(self.case.world_size), self.case.traits.shards_gradients
                scale_gradients(self.optimizer, clip_factor(whole_norm(self.parameters, group, divided), MAX_NORM))
            super().update()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters that the optimizer steps on this rank."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def finite(self) -> bool:
        """True if no weight of this rank is NaN or inf."""
        parts = (p.to_local() if hasattr(p, "to_local") else p for p in map(torch.Tensor.detach, self.parameters))
        return all(math.isfinite(torch.linalg.vector_norm(p, math.inf).item()) for p in parts if p.numel())


@dataclass
class Alone:
    """The measurements of `train_alone` on this rank.

    levels    the model's setting `checkpoint_blocks`: what blocks keep for their backward
    most      fields of which a record has the largest value of any rank: first_step_s, with compiling and tuning;
              held_bytes, of weights and optimizer state before a step; total_bytes, the most that is live in a step
    samples   seconds of each timed step
    losses    loss of each timed step, the mean over ranks
    finite    True if no weight of this rank is NaN or inf after the timed steps
    times     fields of a record, in seconds: the kernels of a step by kind without the optimizer's, `optimizer_s`,
              `profiled_s`, `communication_s` and `exposed_s`
    readings  of the device's sensors: on a GPU one after each timed step is launched, on a CPU one at the end
    """

    levels: str
    most: dict[str, float]
    samples: list[float]
    losses: list[float]
    finite: bool
    times: dict[str, float]
    readings: list[sensors.Reading]


@ranks.on_part
def train_alone(case: ParallelCase, seed: int, steps: int) -> Alone:
    """On a rank: builds the row, times its steps, and profiles some more."""
    for row in attention.ATTENTION.values():
        profile.register_kernels(Traits.of(row).kernels, "attention")
    profile.register_kernels(case.traits.kernels, "communication")
    kind, group = device().type, ranks.subgroup(case.world_size)
    with rank.compiler_of(case):
        rigs: list[TrainingRig] = []

        def step() -> None:
            rigs[0].step()
            rigs[0].finish()

        first_step_s, phases = memory.first_steps(lambda: rigs.append(TrainingRig(case, seed)), step, kind)
        (rig,) = rigs
        held_bytes = sum(rig.breakdown().values())
        ranks.release()
        losses, readings, device_sensors = list[torch.Tensor](), list[sensors.Reading](), sensors.sensors_of(kind)

        def timed(_: object) -> None:
            losses.append(rig.step())
            if kind == "cuda":  # the GPU works meanwhile; on a CPU a reading here would count as time of the step
                readings.append(device_sensors.read())

        # `range(steps)` stands for the seeds of draws, which are not used: all steps have one batch.
        samples, _ = ranks.times(Step(timed), range(steps), group, finish=rig.finish)
        if kind == "cpu":
            readings.append(device_sensors.read())
        sums = torch.stack(losses).double()
        torch.distributed.all_reduce(sums, group=group)
        finite = rig.finite()
        sent = profile.communication_of(rig.step, rig.finish, partial(torch.distributed.barrier, group), kind)
        torch.distributed.barrier(group)
        taken = profile.profile_call(step, kind, steps=1)
    return Alone(
        levels=str(rank.config_of(case).checkpoint_blocks),
        most={
            "first_step_s": first_step_s,
            "held_bytes": held_bytes + rig.outside_bytes,
            "total_bytes": phases["step"]["peak_bytes"] + rig.outside_bytes,
        },
        samples=samples,
        losses=(sums / case.world_size).tolist(),
        finite=finite,
        times=by_kind(taken)
        | {
            "profiled_s": taken.profiled_s,
            "communication_s": sent.time_s,
            "exposed_s": sent.time_s * (1 - (sent.overlap_fraction or 0.0)),
        },
        readings=readings,
    )


def by_kind(taken: profile.Profile) -> dict[str, float]:
    """Fields of a record: seconds of a step's kernels by kind, without the optimizer's, and of the optimizer's."""
    update: dict[str, float] = next((part.kinds for part in taken.parts if part.name == UPDATE), {})
    return {
        f"{kind}_s": max(0.0, taken.shares[kind] * taken.kernel_s - update.get(kind, 0.0)) for kind in profile.KINDS
    } | {"optimizer_s": sum(update.values())}


def why_wrong(ranks: list[Alone]) -> str | None:
    """None, or why these steps do not train: a weight or a loss is NaN or inf, or losses do not fall."""
    if not all(rank.finite for rank in ranks):
        return "after the timed steps a weight is NaN or inf"
    losses = ranks[0].losses
    if bad := [number for number, loss in enumerate(losses, start=1) if not math.isfinite(loss)]:
        return f"the loss of timed step {bad[0]} is NaN or inf"
    size = -(-len(losses) // STAGES)
    means = [statistics.fmean(losses[at : at + size]) for at in range(0, len(losses), size)]
    if not all(later < earlier for earlier, later in zip(means, means[1:], strict=False)):
        text = ", ".join(f"{mean:.4f}" for mean in means)
        return f"on one batch the loss must fall, and its means over {size} steps each are {text}"
    return None


class TrainingSteps(bench_data_parallel.ParallelBenchmark):
    """Checks each case, and then times its training steps; the case has the GPUs to itself."""

    name = "steps"
    layout = steps_layout.STEPS
    case_type = StepsCase
    streams = True  # each case is a turn of its own: two models do not fit in memory together
    axes: tuple[Axis, ...] = axes.named(
        "--size --context --batch --precision --compile --strategy",
        "--world-size --checkpoint --residual --optimizer",
        Axis("model", one_of(*MODELS), ("ours",), help="ours, and beside torch's strategies llama, Hugging Face's"),
        Axis("steps", positive, StepsCase.steps, single=True, help="of each row, timed; their losses must fall"),
    )
    fields: tuple[Field, ...] = fields.columns(
        "strategy size context batch precision compile",
        Field("model", role="axis", about="Whose model is trained: ours, or Hugging Face's Llama"),
        Field("world_size", label="ranks", role="axis"),
        models.WHAT_IS_KEPT,
        "optimizer backend",
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
        [
            Field(f"{kind}_s", "s", label, about=f"Time of {label} in a step, without the optimizer's", shown="ms")
            for kind, label in KERNELS.items()
        ],
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
        for work, world_size, row, model, kept, residual, optimizer in product(
            grid.product("size", "context", "batch", "precision", "compile"),
            [size for size in ranks.world_sizes(grid, ranks.backend_of(settings.device)) if size > 1],
            [row for row in parallel.STRATEGIES.select(grid["strategy"]) if traits.StrategyTraits.of(row).synchronizes],
            grid["model"],
            grid["checkpoint"],
            grid["residual"],
            grid["optimizer"],
        ):
            if row.peer or model == "ours":  # others' models run only under torch's strategies, as their users run them
                asked = grid.name, row, settings.device, *work, world_size
                yield StepsCase(
                    *asked,
                    steps=grid["steps"],
                    model=model,
                    checkpoint=kept,
                    residual=residual,
                    optimizer=optimizer,
                )

    def check_all(self, candidates: Sequence[Candidate], setup: Any, runner: Any) -> None:
        """Judges each row by `check.gate`: three steps on the ranks against those of one process."""
        for candidate in candidates:
            if ratios := candidate.attempt(runner.ranks.ask, candidate.case, check.gate, runner.settings.seed):
                candidate.judge(ratios[0], "float32")

    def sample(self, turn: Sequence[StepsCase], trial: Any) -> None:
        """Trains the only case of a turn, unless nothing is to be timed, and prints a line about its result."""
        (case,) = turn
        candidate = trial.candidate(case)
        if trial.settings.timed:
            candidate.attempt(self._train, case, candidate, trial)
        trial.runner.say(
            f"  [{trial.cases.index(case) + 1}/{len(trial.cases)}] {case.impl}: {self._figures(case, candidate, trial)}"
        )

    def _train(self, case: StepsCase, candidate: Candidate, trial: Any) -> None:
        """Trains the case on its ranks. Fails the candidate if the steps do not train, else fills its measurement."""
        answers: list[Alone] = trial.runner.ranks.ask(case, train_alone, trial.settings.seed, case.steps)
        reason, measurement = why_wrong(answers), trial.measurements[case.id]
        if reason:
            candidate.failed("wrong", reason)
            return
        measurement.samples = ranks.slowest(rank.samples for rank in answers)
        measurement.record = findings_of(answers) | {
            "levels": answers[0].levels if case.checkpoint == checkpointing.FIT else None
        }

    def _figures(self, case: StepsCase, candidate: Candidate, trial: Any) -> str:
        """The case's outcome, in a line for the terminal."""
        measurement = trial.measurements[case.id]
        if candidate.outcome != "ok" or not measurement.samples:
            return f"{candidate.outcome}: {candidate.reason or NOT_TIMED}"
        time_s, gib = statistics.median(measurement.samples), measurement.record["total_bytes"] / 2**30
        losses = measurement.record["losses"]
        return f"{time_s:.4g} s a step, {gib:.3g} GiB, loss {losses[0]:.4f} to {losses[-1]:.4f}"


def findings_of(ranks: Sequence[Alone]) -> Record:
    """Fields of a record from the ranks' measurements. Times of kernels are of the rank that waits least for others."""
    least = min(ranks, key=lambda rank: rank.times["communication_s"])
    most = fields.largest([rank.most for rank in ranks])
    return {
        **most,
        "peak_bytes": most["total_bytes"] - most["held_bytes"],
        "losses": [float(f"{loss:.6g}") for loss in least.losses],
        "first_loss": least.losses[0],
        "last_loss": least.losses[-1],
        **least.times,
        **sensors.state_of([reading for rank in ranks for reading in rank.readings]),
    }


test_steps = bench(TrainingSteps)
