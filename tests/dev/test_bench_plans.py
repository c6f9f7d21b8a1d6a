"""The benchmark of plans (`dev/bench_plans.py`): which cases it has, how plans are run and judged, and bad plans."""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dev import bench_plans, plan_cases
from dev.bench_plans import Plans, ShortPlans
from dev.plan_cases import FORMS, SHORT, PlanCase, candidates, name_of, plan_called
from lmsys.attention.flash_gluon.plans import BACKWARD, FORWARD, BackwardPlan, ForwardPlan
from lmsys.attention.naive import masked_scores, naive
from lmsys.attention.pattern import PLAIN
from lmsys.kernels.tritons import is_known
from lmsys.processes import futures
from tests.support.cheats import CLOCK, seen
from tests.support.collected import collect
from tests.support.harness import cases_of, records

triton = pytest.importorskip("triton")
known = pytest.mark.skipif(not is_known(), reason="the kernels know some versions of Triton")
SHAPES = list(product(("fwd", "bwd"), (64, 128), (True, False), (128, SHORT, 1024, 16384)))
ONE = {"plan": ("planned",), "head_dim": (64,), "length": ((128, 128),), "causal": (True,)}


def works(case: PlanCase) -> None:
    """Stands for `first_call`, which needs a GPU."""


def in_this_process(function: Callable[[Any], Any], tasks: Iterable[Any], count: int, **_: Any) -> Iterator[Any]:
    """Stands for `futures`, without processes."""
    for task in tasks:
        function(task)
        yield SimpleNamespace(exception=lambda: None)


