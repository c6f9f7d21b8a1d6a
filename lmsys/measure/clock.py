"""Clocks, which say how long one call took: by CUDA events on a GPU, by `perf_counter` on a CPU.

`lmsys.measure.compare` takes samples by one of the two clocks, which have the same methods: `sample` runs a call and
returns a *mark* of it, and `read` turns marks into seconds. Before a sample, `wait` keeps the device idle, so that the
host launches ahead of it. The bench makes clocks by `clock_of`. A clock for another device is a class with the methods
of `CpuClock`, and a case in `clock_of`.

The timed code, a *row*, may be anybody's, and may try to cheat. So the functions used here are imported with this file,
before any row's file could replace them, and no variable of a Python frame holds the CUDA events while a call runs. On
a GPU `CudaClock.read` also refuses samples of calls that began before their start was recorded.
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
from torch.profiler import ProfilerActivity, profile

from lmsys.measure.step import nothing
from lmsys.values import grouped


def spans_of(call: Callable[[], Any], separator: str, skipped: int = 0) -> list[float]:
    """The seconds on the device of each *span*: the kernels between two short kernels named `separator`, gaps included.

    The profiler (CUPTI) records the kernels while `call` runs. Separators come in pairs. Kernels that run between two
    pairs are left out, and so are the first `skipped` kernels of each span. The list is empty if CUPTI gives nothing,
    as when another profiler uses it, or if a kernel is missing. Only `CudaClock.beside_cupti` calls this function.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in recorded.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA")
    )
    groups: list[list[tuple[int, int]]] = []  # (start, end) of kernels; a group begins at each separator
    for start, end, name in kernels:
        if separator not in name:
            if groups:
                groups[-1].append((start, end))
        elif end - start < 20_000:  # ns; `CudaClock.wait` launches the same kernel for longer, which separates nothing
            groups.append([])
    spans = [group[skipped:] for group in groups[::2]]
    is_whole = len(groups) % 2 == 0 and all(spans)
    return [(max(end for _, end in span) - span[0][0]) / 1e9 for span in spans] if is_whole else []


CYCLES_PER_S = 2e9  # about a GPU's clock rate: turns seconds into the cycles that `_sleep` takes
SHORT_S = 1e-4  # for calls shorter than this, the time that the events themselves add is measured for each row
NUM_SPANS = 120  # how many calls measure that time: the error of a single call is up to 1 us
LEAD_S = 2e-3  # how long the device waits before timed calls, so that the host launches ahead, also under a profiler
_Event = torch._C._CudaEventBase  # not torch.cuda.Event, whose Python methods can be replaced


class ClockError(RuntimeError):
    """Raised for impossible times: the clock was tampered with, or `others` processes of other programs disturbed it.

    `compare.outcome_of` reads `failure`: the outcome is "error" if there were such processes, else "wrong".
    """

    def __init__(self, text: str, others: int | None = None):
        super().__init__(f"other programs used the device (processes: {others}): {text}" if others else text)
        self.failure = "error" if others else "wrong", str(self)


@dataclass(frozen=True)
class Cost:
    """How long a call keeps the host busy, and how long the device, in seconds."""

    host_s: float
    device_s: float


@dataclass(frozen=True)
class Reading:
    """How long a timed call took (`run_s`), and its untimed preparation just before (`prepare_s`), in seconds."""

    run_s: float
    prepare_s: float


def in_turn(*calls: Callable[[], Any]) -> list[Any]:
    """Calls the functions one after another, and returns their results.

    While one of them runs, no variable of a Python frame holds the others, so that a row cannot find and change them.
    """
    return list(map(operator.call, calls))


