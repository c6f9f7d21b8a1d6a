"""`lmsys.bench.runner`: the order in which it calls a benchmark's hooks, what a fault costs, and what a record has.

The benchmark is `Telling` (tests/support/harness.py), which adds a number to itself and records the calls of its hooks.
Its rows are "right" and "also". It records successive calls of `redraw` once, and only these: each draw is one.

The last tests are of energy and conditions, on a device that is made up (`FakeDevice`). With `energy=True` the runner
measures energy in a pass of its own after the samples, by `lmsys.measure.energy`.
"""

import os
import runpy
import time
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.bench import Entry, Failed, Field, Grid, Settings, Step, Table, watch
from lmsys.bench.case import verdict
from lmsys.bench.fields import ENERGY, Record
from lmsys.bench.runner import Runner
from lmsys.bench.trial import OTHERS_ENERGY
from lmsys.bench.watch import Heartbeat
from lmsys.measure import energy
from lmsys.measure.energy import Energy
from lmsys.measure.machine import Limits
from lmsys.measure.sensors import Sensors
from tests.support.device import FakeDevice
from tests.support.harness import Telling, cases_of, records, results, runner
from tests.support.processes import ROOT

# The calls of hooks in a run, with their rows: before it is timed, for timing ("step" returns what is timed, "inspect"
# measures memory), and in the check that follows.
ORDER = [
    *("why_not right", "why_not also", "setup", "redraw", "open right", "open also", "check right", "check also"),
    *("step right", "step also", "redraw", "inspect right", "inspect also"),
    *("redraw", "check right", "check also"),
]


def test_the_order_is_the_runners() -> None:
    benchmark = Telling()
    by_row = records(benchmark, cases_of(benchmark))
    assert benchmark.called == ORDER
    for record in by_row.values():
        assert (
            record["outcome"] == "ok"
            and record["reason"] is None
            and record["size"] == 1
            and record["error_ratio"] == 0
        )
        # The section of `cases_of`, the size, and the date of the harness's MACHINE.
        assert record["rounds"] >= 10 and record["time_s"] > 0 and record["comparison"] == "s-1 now"


def test_without_timing_rows_are_checked_only() -> None:
    benchmark = Telling()
    for record in records(benchmark, cases_of(benchmark), timed=False).values():
        assert record["outcome"] == "ok" and "not timed" in record["reason"] and "time_s" not in record
    assert "step right" not in benchmark.called


