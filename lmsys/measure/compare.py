"""Callables sampled side by side, and what becomes of one that fails. Knows no kernel.

Under load the clock of a GPU moves, which swings a figure by up to a fifth, so rows measured minutes apart
cannot be compared. Here all rows of a comparison take turns (A B C, A B C, ...): round i of one ran beside
round i of the others, and a speedup is the median of the ratios round by round.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lmsys.measure.clock import Clock

Failure = tuple[str, str]  # outcome ("oom" or "error") and reason
MAX_ROUNDS = 500


@dataclass
class Step:
    """What is timed: `run(prepare())`, without the prepare."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass
class Sampled:
    """samples in seconds, by row; rows that failed on the way; the median SM clock meanwhile."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    sm_clock_mhz: float | None = None


def attempt(call: Callable[[], Any]) -> tuple[Any, Failure | None]:
    """(result, None), or (None, outcome and reason) with the memory of the failed call released."""
    try:
        return call(), None
    except Exception as error:
        failure = outcome_of(error)
    release_memory()  # only here is the traceback gone, which held the call's tensors
    return None, failure


def outcome_of(error: Exception) -> Failure:
    """Out of memory is an outcome of its own, everything else an error; the reason is one line."""
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
    sm_clock: Callable[[], float | None] = lambda: None,
) -> Sampled:
    """Samples of every step, in turns. Each row runs for about `seconds` of wall time and at least `min_rounds` rounds.

    A slow row stops after its last round while the others go on, so the lists differ in length; they start together.
    """
    result, rounds = Sampled(), {}
    for name, step in steps.items():
        per_call, failure = attempt(lambda step=step: _wall_time(step, clock))
        if failure:
            result.failures[name] = failure
        else:
            rounds[name] = min(MAX_ROUNDS, max(min_rounds, int(seconds / per_call)))
    pending: dict[str, list[Any]] = {name: [] for name in rounds}
    clocks = []
    for index in range(max(rounds.values(), default=0)):
        for name in [name for name, count in rounds.items() if index < count]:
            sample, failure = attempt(lambda name=name: _sample(steps[name], clock))
            if failure:
                result.failures[name] = failure
                del rounds[name], pending[name]
            else:
                pending[name].append(sample)
        clocks.append(sm_clock())
    result.samples = {name: clock.seconds(samples) for name, samples in pending.items()}
    known = [reading for reading in clocks if reading is not None]
    result.sm_clock_mhz = statistics.median(known) if known else None
    return result


def _sample(step: Step, clock: Clock) -> Any:
    prepared = step.prepare()
    return clock.sample(lambda: step.run(prepared))


def _wall_time(step: Step, clock: Clock, calls: int = 3) -> float:
    """Seconds that one sample takes, with its prepare: the fastest of a few, on the way to warm caches and clocks."""
    fastest = float("inf")
    for _ in range(calls):
        start = time.perf_counter()
        clock.seconds([_sample(step, clock)])
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
