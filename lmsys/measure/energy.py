"""Measures the energy of a call by the device's energy counter, and beside it by the integral of the device's power.

`lmsys.bench.trial` calls `of_step` for the option --energy. `lmsys.measure.machine.measure_sustained` uses `repeated`,
`sampling` and `calls_between`. No code here depends on a kernel; the constants below set durations and tolerances.

A device updates its counter once in a few milliseconds, or only ten times in a second: each update is a *move*. So the
call is repeated for a second or more, and the energy between the first and the last move is divided by the number of
calls between them. Calls before the first move that counts warm the device until power and clocks are steady. The
device works without a pause, except for a moment about every CHUNK_S, when the host waits for it, and where the host
launches more slowly than the device works.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from lmsys.measure.sensors import Sensors
from lmsys.measure.step import Failed, Step, nothing

# A pass repeats one call. PASS_S: the seconds of a pass that are measured. WARM_S: the seconds before that, which only
# warm the device; they last one second because some power sensors give the mean of the last second.
PASS_S, WARM_S = 1.5, 1.0
LONGER = 3  # passes take so many times as long if one is subtracted from another, as errors of both then add up
SAMPLE_S = 0.005  # seconds between two readings of the sensors
CHUNK_S = 0.05  # about the seconds of calls between two waits for the device, which idles then for a moment
APART = 0.03  # the largest relative difference of counter and integral of power at which both are believed

Mark = tuple[float, int]  # (a time by `perf_counter`, the number of calls that are done by then)


@dataclass(frozen=True)
class Sample:
    """One reading: when (`perf_counter`), the counter's joules, and the power in watts, None without a power sensor."""

    at_s: float
    joules: float
    watts: float | None


@dataclass(frozen=True)
class Energy:
    """Energy and time of one call, as means over many calls.

    joules      energy of a call by the counter
    integral_j  energy of a call by the integral of power; None without a sensor of power
    call_s      seconds from one call to the next
    calls       the number of calls that the means are over; a fraction, since it is interpolated
    """

    joules: float
    integral_j: float | None
    call_s: float
    calls: float

    def less(self, part: "Energy") -> "Energy":
        """The energy of a call minus that of `part`, which was measured alone. `Failed` where nothing is left."""
        rest = Energy(
            joules=self.joules - part.joules,
            integral_j=None
            if self.integral_j is None or part.integral_j is None
            else self.integral_j - part.integral_j,
            call_s=self.call_s - part.call_s,
            calls=self.calls,
        )
        if rest.joules <= 0 or rest.call_s <= 0 or (rest.integral_j is not None and rest.integral_j <= 0):
            raise Failed("error", f"the call takes less than can be told from its untimed part of {part.joules:.3g} J")
        return rest

    def record(self, tokens: int | None, disturbed: str | None = None) -> dict[str, Any]:
        """The fields on energy of a case's record.

        tokens     how many tokens a call works on; None: the record gets no energy per token
        disturbed  what disturbed the device meanwhile, as a clause; None: nothing
        """
        notes = self.doubt(), disturbed and f"while its energy was measured {disturbed}"
        return {
            "energy_j": self.joules,
            "energy_integral_j": self.integral_j,
            "energy_per_token_j": self.joules / tokens if tokens else None,
            "energy_power_w": self.joules / self.call_s,
            "energy_call_s": self.call_s,
            "energy_note": "; ".join(filter(None, notes)) or None,
        }

    def doubt(self) -> str | None:
        """A sentence on why the figure is to be doubted; None where both ways agree."""
        if self.integral_j is None:
            return "this energy is a counter's alone: there is no sensor of power to hold it against"
        if (apart := abs(self.joules / self.integral_j - 1)) > APART:
            return f"the counter says {self.joules:.4g} J, power over time {self.integral_j:.4g}: {apart:.1%} apart"
        return None


def of_step(step: Step, sensors: Sensors, synchronize: Callable[[], Any], seconds: float = PASS_S) -> Energy:
    """The energy of `run(prepare())` less that of `prepare()`, each in a pass of its own.

    A pass lasts `seconds` or more, LONGER times that if there is a `prepare`. `redraw` is not called: all calls of both
    passes read the inputs that the step has now.
    """
    seconds *= 1 if step.prepare is nothing else LONGER
    whole = of_call(step.once, sensors, synchronize, seconds)
    return whole if step.prepare is nothing else whole.less(of_call(step.prepare, sensors, synchronize, seconds))


