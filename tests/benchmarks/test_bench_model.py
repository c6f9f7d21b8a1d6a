"""The language model's benchmark: which cells there are, what is wrong in them, and what their records say."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.axes import parse_model_axes
from benchmarks.model_cells import LLAMA, cells_of, rows_called
from benchmarks.model_gate import gate
from benchmarks.model_trial import model_trial
from benchmarks.sections import MODES, ModelSection
from benchmarks.session import Settings
from benchmarks.sweeps import SWEEPS
from lmsys.attention import ATTENTION
from lmsys.attention.compiled import why_no_compiler
from lmsys.attention.naive import naive
from lmsys.config import model_config
from lmsys.cost.operations import model_flops, model_parameters
from lmsys.registry import Entry
from lmsys.training.graph import GraphedGradients
from tests.support import processes

TINY = ModelSection("s", ("tiny",), (8,), ("fp32",), compiles=("eager",), batch=(1,))
ONE_CELL = "--size small --context 512 --batch 4 --precision bf16 --mode step --compile eager --attention sdpa_flash"


@pytest.fixture(scope="module")
def settings() -> Settings:
    found = Settings("cpu", "smoke", 0.01, 10, True, None, "")
    ceilings = {"matmul_flops_per_s": {"float32": 1e12, "bfloat16": 2e12}, "copy_bytes_per_s": 1e11}
    found.__dict__["machine"] = {"date": "now", "gpu": None, "ceilings": ceilings}
    return found


def records(section: ModelSection, settings: Settings, *rows: Entry) -> dict[tuple[str, str, str], dict[str, Any]]:
    """By mode, compile and attention row."""
    cells = list(cells_of(section, {}, list(rows) or None, "cpu"))
    found = [result.record for result in model_trial(cells, settings)]
    assert [one["id"] for one in found] == [cell.id for cell in cells]
    return {(one["mode"], one["compile"], one["impl"]): one for one in found}


def test_axes_name_exactly_one_cell() -> None:
    ended = processes.run("model", "--benchmark-only", "--collect-only", *ONE_CELL.split())
    tests = [line for line in ended.stdout.splitlines() if "::" in line]
    assert tests == ["benchmarks/bench_model.py::test_model[default-small-S512B4-bf16-step-eager-sdpa_flash]"]
    for sweep in SWEEPS.values():
        for device in sweep.values():
            sections = {one.name: one for one in device.models}
            assert sections
            for part in sections.values():
                ids = [cell.id for cell in cells_of(part, {}, None, "cpu")]
                assert len(set(ids)) == len(ids) and not any("attention" in one for one in ids)


def test_one_cell_is_asked_whatever_the_sweep() -> None:
    words = ONE_CELL.split()
    axes = parse_model_axes(dict(zip(words[:-2:2], words[1:-2:2], strict=True)))
    for sweep in SWEEPS["default"].values():
        found = {cell.id for part in sweep.models for cell in cells_of(part, axes, rows_called(["sdpa_flash"]), "cpu")}
        assert found == {"default-small-S512B4-bf16-step-eager-sdpa_flash"}


def test_what_only_a_model_has_is_no_row_of_attention() -> None:
    ended = processes.run("attention or model", "--collect-only", "--sweep", "smoke", "--attention", "auto,llama")
    tests = [line.partition("[")[2] for line in ended.stdout.splitlines() if "::" in line]
    assert {one.rpartition("-")[2] for one in tests if one != "NOTSET]"} == {"auto]", "llama]"}
    ended = processes.run("attention", "--attention", "llama")
    assert ended.returncode == 4 and "--attention llama: what is selected has no cell for these rows" in ended.stderr
    ended = processes.run("model", "--collect-only", "--attention", "lama")
    assert ended.returncode == 4 and "unknown attention 'lama'; did you mean llama" in ended.stderr


def test_a_run_writes_a_record_for_each_cell(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    small = "--sweep smoke --context 8 --batch 1 --precision fp32,tf32 --mode forward,step --attention naive,sdpa_math"
    ended = processes.run("model", *small.split(), "--benchmark-only", "--benchmark-json", str(output))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    content = json.loads(output.read_text())
    outcomes = {one["id"]: one["outcome"] for one in content["lmsys"]["records"]}
    able = ("fp32", "tf32") if torch.cuda.is_available() else ("fp32",)
    assert outcomes == {
        f"smoke-tiny-S8B1-{precision}-{mode}-eager-{row}": "ok" if precision in able else "unsupported"
        for precision in ("fp32", "tf32")
        for mode in ("forward", "step")
        for row in ("naive", "sdpa_math")
    }
    timed = {entry["group"] for entry in content["benchmarks"]}
    assert timed == {f"smoke-tiny-S8B1-{precision}-{mode}" for precision in able for mode in ("forward", "step")}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_mode_is_timed_and_accounted_for(precision: str, settings: Settings) -> None:
    found = records(replace(TINY, precisions=(precision,)), settings)
    config = model_config("tiny", context_length=8)
    assert {mode for mode, _, _ in found} == set(MODES)
    for (mode, _, _), one in found.items():
        assert one["outcome"] == "ok", one["reason"]
        assert 0 <= one["error_ratio"] <= 1 and one["rounds"] >= 10 and one["peak_bytes"] > 0
        assert (
            one["num_parameters"] == model_parameters(config) and one["mfu" if mode != "optimizer" else "flops"] is None
        )
        assert (one["loss"] is None) == (mode == "forward") and one["attention"] in ATTENTION
        weights = 4 * one["num_parameters"]  # bytes: what is held also are gradients, two moments, and small change
        copies = {"optimizer": 4, "step": 3, "backward": 1, "train_forward": 1, "forward": 1}[mode]
        assert one["held_bytes"] == pytest.approx(copies * weights, rel=0.01)
        if mode != "optimizer":
            assert one["flops"] == model_flops(config, tokens=8, context=8, mode=mode)
            assert one["tokens_per_s"] == pytest.approx(8 / one["time_s"])
    fraction = found["step", "eager", "auto"]["matmul_ceiling_fraction"]
    assert (fraction is None) == (precision == "fp16")


@pytest.mark.skipif(LLAMA.why_not(None) is not None, reason=str(LLAMA.why_not(None)))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_llama_stands_beside_ours(precision: str, settings: Settings) -> None:
    section = replace(TINY, precisions=(precision,), rows=("auto", "llama"))
    found = records(section, settings)
    for mode in MODES:
        ours, theirs = (found[mode, "eager", row] for row in ("auto", "llama"))
        assert theirs["outcome"] == "ok", theirs["reason"]
        assert theirs["peer"] and theirs["label"] == "Hugging Face Llama" and not ours["peer"]
        assert theirs["comparison"] == ours["comparison"] and 0 <= theirs["error_ratio"] <= 1
        assert (theirs["loss"] is None) == (mode == "forward")
        assert theirs["held_bytes"] == pytest.approx(
            ours["held_bytes"], rel=0.01
        )  # one set of weights, no other moments
        assert theirs["predicted_bytes"] is None and (ours["predicted_bytes"] is None) == (mode != "step")


@pytest.mark.gpu
@pytest.mark.skipif(LLAMA.why_not(None) is not None, reason=str(LLAMA.why_not(None)))
def test_llama_stands_compiled_beside_ours(settings: Settings) -> None:
    section = replace(TINY, contexts=(128,), precisions=("bf16",), compiles=("compiled",), rows=("auto", "llama"))
    on_gpu = replace(settings, device="cuda")
    on_gpu.__dict__["machine"] = settings.machine
    found = [result.record for result in model_trial(list(cells_of(section, {}, None, "cuda")), on_gpu)]
    assert {one["outcome"] for one in found} == {"ok"}, [one["reason"] for one in found]
    held = {(one["mode"], one["impl"]): one["held_bytes"] for one in found}
    for mode in MODES:
        assert held[mode, "llama"] == pytest.approx(held[mode, "auto"], rel=0.02)
    (compiled,) = {one["compile_s"] for one in found if one["impl"] == "llama" and one["mode"] == "step"}
    assert compiled > 1


@pytest.mark.skipif(LLAMA.why_not(None) is not None, reason=str(LLAMA.why_not(None)))
@pytest.mark.parametrize("mode", ["forward", "train_forward"])
def test_a_llama_of_other_weights_is_wrong(mode: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.llama.Llama._reordered", lambda self, name, x, rows: x)
    (one,) = records(replace(TINY, modes=(mode,), rows=("llama",)), settings).values()
    assert one["outcome"] == "wrong" and one["error_ratio"] > 1


def test_without_transformers_llama_is_unsupported(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "benchmarks.llama", raising=False)
    found = records(replace(TINY, modes=("step",), rows=("auto", "llama")), settings)
    assert [one["outcome"] for one in found.values()] == ["ok", "unsupported"]
    assert "pip install 'lmsys[peers]'" in found["step", "eager", "llama"]["reason"]


@pytest.mark.skipif(why_no_compiler("cpu") is not None, reason=str(why_no_compiler("cpu")))
def test_compiled_rows_run_beside_eager_ones(settings: Settings) -> None:
    section = replace(TINY, compiles=("eager", "compiled"), modes=("step",), rows=("sdpa_math",))
    found = records(section, settings)
    eager, compiled = (found["step", one, "sdpa_math"] for one in ("eager", "compiled"))
    assert eager["outcome"] == compiled["outcome"] == "ok", compiled["reason"]
    assert eager["comparison"] == compiled["comparison"] and compiled["compile_s"] > eager["compile_s"]


def test_without_a_gpu_a_graph_is_unsupported(settings: Settings) -> None:
    section = replace(TINY, compiles=("eager", "graphed"), modes=("step",), rows=("sdpa_math",))
    found = records(section, settings)
    assert found["step", "eager", "sdpa_math"]["outcome"] == "ok"
    graphed = found["step", "graphed", "sdpa_math"]
    assert graphed["outcome"] == "unsupported" and ("CUDA" in graphed["reason"] or "compile" in graphed["reason"])


@pytest.mark.gpu
def test_a_graph_is_measured_beside_what_it_replays(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    section = replace(TINY, contexts=(128,), precisions=("bf16", "fp16"), compiles=("compiled", "graphed"))
    on_gpu = replace(settings, device="cuda")
    on_gpu.__dict__["machine"] = settings.machine

    def outcomes() -> dict[tuple[str, str], dict[str, Any]]:
        cells = list(cells_of(section, {}, None, "cuda"))
        found = [
            r.record
            for group in {c.group for c in cells}
            for r in model_trial([c for c in cells if c.group == group], on_gpu)
        ]
        return {(one["precision"], one["mode"], one["compile"]): one for one in found}

    found = outcomes()
    for (_, mode, compiled), one in found.items():
        assert one["outcome"] == (
            "ok" if (mode, compiled) == ("step", "graphed") or compiled == "compiled" else "unsupported"
        )
    for precision in ("bf16", "fp16"):
        compiled, graphed = (found[precision, "step", way] for way in ("compiled", "graphed"))
        workspaces = 2**26  # of cuBLAS, which keeps one for each stream
        assert 0.7 * compiled["peak_bytes"] < graphed["peak_bytes"] < 1.3 * compiled["peak_bytes"] + workspaces
    record = GraphedGradients.record

    def of_old_data(self: GraphedGradients, *inputs: Tensor) -> None:
        record(self, *inputs)
        self._gradients = [x * 1.1 for x in self._gradients]

    monkeypatch.setattr(GraphedGradients, "record", of_old_data)
    wrong = outcomes()["bf16", "step", "graphed"]
    assert wrong["outcome"] == "wrong" and "gradient of the graph" in wrong["reason"]


def test_wrong_oom_and_broken_rows_are_cells(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def slightly_off(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        return naive(q, k, v, causal=causal, scale=scale) * 1.001

    def hungry(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        return torch.empty(2**60, dtype=torch.int8)

    monkeypatch.setattr("lmsys.attention.vectorized.vectorized", slightly_off)
    monkeypatch.setattr("lmsys.attention.peers.sdpa_math", hungry)
    rows = [*ATTENTION.select(["naive", "vectorized", "sdpa_math", "flash_attn_2"]), Entry("mine", "mine.py:mine")]
    found = records(replace(TINY, modes=("forward", "train_forward")), settings, *rows)
    outcomes = {(mode, row): one["outcome"] for (mode, _, row), one in found.items()}
    expected = {"naive": "ok", "vectorized": "wrong", "sdpa_math": "oom", "flash_attn_2": "unsupported"}
    assert outcomes == {(mode, row): o for mode in ("forward", "train_forward") for row, o in expected.items()} | {
        (mode, "mine"): "unsupported" for mode in ("forward", "train_forward")
    }
    wrong = found["train_forward", "eager", "vectorized"]
    assert wrong["error_ratio"] > 1 and "times the allowed error" in wrong["reason"] and "time_s" not in wrong


@pytest.mark.parametrize(
    ("what", "outcome"),
    [("model_trial.Workbench", "oom"), ("model_trial.gate", "error"), ("model_trial._time", "error")],
)
def test_what_fails_outside_a_row_fails_every_cell(
    what: str, outcome: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(f"benchmarks.{what}", fails)
    for one in records(TINY, settings).values():
        assert one["outcome"] == outcome and "no room" in one["reason"]


def test_a_reference_without_room_is_of_half_the_batch(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []

    def fits_two(rows: Any, config: Any, batch: int, *rest: Any) -> None:
        batches.append(batch)
        if batch > 2:
            raise torch.OutOfMemoryError("no room")
        gate(rows, config, batch, *rest)

    monkeypatch.setattr("benchmarks.model_trial.gate", fits_two)
    found = records(replace(TINY, batch=(8,)), settings)
    assert batches == [8, 4, 2]
    assert all(one["outcome"] == "ok" and one["batch"] == 8 for one in found.values())


def test_a_loss_that_is_no_longer_finite_is_wrong(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.model_workbench.LEARNING_RATE", 1e30)
    found = records(replace(TINY, modes=("forward", "step")), settings)
    assert {one["outcome"] for one in found.values()} == {"wrong"}
    assert all("after timing" in one["reason"] for one in found.values())


def test_the_study_of_warm_up_starts_cold_each_time(settings: Settings) -> None:
    section = replace(TINY, modes=("forward",), warmups=(0,))
    (one,) = records(section, settings).values()
    assert one["outcome"] == "ok", one["reason"]
    assert one["warmup_steps"] == 0 and one["rounds"] == 10 and one["std_s"] > 0
    assert one["id"] == "s-tiny-S8B1-fp32-W0-forward-eager-auto"


def test_without_timing_rows_are_checked_only(settings: Settings) -> None:
    for one in records(TINY, replace(settings, timed=False)).values():
        assert one["outcome"] == "ok" and "not timed" in one["reason"] and "time_s" not in one


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--size", "medum", "must be one of tiny, small, medium, large, xl, 2.7b, 10b; did you mean medium"),
        ("--context", "0", "--context '0': must be a positive whole number"),
        ("--precision", "bf61", "must be one of fp32, tf32, bf16, fp16"),
        ("--mode", "fwd", "must be one of forward, train_forward, backward, optimizer, step"),
        ("--compile", "yes", "must be one of eager, compiled"),
    ],
)
def test_bad_axis_values_are_named(option: str, value: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_model_axes({option: value})
    assert message in str(caught.value)