class CudaClock:
    """Times each call by two CUDA events around it, on the current stream; they are read later, after a synchronize.

    ahead  True: the host launches ahead of the device, so that the time is the device's alone. Before each call the
           device writes a buffer of 256 MiB, or of twice the L2 cache if that is more, so that no call finds its
           inputs in this cache.
           False: the clock of calls in a loop, such as training steps. Each call begins on an idle device, after
           `Step.before`. If the host launches more slowly than the device works, the time is the host's. It serves
           calls of more than about 1,000 launches: a device queues no more, so the host cannot be further ahead.

    others   a function that returns how many processes of other programs are on the device, or None if that is not
             known. `lmsys.bench` sets it; it is called when times are impossible
    share_s  the time that a pair of events adds to the kernel between them, in seconds, which is subtracted from every
             reading. CUPTI measures it when the clock is made; 0 in a loop or without CUPTI
    share_by  in words, how `share_s` was measured
    """

    warm_s = 0.1  # seconds of load until the device's clock rate settles under the power limit
    num_prepares = 7  # how often `compare` repeats a call's untimed preparation, to see how long it takes
    # Upper bound on how much longer a forward with autograd takes than one without. The untimed preparation of a
    # backward may be so much longer than its reference, a forward without autograd: see `compare._prepares_too_much`.
    saving_s = 5e-5

    def __init__(self, ahead: bool = True) -> None:
        self.ahead, self.name = ahead, "cuda_event" if ahead else "cuda_event_in_a_loop"
        l2_bytes = get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cleared = torch.empty(max(2 * l2_bytes, 2**28) if ahead else 0, dtype=torch.int8, device="cuda")
        self._stream = current_stream()
        # By mark: the call's events (begin, ready, start, end), and the seconds that the host took for the bench's own
        # work between `ready` and `start`. `prepare` runs from begin to ready, `run` from start to end.
        self._marks: dict[int, tuple[tuple[Any, ...], float]] = {}
        self._numbers = itertools.count()
        self._is_bracketed = False  # True: two short kernels stand around each call, for `spans_of` to find in a trace
        self.others: Callable[[], int | None] = nothing
        self.share_s, self.share_by, self._most_gap_s = 0.0, "not measured", float("inf")
        self.expect(nothing)
        if ahead:
            x = torch.zeros(2**20, device="cuda")
            spans = self.beside_cupti(lambda: [("plain", self._plain(x)) for _ in range(NUM_SPANS)])
            self.share_by = "CUPTI" if spans else "no CUPTI here"
            self.share_s = statistics.median(pair_s - span_s for _, pair_s, span_s in spans) if spans else 0.0

    def _plain(self, x: torch.Tensor) -> int:
        """Takes a sample of a call that launches one plain kernel, and returns its mark."""
        self.wait(LEAD_S)
        return self.sample(lambda _: x.add_(1))[0]

    def sample(
        self, run: Callable[[Any], Any], prepare: Callable[[], Any] = nothing, late: Callable[[], Any] = nothing
    ) -> tuple[int, Any]:
        """Enqueues one timed call, run(prepare()). Returns (its mark, a number; the result of the call).

        late  the bench's own work between `prepare` and `run`, such as filling in inputs that `prepare` must not see
        """
        number, marks = next(self._numbers), [_Event(enable_timing=True) for _ in range(4)]
        # Functions that record each event. Those of start and end are taken out of the list when they are used, so that
        # no variable holds them while the call runs.
        begin, ready, *record = (partial(mark.record, self._stream) for mark in marks)
        _, prepared, _ = in_turn(begin, prepare, ready)
        del begin, ready
        asked = perf_counter()
        late()
        if self._is_bracketed:
            _sleep(1)
        self._cleared.zero_()
        self._marks[number] = tuple(marks), perf_counter() - asked
        del marks
        _, result, _ = in_turn(record.pop(0), partial(run, prepared), record.pop())
        if self._is_bracketed:
            _sleep(1)
        return number, result

    def expect(self, late: Callable[[], Any]) -> None:
        """Measures how long the device takes for the bench's own work between `prepare` and `run`, with this `late`."""
        self.wait(LEAD_S)
        numbers = [self.sample(nothing, late=late)[0] for _ in range(7)]
        cuda_synchronize()
        gaps = [_seconds(ready, start) for (_, ready, start, _), _ in map(self._marks.pop, numbers)]
        # On a busy machine two events are up to 5e-5 s apart although nothing runs between them.
        self._most_gap_s = 1.5 * statistics.median(gaps) + 5e-5

    def read(self, pending: Sequence[int], share_s: float | None = None, trusted: bool = False) -> list[Reading]:
        """The durations of the calls with these marks, in order, less `share_s` (default: the clock's own).

        ClockError if the device was busy right before the calls' starts for far longer than the bench's own work there
        takes (`expect`): then a row has recorded the starts again later, or has run its work before them. `trusted`
        calls, which are the bench's own, are not checked.
        """
        cuda_synchronize()
        share_s = self.share_s if share_s is None else share_s
        known = [self._marks.pop(number) for number in pending]
        late_s = [_seconds(ready, start) - host_s for (_, ready, start, _), host_s in known]
        if self.ahead and known and not trusted and (gap_s := statistics.median(late_s)) > self._most_gap_s:
            raise ClockError(
                f"the device was busy for {gap_s * 1e6:.0f} us right before the start of a call, where the bench's own "
                f"work takes at most {self._most_gap_s * 1e6:.0f}: the start was recorded again later, the call's work "
                "ran before it, or another program uses the device",
                self.others(),
            )
        return [
            Reading(max(_seconds(start, end) - share_s, 0.0), _seconds(begin, ready))
            for (begin, ready, start, end), _ in known
        ]

    def forget(self, pending: Sequence[int]) -> None:
        """Drops marks that nobody will read."""
        for number in pending:
            del self._marks[number]

    def beside_cupti(self, take: Callable[[], Sequence[tuple[str, int]]]) -> list[tuple[str, float, float]]:
        """(name, seconds by the pair of events, seconds by CUPTI) for each call that `take` samples.

        take  samples calls and returns (name, mark) of each

        The seconds by CUPTI go from the start of a call's first kernel to the end of its last, gaps included. These
        calls differ from others only by two tiny kernels, one before the cache is cleared and one after the call. The
        list is empty where CUPTI is not available, or a call launches nothing.
        """
        taken: list[tuple[str, int]] = []
        self._is_bracketed = True
        try:
            # "spin_kernel" is the kernel of `_sleep`. The one kernel that is skipped is the one that clears the cache.
            spans = spans_of(lambda: taken.extend(take()), separator="spin_kernel", skipped=1)
        finally:
            self._is_bracketed = False
        pairs = [reading.run_s for reading in self.read([number for _, number in taken], share_s=0.0)]
        return list(zip([name for name, _ in taken], pairs, spans, strict=True)) if len(spans) == len(pairs) else []

    def shares(self, take: Callable[[], Sequence[tuple[str, int]]]) -> dict[str, float]:
        """{name: the time that the pair of events adds to the kernels between them, in seconds}.

        If this time is far from `share_s`, which was measured with a plain kernel, `share_s` is returned: the rest is a
        wait of the device that the row's host code causes, and counts as the row's time.

        take  as in `beside_cupti`
        """
        added_s = grouped((name, pair_s - span_s) for name, pair_s, span_s in self.beside_cupti(take))
        shares = {name: statistics.median(added) for name, added in added_s.items()}
        low, high = self.share_s - 1.5e-6, self.share_s + 3e-6  # how far a row's share may be from a plain kernel's
        return {name: share if low < share < high else self.share_s for name, share in shares.items()}

    def wait(self, seconds: float) -> None:
        """Lets the device idle while the host goes on: what the host launches meanwhile then runs without gaps."""
        if self.ahead and seconds > 0:
            _sleep(int(seconds * CYCLES_PER_S))

    def drain(self) -> None:
        """Waits until the device has done all that was launched."""
        cuda_synchronize()

    def cost(self, call: Callable[[], Any], lead_s: float) -> Cost:
        """The cost of a call. Before it the device waits `lead_s` seconds, a little more than launching should take."""
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
        """Begins to time many calls by the device's clock and by the host's. Returns a function to call at the end.

        That function raises ClockError if the two times differ by more than waits explain: waits of host and device for
        each other, and of both for another program that shares the device.
        """
        start, end = _Event(enable_timing=True), _Event(enable_timing=True)
        cuda_synchronize()
        begin = perf_counter()
        start.record(self._stream)

        def done() -> None:
            end.record(self._stream)
            cuda_synchronize()
            host_s, device_s = perf_counter() - begin, _seconds(start, end)
            if abs(host_s - device_s) > 0.02 * host_s + 1e-2:  # 1e-2 s: a few time slices of another program
                raise ClockError(
                    f"a span of calls took {device_s:.4f} s by the device's clock and {host_s:.4f} s by the host's",
                    self.others(),
                )

        return done


