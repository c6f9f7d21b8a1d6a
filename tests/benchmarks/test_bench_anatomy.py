"""benchmarks/bench_anatomy.py and bench_precision.py: where a model's step spends time and memory, and their records.

Anatomy profiles a model by kernels, parts and phases (forward, backward, optimizer); the precision study sums numbers
in narrow dtypes, and its errors and the dtypes of autocast are what theory predicts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench_anatomy import TIMELINE_POINTS, Anatomy, thinned
from benchmarks.bench_precision import Precision, sums, tensors
from benchmarks.sweeps import SWEEPS
from lmsys.bench import Settings
from lmsys.bench.results import Session
from lmsys.config import model_config
from lmsys.cost.memory import training_memory
from lmsys.measure.profile import KINDS
from tests.support.harness import cases_of, results

OTHER_SELECTORS = ("attention", "model", "data_parallel", "collectives", "tokenizer", "training")
TINY: dict[str, Any] = {
    "size": ("tiny",),
    "context": (16,),
    "batch": (1,),
    "precision": ("fp32",),
    "mode": ("forward", "step"),
    "compile": ("eager",),
    "attention": ("naive", "sdpa_math"),
}


def opened(device: str, timed: bool = True, **values: Any) -> dict[tuple[str, str], Any]:
    """{(mode, row): record} of the cases of TINY, but for these values of axes."""
    cases = cases_of(Anatomy(), Settings(device=device), **(TINY | values))
    measured = results(Anatomy(), cases, device=device, timed=timed)
    return {(record["mode"], record["impl"]): record for record in measured}


def test_records_tell_time_and_memory(device: str, tmp_path: Path) -> None:
    measured = opened(device, traces=tmp_path)
    assert len(measured) == 4
    for (mode, row), record in measured.items():
        assert record["outcome"] == "ok", record["reason"]
        assert json.loads(json.dumps(record, allow_nan=False))["benchmark"] == "anatomy"
        assert record["time_s"] > 0 and record["rounds"] >= 10
        assert 0 < record["kernel_s"] <= record["profiled_s"]
        assert sum(record[f"{kind}_share"] for kind in KINDS) == pytest.approx(1)
        assert 0 < len(record["kernels"]) <= 15 and len(record["allocations"]) == 10
        assert all(len(kernel["name"]) <= 120 for kernel in record["kernels"])
        inside = {part["name"] for part in record["parts"]} >= {"scores", "softmax", "values"}
        assert inside == (row == "naive")
        names = ["forward"] if mode == "forward" else ["forward", "backward", "optimizer"]
        assert [phase["name"] for phase in record["phases"]] == [phase["name"] for phase in record["timeline"]] == names
        assert record["peak_bytes"] == max(phase["peak_bytes"] for phase in record["phases"])
        points = [point for phase in record["timeline"] for point in phase["points"]]
        assert 0 < len(points) <= TIMELINE_POINTS and points == sorted(points, key=lambda point: point[0])
        assert max(size for _, size in points) == pytest.approx(
            record["peak_bytes"], rel=0.01 if device == "cpu" else 0.2
        )
        assert json.loads((tmp_path / f"{record['id']}.json").read_text())["traceEvents"]
        assert (tmp_path / f"{record['id']}.pickle").exists() == (device == "cuda")
    step, inference = measured["step", "naive"], measured["forward", "naive"]
    predicted = training_memory(model_config("tiny", context_length=16, vocab_size=1000), 1, 16, "fp32")
    for name in ("parameters", "gradients", "optimizer"):
        assert step[f"{name}_bytes"] == pytest.approx(getattr(predicted, name), rel=0.01)
        assert step[f"predicted_{name}_bytes"] == getattr(predicted, name) and f"{name}_bytes" not in inference
    assert any(allocation["where"].startswith("lmsys/") for allocation in step["allocations"])


def test_rows_that_cannot_run_or_are_not_timed_have_no_profile(device: str) -> None:
    (unsupported,) = opened(device, mode=("forward",), attention=("flash_attn_2",)).values()
    assert unsupported["outcome"] == "unsupported" and "kernels" not in unsupported
    (untimed,) = opened(device, timed=False, mode=("forward",), attention=("naive",)).values()
    assert untimed["outcome"] == "ok" and "not timed" in untimed["reason"] and "time_s" not in untimed


def test_cases_have_names_of_their_own_and_are_what_can_be_opened() -> None:
    for sweep in SWEEPS.values():
        for device, sweep_here in sweep.items():
            ids = Session(Settings(device=device), sweep_here).add(Anatomy)
            assert ids and all(name.startswith("anatomy-") for name in ids)
            assert not [name for name in ids for other in OTHER_SELECTORS if other in name]
            options = {"--size": "tiny", "--mode": "optimizer,step", "--compile": "eager,graphed"}
            ids = Session(Settings(device=device), sweep_here, texts=options).add(Anatomy)
            assert ids and all("-tiny-" in name and "-step-eager-" in name for name in ids)
            # None of these options is an axis of the precision study, so all of its cases remain.
            assert len(Session(Settings(device=device), sweep_here, texts=options).add(Precision)) == 4


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100)), max_size=60), st.integers(2, 20))
def test_a_thinned_timeline_keeps_its_extremes(drawn: list[tuple[float, int]], keep: int) -> None:
    points = sorted(drawn)
    kept = thinned(points, keep)
    assert len(kept) <= keep and kept == sorted(kept) and set(kept) <= set(points)
    if points:
        sizes = [size for _, size in points]
        assert {min(sizes), max(sizes)} <= {size for _, size in kept}


def test_the_precision_study_is_recorded(device: str) -> None:
    cases = cases_of(Precision(), Settings(device=device))
    by_id = {record["id"]: record for record in results(Precision(), cases, device=device)}
    assert all(record["outcome"] == "ok" and "nothing is timed" in record["reason"] for record in by_id.values())
    assert [len(by_id[f"precision-accumulation-{dtype}"]["sums"]) for dtype in ("float16", "bfloat16")] == [4, 4]
    assert by_id["precision-autocast-bfloat16"]["tensors"]


def test_a_rounded_sum_loses_more_than_rounded_addends() -> None:
    """0.01 is added a thousand times. A rounded sum is `low`; the addends alone are rounded in `mixed` and `cast`."""
    float16, bfloat16 = (sums(dtype, "cpu")["sums"] for dtype in (torch.float16, torch.bfloat16))
    exact, low, mixed, cast = (abs(total["error"]) for total in float16)
    assert exact < 1e-3 < mixed == cast < 1e-2 < low and float16[1]["result"] == 9.953125
    assert abs(bfloat16[1]["error"]) > 5  # once the sum is 4, adding 0.01 rounds to 4 again: half a unit is larger


def test_autocast_keeps_parameters_norms_loss_and_gradients_wide() -> None:
    dtypes = {tensor["name"]: tensor["dtype"] for tensor in tensors(torch.bfloat16, "cpu")["tensors"]}
    narrow = {name for name, dtype in dtypes.items() if dtype == "bfloat16"}
    assert {"output of layers.0.attn.qkv", "output of layers.0.ffn.w1", "output of lm_head"} <= narrow
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {
        "parameters", "output of token_embeddings", "output of layers.0", "loss", "gradients"
    }  # fmt: skip
