"""The rate of matmuls that a device sustains (`measure_sustained`, lmsys/measure/machine.py), once it has settled.

`marks` makes what a measurement collects: how many calls were done by when.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.bench.validate import check_content
from lmsys.measure import machine
from tests.support.device import FakeDevice


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


class DeadSensor(FakeDevice):
    """Every reading fails, as where a driver is gone."""

    def read(self) -> Any:
        raise OSError("no driver")


@pytest.mark.usefixtures("short")
def test_a_rate_is_measured_without_sensors() -> None:
    record = machine.measure_sustained("cpu", DeadSensor())
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
