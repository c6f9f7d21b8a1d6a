"""The cases of data parallelism: how the strategy of each is built, and how the weights of two rows are compared.

`bench_data_parallel.py`, `bench_steps.py`, `dev/steps.py`, `dev/earlier/steps.py` and the modules of this folder use
this file. Nothing here communicates between ranks. A *row* is a strategy with its options. The rows of a *turn* are
timed together, one *pass* after another. A pass is a series of steps; all rows on the same number of ranks take it from
the same weights on the same batches. After a pass each rank keeps *slices*: a few rows of each weight matrix, and whole
vectors (`passes.keep`).

After a pass, `pairs` of rows are compared. If both add the same numbers in the same order (`ParallelCase.same_bits`),
their weights must have the same bits. Else each row must agree with exact steps within a budget. *Plain steps* are the
same training without the strategy, and *exact steps* are plain steps on weights in float64. The budget, the error that
is allowed, comes from the error of plain steps (`passes.judge_pass`). A pair with equal bits agrees in any case.

The second half of the file, from `Inspection` on, turns measurements of a row into fields of its record; there,
`why_not` says why a case cannot run. A new field is declared in `bench_data_parallel.py` and computed here. A new
option of strategies is an attribute of `ParallelCase`, a value in `options`, a part of the name `impl`, and an axis.
The axis is an `Axis` in `benchmarks/axes.py`; it is named in `DataParallel.axes`, has a field in `DataParallel.fields`,
and is read in `DataParallel.cases`. If `bench_steps.py` does not vary it, `StepsCase.axes` leaves it out.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch

from benchmarks.models import COMPILED, LLAMA, TrainedCase, why_no_arithmetic
from lmsys.bench import Entry, Record, Settings, fields
from lmsys.cost.communication import ddp_overhead
from lmsys.cost.memory import zero_memory
from lmsys.cost.operations import ELEMENT_BYTES, block_matrices, model_parameters
from lmsys.measure.profile import Communication
from lmsys.model import fused as fused_blocks
from lmsys.training.prepare import AUTOCAST

# Options of strategies that name a dtype: the one in which gradients are sent, and the one in which parameters are
# gathered.
NARROW = ("comm_dtype", "compute_dtype")
Narrow = tuple[str, torch.dtype] | None  # the name of one of NARROW, and the dtype it has
# By value of the axis `model` of `bench_steps.py`: the row of the whole model that is trained; None: ours.
MODELS = {"ours": None, "llama": replace(LLAMA, target="benchmarks.model.llama:ShardedLlama")}


@dataclass(frozen=True)
class ParallelCase(TrainedCase):
    """A model trained by a strategy on `world_size` ranks.

    Strategies, sizes of buckets and numbers of ranks are sampled together and compared.

    asked_bucket_mb    MiB, "auto", "all" for one bucket, or None: the strategy has no buckets, or a size of its own
    comm_dtype         the dtype in which gradients are sent; float32 stands for their own dtype
    sharded_optimizer  a `ShardedOptimizer` steps the parameters
    optimizer          adamw; or muon, which steps the matrices of blocks, while AdamW steps all else
    """

    world_size: int
    asked_bucket_mb: float | str | None = None
    comm_dtype: str = "float32"
    sharded_optimizer: bool = False
    optimizer: str = field(default="adamw", kw_only=True)

    @property
    def impl(self) -> str:
        """The strategy with its options, such as "bucketed-25MiB"."""
        mb = self.asked_bucket_mb
        bucket = "" if mb is None else f"-{mb}" if isinstance(mb, str) else f"-{mb}MiB"
        comm = "" if self.comm_dtype == "float32" else f"-{self.comm_dtype}"
        return f"{self.entry.name}{bucket}{comm}{'-sharded' if self.sharded_optimizer else ''}{self.keeps}"

    @property
    def keeps(self) -> str:
        """The end of `impl`: the optimizer, if it is not the default, and then what `ModelCase.keeps` names."""
        return f"-{self.optimizer}" * (self.optimizer != "adamw") + super().keeps

    @property
    def id(self) -> str:
        return f"{self.comparison}-W{self.world_size}-{self.impl}"

    @property
    def options(self) -> dict[str, Any]:
        """The options that the strategy is built with; left out are those that keep the strategy's own defaults.

        For "all" the option `bucket_mb` is None: one bucket of any size.
        """
        asked = {
            "bucket_mb": self.asked_bucket_mb,
            "comm_dtype": None if self.comm_dtype == "float32" else getattr(torch, self.comm_dtype),
            "compute_dtype": torch.bfloat16 if self.precision == "bf16" and self.traits.compute_dtype else None,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        return given | {"bucket_mb": None} if self.asked_bucket_mb == "all" else given

    @property
    def trained(self) -> tuple[Any, ...]:
        """The model's size and the batch of all ranks: rows that differ in one of them learn something else."""
        return self.size, self.context, self.batch, self.world_size

    @property
    def stepped_by(self) -> tuple[int, bool, str]:
        """(number of ranks, True for a sharded optimizer, optimizer): equal for a row and its `baseline`."""
        return self.world_size, self.sharded_optimizer, self.optimizer

    @property
    def whole_model(self) -> Entry | None:
        """The row of somebody else's model that is trained instead of ours; None: ours."""
        return None

    @property
    def narrow(self) -> Narrow:
        """(option, dtype) of the first of NARROW that the strategy is built with; None if it is built with neither."""
        return next(((name, self.options[name]) for name in NARROW if name in self.options), None)

    def same_bits(self, other: "ParallelCase") -> bool:
        """True if steps of both add the same numbers in the same order, so that no bit of the weights may differ.

        This holds only on a CPU, in eager mode, for one precision, one residual stream and one number of ranks. There
        the level of checkpointing changes no number. The strategy changes none, either, if both have the trait
        `halves_sums` (the mean over two ranks is half of their sum), in fp32 on at most two ranks: two numbers have the
        same sum in either order, as long as none is rounded before. With Muon, strategies may differ: it orthogonalizes
        matrices in batches, which may round otherwise if a rank owns fewer matrices.
        """
        settings = [(*case.trained, case.precision, case.device, case.compile, case.residual) for case in (self, other)]
        if settings[0] != settings[1] or (self.device, self.compile) != ("cpu", "eager"):
            return False
        # Both `narrow` must be None.
        exact = self.precision == "fp32" and self.narrow == other.narrow is None and self.world_size <= 2
        adds = self.traits.halves_sums and other.traits.halves_sums and self.optimizer == other.optimizer == "adamw"
        return replace(self, checkpoint=other.checkpoint) == other or (exact and adds)


