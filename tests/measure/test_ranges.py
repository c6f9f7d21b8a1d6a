"""Calls in NVTX ranges: each in one of its case's id, with nothing of the bench in it, and none of them timed."""

import pytest
import torch

from lmsys.bench import fields
from lmsys.measure.profile import NUM_CALLS, call_in_ranges
from lmsys.measure.step import Step
from tests.support.harness import Telling, cases_of, records


class Adding(Telling):
    fields = fields.columns("size")


class Ranges:
    """What happens, in order, pushes and pops of `torch.cuda.nvtx` among it."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    def range_push(self, name: str) -> None:
        self.happened.append(f"push {name}")

    def range_pop(self) -> None:
        self.happened.append("pop")


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    found = Ranges()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", found.range_push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", found.range_pop)
    return found


def test_a_range_holds_the_call_and_nothing_else(ranges: Ranges) -> None:
    tell = ranges.happened.append
    step = Step(
        run=lambda prepared: tell(f"run {prepared}"),
        prepare=lambda: tell("prepare") or 7,
        before=lambda: tell("before"),
        redraw=lambda draw: tell(f"redraw {draw}"),
        redraw_late=lambda draw: tell(f"late {draw}"),
        keep=lambda found, key: tell(f"keep {key}"),
    )
    call_in_ranges("one-{case}", step, "cpu")
    own = ["push one-{case}", "run 7", "pop", "keep None"]
    assert ranges.happened == [
        one for i in range(NUM_CALLS) for one in ("before", f"redraw {i}", "prepare", f"late {i}", *own)
    ]


def test_a_range_ends_where_the_call_fails(ranges: Ranges) -> None:
    with pytest.raises(ZeroDivisionError):
        call_in_ranges("one-case", Step(lambda _: 1 / 0), "cpu")
    assert ranges.happened == ["push one-case", "pop"]


def test_every_case_is_called_in_ranges_of_its_id_and_none_is_timed(ranges: Ranges) -> None:
    cases = cases_of(Adding())
    found = records(Adding(), cases, nvtx=True, timed=False)
    assert ranges.happened == [one for case in cases for _ in range(NUM_CALLS) for one in (f"push {case.id}", "pop")]
    for one in found.values():
        assert one["outcome"] == "ok" and one["reason"] == "called in NVTX ranges, not timed (--nvtx)"
        assert "time_s" not in one


def test_without_the_option_nothing_is_pushed(ranges: Ranges) -> None:
    found = records(Adding(), cases_of(Adding()))
    assert not ranges.happened and all(one["time_s"] for one in found.values())