@pytest.mark.parametrize(("settings", "seconds"), [({"timed": False}, []), ({"seconds_per_row": 0.01}, [0.02])])
def test_ceilings_are_measured_if_rows_are_timed_and_as_long_as_two_rows(
    settings: dict[str, Any], seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ceilings are the rates that the machine reaches. They are measured for 2 · seconds_per_row."""
    measured_s: list[float] = []
    monkeypatch.setattr(
        "lmsys.measure.machine.measure_ceilings", lambda device, seconds: measured_s.append(seconds) or {}
    )
    facts = Runner(Settings(device="cpu", **settings)).machine
    assert measured_s == seconds and ("ceilings" in facts) == bool(seconds)


def test_memory_is_limited_once_also_in_a_worker_that_imports_a_users_file_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[bool] = []
    monkeypatch.setattr("lmsys.measure.memory.cap_host_memory", lambda: limits.append(True))
    worker = Runner(Settings(device="cpu", timed=False), heartbeat=watch.Heartbeat())
    worker.collect(Telling(), [Grid("s")], {"row": "mine.py:f"})
    assert "guard" in vars(worker) and not limits  # it remembers what judges
    assert worker.ready() is worker.ready() and limits == [True]


NO_ROOM, NO_SUCH = MemoryError("no room"), TypeError("no such thing")


@pytest.mark.parametrize(
    ("hook", "error", "outcome", "reason"),
    [
        ("setup", NO_ROOM, "oom", "the bench failed, not the row: no room"),
        ("redraw", NO_ROOM, "error", "the bench failed, not the row: no room"),
        ("open", NO_SUCH, "error", "TypeError: no such thing"),
        ("check", NO_SUCH, "error", "TypeError: no such thing"),
        ("step", NO_SUCH, "error", "TypeError: no such thing"),
        ("inspect", NO_ROOM, "ok", None),  # costs a figure only
    ],
)
def test_what_fails_is_a_cell_too_and_says_whose_fault_it_is(
    hook: str, error: Exception, outcome: str, reason: str | None
) -> None:
    benchmark = Telling(**{hook: error})
    for record in records(benchmark, cases_of(benchmark)).values():
        assert (record["outcome"], record["reason"]) == (outcome, reason)
        assert ("time_s" in record) == (outcome == "ok")


CALLS = [0]


def right_at_first(a: int, b: int) -> int:
    """Right in its first two calls, in which the runner checks it, and wrong in all later ones."""
    CALLS[0] += 1
    return a + b if CALLS[0] < 3 else 0


def test_wrong_and_stale_rows_are_refused() -> None:
    class Bad(Telling):
        rows = Table(
            "adder",
            [Entry("wrong", "operator:sub"), Entry("stale", f"{__name__}:right_at_first"), Entry("gone", "nowhere:f")],
        )

        def why_not(self, case: Any) -> str | None:
            return case.entry.why_not(case)

    by_row = records(Bad(), cases_of(Bad()))
    # `Telling.check` gives a wrong sum the ratio 7.
    assert by_row["wrong"]["outcome"] == "wrong" and by_row["wrong"]["error_ratio"] == 7
    assert by_row["wrong"]["reason"] == "sum is 7 times the allowed error"
    assert by_row["stale"]["outcome"] == "wrong" and "right before it was timed, not after" in by_row["stale"]["reason"]
    assert by_row["gone"]["outcome"] == "unsupported" and "needs a package that is not here" in by_row["gone"]["reason"]
    assert not any("time_s" in record for record in by_row.values())


def test_a_field_that_nobody_declared_is_refused() -> None:
    class Undeclared(Telling):
        fields = ()

    with pytest.raises(ValueError, match=r"'telling': the fields \['size'\] of its records are declared nowhere"):
        results(Undeclared(), cases_of(Undeclared()))


def test_a_metric_is_one_line() -> None:
    class Metered(Telling):
        fields = (*Telling.fields, Field("sizes_per_s", "1/s", of=lambda record: record["size"] / record["time_s"]))

    for timed in (True, False):
        for record in records(Metered(), cases_of(Metered()), timed=timed).values():
            assert record["sizes_per_s"] == (pytest.approx(1 / record["time_s"]) if timed else None)


@given(st.dictionaries(st.text(min_size=1), st.floats(min_value=0) | st.just(float("nan")), min_size=1))
def test_a_verdict_is_the_worst_tensors(ratios: dict[str, float]) -> None:
    worst, wrong = verdict(ratios)
    assert (wrong is None) == all(ratio <= 1 for ratio in ratios.values())
    if worst is not None:
        assert worst == max(ratios.values())
    elif wrong is not None:
        assert "holds NaN or inf" in wrong[1]


def test_a_negative_error_is_wrong() -> None:
    """It is that of a benchmark that forgets the absolute value."""
    for ratios in ({"o": -0.2}, {"o": 0.1, "dq": -3.0}):
        assert verdict(ratios)[1] == (
            "wrong",
            f"{list(ratios)[-1]} is {min(ratios.values()):.3g} times the allowed error",
        )


def test_a_group_is_dropped_before_its_results_are_told() -> None:
    """A weak reference to what `setup` has made is empty when the first result comes."""

    class Big:
        """A stand-in for weights."""

    class Holding(Telling):
        def setup(self, cases: Any, settings: Any) -> Any:
            self.held = weakref.WeakSet([big := Big()])
            return [super().setup(cases, settings)[0], big]

        def open(self, candidate: Any, setup: Any) -> None:
            super().open(candidate, setup)
            candidate.state = setup

    benchmark = Holding()
    obtained = runner().run(benchmark, cases_of(benchmark))
    assert next(obtained)["outcome"] == "ok" and not benchmark.held


# Fields that a pass measures; a record without energy has none of them.
MEASURED = {field.name for field in ENERGY} - {"energy_note", "flops_per_j"}


class Counting(Telling):
    """A benchmark whose additions work on two tokens, and take at least a millisecond by their arithmetic."""

    def tokens(self, case: Any) -> int:
        return 2

    def metrics(self, case: Any, record: Record, machine: Record) -> Record:
        return {"flops": 600.0}

    def least_work(self, case: Any) -> tuple[float, str, float]:
        return 1e-3, "float32", 1e9


def with_energy(benchmark: Telling, device: Sensors, limits: Limits | None = None) -> dict[str, Record]:
    measuring = runner(energy=True)
    measuring.__dict__ |= {"sensors": device, "limits": limits}
    return {record["impl"]: record for record in measuring.run(benchmark, cases_of(benchmark))}


OF_A_PASS = Energy(3.0, 3.0, 5e-3, 10.0)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Called in place of a pass, which measures the energy of a row: both rows have the same."""
    measure = Mock(side_effect=[OF_A_PASS, OF_A_PASS])

    def of_step(step: Step, sensors: Sensors, synchronize: Any) -> Energy:
        synchronize()
        return measure()

    monkeypatch.setattr(energy, "of_step", of_step)
    return measure


def test_energy_is_a_pass_of_its_own_behind_the_samples(passes: Mock) -> None:
    benchmark = Counting()
    for record in with_energy(benchmark, FakeDevice()).values():
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


def test_energy_says_what_disturbed_its_pass(passes: Mock) -> None:
    device = FakeDevice()

    def another(*_: Any) -> Energy:
        device.others = [os.getpid(), 1]
        return OF_A_PASS

    passes.side_effect = another
    record = with_energy(Counting(), device)["right"]
    assert "1 other process" not in (record["disturbed"] or "")
    assert "while its energy was measured 1 other process had the device" in record["energy_note"]


def test_without_the_option_nothing_is_run_for_it(passes: Mock) -> None:
    bench = runner()
    bench.__dict__["sensors"] = FakeDevice(temperature_c=50.0, reasons=0x44)
    for record in bench.run(benchmark := Telling(), cases_of(benchmark)):
        assert record.keys() & MEASURED == set() and record["temperature_c"] == 50
        assert record["clock_reasons"] == "power cap, thermal slowdown by hardware"
        assert "the device was throttled (thermal slowdown by hardware)" in record["disturbed"]
    assert not passes.called


class Slow(Counting):
    def step(self, case: Any, candidate: Any, setup: Any) -> Step:
        return Step(lambda _: time.sleep(2e-3))


class Apart(Counting):
    """As a benchmark whose calls are made by several processes."""

    def sample(self, turn: Any, trial: Any) -> None:
        for case in turn:
            trial.measurements[case.id].samples = [1.0] * 10


class Empty(Counting):
    """As a benchmark that times calls by itself, and had no time for any."""

    def sample(self, turn: Any, trial: Any) -> None:
        for case in turn:
            trial.measurements[case.id].samples = []


def test_a_right_row_without_samples_says_why() -> None:
    found = records(benchmark := Empty(), cases_of(benchmark))
    assert {record["reason"] for record in found.values()} == {"its benchmark has taken no samples"}


BACK, FAST = "the counter of energy went back", "faster than this machine can be"


@pytest.mark.parametrize(
    ("kind", "device", "limits", "results", "notes"),
    [
        (Counting, Sensors(), None, [], (Sensors.why_no_joules, Sensors.why_no_joules)),
        (Counting, FakeDevice(), None, [Failed("error", BACK), OF_A_PASS], (BACK, None)),
        # The pass draws inputs once, so a row may know them. The row's arithmetic takes at least 1 ms. The limits also
        # allow 1.5 ms for reads, which a cache may save: the pass is held to the arithmetic alone.
        (
            Slow,
            FakeDevice(),
            Limits({"float32": 1.0}, 1e9 / 1.5e-3),
            [Energy(3.0, 3.0, 0.9e-3, 10.0), Energy(3.0, 3.0, 1.1e-3, 10.0)],
            (FAST, None),
        ),
        (Apart, FakeDevice(), None, [], (OTHERS_ENERGY, OTHERS_ENERGY)),
    ],
)
def test_a_row_without_energy_says_why_and_has_its_time(
    kind: type[Telling],
    device: Sensors,
    limits: Limits | None,
    results: list[Any],
    notes: tuple[str | None, str | None],
    passes: Mock,
) -> None:
    passes.side_effect = results
    measured = with_energy(kind(), device, limits)
    for row, note in zip(("right", "also"), notes, strict=True):
        record, told = measured[row], measured[row]["energy_note"]
        assert record["outcome"] == "ok" and record["time_s"] > 0 and "others_cpu_share" in record
        assert told is None if note is None else note in told
        assert record.get("energy_j") == (3.0 if note is None else None)
        assert note is None or (record.keys() & MEASURED == set() and record["flops_per_j"] is None)
        assert kind is not Apart or record["sm_clock_mhz"] is None  # conditions of other processes are not known


@pytest.mark.gpu
def test_a_gpu_has_energy_and_conditions_in_its_records() -> None:
    matmul = runpy.run_path(str(ROOT / "docs" / "examples" / "bench_matmul.py"))["Matmul"]
    benchmark, bench = matmul(), runner(device="cuda", energy=True)
    cases = cases_of(benchmark, Settings(device="cuda"), size=(4096,), dtype=("bfloat16",))
    cases = [case for case in cases if case.impl == "matmul"]
    (record,) = bench.run(benchmark, cases)
    assert record["outcome"] == "ok" and record["energy_note"] is None, record
    assert record["energy_j"] == pytest.approx(record["energy_integral_j"], rel=energy.APART)
    assert 0.5 * record["time_s"] < record["energy_call_s"] < 2 * record["time_s"]
    for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "energy_power_w"):
        assert record[name] > 0, name
    assert record["other_processes"] is not None and "others_cpu_share" in record


def test_a_pass_may_take_longer_than_the_deadline_of_a_call(passes: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[float] = []
    monkeypatch.setattr(Heartbeat, "renew", lambda self, seconds: renewed.append(seconds))
    with_energy(Counting(), FakeDevice())
    assert renewed == [600.0, 600.0]  # the deadline is renewed in each row's pass
