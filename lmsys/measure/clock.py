"""How long one call took: CUDA events on a GPU, `perf_counter` on a CPU.

What is timed may be hostile. The functions used here are those that stood when this file was imported, which is before
any row's file is. While a call runs no frame of Python holds its marks by name, and on a GPU what lies between the
marks is accounted for too: see `CudaClock.read`.
"""

import itertools
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.cuda import _sleep, current_stream, get_device_properties
from torch.cuda import synchronize as cuda_synchronize

from lmsys.measure.spans import spans_of
from lmsys.measure.step import nothing

CYCLES_PER_S = 2e9
LEAD_CYCLES = 10**6  # half a millisecond: the host launches a short call meanwhile, also under a profiler
SEPARATED = "spin_kernel", 1  # what stands twice before a bracketed call, and how many more kernels of the bench's own
SHORT_S = 1e-4  # of calls shorter than this the events' own share is measured one by one
NUM_SPANS = 20  # calls by which it is measured
SHARE_RANGE_S = (-1e-6, 3e-6)  # how far a call's share may be from that of a plain kernel: the rest is the call's own
_Event = torch._C._CudaEventBase  # without what Python adds to it, which can be replaced
_SLACK_S = 5e-5  # between two marks with nothing of ours between them, on a busy machine


class ClockError(RuntimeError):
    """Times that cannot be: something has meddled with the clock."""

    failure = property(lambda self: ("wrong", str(self)))


@dataclass(frozen=True)
class Cost:
    """Seconds that the host is busy with a call, and the device."""

    host_s: float
    device_s: float


@dataclass(frozen=True)
class Reading:
    """Seconds of one timed call, and of what was prepared for it just before."""

    run_s: float
    prepare_s: float


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

    share_s  what a pair of events adds to the span of the kernel between them, measured here by CUPTI when the clock is
             made, and taken off every reading; 0 for a loop, and where CUPTI cannot be had (`share_by` says)
    """

    warm_s = 0.1  # of load, until clocks settle under the power limit

    def __init__(self, ahead: bool = True) -> None:
        self.ahead, self.name = ahead, "cuda_event" if ahead else "cuda_event_in_a_loop"
        l2_bytes = get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cleared = torch.empty(max(2 * l2_bytes, 2**28) if ahead else 0, dtype=torch.int8, device="cuda")
        self._stream = current_stream()
        self._marks: dict[int, tuple[Any, ...]] = {}
        self._numbers = itertools.count()
        self.share_s, self.share_by, self._most_gap_s = 0.0, "not measured", float("inf")
        self.expect(nothing)
        if ahead:
            x = torch.zeros(2**20, device="cuda")
            found = self.shares({"plain": (lambda _: x.add_(1), nothing)})
            self.share_s, self.share_by = (found["plain"], "CUPTI") if found else (0.0, "no CUPTI here")

    def sample(
        self, run: Callable[[Any], Any], prepare: Callable[[], Any] = nothing, late: Callable[[], Any] = nothing
    ) -> tuple[int, Any]:
        """Enqueues one timed call, run(prepare()): the number by which `read` knows it, and what the call returned.

        late  work of the bench's own between the two, such as inputs that `prepare` must not see
        """
        number = next(self._numbers)
        self._marks[number] = tuple(_Event(enable_timing=True) for _ in range(4))
        begin, ready, start, end = (partial(mark.record, self._stream) for mark in self._marks[number])
        _, prepared, _ = in_turn(begin, prepare, ready)
        late()
        self._cleared.zero_()
        record = [end, start]
        del begin, ready, start, end
        _, result, _ = in_turn(record.pop(), partial(run, prepared), record.pop())
        return number, result

    def expect(self, late: Callable[[], Any]) -> None:
        """Learns how long the device takes for the bench's own work before a call, with this `late`."""
        numbers = [self.sample(nothing, late=late)[0] for _ in range(7)]
        cuda_synchronize()
        gaps = [_seconds(ready, start) for _, ready, start, _ in map(self._marks.pop, numbers)]
        self._most_gap_s = 1.5 * statistics.median(gaps) + _SLACK_S

    def read(self, pending: Sequence[int], share_s: float | None = None) -> list[Reading]:
        """The durations of what `sample` returned, in that order, less `share_s` (default: the clock's own).

        ClockError where the device was busy far longer before the calls' starts than its own work there takes: then
        the starts were recorded again later, or the calls' work ran there.
        """
        cuda_synchronize()
        share_s = self.share_s if share_s is None else share_s
        marks = [self._marks.pop(number) for number in pending]
        gaps = [_seconds(ready, start) for _, ready, start, _ in marks]
        if self.ahead and marks and (gap_s := statistics.median(gaps)) > self._most_gap_s:
            raise ClockError(
                f"the device was busy for {gap_s * 1e6:.0f} us right before the start of a call, where the bench's own "
                f"work takes at most {self._most_gap_s * 1e6:.0f}: the start was recorded again later, or the call's "
                "work ran before it"
            )
        return [
            Reading(max(_seconds(start, end) - share_s, 0.0), _seconds(begin, ready))
            for begin, ready, start, end in marks
        ]

    def forget(self, pending: Sequence[int]) -> None:
        for number in pending:
            del self._marks[number]

    def shares(self, steps: Mapping[str, tuple[Callable[[Any], Any], Callable[[], Any]]]) -> dict[str, float]:
        """What the pair of events adds to the span of the kernels between them, in seconds, by step: (run, prepare).

        A span, read by CUPTI, goes from the first kernel's start to the last one's end: gaps between the kernels of a
        step are in it. Of a step whose share is far from a plain kernel's it is the plain one's: what its own host code
        makes the device wait for is its own. Empty where CUPTI cannot be had.
        """
        pairs: dict[str, list[Any]] = {name: [] for name in steps}

        def call(name: str) -> None:
            run, prepare = steps[name]
            pairs[name].append(self.bracket(run, prepare))

        spans = spans_of([partial(call, name) for _ in range(NUM_SPANS) for name in steps], *SEPARATED)
        if not spans:
            return {}
        shares = {}
        for i, name in enumerate(steps):
            of_step = spans[i :: len(steps)]
            share = statistics.median(_seconds(*pair) - span for pair, span in zip(pairs[name], of_step, strict=True))
            if self.share_s:
                low, high = SHARE_RANGE_S
                share = share if low < share - self.share_s < high else self.share_s
            shares[name] = share
        return shares

    def bracket(self, run: Callable[[Any], Any], prepare: Callable[[], Any]) -> tuple[Any, Any]:
        """Enqueues a timed call as `sample` does, between kernels that sleep, with the host ahead: its two events.

        See SEPARATED. The host does not wait between calls: an event behind a queue that is short is quicker.
        """
        _sleep(LEAD_CYCLES)
        prepared = prepare()
        pair = _Event(enable_timing=True), _Event(enable_timing=True)
        record = [partial(mark.record, self._stream) for mark in reversed(pair)]
        _sleep(1)
        self._cleared.zero_()
        in_turn(record.pop(), partial(run, prepared), record.pop())
        return pair

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
        return Cost(host_s, _seconds(start, end))

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
            host_s, device_s = perf_counter() - begin, _seconds(start, end)
            if abs(host_s - device_s) > 0.02 * host_s + 1e-3:
                raise ClockError(
                    f"a span of calls took {device_s:.4f} s by the device's clock and {host_s:.4f} s by the host's"
                )

        return done