@dataclass(frozen=True)
class StepsCase(ParallelCase):
    """A row of `bench_steps.py`: it trains a model of MODELS, with no other row in memory, for `steps` timed steps."""

    steps: int = field(default=20, kw_only=True)
    model: str = field(default="ours", kw_only=True)

    @property
    def whole_model(self) -> Entry | None:
        return MODELS[self.model]

    @property
    def keeps(self) -> str:
        """The end of `impl`: the model's name, if it is not ours, and then what `ParallelCase.keeps` names."""
        return f"-{self.model}" * (self.model != "ours") + super().keeps

    @property
    def why_not_runtime(self) -> str | None:
        """The reason why this model cannot run as the case asks, such as a package that is not installed, or None."""
        if (reason := super().why_not_runtime) is not None or self.whole_model is None:
            return reason
        if self.precision in AUTOCAST and self.residual == "wide":
            return "the stream between its layers has the dtype of its matmuls: --residual narrow"
        return self.whole_model.why_not(self)

    @property
    def axes(self) -> Record:
        return {
            name: value
            for name, value in super().axes.items()
            if name not in ("asked_bucket_mb", "comm_dtype", "sharded_optimizer")  # which these cases do not vary
        }


# The answers of `agreement`, as records have them; the report has other words for BITS and UNKNOWN.
BITS, TOLERANCE, WRONG, UNKNOWN = "bits", "tolerance", "wrong", "unknown"


