"""Collectives: all-reduce, reduce-scatter, all-gather and broadcast, by size, number of ranks and backend.

The result of each is checked. Then it is timed through our own calls, and in a plain loop of torch's.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import axes
from lmsys.bench import (
    Axis,
    Benchmark,
    Case,
    Entry,
    Field,
    Grid,
    Record,
    Settings,
    Table,
    bench,
    fields,
    one_of,
    positive,
)
from lmsys.bench.ranks import CLOCKS, on_part, subgroup, times, world_sizes
from lmsys.cost.communication import bus_factor
from lmsys.measure.clock import synchronize
from lmsys.parallel import collectives
from lmsys.parallel.group import BACKENDS, device

MAX_ROUNDS = 200
LEAD_S = 0.02  # longer than the host needs to launch MAX_ROUNDS calls
LOOP, LOOP_S = 20, 0.3  # calls of the plain loop, fewer where they would take longer
OPERATIONS = Table(
    "operation",
    [
        Entry("all_reduce", "lmsys.parallel.collectives:all_reduce_mean", "all-reduce"),
        Entry("reduce_scatter", "lmsys.parallel.collectives:reduce_scatter_mean", "reduce-scatter"),
        Entry("all_gather", "lmsys.parallel.collectives:all_gather", "all-gather"),
        Entry("broadcast", "torch.distributed:broadcast", "broadcast"),
    ],
)


@dataclass(frozen=True)
class CollectiveCase(Case):
    """An operation on so many megabytes, of 10^6 bytes, over so many ranks."""

    megabytes: int
    world_size: int
    backend: str

    @property
    def comparison(self) -> str:
        return f"{self.section}-W{self.world_size}-{self.backend}"

    @property
    def id(self) -> str:
        return f"{self.comparison}-{self.impl}-{self.megabytes}MB"

    @property
    def numel(self) -> int:
        """float32 elements of the whole tensor, a multiple of the world size."""
        return self.megabytes * 10**6 // 4 // self.world_size * self.world_size


class Collectives(Benchmark):
    """Each operation is checked, and timed on the ranks; one after another, since they share the wires."""

    name = "collectives"
    case_type = CollectiveCase
    tables = {"operation": OPERATIONS}
    opens = False
    streams = True
    axes: tuple[Axis, ...] = (
        *axes.named("--world-size"),
        Axis("megabytes", positive),
        Axis("operation", one_of(*OPERATIONS), tuple(OPERATIONS)),
        Axis("backend", one_of(*BACKENDS)),
    )
    fields: tuple[Field, ...] = (
        Field("megabytes", label="MB", role="axis", about="Size of the whole tensor, float32, in MB of 10⁶ bytes"),
        Field("world_size", label="ranks", role="axis"),
        *fields.axes("backend"),
        fields.TIME.called(about="Median time of a call, of the slowest rank"),
        Field(
            "algorithm_bytes_per_s",
            "B/s",
            "Algorithm bandwidth",
            about="Algorithm bandwidth: bytes of the whole tensor over median time",
            shown="GB/s",
        ),
        Field(
            "bus_bytes_per_s",
            "B/s",
            "Bus bandwidth",
            about="Bus bandwidth: the bytes that a link of a ring carries over median time (all-reduce 2 (n - 1) / n, "
            "reduce-scatter and all-gather (n - 1) / n of the tensor)",
            shown="GB/s",
        ),
        Field(
            "loop_fraction",
            label="Of a plain loop",
            about="Time of a call in a loop of torch's own calls with one wait at its end, over the time of ours",
            shown="%",
        ),
        Field("loop_s", "s", "plain loop", "detail", "Time of a call in a plain loop of torch's own calls", shown="ms"),
        Field("bytes", "B", "size", "detail", shown="MiB"),
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[CollectiveCase]:
        """Two ranks or more, for each backend of the grid, else for each that this machine has."""
        for backend in grid["backend"] or (("nccl", "gloo") if settings.device == "cuda" else ("gloo",)):
            on, sizes = "cuda" if backend == "nccl" else "cpu", world_sizes(grid, backend)
            rows = OPERATIONS.select(grid["operation"])
            for size, operation, megabytes in product([one for one in sizes if one > 1], rows, grid["megabytes"]):
                yield CollectiveCase(grid.name, operation, on, megabytes, size, backend)

    def sample(self, turn: Sequence[CollectiveCase], trial: Any) -> None:
        """Checks the only case of the turn, and takes its samples: seconds of each call, of the slowest rank."""
        (case,) = turn
        settings, candidate = trial.settings, trial.candidate(case)
        arguments = case, settings.seconds_per_row if settings.timed else None, settings.min_rounds, settings.seed
        found = candidate.attempt(trial.runner.ranks.run, case.world_size, case.backend, measure, *arguments) or ()
        if wrong := [one[0] for one in found if one[0]]:
            candidate.failed("wrong", wrong[0])
        elif found and settings.timed:
            _, samples, loops = zip(*found, strict=True)
            trial.measurements[case.id].samples = [max(calls) for calls in zip(*samples, strict=True)]
            candidate.notes["loop_s"] = max(loops)

    def clock_name(self, case: CollectiveCase, runner: Any) -> str:
        return CLOCKS[case.backend]

    def metrics(self, case: CollectiveCase, record: Record, machine: Record) -> Record:
        found: Record = {"bytes": 4 * case.numel}
        if time_s := record.get("time_s"):
            found["algorithm_bytes_per_s"] = found["bytes"] / time_s
            found["bus_bytes_per_s"] = found["algorithm_bytes_per_s"] * bus_factor(case.impl, case.world_size)
            found["loop_fraction"] = record["loop_s"] / time_s
        return found


test_collectives = bench(Collectives)


# The rest runs on the ranks.


@on_part
def measure(case: CollectiveCase, seconds: float | None, min_rounds: int, seed: int) -> tuple[str, list[float], float]:
    """(what is wrong, else seconds of each call through ours, and of one in torch's plain loop), which both take about
    so many `seconds`; None: the operation is checked only."""
    group, x = subgroup(case.world_size), _draw(case, seed + dist.get_rank())
    call = _ours(case, x, group)
    wrong = _check(case, call(), seed)
    if wrong or seconds is None:
        return wrong, [], 0.0
    plain = _plain(case, x, group)
    calls = max(2, min(LOOP, int(LOOP_S / _loop(plain, 1, group))))
    loop = min(_loop(plain, calls, group) for _ in range(2))
    rounds = torch.tensor(max(min_rounds, min(MAX_ROUNDS, int(seconds / loop))), device=device())
    dist.broadcast(rounds, 0, group=group)
    samples = times(call, int(rounds), group, LEAD_S)
    return "", samples, min(loop, _loop(plain, calls, group))


def _draw(case: CollectiveCase, seed: int) -> Tensor:
    """Whole numbers, so that any order of addition gives the same sum."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(-8, 8, (2**16,), generator=generator).float()
    return few.to(device()).repeat(-(-case.numel // len(few)))[: case.numel].contiguous()


def _ours(case: CollectiveCase, x: Tensor, group: Any) -> Callable[[], Tensor]:
    operation, part = case.entry.load(), x.chunk(case.world_size)[dist.get_rank()]
    out = (part if case.impl == "reduce_scatter" else x).clone()
    sent = {"reduce_scatter": (x,), "all_gather": (part,)}.get(case.impl, ())

    def run() -> Tensor:
        if case.impl == "broadcast":
            operation(out, group=group, group_src=0)
        else:
            operation(out, *sent, group, async_op=False).wait()
        return out

    return run


def _plain(case: CollectiveCase, x: Tensor, group: Any) -> Callable[[], Any]:
    """One call of torch.distributed, as its documentation has it."""
    part = x.chunk(case.world_size)[dist.get_rank()].clone()
    out = torch.empty_like(x)
    average = dist.ReduceOp.AVG if case.backend == "nccl" else dist.ReduceOp.SUM
    return {
        "all_reduce": lambda: dist.all_reduce(out.zero_() if case.backend == "gloo" else out, average, group=group),
        "reduce_scatter": lambda: collectives._reduce_scatter(part, x, average, group=group),
        "all_gather": lambda: collectives._all_gather(out, part, group=group),
        "broadcast": lambda: dist.broadcast(out, group=group, group_src=0),
    }[case.impl]


def _check(case: CollectiveCase, found: Tensor, seed: int) -> str:
    """Says what is wrong with the result; empty where it is right."""
    every, rank = [_draw(case, seed + one) for one in range(case.world_size)], dist.get_rank()
    mean = sum(every) / case.world_size
    expected = {
        "all_reduce": mean,
        "reduce_scatter": mean.chunk(case.world_size)[rank],
        "all_gather": torch.cat([x.chunk(case.world_size)[one] for one, x in enumerate(every)]),
        "broadcast": every[0],
    }[case.impl]
    if torch.allclose(found, expected):  # exact but for the division, by numbers like 3
        return ""
    return f"rank {rank}: the result of {case.impl} is off by {(found - expected).abs().max().item():.3g}"


def _loop(call: Callable[[], Any], calls: int, group: Any) -> float:
    """Seconds of a call among so many, one after another; of the slowest rank."""
    dist.barrier(group)
    synchronize(device().type)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device().type)
    slowest = torch.tensor((time.perf_counter() - start) / calls, device=device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()
