"""The *ranks* of a run: processes, connected by torch.distributed, on which benchmarks of several processes run.

Benchmarks of collectives, data parallelism and training are such benchmarks. A *row* is an implementation under test.
Ranks are started when first needed, and started again after one has failed; under torchrun they are the processes that
torchrun has started. A benchmark calls `Ranks.ask` with a function that `on_part` decorates. The function runs on the
first `case.world_size` ranks, and `ask` returns the results by rank. New work for ranks is such a function, in the
benchmark's own folder.
"""

import gc
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from lmsys.bench.fields import Grid
from lmsys.bench.guard import Changed, Guard, State
from lmsys.measure import compare, memory, sensors
from lmsys.measure.clock import CYCLES_PER_S, clock_of
from lmsys.measure.step import Failed, Step, nothing
from lmsys.parallel.group import TorchrunGroup, WorkerError, WorkerGroup, device
from lmsys.watchdog import under_torchrun

P = ParamSpec("P")
T = TypeVar("T")
TIMEOUT_S = 420.0  # seconds after which ranks that do not answer are ended: 0.7 times the default of --deadline
PARENT = "LMSYS_PARENT"  # environment variable of ranks: id of the process that all processes of this run descend from
_ENTROPY = random.SystemRandom()  # no row can foresee or seed it


@cache
def joined() -> TorchrunGroup | None:
    """The group that torchrun has started, if this process is one of its ranks, else None."""
    return TorchrunGroup(timeout_s=TIMEOUT_S) if under_torchrun() else None


