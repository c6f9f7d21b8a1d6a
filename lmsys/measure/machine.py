"""Facts about this machine, the ceilings that it reaches and sustains, and the limits that no kernel can beat.

`lmsys.bench.instruments` and `lmsys.bench.runner` put facts and ceilings into every result; the training loop and
benchmarks/models.py take `peak_flops_per_s` from here. *Ceilings* are rates that a large matmul and a large copy reach
on this machine, and one that is *sustained* is reached for seconds, under the power limit. *Limits* are rates that a
GPU cannot exceed, computed from its clocks and widths. To add a GPU, add a line to PEAK_FLOPS_PER_S, and one to
FLOP_PER_CYCLE if its compute capability is new. A new fact is a line in `describe`, and one in MACHINE of
`lmsys.bench.validate` if it is no text.
"""

import datetime
import importlib
import os
import platform
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lmsys.files import git
from lmsys.kernels import HAS_TRITON
from lmsys.measure import compare, energy, step
from lmsys.measure.clock import clock_of, synchronize, timed
from lmsys.measure.sensors import Cpu, Sensors, nvml, sensors_of, state_of

CEILING_S, LEAST_RUNS = 0.2, 5  # seconds and runs of each ceiling: on a busy machine three runs may all be slow
LONG_S = 1.0  # if runs take longer than this together, two suffice: bfloat16 may be slow on a CPU
SIZES = {"cuda": (8192,), "cpu": (256, 512, 1024)}  # by device: the sides of the square matmuls that are tried
# Peak FLOP/s of dense bfloat16 and float16 matmuls, from data sheets, by words of a GPU's name. The first entry that
# fits counts, so "H100 PCIe" stands before "H100": on a PCIe card the GPU gets less power, and has a lower peak.
PEAK_FLOPS_PER_S = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
}


def describe(device: str, *, command: str, seed: int, sweep: str) -> dict[str, Any]:
    """Facts about machine, versions and commit, JSON-safe, with the run's command, seed and sweep as they are given.

    A fact that is not known is None.
    """
    on_gpu = device == "cuda"
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if on_gpu else None
    return {
        "name": gpu.name if gpu else _cpu_name(),
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": gpu.total_memory if gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": gpu.name if gpu else None,
        "gpu_count": torch.cuda.device_count() if on_gpu else 0,
        "capability": f"{gpu.major}.{gpu.minor}" if gpu else None,
        "driver": nvml(lambda nvml: nvml.nvmlSystemGetDriverVersion()) if on_gpu else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if HAS_TRITON else None,
        "float32_matmul": torch.backends.cuda.matmul.fp32_precision if on_gpu else None,
        "threads": torch.get_num_threads(),
        "settings": Cpu().settings() | (sensors_of(device).settings() if on_gpu else {}),
        "platform": platform.platform(),
        **commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "seed": seed,
        "sweep": sweep,
    }


def measure_ceilings(device: str, seconds: float = CEILING_S) -> dict[str, Any]:
    """The best that this machine reaches now: {"matmul_flops_per_s": {dtype: x}, "copy_bytes_per_s": x, "spread": x}.

    It times a square matmul in each dtype (float32 in IEEE arithmetic unless torch is set otherwise), and one copy that
    no cache holds, whose reads and writes are counted. Each is repeated for `seconds`, CEILING_S at most, and the
    fastest run counts. On a CPU several sizes, and both layouts of the second operand, are tried, since the fastest
    ones depend on the dtype. "spread" is the share by which the median run took longer than the fastest one, and the
    largest such share of the matmuls and the copy.
    """
    copied, seconds = 2**30 if device == "cuda" else 2**27, min(seconds, CEILING_S)  # 1 GiB, 128 MiB
    matmuls = {
        str(dtype).removeprefix("torch."): _matmul(dtype, device, seconds) for dtype in (torch.bfloat16, torch.float32)
    }
    source = torch.zeros(copied, dtype=torch.int8, device=device)
    best, median = _runs(partial(torch.empty_like(source).copy_, source), device, seconds)
    del source
    compare.release_memory()
    return {
        "matmul_flops_per_s": {dtype: rate for dtype, (rate, _) in matmuls.items()},
        "copy_bytes_per_s": 2 * copied / best,
        "spread": max(*(spread for _, spread in matmuls.values()), median / best - 1),
    }


