"""benchmarks/bench_model.py: the cases of the language model's benchmark, the rows that it refuses, and its records.

A row is an implementation of attention in our model, or Hugging Face's Llama. tests/benchmarks/test_model_spots.py
tests how timed calls are judged.
"""

import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.axes import MODELS_ONLY, MODES
from benchmarks.bench_attention import Attention
from benchmarks.bench_model import Model
from benchmarks.model.cases import Gate
from benchmarks.models import LLAMA, MODEL_ROWS
from benchmarks.sweeps import SWEEPS
from lmsys import processes
from lmsys.attention import ATTENTION, vectorized
from lmsys.attention.compiled import why_no_compiler
from lmsys.attention.naive import naive
from lmsys.bench import Settings
from lmsys.bench.fields import filled
from lmsys.bench.results import Session
from lmsys.config import model_config
from lmsys.cost.memory import training_memory
from lmsys.cost.operations import model_flops, model_parameters
from lmsys.model import TransformerLM, functions, fused
from lmsys.training.gradients import GraphedGradients
from tests.support.harness import cases_of, results
from tests.support.variants import few_by_default

TINY: dict[str, Any] = {  # values of axes
    "size": ("tiny",),
    "context": (8,),
    "batch": (1,),
    "precision": ("fp32",),
    "mode": MODES,
    "compile": ("eager",),
    "attention": ("auto",),
}
TINY_MODEL = model_config("tiny", context_length=8, vocab_size=1000)  # the model of these cases
ONE_CASE = "--size small --context 512 --batch 4 --precision bf16 --mode step --compile eager --attention sdpa_flash"
VECTORIZED, SDPA_MATH = "lmsys.attention.vectorized.vectorized", "lmsys.attention.peers.sdpa_math"
needs_llama = pytest.mark.skipif(LLAMA.why_not(None) is not None, reason=str(LLAMA.why_not(None)))


