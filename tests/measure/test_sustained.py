"""The rate that is kept up: when it has settled, and what is told of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.bench.validate import check_content
from lmsys.measure import machine
from tests.support.device import FakeDevice


def marks(*rates: float) -> list[tuple[float, int]]:
    """A second at each of these rates, 20 marks each."""
    found, done = [(0.0, 0)], 0.0
    for second, rate in enumerate(rates):
        for part in range(1, 21):
            done += rate / 20
            found.append((second + part / 20, round(done)))
    return found


@given(st.floats(1e4, 1e6), st.floats(0.5, 1.5))
def test_a_rate_has_settled_when_the_second_before_had_the_same(rate: float, change: float) -> None:
    found = machine.has_settled(marks(2 * rate, rate, change * rate))
    assert found == (abs(change - 1) < machine.STEADY) or abs(abs(change - 1) - machine.STEADY) < 2e-3
    assert not machine.has_settled(marks(rate, rate)) and machine.has_settled(marks(9 * rate, rate, rate, rate))


def test_the_last_window_is_told_with_the_state_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SIZES", {"cpu": (64,)})
    for name, seconds in (("WINDOW_S", 0.05), ("LEAST_S", 0.1), ("MOST_S", 0.2), ("SAMPLE_S", 0.005)):
        monkeypatch.setattr(machine, name, seconds)
    found = machine.measure_sustained("cpu", FakeDevice(sm_clock_mhz=1400.0, power_w=700.0, reasons=0x4))
    assert found["matmul_flops_per_s"].keys() == {"float32"} and found["matmul_flops_per_s"]["float32"] > 1e6
    assert found["seconds"] >= 0.1 and (found["sm_clock_mhz"], found["power_w"]) == (1400, 700)
    assert found["clock_reasons"] == "power cap" and "temperature_c" not in found
    content = {"fields": {}, "layouts": {}, "rows": {}, "records": [], "machine": {"sustained": found}}
    check_content(content)  # as a reader of the result file does
    content["machine"] = {"sustained": found | {"power_w": "much"}}
    with pytest.raises(ValueError, match=r"machine\.sustained\.power_w"):
        check_content(content)


@pytest.mark.gpu
def test_a_gpu_sustains_no_more_than_it_reaches() -> None:
    reached = machine.measure_ceilings("cuda")["matmul_flops_per_s"]["bfloat16"]
    found = machine.measure_sustained("cuda", machine.sensors_of("cuda"))
    print(reached, found)
    assert 0.3 * reached < found["matmul_flops_per_s"]["bfloat16"] < 1.05 * reached
    assert found["seconds"] >= machine.LEAST_S and found["power_w"] and found["sm_clock_mhz"]