def of_call(
    call: Callable[[], Any], sensors: Sensors, synchronize: Callable[[], Any], seconds: float, warm_s: float = WARM_S
) -> Energy:
    """The mean energy of calls that follow one another for `seconds` or more, between two moves of the counter.

    synchronize  waits until the device has done the calls
    warm_s       seconds of calls before the first move that counts
    `Failed` where the counter stands still, goes back, or rises by more than the power limit allows.
    """
    marks: list[Mark] = []
    call()  # the first one may compile
    synchronize()
    with sampling(lambda: Sample(perf_counter(), sensors.joules(), sensors.watts()), SAMPLE_S) as samples:
        begin_s = perf_counter() + warm_s
        for at_s in repeated(call, synchronize, marks):
            moves = moves_of(list(samples), begin_s)  # a copy, since the thread appends
            # A counter that moves seldom is waited for, but not for ever.
            if (len(moves) > 1 and moves[-1][0] - moves[0][0] >= seconds) or at_s > begin_s + 4 * seconds:
                break
    return energy_of(samples, marks, begin_s, sensors.limit_w)


def energy_of(samples: Sequence[Sample], marks: Sequence[Mark], begin_s: float, limit_w: float | None) -> Energy:
    """The energy of a call, from the counter's first to its last move between `begin_s` and the last mark.

    limit_w  the power limit in watts; None: not known. `Failed` as in `of_call`
    """
    samples = [sample for sample in samples if sample.at_s <= marks[-1][0]]
    moves = moves_of(samples, begin_s)
    if len(moves) < 2:
        raise Failed("error", f"the counter of energy has not moved twice in {marks[-1][0] - begin_s:.1f} s")
    for (before_s, before_j), (at_s, joules) in pairwise(moves):
        if joules < before_j:
            raise Failed("error", f"the counter of energy went back, from {before_j:.1f} to {joules:.1f} J")
        # A counter may lag, but by less than 0.3 s. So one move adds at most the energy that the power limit allows in
        # the time since the last move plus 0.3 s.
        if limit_w is not None and joules - before_j > limit_w * (at_s - before_s + 0.3):
            raise Failed(
                "error",
                f"the counter of energy jumped by {joules - before_j:.1f} J in {at_s - before_s:.3f} s, "
                f"where {limit_w:.0f} W are the limit",
            )
    (first_s, first_j), (last_s, last_j) = moves[0], moves[-1]
    calls = calls_between(marks, first_s, last_s)
    integral_j = _integral([sample for sample in samples if first_s <= sample.at_s <= last_s])
    return Energy(
        joules=(last_j - first_j) / calls,
        integral_j=None if integral_j is None else integral_j / calls,
        call_s=(last_s - first_s) / calls,
        calls=calls,
    )


def moves_of(samples: Sequence[Sample], begin_s: float) -> list[tuple[float, float]]:
    """The moves: (time, joules) of each sample after `begin_s` whose joules differ from those of the sample before."""
    pairs = pairwise(sample for sample in samples if sample.at_s >= begin_s)
    return [(sample.at_s, sample.joules) for before, sample in pairs if sample.joules != before.joules]


def _integral(samples: Sequence[Sample]) -> float | None:
    """Joules: the integral of power over time, linear between samples; None without a sensor of power."""
    if any(sample.watts is None for sample in samples):
        return None
    at_s, watts = np.array([(sample.at_s, sample.watts) for sample in samples], dtype=float).T
    return float((watts[1:] + watts[:-1]) / 2 @ np.diff(at_s))


def calls_between(marks: Sequence[Mark], begin_s: float, end_s: float) -> float:
    """The number of calls between two moments, interpolated between marks."""
    first, last = np.interp((begin_s, end_s), *zip(*marks, strict=True))
    return float(last - first)


def repeated(call: Callable[[], Any], synchronize: Callable[[], Any], marks: list[Mark]) -> Iterator[float]:
    """Repeats `call` without end, in chunks. After each, waits for the device, appends a `Mark` and yields its time.

    A chunk begins as one call, and doubles until it takes at least half of CHUNK_S.
    """
    chunk = 1
    synchronize()
    marks.append((perf_counter(), 0))
    while True:
        for _ in range(chunk):
            call()
        synchronize()
        marks.append((perf_counter(), marks[-1][1] + chunk))
        if marks[-1][0] - marks[-2][0] < CHUNK_S / 2:
            chunk *= 2
        yield marks[-1][0]


@contextmanager
def sampling(take: Callable[[], Any], every_s: float) -> Iterator[list[Any]]:
    """A context in which a thread calls `take` every `every_s` seconds.

    The context's value is a list, to which the thread appends each result of `take`. If `take` raises, the thread ends,
    and the context raises `Failed` when it is left.
    """
    taken, is_over = list[Any](), threading.Event()

    def sample() -> None:
        while not is_over.wait(every_s):
            taken.append(take())

    with ThreadPoolExecutor(1) as threads:
        sampled = threads.submit(sample)
        try:
            yield taken
        finally:
            is_over.set()
    if error := sampled.exception():
        raise Failed("error", f"a sensor failed: {error}") from error
