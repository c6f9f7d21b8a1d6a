"""Benchmarks on a GPU that other programs use, too: a disturbed time is an error, and does not make the row wrong.

If the device was busy right before a row's timed calls, the row itself may have left work there, and is "wrong" if the
device is its own; if strangers use the device, they may be the cause. The GPU is a stub, `StubbedGpuClock`, and
`FakeDevice.others` are the processes that use it; STRANGER is one that is not of the run.
"""

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from lmsys.bench import Candidate
from lmsys.bench.ranks import Ranks, times
from lmsys.bench.runner import Runner
from lmsys.measure import clock as clocks
from lmsys.measure import compare
from lmsys.measure.clock import CpuClock, CudaClock
from lmsys.measure.step import Step, nothing
from tests.support.device import FakeDevice
from tests.support.harness import Telling, cases_of, runner

STRANGER = 2**30


@dataclass
class Mark:
    """Takes the place of a recorded CUDA event."""

    at_s: float

    def elapsed_time(self, other: "Mark") -> float:
        return 1e3 * (other.at_s - self.at_s)


class StubbedGpuClock(CudaClock):
    """`CudaClock` without a GPU: its reading is under test, its events are times of the host's clock.

    They say that before each call the device was busy for `busy_s` seconds.
    """

    warm_s, busy_s = 0.0, 0.01
    wait = drain = expect = forget = nothing
    cost = CpuClock.cost

    def __init__(self) -> None:
        self.ahead, self.name, self.share_s, self.others = True, "cuda_event", 0.0, nothing
        self._most_gap_s, self._marks, self._cpu, self._numbers = 1e-3, {}, CpuClock(), itertools.count()

    def sample(self, run: Any, prepare: Any = nothing, late: Any = nothing) -> tuple[int, Any]:
        reading, result = self._cpu.sample(run, prepare, late)
        ready = time.perf_counter()
        start = ready + self.busy_s
        marks = ready - reading.prepare_s, ready, start, start + reading.run_s
        self._marks[number := next(self._numbers)] = tuple(map(Mark, marks)), 0.0
        return number, result

    def shares(self, take: Any) -> dict[str, float]:
        return {}

    def watch(self) -> Callable[[], None]:
        return nothing


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "cuda_synchronize", nothing)


def stubbed(others: list[int] | None, busy_s: float = 0.01) -> Runner:
    """A runner on a device that these processes use; None if the device does not tell them."""
    bench_runner, device, clock = runner(), FakeDevice(), StubbedGpuClock()
    device.others, clock.busy_s = others, busy_s
    vars(bench_runner).update(sensors=device, clocks={"device": clock})
    return bench_runner


def measured(benchmark: Telling, others: list[int] | None, busy_s: float = 0.01) -> list[dict[str, Any]]:
    """The records of all rows of a run on such a device."""
    return list(stubbed(others, busy_s).run(benchmark, cases_of(benchmark)))


BUSY = "the device was busy for 10000 us right before"


@pytest.mark.parametrize(
    ("others", "outcome", "reason"),
    [
        (None, "wrong", BUSY),
        ([], "wrong", BUSY),
        ([os.getpid()], "wrong", BUSY),
        ([os.getpid(), STRANGER], "error", f"other programs used the device (processes: 1): {BUSY}"),
    ],
)
def test_a_row_before_whose_calls_the_device_was_busy_is_wrong_if_it_alone_has_the_device(
    others: list[int] | None, outcome: str, reason: str
) -> None:
    for row in measured(Telling(), others):
        assert row["outcome"] == outcome and row["reason"].startswith(reason) and "time_s" not in row


def test_others_that_have_gone_meanwhile_were_seen() -> None:
    bench_runner = stubbed([os.getpid(), STRANGER])
    bench_runner.conditions()
    vars(bench_runner)["sensors"].others = [os.getpid()]
    assert bench_runner.clocks["device"].others() == 1 and bench_runner.conditions().strangers() == 0


