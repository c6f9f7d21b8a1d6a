"""Reads a device's own sensors: clocks, temperature, power, energy, and other programs' processes on the device.

`sensors_of` gives the sensors of a GPU, read by NVML (nvidia-ml-py), or of the CPUs, read from Linux's files: RAPL's
counters of energy, and the frequency of cores. A value that a device does not tell is None, and `why_no_joules` says
why its energy cannot be measured. `lmsys.bench.trial` makes a `Conditions` before it samples rows (the implementations
under test), and puts `Conditions.record` into the record of each row afterwards; `lmsys.bench.ranks` counts other
programs' processes by `Conditions`. Ranks of benchmarks (bench_steps.py, training/rank.py) read clocks by `state_of`;
energy.py and machine.py take a `Sensors`. To support another kind of device, add a subclass of `Sensors`, and return it
from `sensors_of`. A new entry of `Sensors.settings` needs its words in `lmsys/reports/page.py`.
"""

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from lmsys.measure import host


@dataclass(frozen=True)
class Reading:
    """The state of a device at a moment. All fields but `reasons` are None where the device does not tell.

    reasons  why the clock is not higher: the sum of bits that are keys of REASONS; 0: none, or the device does not tell
    """

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    cpu_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    reasons: int = 0


class Sensors:
    """The interface to a device's sensors. This base class has none itself: it stands for a GPU that NVML cannot read.

    `Gpu` and `Cpu` override the methods that they have sensors for.

    why_no_joules  None where `joules` works, else the reason why it does not
    limit_w        the average power that the device does not exceed; None: not known
    """

    why_no_joules: str | None = (
        "nvidia-ml-py reads the GPU's energy and cannot here: python -m pip install nvidia-ml-py"
    )
    limit_w: float | None = None

    def read(self) -> Reading:
        """The state now."""
        return Reading()

    def watts(self) -> float | None:
        """The power that the device draws now."""
        return None

    def joules(self) -> float:
        """The energy that the device has used since some moment in the past; the counter moves in steps."""
        raise NotImplementedError

    def processes(self) -> list[int] | None:
        """The ids of all processes that have something on the device; None where it does not tell."""
        return None

    def settings(self) -> dict[str, Any]:
        """Settings of the device that do not change during a run, if known: text such as "on", numbers in MHz and W."""
        return {}


class Gpu(Sensors):
    """A GPU, read by NVML.

    nvml    the module `pynvml`, which is initialized
    handle  NVML's handle of the GPU
    """

    def __init__(self, nvml: Any, handle: Any):
        self._nvml, self._handle = nvml, handle
        self.limit_w = _scaled(1e-3, self._ask("nvmlDeviceGetEnforcedPowerLimit"))
        self._is_instant = self._instant() is not None
        self.why_no_joules = (
            None
            if self._ask("nvmlDeviceGetTotalEnergyConsumption") is not None
            else "this GPU has no counter of energy: NVML has one from Volta on, and none for a part of a GPU (MIG)"
        )

    def read(self) -> Reading:
        return Reading(
            sm_clock_mhz=_scaled(1.0, self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=_scaled(1.0, self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM)),
            temperature_c=_scaled(1.0, self._ask("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU)),
            power_w=self.watts(),
            reasons=int(self._ask("nvmlDeviceGetCurrentClocksEventReasons") or 0),
        )

    def watts(self) -> float | None:
        return _scaled(1e-3, self._instant() if self._is_instant else self._ask("nvmlDeviceGetPowerUsage"))

    def joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

    def processes(self) -> list[int] | None:
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return None if processes is None else [int(process.pid) for process in processes]

    def settings(self) -> dict[str, Any]:
        nvml, on = self._nvml, {None: None, 0: "off", 1: "on"}
        # NVML answers (the mode now, the mode after the next reset).
        now, _ = self._ask("nvmlDeviceGetEccMode") or (None, None)
        mig, _ = self._ask("nvmlDeviceGetMigMode") or (None, None)
        settings = {
            "ecc": on.get(now),
            "mig": on.get(mig),
            "persistence": on.get(self._ask("nvmlDeviceGetPersistenceMode")),
            "power_limit_w": self.limit_w,
            "power_sensor": "instant" if self._is_instant else "mean of a second",
            "max_sm_mhz": _scaled(1.0, self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)),
            "max_memory_mhz": _scaled(1.0, self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM)),
        }
        return {name: value for name, value in settings.items() if value is not None}

    def _instant(self) -> int | None:
        """The power now, in milliwatts; None where this GPU has no such field.

        It is preferred to nvmlDeviceGetPowerUsage, which on most GPUs gives the mean of the last second.
        """
        fields = self._ask("nvmlDeviceGetFieldValues", [self._nvml.NVML_FI_DEV_POWER_INSTANT])
        return int(fields[0].value.uiVal) if fields and fields[0].nvmlReturn == self._nvml.NVML_SUCCESS else None

    def _ask(self, name: str, *args: Any) -> Any:
        """NVML's answer; None where this GPU, its driver or a part of a GPU has none."""
        try:
            return getattr(self._nvml, name)(self._handle, *args)
        except self._nvml.NVMLError:
            return None