def dies_by_one(case: PlanCase) -> None:
    if case.plan == BackwardPlan(True, 5):
        os._exit(7)
    if case.plan == BackwardPlan(True, 11):
        raise RuntimeError("no room for registers")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens, and nothing is compiled before."""
    monkeypatch.setattr(bench_plans, "TOKENS", 128)
    monkeypatch.setattr(bench_plans, "first_call", works)
    monkeypatch.setattr(bench_plans, "futures", in_this_process)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, quick: None) -> list[Any]:
    """Runs the benchmark on a CPU: small shapes, and plain PyTorch in place of the kernels.

    The list gets an item for each call: a forward's plan, or a backward's (deterministic, plan).
    """
    from lmsys.attention.flash_gluon import launch

    asked: list[Any] = []

    def forward(q: Any, k: Any, v: Any, causal: bool, scale: float, plan: Any = None) -> Any:
        asked.append(plan)
        x = (q.float(), k.float(), v.float())
        lse = masked_scores(*x[:2], PLAIN[causal], scale)[0].logsumexp(-1)
        return naive(*x, causal=causal, scale=scale).to(q.dtype), lse

    def backward(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, causal: bool, scale: float, *rest: Any) -> Any:
        asked.append(rest)
        x = [one.detach().float().requires_grad_() for one in (q, k, v)]
        grads = torch.autograd.grad(naive(*x, causal=causal, scale=scale), x, do.float())
        return [grad.to(q.dtype) for grad in grads]

    def row(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return forward(q, k, v, causal, q.shape[-1] ** -0.5, "as users call it")[0]

    monkeypatch.setattr(plan_cases, "WIDTH", 512)
    monkeypatch.setattr(bench_plans, "CALLS", 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Plans, "why_not", lambda self, case: None if case.entry.name == "flash_gluon" else "no GPU")
    for name, function in {"_forward": forward, "_backward": backward, "flash_gluon": row}.items():
        monkeypatch.setattr(launch, name, function)
    return asked


def every_plan() -> Iterator[Any]:
    for table in (FORWARD, BACKWARD):
        yield from (plan for entries in table.values() for _, plan in entries)
    for shape in SHAPES:
        yield from candidates(*shape)


def test_a_plan_is_read_from_its_name() -> None:
    for plan in every_plan():
        assert plan_called(name_of(plan)) == plan and "," not in name_of(plan)
    assert plan_called("consumers2+stages3+l2_mib0+tile_k128") == ForwardPlan(2, 3, False, False, False, 0)
    assert plan_called("l2_mib11") == BackwardPlan(False, 11)
    for text in (
        "",
        "planed",
        "consumers2",
        "consumers+stages3+l2_mib0",
        "prefetch1+l2_mib5",
        "l2_mib5+l3_mib5",
        "l2_mib5+",
    ):
        with pytest.raises(
            ValueError, match=r"must be planned, candidates, or a plan by its fields, such as consumers2\+"
        ):
            plan_called(text)


def test_without_the_option_there_are_no_plans_and_with_it_each_has_an_id() -> None:
    assert not cases_of(Plans()) and not cases_of(ShortPlans())
    for benchmark in (Plans(), ShortPlans()):
        for plan in ("planned", "candidates"):
            cases = cases_of(benchmark, plan=(plan,), form=FORMS)
            assert len({case.id for case in cases}) == len(cases) > 0
            for comparison in {case.comparison for case in cases}:
                (peer,) = [case for case in cases if case.comparison == comparison and case.plan is None]
                assert peer.impl == "sdpa_cudnn"
    planned, found = collect([["dev/bench_plans.py", "--axis", f"plan={plan}"] for plan in ("planned", "l2_mib5")])
    assert planned["code"] == found["code"] == 0 and len(planned["ids"]) == 2 * (24 + 24)
    assert {name.rpartition("-")[2] for name in found["ids"]} == {"sdpa_cudnn]", "l2_mib5]"}


def test_a_plan_is_timed_in_its_own_direction_alone() -> None:
    plans = ForwardPlan(2, 2, False, False, True, 0), BackwardPlan(True, 5)
    cases = cases_of(Plans(), plan=plans, direction=("fwd", "bwd", "fwdbwd"), head_dim=(64,))
    assert {(case.direction, case.plan) for case in cases} == {
        *(("fwd", plan) for plan in (None, plans[0])),
        *(("bwd", plan) for plan in (None, plans[1])),
    }
    assert {case.direction for case in cases_of(ShortPlans(), plan=("planned",), direction=("bwd", "fwd"))} == {"fwd"}
    assert not cases_of(Plans(), plan=("planned",), head_dim=(96,))


def test_without_a_gpu_they_are_unsupported() -> None:
    if torch.cuda.is_available():
        pytest.skip("here is one")
    for one in records(Plans(), cases_of(Plans(), **ONE, direction=("fwd",))).values():
        assert one["outcome"] == "unsupported" and "CUDA" in one["reason"]


@known
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_each_is_run_with_its_plan_checked_and_timed(direction: str, on_cpu: list[Any]) -> None:
    plan = ForwardPlan(2, 2, False, True, True, 32) if direction == "fwd" else BackwardPlan(True, 11)
    asked = ONE | {"plan": ("planned", plan), "direction": (direction,)}
    found = records(Plans(), cases_of(Plans(), **asked))
    name = f"flash_gluon-{name_of(plan)}"
    assert found.keys() == {"sdpa_cudnn", "flash_gluon", name} and found["sdpa_cudnn"]["outcome"] == "unsupported"
    own, one = found["flash_gluon"], found[name]
    assert one["plan"] == name_of(plan) and one["label"].endswith(name_of(plan))
    for record in (own, one):
        assert record["outcome"] == "ok" and record["error_ratio"] <= 1 and record["clock"] == "perf_counter"
        assert record["flops_per_s"] == pytest.approx(record["flops"] / record["time_s"])
        assert record["call_s"] == record["time_s"] and record["comparison"] == own["comparison"]
    given = plan if direction == "fwd" else (False, plan)
    assert given in on_cpu


@known
def test_forms_are_compared_with_plain_cases(on_cpu: list[Any]) -> None:
    cases = cases_of(Plans(), **ONE, direction=("bwd",), form=FORMS)
    shapes = {case.form: (case.asked.kv_heads, case.asked.keys) for case in cases}
    assert shapes == {
        "plain": (8, 128),
        "deterministic": (8, 128),
        "ragged": (8, 127),
        "transposed": (8, 128),
        "grouped": (1, 128),
    }
    full = cases_of(Plans(), **(ONE | {"causal": (False,)}), direction=("bwd",), form=FORMS)
    reordered = {case.form: case.plan.late_dv for case in full if isinstance(case.plan, BackwardPlan)}
    assert reordered == dict.fromkeys(FORMS, True), "what the row takes by itself"
    found = records(Plans(), cases)
    assert {one["outcome"] for name, one in found.items() if name != "sdpa_cudnn"} == {"ok"}
    for one in found.values():
        for call in one["proof"]["calls"] if "proof" in one else ():
            judged = list(Plans().repeat(one, call))
            assert call["error_ratios"].keys() == {"dq", "dk", "dv"} and set(judged) == {one["head_dim"]}, judged
    assert {rest[0] for rest in on_cpu if isinstance(rest, tuple)} == {False, True}
    assert found["flash_gluon-ragged"]["flops"] < found["flash_gluon"]["flops"] == found["flash_gluon-grouped"]["flops"]
    fwd = cases_of(Plans(), **ONE, direction=("fwd",), form=FORMS)
    assert "deterministic" not in {case.form for case in fwd}


@known
def test_short_sequences_are_called_many_times_a_sample(on_cpu: list[Any]) -> None:
    plan = candidates("fwd", 64, True, 128)[0]
    asked = ONE | {"plan": ("planned", plan), "graphed": (False,)}
    cases = cases_of(ShortPlans(), **asked)
    found = records(ShortPlans(), cases)
    for name in ("flash_gluon", f"flash_gluon-{name_of(plan)}"):
        one = found[name]
        assert one["outcome"] == "ok" and one["calls"] == 3 and one["call_s"] == one["time_s"] / 3
        assert one["flops"] == 3 * 4 * 128 * 128 / 2 * 512
    assert {"as users call it", plan} <= set(on_cpu)
    (graphed,) = {case.batch for case in cases_of(ShortPlans(), **(asked | {"graphed": (True,)}))}
    assert graphed == 1


@known
@pytest.mark.long
def test_a_plan_that_dies_or_cannot_be_compiled_is_a_case_that_failed(
    on_cpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_plans, "first_call", dies_by_one)
    monkeypatch.setattr(bench_plans, "futures", futures)
    benchmark = Plans()
    cases = cases_of(benchmark, **(ONE | {"plan": ("candidates",), "direction": ("bwd",)}))
    found = records(benchmark, cases, timed=False)
    assert found["flash_gluon-prefetch+l2_mib5"]["reason"] == "a worker process died with exit code 7"
    assert found["flash_gluon-prefetch+l2_mib11"]["reason"] == "RuntimeError: no room for registers"
    failed = {name for name, one in found.items() if one["outcome"] == "error"}
    assert failed == {"flash_gluon-prefetch+l2_mib5", "flash_gluon-prefetch+l2_mib11"}
    assert {one["outcome"] for name, one in found.items() if name not in {*failed, "sdpa_cudnn"}} == {"ok"}
    monkeypatch.setattr(bench_plans, "futures", lambda *_, **__: pytest.fail("it was compiled before"))
    assert records(benchmark, cases, timed=False)["flash_gluon-l2_mib5"]["outcome"] == "ok"


@known
def test_a_wrong_plan_has_no_time(on_cpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from lmsys.attention.flash_gluon import launch

    right = launch._forward
    monkeypatch.setattr(launch, "_forward", lambda *x: (right(*x)[0] * (1.02 if x[-1].named else 1), right(*x)[1]))
    plans = [ForwardPlan(2, 2, False, named, True, 32) for named in (False, True)]
    good, bad = (
        one
        for name, one in records(Plans(), cases_of(Plans(), **(ONE | {"plan": plans, "direction": ("fwd",)}))).items()
        if name != "sdpa_cudnn"
    )
    assert good["outcome"] == "ok" and bad["outcome"] == "wrong" and bad["error_ratio"] > 1 and "time_s" not in bad


@known
@pytest.mark.parametrize(("direction", "kernel"), [("fwd", "_forward"), ("bwd", "_backward")])
def test_a_plan_that_returns_an_earlier_result_is_refused(
    direction: str, kernel: str, on_cpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmsys.attention.flash_gluon import launch

    right, known = getattr(launch, kernel), []

    def remembers(*x: Any) -> Any:
        if not seen(CLOCK):
            return right(*x)
        known.append(known[0] if known else right(*x))
        return known[0]

    monkeypatch.setattr(launch, kernel, remembers)
    one = records(Plans(), cases_of(Plans(), **ONE, direction=(direction,)))["flash_gluon"]
    assert one["outcome"] == "wrong" and "right before it was timed, not in timed call" in one["reason"]
    assert "time_s" not in one


@known
@pytest.mark.parametrize(("computes", "outcome"), [(True, "ok"), (False, "wrong")])
def test_a_graphs_outputs_are_judged_after_each_replay(
    computes: bool, outcome: str, on_cpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay writes into the same tensors, as that of a CUDA graph; one that computes nothing leaves them."""

    def graph_of(calls: Callable[[], Any]) -> Callable[[], Any]:
        static = calls()

        def replay() -> Any:
            for x, new in zip(static, calls() if computes else static, strict=True):
                x.copy_(new)
            return static

        return replay

    monkeypatch.setattr(bench_plans, "graph_of", graph_of)
    one = records(ShortPlans(), cases_of(ShortPlans(), **ONE, graphed=(True,)))["flash_gluon"]
    assert one["outcome"] == outcome, one["reason"]


@known
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_kernels_themselves_take_the_plan(direction: str, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    from tests.support.gluon_simulator import simulated

    monkeypatch.setattr(plan_cases, "WIDTH", 64)
    monkeypatch.setattr(Plans, "why_not", lambda self, case: None if case.plan else "no GPU")
    plan = ForwardPlan(2, 2, False, True, False, 0) if direction == "fwd" else BackwardPlan(True, 0)
    with simulated():
        found = records(Plans(), cases_of(Plans(), **(ONE | {"plan": (plan,), "direction": (direction,)})), timed=False)
    one = found[f"flash_gluon-{name_of(plan)}"]
    assert one["outcome"] == "ok" and one["error_ratio"] <= 1, one["reason"]
