"""The guard remembers what judges and measures, and puts it back where a row has replaced it."""

import math
import operator
import time
from typing import Any

import pytest
import torch

from lmsys import testing
from lmsys.attention.naive import naive
from lmsys.bench import trial
from lmsys.bench.guard import Guard
from lmsys.measure import clock, compare
from lmsys.training import optimizer


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (time, "perf_counter"),
        (operator, "call"),
        (torch, "stack"),
        (torch.Tensor, "double"),
        (torch.cuda.Event, "elapsed_time"),  # which the class has, or inherits
        (clock, "perf_counter"),
        (compare, "interleave"),
        (trial, "verdict"),
        (testing.Oracle, "judge"),
        (clock.CpuClock, "sample"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_what_is_replaced_is_named_and_put_back(owner: Any, name: str) -> None:
    guard, before = Guard(), getattr(owner, name)
    setattr(owner, name, lambda *_, **__: 0.0)
    assert guard.mend() == [f"{owner.__name__}.{name}"]
    assert getattr(owner, name) == before and guard.mend() == []


def test_a_function_with_other_code_is_noticed() -> None:
    guard, code = Guard(), compare.outcome_of.__code__
    compare.outcome_of.__code__ = (lambda error: ("ok", "")).__code__
    assert guard.mend() == ["the code of outcome_of"]
    assert compare.outcome_of.__code__ is code


def test_what_honest_code_does_is_no_replacement() -> None:
    guard = Guard()
    torch.manual_seed(0)
    setattr(math, "of_a_row", lambda: 0)  # noqa: B010 - a name of its own
    try:
        torch.compile(naive, backend="eager")(*torch.ones(3, 1, 1, 2, 2))
        within = Guard()
        torch.compiler.reset()
        assert guard.mend() == within.mend() == []
    finally:
        delattr(math, "of_a_row")


def test_torch_may_wrap_the_step_of_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so when the first one is made."""
    step = optimizer.AdamW.step
    monkeypatch.setattr(optimizer.AdamW, "step", getattr(step, "__wrapped__", step))
    guard = Guard()
    optimizer.AdamW([torch.ones(1, requires_grad=True)])
    assert guard.mend() == []