def records(device: str = "cpu", timed: bool = True, **values: Any) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The records of a run, by (mode, compile, row). values: other values of axes than those of TINY."""
    cases = cases_of(Model(), Settings(device=device), **(TINY | values))
    measured = results(Model(), cases, device=device, timed=timed)
    assert [record["id"] for record in measured] == [case.id for case in cases]
    return {(record["mode"], record["compile"], record["impl"]): record for record in measured}


def outcomes(by_key: dict[tuple[str, str, str], dict[str, Any]]) -> dict[tuple[str, str], str]:
    """The outcomes of such records, by (mode, row)."""
    return {(mode, row): record["outcome"] for (mode, _, row), record in by_key.items()}


def test_each_sweep_has_cases_and_options_choose_one_case_in_any_sweep() -> None:
    words = ONE_CASE.split()
    texts = dict(zip(words[::2], words[1::2], strict=True))
    for name, sweep in SWEEPS.items():
        for device, sweep_here in sweep.items():
            settings = Settings(device=device)
            grids = [filled(grid, Model.axes, {}) for grid in sweep_here.grids["model"]]
            ids = [case.id for grid in grids for case in Model().cases(grid, settings)]
            assert ids and len(set(ids)) == len(ids) and not any("attention" in case_id for case_id in ids)
            chosen = Session(settings, sweep_here, texts=texts).add(Model)
            assert name != "default" or chosen == ["default-small-S512B4-bf16-step-eager-sdpa_flash"]


def test_models_take_all_attention_rows_and_rows_for_models_alone() -> None:
    assert tuple(MODEL_ROWS) == (*ATTENTION, *MODELS_ONLY)
    only, unknown = (
        Session(Settings(device="cpu"), SWEEPS["smoke"]["cpu"], texts={"--attention": names})
        for names in ("auto,llama", "lama")
    )
    assert {case_id.rpartition("-")[2] for case_id in only.add(Model)} == {"auto", "llama"} and not only.add(Attention)
    with pytest.raises(ValueError, match="unknown attention 'lama'; did you mean llama"):
        unknown.add(Model)


@pytest.mark.parametrize("precision", few_by_default(["fp32", "bf16", "fp16"], one_in=3))
def test_every_mode_is_timed_and_has_its_memory_and_operations(precision: str) -> None:
    by_case = records(precision=(precision,))
    config = TINY_MODEL
    assert {mode for mode, _, _ in by_case} == set(MODES)
    for (mode, _, _), record in by_case.items():
        assert record["outcome"] == "ok", record["reason"]
        assert 0 <= record["error_ratio"] <= 1 and record["rounds"] >= 10 and record["peak_bytes"] > 0
        ratios = [max(call["error_ratios"].values()) for call in record["proof"]["calls"]]
        assert len(ratios) >= 2 and max(ratios) <= record["error_ratio"]
        assert record["num_parameters"] == model_parameters(config) and record["label"].startswith("auto: ")
        assert (record["loss"] is None) == (mode == "forward") and record["attention"] in ATTENTION
        # Bytes of the weights. A step also holds their gradients, two moments, and some small tensors.
        weights = 4 * record["num_parameters"]
        copies = {"optimizer": 4, "step": 3, "backward": 1, "train_forward": 1, "forward": 1}[mode]
        assert record["held_bytes"] == pytest.approx(copies * weights, rel=0.01)
        assert record["total_bytes"] == record["held_bytes"] + record["peak_bytes"]
        if mode == "optimizer":
            assert record["flops"] is None and "flops_per_s" not in record
            continue
        assert record["mfu"] is None and record["flops"] == model_flops(config, tokens=8, context=8, mode=mode)
        assert record["tokens_per_s"] == pytest.approx(8 / record["time_s"])
    fraction = by_case["step", "eager", "auto"]["matmul_ceiling_fraction"]
    assert (fraction is None) == (precision == "fp16")


@needs_llama
@pytest.mark.parametrize("precision", few_by_default(["fp32", "bf16", "fp16"], one_in=3))
def test_llama_is_compared_with_our_model(precision: str) -> None:
    by_case = records(precision=(precision,), attention=("auto", "llama"))
    for mode in MODES:
        ours, theirs = (by_case[mode, "eager", row] for row in ("auto", "llama"))
        assert theirs["outcome"] == "ok", theirs["reason"]
        assert theirs["peer"] and theirs["label"] == "Hugging Face Llama" and not ours["peer"]
        assert theirs["comparison"] == ours["comparison"] and 0 <= theirs["error_ratio"] <= 1
        assert (theirs["loss"] is None) == (mode == "forward")
        # Llama shares our weights and has the same moments.
        assert theirs["held_bytes"] == pytest.approx(ours["held_bytes"], rel=0.01)
        assert theirs["predicted_bytes"] is None and (ours["predicted_bytes"] is None) == (mode != "step")


@pytest.mark.gpu
@needs_llama
def test_compiled_llama_is_compared_with_our_model() -> None:
    values = {"context": (128,), "precision": ("bf16",), "compile": ("compiled",)}
    by_case = records("cuda", attention=("auto", "llama"), **values)
    assert set(outcomes(by_case).values()) == {"ok"}, [record["reason"] for record in by_case.values()]
    for mode in MODES:
        ours, theirs = (by_case[mode, "compiled", row] for row in ("auto", "llama"))
        assert theirs["held_bytes"] == pytest.approx(ours["held_bytes"], rel=0.02)
    assert by_case["step", "compiled", "llama"]["compile_s"] > 1


def test_a_grid_about_llama_has_no_cases_without_it() -> None:
    assert not cases_of(Model(), **TINY, against="llama")
    assert len(cases_of(Model(), **(TINY | {"attention": ("naive", "llama")}), against="llama")) == 2 * len(MODES)


def test_without_transformers_llama_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "benchmarks.model.llama", raising=False)
    by_case = records(mode=("step",), attention=("auto", "llama"))
    assert [record["outcome"] for record in by_case.values()] == ["ok", "unsupported"]
    assert "[peers]' brings it" in by_case["step", "eager", "llama"]["reason"]


@pytest.mark.long
@pytest.mark.skipif(why_no_compiler("cpu") is not None, reason=str(why_no_compiler("cpu")))
def test_compiled_rows_run_beside_eager_ones() -> None:
    by_case = records(compile=("eager", "compiled"), mode=("step",), attention=("sdpa_math",))
    eager, compiled = (by_case["step", way, "sdpa_math"] for way in ("eager", "compiled"))
    assert eager["outcome"] == compiled["outcome"] == "ok", compiled["reason"]
    assert eager["comparison"] == compiled["comparison"] and compiled["compile_s"] > eager["compile_s"]


def test_fused_blocks_are_checked_on_a_cpu_too_but_timed_only_as_a_cuda_graph() -> None:
    eager, fused = records(compile=("eager", "fused"), mode=("step",), attention=("sdpa_math",)).values()
    assert eager["outcome"] == "ok" and not eager["peer"]
    reason = "CUDA graphs need a CUDA device"
    assert (fused["outcome"], fused["reason"]) == ("unsupported", reason) and fused["error_ratio"] <= 1
    for case in cases_of(Model(), **(TINY | {"compile": ("graphed",)})):
        assert Model().no_sample(case) == ("unsupported", reason)


# Functions of fused blocks that are right for usual rows, and wrong for zero, huge or saturated ones.
def no_eps(x: Tensor, branch: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    return total, total * total.square().mean(dim=-1, keepdim=True).rsqrt() * norm.weight


def squares_in_half(x: Tensor, branch: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    squares = total.half().square().mean(dim=-1, keepdim=True).float()
    return total, total * (squares + norm.eps).rsqrt() * norm.weight


def sigmoid_of_exponentials(x: Tensor) -> Tensor:
    return x * (x.float().exp() / (1 + x.float().exp()))


@pytest.mark.parametrize(
    ("name", "wrong"), [("add_norm", no_eps), ("add_norm", squares_in_half), ("silu", sigmoid_of_exponentials)]
)
def test_blocks_that_are_wrong_for_extreme_rows_are_refused(
    name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only fused blocks are replaced, so the reference is right. Without extreme embeddings they pass."""
    axes: dict[str, Any] = {"compile": ("fused",), "mode": ("train_forward",), "precision": ("bf16",)}
    with monkeypatch.context() as patch:
        patch.setattr(fused, "functions", SimpleNamespace(**vars(functions) | {name: wrong}))
        patch.setattr(fused, name, wrong, raising=name in vars(fused))
        (record,) = records(timed=False, attention=("sdpa_math",), **axes).values()
        assert record["outcome"] == "wrong", record["reason"]
        patch.setattr("benchmarks.model.cases.write_model", lambda parameters: None)
        (record,) = records(timed=False, attention=("sdpa_math",), **axes).values()
        assert record["outcome"] == "unsupported" and record["error_ratio"] <= 1  # right, and only graphs are timed