class Cpu(Sensors):
    """The CPUs of this machine, read from Linux's files under `root`. RAPL counts the energy of whole CPU packages."""

    def __init__(self, root: Path = Path("/")):
        self._root = root
        packages = root / "sys/class/powercap"
        counters = [path for path in sorted(packages.glob("intel-rapl:*")) if path.name.count(":") == 1]
        self._used_uj = 0  # microjoules of all packages since this was made
        self.why_no_joules = (
            None
            if counters
            else f"this machine shows no counters of a CPU's energy (RAPL) in {packages}: most virtual machines do not"
        )
        try:
            self._counters = {  # by counter: (its last value, the value after which it begins at 0 again), microjoules
                counter: (_number_in(counter / "energy_uj"), _number_in(counter / "max_energy_range_uj"))
                for counter in counters
            }
            self.limit_w = (
                sum(_number_in(counter / "constraint_0_power_limit_uw") for counter in counters) / 1e6 or None
            )
        except OSError as error:
            self.why_no_joules = (
                f"the counter of this CPU's energy cannot be read: {error}; most systems let root alone read it"
            )

    def read(self) -> Reading:
        with suppress(OSError, ValueError):
            return Reading(cpu_clock_mhz=statistics.fmean(map(_number_in, self._files("scaling_cur_freq"))) / 1e3)
        return Reading()

    def joules(self) -> float:
        for counter, (last, limit) in self._counters.items():
            now = _number_in(counter / "energy_uj")
            self._used_uj += (now - last) % (limit + 1)
            self._counters[counter] = now, limit
        return self._used_uj / 1e6

    def settings(self) -> dict[str, Any]:
        with suppress(OSError):
            return {"governor": self._files("scaling_governor")[0].read_text().strip()}
        return {}

    def _files(self, name: str) -> Sequence[Path]:
        """The files of this name, one for each of the first four cores that this process may use."""
        return [
            self._root / f"sys/devices/system/cpu/cpu{core}/cpufreq/{name}"
            for core in sorted(os.sched_getaffinity(0))[:4]
        ]


def sensors_of(device: str) -> Sensors:
    """The sensors of the current GPU ("cuda") or of this machine's CPUs ("cpu")."""
    if device != "cuda":
        return Cpu()
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return nvml(lambda nvml: Gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))) or Sensors()


def nvml(ask: Callable[[Any], Any]) -> Any:
    """ask(pynvml), with NVML initialized; None where the module is not installed or NVML raises an error."""
    with suppress(ImportError):
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return ask(pynvml)
    return None


def _scaled(unit: float, value: float | None) -> float | None:
    """The product unit * value: 1e-3 converts milliwatts to watts, 1.0 converts an int to a float. None stays None."""
    return None if value is None else unit * value


def _number_in(file: Path) -> int:
    """The whole number that a file holds."""
    return int(file.read_text())


