"""Stand-ins for a GPU's sensors: `FakeDevice`, whose power is known at every moment, and `FakeNvml`, for pynvml."""

import itertools
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from lmsys.measure.energy import Sample
from lmsys.measure.sensors import Reading, Sensors


class FakeDevice(Sensors):
    """A device that draws power as `curve` says: pairs (seconds, watts), repeated for ever.

    period_s  its counter of energy changes every `period_s` seconds
    scale     the ratio of the power that its sensor shows to the power that it draws
    clock     returns the time in seconds
    reading   fields of the `Reading` that `read` returns
    """

    why_no_joules = None

    def __init__(
        self,
        curve: Sequence[tuple[float, float]] = ((1.0, 400.0),),
        period_s: float = 0.02,
        scale: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        **reading: Any,
    ):
        self.curve, self.period_s, self.scale, self.clock = curve, period_s, scale, clock
        self.reading, self.others = Reading(**reading), None
        self.limit_w = 700.0

    def used(self, at_s: float) -> float:
        """Joules drawn until `at_s`."""
        whole, rest = divmod(at_s, sum(seconds for seconds, _ in self.curve))
        total = whole * sum(seconds * watts for seconds, watts in self.curve)
        for seconds, watts in self.curve:
            total += min(seconds, rest) * watts
            rest = max(0.0, rest - seconds)
        return total

    def drawn(self, at_s: float) -> float:
        """Watts drawn at `at_s`."""
        rest = at_s % sum(seconds for seconds, _ in self.curve)
        ends = itertools.accumulate(seconds for seconds, _ in self.curve)
        return next((watts for end, (_, watts) in zip(ends, self.curve, strict=True) if rest < end), self.curve[-1][1])

    def joules(self) -> float:
        return self.used(self.clock() // self.period_s * self.period_s)

    def watts(self) -> float | None:
        return self.scale * self.drawn(self.clock())

    def read(self) -> Reading:
        return self.reading

    def processes(self) -> list[int] | None:
        return self.others

    def samples(self, times: Sequence[float]) -> list[Sample]:
        """The samples that a sampler takes at these times, in seconds. The clock then stays at the last time."""
        taken = []
        for at_s in times:
            self.clock = lambda at_s=at_s: at_s
            taken.append(Sample(at_s, self.joules(), self.watts()))
        return taken


class FakeNvml(SimpleNamespace):
    """A stand-in for the module `pynvml`: nvmlDeviceGetX() returns the attribute X, or raises NVMLError without one.

    Text arguments, and no others, are part of the attribute's name: nvmlDeviceGetX(handle, "sm") returns X_sm.
    """

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, "sm", "memory", 0
    NVML_FI_DEV_POWER_INSTANT = 186

    class NVMLError(Exception):
        """Raised by a query that has no attribute, as pynvml does for one that a GPU does not support."""

    def __getattr__(self, name: str) -> Any:
        def query(handle: Any, *args: Any) -> Any:
            answers = vars(self)
            key = "".join([name.removeprefix("nvmlDeviceGet"), *(f"_{text}" for text in args if isinstance(text, str))])
            if key not in answers:
                raise self.NVMLError
            return answers[key]

        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return query