@pytest.mark.gpu
def test_graphs_are_compared_with_compiled_steps_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def records_in(precision: str) -> dict[tuple[str, str, str], dict[str, Any]]:
        return records("cuda", context=(128,), precision=(precision,), compile=("compiled", "graphed", "fused"))

    for precision in ("bf16", "fp16"):
        by_case = records_in(precision)
        for (mode, way, _), each in by_case.items():
            expected = "ok" if mode == "step" or way == "compiled" else "unsupported"
            assert each["outcome"] == expected, each["reason"]
        compiled, *replayed = (by_case["step", way, "auto"]["peak_bytes"] for way in ("compiled", "graphed", "fused"))
        workspaces = 2**26  # bytes that cuBLAS keeps for each stream
        for peak in replayed:
            assert 0.7 * compiled < peak < 1.3 * compiled + workspaces
    record = GraphedGradients.record

    def wrong_record(self: GraphedGradients, *inputs: Tensor) -> None:
        record(self, *inputs)
        self._gradients = [x * 1.1 for x in self._gradients]

    monkeypatch.setattr(GraphedGradients, "record", wrong_record)
    wrong = records_in("bf16")["step", "graphed", "auto"]
    assert wrong["outcome"] == "wrong" and "gradient of the graph" in wrong["reason"]