def _seconds(start: Any, end: Any) -> float:
    """The seconds between two recorded events."""
    return float(start.elapsed_time(end)) / 1e3


class CpuClock:
    """Wall time in seconds by `time.perf_counter`, with the methods of `CudaClock`; a mark is the `Reading` itself.

    A method that deals with the device's queue on a GPU does nothing here.
    """

    name = "perf_counter"
    warm_s = 0.0
    num_prepares = 3
    saving_s = 5e-4  # larger than on a GPU: here autograd's own work on the host counts, most of all if compiled
    ahead = True  # host and device are the same, so `compare` need not wait for a device
    share_s, share_by = 0.0, "nothing"
    others: Callable[[], int | None] = staticmethod(nothing)
    expect = forget = wait = drain = staticmethod(nothing)

    def sample(
        self, run: Callable[[Any], Any], prepare: Callable[[], Any] = nothing, late: Callable[[], Any] = nothing
    ) -> tuple[Reading, Any]:
        begin, prepared, ready = in_turn(perf_counter, prepare, perf_counter)
        late()
        start, result, end = in_turn(perf_counter, partial(run, prepared), perf_counter)
        return Reading(end - start, ready - begin), result

    def read(self, pending: Sequence[Reading], share_s: float | None = None, trusted: bool = False) -> list[Reading]:
        return list(pending)

    def shares(self, take: Callable[[], Any]) -> dict[str, float]:
        return {}

    def cost(self, call: Callable[[], Any], lead_s: float) -> Cost:
        start, _, end = in_turn(perf_counter, call, perf_counter)
        return Cost(end - start, end - start)

    def watch(self) -> Callable[[], None]:
        return nothing


Clock = CudaClock | CpuClock


def clock_of(device: str, ahead: bool = True) -> Clock:
    """A new clock for "cuda" or "cpu". ahead: as in `CudaClock`."""
    return CudaClock(ahead) if device == "cuda" else CpuClock()


def timed(clock: Clock, call: Callable[[], Any], count: int = 1) -> list[float]:
    """The seconds of each of `count` calls, which follow one another."""
    clock.wait(LEAD_S)
    marks: list[Any] = [clock.sample(lambda _: call())[0] for _ in range(count)]
    return [reading.run_s for reading in clock.read(marks, trusted=True)]


def synchronize(device: str) -> None:
    """Waits until the device has done all that was launched. For "cpu" it returns at once: nothing is left to do."""
    if device == "cuda":
        cuda_synchronize()


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """The seconds of one call by the host's clock, until the device has done it. It may include compilation."""
    start = perf_counter()
    call()
    synchronize(device)
    return perf_counter() - start
