"""Pairs of versions of a training step: when their bits must be equal, and when the tolerance decides (`dev.steps`)."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench_data_parallel import DataParallel
from benchmarks.data_parallel.cases import BITS, TOLERANCE, UNKNOWN, WRONG, ParallelCase, Steps, agreement, pairs
from dev import steps as tool
from lmsys.bench.ranks import Ranks
from tests.support import harness

NEARLY = """
import torch
from lmsys.parallel.baselines import Naive


class nearly(Naive):
    def _synchronize(self):
        super()._synchronize()
        for p in self.trainable:
            p.grad.mul_(1 + 2.0**-17)


class far(Naive):
    def _synchronize(self):
        super()._synchronize()
        for p in self.trainable:
            p.grad.mul_(1.01)
"""
STRATEGIES = "none", "naive", "bucketed", "zero1", "fsdp", "torch_ddp", "torch_fsdp2"
VARIANTS: dict[str, tuple[Any, ...]] = {
    "checkpoint": ("none", "whole", "matmuls*1,whole*1"),
    "residual": ("wide", "narrow"),
    "precision": ("fp32", "bf16"),
    "compile": ("eager", "compiled"),
    "world_size": (1, 2, 4),
    "comm_dtype": ("float32", "bfloat16"),
}
ALL: list[ParallelCase] = harness.cases_of(
    DataParallel(), size=("tiny",), context=(8,), batch=(2,), strategy=STRATEGIES, **VARIANTS
)
RATIOS = st.none() | st.dictionaries(st.sampled_from("ab"), st.sampled_from([0.0, 1.0, 1.1, float("nan")]), min_size=1)
VERSIONS = st.builds(Steps, st.sampled_from(ALL), st.sampled_from(["x", "y"]), RATIOS)


@given(first=VERSIONS, second=VERSIONS)
def test_a_pair_agrees_by_its_bits_or_else_by_the_tolerance_of_both(first: Steps, second: Steps) -> None:
    held_by, why = agreement(first, second)
    assert agreement(second, first)[0] == held_by and bool(why) == (held_by in (WRONG, UNKNOWN))
    ratios = [one.ratios for one in (first, second)]
    if first.bits == second.bits:
        assert held_by == BITS
    elif first.case.same_bits(second.case):
        assert held_by == WRONG
    elif all(one is not None and all(ratio <= 1 for ratio in one.values()) for one in ratios):
        assert held_by == TOLERANCE
    else:
        assert held_by in ((UNKNOWN, WRONG) if None in ratios else (WRONG,))


@given(one=st.sampled_from(ALL), other=st.sampled_from(ALL))
def test_versions_that_round_otherwise_need_not_have_equal_bits(one: ParallelCase, other: ParallelCase) -> None:
    assert one.same_bits(one) == (one.compile == "eager") and one.same_bits(other) == other.same_bits(one)
    if one.same_bits(other):
        assert (one.precision, one.residual, one.compile, one.world_size) == (
            *(other.precision, other.residual, "eager", other.world_size),
        )
        assert one.narrow == other.narrow
        assert one.entry == other.entry or not (one.peer or other.peer or one.world_size > 2)
    assert not replace(one, device="cuda").same_bits(replace(other, device="cuda"))


def test_both_versions_of_a_pair_have_as_many_ranks() -> None:
    versions = [Steps(case, "x", {}) for case in ALL[:: len(ALL) // 12]]
    for first, second in pairs(versions):
        assert first.case.world_size == second.case.world_size and first is not second


def verdict_of(line: str) -> tuple[str, str, str]:
    """(first version, second version, how they agree) of a line of the tool's table."""
    first, second, held, _ = (cell.strip().replace(", eager, 2 ranks", "") for cell in line.strip("|").split("|"))
    return first, second, held.partition(":")[0]


@pytest.mark.long
def test_the_tool_says_how_each_pair_agrees(
    two_ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "Ranks", lambda: SimpleNamespace(run=two_ranks.run, close=lambda: None))
    (tmp_path / "own.py").write_text(NEARLY)
    common = ["--context", "16", "--world-size", "2", "--device", "cpu"]
    assert tool.main([*common, "--strategy", "fsdp", "--checkpoint", "none,matmuls*1,whole*1"]) == 0
    assert verdict_of(capsys.readouterr().out.splitlines()[2]) == ("fsdp", "fsdp-Cm1w1", BITS)
    own = ",".join(f"{tmp_path}/own.py:{name}" for name in ("nearly", "far"))
    assert tool.main([*common, "--strategy", f"naive,torch_ddp,{own}"]) == 1
    found = {(first, second): how for first, second, how in map(verdict_of, capsys.readouterr().out.splitlines()[2:])}
    assert found["naive", "nearly"] == WRONG and found["torch_ddp", "nearly"] == TOLERANCE
    assert found["torch_ddp", "far"] == found["naive", "far"] == WRONG


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategy", "naive"], "two versions or more on as many ranks"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--checkpoint", "all"], "--checkpoint 'all': must be fit"),
    ],
)
def test_what_the_tool_cannot_compare_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "steps_of", lambda case, one, ranks: Steps(case, "", {}))
    with pytest.raises(SystemExit, match="2"):
        tool.main(words)
    assert said in capsys.readouterr().err


@pytest.mark.gpu
def test_the_tool_holds_eager_compiled_and_graphed_steps_together() -> None:
    words = "--device cuda --size small --context 128 --precision bf16 --strategy none --world-size 1"
    levels = "--compile eager,compiled,graphed --checkpoint none,attention,whole"
    assert tool.main([*words.split(), *levels.split()]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_tool_holds_fused_steps_to_eager_ones(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--device cuda --size small --context 128 --precision {precision} --strategy none --world-size 1"
    assert tool.main([*words.split(), "--compile", "eager,fused"]) == 0
    assert "none, fused, 1 rank" in capsys.readouterr().out
