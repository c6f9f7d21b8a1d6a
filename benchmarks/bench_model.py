"""Times the language model: inference, a training step and its phases, by size, context, batch, precision and row.

A row is our model with one implementation of attention, or somebody else's whole model: `benchmarks.models.MODEL_ROWS`
lists them. `model/cases.py` holds the case and the check before timing (`Gate`), `model/rig.py` the calls that are
timed, `model/spots.py` the checks of timed calls. `bench_anatomy.py` profiles cases of the same kind. A new metric is a
`Field` of `Model.fields`, and its value in `Model.metrics`.

The runner calls the methods of `ModelBenchmark` and `Model`: they override hooks of `lmsys.bench.Benchmark`, which says
when each is called and what it returns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from benchmarks import axes, models
from benchmarks.model.cases import FIELDS, Gate, ModelTest, Row, model_of
from benchmarks.model.layout import MODEL as LAYOUT
from benchmarks.model.rig import Rig, cold_samples
from lmsys import checkpointing, processes, traits
from lmsys.bench import Axis, Benchmark, Candidate, Failure, Field, Grid, Kept, Record, Settings, Step, bench, fields
from lmsys.cost import memory, operations
from lmsys.measure.compare import attempt


@dataclass
class Setup:
    """The models that a group of cases shares: those of the gate until it has checked the rows, then the whole models.

    gate      the check before timing; None afterwards, as the whole models need its memory
    make_rig  builds the whole models (`rig`), on first use
    """

    gate: Gate | None
    make_rig: Callable[[], Rig]

    @cached_property
    def rig(self) -> Rig:
        return self.make_rig()


class ModelBenchmark(Benchmark):
    """The base of `Model` and `bench_anatomy.Anatomy`.

    A row is compiled and checked once for all modes with gradients, and once for inference. Before a case is sampled it
    runs once with no other case in memory: this run decides whether it is out of memory.
    """

    tables = {"attention": models.MODEL_ROWS}
    axes: tuple[Axis, ...] = axes.named(
        "--size --context --batch --precision --mode",
        "--compile --attention",
        "--checkpoint --residual",
        Axis("warmup", int, (None,)),
        Axis("against", default="", single=True),  # a row that the grid is about: there are no cases without it
        batch=(4,),
        compile=("eager", "compiled"),
        attention=(models.AUTO.name,),
    )
    clock = "loop"

    def cases(self, grid: Grid, settings: Settings) -> Iterator[ModelTest]:
        rows = models.MODEL_ROWS.select(grid["attention"])
        # A grid may be about one row: it has no cases where the command line names other rows.
        against = not grid["against"] or grid["against"] in (entry.name for entry in rows)
        for (*shape, warmup, mode, compile), entry, (checkpoint, residual) in product(
            grid.product("size", "context", "batch", "precision", "warmup", "mode", "compile"),
            rows if against else (),
            list(grid.product("checkpoint", "residual")),
        ):
            # Other modes keep nothing for a backward, so levels of checkpointing do not matter.
            if checkpoint == "none" or mode in ("train_forward", "backward", "step"):
                # `shape` is size, context, batch and precision, in the order of the fields of `ModelTest`.
                asked = grid.name, entry, settings.device, *shape, compile, mode, warmup
                yield ModelTest(*asked, checkpoint=checkpoint, residual=residual)

    def key(self, case: ModelTest) -> Row:
        return case.row

    def why_not(self, case: ModelTest) -> str | None:
        fused = case.compile == "fused"
        of_ours = "a narrow residual stream, fused blocks and levels of checkpointing are settings of our model alone"
        try:
            reason = (
                models.why_not(case.entry, case)
                or (case.peer and (case.keeps or fused) and of_ours)
                or (fused and case.checkpoint != "none" and "fused blocks keep all that their backward reads")
                or case.why_not_runtime
            )
            _ = reason or case.computed
        except ValueError as error:
            return str(error)
        return reason

    def no_sample(self, case: ModelTest) -> Failure | None:
        if not case.replayed or (case.mode == "step" and case.device == "cuda"):
            return None
        return (
            "unsupported",
            "forward and backward are one graph: only whole steps can be timed"
            if case.device == "cuda"
            else "CUDA graphs need a CUDA device",
        )

    def context(self, cases: Sequence[ModelTest]) -> AbstractContextManager[None]:
        return models.arithmetic(cases[0].precision)

    def setup(self, cases: Sequence[ModelTest], settings: Settings) -> Setup:
        return Setup(Gate(cases[0], settings.seed), partial(Rig, cases[0], settings.seed))

    def open(self, candidate: Candidate, setup: Setup) -> None:
        assert setup.gate is not None
        model = model_of(candidate.case, setup.gate.base, shared=False)
        setup.gate.outputs(model, candidate.case.grad)  # the first call, which compiles
        candidate.call = model
        if candidate.case.checkpoint == checkpointing.FIT:
            candidate.notes["levels"] = str(candidate.case.computed.checkpoint_blocks)

    def check_all(self, candidates: Sequence[Candidate], setup: Setup, runner: Any) -> None:
        # The runner checks rows again if none of their timed calls was checked. Here that happens only to cold starts,
        # which `cold_samples` has judged.
        if setup.gate is None:
            return
        setup.gate.check(candidates)
        setup.gate = None
        for candidate in candidates:
            candidate.call = None

    def redraw(self, setup: Setup, draw: int) -> None:
        if "rig" in vars(setup):  # cold starts (`warmup`) run in other processes, with a rig of their own
            setup.rig.draws.fill(draw)

    def judge(self, case: ModelTest, candidate: Candidate, setup: Setup, kept: Kept) -> Mapping[str, float]:
        ratios = setup.rig.judge(case, kept)
        if "loss" not in candidate.notes:
            candidate.notes["loss"] = models.finite(setup.rig.forward(case).item()) if case.grad else None
        return ratios

    def step(self, case: ModelTest, candidate: Candidate, setup: Setup) -> Step:
        seconds = setup.rig.alone(case)  # of the first call of the whole model
        if candidate.state is None:
            candidate.state, candidate.compile_s = "has run whole", seconds + (candidate.compile_s or 0.0)
        return setup.rig.step_of(case)


class Model(ModelBenchmark):
    """Times every row at one size, context, batch and precision: eager and compiled, in every mode."""

    name = "model"
    layout = LAYOUT
    fields: tuple[Field, ...] = fields.columns(
        FIELDS,
        "warmup_steps",
        Field("tokens_per_s", "tokens/s", "Rate", about="Rate: tokens of the batch over median time"),
        fields.MFU,
        fields.MATMUL_FRACTION.called(
            about="The arithmetic of the formula over median time, as a share of the large matmul measured in this run"
        ),
        fields.SUSTAINED_FRACTION.called(role="metric"),
        fields.RATE.called(role="detail"),
        fields.PEAK.called(shown="GiB"),
        Field(
            "held_bytes",
            "B",
            "Held",
            "detail",
            "Weights, gradients and optimizer state that were live before what is timed",
            "GiB",
        ),
        Field(
            "total_bytes",
            "B",
            "Memory in all",
            about="Memory in all: weights, gradients and optimizer state live before, and the peak above them",
            shown="GiB",
            of=lambda record: record["held_bytes"] + record["peak_bytes"],
        ),
        Field(
            "predicted_bytes",
            "B",
            "Memory predicted",
            about="Memory in all as the shapes predict it, for an eager step with attention that keeps no scores",
            shown="GiB",
        ),
    )

    def sample(self, turn: Sequence[ModelTest], trial: Any) -> None:
        """Samples rows in turns. Cold starts, cases with `warmup`, run one after another in a new process each."""
        for case in turn:
            if case.warmup is None:
                return trial.interleave(turn)
            measurement = trial.measurements[case.id]
            measurement.samples, measurement.failure = attempt(
                processes.in_own_process, cold_samples, case, trial.settings
            )

    def inspect(self, case: ModelTest, candidate: Candidate, setup: Setup) -> Record:
        return setup.rig.memory_of(case) if case.warmup is None else {}

    def tokens(self, case: ModelTest) -> int:
        return case.batch * case.context

    def metrics(self, case: ModelTest, record: Record, machine: Record) -> Record:
        """Operations, and with a time the rates, as shares of what this machine reaches and what its maker states."""
        tokens, time_s = self.tokens(case), record.get("time_s")
        flops = (
            operations.model_flops(case.config, tokens=tokens, context=case.context, mode=case.mode)
            if case.mode in operations.FLOPS_OF_STEP
            else None
        )
        work: Record = {"predicted_bytes": predicted_bytes(case, record), "flops": flops}
        work |= {"tokens_per_s": tokens / time_s} if time_s else {}
        if time_s and flops:
            work |= models.model_rates(flops, time_s, case.precision, machine)
        return work


def predicted_bytes(case: ModelTest, record: Record) -> int | None:
    """The bytes held and the peak above them in all, as `training_memory` predicts them for an eager step.

    None for cases that it cannot predict: other modes, others' models, compiled ones, and attention that keeps scores.
    """
    runtime = case.runtime | ({"checkpoint_blocks": record["levels"]} if record.get("levels") else {})
    if (
        (case.mode, case.compile) != ("step", "eager")
        or case.peer
        or traits.AttentionTraits.of(case.attention).keeps_scores
        or record["outcome"] == "unsupported"
        or runtime.get("checkpoint_blocks") == checkpointing.FIT  # no levels were chosen, as the row did not run
    ):
        return None
    return memory.training_memory(replace(case.config, **runtime), case.batch, case.context, case.precision).peak


test_model = bench(Model)
