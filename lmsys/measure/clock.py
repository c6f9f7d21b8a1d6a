"""How long one call took: CUDA events on a GPU, `perf_counter` on a CPU.

`lmsys.measure.compare` takes samples by one of the two clocks, which have the same methods: `sample` gives a mark per
call, and `read` turns marks into seconds. What is timed may be hostile. So the functions used here are taken when this
file is imported, before any row's file is. While a call runs, no frame of Python holds its marks by name. On a GPU the
time between the marks is accounted for, too: see `CudaClock.read`.
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


def spans_of(call: Callable[[], Any], separator: str, skipped: int = 0) -> list[float]:
    """Seconds, gaps included, of what runs on the device between each two short kernels named `separator`.

    Separators come in pairs. What runs between pairs is left out, and so are the first `skipped` kernels of each span.
    The list is empty if CUPTI gives nothing, as when another profiler has it, or if a kernel is missing.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in recorded.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA")
    )
    groups: list[list[tuple[int, int]]] = []  # one begins at each separator
    for start, end, name in kernels:
        if separator not in name:
            if groups:
                groups[-1].append((start, end))
        elif end - start < 20_000:  # ns; the same kernel for longer is a wait, and stands for nothing
            groups.append([])
    spans = [group[skipped:] for group in groups[::2]]
    is_whole = len(groups) % 2 == 0 and all(spans)
    return [(max(end for _, end in span) - span[0][0]) / 1e9 for span in spans] if is_whole else []


CYCLES_PER_S = 2e9
SHORT_S = 1e-4  # of calls shorter than this the events' own share is measured row by row
NUM_SPANS = 120  # calls by which it is measured; each is off by up to 1 us, in two heaps
LEAD_S = 2e-3  # the host launches some calls meanwhile, also under a profiler
_Event = torch._C._CudaEventBase  # without what Python adds to it, which can be replaced


class ClockError(RuntimeError):
    """Times that cannot be: something has meddled with the clock, unless `others`, so many processes of other programs,
    were seen on the device."""

    def __init__(self, text: str, others: int | None = None):
        super().__init__(f"other programs used the device (processes: {others}): {text}" if others else text)
        self.failure = "error" if others else "wrong", str(self)


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
    """The results of the calls, one after another. While one runs, no frame of Python holds the others by name."""
    return list(map(operator.call, calls))


