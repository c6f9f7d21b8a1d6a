"""A GPU that other programs use: what the clock saw there is no fault of a row. The GPU is a stub."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from lmsys.bench import Candidate, Field
from lmsys.bench.ranks import Ranks, times
from lmsys.measure import clock as clocks
from lmsys.measure.clock import CpuClock, CudaClock
from lmsys.measure.step import Step, nothing
from tests.support.device import FakeDevice
from tests.support.harness import Telling, cases_of, runner

STRANGER = 2**30


@dataclass
class Mark:
    at_s: float

    def elapsed_time(self, other: "Mark") -> float:
        return 1e3 * (other.at_s - self.at_s)


class StubbedGpuClock(CudaClock):
    """Reads as the clock of a GPU does; marks are taken by the host. Before calls the device is busy for `busy_s`."""

    warm_s, busy_s = 0.0, 0.01
    wait = drain = expect = forget = nothing
    cost = CpuClock.cost

    def __init__(self) -> None:
        self.ahead, self.name, self.share_s, self.others = True, "cuda_event", 0.0, nothing
        self._most_gap_s, self._marks, self._cpu = 1e-3, {}, CpuClock()

    def sample(self, run: Any, prepare: Any = nothing, late: Any = nothing) -> tuple[int, Any]:
        reading, result = self._cpu.sample(run, prepare, late)
        start = time.perf_counter() + self.busy_s
        marks = start - self.busy_s, start - self.busy_s, start, start + reading.run_s
        self._marks[number := len(self._marks)] = tuple(map(Mark, marks)), 0.0
        return number, result

    def shares(self, take: Any) -> dict[str, float]:
        return {}

    def watch(self) -> Callable[[], None]:
        return nothing


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "cuda_synchronize", nothing)


class Adding(Telling):
    fields = (Field("size", role="axis"),)


def measured(benchmark: Telling, others: list[int] | None, busy_s: float = 0.01) -> dict[str, dict[str, Any]]:
    """The records of a run on a device that these processes use."""
    one, device, clock = runner(), FakeDevice(), StubbedGpuClock()
    device.others, clock.busy_s = others, busy_s
    vars(one)["sensors"], vars(one)["clocks"] = device, {"device": clock}
    return {found.record["impl"]: found.record for found in one.run(benchmark, cases_of(benchmark))}


@pytest.mark.parametrize("others", [None, [], [os.getpid()]])
def test_on_a_gpu_of_its_own_a_row_before_whose_calls_the_device_was_busy_is_wrong(others: list[int] | None) -> None:
    for one in measured(Adding(), others).values():
        assert one["outcome"] == "wrong" and one["reason"].startswith("the device was busy for 10000 us right before")
        assert "time_s" not in one


def test_where_others_use_it_such_a_row_has_no_time_and_is_not_wrong() -> None:
    for one in measured(Adding(), [os.getpid(), STRANGER]).values():
        assert one["outcome"] == "error" and "time_s" not in one
        assert one["reason"].startswith("other programs used the device (processes: 1): the device was busy for 10000")


def test_others_that_have_gone_meanwhile_were_seen() -> None:
    device = FakeDevice()
    device.others = [os.getpid(), STRANGER]
    one = runner()
    vars(one)["sensors"], vars(one)["clocks"] = device, {"device": StubbedGpuClock()}
    one.conditions()
    device.others = [os.getpid()]
    assert one.clocks["device"].others() == 1 and one.conditions().strangers() == 0


def test_a_row_that_others_did_not_disturb_has_its_time() -> None:
    for one in measured(Adding(), [os.getpid(), STRANGER], busy_s=0.0).values():
        assert one["outcome"] == "ok" and one["time_s"] > 0


class WrongInTimedCalls(Adding):
    """Judges results while it samples."""

    def step(self, case: Any, candidate: Candidate, setup: Any) -> Step:
        def keep(*_: Any) -> None:
            raise WrongResult

        return Step(super().step(case, candidate, setup).run, keep=keep)


class WrongResult(Exception):
    failure = "wrong", "the sum is 3"


class WrongWhenJudged(Adding):
    """Keeps results of timed calls, and judges them behind the clock."""

    def step(self, case: Any, candidate: Candidate, setup: Any) -> Step:
        return Step(super().step(case, candidate, setup).run, keep=lambda result, key: None if key is None else result)

    def judge(self, case: Any, candidate: Candidate, setup: Any, kept: Any) -> Mapping[str, float]:
        return {"sum": 3.0}


@pytest.mark.parametrize("kind", [WrongInTimedCalls, WrongWhenJudged])
def test_a_result_that_is_judged_stays_wrong_whoever_uses_the_device(kind: type[Telling]) -> None:
    for busy_s in (0.0, 0.01)[: 1 + (kind is WrongInTimedCalls)]:
        for one in measured(kind(), [os.getpid(), STRANGER], busy_s).values():
            assert one["outcome"] == "wrong" and "other programs" not in one["reason"], one


class SharedDevice(FakeDevice):
    """On it are this rank, the process that `times` takes for that of the run, and strangers."""

    def __init__(self, strangers: int) -> None:
        super().__init__()
        self.others = [os.getpid(), os.getppid(), *range(STRANGER, STRANGER + strangers)]


class BusyClock(CpuClock):
    """A span of its calls took longer by the host's clock: as CudaClock says it."""

    def watch(self) -> Callable[[], None]:
        def done() -> None:
            raise clocks.ClockError("a span of calls took 1.0000 s by the device's clock", self.others())

        return done


def take_calls(strangers: int) -> list[float]:
    """On a rank: what a benchmark of ranks calls, by a clock that refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmsys.bench.ranks.clock_of", lambda kind, ahead: BusyClock())
        patch.setattr("lmsys.bench.ranks.sensors.sensors_of", lambda kind: SharedDevice(strangers))
        return times(Step(nothing), range(2), dist.group.WORLD)[0]


@pytest.fixture
def one_rank() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.mark.parametrize("strangers", [0, 2])
def test_ranks_say_it_too(strangers: int, one_rank: Ranks) -> None:
    candidate = Candidate(case=None)
    candidate.attempt(one_rank.run, 1, "gloo", take_calls, strangers)
    assert candidate.outcome == "error" and "a span of calls took 1.0000 s" in str(candidate.reason)
    assert ("other programs used the device (processes: 2)" in str(candidate.reason)) == bool(strangers)
