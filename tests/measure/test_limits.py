"""The rates that no kernel can beat on a device (`Limits`, lmsys/measure/machine.py): of arithmetic and of memory."""

from types import SimpleNamespace

import pytest
import torch

from lmsys.measure import machine
from lmsys.measure.machine import Limits, limits_of

H200 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, memory_clock_rate=3_201_000, memory_bus_width=6144)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_an_h200_is_what_its_data_sheet_says(h200: None) -> None:
    """989 TFLOP/s, at the clock of 1,830 MHz that the sheet counts with, and 4.8 TB/s, rounded."""
    limits = limits_of("cuda", 1830.0)
    assert limits is not None
    assert limits.flops_per_s["bfloat16"] == pytest.approx(989.4e12, rel=1e-3)
    assert limits.bytes_per_s == pytest.approx(4.8e12, rel=0.03)


def test_there_are_none_where_they_are_not_known(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_of("cpu", 1830.0) is None and limits_of("cuda", None) is None
    monkeypatch.setattr(machine, "FLOP_PER_CYCLE", {})
    assert limits_of("cuda", 1830.0) is None


def test_work_takes_the_longer_of_its_arithmetic_and_its_reads() -> None:
    """In seconds; the limits are 1e15 FLOP/s and 5e12 bytes/s."""
    limits = Limits({"bfloat16": 1e15}, 5e12)
    assert limits.least_s(1e12, "bfloat16", 1e6) == 1e-3
    assert limits.least_s(1e9, "bfloat16", 5e9) == 1e-3
    assert limits.least_s(1e12, "int8", 5e9) == 1e-3  # arithmetic whose rate is not known takes no time
