"""`lmsys.bench.runner`: the order in which it calls a benchmark's hooks, what a fault costs, and what a record has.

The benchmark is `Telling` (tests/support/harness.py), which adds a number to itself and records the calls of its hooks.
Its rows are "right" and "also". It records successive calls of `redraw` once, and only these: each draw is one.
"""

import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.bench import Entry, Field, Grid, Settings, Table, watch
from lmsys.bench.case import verdict
from lmsys.bench.runner import Runner
from tests.support.harness import Telling, cases_of, records, results, runner

# The calls of hooks in a run, with their rows: before it is timed, for timing ("step" returns what is timed, "inspect"
# measures memory), and in the check that follows.
ORDER = [
    *("why_not right", "why_not also", "setup", "redraw", "open right", "open also", "check right", "check also"),
    *("step right", "step also", "redraw", "inspect right", "inspect also"),
    *("redraw", "check right", "check also"),
]


class WithSize(Telling):
    """`Telling`, with the field of its records declared, without which its results are refused."""

    fields = (Field("size", role="axis"),)


def test_the_order_is_the_runners() -> None:
    benchmark = WithSize()
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
    benchmark = WithSize()
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
    worker.collect(WithSize(), [Grid("s")], {"row": "mine.py:f"})
    assert "guard" in vars(worker) and not limits  # it remembers what judges
    assert worker.ready() is worker.ready() and limits == [True]


@pytest.mark.parametrize(("hook", "outcome"), [("setup", "oom"), ("redraw", "error")])
def test_what_fails_in_the_bench_itself_is_a_cell_too(hook: str, outcome: str) -> None:
    benchmark = WithSize(**{hook: MemoryError("no room")})
    for record in records(benchmark, cases_of(benchmark)).values():
        assert record["outcome"] == outcome and record["reason"] == "the bench failed, not the row: no room"
        assert "time_s" not in record


@pytest.mark.parametrize(("hook", "outcome"), [("open", "error"), ("check", "error"), ("step", "error")])
def test_what_fails_in_a_row_is_the_rows(hook: str, outcome: str) -> None:
    benchmark = WithSize(**{hook: TypeError("no such thing")})
    for record in records(benchmark, cases_of(benchmark)).values():
        assert (record["outcome"], record["reason"]) == (outcome, "TypeError: no such thing") and "time_s" not in record


def test_a_fault_in_inspecting_costs_the_figure_only() -> None:
    benchmark = WithSize(inspect=MemoryError("no room"))
    assert all(
        record["outcome"] == "ok" and record["time_s"] > 0
        for record in records(benchmark, cases_of(benchmark)).values()
    )


CALLS = [0]


def right_at_first(a: int, b: int) -> int:
    """Right in its first two calls, in which the runner checks it, and wrong in all later ones."""
    CALLS[0] += 1
    return a + b if CALLS[0] < 3 else 0


def test_wrong_and_stale_rows_are_refused() -> None:
    class Bad(WithSize):
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
    with pytest.raises(ValueError, match=r"'telling': the fields \['size'\] of its records are declared nowhere"):
        results(Telling(), cases_of(Telling()))


def test_a_metric_is_one_line() -> None:
    class Metered(WithSize):
        fields = (*WithSize.fields, Field("sizes_per_s", "1/s", of=lambda record: record["size"] / record["time_s"]))

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


def test_a_group_is_dropped_before_its_results_are_told() -> None:
    """A weak reference to what `setup` has made is empty when the first result comes."""

    class Big:
        """A stand-in for weights."""

    class Holding(WithSize):
        def setup(self, cases: Any, settings: Any) -> Any:
            self.held = weakref.WeakSet([big := Big()])
            return [super().setup(cases, settings)[0], big]

        def open(self, candidate: Any, setup: Any) -> None:
            super().open(candidate, setup)
            candidate.state = setup

    benchmark = Holding()
    obtained = runner().run(benchmark, cases_of(benchmark))
    assert next(obtained).record["outcome"] == "ok" and not benchmark.held
