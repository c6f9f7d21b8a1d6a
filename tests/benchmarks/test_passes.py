"""benchmarks/data_parallel/passes.py: the timed steps of a strategy must lead to the weights of plain steps.

A pass is a number of timed training steps. It is judged by the weights after it. Their error, against exact steps in
float64, may be as large as its budget, which is the error of plain steps: those of one process with torch's optimizer.
Honest strategies must stay within the part MARGIN of it, and cheats (tests/support/rank_cheats.py) far outside.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.bench_data_parallel import PASSES, DataParallel
from benchmarks.data_parallel import passes
from benchmarks.data_parallel.cases import ParallelCase
from benchmarks.data_parallel.check import gate
from benchmarks.data_parallel.passes import Batches, Pass, judge_pass
from benchmarks.data_parallel.rank import take_pass
from lmsys.bench.ranks import Ranks
from lmsys.parallel.group import WorkerError
from tests.support import harness, rank_cheats
from tests.support.variants import few_by_default

ONE = Pass(seed=1, draw=2, key=3, steps=5)  # the pass that tests take
HONEST = ("naive", "flat", "overlapped", "bucketed", "zero1", "fsdp")
PEERS = ("torch_ddp", "torch_ddp_tuned", "torch_zero1", "torch_fsdp2", "torch_fsdp2_zero2")
LUCKY = "model.layers.0.attn.q_proj.weight"  # a parameter
MARGIN = 0.8  # the part of the budget that honest strategies may use


def target(cheat: type) -> str:
    """How the command line names a strategy of tests/support/rank_cheats.py."""
    return f"{rank_cheats.__file__}:{cheat.__name__}"


def case_of(strategy: str, **values: Any) -> ParallelCase:
    axes = {"size": ("tiny",), "context": (16,), "precision": ("fp32",), "batch": (2,), "world_size": (2,)}
    (case,) = harness.cases_of(DataParallel(), **axes | values, strategy=(strategy,))
    return case


def worst(ranks: Ranks, case: ParallelCase) -> float:
    """The largest ratio of an error to its budget, after a pass on the ranks."""
    ranks.run(case.world_size, case.backend, take_pass, case, ONE)
    return max(max(ratios.values()) for ratios in ranks.run(case.world_size, case.backend, judge_pass, case, ONE))


MUON, BF16 = {"optimizer": ("muon",)}, {"precision": ("bf16",)}
BY_MUON: list[tuple[str, dict[str, Any]]] = [
    ("naive", {}),
    ("bucketed", {"bucket_mb": (1,), "sharded_optimizer": (True,)}),
    ("zero1", {"bucket_mb": (1,)}),
    ("fsdp", BF16),
    ("torch_ddp", {}),
    ("torch_ddp_tuned", {"bucket_mb": (1,)}),
    ("torch_zero1", {}),
    ("torch_fsdp2_zero2", BF16),  # torch_fsdp2 in float32: tests/parallel/test_muon_on_ranks.py
]


@pytest.mark.parametrize(
    ("strategy", "values"),
    [
        *((strategy, {"bucket_mb": (1,)}) for strategy in (*HONEST, target(rank_cheats.Honest))),
        *few_by_default([(peer, {"bucket_mb": (1,)}) for peer in PEERS], one_in=5),
        ("fsdp", BF16),  # it gathers parameters in bfloat16, which its budget allows
        *(pytest.param(strategy, BF16, marks=pytest.mark.on_request) for strategy in ("overlapped", "torch_ddp")),
        ("bucketed", {"comm_dtype": ("bfloat16",), "bucket_mb": (1,)}),  # so does that of gradients sent in bfloat16
        ("none", {"world_size": (1,)}),
        *few_by_default([(strategy, values | MUON) for strategy, values in BY_MUON], one_in=2),
    ],
)
def test_honest_steps_are_right(strategy: str, values: dict[str, Any], two_ranks: Ranks) -> None:
    """Plain steps are those of torch's AdamW or Muon on one process's gradients."""
    assert worst(two_ranks, case_of(strategy, **values)) < MARGIN


@pytest.mark.parametrize(
    ("cheat", "values", "least"),
    [
        *((cheat, {}, 10) for cheat in rank_cheats.CHEATS),
        *few_by_default([(cheat, MUON, 5) for cheat in rank_cheats.CHEATS], one_in=2),
        (rank_cheats.HalvedGradients, BF16, 3),
        pytest.param(rank_cheats.StaleGradients, BF16, 3, marks=pytest.mark.on_request),
    ],
)
def test_cheats_are_wrong(cheat: type, values: dict[str, Any], least: float, two_ranks: Ranks) -> None:
    assert worst(two_ranks, case_of(target(cheat), **values)) > least


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_on_gpus_are_compared_with_plain_ones(precision: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each of two ranks")

    def on_gpus(strategy: str, **changes: Any) -> ParallelCase:
        return replace(case_of(strategy, precision=(precision,), bucket_mb=(1,)), device="cuda", **changes)

    gpus = Ranks()
    try:
        for strategy in (*HONEST, *PEERS):
            gpus.run(2, "nccl", gate, on_gpus(strategy), 0)  # compiles, as in a run, before the passes
            assert worst(gpus, on_gpus(strategy)) < MARGIN, strategy
        assert worst(gpus, on_gpus("none", world_size=1)) < MARGIN
        assert worst(gpus, on_gpus("bucketed", compile="graphed")) < MARGIN
        assert worst(gpus, on_gpus(target(rank_cheats.HalvedGradients))) > 3
    finally:
        gpus.close()


def _judged(case: ParallelCase, timed_pass: Pass, change: Callable[..., None], *by: Any) -> dict[str, float] | None:
    """On a rank: what `judge_pass` returns if plain steps end with other weights.

    change  is called with {dtype: weights after plain steps in this dtype}, the last dtype, and `by`
    """
    take, ends = passes._take_steps, dict[torch.dtype, dict[str, torch.Tensor]]()

    def take_changed(case: ParallelCase, timed_pass: Pass, dtype: torch.dtype, *rest: Any) -> Any:
        start, ends[dtype] = take(case, timed_pass, dtype, *rest)
        change(ends, dtype, *by)
        return start, ends[dtype]

    with patch.object(passes, "_take_steps", take_changed), patch.dict(passes._RIGHT, clear=True):
        return judge_pass(case, timed_pass)


def _wrong(ends: dict[torch.dtype, dict[str, torch.Tensor]], dtype: torch.dtype, by: float) -> None:
    """Exact steps are off."""
    if dtype == torch.float64:
        ends[dtype] = {name: x + by for name, x in ends[dtype].items()}


def _lucky(ends: dict[torch.dtype, dict[str, torch.Tensor]], dtype: torch.dtype, luck: float) -> None:
    """Plain steps have only 1 / luck of their error in one parameter."""
    if dtype != torch.float64:
        exact = ends[torch.float64][LUCKY]
        ends[dtype][LUCKY] = exact + (ends[dtype][LUCKY] - exact) / luck


def _error_of_the_bench(case: ParallelCase, timed_pass: Pass, by: float) -> str:
    """On a rank, which can be used afterwards: the error of `judge_pass` if exact steps are off."""
    try:
        return f"no error: {_judged(case, timed_pass, _wrong, by)}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("change", [1.0, math.nan])
def test_wrong_exact_steps_are_an_error_of_the_bench(change: float, two_ranks: Ranks) -> None:
    """The budget is the distance of plain steps from exact ones. If exact steps were wrong, it would allow anything."""
    case = case_of("none", world_size=(1,))
    two_ranks.run(1, case.backend, take_pass, case, ONE)
    (message,) = two_ranks.run(1, case.backend, _error_of_the_bench, case, ONE, change)
    assert re.match("the bench failed, not the row: plain steps in fp32 .* (NaN|way)", message), message


@pytest.mark.long
def test_a_strategy_that_cheats_has_a_record_without_a_time(two_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASSES, "gloo", 2)
    cases = [case_of("none"), case_of("naive")]
    cases += [case_of(target(row)) for row in (rank_cheats.HalvedGradients, rank_cheats.Late)]
    none, naive, halved, late = harness.records(DataParallel(), cases, ranks=two_ranks, min_rounds=12).values()
    assert naive["outcome"] == "ok" and naive["error_ratio"] < MARGIN
    (call,) = naive["proof"]["calls"]
    assert call["steps"] == 6 and call["call"] in (10, 11) and call["seed"] == call["call"] - 10
    assert max(call["error_ratios"].values()) <= naive["error_ratio"]
    assert none["outcome"] == "ok" and not none["proof"]["calls"] and "for itself" in none["unchecked"]
    assert (
        halved["outcome"] == "wrong" and "right before it was timed, not in the timed steps of pass" in halved["reason"]
    )
    postponed = r"reading the weights after the timed steps took \S+ s, longer than all timed steps"
    assert late["outcome"] == "wrong" and re.match(postponed, late["reason"])
    assert "time_s" not in halved and "time_s" not in late


def _drawn(case: ParallelCase, timed_pass: Pass) -> list[list[list[int]]]:
    """On a rank: [tokens, targets] of each batch of a pass, then of one batch more."""
    batches, drawn = Batches(case.config, case.batch, timed_pass), []
    address = batches.now.tokens.data_ptr()
    for _ in range(len(batches.all) + 1):
        batches.advance()
        assert batches.now.tokens.data_ptr() == address
        drawn.append([x.flatten().tolist() for x in (batches.now.tokens, batches.now.targets)])
    return drawn


def test_batches_follow_one_another_in_the_same_memory(two_ranks: Ranks) -> None:
    """Each batch comes once before any comes again. Another draw, seed or rank has other batches."""

    def drawn(batches: Pass) -> list[Any]:
        return two_ranks.run(2, "gloo", _drawn, case_of("naive", batch=(1,)), batches)

    first, again, *others = (drawn(batches) for batches in (ONE, ONE, replace(ONE, draw=9), replace(ONE, seed=9)))
    assert first == again and first[0] != first[1] and all(other[0] != first[0] for other in others)
    assert all(tokens[1:] == targets[:-1] for tokens, targets in first[0])
    assert len({str(batches) for batches in first[0]}) == len(first[0]) - 1 and first[0][-1] == first[0][0]


@pytest.mark.parametrize("luck", [1000, math.inf])
@pytest.mark.parametrize(("strategy", "right"), [("overlapped", True), (target(rank_cheats.HalvedGradients), False)])
def test_a_parameter_has_the_usual_budget_where_plain_steps_are_lucky(
    strategy: str, right: bool, luck: float, two_ranks: Ranks
) -> None:
    case = case_of(strategy, precision=("bf16",))
    two_ranks.run(case.world_size, case.backend, take_pass, case, ONE)
    for ratios in two_ranks.run(case.world_size, case.backend, _judged, case, ONE, _lucky, luck):
        assert (ratios[LUCKY] < 1) == right, ratios[LUCKY]


def test_a_row_that_replaces_the_clock_of_a_rank_fails(two_ranks: Ranks) -> None:
    """This test is the last, since it ends the ranks."""
    with pytest.raises(WorkerError, match="a row replaced time.perf_counter, lmsys.bench.ranks.times, by which it is"):
        worst(two_ranks, case_of(target(rank_cheats.Replacing)))
