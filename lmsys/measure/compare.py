"""Callables sampled side by side, and what becomes of one that fails. Knows no kernel.

Under load the clock of a GPU moves, which swings a figure by up to a fifth, so rows measured minutes apart
cannot be compared. Here all rows of a comparison take turns (A B C, C A B, ...): round i of one ran beside
round i of the others, and a speedup is the median of the ratios round by round. The clock also depends on the row
just before: each round has an order of its own, or one row would always come after the hottest.

Every call has inputs of its own, drawn right before it, and what a few of them returned is kept: which ones is drawn
from the system's entropy when sampling begins, so that no row can know.
"""

import gc
import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lmsys.measure.clock import Clock, Cost, CpuClock, cuda_synchronize
from lmsys.measure.step import Step

Failure = tuple[str, str]  # outcome ("oom" or "error") and reason
MAX_ROUNDS = 500
MARGIN = 1.25  # launching takes now longer, now shorter
FIRST_LEAD_S = 0.02  # longer than the host takes to launch almost any call
NUM_KEPT = 3  # timed calls of a row that are checked
_ENTROPY = random.SystemRandom()


@dataclass(frozen=True)
class Kept:
    """A timed call that is checked afterwards: its number among the samples, its draw, copies of what it returned."""

    index: int
    draw: int
    result: Any


@dataclass
class Sampled:
    """samples in seconds and the calls that were kept, by row; rows that failed on the way; the median SM clock."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    kept: dict[str, list[Kept]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    sm_clock_mhz: float | None = None


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, Failure | None]:
    """(result of call(*args), None), or (None, outcome and reason) with the memory of the failed call released."""
    try:
        return call(*args), None
    except Exception as error:
        failure = outcome_of(error)
    release_memory()  # only here is the traceback gone, which held the call's tensors
    return None, failure


def outcome_of(error: Exception) -> Failure:
    """Out of memory is an outcome of its own, everything else an error; the reason is one line.

    An exception that knows better says so: its `failure` is the outcome and the reason.
    """
    if (known := getattr(error, "failure", None)) is not None:
        return known
    text = str(error).strip()
    no_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate" in text
    if no_memory:
        return "oom", ". ".join(text.splitlines()[0].split(". ")[:2]) if text else "out of memory"
    return "error", f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def interleave(
    steps: Mapping[str, Step],
    clock: Clock,
    *,
    seconds: float,
    min_rounds: int,
    trials: int = 3,
    sm_clock: Callable[[], float | None] = lambda: None,
) -> Sampled:
    """Samples of every step, in turns. Each row runs for about `seconds` of wall time and at least `min_rounds` rounds.

    A slow row stops after its last round while the others go on, so the lists differ in length; they start together,
    after rounds that only warm the device. Where the clock has the host ahead, it gets a lead of two rounds, and keeps
    it: where it needs longer for a round than the device, that waits. With another clock `before` comes before. What a
    row costs is known from the least of `trials` calls.
    """
    result, costs, rounds = Sampled(), {}, {}
    for name, step in steps.items():
        cost, failure = attempt(lambda step=step: _cost(step, clock, trials))
        if failure:
            result.failures[name] = failure
        else:
            costs[name] = cost
            rounds[name] = max(min_rounds, min(MAX_ROUNDS, int(seconds / max(cost.host_s, cost.device_s))))
    if not costs:
        return result
    pending: dict[str, list[Any]] = {name: [] for name in rounds}
    clocks = []
    reading = CpuClock().cost(sm_clock, 0)  # costs the host time as well
    warming = math.ceil(clock.warm_s / sum(cost.device_s for cost in costs.values()))
    checked = {name: _ENTROPY.sample(range(count), NUM_KEPT) for name, count in rounds.items()}
    result.kept = {name: [] for name in rounds}
    done = clock.watch()
    clock.wait(2 * sum(cost.host_s for cost in (reading, *costs.values())))
    for index in range(-warming, max(rounds.values())):
        taking_turns = [name for name, count in rounds.items() if index < count]
        if not taking_turns:
            break
        host_s = reading.host_s + sum(costs[name].host_s for name in taking_turns)
        clock.wait(MARGIN * host_s - sum(costs[name].device_s for name in taking_turns))
        for name in random.Random(index).sample(taking_turns, len(taking_turns)):
            draw, keep = _ENTROPY.getrandbits(53), index in checked[name]
            found, failure = attempt(_sample, steps[name], clock, draw, keep)
            if failure:
                result.failures[name] = failure
                del rounds[name], pending[name], result.kept[name]
                continue
            mark, kept = found
            pending[name].append(mark)
            if keep:
                result.kept[name].append(Kept(index, draw, kept))
        clocks.append(sm_clock())
    done()
    for name, marks in pending.items():
        samples, failure = attempt(clock.seconds, marks)
        if failure:
            result.failures[name] = failure
        else:
            result.samples[name] = samples[warming:]
    known = [reading for reading in clocks[warming:] if reading is not None]
    result.sm_clock_mhz = statistics.median(known) if known else None
    return result


def _sample(step: Step, clock: Clock, draw: int, keep: bool) -> Any:
    """(what the clock reads it by, what is kept of its result)."""
    if not clock.ahead:
        cuda_synchronize()
    step.redraw(draw)
    if not clock.ahead:
        step.before()
    prepared = step.prepare()
    step.redraw_late(draw)
    mark, found = clock.sample(partial(step.run, prepared))
    return mark, step.keep(found, keep) if step.keep else None


def _cost(step: Step, clock: Clock, calls: int) -> Cost:
    """The cost of one sample with its prepare: the least of a few, which also warm caches and clocks."""
    costs: list[Cost] = []
    for _ in range(calls):
        lead_s = 2 * costs[-1].host_s if costs else FIRST_LEAD_S
        costs.append(clock.cost(partial(_sample, step, clock, _ENTROPY.getrandbits(53), keep=False), lead_s))
    return Cost(min(cost.host_s for cost in costs), min(cost.device_s for cost in costs))