@dataclass(frozen=True)
class Steps:
    """Results of the timed steps of one row.

    bits    sha256 of the slices that were kept (`passes.keep`)
    ratios  {parameter: its error over its budget} (`passes.judge_pass`); None if exact steps do not fit in memory
    """

    case: ParallelCase
    bits: str
    ratios: Mapping[str, float] | None


def agreement(first: Steps, second: Steps) -> tuple[str, str]:
    """(how the weights of two rows agree: BITS, TOLERANCE, WRONG or UNKNOWN; the reason of the last two, else "").

    The answer is WRONG if bits differ that must be equal. It is also WRONG if they may differ, and an error is over its
    budget.
    """
    if first.bits == second.bits:
        return BITS, ""
    if first.case.same_bits(second.case):
        return WRONG, "their weights must have the same bits, and have not"
    for steps in (first, second):
        for name, ratio in (steps.ratios or {}).items():
            if not ratio <= 1:
                return WRONG, f"{steps.case.impl}: {name} is {ratio:.3g} times the allowed error off"
    if None in (first.ratios, second.ratios):
        return UNKNOWN, "plain steps in float64 do not fit in this memory"
    return TOLERANCE, ""


def pairs(versions: Iterable[Steps]) -> list[tuple[Steps, Steps]]:
    """All pairs of rows that train one model on the same batches by one optimizer.

    Rows on different numbers of ranks are no pair, since they have different batches.
    """
    groups = fields.grouped(((*steps.case.trained, steps.case.optimizer), steps) for steps in versions)
    return [pair for alike in groups.values() for pair in combinations(alike, 2)]


@dataclass
class Inspection:
    """Measurements of a row on one rank, before its timed passes (`rank.inspect`).

    memory         {field of the record: bytes}
    communication  when a step communicates, and when it computes meanwhile
    step_s         seconds of a step
    bucket_mb      MiB of a bucket; None for a strategy without buckets
    num_buckets    how many buckets there are; None for a strategy without buckets
    finite         True if the loss is finite after a few steps
    network        (latency in s, bandwidth in bytes/s) of an all-reduce of the ranks; None for one rank
    """

    memory: dict[str, int]
    communication: Communication
    step_s: float
    bucket_mb: float | None
    num_buckets: int | None
    finite: bool
    network: tuple[float, float] | None = None