def _matmul(dtype: torch.dtype, device: str, seconds: float) -> tuple[float, float]:
    """(the best rate in FLOP/s, the spread of its runs) of a matmul, in the size and layout of the best trial."""
    tried: list[tuple[float, int, Callable[[], Any]]] = []
    for transposed in (False, True) if device == "cpu" else (False,):
        for size in SIZES[device]:
            a = torch.randn(size, size, device=device, dtype=dtype)
            call: Callable[[], Any] = partial(torch.matmul, a, a.T if transposed else a)
            best, _ = _runs(call, device, seconds=0.0, least=3)
            tried.append((2 * size**3 / best, size, call))
            if 2**3 * best > CEILING_S:  # one run of the next size, whose side is twice as long, would take longer
                break
    rate, size, call = max(tried, key=itemgetter(0))
    best, median = _runs(call, device, seconds)
    return max(rate, 2 * size**3 / best), median / best - 1


def best_of(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The higher of two measurements of each ceiling, and the larger of their spreads."""
    return {
        "matmul_flops_per_s": {
            dtype: max(rate, second["matmul_flops_per_s"][dtype]) for dtype, rate in first["matmul_flops_per_s"].items()
        },
        **{name: max(first[name], second[name]) for name in ("copy_bytes_per_s", "spread")},
    }


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The ceilings that moved by more than their spread, and more than 3 %, between two measurements, as sentences."""
    pairs = {
        f"the large {dtype} matmul": (value, after["matmul_flops_per_s"][dtype])
        for dtype, value in before["matmul_flops_per_s"].items()
    }
    pairs["the large copy"] = before["copy_bytes_per_s"], after["copy_bytes_per_s"]
    allowed = max(before["spread"], after["spread"], 0.03)
    return [
        f"{name} ran at {second / first:.0%} of its rate at the start (spread of its runs: {allowed:.0%})"
        for name, (first, second) in pairs.items()
        if abs(second / first - 1) > allowed
    ]


def peak_flops_per_s(gpu: str | None, precision: str, world_size: int = 1) -> float | None:
    """The peak FLOP/s of `world_size` GPUs together, by the data sheet.

    gpu        the name of a GPU
    precision  that of a training, such as "bf16"

    None for an unknown GPU, for a part of a GPU (MIG), and for other precisions than "bf16" and "fp16".
    """
    known = [peak for name, peak in PEAK_FLOPS_PER_S.items() if f" {name} " in f" {gpu} ".replace("-", " ")]
    return known[0] * world_size if known and "MIG" not in str(gpu) and precision in ("bf16", "fp16") else None


def _runs(call: Callable[[], Any], device: str, seconds: float, least: int = LEAST_RUNS) -> tuple[float, float]:
    """(the minimum, the median) of the seconds of repeated calls.

    There are `least` calls or more, until they took `seconds` together. Where calls take more than LONG_S together, two
    suffice. One call before them is not counted, since it is the first to touch new memory.
    """
    clock, samples = clock_of(device), list[float]()
    timed(clock, call)
    while len(samples) < 2 or (sum(samples) <= LONG_S and (len(samples) < least or sum(samples) < seconds)):
        samples += timed(clock, call)
    return min(samples), statistics.median(samples)


def _cpu_name() -> str:
    """The CPU's model name; where cores differ, that of most cores."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return statistics.mode(models) if models else platform.processor() or platform.machine()


def commit() -> dict[str, Any]:
    """The commit: from $LMSYS_COMMIT, for a copy of the tree that has no .git, else from git."""
    if commit := os.environ.get("LMSYS_COMMIT"):
        return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}
    folder = Path(__file__).parent
    status = git(folder, "status", "--porcelain")
    return {"commit": git(folder, "rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


# Dense operations that a multiprocessor completes in a cycle, by compute capability and dtype: from NVIDIA's
# architecture white papers and the tables of throughput in the CUDA C++ Programming Guide. Where the GPU has TF32, the
# number for float32 is that of TF32: no way of computing a float32 product by tensor cores is faster.
FLOP_PER_CYCLE = {
    (7, 0): {"float16": 1024, "bfloat16": 128, "float32": 128},
    (7, 5): {"float16": 1024, "bfloat16": 128, "float32": 128},
    (8, 0): {"float16": 2048, "bfloat16": 2048, "float32": 1024},
    (8, 6): {"float16": 1024, "bfloat16": 1024, "float32": 512},
    (8, 9): {"float16": 1024, "bfloat16": 1024, "float32": 512},
    (9, 0): {"float16": 4096, "bfloat16": 4096, "float32": 2048},
    (10, 0): {"float16": 8192, "bfloat16": 8192, "float32": 4096},
}


@dataclass(frozen=True)
class Limits:
    """Operations per second by dtype, and bytes per second that memory can be read at."""

    flops_per_s: dict[str, float]
    bytes_per_s: float

    def least_s(self, flops: float, dtype: str, read_bytes: float) -> float:
        """The least seconds that `flops` operations and the read of `read_bytes` bytes take, when both overlap wholly.

        The bytes are in no cache. For a dtype without a limit only the read counts.
        """
        return max(flops / self.flops_per_s[dtype] if dtype in self.flops_per_s else 0.0, read_bytes / self.bytes_per_s)


def limits_of(device: str, max_sm_mhz: float | None) -> Limits | None:
    """The current GPU's limits; None on a CPU, for a GPU that the table lacks, and where clocks cannot be read.

    max_sm_mhz  the highest clock of the multiprocessors, as `Sensors.settings` gives it; None: not known
    """
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if device == "cuda" else None
    if gpu is None or max_sm_mhz is None or (gpu.major, gpu.minor) not in FLOP_PER_CYCLE:
        return None
    cycles = gpu.multi_processor_count * max_sm_mhz * 1e6
    return Limits(
        flops_per_s={dtype: count * cycles for dtype, count in FLOP_PER_CYCLE[gpu.major, gpu.minor].items()},
        bytes_per_s=2 * gpu.memory_clock_rate * 1e3 * gpu.memory_bus_width / 8,  # kHz, twice in a cycle
    )


DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}  # of the matmul of `measure_sustained`
WINDOW_S, LEAST_S, MOST_S = 1.0, 3.0, 15.0  # seconds: of a window, whose mean rate counts; limits of the whole run
STEADY = 0.01  # a rate has settled when two windows, one after the other, differ by less than this share
SAMPLE_S = 0.02  # seconds between two readings of the sensors


def measure_sustained(device: str, sensors: Sensors) -> dict[str, Any]:
    """The matmul rate that the device holds for long: {"matmul_flops_per_s": {dtype: x}, "seconds": duration, ...}.

    It repeats the largest matmul of SIZES until the rate has settled, for MOST_S at most. x is the mean rate of the
    last WINDOW_S. The other entries are the state of the device in this window, as `state_of` gives it.
    """
    size, dtype = SIZES[device][-1], DTYPES[device]
    a, marks = torch.randn(size, size, device=device, dtype=dtype), list[energy.Mark]()
    with (
        suppress(step.Failed),  # the rate needs no sensor
        energy.sampling(lambda: (perf_counter(), sensors.read()), SAMPLE_S) as taken,
    ):
        for at_s in energy.repeated(partial(torch.matmul, a, a), partial(synchronize, device), marks):
            if has_settled(marks) or at_s - marks[0][0] > MOST_S:
                break
    del a
    compare.release_memory()
    end_s = marks[-1][0]
    rate = energy.calls_between(marks, end_s - WINDOW_S, end_s) / WINDOW_S * 2 * size**3
    readings = [reading for at_s, reading in taken if at_s > end_s - WINDOW_S]
    return {
        "matmul_flops_per_s": {str(dtype).removeprefix("torch."): rate},
        "seconds": end_s - marks[0][0],
        **{name: value for name, value in state_of(readings).items() if value is not None},
    }


def has_settled(marks: list[energy.Mark]) -> bool:
    """True where the rate of the last window differs from that of the window before it by less than STEADY.

    marks  (time, calls done by then), as `energy.repeated` appends them. False until they span LEAST_S.
    """
    end_s = marks[-1][0]
    if end_s - marks[0][0] < LEAST_S:
        return False
    before, last = (energy.calls_between(marks, end_s - n * WINDOW_S, end_s - (n - 1) * WINDOW_S) for n in (2, 1))
    return abs(last / before - 1) < STEADY
