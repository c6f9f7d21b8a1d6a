"""benchmarks/bench_collectives.py: its cases, its records, and operations that are wrong in timed calls.

Those operations are in tests/support/rank_cheats.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.bench_collectives import Collectives
from lmsys.bench import Entry, Grid, Settings, Sweep
from lmsys.bench.ranks import Ranks
from lmsys.bench.results import Session
from tests.support import rank_cheats
from tests.support.harness import cases_of, records, results

SMALL = {"megabytes": (1,), "operation": ("broadcast",)}


def ids(sweep: Sweep, **texts: str) -> list[str]:
    return Session(Settings(device="cpu"), sweep, texts=texts).add(Collectives)


def test_gloo_alone_without_cuda_and_two_ranks_at_least() -> None:
    sweep = Sweep(grids={"collectives": (Grid("s", world_size=(0, 2, 64), **SMALL),)})
    assert ids(sweep) == ["s-W2-gloo-broadcast-1MB"]
    assert ids(sweep, **{"--world-size": "3"}) == ["s-W3-gloo-broadcast-1MB"]
    (case,) = cases_of(Collectives(), world_size=(3,), **SMALL)
    assert case.numel % 3 == 0


def test_a_wrong_result_is_a_case_without_a_time_and_without_timing_there_is_only_the_check() -> None:
    class Answers(Ranks):
        def run(self, world_size: int, backend: str, function: object, case: object, *rest: object) -> list[object]:
            times.append(rest[0])
            wrong = "rank 1: off" if case.megabytes == 2 else ""  # type: ignore[attr-defined]
            return [{"wrong": ""}, {"wrong": wrong}]

    times: list[object] = []
    cases = cases_of(Collectives(), **(SMALL | {"megabytes": (1, 2)}))
    right, wrong = results(Collectives(), cases, ranks=Answers(), timed=False)
    assert times == [None, None], "no time to sample"
    assert right["outcome"] == "ok" and "not timed" in right["reason"] and "time_s" not in right
    assert (wrong["outcome"], wrong["reason"]) == ("wrong", "rank 1: off")


def record_of(ranks: Ranks, entry: Entry, backend: str = "gloo") -> dict[str, Any]:
    (case,) = cases_of(Collectives(), megabytes=(1,), operation=(entry.name,), world_size=(2,), backend=(backend,))
    return records(Collectives(), [replace(case, entry=entry)], ranks=ranks)[entry.name]


@pytest.mark.parametrize(
    # A link carries 2 (n - 1) / n of the tensor in an all-reduce of n ranks, (n - 1) / n in its halves; here n is 2.
    ("operation", "share"),
    [("all_reduce", 1.0), ("reduce_scatter", 0.5), ("all_gather", 0.5), ("broadcast", 1.0)],
)
def test_timed_calls_are_checked(operation: str, share: float, two_ranks: Ranks) -> None:
    entry = Collectives.tables["operation"][operation]
    record = record_of(two_ranks, entry)
    assert (record["outcome"], record["error_ratio"]) == ("ok", 0.0), record["reason"]
    calls = record["proof"]["calls"]
    assert len({call["draw"] for call in calls}) == len({call["call"] for call in calls}) == 3
    assert all(call["call"] < record["rounds"] and call["error_ratios"] == {"result": 0.0} for call in calls)
    assert record["rounds"] >= 10 and record["loop_s"] > 0
    rate = record["bytes"] / record["time_s"]
    assert (record["algorithm_bytes_per_s"], record["bus_bytes_per_s"]) == pytest.approx((rate, rate * share))


@pytest.mark.parametrize("cheat", ["right_in_first_call", "silent", "in_bfloat16", "wrong_on_last_rank"])
def test_an_operation_that_is_right_in_its_first_call_only_is_wrong(cheat: str, two_ranks: Ranks) -> None:
    """All ranks learn of it, and go on."""
    record = record_of(two_ranks, Entry("all_reduce", f"{rank_cheats.__file__}:{cheat}"))
    assert record["outcome"] == "wrong" and "time_s" not in record
    assert "right before it was timed, not in timed call " in record["reason"]
    assert f"rank {int(cheat == 'wrong_on_last_rank')}: the result of all_reduce is off by" in record["reason"]


@pytest.mark.gpu
def test_timed_calls_on_gpus_are_checked() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each of two ranks")
    gpus = Ranks()
    try:
        for entry in Collectives.tables["operation"].values():
            record = record_of(gpus, entry, "nccl")
            assert (record["outcome"], len(record["proof"]["calls"])) == ("ok", 3), record["reason"]
        record = record_of(gpus, Entry("all_reduce", f"{rank_cheats.__file__}:in_bfloat16"), "nccl")
        assert record["outcome"] == "wrong" and "not in timed call" in record["reason"]
    finally:
        gpus.close()