def backend_of(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


def num_nodes() -> int:
    """How many machines the ranks run on."""
    group = joined()
    return group.num_nodes if group is not None else 1


def world_sizes(grid: Grid, backend: str) -> list[int]:
    """The grid's numbers of ranks, in which 0 stands for all ranks that there are.

    There is one rank for each GPU, two on a CPU, and under torchrun as many as it has started. A number larger than
    that is left out if the sweep names it, and kept if the command line does (`grid.given`).
    """
    group, asked = joined(), "world_size" in grid.given
    most = group.world_size if group is not None else torch.cuda.device_count() if backend == "nccl" else 2
    return list(dict.fromkeys(size or most for size in grid["world_size"] if asked or size <= most))


class Ranks:
    """Holds one group of ranks at a time, each under the memory limit.

    memory_limit_bytes  the most that the GPU's allocator of each rank may give; None: no limit
    timeout_s  seconds after which ranks that do not answer are ended
    alive      called before each run, to extend the deadline of this process
    parent     id of the process that all processes of this run come from; default: this one
    """

    def __init__(
        self,
        memory_limit_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
        alive: Callable[[], Any] = nothing,
        parent: int | None = None,
    ) -> None:
        self._group: WorkerGroup | TorchrunGroup | None = joined()
        self._limit, self._timeout_s, self._alive = memory_limit_bytes, timeout_s, alive
        self._environment = {PARENT: str(parent or os.getpid())}

    def run(self, world_size: int, backend: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs function(*args) on all ranks. Returns the results of the first `world_size` ranks.

        Raises Failed, "unsupported", if there are fewer ranks, and WorkerError if a rank failed.
        """
        self._alive()
        try:
            group = self._ready(world_size, backend)
            if self._limit is not None:
                group.run(memory.cap_gpu_memory, self._limit)
            return group.run(function, *args)[:world_size]
        except WorkerError:
            if isinstance(self._group, WorkerGroup):  # it ends if one of its ranks fails; the next call starts another
                self._group = None
            raise

    def ask(self, case: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of function(case, *args) on the ranks of a case."""
        return self.run(case.world_size, case.backend, function, case, *args)

    def close(self) -> None:
        """Ends the ranks; the next call starts others."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _ready(self, world_size: int, backend: str) -> WorkerGroup | TorchrunGroup:
        """A group of `world_size` ranks or more with this backend: the present group if it fits, else a new one.

        Raises Failed, "unsupported", if torchrun's group does not fit, or if a new one cannot be started.
        """
        if self._group is not None and self._group.world_size >= world_size and self._group.backend == backend:
            return self._group
        if isinstance(self._group, TorchrunGroup):
            raise Failed(
                "unsupported",
                f"torchrun has started {self._group.world_size} ranks with {self._group.backend}: there are no"
                f" {world_size} with {backend}",
            )
        self.close()
        try:
            self._group = WorkerGroup(world_size, backend, self._timeout_s, environment=self._environment)
        except ValueError as error:
            raise Failed("unsupported", str(error)) from error
        return self._group


@cache
def subgroup(world_size: int) -> Any:
    """On a rank: the process group of the first `world_size` ranks. All ranks must call it."""
    return dist.group.WORLD if world_size == dist.get_world_size() else dist.new_group(range(world_size))


def takes_part(world_size: int) -> bool:
    """True on the first `world_size` ranks. All ranks must call it: making a process group is collective."""
    subgroup(world_size)
    return dist.get_rank() < world_size


def on_part(function: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T | None]:
    """Decorates a function of a case: it runs on the first `case.world_size` ranks, and returns None on the others.

    Raises RuntimeError if a row has replaced a function that judges it, and Changed if it has changed the process's
    state (`lmsys.bench.guard`).
    """

    @wraps(function)
    def run(case: Any, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        guard, state = Guard(), State()
        try:
            result = function(case, *args, **kwargs) if takes_part(case.world_size) else None
        finally:
            changes = state.mend()
            state.close()
        if changes:
            raise Changed("error", changes)
        if names := guard.mend():
            raise RuntimeError(f"a row replaced {', '.join(names)}, by which it is judged")
        return result

    return run


def times(
    step: Step,
    draws: Sequence[int],
    group: Any,
    *,
    keys: Mapping[int, int] | None = None,
    lead_s: float = 0.0,
    finish: Callable[[], Any] = nothing,
) -> tuple[list[float], dict[int, Any]]:
    """Times a step on a rank: (seconds of each call, {number of a call: what the step kept of it}).

    draws   a seed for the inputs of each call
    keys    {number of a call: the key that chooses which parts of its result are kept}; other calls keep nothing
    lead_s  seconds for which a GPU idles before the first call, while the host launches ahead
    finish  called after the last call: waits for work that this call may have left running. If the device works on
            even after that, ClockError is raised

    Drawing inputs before a call and keeping results after it are not timed. On a CPU, ranks begin each call together;
    on a GPU they do if `lead_s` is given, and else calls follow one another as in a training.
    """
    kind, kept = device().type, dict[int, Any]()
    clock, marks = clock_of(kind, ahead=False), list[Any]()
    clock.others = partial(_others, kind)
    # Before each call, on a CPU the processes wait for one another; on a GPU with `lead_s` the devices do, in an
    # all-reduce; without `lead_s` nobody waits.
    begin = partial(dist.barrier, group) if kind == "cpu" else _together(group) if lead_s else nothing
    begin()
    done = clock.watch()  # done() raises ClockError if the device's clock and the host's differ too much
    if kind == "cuda" and lead_s:
        torch.cuda._sleep(int(lead_s * CYCLES_PER_S))  # a kernel that does nothing for so many cycles
    for number, draw in enumerate(draws):
        step.redraw(draw)
        begin()
        mark, result = clock.sample(step.run, step.prepare)
        marks.append(mark)
        key = None if keys is None else keys.get(number)
        copies = step.keep(result, key)
        if key is not None:
            kept[number] = copies
    finish()
    done()
    return [reading.run_s for reading in clock.read(marks)], kept


def _others(kind: str) -> int | None:
    """The number of other programs' processes on this rank's device.

    Under torchrun, PARENT is not set. Then the processes that torchrun's agent, this process's parent, has started
    belong to the run.
    """
    return sensors.Conditions(sensors.sensors_of(kind), parent=int(os.environ.get(PARENT, os.getppid()))).strangers()


def _together(group: Any) -> Callable[[], Any]:
    """A function that makes the ranks' devices, and not their hosts, wait for one another."""
    token = torch.zeros(1, device=device())
    return lambda: dist.all_reduce(token, group=group)


def entropy() -> int:
    """A number that nobody can foresee, of 53 bits: the most that every reader of JSON holds exactly.

    Each rank gets another one. If all ranks need the same, the caller sends the first rank's to the others.
    """
    return _ENTROPY.getrandbits(53)


def slowest(samples: Iterable[Sequence[float]]) -> list[float]:
    """Seconds of each call on the rank that took longest for it; `samples` has the seconds of each rank's calls."""
    return list(map(max, zip(*samples, strict=True)))


def release() -> None:
    """Frees memory of earlier calls on a rank, and exempts all objects that stay from garbage collection."""
    compare.release_memory()
    gc.freeze()