def slightly_off(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return naive(q, k, v, causal=causal, scale=scale) * 1.001


def hungry(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return torch.empty(2**60, dtype=torch.int8)


def test_checkpointing_and_narrow_streams_are_compared_with_the_default() -> None:
    values: dict[str, Any] = {"precision": ("bf16",), "mode": ("forward", "step"), "attention": ("sdpa_flash",)}
    values |= {"checkpoint": ("none", "whole*1,matmuls*1"), "residual": ("wide", "narrow")}
    cases = cases_of(Model(), **(TINY | values))
    by_id = {case.id: record for case, record in zip(cases, results(Model(), cases), strict=True)}
    assert [name.removeprefix("s-tiny-S8B1-bf16-").removesuffix("-sdpa_flash") for name in by_id] == [
        *("forward-eager", "forward-eager-narrow", "step-eager", "step-eager-narrow"),
        *("step-eager-Cw1m1", "step-eager-Cw1m1-narrow"),
    ]
    steps = [record for record in by_id.values() if record["mode"] == "step"]
    assert len({record["comparison"] for record in steps}) == 1
    for record in by_id.values():
        assert record["outcome"] == "ok" and 0 < record["error_ratio"] <= 1, record["reason"]
        runtime = {"checkpoint_blocks": record["checkpoint"], "residual": record["residual"]}
        config = replace(TINY_MODEL, **runtime)
        predicted = training_memory(config, 1, 8, "bf16").peak if record["mode"] == "step" else None
        assert record["predicted_bytes"] == predicted
    errors = [record["gradient_error"] for record in steps]
    # A narrow residual stream has gradients of a larger error, which is allowed.
    assert 0 < errors[0] == errors[2] < errors[1] == errors[3] < 0.1


def test_a_stream_that_is_rounded_more_than_bfloat16_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = TransformerLM.hidden

    def coarse(self: TransformerLM, *args: Any, **options: Any) -> Tensor:
        x = hidden(self, *args, **options)
        coarsened = x + (x.to(torch.float8_e4m3fn).to(x.dtype) - x).detach()
        return coarsened if self.config.residual == "narrow" and self.config.attention != "naive" else x

    monkeypatch.setattr(TransformerLM, "hidden", coarse)
    values = {"precision": ("bf16",), "residual": ("wide", "narrow"), "mode": ("step",), "attention": ("sdpa_flash",)}
    cases = cases_of(Model(), **(TINY | values))
    wide, narrow = results(Model(), cases, timed=False)
    assert wide["outcome"] == "ok" and narrow["outcome"] == "wrong" and narrow["error_ratio"] > 1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"residual": ("narrow",)}, "matmuls in fp32 read float32"),
        ({"checkpoint": ("fit",)}, "chosen for a GPU"),
        ({"checkpoint": ("attention*12,matmuls*22",)}, "numbers that add up to 2 layers"),
        ({"checkpoint": ("9",)}, "must lie in 0 to 2 layers"),
        pytest.param({"checkpoint": ("whole",), "attention": ("llama",)}, "settings of our model", marks=needs_llama),
        ({"precision": ("tf32",)}, "TF32"),
        ({"attention": ("flash_attn_2",)}, ""),
        ({"attention": (f"{__file__}:slightly_off",)}, "register it as an entry point"),
    ],
)
def test_settings_that_cannot_be_measured_are_unsupported(values: dict[str, Any], reason: str) -> None:
    (record,) = records(mode=("step",), **values).values()
    assert record["outcome"] == "unsupported" and reason in record["reason"]


