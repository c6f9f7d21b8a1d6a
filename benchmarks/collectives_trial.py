"""Collectives put to the test: their result, then their time through our calls and in a plain loop of torch's."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import default_world_size, failure_of, subgroup
from benchmarks.sections import CollectiveSection
from benchmarks.session import NOT_TIMED, Result, Settings
from lmsys.bench.record import Record, summarize, trim
from lmsys.cost.communication import bus_factor
from lmsys.measure.clock import CYCLES_PER_S
from lmsys.parallel import collectives
from lmsys.parallel.group import device

MAX_ROUNDS = 200
LEAD_S = 0.02  # that the host needs to launch MAX_ROUNDS calls
LOOP = 20  # calls of the plain loop
CLOCKS = {"gloo": "perf_counter", "nccl": "cuda_event_steps"}


@dataclass(frozen=True)
class Cell:
    """One test: an operation on so many megabytes over so many ranks."""

    section: str
    operation: str
    megabytes: int
    world_size: int
    backend: str

    @property
    def group(self) -> str:
        return f"{self.section}-W{self.world_size}-{self.backend}"

    @property
    def id(self) -> str:
        return f"{self.group}-{self.operation}-{self.megabytes}MB"

    @property
    def numel(self) -> int:
        """float32 elements of the whole tensor, a multiple of the world size."""
        return self.megabytes * 10**6 // 4 // self.world_size * self.world_size


def cells_of(section: CollectiveSection, world_sizes: tuple[int, ...], device: str) -> Iterator[Cell]:
    """For each backend, two ranks or more: as many as asked for, else those of the section that there can be."""
    for backend in section.backends or (("nccl", "gloo") if device == "cuda" else ("gloo",)):
        most = default_world_size(backend)
        sizes = world_sizes or [size or most for size in section.world_sizes if size <= most]
        for world_size in dict.fromkeys(size for size in sizes if size > 1):
            for operation, megabytes in product(section.operations, section.megabytes):
                yield Cell(section.name, operation, megabytes, world_size, backend)


def collectives_trial(cells: list[Cell], settings: Settings) -> Iterator[Result]:
    for cell in cells:
        yield _result(cell, settings)


def _result(cell: Cell, settings: Settings) -> Result:
    found, outcome, reason = None, "ok", None
    try:
        seconds = settings.seconds_per_row if settings.timed else 0.0
        answers = settings.ranks.run(
            cell.world_size, cell.backend, measure, cell, seconds, settings.min_rounds, settings.seed
        )
        found = answers[: cell.world_size]
        if wrong := [text for text, _, _ in found if text]:
            found, outcome, reason = None, "wrong", wrong[0]
        elif not settings.timed:
            found, reason = None, NOT_TIMED
    except Exception as error:
        outcome, reason = failure_of(error)
    samples = [max(times) for times in zip(*(times for _, times, _ in found), strict=True)] if found else None
    record: Record = {
        "id": cell.id,
        "benchmark": "collectives",
        "section": cell.section,
        "impl": cell.operation,
        "megabytes": cell.megabytes,
        "bytes": 4 * cell.numel,
        "world_size": cell.world_size,
        "backend": cell.backend,
        "dtype": "float32",
        "device": "cuda" if cell.backend == "nccl" else "cpu",
        "outcome": outcome,
        "reason": reason,
        "comparison": f"{cell.group} {settings.run}",
        "clock": CLOCKS[cell.backend],
        "memory_limit_bytes": settings.memory_limit_bytes,
    }
    if samples:
        record |= summarize(samples) | {"samples_s": trim(samples)}
        record["loop_s"] = max(loop for _, _, loop in found or ())
        record["algorithm_bytes_per_s"] = 4 * cell.numel / record["time_s"]
        record["bus_bytes_per_s"] = record["algorithm_bytes_per_s"] * bus_factor(cell.operation, cell.world_size)
        record["loop_fraction"] = record["loop_s"] / record["time_s"]  # of the plain loop's speed; 1 is as fast
    return Result(record, samples)


# What follows runs on the ranks.


def measure(cell: Cell, seconds: float, min_rounds: int, seed: int) -> tuple[str, list[float], float]:
    """(what is wrong, seconds of each call through ours, of a call in a plain loop of torch's)."""
    group = subgroup(cell.world_size)
    if dist.get_rank() >= cell.world_size:
        return "", [], 0.0
    x = _draw(cell, seed + dist.get_rank())
    call = _ours(cell, x, group)
    if wrong := _check(cell, call(), seed):
        return wrong, [], 0.0
    if not seconds:
        return "", [], 0.0
    plain = _plain(cell, x, group)
    loop = min(_loop(plain, group) for _ in range(2))
    rounds = torch.tensor(max(min_rounds, min(MAX_ROUNDS, int(seconds / loop))), device=device())
    dist.broadcast(rounds, 0, group=group)
    samples = _sample(call, int(rounds), group)
    return "", samples, min(loop, _loop(plain, group))


def _draw(cell: Cell, seed: int) -> Tensor:
    """Whole numbers, so that any order of addition gives the same sum."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(-8, 8, (2**16,), generator=generator).float()
    return few.to(device()).repeat(-(-cell.numel // len(few)))[: cell.numel].contiguous()


def _ours(cell: Cell, x: Tensor, group: Any) -> Callable[[], Tensor]:
    part = x.chunk(cell.world_size)[dist.get_rank()]
    out = torch.empty_like(part if cell.operation == "reduce_scatter" else x)

    def run() -> Tensor:
        if cell.operation == "all_reduce":
            collectives.all_reduce_mean(out, group, async_op=False).wait()
        elif cell.operation == "reduce_scatter":
            collectives.reduce_scatter_mean(out, x, group, async_op=False).wait()
        elif cell.operation == "all_gather":
            collectives.all_gather(out, part, group, async_op=False).wait()
        else:
            dist.broadcast(out, group=group, group_src=0)
        return out

    out.copy_(part if cell.operation == "reduce_scatter" else x)
    return run


def _plain(cell: Cell, x: Tensor, group: Any) -> Callable[[], Any]:
    """One call of torch.distributed, as its documentation has it."""
    part = x.chunk(cell.world_size)[dist.get_rank()].clone()
    out = torch.empty_like(x)
    average = dist.ReduceOp.AVG if cell.backend == "nccl" else dist.ReduceOp.SUM
    return {
        "all_reduce": lambda: dist.all_reduce(out.zero_() if cell.backend == "gloo" else out, average, group=group),
        "reduce_scatter": lambda: collectives._reduce_scatter(part, x, average, group=group),
        "all_gather": lambda: collectives._all_gather(out, part, group=group),
        "broadcast": lambda: dist.broadcast(out, group=group, group_src=0),
    }[cell.operation]


def _check(cell: Cell, found: Tensor, seed: int) -> str:
    every = [_draw(cell, seed + rank) for rank in range(cell.world_size)]
    if cell.operation in ("all_reduce", "reduce_scatter"):
        expected = torch.stack(every).sum(0) / cell.world_size
        if cell.operation == "reduce_scatter":
            expected = expected.chunk(cell.world_size)[dist.get_rank()]
    elif cell.operation == "all_gather":
        expected = torch.cat([x.chunk(cell.world_size)[rank] for rank, x in enumerate(every)])
    else:
        expected = every[0]
    if torch.allclose(found, expected):  # exact but for the division, by numbers like 3
        return ""
    return (
        f"rank {dist.get_rank()}: the result of {cell.operation} is off by {(found - expected).abs().max().item():.3g}"
    )


def _sample(call: Callable[[], Any], rounds: int, group: Any) -> list[float]:
    if device().type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        dist.barrier(group)
        torch.cuda._sleep(int(LEAD_S * CYCLES_PER_S))  # the host runs ahead: what is timed is the device
        for mark in marks[:-1]:
            mark.record()
            call()
        marks[-1].record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(marks[:-1], marks[1:], strict=True)]
    samples = []
    for _ in range(rounds):
        dist.barrier(group)
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return samples


def _loop(call: Callable[[], Any], group: Any) -> float:
    """Seconds of a call among LOOP, one after another, or fewer where that would take long; of the slowest rank."""
    seconds, calls = 0.0, 1
    for _ in range(2):  # once to see how long one takes
        dist.barrier(group)
        if device().type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device().type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor((time.perf_counter() - start) / calls, device=device())
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        seconds = slowest.item()
        calls = max(2, min(LOOP, int(0.3 / seconds)))
    return seconds
