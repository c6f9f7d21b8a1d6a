"""One rank of a data-parallel training, ready to be timed, looked into and compared. Runs on the ranks."""

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.model_gate import RECOMPILE_LIMIT, Batch, autocast, build, matmuls
from benchmarks.model_workbench import LEARNING_RATE
from benchmarks.parallel_cells import FULLY_SHARDED, Cell
from benchmarks.parallel_profile import communication_of
from benchmarks.ranks import subgroup
from lmsys.measure import memory
from lmsys.measure.profile import register_kernels
from lmsys.model import Loss, TransformerLM
from lmsys.parallel.adapter import Adapter
from lmsys.parallel.alpha_beta import latency_and_bandwidth
from lmsys.parallel.group import device
from lmsys.parallel.sharded_optimizer import ShardedOptimizer
from lmsys.training.graph import WARM_UPS, GraphedGradients, on_capture_stream
from lmsys.training.optimizer import AdamW

P = ParamSpec("P")
T = TypeVar("T")
WARM_STEPS = {"cpu": 2, "cuda": 3}  # the first plans buckets, the second runs with them
_COMPILED: list[str] = []  # the group of cells whose graphs this rank holds


def options_of(cell: Cell) -> dict[str, Any]:
    """What the strategy of this cell is built with."""
    options: dict[str, Any] = {}
    if cell.bucket_mb is not None:
        options["bucket_mb"] = cell.bucket_mb
    if cell.comm_dtype is not None:
        options["comm_dtype"] = getattr(torch, cell.comm_dtype)
    if cell.entry.name in FULLY_SHARDED and cell.precision == "bf16":
        options["compute_dtype"] = torch.bfloat16
    return options


@contextmanager
def compiling(cell: Cell) -> Iterator[None]:
    """What is compiled meanwhile stays for the group's other rows and passes, whose blocks are the same, and then goes.

    torch would cut a block's graph by the buckets of a DDP that it is compiled in, and not where it finds it compiled.
    """
    if cell.group not in _COMPILED:
        _COMPILED[:] = [cell.group]
        torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, optimize_ddp=False):
        yield


def wrap(cell: Cell, model: TransformerLM, options: dict[str, Any]) -> Adapter:
    """The model's loss under the cell's strategy, compiled before where the cell asks for it.

    What is to be graphed is wrapped on the stream of recordings, which DDP keeps.
    """
    module = Loss(model if cell.compile == "eager" else model.compile_blocks(1))
    with on_capture_stream() if cell.compile == "graphed" else nullcontext():
        return Adapter(cell.entry.load(), module, subgroup(cell.world_size), **options)


