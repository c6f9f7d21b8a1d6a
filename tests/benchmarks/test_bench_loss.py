"""The benchmark of the head and loss: which cases there are, what is wrong in them, and what their records say."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench_loss import BLOCK_LOGITS, Inputs, Loss, unchunked
from benchmarks.sweeps import SWEEPS
from lmsys.attention.compiled import why_no_compiler
from lmsys.bench import Settings
from lmsys.bench.results import Session
from lmsys.model.loss import linear_cross_entropy
from tests.support import harness
from tests.support.harness import cases_of

TINY: dict[str, Any] = {
    "tokens": (40,),
    "d_model": (16,),
    "vocab_size": (50,),
    "precision": ("fp32",),
    "row": ("chunked", "eager"),
}
OTHERS = "attention", "model", "data_parallel", "collectives", "tokenizer", "training"  # what selects other benchmarks


def records(timed: bool = True, **values: Any) -> dict[str, dict[str, Any]]:
    """By row."""
    return harness.records(Loss(), cases_of(Loss(), **(TINY | values)), timed=timed)


def test_every_sweep_has_cases_of_its_own() -> None:
    for sweep in SWEEPS.values():
        for device, one in sweep.items():
            ids = Session(Settings(device=device), one).add(Loss)
            assert ids and not any(word in one for one in ids for word in OTHERS)
            asked = Session(Settings(device=device), one, texts={"--precision": "tf32", "--batch": "3"}).add(Loss)
            assert asked and all("-tf32-" in one for one in asked)
    (case,) = cases_of(Loss(), **(TINY | {"row": ("eager",)}))
    assert case.id == "s-N40M16V50-fp32-eager" and case.comparison == "s-N40M16V50-fp32"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_rows_are_timed_and_accounted_for(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmsys.model.loss.CHUNK_LOGITS", 8 * 50)
    found = records(precision=(precision,))
    for one in found.values():
        assert one["outcome"] == "ok", one["reason"]
        assert 0 <= one["error_ratio"] <= 1 and one["rounds"] >= 10 and one["compile_s"] > 0
        assert one["flops"] == 6 * 40 * 16 * 50
        assert one["tokens_per_s"] == pytest.approx(40 / one["time_s"])
        assert (one["matmul_ceiling_fraction"] is None) == (precision == "fp16")
    assert found["chunked"]["comparison"] == found["eager"]["comparison"]
    assert 0 < found["chunked"]["peak_bytes"] < found["eager"]["peak_bytes"]


@pytest.mark.skipif(why_no_compiler("cpu") is not None, reason=str(why_no_compiler("cpu")))
def test_the_compiled_row_runs() -> None:
    one = records(row=("compiled",))["compiled"]
    assert one["outcome"] == "ok" and one["peer"], one["reason"]


def test_without_a_compiler_the_compiled_row_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.arithmetic.why_no_compiler", lambda device: "there is no compiler")
    found = records(row=("eager", "compiled"), timed=False)
    assert [one["outcome"] for one in found.values()] == ["ok", "unsupported"]


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_made_in_blocks_equals_the_whole(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK_LOGITS, "cpu", 7 * 50)
    (case,) = cases_of(Loss(), **(TINY | {"row": ("eager",)}))
    inputs = Inputs.draw(case, seed=0)
    for found, whole in zip(inputs.in_blocks(exact), inputs.run(unchunked), strict=True):
        assert found.dtype == (torch.float64 if exact else torch.float32)
        torch.testing.assert_close(found.float(), whole)


def test_wrong_oom_unsupported_and_stale_rows_are_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []

    def slightly_off(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets) * 1.001

    def hungry(*_: Tensor) -> Tensor:
        return torch.empty(2**60, dtype=torch.int8)

    def remembers(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        calls.append(targets.clone())
        return linear_cross_entropy(hidden, weight, calls[0])

    for call, outcome, said in (
        (slightly_off, "wrong", "times the allowed error"),
        (hungry, "oom", ""),
        (remembers, "wrong", "right before it was timed, not after"),
    ):
        monkeypatch.setattr("lmsys.model.loss.linear_cross_entropy", call)
        one = records(row=("chunked",))["chunked"]
        assert one["outcome"] == outcome and said in one["reason"] and "time_s" not in one
    one = records(row=("chunked",), precision=("tf32",))["chunked"]
    assert one["outcome"] == "unsupported" and "TF32" in one["reason"]


def test_a_reference_without_room_is_an_error_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Inputs, "in_blocks", fails)
    for one in records().values():
        assert one["outcome"] == "error" and "the bench failed, not the row: no room" in one["reason"]


def test_without_timing_rows_are_checked_only() -> None:
    for one in records(timed=False).values():
        assert one["outcome"] == "ok" and "not timed" in one["reason"] and "time_s" not in one
