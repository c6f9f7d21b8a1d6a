"""Calls in NVTX ranges (`call_in_ranges`, `--nvtx`): each range has its case's id, and holds the row's call alone.

`Ranges` takes the place of `torch.cuda.nvtx`, and logs events in `happened`, which tests compare. No call is timed.
"""

import pytest
import torch

from lmsys.bench import fields
from lmsys.measure.profile import NUM_CALLS, call_in_ranges
from lmsys.measure.step import Step
from tests.support.harness import Telling, cases_of, records


class Adding(Telling):
    """The benchmark under test, derived from the one of tests/support/harness.py. Its cases differ in their size."""

    fields = fields.columns("size")


class Ranges:
    """Takes the place of `torch.cuda.nvtx`; `happened` logs pushes and pops, and whatever a test appends, in order."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    def range_push(self, name: str) -> None:
        self.happened.append(f"push {name}")

    def range_pop(self) -> None:
        self.happened.append("pop")


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    recorder = Ranges()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", recorder.range_push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", recorder.range_pop)
    return recorder


def test_a_range_holds_the_call_and_nothing_else(ranges: Ranges) -> None:
    log = ranges.happened.append
    step = Step(
        run=lambda prepared: log(f"run {prepared}"),
        prepare=lambda: log("prepare") or 7,
        before=lambda: log("before"),
        redraw=lambda draw: log(f"redraw {draw}"),
        redraw_late=lambda draw: log(f"late {draw}"),
        keep=lambda result, key: log(f"keep {key}"),
    )
    call_in_ranges("one-{case}", step, "cpu")
    of_the_range = ["push one-{case}", "run 7", "pop", "keep None"]
    assert ranges.happened == [
        event for i in range(NUM_CALLS) for event in ("before", f"redraw {i}", "prepare", f"late {i}", *of_the_range)
    ]


def test_a_range_ends_where_the_call_fails(ranges: Ranges) -> None:
    with pytest.raises(ZeroDivisionError):
        call_in_ranges("one-case", Step(lambda _: 1 / 0), "cpu")
    assert ranges.happened == ["push one-case", "pop"]


def test_every_case_is_called_in_ranges_of_its_id_and_none_is_timed(ranges: Ranges) -> None:
    cases = cases_of(Adding())
    by_row = records(Adding(), cases, nvtx=True, timed=False)
    assert ranges.happened == [
        event for case in cases for _ in range(NUM_CALLS) for event in (f"push {case.id}", "pop")
    ]
    for record in by_row.values():
        assert record["outcome"] == "ok" and record["reason"] == "called in NVTX ranges, not timed (--nvtx)"
        assert "time_s" not in record


def test_without_the_option_nothing_is_pushed(ranges: Ranges) -> None:
    by_row = records(Adding(), cases_of(Adding()))
    assert not ranges.happened and all(record["time_s"] for record in by_row.values())
