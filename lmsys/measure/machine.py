"""Facts about this machine and the ceilings that it reaches; they travel with every result."""

import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmsys.measure.clock import clock_of
from lmsys.measure.compare import release_memory

LONG_S = 0.5  # the first call on a CPU, if it takes longer, is the only one
# Dense bfloat16 and float16, from data sheets.
PEAK_FLOPS_PER_S = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def describe(device: str, *, command: str, seed: int, sweep: str) -> dict[str, Any]:
    """Machine, versions and commit, JSON-safe. What cannot be found out is None."""
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
        "driver": _nvml(lambda nvml: nvml.nvmlSystemGetDriverVersion()) if on_gpu else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "float32_matmul": torch.backends.cuda.matmul.fp32_precision if on_gpu else None,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        **commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "seed": seed,
        "sweep": sweep,
    }


def measure_ceilings(device: str) -> dict[str, Any]:
    """The best that this machine reaches now: {"matmul_flops_per_s": {dtype: x}, "copy_bytes_per_s": x}.

    One large square matmul in each dtype (float32 in IEEE arithmetic unless torch is set otherwise) and one
    copy that no cache holds, read and write counted; the fastest of a few runs, or the first where that is
    long. Seconds.
    """
    size, copied = (8192, 2**30) if device == "cuda" else (1024, 2**27)
    matmul = {}
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(size, size, device=device, dtype=dtype)
        matmul[str(dtype).removeprefix("torch.")] = 2 * size**3 / _best(partial(torch.matmul, a, a), device)
    copy = _copy_bytes_per_s(copied, device)
    release_memory()
    return {"matmul_flops_per_s": matmul, "copy_bytes_per_s": copy}


def peak_flops_per_s(gpu: str | None, precision: str, world_size: int = 1) -> float | None:
    """The peak that the data sheet states for all ranks together, or None where it is not known: bf16 and fp16 only."""
    known = [peak for name, peak in PEAK_FLOPS_PER_S.items() if gpu and name in gpu]
    return known[0] * world_size if known and precision in ("bf16", "fp16") else None


def _copy_bytes_per_s(size: int, device: str) -> float:
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def _best(call: Callable[[], Any], device: str) -> float:
    clock = clock_of(device)
    (first,) = clock.seconds([clock.sample(call)])
    if device == "cpu" and first > LONG_S:  # bfloat16 without instructions for it: warmth matters little
        return first
    clock.seconds([clock.sample(call)])
    return min(clock.seconds([clock.sample(call) for _ in range(10 if device == "cuda" else 3)]))


def sm_clock_reader() -> Callable[[], float | None]:
    """A function that reads the current GPU's SM clock in MHz; it answers None without a GPU or nvidia-ml-py."""
    if not torch.cuda.is_available():
        return lambda: None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    handle = _nvml(lambda nvml: nvml.nvmlDeviceGetHandleByUUID(uuid))
    if handle is None:
        return lambda: None
    return lambda: _nvml(lambda nvml: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))


def _nvml(ask: Callable[[Any], Any]) -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return ask(pynvml)
    except pynvml.NVMLError:
        return None


def _cpu_name() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return statistics.mode(models) if models else platform.processor() or platform.machine()


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def commit() -> dict[str, Any]:
    """The commit: from $LMSYS_COMMIT, for a copy of the tree that has no .git, else from git."""
    if commit := os.environ.get("LMSYS_COMMIT"):
        return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}

    def git(*arguments: str) -> str | None:
        try:
            found = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
        except OSError:
            return None
        return found.stdout.strip() if found.returncode == 0 else None

    status = git("status", "--porcelain")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}
