"""Collectives: all-reduce, reduce-scatter, all-gather and broadcast, by size, number of ranks and backend.

The result of each operation is checked. Then the operation is timed twice: by calls of `lmsys.parallel.collectives`
("ours"), and by calls of torch.distributed in a plain loop. `measure` runs on the ranks, the processes that
communicate; `Collectives` calls it there, and makes the record. The runner calls the methods of `Collectives`: they
override hooks of `lmsys.bench.Benchmark`, which says when each is called and what it returns.

A new operation is a row of OPERATIONS, with torch's call in `_plain`, its right result in `Inputs.expected`, and a
factor in `lmsys.cost.communication.BUS_FACTORS`. If it averages over ranks, MEANS names it. If it takes other tensors
than all-reduce does, `Inputs` and `_ours` say which.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import axes, layouts
from lmsys import draws
from lmsys.bench import (
    Axis,
    Case,
    Entry,
    Field,
    Grid,
    OnRanks,
    Record,
    Settings,
    Step,
    Table,
    bench,
    fields,
    one_of,
    positive,
    ranks,
)
from lmsys.cost.communication import bus_factor
from lmsys.measure import clock
from lmsys.parallel import collectives
from lmsys.parallel.group import BACKENDS, device


@dataclass(frozen=True)
class CollectiveCase(Case):
    """An operation on a tensor of so many megabytes (10⁶ bytes each), on `world_size` ranks."""

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
        """The number of float32 elements of the whole tensor, a multiple of the world size."""
        return self.megabytes * 10**6 // 4 // self.world_size * self.world_size


MAX_ROUNDS = 200  # the most timed calls of an operation
LEAD_S = 0.05  # seconds that GPUs wait before the first call, more than the host needs to launch MAX_ROUNDS calls
MEANS = ("all_reduce", "reduce_scatter")  # operations that average over ranks


@ranks.on_part
def measure(case: CollectiveCase, seconds: float | None, min_rounds: int, seed: int) -> Record:
    """On a rank: checks and times an operation. Our calls take about `seconds` together; None: it is only checked.

    Returns `wrong`, and if the operation was timed also the other fields:

    wrong    what is wrong with a result; "" if nothing is
    samples  seconds of each of our calls
    loop_s   seconds of a call in torch's plain loop
    checked  (number, draw) of each timed call whose result was checked
    """
    group, inputs = ranks.subgroup(case.world_size), Inputs(case, seed)
    call = _ours(case, inputs, group)  # it returns `inputs.out`
    inputs.fill(seed)
    wrong = dict(_differences(inputs, {seed: call()})).get(seed, "")
    if seconds is None or any(collectives.gather_objects(wrong, group)):  # not timed if any rank has a wrong result
        return {"wrong": wrong}
    plain = _plain(case, torch.rand(case.numel, device=device()), group)
    calls = max(2, min(20, int(0.3 / _loop(plain, calls=1, group=group))))  # a loop takes about 0.3 s
    loop = min(_loop(plain, calls, group) for _ in range(2))
    # Rank 0 decides only now how many calls there are, and by which seed inputs are drawn: no row can know it before.
    plan = max(min_rounds, min(MAX_ROUNDS, int(seconds / loop))), random.Random(ranks.entropy())
    rounds, chance = collectives.gather_objects(plan, group)[0]
    drawn = [chance.getrandbits(53) for _ in range(rounds)]
    checked = sorted(chance.sample(range(rounds), min(3, rounds)))
    room = [torch.empty_like(inputs.out) for _ in checked]  # of copies: allocated before anything is timed

    def keep(result: torch.Tensor, key: int | None) -> torch.Tensor | None:
        return None if key is None else room.pop().copy_(result)

    samples, kept = ranks.times(
        Step(lambda _: call(), redraw=inputs.fill, keep=keep),
        drawn,
        group,
        keys=dict.fromkeys(checked, 0),  # `keep` copies the whole result, so any key but None does
        lead_s=LEAD_S,
    )
    loop = min(loop, _loop(plain, calls, group))
    for draw, text in _differences(inputs, {drawn[number]: result for number, result in kept.items()}):
        wrong = f"right before it was timed, not in timed call {drawn.index(draw)}: {text}"
    return {
        "wrong": wrong,
        "samples": samples,
        "loop_s": loop,
        "checked": [(number, drawn[number]) for number in checked],
    }


class Inputs:
    """This rank's input and output of the operation.

    drawn  the input, which the operation reads or changes
    out    the tensor that gets the result
    """

    def __init__(self, case: CollectiveCase, seed: int):
        self.case, self.seed, self.rank = case, seed, dist.get_rank()
        x = torch.zeros(case.numel, device=device())
        part = x.chunk(case.world_size)[self.rank]
        self.out = (part if case.impl == "reduce_scatter" else x).clone()
        self.drawn = {"reduce_scatter": x, "all_gather": part}.get(case.impl, self.out)
        self.fill = self.draws_of(self.rank, self.drawn)

    def draws_of(self, rank: int, x: torch.Tensor) -> Callable[[int], None]:
        """Returns fill(draw), which writes the input that `rank` has in that draw into x.

        Inputs are whole numbers of 16 bits, of both signs: in float32 their sum is exact in any order, but in a
        narrower dtype it is not. Each rank can compute the inputs of the others.
        """
        name = f"rank {rank}"
        stream = draws.Draws({name: x}, self.seed, below={name: 2**16})

        def fill(draw: int) -> None:
            stream.fill(draw)
            x.sub_(2**15)

        return fill

    def expected(self, drawn: Iterable[int]) -> dict[int, torch.Tensor]:
        """{draw: the right result on this rank}; for an operation in MEANS the sum over ranks, in place of the mean."""
        world_size, kind, x = self.case.world_size, self.case.impl, torch.empty_like(self.drawn)
        by_draw: dict[int, list[torch.Tensor]] = {draw: [] for draw in drawn}
        for sender in range(1 if kind == "broadcast" else world_size):
            fill = self.draws_of(sender, x)
            for draw, parts in by_draw.items():
                fill(draw)
                part = x.chunk(world_size)[self.rank] if kind == "reduce_scatter" else x
                if parts and kind in MEANS:
                    parts[0] += part
                else:
                    parts.append(part.clone())
        return {draw: torch.cat(parts) for draw, parts in by_draw.items()}


def _ours(case: CollectiveCase, inputs: Inputs, group: Any) -> Callable[[], torch.Tensor]:
    """A function that runs our operation on the inputs, waits for it, and returns its result."""
    operation, out = case.entry.load(), inputs.out
    sent = () if inputs.drawn is out else (inputs.drawn,)

    def run() -> torch.Tensor:
        if case.impl == "broadcast":
            operation(out, group=group, group_src=0)
        else:
            operation(out, *sent, group, async_op=False).wait()
        return out

    return run


def _plain(case: CollectiveCase, x: torch.Tensor, group: Any) -> Callable[[], Any]:
    """A function that makes one call of torch.distributed, as its documentation shows it.

    With gloo, which has no average, the call sums. all_reduce changes its tensor in place: with gloo the tensor is set
    to zeros before each call, since sums of sums would overflow.

    x  the whole tensor
    """
    part = x.chunk(case.world_size)[dist.get_rank()].clone()
    out = torch.empty_like(x)
    average = dist.ReduceOp.AVG if case.backend == "nccl" else dist.ReduceOp.SUM
    return {
        "all_reduce": lambda: dist.all_reduce(out.zero_() if case.backend == "gloo" else out, average, group=group),
        # These two are torch's functions, by the names that this version of torch has.
        "reduce_scatter": lambda: collectives._reduce_scatter(part, x, average, group=group),
        "all_gather": lambda: collectives._all_gather(out, part, group=group),
        "broadcast": lambda: dist.broadcast(out, group=group, group_src=0),
    }[case.impl]


def _differences(inputs: Inputs, results: Mapping[int, torch.Tensor]) -> Iterator[tuple[int, str]]:
    """Yields (draw, what is wrong with its result) for each result that is wrong. results: {draw: result}."""
    scale = inputs.case.world_size if inputs.case.impl in MEANS else 1
    for draw, expected in inputs.expected(results).items():
        # A right mean times the number of ranks is a whole number again, but for the rounding of the division.
        if (off := ((results[draw] * scale).round() - expected).abs().max().item() / scale) != 0:
            yield draw, f"rank {inputs.rank}: the result of {inputs.case.impl} is off by {off:.3g}"


def _loop(call: Callable[[], Any], calls: int, group: Any) -> float:
    """Seconds of one call, on the slowest rank, in a loop of `calls` calls with one wait at its end."""

    def all_calls() -> None:
        for _ in range(calls):
            call()

    dist.barrier(group)
    clock.synchronize(device().type)
    return max(collectives.gather_objects(clock.seconds_of(all_calls, device().type) / calls, group))


OPERATIONS = Table(
    "operation",
    [
        Entry("all_reduce", "lmsys.parallel.collectives:all_reduce_mean", "all-reduce"),
        Entry("reduce_scatter", "lmsys.parallel.collectives:reduce_scatter_mean", "reduce-scatter"),
        Entry("all_gather", "lmsys.parallel.collectives:all_gather", "all-gather"),
        Entry("broadcast", "torch.distributed:broadcast", "broadcast"),
    ],
)


class Collectives(OnRanks):
    """Checks and times each operation on the ranks, one operation after another, since they share links."""

    name = "collectives"
    layout = layouts.COLLECTIVES
    case_type = CollectiveCase
    tables = {"operation": OPERATIONS}
    streams = True
    axes: tuple[Axis, ...] = axes.named(
        "--world-size",
        Axis("megabytes", positive),
        Axis("operation", one_of(*OPERATIONS), tuple(OPERATIONS)),
        Axis("backend", one_of(*BACKENDS)),
    )
    fields: tuple[Field, ...] = fields.columns(
        Field("megabytes", label="MB", role="axis", about="Size of the whole tensor, float32, in MB of 10⁶ bytes"),
        Field("world_size", label="ranks", role="axis"),
        "backend",
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
        fields.ERROR.called(role="detail"),  # 0: results are exact
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[CollectiveCase]:
        """Cases on two ranks or more, for each backend of the grid, or by default each that this machine has."""
        for backend in grid["backend"] or (("nccl", "gloo") if settings.device == "cuda" else ("gloo",)):
            on, sizes = "cuda" if backend == "nccl" else "cpu", ranks.world_sizes(grid, backend)
            for size, operation, megabytes in product(
                [size for size in sizes if size > 1], OPERATIONS.select(grid["operation"]), grid["megabytes"]
            ):
                yield CollectiveCase(grid.name, operation, on, megabytes, size, backend)

    def contends(self, case: CollectiveCase) -> bool:
        return False  # each row is another operation

    def sample(self, turn: Sequence[CollectiveCase], trial: Any) -> None:
        """Checks and times the only case of the turn. A sample is the time of a call on the slowest rank."""
        (case,) = turn
        settings, candidate, measurement = trial.settings, trial.candidate(case), trial.measurements[case.id]
        answers: list[Record] | None = candidate.attempt(
            trial.runner.ranks.ask,
            case,
            measure,
            settings.seconds_per_row if settings.timed else None,
            settings.min_rounds,
            settings.seed,
        )
        if wrong := [answer["wrong"] for answer in answers or () if answer["wrong"]]:
            candidate.failed("wrong", wrong[0])
        elif answers and settings.timed:
            measurement.samples = ranks.slowest(answer["samples"] for answer in answers)
            measurement.proof += [
                {"call": number, "draw": draw, "error_ratios": {"result": 0.0}}
                for number, draw in answers[0]["checked"]
            ]
            candidate.judge({"result": 0.0})
            candidate.notes["loop_s"] = max(answer["loop_s"] for answer in answers)

    def metrics(self, case: CollectiveCase, record: Record, machine: Record) -> Record:
        work, time_s = {"bytes": 4 * case.numel}, record.get("time_s")
        if not time_s:
            return work
        rate = work["bytes"] / time_s
        return work | {
            "algorithm_bytes_per_s": rate,
            "bus_bytes_per_s": rate * bus_factor(case.impl, case.world_size),
            "loop_fraction": record["loop_s"] / time_s,
        }


test_collectives = bench(Collectives)