def _seconds(start: Any, end: Any) -> float:
    return float(start.elapsed_time(end)) / 1e3


class CpuClock:
    """Wall time in seconds by `time.perf_counter`."""

    name = "perf_counter"
    warm_s = 0.0
    ahead = True  # host and device are one
    share_s, share_by = 0.0, "nothing"

    def sample(
        self, run: Callable[[Any], Any], prepare: Callable[[], Any] = nothing, late: Callable[[], Any] = nothing
    ) -> tuple[Reading, Any]:
        begin, prepared, ready = in_turn(perf_counter, prepare, perf_counter)
        late()
        start, result, end = in_turn(perf_counter, partial(run, prepared), perf_counter)
        return Reading(end - start, ready - begin), result

    def expect(self, late: Callable[[], Any]) -> None:
        """Nothing."""

    def read(self, pending: Sequence[Reading], share_s: float | None = None) -> list[Reading]:
        return list(pending)

    def forget(self, pending: Sequence[Reading]) -> None:
        """Nothing."""

    def shares(self, steps: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def wait(self, seconds: float) -> None:
        """Nothing."""

    def cost(self, call: Callable[[], Any], lead_s: float) -> Cost:
        start, _, end = in_turn(perf_counter, call, perf_counter)
        return Cost(end - start, end - start)

    def watch(self) -> Callable[[], None]:
        return nothing


Clock = CudaClock | CpuClock


def clock_of(device: str, ahead: bool = True) -> Clock:
    return CudaClock(ahead) if device == "cuda" else CpuClock()


def timed(clock: Clock, call: Callable[[], Any], count: int = 1) -> list[float]:
    """Seconds of so many calls, one after another."""
    marks: list[Any] = [clock.sample(lambda _: call())[0] for _ in range(count)]
    return [one.run_s for one in clock.read(marks)]


def synchronize(device: str) -> None:
    """Wait until the device has done what was asked of it; a CPU always has."""
    if device == "cuda":
        cuda_synchronize()
