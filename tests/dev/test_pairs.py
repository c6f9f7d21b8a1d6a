"""Pairs of versions of a training step: when their bits must be equal, and when the tolerance decides (`dev.steps`).

A version is one choice of strategy, precision, checkpointing and so on (`ParallelCase`). Two versions agree by BITS or
by TOLERANCE. If they do not, the pair is WRONG, or UNKNOWN where the reference does not fit in memory (ratios of None).
"""

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

# Strategies whose gradients are wrong by less, and by more, than the tolerance.
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
    verdict, why = agreement(first, second)
    assert agreement(second, first)[0] == verdict and bool(why) == (verdict in (WRONG, UNKNOWN))
    ratios = [first.ratios, second.ratios]
    if first.bits == second.bits:
        assert verdict == BITS
    elif first.case.same_bits(second.case):
        assert verdict == WRONG
    elif all(errors is not None and all(ratio <= 1 for ratio in errors.values()) for errors in ratios):
        assert verdict == TOLERANCE
    else:
        assert verdict in ((UNKNOWN, WRONG) if None in ratios else (WRONG,))


@given(x=st.sampled_from(ALL), y=st.sampled_from(ALL))
def test_versions_that_round_otherwise_need_not_have_equal_bits(x: ParallelCase, y: ParallelCase) -> None:
    assert x.same_bits(x) == (x.compile == "eager") and x.same_bits(y) == y.same_bits(x)
    if x.same_bits(y):
        assert (x.precision, x.residual, x.world_size, x.narrow) == (y.precision, y.residual, y.world_size, y.narrow)
        assert x.compile == "eager"
        assert x.entry == y.entry or not (x.peer or y.peer or x.world_size > 2)
    assert not replace(x, device="cuda").same_bits(replace(y, device="cuda"))


def test_both_versions_of_a_pair_have_the_same_number_of_ranks() -> None:
    versions = [Steps(case, "x", {}) for case in ALL[:: len(ALL) // 12]]
    for first, second in pairs(versions):
        assert first.case.world_size == second.case.world_size and first is not second


def verdict_of(line: str) -> tuple[str, str, str]:
    """(first version, second version, how they agree) of a line of the tool's table."""
    first, second, verdict, _ = (cell.strip().replace(", eager, 2 ranks", "") for cell in line.strip("|").split("|"))
    return first, second, verdict.partition(":")[0]


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
    lines = capsys.readouterr().out.splitlines()[2:]
    verdicts = {(first, second): verdict for first, second, verdict in map(verdict_of, lines)}
    assert verdicts["naive", "nearly"] == WRONG and verdicts["torch_ddp", "nearly"] == TOLERANCE
    assert verdicts["torch_ddp", "far"] == verdicts["naive", "far"] == WRONG


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategy", "naive"], "two versions or more on as many ranks"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--checkpoint", "all"], "--checkpoint 'all': must be fit"),
    ],
)
def test_what_the_tool_cannot_compare_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "steps_of", lambda case, steps, ranks: Steps(case, "", {}))
    with pytest.raises(SystemExit, match="2"):
        tool.main(options)
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_eager_compiled_and_graphed_steps_agree() -> None:
    options = "--device cuda --size small --context 128 --precision bf16 --strategy none --world-size 1"
    levels = "--compile eager,compiled,graphed --checkpoint none,attention,whole"
    assert tool.main([*options.split(), *levels.split()]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_steps_agree_with_eager_ones(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"--device cuda --size small --context 128 --precision {precision} --strategy none --world-size 1"
    assert tool.main([*options.split(), "--compile", "eager,fused"]) == 0
    assert "none, fused, 1 rank" in capsys.readouterr().out
