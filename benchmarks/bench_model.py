"""The language model: what is done with it, by size, context, batch, precision, compile mode and attention row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.model.benchmark import ModelBenchmark, Setup
from benchmarks.model.cases import FIELDS, ModelTest
from benchmarks.model.rig import cold_samples
from benchmarks.models import matmul_rates
from lmsys.bench import Candidate, Field, Record, bench, fields
from lmsys.checkpointing import FIT
from lmsys.cost.memory import training_memory
from lmsys.cost.operations import FLOPS_OF_STEP, model_flops
from lmsys.measure.compare import attempt
from lmsys.measure.machine import peak_flops_per_s
from lmsys.processes import in_own_process


class Model(ModelBenchmark):
    """Every row, eager and compiled, in every mode, at one size, context, batch and precision."""

    name = "model"
    fields: tuple[Field, ...] = (
        *FIELDS,
        *fields.axes("warmup_steps"),
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
        """Samples rows in turns, but cold starts one after another, each in a process of its own."""
        for case in turn:
            if case.warmup is None:
                return trial.interleave(turn)
            one = trial.measurements[case.id]
            one.samples, one.failure = attempt(in_own_process, cold_samples, case, trial.settings)

    def inspect(self, case: ModelTest, candidate: Candidate, setup: Setup) -> Record:
        if case.warmup is not None:
            return {}
        held, peak = setup.rig.memory_of(case)
        return {"held_bytes": held, "peak_bytes": peak}

    def tokens(self, case: ModelTest) -> int:
        return case.batch * case.context

    def metrics(self, case: ModelTest, record: Record, machine: Record) -> Record:
        """Work, and with a time the rates and their share of what this machine reaches and what its maker states."""
        tokens, time_s = case.batch * case.context, record.get("time_s")
        counted = case.mode in FLOPS_OF_STEP
        flops = model_flops(case.config, tokens=tokens, context=case.context, mode=case.mode) if counted else None
        found: Record = {"predicted_bytes": predicted_bytes(case, record), "flops": flops}
        if time_s:
            found["tokens_per_s"] = tokens / time_s
        if time_s and flops:
            found |= matmul_rates(flops, time_s, case.precision, machine)
            stated = peak_flops_per_s(machine["gpu"], case.precision)
            found["mfu"] = found["flops_per_s"] / stated if stated else None
        return found


def predicted_bytes(case: ModelTest, record: Record) -> int | None:
    """Bytes held and the peak above them, where `training_memory` says them: ours, eager, and keeping no scores."""
    if (case.mode, case.compile) != ("step", "eager") or case.peer or case.attention.trait("keeps_scores", False):
        return None
    runtime = case.runtime
    if levels := record.get("levels"):
        runtime["checkpoint_blocks"] = levels
    if record["outcome"] == "unsupported" or runtime.get("checkpoint_blocks") == FIT:  # nothing has been chosen
        return None
    return training_memory(replace(case.config, **runtime), case.batch, case.context, case.precision).peak


test_model = bench(Model)
