"""docs/examples/bench_norm.py: its check accepts right norms, and sees a mistake in the directions that show it."""

import runpy
from typing import Any
from unittest.mock import Mock

import pytest

from lmsys.bench import Step
from lmsys.bench.benchmark import Settings
from lmsys.bench.case import Candidate
from tests.support.processes import ROOT

EXAMPLE = runpy.run_path(str(ROOT / "docs" / "examples" / "bench_norm.py"))
EPS = EXAMPLE["EPS"]


def right(x: Any, weight: Any, eps: float) -> Any:
    return EXAMPLE["formula"](x.float(), weight.float(), eps).to(x.dtype)


def no_weight(x: Any, weight: Any, eps: float) -> Any:
    """As with a weight of ones. The real weight stays an input of the result, with a gradient of zero."""
    return right(x, weight, eps) + 0 * weight - right(x, weight - 1, eps)


def detached(x: Any, weight: Any, eps: float) -> Any:
    """Wrong in the backward alone: no gradient flows through the root mean square."""
    return x * (x.detach().square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def opened(norm: Any, dtype: str, direction: str) -> tuple[Any, Any, Step]:
    """The example's benchmark, its setup for a case with drawn inputs, and the step that calls this norm."""
    case = EXAMPLE["NormCase"]("test", EXAMPLE["ROWS"]["torch"], "cpu", 33, 96, dtype, direction)  # tokens, width
    norms = EXAMPLE["Norm"]()
    setup = norms.setup([case], Settings(seed=3))
    norms.redraw(setup, 5)
    return norms, setup, norms.step(case, Candidate(case=case, call=norm), setup)


def ratio(norm: Any, dtype: str, direction: str) -> float:
    """The largest error over what is allowed, by the example's check; at most 1 is right."""
    norms, setup, step = opened(norm, dtype, direction)
    return max(norms.errors(setup, step.run(step.prepare())).values())


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwdbwd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mistake_is_seen_where_it_is(dtype: str, direction: str) -> None:
    assert ratio(right, dtype, direction) <= 1 and ratio(EXAMPLE["by_torch"], dtype, direction) <= 1
    assert ratio(no_weight, dtype, direction) > 1
    assert (ratio(detached, "float32", direction) > 1) == (direction != "fwd"), "its forward is right"


def test_the_backward_that_is_timed_runs_no_forward() -> None:
    """It is called in `prepare` alone."""
    norm = Mock(side_effect=right)
    _, _, step = opened(norm, "float32", "bwd")
    made = step.prepare()
    assert norm.call_count == 1
    step.run(made)
    assert norm.call_count == 1