@dataclass
class Row:
    """Measurements of a case after checks and tuning. It is the `state` of the case's `Candidate`.

    case    the case; if the strategy tunes its bucket size, with the fastest one
    seen    an `Inspection` for each rank
    passes  for each pass the seconds of each step, on the slowest rank
    alone   seconds of each step without synchronization, of all passes
    bits    {number of a pass: sha256 of the slices that were kept after it}
    """

    case: ParallelCase
    seen: list[Inspection]
    passes: list[list[float]] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    bits: dict[int, str] = field(default_factory=dict)

    @property
    def samples(self) -> list[float]:
        """Seconds of all steps: the first of every pass, the second of every pass, ...

        So the first few, which are kept with a record, come from all passes.
        """
        return [seconds for together in zip(*self.passes, strict=True) for seconds in together]

    def steps(self, settings: Settings, passes: int) -> int:
        """Steps of one pass: as many as fit the time, at most 50, but enough for the rounds that are asked for."""
        return max(
            -(-settings.min_rounds // passes),
            min(50, int(settings.seconds_per_row / passes / max(seen.step_s for seen in self.seen))),
        )


def why_not(case: ParallelCase) -> str | None:
    """The reason why a case cannot run here, or None."""
    try:
        reason = case.why_not_runtime
    except ValueError as error:
        return str(error)
    return (
        reason
        or why_no_arithmetic(case.precision, case.device, case.compile in COMPILED)
        or (case.replayed and case.device != "cuda" and "CUDA graphs need a CUDA device")
        or (case.replayed and case.traits.why_not_graphed)
        or (
            case.compile == "fused"
            and (
                fused_blocks.why_not(torch.device(case.device))
                or case.traits.why_not_fused
                or (case.checkpoint != "none" and "fused blocks keep all that their backward reads")
            )
        )
        or (
            case.precision == "fp16"
            and "float16 gradients need loss scaling, which this benchmark does not do: --precision bf16"
        )
        or case.entry.why_not(case)
    )


def communication(row: Row, rows: Sequence[Row]) -> Record:
    """Fields about the cost of synchronizing: the time that it adds to a step, and how long it takes.

    The added time is measured against the same step without synchronization, or against a row that never synchronizes.
    `rows` are all rows of the turn, and contain the row.
    """
    case, time_s, seen = row.case, statistics.median(row.samples), row.seen[0]  # `seen`: of rank 0
    record: Record = {
        "bucket_mb": seen.bucket_mb or (None if isinstance(case.asked_bucket_mb, str) else case.asked_bucket_mb),
        "num_buckets": seen.num_buckets,
        "timeline": list(map(list, seen.communication.timeline)),
    }
    alike = [timed for timed in rows if timed.passes and timed.case.optimizer == case.optimizer]
    # {number of ranks: a row that never synchronizes}; `row.alone` has the row's own steps without synchronization
    alone = {timed.case.world_size: timed for timed in alike if not timed.case.traits.synchronizes}
    if 1 in alone:
        record["scaling_efficiency"] = statistics.median(alone[1].samples) / time_s
    if case.world_size == 1 or not case.traits.synchronizes:
        return record
    if row.alone or case.world_size in alone:
        # `other` is used only if `row.alone` is empty. Then the dict `alone` has a row for this number of ranks.
        other = alone.get(case.world_size, row)
        steps, by = (row.alone, "no_sync") if row.alone else (other.samples, other.case.impl)
        record |= {"unsynchronized_s": statistics.median(steps), "unsynchronized_by": by}
    # A rank that comes early waits inside of a collective: the rank that waits least shows how long it takes.
    least = min((rank.communication for rank in row.seen), key=lambda communication: communication.time_s)
    record |= {"communication_s": least.time_s, "overlap_fraction": least.overlap_fraction}
    if (base := baseline(row, rows)) and (theirs := min(rank.communication.time_s for rank in base.seen)):
        # How much shorter a step is than the baseline's, as a share of the time that the baseline communicates.
        record["improvement"] = (statistics.median(base.samples) - time_s) / theirs
    if seen.network is not None:
        latency, bandwidth = seen.network
        record |= {"latency_s": latency, "bandwidth_bytes_per_s": bandwidth}
        if seen.num_buckets and case.traits.all_reduce_model:
            record["predicted_exposed_s"] = ddp_overhead(
                ELEMENT_BYTES[case.comm_dtype] * model_parameters(case.config), seen.num_buckets, latency, bandwidth
            )
    return record


def baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row that `row` is compared with: one that is timed, has the same `stepped_by`, and the trait `baseline`.

    Of several it is the one with the greatest value of the trait; None if there is none.
    """
    alike = [other for other in rows if other.passes and other.case.stepped_by == row.case.stepped_by]
    return max(
        (other for other in alike if other.case.traits.baseline),
        key=lambda other: other.case.traits.baseline,
        default=None,
    )


def memory(row: Row) -> Record:
    """Fields about memory: the bytes of each kind on the rank that has the most of it, and what ZeRO predicts.

    The predictions are left out for a strategy without the trait `zero_stage`.
    """
    case, num_parameters = row.case, model_parameters(row.case.config)
    state_bytes = 8 * num_parameters  # two float32 moments of each; Muon's matrices have one
    if case.optimizer == "muon":
        state_bytes -= 4 * case.config.num_layers * block_matrices(case.config)
    record: Record = fields.largest([seen.memory for seen in row.seen])
    record["optimizer_fraction"] = record["optimizer_bytes"] / state_bytes
    if (stage := case.traits.zero_stage) is not None:
        predicted = zero_memory(num_parameters, case.world_size, max(stage, int(case.sharded_optimizer)))
        record |= {f"predicted_{name}_bytes": value for name, value in predicted.items()}
        # `zero_memory` predicts the state of AdamW.
        record["predicted_optimizer_bytes"] *= state_bytes / (8 * num_parameters)
    return record
