"""How long one call took: CUDA events on a GPU, `perf_counter` on a CPU.

What is timed may be hostile. The functions used here are those that stood when this file was imported, which is before
any row's file is. While a call runs no frame holds its marks by name, and on a GPU what lies between the marks is
accounted for too: see `CudaClock.seconds`.
"""

import itertools
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.cuda import _sleep, current_stream, get_device_properties
from torch.cuda import synchronize as cuda_synchronize

CYCLES_PER_S = 2e9
_Event = torch._C._CudaEventBase  # without what Python adds to it, which can be replaced
_SLACK_S = 5e-5  # between two marks with nothing between them, on a busy machine


class ClockError(RuntimeError):
    """Times that cannot be: something has meddled with the clock."""

    failure = property(lambda self: ("wrong", str(self)))


@dataclass(frozen=True)
class Cost:
    """Seconds that the host is busy with a call, and the device."""

    host_s: float
    device_s: float


def in_turn(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return. While one runs, no frame of Python holds the others by name."""
    return list(map(operator.call, calls))


class CudaClock:
    """Seconds by an event pair around each call, on the current stream; read at the end, after one synchronize.

    ahead: the host launches ahead of the device, so that what is measured is the device's time alone, and before each
    call the device writes a buffer of at least twice the L2 cache, so that no call finds its inputs there. A device
    queues about 1,000 launches; of calls with more, measure the pace in a loop: each sample then begins on an idle
    device, with what comes before the call in a loop, and where the host launches more slowly than the device works,
    that is the time.
    """

    warm_s = 0.1  # of load, until clocks settle under the power limit

    def __init__(self, ahead: bool = True) -> None:
        self.ahead, self.name = ahead, "cuda_event" if ahead else "cuda_event_in_a_loop"
        l2_bytes = get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cleared = torch.empty(max(2 * l2_bytes, 2**28) if ahead else 0, dtype=torch.int8, device="cuda")
        self._stream = current_stream()
        self._marks: dict[int, tuple[Any, Any, Any]] = {}
        self._numbers = itertools.count()
        numbers = [self.sample(int)[0] for _ in range(11)]
        cuda_synchronize()
        clears = [self._marks[number][0].elapsed_time(self._marks[number][1]) / 1e3 for number in numbers]
        self._most_clear_s = 2 * statistics.median(clears) + _SLACK_S

    def sample(self, call: Callable[[], Any]) -> tuple[int, Any]:
        """Enqueues one timed call: the number by which `seconds` knows it, and what the call returned."""
        number = next(self._numbers)
        self._marks[number] = _Event(enable_timing=True), _Event(enable_timing=True), _Event(enable_timing=True)
        record = [partial(mark.record, self._stream) for mark in self._marks[number]]
        record[0]()
        self._cleared.zero_()
        _, result, _ = in_turn(record.pop(1), call, record.pop())
        return number, result

    def seconds(self, pending: Sequence[int]) -> list[float]:
        """The durations of what `sample` returned, in that order.

        ClockError where the device took far longer to clear its cache, before the call's start, than when the clock
        was made: then the start was recorded again later, or other work ran there.
        """
        cuda_synchronize()
        marks = [self._marks.pop(number) for number in pending]
        clears = [before.elapsed_time(start) / 1e3 for before, start, _ in marks]
        if marks and (clear_s := statistics.median(clears)) > self._most_clear_s:
            raise ClockError(
                f"the device was busy for {clear_s * 1e6:.0f} us between the end of what came before and the start of "
                f"a call, where clearing the cache takes at most {self._most_clear_s * 1e6:.0f}: the call's start "
                "was recorded again, or its work ran before it"
            )
        return [start.elapsed_time(end) / 1e3 for _, start, end in marks]

    def wait(self, seconds: float) -> None:
        """The device idles and the host goes on: what it launches then runs without gaps."""
        if self.ahead and seconds > 0:
            _sleep(int(seconds * CYCLES_PER_S))

    def cost(self, call: Callable[[], Any], lead_s: float) -> Cost:
        """The cost of a call when the device waits `lead_s` before it: best a little longer than launching takes."""
        start, end = _Event(enable_timing=True), _Event(enable_timing=True)
        cuda_synchronize()
        self.wait(lead_s)
        start.record(self._stream)
        begin = perf_counter()
        call()
        host_s = perf_counter() - begin
        end.record(self._stream)
        cuda_synchronize()
        return Cost(host_s, start.elapsed_time(end) / 1e3)

    def watch(self) -> Callable[[], None]:
        """Begins a span of many calls; call what it returns when they are done: ClockError where it cannot be.

        The span's time by the device is that by the host, give or take what they wait for one another.
        """
        start, end = _Event(enable_timing=True), _Event(enable_timing=True)
        cuda_synchronize()
        begin = perf_counter()
        start.record(self._stream)

        def done() -> None:
            end.record(self._stream)
            cuda_synchronize()
            host_s, device_s = perf_counter() - begin, start.elapsed_time(end) / 1e3
            if abs(host_s - device_s) > 0.02 * host_s + 1e-3:
                raise ClockError(
                    f"a span of calls took {device_s:.4f} s by the device's clock and {host_s:.4f} s by the host's"
                )

        return done


class CpuClock:
    """Wall time in seconds by `time.perf_counter`."""

    name = "perf_counter"
    warm_s = 0.0
    ahead = True  # host and device are one

    def sample(self, call: Callable[[], Any]) -> tuple[float, Any]:
        start, result, end = in_turn(perf_counter, call, perf_counter)
        return end - start, result

    def seconds(self, pending: Sequence[float]) -> list[float]:
        return list(pending)

    def wait(self, seconds: float) -> None:
        """Nothing."""

    def cost(self, call: Callable[[], Any], lead_s: float) -> Cost:
        duration, _ = self.sample(call)
        return Cost(duration, duration)

    def watch(self) -> Callable[[], None]:
        return lambda: None


Clock = CudaClock | CpuClock


def clock_of(device: str, ahead: bool = True) -> Clock:
    return CudaClock(ahead) if device == "cuda" else CpuClock()


def synchronize(device: str) -> None:
    """Wait until the device has done what was asked of it; a CPU always has."""
    if device == "cuda":
        cuda_synchronize()
