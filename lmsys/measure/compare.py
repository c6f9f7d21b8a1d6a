"""Callables sampled side by side, and what becomes of one that fails. Knows no kernel.

Under load the clock of a GPU moves, which swings a figure by up to a fifth, so rows measured minutes apart
cannot be compared. Here all rows of a comparison take turns (A B C, C A B, ...): round i of one ran beside
round i of the others, and a speedup is the median of the ratios round by round. The clock also depends on the row
just before: each round has an order of its own, or one row would always come after the hottest.
"""

import gc
import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lmsys.measure.clock import Clock, Cost, CpuClock
from lmsys.measure.step import Step

Failure = tuple[str, str]  # outcome ("oom" or "error") and reason
MAX_ROUNDS = 500
MARGIN = 1.25  # launching takes now longer, now shorter
FIRST_LEAD_S = 0.02  # longer than the host takes to launch almost any call


@dataclass
class Sampled:
    """samples in seconds, by row; rows that failed on the way; the median SM clock meanwhile."""

    samples: dict[str, list[float]] = field(default_factory=dict)
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
    clock.wait(2 * sum(cost.host_s for cost in (reading, *costs.values())))
    for index in range(warming + max(rounds.values(), default=0)):
        taking_turns = [name for name, count in rounds.items() if index < warming + count]
        if not taking_turns:
            break
        host_s = reading.host_s + sum(costs[name].host_s for name in taking_turns)
        clock.wait(MARGIN * host_s - sum(costs[name].device_s for name in taking_turns))
        for name in random.Random(index).sample(taking_turns, len(taking_turns)):
            sample, failure = attempt(lambda name=name: _sample(steps[name], clock))
            if failure:
                result.failures[name] = failure
                del rounds[name], pending[name]
            else:
                pending[name].append(sample)
        clocks.append(sm_clock())
    result.samples = {name: clock.seconds(samples[warming:]) for name, samples in pending.items()}
    known = [reading for reading in clocks[warming:] if reading is not None]
    result.sm_clock_mhz = statistics.median(known) if known else None
    return result


def _sample(step: Step, clock: Clock) -> Any:
    if not clock.ahead:
        torch.cuda.synchronize()
        step.before()
    prepared = step.prepare()
    return clock.sample(lambda: step.run(prepared))


def _cost(step: Step, clock: Clock, calls: int) -> Cost:
    """The cost of one sample with its prepare: the least of a few, which also warm caches and clocks."""
    costs = [clock.cost(lambda: _sample(step, clock), FIRST_LEAD_S)]
    for _ in range(calls - 1):
        costs.append(clock.cost(lambda: _sample(step, clock), 2 * costs[-1].host_s))
    return Cost(min(cost.host_s for cost in costs), min(cost.device_s for cost in costs))