def test_a_row_that_others_did_not_disturb_has_its_time() -> None:
    for row in measured(Telling(), [os.getpid(), STRANGER], busy_s=0.0):
        assert row["outcome"] == "ok" and row["time_s"] > 0


class PreparesTooMuch(Telling):
    """Has an untimed call before each timed one that takes 20 ms longer than its reference."""

    def step(self, case: Any, candidate: Candidate, setup: Any) -> Step:
        return replace(super().step(case, candidate, setup), prepare=partial(time.sleep, 0.02), like=lambda: None)


@pytest.mark.parametrize(
    ("others", "outcome", "reason"),
    [([os.getpid()], "wrong", "the untimed call"), ([STRANGER], "error", "other programs used the device (processes")],
)
def test_others_may_be_why_an_untimed_call_takes_long(others: list[int], outcome: str, reason: str) -> None:
    for row in measured(PreparesTooMuch(), [os.getpid(), *others], busy_s=0.0):
        assert (row["outcome"], row["reason"].startswith(reason)) == (outcome, True), row["reason"]
        assert "work that was to be timed was done there" in row["reason"]


class WrongInTimedCalls(Telling):
    """Finds a wrong result during the timed calls."""

    def step(self, case: Any, candidate: Candidate, setup: Any) -> Step:
        return Step(super().step(case, candidate, setup).run, keep=Mock(side_effect=WrongResult))


class WrongResult(Exception):
    failure = "wrong", "the sum is 3"


class WrongWhenJudged(Telling):
    """Keeps results of timed calls, and finds that they are wrong after the timing."""

    def step(self, case: Any, candidate: Candidate, setup: Any) -> Step:
        return Step(super().step(case, candidate, setup).run, keep=lambda result, key: None if key is None else result)

    def judge(self, case: Any, candidate: Candidate, setup: Any, kept: Any) -> Mapping[str, float]:
        return {"sum": 3.0}


@pytest.mark.parametrize("kind", [WrongInTimedCalls, WrongWhenJudged])
def test_a_result_that_is_judged_stays_wrong_whoever_uses_the_device(kind: type[Telling]) -> None:
    for busy_s in (0.0, 0.01)[: 1 + (kind is WrongInTimedCalls)]:  # the second only where the clock still runs
        for row in measured(kind(), [os.getpid(), STRANGER], busy_s):
            assert row["outcome"] == "wrong" and "other programs" not in row["reason"], row


class SharedDevice(FakeDevice):
    """A device that is used by strangers, this rank, and its parent, which `times` takes for the process of the run."""

    def __init__(self, strangers: int) -> None:
        super().__init__()
        self.others = [os.getpid(), os.getppid(), *range(STRANGER, STRANGER + strangers)]


class BusyClock(CpuClock):
    """Raises the error by which CudaClock says that a span of calls took another time by the host's clock."""

    def watch(self) -> Callable[[], None]:
        def done() -> None:
            raise clocks.ClockError("a span of calls took 1.0000 s by the device's clock", self.others())

        return done


def take_calls(strangers: int) -> list[float]:
    """On a rank: times a step, as a benchmark of ranks does, with a clock that refuses to give a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmsys.bench.ranks.clock_of", lambda kind, ahead: BusyClock())
        patch.setattr("lmsys.bench.ranks.sensors.sensors_of", lambda kind: SharedDevice(strangers))
        return times(Step(nothing), range(2), dist.group.WORLD)[0]


@pytest.mark.parametrize("strangers", [0, 2])
def test_ranks_say_it_too(strangers: int, two_ranks: Ranks) -> None:
    candidate = Candidate(case=None)
    candidate.watched = compare.attempt
    candidate.attempt(two_ranks.run, 1, "gloo", take_calls, strangers)
    assert candidate.outcome == "error" and "a span of calls took 1.0000 s" in str(candidate.reason)
    assert ("other programs used the device (processes: 2)" in str(candidate.reason)) == bool(strangers)