class Gradients:
    """Forward, backward and synchronization of a strategy: call by call, or, once it is asked to, as one CUDA graph.

    Holds no reference to itself: a graph with NCCL's calls inside must go before the process group does.
    """

    def __init__(self, strategy: Adapter, precision: str):
        self.strategy = strategy
        kind = device().type

        def loss(*inputs: Tensor) -> Tensor:
            with autocast(precision, kind):
                return strategy(*inputs)

        self.loss = loss
        self._graph: GraphedGradients | None = None

    def record(self) -> None:
        """From the next call on it is a graph; that call records it."""
        warm_ups = getattr(self.strategy.wrapper, "warm_ups_before_graph", WARM_UPS)
        parameters = self.strategy.module.parameters()
        self._graph = GraphedGradients(self.loss, parameters, self.strategy.finish, warm_ups)

    @property
    def graphed(self) -> bool:
        """Whether a call replays a graph, or is to record it."""
        return self._graph is not None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The loss; the gradients are there and are the mean over ranks."""
        if self._graph is not None:
            return self._graph(*inputs)
        loss = self.loss(*inputs)
        loss.backward()
        self.strategy.finish()
        return loss.detach()


class Rig:
    """A model, its strategy, its optimizer and this rank's batch. Ranks begin with weights of their own."""

    def __init__(self, cell: Cell, seed: int):
        self.cell, self.device = cell, str(device())
        self.group = subgroup(cell.world_size)
        self.strategy = wrap(cell, build(cell.config, self.device, seed + dist.get_rank()), options_of(cell))
        self.data = Batch.draw(cell.config, cell.batch, self.device, seed + 1 + dist.get_rank())
        self.optimizer = self._optimizer()
        self.gradients = Gradients(self.strategy, cell.precision)

    def _optimizer(self) -> torch.optim.Optimizer:
        if self.cell.sharded:
            params = self.strategy.wrapper.parameters()
            return ShardedOptimizer(params, AdamW, self.group, lr=LEARNING_RATE)
        if self.cell.entry.name == "torch_fsdp2":  # its parameters are DTensors, which only torch's own takes
            fused = self.device != "cpu"
            return self.strategy.make_optimizer(torch.optim.AdamW, lr=LEARNING_RATE, fused=fused)
        return self.strategy.make_optimizer(AdamW, lr=LEARNING_RATE)

    def loss(self) -> Tensor:
        return self.gradients.loss(self.data.tokens, self.data.targets)

    def warm(self) -> None:
        """Everything is planned, compiled and recorded when this is done."""
        if self.cell.compile == "graphed":
            self.gradients.record()
        for _ in range(WARM_STEPS[device().type]):
            self.step()

    def step(self) -> Tensor:
        """The loss before it."""
        loss = self.gradients(self.data.tokens, self.data.targets)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def step_alone(self) -> None:
        """The same without synchronization; gradients of what was never synchronized go as they came."""
        with self.strategy.no_sync():
            self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def times(self, step: Callable[[], Any], count: int) -> list[float]:
        """Seconds of each of so many steps, one after another; on a CPU ranks begin each together."""
        if self.device == "cpu":
            samples = []
            for _ in range(count):
                dist.barrier(self.group)
                start = time.perf_counter()
                step()
                samples.append(time.perf_counter() - start)
            return samples
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for mark in marks[:-1]:
            mark.record()
            step()
        marks[-1].record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(marks[:-1], marks[1:], strict=True)]


def takes_part(cell: Cell) -> bool:
    """Whether this rank is of those; asked of every rank, since groups are made by all."""
    subgroup(cell.world_size)
    return dist.get_rank() < cell.world_size


