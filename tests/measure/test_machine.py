"""Facts about a machine and its rates (lmsys/measure/machine.py): those that nothing beats, reached ones, lasting ones.

In this order: facts; `Limits`, the rates of arithmetic and of memory that no kernel can beat; ceilings, which are the
best rates that a machine has reached; and the rate of matmuls that it sustains once it has settled. `marks` makes what
such a measurement collects: how many calls were done by when.
"""

import json
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmsys.bench.validate import check_content
from lmsys.measure import machine
from lmsys.measure.machine import Limits, limits_of
from tests.support.device import FakeDevice

H200 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, memory_clock_rate=3_201_000, memory_bus_width=6144)


def test_the_machine_is_described_in_json(device: str) -> None:
    facts = machine.describe(device, command="python -m pytest", seed=3, sweep="smoke")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["name"] and facts["torch"] == torch.__version__ and facts["memory_bytes"] > 2**28
    assert (facts["seed"], facts["sweep"], facts["device"]) == (3, "smoke", device)


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


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        (None, None),
    ],
)
def test_the_peak_is_that_of_the_cards_own_data_sheet(gpu: str | None, peak: float | None) -> None:
    assert machine.peak_flops_per_s(gpu, "bf16") == peak


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


@pytest.mark.parametrize(("long_s", "least", "most"), [(0.0, 3, 3), (60.0, 6, 25)])
def test_of_a_ceiling_that_takes_long_few_calls_are_enough(
    long_s: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one that is not counted, two calls are enough if they took more than LONG_S; else five or more are made."""
    monkeypatch.setattr(machine, "LONG_S", long_s)
    calls: list[int] = []

    def call() -> None:
        calls.append(0)
        time.sleep(0.009)

    best, median = machine._runs(call, "cpu", machine.CEILING_S)
    assert 0.009 <= best <= median < 1
    assert least <= len(calls) <= most


def test_a_ceiling_has_moved_when_it_leaves_the_spread_of_its_runs() -> None:
    """With a spread of 10 %, 5 % more is no move, and 20 % less is one."""
    before = {"matmul_flops_per_s": {"float32": 1e12}, "copy_bytes_per_s": 1e11, "spread": 0.1}
    after = {"matmul_flops_per_s": {"float32": 1.05e12}, "copy_bytes_per_s": 0.8e11, "spread": 0.01}
    (moved,) = machine.moved(before, after)
    assert "the large copy ran at 80%" in moved
    assert machine.moved(before, before) == []
    assert machine.best_of(before, after)["matmul_flops_per_s"] == after["matmul_flops_per_s"]
    assert machine.best_of(before, after)["copy_bytes_per_s"] == before["copy_bytes_per_s"]


@pytest.mark.gpu
def test_ceilings_are_positive() -> None:
    ceilings = machine.measure_ceilings("cuda")
    assert min(*ceilings["matmul_flops_per_s"].values(), ceilings["copy_bytes_per_s"]) > 1e9


def marks(*rates: float) -> list[tuple[float, int]]:
    """(second, calls done by then), 20 times a second, of a device that stays at each of these rates for a second."""
    series, done = [(0.0, 0)], 0.0
    for second, rate in enumerate(rates):
        for part in range(1, 21):
            done += rate / 20
            series.append((second + part / 20, round(done)))
    return series


@given(st.floats(1e4, 1e6), st.floats(0.5, 1.5))
def test_a_rate_has_settled_when_the_second_before_had_the_same(rate: float, change: float) -> None:
    settled = machine.has_settled(marks(2 * rate, rate, change * rate))
    # So near to the bound, the rounding in `marks` decides.
    is_near = abs(abs(change - 1) - machine.STEADY) < 2e-3
    assert settled == (abs(change - 1) < machine.STEADY) or is_near
    assert not machine.has_settled(marks(rate, rate)) and machine.has_settled(marks(9 * rate, rate, rate, rate))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matmuls, for a fifth of a second at most."""
    monkeypatch.setattr(machine, "SIZES", {"cpu": (64,)})
    for name, seconds in (("WINDOW_S", 0.05), ("LEAST_S", 0.1), ("MOST_S", 0.2), ("SAMPLE_S", 0.005)):
        monkeypatch.setattr(machine, name, seconds)


@pytest.mark.usefixtures("short")
def test_a_rate_is_measured_without_sensors() -> None:
    device = FakeDevice()
    device.read = Mock(side_effect=OSError("no driver"))
    record = machine.measure_sustained("cpu", device)
    assert record["matmul_flops_per_s"]["float32"] > 1e6 and "power_w" not in record


@pytest.mark.usefixtures("short")
def test_the_record_has_the_rate_and_the_state_of_the_device() -> None:
    record = machine.measure_sustained("cpu", FakeDevice(sm_clock_mhz=1400.0, power_w=700.0, reasons=0x4))
    assert record["matmul_flops_per_s"].keys() == {"float32"} and record["matmul_flops_per_s"]["float32"] > 1e6
    assert record["seconds"] >= 0.1 and (record["sm_clock_mhz"], record["power_w"]) == (1400, 700)
    assert record["clock_reasons"] == "power cap" and "temperature_c" not in record
    content = {"fields": {}, "layouts": {}, "rows": {}, "records": [], "machine": {"sustained": record}}
    check_content(content)  # a result file with this record is valid
    content["machine"] = {"sustained": record | {"power_w": "much"}}
    with pytest.raises(ValueError, match=r"machine\.sustained\.power_w"):
        check_content(content)


@pytest.mark.gpu
def test_a_gpu_sustains_no_more_than_its_largest_rate() -> None:
    reached = machine.measure_ceilings("cuda")["matmul_flops_per_s"]["bfloat16"]
    record = machine.measure_sustained("cuda", machine.sensors_of("cuda"))
    print(reached, record)
    assert 0.3 * reached < record["matmul_flops_per_s"]["bfloat16"] < 1.05 * reached
    assert record["seconds"] >= machine.LEAST_S and record["power_w"] and record["sm_clock_mhz"]
