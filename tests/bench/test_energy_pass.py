"""Energy and conditions in records: by a runner whose device is made up."""

import runpy
import time
from typing import Any

import pytest

from lmsys.bench import Settings, Step
from lmsys.bench.fields import ENERGY, Record
from lmsys.bench.findings import OF_OTHERS
from lmsys.bench.watch import Heartbeat
from lmsys.measure import energy
from lmsys.measure.energy import Energy, EnergyError
from lmsys.measure.machine import Limits
from lmsys.measure.sensors import Sensors
from tests.bench.test_runner import WithSize
from tests.support.device import FakeDevice
from tests.support.harness import cases_of, runner
from tests.support.processes import ROOT

MEASURED = {one.name for one in ENERGY} - {"energy_note", "flops_per_j"}


class Counting(WithSize):
    """Each addition works on two tokens, and takes a millisecond at least by its arithmetic."""

    def tokens(self, case: Any) -> int:
        return 2

    def metrics(self, case: Any, record: Record, machine: Record) -> Record:
        return {"flops": 600.0}

    def least_work(self, case: Any) -> tuple[float, str, float]:
        return 1e-3, "float32", 1e9


def records(benchmark: WithSize, device: Sensors, limits: Limits | None = None) -> dict[str, Record]:
    one = runner(energy=True)
    one.__dict__ |= {"sensors": device, "limits": limits}
    return {found.record["impl"]: found.record for found in one.run(benchmark, cases_of(benchmark))}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A pass finds, or raises, the first of these for each case in turn, whose step goes to their end."""
    found: list[Any] = [Energy(3.0, 3.0, 5e-3, 10.0)] * 2

    def of_step(step: Step, sensors: Sensors, synchronize: Any) -> Energy:
        synchronize()
        result = found.pop(0)
        found.append(step)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(energy, "of_step", of_step)
    return found


def test_energy_is_a_pass_of_its_own_behind_the_samples(passes: list[Any]) -> None:
    benchmark = Counting()
    for one in records(benchmark, FakeDevice()).values():
        assert one["outcome"] == "ok" and one["rounds"] >= 10
        assert (one["energy_j"], one["energy_integral_j"], one["energy_per_token_j"]) == (3.0, 3.0, 1.5)
        assert (one["energy_power_w"], one["energy_call_s"], one["energy_note"]) == (pytest.approx(600), 5e-3, None)
        assert one["flops_per_j"] == 200.0
    inspected = benchmark.told.index("inspect right")
    assert benchmark.told[inspected : inspected + 6] == [
        "inspect right", "step right", "redraw", "inspect also", "step also", "redraw",
    ]  # fmt: skip


def test_without_the_option_nothing_is_run_for_it(passes: list[Any]) -> None:
    one = runner()
    one.__dict__["sensors"] = FakeDevice(temperature_c=50.0, reasons=0x44)
    for found in one.run(benchmark := WithSize(), cases_of(benchmark)):
        assert found.record.keys() & MEASURED == set() and found.record["temperature_c"] == 50
        assert found.record["clock_reasons"] == "power cap, thermal slowdown by hardware"
        assert "the device was throttled (thermal slowdown by hardware)" in found.record["disturbed"]
    assert all(isinstance(one, Energy) for one in passes)


def test_a_machine_without_a_counter_says_why_and_makes_nothing_up(passes: list[Any]) -> None:
    for one in records(Counting(), Sensors()).values():
        assert one["outcome"] == "ok" and one["time_s"] > 0
        assert one["energy_note"] == Sensors.why_no_joules and one.keys() & MEASURED == set()
        assert one["flops_per_j"] is None


def test_a_pass_that_fails_costs_the_energy_only(passes: list[Any]) -> None:
    passes[0] = EnergyError("the counter of energy went back")
    found = records(Counting(), FakeDevice())
    assert found["right"]["energy_note"] == "the counter of energy went back" and found["right"]["outcome"] == "ok"
    assert found["right"].keys() & MEASURED == set() and found["also"]["energy_j"] == 3.0


def test_a_row_that_is_faster_than_its_arithmetic_in_the_pass_has_no_energy(passes: list[Any]) -> None:
    """Inputs are drawn once, so it may know them. Arithmetic takes 1 ms; reads 1.5 ms, if no cache holds them."""
    passes[:] = [Energy(3.0, 3.0, 0.9e-3, 10.0), Energy(3.0, 3.0, 1.1e-3, 10.0)]
    found = records(Slow(), FakeDevice(), Limits({"float32": 1.0}, 1e9 / 1.5e-3))
    assert "faster than this machine can be" in found["right"]["energy_note"]
    assert found["also"]["energy_j"] == 3.0 and found["right"]["outcome"] == "ok"


@pytest.mark.gpu
def test_a_gpu_has_energy_and_conditions_in_its_records() -> None:
    matmul = runpy.run_path(str(ROOT / "docs" / "examples" / "bench_matmul.py"))["Matmul"]
    benchmark, one = matmul(), runner(device="cuda", energy=True)
    cases = cases_of(benchmark, Settings(device="cuda"), size=(4096,), dtype=("bfloat16",))
    cases = [case for case in cases if case.impl == "matmul"]
    (found,) = [result.record for result in one.run(benchmark, cases)]
    assert found["outcome"] == "ok" and found["energy_note"] is None, found
    assert found["energy_j"] == pytest.approx(found["energy_integral_j"], rel=energy.APART)
    assert 0.5 * found["time_s"] < found["energy_call_s"] < 2 * found["time_s"]
    for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "energy_power_w"):
        assert found[name] > 0, name
    assert found["other_processes"] is not None and "others_cpu_share" in found


class Slow(Counting):
    def step(self, case: Any, candidate: Any, setup: Any) -> Step:
        return Step(lambda _: time.sleep(2e-3))


def test_a_pass_may_take_longer_than_the_deadline_of_a_call(passes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[float] = []
    monkeypatch.setattr(Heartbeat, "renew", lambda self, seconds: renewed.append(seconds))
    records(Counting(), FakeDevice())
    assert renewed == [600.0, 600.0]  # whenever the device has done some calls


def test_calls_that_several_processes_make_have_none(passes: list[Any]) -> None:
    class Apart(Counting):
        def sample(self, turn: Any, trial: Any) -> None:
            for case in turn:
                trial.measurements[case.id].samples = [1.0] * 10

    for one in records(Apart(), FakeDevice()).values():
        assert one["energy_note"] == OF_OTHERS and one.keys() & MEASURED == set()
        assert one["sm_clock_mhz"] is None and "others_cpu_share" in one
