"""One size, context, batch and precision of data parallel training put to the test: every strategy on every group."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from benchmarks.parallel_cells import COPY_ENGINES, TUNED, Cell
from benchmarks.parallel_gate import gate
from benchmarks.parallel_workbench import Seen, examine, network, take_pass, timed_under
from benchmarks.ranks import failure_of
from benchmarks.session import NOT_TIMED, Result, Settings
from benchmarks.trial import Judged, verdict
from lmsys.bench.record import Record, summarize, trim
from lmsys.cost.communication import ddp_overhead
from lmsys.cost.memory import zero_memory
from lmsys.cost.operations import model_flops, model_parameters
from lmsys.parallel import STRATEGIES

PASSES = {"gloo": 2, "nccl": 3}  # of each row, in turns: a GPU's clock moves, and rows are compared within a pass
MOST_STEPS = 50  # of a row in one pass
TUNED_CAPS = {"gloo": (1, 25), "nccl": (10, 25, 100, 400)}  # MiB, of torch DDP
CLOCKS = {"gloo": "perf_counter", "nccl": "cuda_event_steps"}
# Ours of ZeRO-1 keep their own gradients only.
ZERO_STAGE = {"zero1": 2, "copy_engine_zero1": 2, "torch_zero1": 1, "fsdp": 3, "torch_fsdp2": 3}


@dataclass
class Found(Judged):
    """What has been found out about a cell. passes: seconds of each step, of the slowest rank; alone: without sync."""

    seen: list[Seen] = field(default_factory=list)
    passes: list[list[float]] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    bucket_mb: float | None = None
    network: tuple[float, float] | None = None

    @property
    def samples(self) -> list[float]:
        """In turns of every pass: the first few, which are kept with a result, are of all of them."""
        return [one for together in zip(*self.passes, strict=True) for one in together]

    def failed(self, outcome: str, reason: str) -> None:
        super().failed(outcome, reason)
        self.passes, self.alone = [], []


def parallel_trial(cells: list[Cell], settings: Settings) -> Iterator[Result]:
    """A result for each cell of a group.

    In this order: each row alone is held to one process, tuned, and examined for memory and communication; then all
    are timed, pass after pass in turns; after the steps of a pass all ranks must have one model. When a user ends it
    while rows are timed, those that have samples enough have a result.
    """
    found = {cell.id: Found() for cell in cells}
    for number, cell in enumerate(sorted(cells, key=lambda cell: -cell.world_size), start=1):  # one start of ranks
        one = found[cell.id]
        if reason := cell.why_not():
            one.failed("unsupported", reason)
            continue
        start = time.perf_counter()
        _attempt(one, lambda cell=cell, one=one: _alone(cell, one, settings))
        told = one.outcome if one.reason is None else f"{one.outcome}: {one.reason}"
        settings.say(f"  [{number}/{len(cells)}] {cell.id}: {told}, {time.perf_counter() - start:.1f} s")
    interrupt = None
    if settings.timed:
        try:
            _passes(cells, found, settings)
        except KeyboardInterrupt as error:
            interrupt = error
            _even_out(list(found.values()))
    for cell in cells:
        one = found[cell.id]
        if interrupt is None or one.outcome != "ok" or len(one.samples) >= settings.min_rounds:
            yield _result(cell, found, settings)
    if interrupt is not None:
        raise interrupt


def _even_out(found: list[Found]) -> None:
    """Leaves every row the passes that all rows have, or that it alone has of the first."""
    complete = min((len(one.passes) for one in found if one.outcome == "ok"), default=0)
    for one in found:
        one.passes = one.passes[: max(1, complete)]


def _attempt(one: Found, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        one.failed(*failure_of(error))
    return None


def _run(cell: Cell, settings: Settings, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the ranks that take part return."""
    return settings.on_ranks(cell.world_size, cell.backend, function, cell, *args)


def _alone(cell: Cell, one: Found, settings: Settings) -> None:
    if cell.world_size > 1 and cell.entry.name != "none":
        one.error_ratio, wrong = verdict(_run(cell, settings, gate, settings.seed)[0], "float32")
        if wrong:
            one.failed(*wrong)
            return
    if not settings.timed:
        return
    if cell.entry.name == TUNED:
        caps = {
            cap: max(_run(_with(cell, cap), settings, timed_under, settings.seed)) for cap in TUNED_CAPS[cell.backend]
        }
        one.bucket_mb = min(caps, key=caps.__getitem__)
    one.seen = _run(_with(cell, one.bucket_mb), settings, examine, settings.seed)
    if not all(seen.finite for seen in one.seen):
        one.failed("wrong", "the loss holds NaN or inf after a few steps")
    one.network = _run(cell, settings, network)[0]


def _with(cell: Cell, bucket_mb: float | None) -> Cell:
    return cell if bucket_mb is None else replace(cell, bucket_mb=bucket_mb)


def _passes(cells: list[Cell], found: dict[str, Found], settings: Settings) -> None:
    passes = PASSES[cells[0].backend]
    good = [found[cell.id] for cell in cells if found[cell.id].outcome == "ok"]
    steps = min((_steps(one, settings, passes) for one in good), default=0)  # of every row as many: they are paired
    for number, cell in product(range(passes), cells):
        one = found[cell.id]
        if one.outcome != "ok":
            continue
        row, seed = _with(cell, one.bucket_mb), settings.seed + number
        answer = _attempt(one, lambda row=row, seed=seed: _run(row, settings, take_pass, seed, steps))
        if answer is None:
            continue
        samples, alone, models = zip(*answer, strict=True)
        one.passes.append([max(ranks) for ranks in zip(*samples, strict=True)])
        one.alone += map(max, zip(*alone, strict=True))
        if len(set(models)) > 1 and cell.entry.name != "none":
            one.failed("wrong", "after the timed steps ranks have different parameters")


