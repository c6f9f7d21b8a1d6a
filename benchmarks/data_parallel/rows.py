"""Findings about the rows of a comparison, and the fields of their records beside the time."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.data_parallel import cases, rank
from benchmarks.models import COMPILED, matmul_rates
from lmsys.attention.compiled import why_no_compiler
from lmsys.bench import Record, Settings
from lmsys.cost.communication import ddp_overhead
from lmsys.cost.memory import zero_memory
from lmsys.cost.operations import model_flops, model_parameters
from lmsys.measure.machine import peak_flops_per_s
from lmsys.model import fused as fused_blocks

MOST_STEPS = 50  # of a row in one pass


@dataclass
class Row:
    """Findings about the strategy of a case, whose buckets are tuned.

    seen    by rank
    passes  seconds of each step, of the slowest rank; alone: of each step without synchronization
    bits    sha256, by the number of the pass, of what its steps have led to
    """

    case: cases.ParallelCase
    seen: list[rank.Inspection]
    passes: list[list[float]] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    bits: dict[int, str] = field(default_factory=dict)

    @property
    def samples(self) -> list[float]:
        """In turns of every pass: the first few, which are kept with a record, are of all of them."""
        return [one for together in zip(*self.passes, strict=True) for one in together]

    def steps(self, settings: Settings, passes: int) -> int:
        """Steps of one pass: enough for the rounds asked for, and as many as fit the time."""
        slowest = max(seen.step_s for seen in self.seen)
        return max(-(-settings.min_rounds // passes), min(MOST_STEPS, int(settings.seconds_per_row / passes / slowest)))


def why_not(case: cases.ParallelCase) -> str | None:
    """None, or why a case cannot run here."""
    fused = case.compile == "fused"
    try:
        reason = case.why_not_runtime
    except ValueError as error:
        return str(error)
    return (
        reason
        or (case.compile in COMPILED and why_no_compiler(case.device))
        or (case.replayed and case.device != "cuda" and "CUDA graphs need a CUDA device")
        or (case.replayed and case.entry.trait("why_not_graphed", ""))
        or (fused and (fused_blocks.why_not(torch.device(case.device)) or case.entry.trait("why_not_fused", "")))
        or (fused and case.checkpoint != "none" and "fused blocks keep all that their backward reads")
        or (
            case.precision == "fp16"
            and "float16 gradients need loss scaling, which no strategy here does: --precision bf16"
        )
        or case.entry.why_not(case)
    )


def step_rates(case: cases.ParallelCase, time_s: float, machine: Record) -> Record:
    """Work of a step on all ranks; of one, its rate, and its shares of what a device reaches and its maker states."""
    tokens = case.world_size * case.batch * case.context
    flops = model_flops(case.config, tokens=tokens, context=case.context, mode="step")
    rates = matmul_rates(flops / case.world_size, time_s, case.precision, machine)
    found = {"flops": flops, "tokens_per_s": tokens / time_s, **rates}
    stated = peak_flops_per_s(machine["gpu"], case.precision)
    return found | {"mfu": found["flops_per_s"] / stated if stated else None}


def communication(row: Row, rows: Sequence[Row]) -> Record:
    """The cost of synchronizing: what it adds to a step, against the same step without it or the row that does not
    synchronize, and how long it takes."""
    case, time_s, seen = row.case, statistics.median(row.samples), row.seen[0]
    record: Record = {
        "bucket_mb": seen.bucket_mb or (None if isinstance(case.asked_bucket_mb, str) else case.asked_bucket_mb),
        "num_buckets": seen.num_buckets,
        "timeline": [list(interval) for interval in seen.communication.timeline],
    }
    alone = {one.case.world_size: one for one in rows if one.passes and not one.case.synchronizes}
    if 1 in alone:
        record["scaling_efficiency"] = statistics.median(alone[1].samples) / time_s
    if case.world_size == 1 or not case.synchronizes:
        return record
    if row.alone or case.world_size in alone:
        other = alone.get(case.world_size, row)
        steps, by = (row.alone, "no_sync") if row.alone else (other.samples, other.case.impl)
        record |= {"unsynchronized_s": statistics.median(steps), "unsynchronized_by": by}
    # A rank that comes early waits inside of a collective: the one that waits least tells what that takes.
    least = min((one.communication for one in row.seen), key=lambda one: one.time_s)
    record |= {"communication_s": least.time_s, "overlap_fraction": least.overlap_fraction}
    if (base := baseline(row, rows)) is not None and (theirs := min(one.communication.time_s for one in base.seen)):
        record["improvement"] = (statistics.median(base.samples) - time_s) / theirs
    if seen.network is not None:
        latency, bandwidth = seen.network
        record |= {"latency_s": latency, "bandwidth_bytes_per_s": bandwidth}
        if seen.num_buckets and case.entry.trait("all_reduce_model", True):
            total = 4 * model_parameters(case.config)
            record["predicted_exposed_s"] = ddp_overhead(total, seen.num_buckets, latency, bandwidth)
    return record


def baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row that a row's communication is compared with, if it has been timed: on as many ranks, sharded alike."""
    asked = row.case.world_size, row.case.sharded_optimizer
    same = [one for one in rows if one.passes and (one.case.world_size, one.case.sharded_optimizer) == asked]
    candidates = (one for one in same if one.case.entry.trait("baseline", 0))
    return max(candidates, key=lambda one: one.case.entry.trait("baseline", 0), default=None)


def memory(row: Row) -> Record:
    """The largest of any rank, and what the accounting of ZeRO predicts where the strategy says its stage."""
    case, num_parameters = row.case, model_parameters(row.case.config)
    record: Record = {name: max(seen.memory[name] for seen in row.seen) for name in row.seen[0].memory}
    record["optimizer_fraction"] = record["optimizer_bytes"] / (8 * num_parameters)
    if (stage := case.entry.trait("zero_stage")) is not None:
        predicted = zero_memory(num_parameters, case.world_size, max(stage, int(case.sharded_optimizer)))
        record |= {f"predicted_{name}_bytes": value for name, value in predicted.items()}
    return record
