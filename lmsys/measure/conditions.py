"""Why figures differ: the device's clocks, heat and power while rows were sampled, and who else was at work there."""

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from lmsys.measure import host
from lmsys.measure.sensors import Reading, Sensors

Number = TypeVar("Number", int, float)
BUSY = 0.1  # of the CPU's time: what others take at most of a CPU that is ours
REASONS = {  # NVML's bits, why a clock is not higher
    0x1: "idle",
    0x2: "clocks that a user has set",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability limit",
}
EXPECTED = 0x1 | 0x2 | 0x4  # of these nothing is wrong with the machine: the last is how GPUs work under load


class Conditions:
    """From when this is made until `record`, on one device.

    parent  a process; others than what it has started are strangers on the device
    """

    def __init__(self, device: str, sensors: Sensors, parent: int):
        self._device, self._sensors, self._parent = device, sensors, parent
        self._load, self._strangers = host.load(parent), self._count()

    def record(self, readings: Sequence[Reading]) -> dict[str, Any]:
        """The fields of a record, JSON-safe. `readings`: those that were taken between calls."""
        load, counts = host.load(self._parent), [self._strangers, self._count()]
        strangers = max(_known(counts), default=None)
        share = host.others_share(self._load, load)
        reasons = _reasons(readings)
        return state_of(readings) | {
            "other_processes": strangers,
            "others_cpu_share": share,
            "disturbed": disturbance(reasons, strangers, share if self._device == "cpu" else None),
        }

    def _count(self) -> int | None:
        """How many strangers have something on the device.

        In a container their numbers may be of another count than ours: then all but as many as we are must be others'.
        """
        found = self._sensors.processes()
        if found is None:
            return None
        load = host.load(self._parent)
        family = load.family if load else {self._parent, os.getpid()}
        return len({*found} - family) if os.getpid() in found else max(0, len(found) - len(family))


def state_of(readings: Sequence[Reading]) -> dict[str, Any]:
    """The fields of a record that readings alone tell: median clocks and power, the highest temperature, and why a
    clock was not higher."""
    return {
        "sm_clock_mhz": _median(one.sm_clock_mhz for one in readings),
        "memory_clock_mhz": _median(one.memory_clock_mhz for one in readings),
        "cpu_clock_mhz": _median(one.cpu_clock_mhz for one in readings),
        "temperature_c": max(_known(one.temperature_c for one in readings), default=None),
        "power_w": _median(one.power_w for one in readings),
        "clock_reasons": told(_reasons(readings) - {0x1}) or None,
    }


def disturbance(reasons: Iterable[int], strangers: int | None, share: float | None) -> str | None:
    """A clause on what a reader must know of a figure that was taken under these conditions; None for nothing.

    reasons  bits of REASONS; share: of the CPU's time, that others took
    """
    found = []
    if unexpected := {bit for bit in reasons if not bit & EXPECTED}:
        found.append(f"the device was throttled ({told(unexpected)})")
    if strangers:
        found.append(f"{strangers} other process{'es' if strangers > 1 else ''} had the device, too")
    if share is not None and share > BUSY:
        tens = math.floor(10 * share) / 10  # few sentences for many cases
        found.append(f"other programs took {tens:.0%} of the CPU or more")
    return "; ".join(found) or None


def told(reasons: Iterable[int]) -> str:
    return ", ".join(REASONS.get(bit, f"reason {bit:#x}") for bit in sorted(reasons))


def _reasons(readings: Iterable[Reading]) -> set[int]:
    return {bit for one in readings for bit in _bits(one.reasons)}


def _bits(reasons: int) -> list[int]:
    return [1 << place for place in range(reasons.bit_length()) if reasons >> place & 1]


def _known(values: Iterable[Number | None]) -> list[Number]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None
