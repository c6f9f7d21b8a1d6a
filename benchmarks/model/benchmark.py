"""The base of all benchmarks of whole language models: a gate on a few blocks, then the whole models, mode by mode."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from benchmarks import models
from benchmarks.model.cases import AXES, ModelTest, Row, model_of
from benchmarks.model.check import Gate
from benchmarks.model.rig import Rig
from lmsys.bench import Axis, Benchmark, Candidate, Grid, Settings, Step
from lmsys.checkpointing import FIT
from lmsys.measure.compare import Failure, Kept

RECOMPUTING = "train_forward", "backward", "step"  # modes that differ by what is kept for a backward


@dataclass
class Setup:
    """The gate, until it has judged; from the first step on the whole models, which need its room."""

    case: ModelTest
    seed: int
    gate: Gate | None

    @cached_property
    def rig(self) -> Rig:
        return Rig(self.case, self.seed)


class ModelBenchmark(Benchmark):
    """A row is opened once for all modes with gradients, and once for inference.

    Each case runs alone once before it is sampled, which decides whether it is out of memory.
    """

    tables = {"attention": models.MODEL_ROWS}
    axes: tuple[Axis, ...] = AXES
    clock = "loop"

    def cases(self, grid: Grid, settings: Settings) -> Iterator[ModelTest]:
        rows = models.MODEL_ROWS.select(grid["attention"])
        against = not grid["against"] or grid["against"] in (entry.name for entry in rows)
        setups = grid.product("size", "context", "batch", "precision", "warmup", "mode", "compile")
        ways = list(grid.product("checkpoint", "residual"))
        for (*shape, warmup, mode, compile), entry, way in product(setups, rows if against else (), ways):
            checkpoint, residual = way
            if checkpoint == "none" or mode in RECOMPUTING:
                asked = *shape, compile, mode, warmup
                yield ModelTest(grid.name, entry, settings.device, *asked, checkpoint=checkpoint, residual=residual)

    def key(self, case: ModelTest) -> Row:
        return case.row

    def why_not(self, case: ModelTest) -> str | None:
        if reason := models.why_not(case.entry, case.asked, case.precision, case.compile):
            return reason
        if case.peer and (case.keeps or case.compile == "fused"):
            return "a narrow residual stream, fused blocks and levels of checkpointing are settings of our model alone"
        if case.compile == "fused" and case.checkpoint != "none":
            return "fused blocks keep all that their backward reads"
        try:
            reason = case.why_not_runtime
            _ = reason or case.computed
        except ValueError as error:
            return str(error)
        return reason

    def no_sample(self, case: ModelTest) -> Failure | None:
        if not case.replayed or (case.mode == "step" and case.device == "cuda"):
            return None
        if case.device != "cuda":
            return "unsupported", "CUDA graphs need a CUDA device"
        return "unsupported", "forward and backward are one graph: only whole steps can be timed"

    def context(self, cases: Sequence[ModelTest]) -> AbstractContextManager[None]:
        return models.arithmetic(cases[0].precision)

    def setup(self, cases: Sequence[ModelTest], settings: Settings) -> Setup:
        return Setup(cases[0], settings.seed, Gate(cases[0], settings.seed))

    def open(self, candidate: Candidate, setup: Setup) -> None:
        assert setup.gate is not None
        model = model_of(candidate.case, setup.gate.base, shared=False)
        setup.gate.outputs(model, candidate.case.grad)
        candidate.call = model
        if candidate.case.checkpoint == FIT:
            candidate.notes["levels"] = str(candidate.case.computed.checkpoint_blocks)

    def check_all(self, candidates: Sequence[Candidate], setup: Setup, runner: Any) -> None:
        if setup.gate is None:
            return super().check_all(candidates, setup, runner)
        setup.gate.check(candidates)
        setup.gate = None
        for candidate in candidates:
            candidate.call = None

    def redraw(self, setup: Setup, draw: int) -> None:
        if "rig" in vars(setup):  # a cold start has none, and nothing to judge
            setup.rig.draws.fill(draw)

    def judge(self, case: ModelTest, candidate: Candidate, setup: Setup, kept: Kept) -> Mapping[str, float]:
        ratios = setup.rig.judge(case, kept)
        if "loss" not in candidate.notes:
            loss = setup.rig.forward(case).item() if case.grad else math.nan
            candidate.notes["loss"] = loss if math.isfinite(loss) else None
        return ratios

    def step(self, case: ModelTest, candidate: Candidate, setup: Setup) -> Step:
        seconds = setup.rig.alone(case)
        if candidate.state is None:
            candidate.state = "has run whole"
            candidate.compile_s = seconds + (candidate.compile_s or 0.0)
        return setup.rig.step_of(case)
