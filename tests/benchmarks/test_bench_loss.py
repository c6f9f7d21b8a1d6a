"""The benchmark of the head and loss: which cells there are, what is wrong in them, and what their records say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.loss_trial import BLOCK_LOGITS, Inputs, cells_of, loss_trial, unchunked
from benchmarks.sections import LossSection
from benchmarks.session import Settings
from benchmarks.sweeps import SWEEPS
from lmsys.attention.compiled import why_no_compiler
from lmsys.model.loss import linear_cross_entropy
from tests.support import processes

TINY = LossSection("s", (50,), (40,), (16,), ("fp32",), rows=("chunked", "eager"))
OTHERS = "attention", "model", "data_parallel", "collectives", "tokenizer", "training"  # what selects other benchmarks


@pytest.fixture(scope="module")
def settings() -> Settings:
    found = Settings("cpu", "smoke", 0.01, 10, True, None, "")
    ceilings = {"matmul_flops_per_s": {"float32": 1e12, "bfloat16": 2e12}, "copy_bytes_per_s": 1e11}
    found.__dict__["machine"] = {"date": "now", "gpu": None, "ceilings": ceilings}
    return found


def records(section: LossSection, settings: Settings) -> dict[str, dict[str, Any]]:
    """By row."""
    cells = list(cells_of(section, {}, "cpu"))
    found = [result.record for result in loss_trial(cells, settings)]
    assert [one["id"] for one in found] == [cell.id for cell in cells]
    return {one["impl"]: one for one in found}


def test_every_sweep_has_cells_of_its_own() -> None:
    for sweep in SWEEPS.values():
        for device in sweep.values():
            ids = [cell.id for part in device.losses for cell in cells_of(part, {}, "cpu")]
            assert ids and len(set(ids)) == len(ids)
            assert not any(word in one for one in ids for word in OTHERS)
    (cell,) = cells_of(replace(TINY, rows=("eager",)), {"precisions": ("tf32",), "batch": (3,)}, "cpu")
    assert cell.id == "s-N40M16V50-tf32-eager"


def test_a_run_writes_a_record_for_each_cell(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    small = "--sweep smoke --precision fp32 --benchmark-max-time 0.01 --benchmark-only --benchmark-json"
    ended = processes.run("loss", *small.split(), output)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    content = json.loads(output.read_text())
    outcomes = {one["id"]: one["outcome"] for one in content["lmsys"]["records"]}
    assert outcomes == {f"smoke-N256M64V1000-fp32-{row}": "ok" for row in ("chunked", "eager")}
    assert {entry["group"] for entry in content["benchmarks"]} == {"smoke-N256M64V1000-fp32"}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_rows_are_timed_and_accounted_for(precision: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmsys.model.loss.CHUNK_LOGITS", 8 * 50)
    found = records(replace(TINY, precisions=(precision,)), settings)
    for one in found.values():
        assert one["outcome"] == "ok", one["reason"]
        assert 0 <= one["error_ratio"] <= 1 and one["rounds"] >= 10 and one["compile_s"] > 0
        assert one["flops"] == 6 * 40 * 16 * 50
        assert one["tokens_per_s"] == pytest.approx(40 / one["time_s"])
        assert (one["matmul_ceiling_fraction"] is None) == (precision == "fp16")
    assert found["chunked"]["comparison"] == found["eager"]["comparison"]
    assert 0 < found["chunked"]["peak_bytes"] < found["eager"]["peak_bytes"]


@pytest.mark.skipif(why_no_compiler("cpu") is not None, reason=str(why_no_compiler("cpu")))
def test_the_compiled_row_runs(settings: Settings) -> None:
    one = records(replace(TINY, rows=("compiled",)), settings)["compiled"]
    assert one["outcome"] == "ok" and one["peer"], one["reason"]


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_made_in_blocks_equals_the_whole(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK_LOGITS, "cpu", 7 * 50)
    (cell,) = cells_of(replace(TINY, rows=("eager",)), {}, "cpu")
    inputs = Inputs.draw(cell, seed=0)
    for found, whole in zip(inputs.in_blocks(exact), inputs.run(unchunked), strict=True):
        assert found.dtype == (torch.float64 if exact else torch.float32)
        torch.testing.assert_close(found.float(), whole)


def test_wrong_oom_unsupported_and_stale_rows_are_cells(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []

    def slightly_off(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets) * 1.001

    def hungry(*_: Tensor) -> Tensor:
        return torch.empty(2**60, dtype=torch.int8)

    def remembers(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        calls.append(targets.clone())
        return linear_cross_entropy(hidden, weight, calls[0])

    section = replace(TINY, rows=("chunked",))
    for call, outcome, said in (
        (slightly_off, "wrong", "times the allowed error (fp32)"),
        (hungry, "oom", ""),
        (remembers, "wrong", "right before it was timed, not after"),
    ):
        monkeypatch.setattr("benchmarks.loss_trial.linear_cross_entropy", call)
        one = records(section, settings)["chunked"]
        assert one["outcome"] == outcome and said in one["reason"] and "time_s" not in one
    one = records(replace(section, precisions=("tf32",)), settings)["chunked"]
    assert one["outcome"] == "unsupported" and "TF32" in one["reason"]


def test_what_fails_outside_a_row_fails_every_cell(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("benchmarks.loss_trial.sample", fails)
    for one in records(TINY, settings).values():
        assert one["outcome"] == "error" and "the bench failed, not the row: no room" in one["reason"]


def test_without_timing_rows_are_checked_only(settings: Settings) -> None:
    for one in records(TINY, replace(settings, timed=False)).values():
        assert one["outcome"] == "ok" and "not timed" in one["reason"] and "time_s" not in one