def release() -> None:
    gc.collect()
    gc.freeze()  # what is left is code: the next collections, of which some fall into a timed step, pass it over
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def on_part(function: Callable[Concatenate[Cell, P], T]) -> Callable[Concatenate[Cell, P], T | None]:
    """The function on the ranks that take part, None on the others; what was there before it is released."""

    @wraps(function)
    def run(cell: Cell, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if not takes_part(cell):
            return None
        release()
        with matmuls(cell.precision), compiling(cell):
            return function(cell, *args, **kwargs)

    return run


@dataclass
class Seen:
    """What examining a row found on this rank. timeline: (what, start_s, end_s) of one step."""

    memory: dict[str, int]
    communication_s: float
    hidden_fraction: float | None
    timeline: list[tuple[str, float, float]]
    step_s: float
    bucket_mb: float | None
    num_buckets: int | None
    finite: bool


def _outside_bytes(rig: Rig) -> int:
    """Of GPU memory that a strategy holds and torch's allocator does not count."""
    return getattr(rig.strategy.wrapper, "outside_bytes", 0)


@on_part
def examine(cell: Cell, seed: int) -> Seen:
    """Memory, phase by phase, of a training from its beginning; then what communicates when, and how long a step is.

    The phases are those of what a graph records: its own memory is set aside as a whole.
    """
    kind = device().type
    made: dict[str, Any] = {}

    def init() -> None:
        made["rig"] = Rig(cell, seed)
        made["outside at init"] = _outside_bytes(made["rig"])

    def forward() -> None:
        made["loss"] = made["rig"].loss()

    def backward() -> None:
        made.pop("loss").backward()
        made["rig"].strategy.finish()

    def update() -> None:
        rig = made["rig"]
        rig.optimizer.step()
        # ZeroRedundancyOptimizer keeps its share in an optimizer of its own
        made["held"] = memory.breakdown(rig.strategy.wrapper, getattr(rig.optimizer, "optim", rig.optimizer))
        rig.optimizer.zero_grad(set_to_none=True)
        settle(rig)

    def first() -> None:
        forward(), backward(), update()

    phases = memory.phases(
        {"init": init, "first": first, "forward": forward, "backward": backward, "optimizer": update}, kind
    )
    rig, held = made["rig"], made["held"]
    for name, levels in phases.items():
        outside = made["outside at init"] if name == "init" else _outside_bytes(rig)
        for level in levels:
            levels[level] += outside
    found = {
        "init_bytes": phases["init"]["live_bytes"],
        "init_peak_bytes": phases["init"]["peak_bytes"],
        "before_step_peak_bytes": max(phases["forward"]["peak_bytes"], phases["backward"]["peak_bytes"]),
        "before_step_bytes": phases["backward"]["live_bytes"],
        "after_step_peak_bytes": phases["optimizer"]["peak_bytes"],
        "peak_bytes": max(phases[name]["peak_bytes"] for name in ("forward", "backward", "optimizer")),
        "activations_bytes": phases["forward"]["live_bytes"] - phases["first"]["live_bytes"],
        **held,
    }
    rig.warm()
    (seconds, *_) = sorted(rig.times(rig.step, 3))
    register_kernels(cell.entry.trait("kernels", ""), "communication")
    communication_s, hidden, timeline = communication_of(rig.step, lambda: settle(rig), rig.group, kind)
    finite = bool(rig.step().isfinite())
    wrapper = rig.strategy.wrapper
    buckets = getattr(wrapper, "buckets", None)
    size = getattr(wrapper, "bucket_mb", None)
    return Seen(
        found, communication_s, hidden, timeline, seconds,
        float(size) if size else None, len(buckets) if buckets else None, finite,
    )  # fmt: skip


def settle(rig: Rig) -> None:
    """Waits for what a step leaves under way, as ZeRO-1 its gather; what is recorded leaves nothing."""
    if not rig.gradients.graphed and hasattr(rig.strategy.wrapper, "wait"):
        rig.strategy.wrapper.wait()


@on_part
def take_pass(cell: Cell, seed: int, count: int) -> tuple[list[float], list[float], str]:
    """(seconds of each step, of each step without synchronization, what tells whether ranks have one model)."""
    rig = Rig(cell, seed)
    rig.warm()
    samples = rig.times(rig.step, count)
    model = fingerprint(rig.strategy)
    alone: list[float] = []
    if cell.world_size > 1 and can_stay_local(cell, rig):
        rig.step_alone()
        alone = rig.times(rig.step_alone, -(-count // 2))
    return samples, alone, model


def can_stay_local(cell: Cell, rig: Rig) -> bool:
    """Whether a step without synchronization is the same computation: not where ranks hold or step parts only, and not
    where it would be a recording of its own."""
    whole = not cell.sharded and not cell.entry.name.endswith(("zero1", "fsdp", "fsdp2"))
    return rig.strategy.can_stay_local and whole and cell.compile != "graphed"


def fingerprint(strategy: Adapter) -> str:
    """Of every bit of the parameters, as far as sums show it."""
    parts = [x.double().sum() for x in strategy.full_state_dict().values() if x.is_floating_point()]
    return hashlib.sha256(torch.stack(parts).cpu().numpy().tobytes()).hexdigest()


def network(cell: Cell) -> tuple[float, float] | None:
    """(o, w) of an all-reduce on the cell's ranks."""
    if not takes_part(cell) or cell.world_size == 1:
        return None
    return latency_and_bandwidth(subgroup(cell.world_size), device())


@on_part
def timed_under(cell: Cell, seed: int, count: int = 4) -> float:
    """Seconds of a step, the mean of a few: to choose among sizes of buckets."""
    rig = Rig(cell, seed)
    rig.warm()
    samples = rig.times(rig.step, count)
    return sum(samples) / len(samples)
