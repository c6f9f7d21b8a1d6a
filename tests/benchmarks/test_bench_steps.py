"""benchmarks/bench_steps.py: training steps of large models, which rows are wrong, and their records.

A row trains alone on all ranks (`Alone` is a rank's account of it), and is wrong if the loss on its only batch does not
fall, or a number is NaN or infinite. Most tests make up such accounts; no large model is trained here.
"""

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench_steps import (
    KERNELS,
    STAGES,
    UPDATE,
    Alone,
    TrainingSteps,
    by_kind,
    findings_of,
    train_alone,
    why_wrong,
)
from benchmarks.data_parallel.cases import StepsCase, why_not
from benchmarks.data_parallel.check import gate
from benchmarks.sweeps import EIGHT_B, SWEEPS
from lmsys.bench import Settings
from lmsys.bench.ranks import Ranks
from lmsys.bench.results import Session
from lmsys.config import model_config
from lmsys.cost.operations import model_flops, model_parameters
from lmsys.measure.machine import PEAK_FLOPS_PER_S, peak_flops_per_s
from lmsys.measure.profile import KINDS as ALL_KINDS
from lmsys.measure.profile import Part, Profile
from lmsys.measure.sensors import Reading
from tests.support import harness

TINY: dict[str, Any] = {"size": ("tiny",), "context": (16,), "batch": (1,), "world_size": (2,), "strategy": ("fsdp",)}
# A rank's account of a right row: MOST is memory, TIMES are seconds by kind of work.
MOST = {"first_step_s": 9.0, "held_bytes": 100, "total_bytes": 300}
TIMES = {"optimizer_s": 0.25, "profiled_s": 3.0, "communication_s": 0.5, "exposed_s": 0.125}
FINE = Alone("0", MOST, [2.0, 1.0], [], True, {f"{kind}_s": 0.5 for kind in ALL_KINDS} | TIMES, [])
LOSSES = st.lists(st.floats(0.5, 20.0), min_size=STAGES, max_size=40)


def alone(losses: list[float], finite: bool = True) -> Alone:
    """A rank's account with these losses. `finite`: False if a weight is NaN or infinite afterwards."""
    return replace(FINE, losses=losses, finite=finite)


def cases_of(**values: Any) -> list[StepsCase]:
    return harness.cases_of(TrainingSteps(), **(TINY | values))


def test_sweeps_have_cases_where_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    smoke = Session(Settings(device="cpu"), SWEEPS["smoke"]["cpu"]).add(TrainingSteps)
    assert smoke == [f"smoke-tiny-S32B1-bf16-W2-{row}-Ca1m1" for row in ("fsdp", "torch_fsdp2")]
    for gpus in (1, 2, 8):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        ids = Session(Settings(device="cuda"), SWEEPS["full"]["cuda"]).add(TrainingSteps)
        first = [case_id for case_id in ids if case_id.startswith("8b-")]
        assert len(set(ids)) == len(ids) and len(first) == (gpus > 1) * 3
        assert len(ids) - len(first) == (gpus > 1) * 3 * 3 * 6  # three rows: fsdp, and torch_fsdp2 with two models
        assert not any(word in case_id for case_id in ids for word in ("attention", "model", "training", "parallel"))
        eight = f"8b-8b-S32768B1-bf16-compiled-W{gpus}"
        assert gpus == 1 or {f"{eight}-fsdp-Ca12m22-narrow", f"{eight}-torch_fsdp2-llama-Ca-narrow"} < {*first}
        assert not any("fsdp-llama" in case_id for case_id in ids)


def test_the_model_is_that_of_the_leaderboard() -> None:
    (case, *_) = harness.cases_of(TrainingSteps(), Settings(device="cuda"), **EIGHT_B, world_size=(2,))
    assert model_parameters(case.config) == 8_125_698_048 and case.steps == 20
    assert model_flops(case.config, tokens=2**16, context=2**15, mode="step") == pytest.approx(4.745e15, rel=1e-3)
    assert {size: round(model_parameters(model_config(size)) / 1e9) for size in ("1b", "3b")} == {"1b": 1, "3b": 3}