@pytest.mark.gpu
def test_levels_that_fit_are_chosen_and_every_level_runs_compiled_and_graphed() -> None:
    values = {"size": ("small",), "context": (512,), "precision": ("bf16",), "residual": ("wide", "narrow")}
    levels = ("none", "matmuls", "attention", "whole", "attention*6,matmuls*6", "fit")
    ways = {"checkpoint": levels, "compile": ("eager", "compiled", "graphed"), "mode": ("step",)}
    cases = cases_of(Model(), Settings(device="cuda"), **(TINY | values | ways))
    measured = results(Model(), cases, device="cuda")
    assert {record["outcome"] for record in measured} == {"ok"}, [record["reason"] for record in measured]
    assert {record["levels"] for record in measured if record["checkpoint"] == "fit"} == {"none*12"}


FORWARDS: dict[str, Any] = {"mode": ("forward", "train_forward")}


@pytest.mark.parametrize(
    ("part", "other", "values", "outcome", "reason"),
    [
        (VECTORIZED, slightly_off, FORWARDS | {"attention": ("vectorized",)}, "wrong", "times the allowed error"),
        (SDPA_MATH, hungry, FORWARDS | {"attention": ("sdpa_math",)}, "oom", ""),
        pytest.param(
            "benchmarks.model.llama.Llama._reordered",
            lambda self, name, x, rows: x,
            FORWARDS | {"attention": ("llama",)},
            "wrong",
            "times the allowed error",
            marks=needs_llama,
        ),
        ("benchmarks.model.rig.LEARNING_RATE", 1e30, {"mode": ("step",)}, "wrong", "was timed, not in timed call"),
    ],
)
def test_a_row_that_is_wrong_or_too_large_has_no_time(
    part: str, other: Any, values: dict[str, Any], outcome: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`other` stands in the place of a part. With a huge learning rate the loss is soon no longer finite."""
    monkeypatch.setattr(part, other)
    for record in records(**values).values():
        assert record["outcome"] == outcome and reason in record["reason"], record["reason"]
        assert "time_s" not in record


def test_memory_is_predicted_for_attention_that_keeps_no_scores() -> None:
    by_case = records(mode=("step",), attention=("naive", "sdpa_flash"), timed=False)
    assert by_case["step", "eager", "naive"]["predicted_bytes"] is None
    predicted = training_memory(TINY_MODEL, 1, 8, "fp32").peak
    assert by_case["step", "eager", "sdpa_flash"]["predicted_bytes"] == predicted


def test_a_reference_that_does_not_fit_has_half_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, judge = [], Gate.judge

    def fits_two(gate: Gate, candidates: Any) -> None:
        batches.append(len(gate.data.tokens))
        if batches[-1] > 2:
            raise torch.OutOfMemoryError("no room")
        judge(gate, candidates)

    monkeypatch.setattr(Gate, "judge", fits_two)
    by_case = records(batch=(8,), mode=("step",))
    assert batches == [8, 4, 2]
    assert all(record["outcome"] == "ok" and record["batch"] == 8 for record in by_case.values())


def test_warm_up_is_studied_in_new_processes() -> None:
    (record,) = records(mode=("forward",), warmup=(0,)).values()
    assert record["outcome"] == "ok", record["reason"]
    assert record["warmup_steps"] == 0 and record["rounds"] == 10 and record["std_s"] > 0
    assert record["id"] == "s-tiny-S8B1-fp32-W0-forward-eager-auto"


@pytest.mark.parametrize("mode", MODES)
def test_a_step_after_a_cold_start_is_judged(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is wrong from its call 30 on: the check before timing calls it less often, and the cold steps more."""
    calls, right = itertools.count(), vectorized.vectorized

    def tired(*args: Any, **options: Any) -> Tensor:
        return right(*args, **options) * (1 if next(calls) < 30 else 2)

    monkeypatch.setattr(processes, "in_own_process", lambda function, *args: function(*args))
    monkeypatch.setattr(vectorized, "vectorized", tired)
    (record,) = records(mode=(mode,), warmup=(20,), attention=("vectorized",)).values()
    assert record["outcome"] == "wrong" and "in a step after the timed ones" in record["reason"], record["reason"]
