"""The model opened up: what the records say, which cases there are, and the mixed-precision study."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_anatomy
from benchmarks.bench_anatomy import TIMELINE_POINTS, Anatomy, thinned
from benchmarks.bench_precision import Precision
from benchmarks.models import config_of
from benchmarks.sweeps import SWEEPS
from lmsys.bench import Settings
from lmsys.bench.results import Session
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
    """Records by mode and row."""
    cases = cases_of(Anatomy(), Settings(device=device), **(TINY | values))
    found = [one.record for one in results(Anatomy(), cases, device=device, timed=timed)]
    return {(one["mode"], one["impl"]): one for one in found}


def test_records_tell_time_and_memory(device: str, tmp_path: Path) -> None:
    found = opened(device, traces=tmp_path)
    assert len(found) == 4
    for (mode, row), one in found.items():
        assert one["outcome"] == "ok", one["reason"]
        assert json.loads(json.dumps(one, allow_nan=False))["benchmark"] == "anatomy"
        assert one["time_s"] > 0 and one["rounds"] >= 10
        assert 0 < one["kernel_s"] <= one["profiled_s"]
        assert sum(one[f"{kind}_share"] for kind in KINDS) == pytest.approx(1)
        assert 0 < len(one["kernels"]) <= 15 and len(one["allocations"]) == 10
        assert all(len(kernel["name"]) <= 120 for kernel in one["kernels"])
        inside = {part["name"] for part in one["parts"]} >= {"scores", "softmax", "values"}
        assert inside == (row == "naive")
        names = ["forward"] if mode == "forward" else ["forward", "backward", "optimizer"]
        assert [phase["name"] for phase in one["phases"]] == [phase["name"] for phase in one["timeline"]] == names
        assert one["peak_bytes"] == max(phase["peak_bytes"] for phase in one["phases"])
        points = [point for phase in one["timeline"] for point in phase["points"]]
        assert 0 < len(points) <= TIMELINE_POINTS and points == sorted(points, key=lambda point: point[0])
        assert max(size for _, size in points) == pytest.approx(one["peak_bytes"], rel=0.01 if device == "cpu" else 0.2)
        assert json.loads((tmp_path / f"{one['id']}.json").read_text())["traceEvents"]
        assert (tmp_path / f"{one['id']}.pickle").exists() == (device == "cuda")
    step, inference = found["step", "naive"], found["forward", "naive"]
    predicted = training_memory(config_of("tiny", 16), 1, 16, "fp32")
    for name in ("parameters", "gradients", "optimizer"):
        assert step[f"{name}_bytes"] == pytest.approx(getattr(predicted, name), rel=0.01)
        assert step[f"predicted_{name}_bytes"] == getattr(predicted, name) and f"{name}_bytes" not in inference
    assert any(one["where"].startswith("lmsys/") for one in step["allocations"])


def test_rows_that_cannot_run_or_are_not_timed_have_no_profile(device: str) -> None:
    (unsupported,) = opened(device, mode=("forward",), attention=("flash_attn_2",)).values()
    assert unsupported["outcome"] == "unsupported" and "kernels" not in unsupported
    (untimed,) = opened(device, timed=False, mode=("forward",), attention=("naive",)).values()
    assert untimed["outcome"] == "ok" and "not timed" in untimed["reason"] and "time_s" not in untimed


def test_what_fails_while_it_is_opened_is_a_cell(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(bench_anatomy, "memory_of", fails)
    for one in opened(device, attention=("naive",)).values():
        assert (one["outcome"], one["reason"]) == ("oom", "no room") and "time_s" not in one


def test_cases_have_names_of_their_own_and_are_what_can_be_opened() -> None:
    for sweep in SWEEPS.values():
        for device, one in sweep.items():
            ids = Session(Settings(device=device), one).add(Anatomy)
            assert ids and all(name.startswith("anatomy-") for name in ids)
            assert not [name for name in ids for other in OTHER_SELECTORS if other in name]
            asked = {"--size": "tiny", "--mode": "optimizer,step", "--compile": "eager,graphed"}
            ids = Session(Settings(device=device), one, texts=asked).add(Anatomy)
            assert ids and all("-tiny-" in name and "-step-eager-" in name for name in ids)
            assert len(Session(Settings(device=device), one, texts=asked).add(Precision)) == 4  # its axes are its own


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100)), max_size=60), st.integers(2, 20))
def test_a_thinned_timeline_keeps_its_extremes(drawn: list[tuple[float, int]], keep: int) -> None:
    points = sorted(drawn)
    found = thinned(points, keep)
    assert len(found) <= keep and found == sorted(found) and set(found) <= set(points)
    if points:
        sizes = [size for _, size in points]
        assert {min(sizes), max(sizes)} <= {size for _, size in found}


def test_the_precision_study_is_recorded(device: str) -> None:
    cases = cases_of(Precision(), Settings(device=device))
    found = {one.record["id"]: one.record for one in results(Precision(), cases, device=device)}
    assert all(one["outcome"] == "ok" and "nothing is timed" in one["reason"] for one in found.values())
    assert [len(found[f"precision-accumulation-{dtype}"]["sums"]) for dtype in ("float16", "bfloat16")] == [4, 4]
    tensors = {one["name"]: one["dtype"] for one in found["precision-autocast-bfloat16"]["tensors"]}
    assert tensors["parameters"] == "float32" and tensors["output of lm_head"] == "bfloat16"
