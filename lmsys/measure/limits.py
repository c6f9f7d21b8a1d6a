"""Limits that no kernel can beat: the rates of a GPU's data sheet, from its own clocks and widths."""

from dataclasses import dataclass
from typing import Any

import torch

# Dense operations that a multiprocessor ends in a cycle, by compute capability: NVIDIA's architecture white papers and
# the tables of throughput in the CUDA C++ Programming Guide. float32 counts as TF32 where there is one, which no way of
# computing a float32 product by tensor cores exceeds.
FLOP_PER_CYCLE = {
    (7, 0): {"float16": 1024, "bfloat16": 128, "float32": 128},
    (7, 5): {"float16": 1024, "bfloat16": 128, "float32": 128},
    (8, 0): {"float16": 2048, "bfloat16": 2048, "float32": 1024},
    (8, 6): {"float16": 1024, "bfloat16": 1024, "float32": 512},
    (8, 9): {"float16": 2048, "bfloat16": 2048, "float32": 1024},
    (9, 0): {"float16": 4096, "bfloat16": 4096, "float32": 2048},
    (10, 0): {"float16": 8192, "bfloat16": 8192, "float32": 4096},
}


@dataclass(frozen=True)
class Limits:
    """Operations per second by dtype, and bytes per second that memory can be read at."""

    flops_per_s: dict[str, float]
    bytes_per_s: float

    def least_s(self, flops: float, dtype: str, read_bytes: float) -> float:
        """The seconds that so much arithmetic, and so many bytes that are in no cache, take at least."""
        arithmetic = flops / self.flops_per_s[dtype] if dtype in self.flops_per_s else 0.0
        return max(arithmetic, read_bytes / self.bytes_per_s)

    def to_json(self) -> dict[str, Any]:
        return {"flops_per_s": self.flops_per_s, "bytes_per_s": self.bytes_per_s}


def limits_of(device: str, max_sm_mhz: float | None) -> Limits | None:
    """The current GPU's limits; None on a CPU, for a GPU that the table lacks, and where clocks cannot be read."""
    if device != "cuda" or max_sm_mhz is None:
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    per_cycle = FLOP_PER_CYCLE.get((gpu.major, gpu.minor))
    if per_cycle is None:
        return None
    cycles = gpu.multi_processor_count * max_sm_mhz * 1e6
    memory = 2 * gpu.memory_clock_rate * 1e3 * gpu.memory_bus_width / 8  # kHz, twice in a cycle
    return Limits({dtype: count * cycles for dtype, count in per_cycle.items()}, memory)
