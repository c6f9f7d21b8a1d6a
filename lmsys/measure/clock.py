"""How long one call took: CUDA events on a GPU, `perf_counter` on a CPU."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CYCLES_PER_S = 2e9


@dataclass(frozen=True)
class Cost:
    """Seconds that the host is busy with a call, and the device."""

    host_s: float
    device_s: float


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
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cleared = torch.empty(max(2 * l2_bytes, 2**28) if ahead else 0, dtype=torch.int8, device="cuda")

    def sample(self, call: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Enqueue one timed call; `seconds` reads it later."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._cleared.zero_()
        start.record()
        result = call()
        end.record()
        del result  # after the end: what it costs to free is not the call's
        return start, end

    def seconds(self, pending: Sequence[Any]) -> list[float]:
        """The durations of what `sample` returned, in that order."""
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pending]

    def wait(self, seconds: float) -> None:
        """The device idles and the host goes on: what it launches then runs without gaps."""
        if self.ahead and seconds > 0:
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def cost(self, call: Callable[[], Any], lead_s: float) -> Cost:
        """The cost of a call when the device waits `lead_s` before it: best a little longer than launching takes."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.wait(lead_s)
        start.record()
        begin = time.perf_counter()
        call()
        host_s = time.perf_counter() - begin
        end.record()
        return Cost(host_s, *self.seconds([(start, end)]))


class CpuClock:
    """Wall time in seconds by `time.perf_counter`."""

    name = "perf_counter"
    warm_s = 0.0
    ahead = True  # host and device are one

    def sample(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        result = call()
        duration = time.perf_counter() - start
        del result
        return duration

    def seconds(self, pending: Sequence[Any]) -> list[float]:
        return list(pending)

    def wait(self, seconds: float) -> None:
        """Nothing."""

    def cost(self, call: Callable[[], Any], lead_s: float) -> Cost:
        duration = self.sample(call)
        return Cost(duration, duration)


Clock = CudaClock | CpuClock


def clock_of(device: str, ahead: bool = True) -> Clock:
    return CudaClock(ahead) if device == "cuda" else CpuClock()


def synchronize(device: str) -> None:
    """Wait until the device has done what was asked of it; a CPU always has."""
    if device == "cuda":
        torch.cuda.synchronize()
