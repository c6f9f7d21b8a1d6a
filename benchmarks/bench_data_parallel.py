"""Data parallel training of the language model: a step, by strategy, size, batch, number of ranks and bucket size."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks import axes
from benchmarks.data_parallel.cases import ParallelCase, variants
from benchmarks.data_parallel.check import gate
from benchmarks.data_parallel.rank import inspect, take_pass
from benchmarks.data_parallel.rows import Row, communication, memory
from lmsys.attention.compiled import why_no_compiler
from lmsys.bench import Axis, Benchmark, Candidate, Field, Grid, Record, Settings, bench, fields
from lmsys.bench.ranks import CLOCKS, backend_of, num_nodes, world_sizes
from lmsys.cost.operations import model_flops, model_parameters
from lmsys.parallel import STRATEGIES

PASSES = {"gloo": 2, "nccl": 3}  # of each row, in turns: a GPU's clock moves, and rows are compared within a pass
TUNED_MB = {"gloo": (1, 25), "nccl": (10, 25, 100, 400)}  # to choose from, for a strategy that is to be tuned

TUNING_STEPS = 4


def held(name: str, label: str, about: str, role: str = "metric") -> Field:
    """A field of the rank that holds most."""
    return Field(name, "B", label, role, f"{about}, on the rank with most", "GiB")


class DataParallel(Benchmark):
    """Each row alone is held to one process, tuned, and looked into for memory and communication. Then all are timed,
    pass after pass in turns; after the steps of a pass all ranks must have one model."""

    name = "data_parallel"
    tables = {"strategy": STRATEGIES}
    opens = False
    keeps_interrupted = True
    axes: tuple[Axis, ...] = (
        *axes.named("--size", "--context", "--batch", "--precision", "--compile", "--strategy"),
        *axes.named("--world-size", "--bucket-mb", "--comm-dtype", "--sharded-optimizer", world_size=(1, 0)),
    )
    fields: tuple[Field, ...] = (
        *fields.axes("strategy", "size", "context", "batch", "precision", "compile"),
        Field("world_size", label="ranks", role="axis"),
        Field("asked_bucket_mb", "MiB", "bucket size", "axis", "Size of a bucket that the case asks for"),
        *fields.axes("comm_dtype", "sharded_optimizer", "backend"),
        Field("num_nodes", label="nodes", role="axis"),
        Field("num_parameters", label="parameters", role="axis"),
        fields.TIME.called(about="Time of a training step, of the slowest rank"),
        Field("tokens_per_s", "tokens/s", "Rate", about="Tokens of all ranks' batches over the median time of a step"),
        Field(
            "scaling_efficiency",
            label="Scaling",
            about="Tokens/s over those of as many ranks alone",
            shown="%",
        ),
        Field(
            "exposed_s",
            "s",
            "Exposed communication",
            about="Median step time less that of the same step without synchronization (for strategies that shard: "
            "less that of the row that does not synchronize)",
            shown="ms",
            of=lambda record: record["time_s"] - record["unsynchronized_s"],
        ),
        Field(
            "predicted_exposed_s",
            "s",
            "Predicted exposed",
            about="Exposed communication by n o + s / (n w): n buckets of s bytes in all, the fitted latency o and "
            "bandwidth w of an all-reduce",
            shown="ms",
        ),
        Field(
            "communication_s",
            "s",
            "Communication",
            about="Time of a step with a collective in flight, on the rank that waits least",
            shown="ms",
        ),
        Field(
            "communication_fraction",
            label="Of the step",
            about="Communication as a share of the median step time",
            shown="%",
            of=lambda record: record["communication_s"] / record["time_s"],
        ),
        Field(
            "overlap_fraction",
            label="Overlapped",
            about="The share of communication that computation hides",
            shown="%",
        ),
        Field(
            "improvement",
            label="Gained on the baseline",
            about="Time gained on the baseline row, as a share of the baseline's communication",
            shown="%",
        ),
        fields.PEAK.called(about="Peak memory of a step, on the rank with most", shown="GiB"),
        held("init_bytes", "After init", "Memory held once model, strategy and optimizer are made"),
        held("before_step_peak_bytes", "Before step", "Peak memory of forward and backward"),
        held("after_step_peak_bytes", "After step", "Peak memory of the optimizer's step"),
        held("parameters_bytes", "Parameters", "Memory of parameters after a step"),
        held("gradients_bytes", "Gradients", "Memory of gradients after a step"),
        held("optimizer_bytes", "Optimizer state", "Memory of the optimizer's state after a step"),
        held("activations_bytes", "Activations", "Memory of activations after a forward"),
        Field(
            "optimizer_fraction",
            label="State, of whole",
            about="The optimizer's state as a share of that of one process alone",
            shown="%",
        ),
        *(
            held(
                f"predicted_{kind}_bytes",
                f"predicted {kind}",
                f"Memory of {kind} at the strategy's stage of ZeRO",
                "detail",
            )
            for kind in ("parameters", "gradients", "optimizer")
        ),
        held("init_peak_bytes", "init peak", "Peak memory while model, strategy and optimizer are made", "detail"),
        held("before_step_bytes", "before step", "Memory held before the optimizer's step", "detail"),
        held("buffers_bytes", "buffers", "Memory of buffers", "detail"),
        Field("bucket_mb", "MiB", "bucket size", "detail", "Size of a bucket, as the strategy has chosen or got it"),
        Field(
            "unsynchronized_s", "s", role="detail", about="Median time of a step without synchronization", shown="ms"
        ),
        Field("latency_s", "s", role="detail", about="Fitted latency of an all-reduce", shown="us"),
        Field("bandwidth_bytes_per_s", "B/s", role="detail", about="Fitted bandwidth of an all-reduce", shown="GB/s"),
        fields.RATE.called(role="detail", of=lambda record: record["flops"] / record["time_s"]),
        *fields.details("num_buckets", "unsynchronized_by", "timeline"),
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[ParallelCase]:
        """On one rank there is only the row that does not synchronize, which the others are compared with."""
        sizes = world_sizes(grid, backend_of(settings.device))
        for model in grid.product("size", "context", "batch", "precision", "compile"):
            for world_size, entry in product(sizes, STRATEGIES.select(grid["strategy"] or STRATEGIES)):
                if world_size > 1 or not entry.trait("synchronizes", True):
                    for variant in variants(grid, entry):
                        yield ParallelCase(grid.name, entry, settings.device, *(*model, world_size, *variant))

    def why_not(self, case: ParallelCase) -> str | None:
        graphed = case.compile == "graphed"
        return (
            (case.compile != "eager" and why_no_compiler(case.device))
            or (graphed and case.device != "cuda" and "CUDA graphs need a CUDA device")
            or (graphed and case.entry.trait("why_not_graphed", ""))
            or (
                case.precision == "fp16"
                and "float16 gradients need loss scaling, which no strategy here does: --precision bf16"
            )
            or case.entry.why_not(case)
        )

    def check_all(self, candidates: Sequence[Candidate], setup: Any, runner: Any) -> None:
        """Once for each row; after timing nothing is left, since each pass ends with a check."""
        new = sorted((one for one in candidates if one.state is None), key=lambda one: -one.case.world_size)
        for number, candidate in enumerate(new, start=1):  # the largest first: one start of ranks
            start = time.perf_counter()
            candidate.attempt(self._look_into, candidate, runner)
            told = candidate.outcome if candidate.reason is None else f"{candidate.outcome}: {candidate.reason}"
            runner.say(f"  [{number}/{len(new)}] {candidate.case.id}: {told}, {time.perf_counter() - start:.1f} s")

    def _look_into(self, candidate: Candidate, runner: Any) -> None:
        case, settings, run = candidate.case, runner.settings, runner.ranks.run
        start = case.world_size, case.backend
        if case.world_size > 1 and case.synchronizes:
            candidate.judge(run(*start, gate, case, settings.seed)[0], "float32")
        if candidate.outcome != "ok" or not settings.timed:
            return
        if case.entry.trait("tuned_bucket_mb", False):
            sized = [replace(case, asked_bucket_mb=mb) for mb in TUNED_MB[case.backend]]
            passes = {one: run(*start, take_pass, one, settings.seed, TUNING_STEPS) for one in sized}
            case = min(sized, key=lambda one: max(statistics.fmean(samples) for samples, *_ in passes[one]))
        candidate.state = Row(case, run(*start, inspect, case, settings.seed))
        if not all(seen.finite for seen in candidate.state.seen):
            candidate.failed("wrong", "the loss holds NaN or inf after a few steps")

    def sample(self, turn: Sequence[ParallelCase], trial: Any) -> None:
        """Runs all passes, the rows in turns. An interrupt leaves the passes that every row has finished.

        If there are none, each row keeps the first pass that it has.
        """
        passes = PASSES[turn[0].backend]
        steps = min(trial.candidate(case).state.steps(trial.settings, passes) for case in turn)  # they are paired
        try:
            for number, case in product(range(passes), turn):
                candidate = trial.candidate(case)
                if candidate.outcome == "ok":
                    candidate.attempt(self._take_pass, candidate, number, steps, trial.runner)
        finally:
            rows = {case.id: trial.candidate(case).state for case in turn if trial.candidate(case).outcome == "ok"}
            complete = min((len(row.passes) for row in rows.values()), default=0)
            for row in rows.values():
                row.passes = row.passes[: max(1, complete)]
            for name, row in rows.items():
                if row.passes:
                    trial.measurements[name].samples = row.samples
                    trial.measurements[name].record = communication(row, list(rows.values())) | memory(row)

    def _take_pass(self, candidate: Candidate, number: int, steps: int, runner: Any) -> None:
        row = candidate.state
        arguments = row.case.world_size, row.case.backend, take_pass, row.case, runner.settings.seed + number, steps
        samples, alone, models = zip(*runner.ranks.run(*arguments), strict=True)
        row.passes.append([max(ranks) for ranks in zip(*samples, strict=True)])
        row.alone += map(max, zip(*alone, strict=True))
        if len(set(models)) > 1 and row.case.synchronizes:
            candidate.failed("wrong", "after the timed steps ranks have different parameters")

    def clock_name(self, case: ParallelCase, runner: Any) -> str:
        return CLOCKS[case.backend]

    def metrics(self, case: ParallelCase, record: Record, machine: Record) -> Record:
        found: Record = {"num_parameters": model_parameters(case.config), "num_nodes": num_nodes()}
        if time_s := record.get("time_s"):
            tokens = case.world_size * case.batch * case.context
            found["flops"] = model_flops(case.config, tokens=tokens, context=case.context, mode="step")
            found["tokens_per_s"] = tokens / time_s
        return found


test_data_parallel = bench(DataParallel)