class CudaClock:
    """Seconds by an event pair around each call, on the current stream; read at the end, after one synchronize.

    ahead: the host launches ahead of the device, so that what is measured is the device's time alone, and before each
    call the device writes a buffer of at least twice the L2 cache, so that no call finds its inputs there. A device
    queues about 1,000 launches; of calls with more, measure the pace in a loop: each sample then begins on an idle
    device, with what comes before the call in a loop, and where the host launches more slowly than the device works,
    that is the time.

    others   how many processes of other programs are on the device, or None: asked where times cannot be
    share_s  what a pair of events adds to the span of the kernel between them, measured here by CUPTI when the clock is
             made, and taken off every reading; 0 for a loop, and where CUPTI cannot be had (`share_by` says)
    """

    warm_s = 0.1  # of load, until clocks settle under the power limit
    num_prepares = 7  # taken again, where what a prepare may take is looked at
    saving_s = 5e-5  # upper bound on how much longer a forward with autograd takes than one without

    def __init__(self, ahead: bool = True) -> None:
        self.ahead, self.name = ahead, "cuda_event" if ahead else "cuda_event_in_a_loop"
        l2_bytes = get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cleared = torch.empty(max(2 * l2_bytes, 2**28) if ahead else 0, dtype=torch.int8, device="cuda")
        self._stream = current_stream()
        self._marks: dict[int, tuple[tuple[Any, ...], float]] = {}
        self._numbers = itertools.count()
        self._is_bracketed = False
        self.others: Callable[[], int | None] = nothing
        self.share_s, self.share_by, self._most_gap_s = 0.0, "not measured", float("inf")
        self.expect(nothing)
        if ahead:
            x = torch.zeros(2**20, device="cuda")
            spans = self.beside_cupti(lambda: [("plain", self._plain(x)) for _ in range(NUM_SPANS)])
            self.share_by = "CUPTI" if spans else "no CUPTI here"
            self.share_s = statistics.median(pair_s - span_s for _, pair_s, span_s in spans) if spans else 0.0

    def _plain(self, x: torch.Tensor) -> int:
        self.wait(LEAD_S)
        return self.sample(lambda _: x.add_(1))[0]

    def sample(
        self, run: Callable[[Any], Any], prepare: Callable[[], Any] = nothing, late: Callable[[], Any] = nothing
    ) -> tuple[int, Any]:
        """Enqueues one timed call, run(prepare()): the number by which `read` knows it, and what the call returned.

        late  work of the bench's own between the two, such as inputs that `prepare` must not see
        """
        number, marks = next(self._numbers), [_Event(enable_timing=True) for _ in range(4)]
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
        """Learns how long the device takes for the bench's own work before a call, with this `late`."""
        self.wait(LEAD_S)
        numbers = [self.sample(nothing, late=late)[0] for _ in range(7)]
        cuda_synchronize()
        gaps = [_seconds(marks[1], marks[2]) for marks, _ in map(self._marks.pop, numbers)]
        # On a busy machine two marks are 5e-5 s apart by themselves.
        self._most_gap_s = 1.5 * statistics.median(gaps) + 5e-5

    def read(self, pending: Sequence[int], share_s: float | None = None, trusted: bool = False) -> list[Reading]:
        """The durations of what `sample` returned, in that order, less `share_s` (default: the clock's own).

        ClockError, unless the calls are the bench's own, where the device was busy far longer before the calls' starts
        than its own work there takes, and than the host made it wait: then the starts were recorded again later, or the
        calls' work ran there.
        """
        cuda_synchronize()
        share_s = self.share_s if share_s is None else share_s
        known = [self._marks.pop(number) for number in pending]
        late_s = [_seconds(marks[1], marks[2]) - host_s for marks, host_s in known]
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
        for number in pending:
            del self._marks[number]

    def beside_cupti(self, take: Callable[[], Sequence[tuple[str, int]]]) -> list[tuple[str, float, float]]:
        """(name, seconds by the pair of events, seconds by CUPTI) of each call that `take` samples: (name, number).

        The second, a span, goes from the first kernel's start to the last one's end: gaps between the kernels of a call
        are in it. Nothing else differs from other calls: one tiny kernel goes before the cache is cleared, and one
        behind the call. Empty where CUPTI cannot be had, or a call launches nothing.
        """
        taken: list[tuple[str, int]] = []
        self._is_bracketed = True
        try:
            spans = spans_of(lambda: taken.extend(take()), "spin_kernel", 1)
        finally:
            self._is_bracketed = False
        pairs = [reading.run_s for reading in self.read([number for _, number in taken], 0.0)]
        return list(zip([name for name, _ in taken], pairs, spans, strict=True)) if len(spans) == len(pairs) else []

    def shares(self, take: Callable[[], Sequence[tuple[str, int]]]) -> dict[str, float]:
        """The time that the pair of events adds to the span of the kernels between them, in seconds, by name.

        Where that is far from a plain kernel's it is the plain one's: what a row's host code makes the device wait for
        is the row's own.
        """
        apart_s: dict[str, list[float]] = {}
        for name, pair_s, span_s in self.beside_cupti(take):
            apart_s.setdefault(name, []).append(pair_s - span_s)
        shares = {name: statistics.median(apart) for name, apart in apart_s.items()}
        low, high = self.share_s - 1.5e-6, self.share_s + 3e-6  # how far a row's may be from a plain kernel's
        return {name: share if low < share < high else self.share_s for name, share in shares.items()}

    def wait(self, seconds: float) -> None:
        """The device idles and the host goes on: what it launches then runs without gaps."""
        if self.ahead and seconds > 0:
            _sleep(int(seconds * CYCLES_PER_S))

    def drain(self) -> None:
        """Waits until the device has done what it was given."""
        cuda_synchronize()

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

        The span's time by the device is that by the host, give or take what they wait for one another, and for another
        program that shares the device.
        """
        start, end = _Event(enable_timing=True), _Event(enable_timing=True)
        cuda_synchronize()
        begin = perf_counter()
        start.record(self._stream)

        def done() -> None:
            end.record(self._stream)
            cuda_synchronize()
            host_s, device_s = perf_counter() - begin, _seconds(start, end)
            if abs(host_s - device_s) > 0.02 * host_s + 1e-2:  # a few time slices of another program
                raise ClockError(
                    f"a span of calls took {device_s:.4f} s by the device's clock and {host_s:.4f} s by the host's",
                    self.others(),
                )

        return done


def _seconds(start: Any, end: Any) -> float:
    return float(start.elapsed_time(end)) / 1e3


class CpuClock:
    """Wall time in seconds by `time.perf_counter`."""

    name = "perf_counter"
    warm_s = 0.0
    num_prepares = 3
    saving_s = 5e-4  # autograd's own work on the host counts here, compiled above all
    ahead = True  # host and device are one
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
    return CudaClock(ahead) if device == "cuda" else CpuClock()


def timed(clock: Clock, call: Callable[[], Any], count: int = 1) -> list[float]:
    """Seconds of so many calls, one after another."""
    clock.wait(LEAD_S)
    marks: list[Any] = [clock.sample(lambda _: call())[0] for _ in range(count)]
    return [reading.run_s for reading in clock.read(marks, trusted=True)]


def synchronize(device: str) -> None:
    """Wait until the device has done what was asked of it; a CPU always has."""
    if device == "cuda":
        cuda_synchronize()