Number = TypeVar("Number", int, float)
REASONS = {  # {bit of NVML's clock event reasons: why a clock is not higher}
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
EXPECTED = 0x1 | 0x2 | 0x4  # reasons that are no disturbance: a GPU under load works at its power cap


class Conditions:
    """The conditions on a device, from the moment when this object is made until `record` is called.

    parent   the id of the process that started the run. It and its descendants are the *family*; all other processes on
             the device are *strangers*
    by_host  True: figures depend on how soon a CPU serves a process, so that programs on the CPUs disturb them
    """

    def __init__(self, sensors: Sensors, parent: int, by_host: bool = False):
        self._sensors, self._parent, self._by_host = sensors, parent, by_host
        self._load, self._strangers = host.load(parent), self._count()

    def record(self, readings: Sequence[Reading]) -> dict[str, Any]:
        """The fields on conditions of a row's record, JSON-safe. `readings`: what the sensors read between calls."""
        share, strangers = host.others_share(self._load, host.load(self._parent)), self.strangers()
        return state_of(readings) | {
            "other_processes": strangers,
            "others_cpu_share": share,
            "disturbed": disturbance(_reasons(readings), strangers, share if self._by_host else None),
        }

    def strangers(self) -> int | None:
        """The number of strangers on the device, at the beginning or now: the larger one; None where not known."""
        return max(_without_none([self._strangers, self._count()]), default=None)

    def _count(self) -> int | None:
        """The number of strangers that have a context on the device; None where it does not tell.

        In a container NVML may report other process ids than this process sees. If this process's own id is not among
        them, the family's processes cannot be told apart, and it subtracts the size of the family from their number.
        """
        if (processes := self._sensors.processes()) is None:
            return None
        family = host.family_of(self._parent, host.processes_in(Path("/proc")))
        return len(set(processes) - family) if os.getpid() in processes else max(0, len(processes) - len(family))


def state_of(readings: Sequence[Reading]) -> dict[str, Any]:
    """The fields of a record that follow from readings alone.

    They are the median clocks and power, the highest temperature, and why a clock was not higher, in words.
    """
    return {
        "sm_clock_mhz": _median(reading.sm_clock_mhz for reading in readings),
        "memory_clock_mhz": _median(reading.memory_clock_mhz for reading in readings),
        "cpu_clock_mhz": _median(reading.cpu_clock_mhz for reading in readings),
        "temperature_c": max(_without_none(reading.temperature_c for reading in readings), default=None),
        "power_w": _median(reading.power_w for reading in readings),
        "clock_reasons": in_words(_reasons(readings) - {0x1}) or None,  # without "idle"
    }


def disturbance(reasons: Iterable[int], strangers: int | None, share: float | None) -> str | None:
    """A clause that warns readers of a figure that was measured under these conditions; None where all was well.

    reasons    bits of REASONS
    strangers  how many strangers (see `Conditions`) were on the device; None: not known
    share      the share of the CPU's time, from 0 to 1, that other programs took; None: not known, or of no importance
    """
    unexpected, strangers, share = [bit for bit in reasons if not bit & EXPECTED], strangers or 0, share or 0.0
    clauses = (
        (unexpected, f"the device was throttled ({in_words(unexpected)})"),
        (strangers, f"{strangers} other process{'es' if strangers > 1 else ''} had the device, too"),
        # The share is rounded down to a multiple of 10 %, so that many cases have the same few sentences.
        (share > host.BUSY, f"other programs took {int(10 * share) / 10:.0%} of the CPU or more"),
    )
    return "; ".join(clause for applies, clause in clauses if applies) or None


def in_words(reasons: Iterable[int]) -> str:
    """These bits of REASONS in words, such as "power cap, thermal slowdown by software"."""
    return ", ".join(REASONS.get(bit, f"reason {bit:#x}") for bit in sorted(reasons))


def _reasons(readings: Iterable[Reading]) -> set[int]:
    """The bits of REASONS that any reading has."""
    return {1 << place for reading in readings for place in range(64) if reading.reasons >> place & 1}


def _without_none(values: Iterable[Number | None]) -> list[Number]:
    """The values that are not None."""
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None without any."""
    known = _without_none(values)
    return statistics.median(known) if known else None
