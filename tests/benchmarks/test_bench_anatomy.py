"""The model opened up: what the records say, which cells there are, and the mixed-precision study."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import anatomy_trial, bench_precision
from benchmarks.anatomy_trial import TIMELINE_POINTS, anatomy_cells, thinned
from benchmarks.sections import ModelSection
from benchmarks.session import Settings
from benchmarks.sweeps import SWEEPS
from lmsys.config import model_config
from lmsys.cost.memory import training_memory
from lmsys.measure.profile import KINDS
from tests.support import processes

OTHER_SELECTORS = ("attention", "model", "data_parallel", "collectives", "tokenizer", "training")
TINY = ModelSection(
    "anatomy", ("tiny",), (16,), ("fp32",), ("forward", "step"), ("eager",), batch=(1,), rows=("naive", "sdpa_math")
)


@pytest.fixture(scope="module")
def settings(device: str) -> Settings:
    found = Settings(device, "smoke", 0.01, 10, True, None, "")
    ceilings = {"matmul_flops_per_s": {}, "copy_bytes_per_s": 1e11}
    found.__dict__["machine"] = {"date": "now", "gpu": None, "ceilings": ceilings}
    return found


def opened(section: ModelSection, settings: Settings, traces: Path | None = None) -> dict[tuple[str, str], Any]:
    """Records by mode and row."""
    cells = list(anatomy_cells(section, {}, None, settings.device))
    results = list(anatomy_trial.anatomy_trial(cells, settings, traces))
    assert [one.record["id"] for one in results] == [cell.id for cell in cells]
    return {(one.record["mode"], one.record["impl"]): one.record for one in results}


def test_records_tell_time_and_memory(settings: Settings, tmp_path: Path) -> None:
    found = opened(TINY, settings, tmp_path)
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
        assert max(size for _, size in points) == pytest.approx(
            one["peak_bytes"], rel=0.01 if settings.device == "cpu" else 0.2
        )
        assert json.loads((tmp_path / f"{one['id']}.json").read_text())["traceEvents"]
        assert (tmp_path / f"{one['id']}.pickle").exists() == (settings.device == "cuda")
    step, inference = found["step", "naive"], found["forward", "naive"]
    predicted = training_memory(model_config("tiny", context_length=16), 1, 16, "fp32")
    for name in ("parameters", "gradients", "optimizer"):
        assert step[f"{name}_bytes"] == pytest.approx(getattr(predicted, name), rel=0.01)
        assert step[f"predicted_{name}_bytes"] == getattr(predicted, name) and f"{name}_bytes" not in inference
    assert any(one["where"].startswith("lmsys/") for one in step["allocations"])


def test_rows_that_cannot_run_or_are_not_timed_have_no_profile(settings: Settings) -> None:
    section = replace(TINY, modes=("forward",), rows=("naive",))
    (unsupported,) = opened(replace(section, rows=("flash_attn_2",)), settings).values()
    assert unsupported["outcome"] == "unsupported" and "kernels" not in unsupported
    (untimed,) = opened(section, replace(settings, timed=False)).values()
    assert untimed["outcome"] == "ok" and "not timed" in untimed["reason"] and "time_s" not in untimed


def test_what_fails_while_it_is_opened_is_a_cell(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(anatomy_trial, "_memory_of", fails)
    for one in opened(replace(TINY, rows=("naive",)), settings).values():
        assert (one["outcome"], one["reason"]) == ("oom", "no room") and "time_s" not in one


def test_cells_have_names_of_their_own() -> None:
    for sweep in SWEEPS.values():
        for device, one in sweep.items():
            ids = [cell.id for section in one.anatomies for cell in anatomy_cells(section, {}, None, device)]
            assert ids and len(set(ids)) == len(ids) and all(name.startswith("anatomy-") for name in ids)
            assert not [name for name in ids for other in OTHER_SELECTORS if other in name]
    asked = {"compiles": ("eager", "graphed"), "modes": ("step",)}
    assert {cell.compile for cell in anatomy_cells(TINY, asked, None, "cuda")} == {"eager"}  # a graph is not opened
    ended = processes.run("anatomy or precision", "--collect-only", "--size", "tiny", "--mode", "optimizer,step")
    tests = [line.partition("::")[2] for line in ended.stdout.splitlines() if "::" in line]
    assert all("-tiny-" in test and "-step-" in test for test in tests if "anatomy" in test)
    assert {test.partition("[")[0] for test in tests} == {"test_anatomy", "test_precision"}


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100)), max_size=60), st.integers(2, 20))
def test_a_thinned_timeline_keeps_its_extremes(drawn: list[tuple[float, int]], keep: int) -> None:
    points = sorted(drawn)
    found = thinned(points, keep)
    assert len(found) <= keep and found == sorted(found) and set(found) <= set(points)
    if points:
        sizes = [size for _, size in points]
        assert {min(sizes), max(sizes)} <= {size for _, size in found}


def test_the_precision_study_is_recorded(settings: Settings) -> None:
    found = {one.record["id"]: one.record for one in bench_precision.precision_trial(bench_precision.STUDIES, settings)}
    assert all(one["outcome"] == "ok" and "nothing is timed" in one["reason"] for one in found.values())
    assert [len(found[f"precision-accumulation-{dtype}"]["sums"]) for dtype in ("float16", "bfloat16")] == [4, 4]
    tensors = {one["name"]: one["dtype"] for one in found["precision-autocast-bfloat16"]["tensors"]}
    assert tensors["parameters"] == "float32" and tensors["output of lm_head"] == "bfloat16"