@given(losses=LOSSES)
def test_losses_that_fall_are_right_and_those_of_any_other_order_are_not(losses: list[float]) -> None:
    falling = sorted({round(loss, 6) for loss in losses}, reverse=True)
    size = -(-len(losses) // STAGES)
    means = [math.fsum(part) / len(part) for part in (losses[at : at + size] for at in range(0, len(losses), size))]
    reason = why_wrong([alone(losses)])
    assert (reason is None) == (means == sorted(set(means), reverse=True))
    assert reason is None or "on one batch the loss must fall" in reason
    assert len(falling) < 2 or why_wrong([alone(falling)]) is None


@given(losses=LOSSES, at=st.integers(0, 39), bad=st.sampled_from([math.nan, math.inf]))
def test_what_is_no_number_is_wrong(losses: list[float], at: int, bad: float) -> None:
    falling = sorted(set(losses), reverse=True)
    at %= len(falling)
    assert why_wrong([alone(falling), alone(falling, finite=False)]) == "after the timed steps a weight is NaN or inf"
    assert (
        why_wrong([alone([*falling[:at], bad, *falling[at + 1 :]])]) == f"the loss of timed step {at + 1} is NaN or inf"
    )


def test_the_optimizers_kernels_are_no_others() -> None:
    shares = {**dict.fromkeys(ALL_KINDS, 0.0), "matmul": 0.5, "elementwise": 0.375, "reduction": 0.125}
    part = Part(UPDATE, 3.0, 0.0, 1, {"elementwise": 2.5, "reduction": 0.5})
    times = by_kind(Profile(8.0, 8.0, shares, [], [part]))
    assert times["optimizer_s"] == 3.0 and sum(times.values()) == 8.0
    assert (times["matmul_s"], times["elementwise_s"], times["reduction_s"]) == (4.0, 0.5, 0.5)


def test_a_record_holds_the_rank_with_most_memory_and_the_kernels_of_the_slowest() -> None:
    most, times = (
        MOST | {"held_bytes": 150, "total_bytes": 200},
        FINE.times | {"communication_s": 9.0, "optimizer_s": 9.0},
    )
    waits = replace(alone([3.0, 2.0]), most=most, times=times)
    fields = findings_of([alone([3.0, 2.0]), waits])
    assert (fields["held_bytes"], fields["peak_bytes"], fields["total_bytes"]) == (150, 150, 300)
    assert fields["sm_clock_mhz"] is fields["power_w"] is None
    hot = [replace(alone([1.0]), readings=[Reading(1500.0, power_w=watts)] * 3) for watts in (690.0, 700.0)]
    assert (findings_of(hot)["sm_clock_mhz"], findings_of(hot)["power_w"]) == (1500.0, 695.0)
    assert fields["optimizer_s"] == 0.25 and fields["losses"] == [3.0, 2.0] and fields["last_loss"] == 2.0


def test_shares_are_those_of_a_rank() -> None:
    (case,) = cases_of(precision=("bf16",))
    gpu = "NVIDIA H100 80GB HBM3"
    ceilings, sustained = ({"matmul_flops_per_s": {"bfloat16": rate}} for rate in (8e14, 4e14))
    machine = {"gpu": gpu, "ceilings": ceilings, "sustained": sustained}
    fields = TrainingSteps().metrics(case, {"time_s": 0.5}, machine)
    flops, stated = model_flops(case.config, tokens=2 * 16, context=16, mode="step"), peak_flops_per_s(gpu, "bf16")
    assert fields["flops"] == flops and fields["tokens_per_s"] == 2 * 16 / 0.5 and stated
    assert fields["mfu"] == pytest.approx(flops / 0.5 / (2 * stated))
    assert fields["matmul_ceiling_fraction"] == pytest.approx(flops / 2 / 0.5 / 8e14)
    assert fields["sustained_ceiling_fraction"] == pytest.approx(2 * fields["matmul_ceiling_fraction"])


def test_llama_has_no_stream_wider_than_its_matmuls() -> None:
    wide, narrow, exact = (
        cases_of(strategy=("torch_fsdp2",), model=("llama",), precision=(precision,), residual=(residual,))[0]
        for precision, residual in (("bf16", "wide"), ("bf16", "narrow"), ("fp32", "wide"))
    )
    assert "--residual narrow" in str(why_not(wide))
    for case in (narrow, exact):
        reason = why_not(case)
        assert reason is None if importlib.util.find_spec("transformers") else "[peers]' brings it" in str(reason)


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="pip install transformers to train Llama")
def test_llama_trains_as_our_model_does_by_whatever_it_keeps(two_ranks: Ranks) -> None:
    kept = {"checkpoint": ("attention*1,matmuls*1", "whole"), "precision": ("bf16",), "residual": ("narrow",)}
    cases = cases_of(strategy=("torch_fsdp2",), model=("ours", "llama"), **kept, steps=8)
    ours, _, *theirs = harness.results(TrainingSteps(), cases, ranks=two_ranks)
    for record in theirs:
        assert record["outcome"] == "ok", record["reason"]
        assert record["losses"] == pytest.approx(ours["losses"], rel=1e-3)


