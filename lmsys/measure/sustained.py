"""The rate that a machine sustains: of one large matmul, until power and heat have had their say."""

import statistics
from functools import partial
from typing import Any

import torch

from lmsys.measure.clock import synchronize
from lmsys.measure.compare import release_memory
from lmsys.measure.energy import Mark, Sampler, calls_between, repeated
from lmsys.measure.machine import SIZES
from lmsys.measure.sensors import Reading, Sensors

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
WINDOW_S, LEAST_S, MOST_S = 1.0, 3.0, 15.0
STEADY = 0.01  # of two windows, one behind the other: so far apart they are at most when the rate has settled
SAMPLE_S = 0.02


def measure(device: str, sensors: Sensors) -> dict[str, Any]:
    """{"matmul_flops_per_s": {dtype: x}, "seconds": until it had settled}, with the state of the device at its end.

    The matmul of the ceilings, again and again: the mean rate of the last WINDOW_S.
    """
    size, dtype = SIZES[device][-1], DTYPES[device]
    a, marks = torch.randn(size, size, device=device, dtype=dtype), list[Mark]()
    with Sampler(sensors.read, SAMPLE_S) as sampler:
        for at_s in repeated(partial(torch.matmul, a, a), partial(synchronize, device), marks):
            if has_settled(marks) or at_s - marks[0][0] > MOST_S:
                break
    del a
    release_memory()
    end_s = marks[-1][0]
    rate = calls_between(marks, end_s - WINDOW_S, end_s) / WINDOW_S * 2 * size**3
    readings = [reading for at_s, reading in sampler.taken if at_s > end_s - WINDOW_S]
    found = {"matmul_flops_per_s": {str(dtype).removeprefix("torch."): rate}, "seconds": end_s - marks[0][0]}
    return found | _state(readings)


def has_settled(marks: list[Mark]) -> bool:
    """True where the rate of the last window is that of the window before it."""
    end_s = marks[-1][0]
    if end_s - marks[0][0] < LEAST_S:
        return False
    before, last = (calls_between(marks, end_s - n * WINDOW_S, end_s - (n - 1) * WINDOW_S) for n in (2, 1))
    return abs(last / before - 1) < STEADY


def _state(readings: list[Reading]) -> dict[str, float]:
    """Medians of what the sensors told."""
    names = ("sm_clock_mhz", "cpu_clock_mhz", "power_w", "temperature_c")
    known = {name: [value for one in readings if (value := getattr(one, name)) is not None] for name in names}
    return {name: statistics.median(values) for name, values in known.items() if values}
