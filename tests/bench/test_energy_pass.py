"""Energy and conditions in records, by a runner whose device is made up (`FakeDevice`).

With `energy=True` the runner measures energy in a pass of its own after the samples, by `lmsys.measure.energy`.
"""

import runpy
import time
from typing import Any

import pytest

from lmsys.bench import Settings, Step
from lmsys.bench.fields import ENERGY, Record
from lmsys.bench.findings import OTHERS_ENERGY
from lmsys.bench.watch import Heartbeat
from lmsys.measure import energy
from lmsys.measure.energy import Energy, EnergyError
from lmsys.measure.machine import Limits
from lmsys.measure.sensors import Sensors
from tests.bench.test_runner import WithSize
from tests.support.device import FakeDevice
from tests.support.harness import cases_of, runner
from tests.support.processes import ROOT

# Fields that a pass measures; a record without energy has none of them.
MEASURED = {field.name for field in ENERGY} - {"energy_note", "flops_per_j"}


class Counting(WithSize):
    """A benchmark whose additions work on two tokens, and take at least a millisecond by their arithmetic."""

    def tokens(self, case: Any) -> int:
        return 2

    def metrics(self, case: Any, record: Record, machine: Record) -> Record:
        return {"flops": 600.0}

    def least_work(self, case: Any) -> tuple[float, str, float]:
        return 1e-3, "float32", 1e9


def records(benchmark: WithSize, device: Sensors, limits: Limits | None = None) -> dict[str, Record]:
    with_energy = runner(energy=True)
    with_energy.__dict__ |= {"sensors": device, "limits": limits}
    return {result.record["impl"]: result.record for result in with_energy.run(benchmark, cases_of(benchmark))}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list from which each pass takes its result from the front: an `Energy`, or an exception that it raises.

    The step that was measured is put at the end.
    """
    queue: list[Any] = [Energy(3.0, 3.0, 5e-3, 10.0)] * 2

    def of_step(step: Step, sensors: Sensors, synchronize: Any) -> Energy:
        synchronize()
        result = queue.pop(0)
        queue.append(step)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(energy, "of_step", of_step)
    return queue


def test_energy_is_a_pass_of_its_own_behind_the_samples(passes: list[Any]) -> None:
    benchmark = Counting()
    for record in records(benchmark, FakeDevice()).values():
        assert record["outcome"] == "ok" and record["rounds"] >= 10
        assert (record["energy_j"], record["energy_integral_j"], record["energy_per_token_j"]) == (3.0, 3.0, 1.5)
        assert (record["energy_power_w"], record["energy_call_s"], record["energy_note"]) == (
            pytest.approx(600),
            5e-3,
            None,
        )
        assert record["flops_per_j"] == 200.0
    inspected = benchmark.called.index("inspect right")
    assert benchmark.called[inspected : inspected + 6] == [
        "inspect right", "step right", "redraw", "inspect also", "step also", "redraw",
    ]  # fmt: skip


def test_without_the_option_nothing_is_run_for_it(passes: list[Any]) -> None:
    bench = runner()
    bench.__dict__["sensors"] = FakeDevice(temperature_c=50.0, reasons=0x44)
    for result in bench.run(benchmark := WithSize(), cases_of(benchmark)):
        assert result.record.keys() & MEASURED == set() and result.record["temperature_c"] == 50
        assert result.record["clock_reasons"] == "power cap, thermal slowdown by hardware"
        assert "the device was throttled (thermal slowdown by hardware)" in result.record["disturbed"]
    assert all(isinstance(energy_pass, Energy) for energy_pass in passes)


def test_a_machine_without_a_counter_says_why_and_makes_nothing_up(passes: list[Any]) -> None:
    for record in records(Counting(), Sensors()).values():
        assert record["outcome"] == "ok" and record["time_s"] > 0
        assert record["energy_note"] == Sensors.why_no_joules and record.keys() & MEASURED == set()
        assert record["flops_per_j"] is None


def test_a_pass_that_fails_costs_the_energy_only(passes: list[Any]) -> None:
    passes[0] = EnergyError("the counter of energy went back")
    measured = records(Counting(), FakeDevice())
    assert (
        measured["right"]["energy_note"] == "the counter of energy went back" and measured["right"]["outcome"] == "ok"
    )
    assert measured["right"].keys() & MEASURED == set() and measured["also"]["energy_j"] == 3.0


def test_a_row_that_is_faster_than_its_arithmetic_in_the_pass_has_no_energy(passes: list[Any]) -> None:
    """The pass draws inputs once, so a row may know them. The row's arithmetic takes at least 1 ms.

    The limits also allow 1.5 ms for reads, which a cache may save: the pass is held to the arithmetic alone.
    """
    passes[:] = [Energy(3.0, 3.0, 0.9e-3, 10.0), Energy(3.0, 3.0, 1.1e-3, 10.0)]
    measured = records(Slow(), FakeDevice(), Limits({"float32": 1.0}, 1e9 / 1.5e-3))
    assert "faster than this machine can be" in measured["right"]["energy_note"]
    assert measured["also"]["energy_j"] == 3.0 and measured["right"]["outcome"] == "ok"


@pytest.mark.gpu
def test_a_gpu_has_energy_and_conditions_in_its_records() -> None:
    matmul = runpy.run_path(str(ROOT / "docs" / "examples" / "bench_matmul.py"))["Matmul"]
    benchmark, bench = matmul(), runner(device="cuda", energy=True)
    cases = cases_of(benchmark, Settings(device="cuda"), size=(4096,), dtype=("bfloat16",))
    cases = [case for case in cases if case.impl == "matmul"]
    (record,) = [result.record for result in bench.run(benchmark, cases)]
    assert record["outcome"] == "ok" and record["energy_note"] is None, record
    assert record["energy_j"] == pytest.approx(record["energy_integral_j"], rel=energy.APART)
    assert 0.5 * record["time_s"] < record["energy_call_s"] < 2 * record["time_s"]
    for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "energy_power_w"):
        assert record[name] > 0, name
    assert record["other_processes"] is not None and "others_cpu_share" in record


class Slow(Counting):
    def step(self, case: Any, candidate: Any, setup: Any) -> Step:
        return Step(lambda _: time.sleep(2e-3))


def test_a_pass_may_take_longer_than_the_deadline_of_a_call(passes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[float] = []
    monkeypatch.setattr(Heartbeat, "renew", lambda self, seconds: renewed.append(seconds))
    records(Counting(), FakeDevice())
    assert renewed == [600.0, 600.0]  # the deadline is renewed in each row's pass


def test_calls_that_several_processes_make_have_none(passes: list[Any]) -> None:
    class Apart(Counting):
        def sample(self, turn: Any, trial: Any) -> None:
            for case in turn:
                trial.measurements[case.id].samples = [1.0] * 10

    for record in records(Apart(), FakeDevice()).values():
        assert record["energy_note"] == OTHERS_ENERGY and record.keys() & MEASURED == set()
        assert record["sm_clock_mhz"] is None and "others_cpu_share" in record
