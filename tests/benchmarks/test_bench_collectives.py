"""The benchmark of collectives: its cases and its records."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.bench_collectives import Collectives, Measured
from benchmarks.sweeps import SWEEPS
from lmsys.bench import Entry, Grid, Settings, Sweep
from lmsys.bench.ranks import Ranks
from lmsys.bench.results import Session
from tests.support import rank_cheats
from tests.support.harness import cases_of, runner

OTHERS = "attention", "model", "loss", "anatomy", "precision", "tokenizer", "training", "data_parallel"
SMALL = {"megabytes": (1,), "operation": ("broadcast",)}


def ids(sweep: Sweep, **texts: str) -> list[str]:
    return Session(Settings(device="cpu"), sweep, texts=texts).add(Collectives)


def test_every_sweep_has_cases_of_its_own() -> None:
    for sweep in SWEEPS.values():
        for device in sweep.values():
            found = ids(device)
            assert found and len(set(found)) == len(found)
            assert not any(word in one for one in found for word in OTHERS)


def test_gloo_alone_without_cuda_and_two_ranks_at_least() -> None:
    sweep = Sweep(grids={"collectives": (Grid("s", world_size=(0, 2, 64), **SMALL),)})
    assert ids(sweep) == ["s-W2-gloo-broadcast-1MB"]
    assert ids(sweep, **{"--world-size": "3"}) == ["s-W3-gloo-broadcast-1MB"]
    (one,) = cases_of(Collectives(), world_size=(3,), **SMALL)
    assert one.numel % 3 == 0


def test_a_wrong_result_is_a_case_without_a_time_and_without_timing_there_is_only_the_check() -> None:
    class Answers(Ranks):
        def run(self, world_size: int, backend: str, function: object, case: object, *rest: object) -> list[object]:
            asked.append(rest[0])
            wrong = "rank 1: off" if case.megabytes == 2 else ""  # type: ignore[attr-defined]
            return [Measured(), Measured(wrong)]

    asked: list[object] = []
    cases = cases_of(Collectives(), **(SMALL | {"megabytes": (1, 2)}))
    harness = runner(timed=False)
    harness.__dict__["ranks"] = Answers()
    right, wrong = [one.record for one in harness.run(Collectives(), cases)]
    assert asked == [None, None], "no time to sample"
    assert right["outcome"] == "ok" and "not timed" in right["reason"] and "time_s" not in right
    assert (wrong["outcome"], wrong["reason"]) == ("wrong", "rank 1: off")


def record_of(ranks: Ranks, entry: Entry, backend: str = "gloo") -> dict[str, Any]:
    (case,) = cases_of(Collectives(), megabytes=(1,), operation=(entry.name,), world_size=(2,), backend=(backend,))
    harness = runner()
    harness.__dict__["ranks"] = ranks
    (found,) = harness.run(Collectives(), [replace(case, entry=entry)])
    return found.record


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_timed_calls_are_checked(operation: str, two_ranks: Ranks) -> None:
    entry = Collectives.tables["operation"][operation]
    found = record_of(two_ranks, entry)
    assert (found["outcome"], found["error_ratio"]) == ("ok", 0.0), found["reason"]
    calls = found["proof"]["calls"]
    assert len({one["draw"] for one in calls}) == len({one["call"] for one in calls}) == 3
    assert all(one["call"] < found["rounds"] and one["error_ratios"] == {"result": 0.0} for one in calls)


@pytest.mark.parametrize("cheat", ["right_once", "silent", "in_bfloat16", "wrong_on_one"])
def test_an_operation_that_is_right_in_its_first_call_only_is_wrong(cheat: str, two_ranks: Ranks) -> None:
    """On all ranks, which are all there afterwards."""
    found = record_of(two_ranks, Entry("all_reduce", f"{rank_cheats.__file__}:{cheat}"))
    assert found["outcome"] == "wrong" and "time_s" not in found
    assert "right before it was timed, not in timed call " in found["reason"]
    assert f"rank {int(cheat == 'wrong_on_one')}: the result of all_reduce is off by" in found["reason"]


@pytest.mark.gpu
def test_timed_calls_on_gpus_are_checked() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each of two ranks")
    gpus = Ranks()
    try:
        for entry in Collectives.tables["operation"].values():
            found = record_of(gpus, entry, "nccl")
            assert (found["outcome"], len(found["proof"]["calls"])) == ("ok", 3), found["reason"]
        found = record_of(gpus, Entry("all_reduce", f"{rank_cheats.__file__}:in_bfloat16"), "nccl")
        assert found["outcome"] == "wrong" and "not in timed call" in found["reason"]
    finally:
        gpus.close()