def _steps(one: Found, settings: Settings, passes: int) -> int:
    """Of one pass: enough for the rounds asked for, and as many as fit the time."""
    slowest = max(seen.step_s for seen in one.seen)
    least = -(-settings.min_rounds // passes)
    return max(least, min(MOST_STEPS, int(settings.seconds_per_row / passes / slowest)))


def _result(cell: Cell, found: dict[str, Found], settings: Settings) -> Result:
    one, config = found[cell.id], cell.config
    samples = one.samples or None
    if one.outcome == "ok" and samples is None:
        one.reason = NOT_TIMED
    record: Record = {
        "id": cell.id,
        "benchmark": "data_parallel",
        "section": cell.section,
        "impl": cell.row,
        "strategy": cell.entry.name,
        "label": cell.entry.label or cell.entry.name,
        "peer": cell.entry.peer,
        "size": cell.size,
        **{name: getattr(config, name) for name in ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")},
        "num_parameters": model_parameters(config),
        "context": cell.context,
        "batch": cell.batch,
        "precision": cell.precision,
        "compile": cell.compile,
        "world_size": cell.world_size,
        "num_nodes": settings.ranks.num_nodes,
        "backend": cell.backend,
        "asked_bucket_mb": cell.bucket_mb,
        "comm_dtype": cell.comm_dtype or "float32",
        "sharded_optimizer": cell.sharded,
        "dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(cell.precision, "float32"),
        "direction": "step",
        "device": cell.device,
        "outcome": one.outcome,
        "reason": one.reason,
        "comparison": f"{cell.group} {settings.run}",
        "clock": CLOCKS[cell.backend],
        "error_ratio": one.error_ratio,
        "memory_limit_bytes": settings.memory_limit_bytes,
    }
    if samples and one.outcome == "ok":
        record |= summarize(samples) | {"samples_s": trim(samples)}
        record |= _rates(cell, record["time_s"]) | _communication(cell, one, found, record["time_s"])
        record |= _memory(cell, one)
    return Result(record, samples if one.outcome == "ok" else None)


def _rates(cell: Cell, time_s: float) -> Record:
    tokens = cell.world_size * cell.batch * cell.context
    flops = model_flops(cell.config, tokens=tokens, context=cell.context, mode="step")
    return {"tokens": tokens, "tokens_per_s": tokens / time_s, "flops": flops, "flops_per_s": flops / time_s}


def _communication(cell: Cell, one: Found, found: dict[str, Found], time_s: float) -> Record:
    """Of the step: what synchronizing adds (against the same step without, or `none` beside it), and what it takes."""
    record: Record = {
        "bucket_mb": one.seen[0].bucket_mb or one.bucket_mb,
        "num_buckets": one.seen[0].num_buckets,
        "timeline": [list(row) for row in one.seen[0].timeline],
    }
    single = _other(cell, found, 1, "none")
    if single:
        record["scaling_efficiency"] = statistics.median(single) / time_s
    if cell.world_size == 1 or cell.entry.name == "none":
        return record
    alone, by = (one.alone, "no_sync") if one.alone else (_other(cell, found, cell.world_size, "none"), "none")
    if alone:
        record |= {"unsynchronized_s": statistics.median(alone), "unsynchronized_by": by}
        record["exposed_s"] = time_s - record["unsynchronized_s"]
    # A rank that comes early waits inside of a collective: the one that waits least tells what that takes.
    last = min(one.seen, key=lambda seen: seen.communication_s)
    record |= {"communication_s": last.communication_s, "communication_fraction": last.communication_s / time_s}
    record["overlap_fraction"] = last.hidden_fraction
    naive = found.get(replace(cell, entry=STRATEGIES["naive"], bucket_mb=None, comm_dtype=None).id)
    if naive is not None and naive.samples:
        theirs = min(seen.communication_s for seen in naive.seen)
        record["improvement"] = (statistics.median(naive.samples) - time_s) / theirs if theirs else None
    if one.network is not None:
        latency, bandwidth = one.network
        record |= {"latency_s": latency, "bandwidth_bytes_per_s": bandwidth}
        if record["num_buckets"] and cell.entry.name not in COPY_ENGINES:  # what is fitted is an all-reduce of NCCL's
            total = 4 * model_parameters(cell.config)
            record["predicted_exposed_s"] = ddp_overhead(total, record["num_buckets"], latency, bandwidth)
    return record


def _other(cell: Cell, found: dict[str, Found], world_size: int, name: str) -> list[float]:
    """Samples of another row of the same trial."""
    other = replace(
        cell, world_size=world_size, entry=STRATEGIES[name], bucket_mb=None, comm_dtype=None, sharded=False
    )  # fmt: skip
    one = found.get(other.id)
    return one.samples if one is not None else []


def _memory(cell: Cell, one: Found) -> Record:
    """The largest of any rank, and what the accounting of ZeRO predicts for its stage."""
    record: Record = {name: max(seen.memory[name] for seen in one.seen) for name in one.seen[0].memory}
    own = max(seen.memory["optimizer_bytes"] for seen in one.seen)
    record["optimizer_fraction"] = own / (8 * model_parameters(cell.config))
    if cell.entry.name in list(STRATEGIES):
        stage = ZERO_STAGE.get(cell.entry.name, 1 if cell.sharded else 0)
        predicted = zero_memory(model_parameters(cell.config), cell.world_size, stage)
        record |= {f"predicted_{name}_bytes": value for name, value in predicted.items()}
    return record