def test_steps_by_muon_train(two_ranks: Ranks) -> None:
    """Each strategy, torch's too, is judged by its weights in tests/benchmarks/test_passes.py."""
    (case,) = cases_of(optimizer=("muon",), steps=STAGES)
    (record,) = harness.results(TrainingSteps(), [case], ranks=two_ranks)
    assert record["outcome"] == "ok", record["reason"]
    assert (record["impl"], record["optimizer"]) == ("fsdp-muon", "muon")


class Answers(Ranks):
    """Ranks that run nothing, and return made-up accounts: `accounts` is {row: account of each rank}."""

    def __init__(self, accounts: dict[str, list[Alone]]) -> None:
        self.accounts = accounts

    def run(self, world_size: int, backend: str, function: Any, case: StepsCase, *_: Any) -> list[Any]:
        if function is gate:
            return [{"weight": 2.0 if case.impl == "zero1" else 0.5}] * world_size
        assert function is train_alone and case.impl != "zero1"
        return self.accounts[case.impl]


def test_a_row_that_does_not_train_is_wrong_and_has_no_time() -> None:
    right = [alone([4.0, 3.0, 2.0, 1.0])] * 2
    accounts = {"fsdp": right, "naive": [alone([1.0, 2.0, 3.0, 4.0])] * 2, "flat": [right[0], alone([], finite=False)]}
    cases = cases_of(strategy=("fsdp", "naive", "flat", "zero1"))
    records = harness.records(TrainingSteps(), cases, ranks=Answers(accounts))
    assert {name: record["outcome"] for name, record in records.items()} == {"fsdp": "ok"} | dict.fromkeys(
        ("naive", "flat", "zero1"), "wrong"
    )
    assert "the loss must fall" in records["naive"]["reason"] and "a weight is NaN" in records["flat"]["reason"]
    assert records["fsdp"]["time_s"] == 1.5 and all(
        "time_s" not in records[name] for name in ("naive", "flat", "zero1")
    )
    assert records["fsdp"]["alone"] and records["fsdp"]["total_bytes"] == 300


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_compiled_steps_train_on_two_gpus() -> None:
    values = {"size": ("small",), "context": (1024,), "precision": ("bf16",), "compile": ("compiled",)}
    kept = {"checkpoint": ("attention*6,matmuls*6", "whole"), "residual": ("narrow",), "steps": 20}
    cases = cases_of(strategy=("fsdp", "torch_fsdp2"), **values, **kept)
    cases = [replace(case, device="cuda") for case in cases]
    records = harness.results(TrainingSteps(), cases, device="cuda")
    assert {record["outcome"] for record in records} == {"ok"}, [record["reason"] for record in records]
    for record in records:
        total = sum(record[f"{kind}_s"] for kind in KERNELS) + record["optimizer_s"] + record["exposed_s"]
        assert total < 1.2 * record["profiled_s"]
        known = peak_flops_per_s(torch.cuda.get_device_name(), "bf16")
        peak = record["world_size"] * (known or max(PEAK_FLOPS_PER_S.values()))
        assert record["matmul_s"] + record["attention_s"] > record["flops"] / peak  # a smaller sum would lack kernels
