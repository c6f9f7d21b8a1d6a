"""Laws of all benchmarks: what fails outside of rows is recorded, and sweeps on a GPU without bfloat16 take others.

A new place that can fail outside of a row is a line of FAULTS.
"""

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.bench_anatomy import Anatomy
from benchmarks.bench_attention import Attention
from benchmarks.bench_data_parallel import DataParallel
from benchmarks.bench_loss import Loss
from benchmarks.bench_model import Model
from benchmarks.bench_steps import TrainingSteps
from benchmarks.bench_tokenizer import Tokenizers
from benchmarks.bench_training import Training
from benchmarks.sweeps import SWEEPS
from lmsys.bench.benchmark import Benchmark
from lmsys.bench.fields import Grid, filled
from lmsys.bench.ranks import Ranks
from tests.support.harness import cases_of, results
from tests.support.processes import ROOT

BENCHMARKS = (Anatomy, Attention, DataParallel, Loss, Model, TrainingSteps, Training)
INSTEAD = {"bfloat16": "float16", "bf16": "fp16"}
AXES = "dtype", "precision", "comm_dtype"


@pytest.fixture
def conftest() -> ModuleType:
    """The conftest.py of this repository, as a module of its own."""
    spec = importlib.util.spec_from_file_location("conftest_of_the_repository", ROOT / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Makes torch report a GPU of this compute capability; None: no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")


def grids_of(sweep: Any) -> list[tuple[str, Grid]]:
    """(benchmark, its grid with the defaults of axes) of all benchmarks that have dtypes or precisions."""
    return [(cls.name, filled(grid, cls.axes, {})) for cls in BENCHMARKS for grid in sweep.grids.get(cls.name, ())]


@pytest.mark.parametrize("capability", [None, (8, 0), (12, 0)])
def test_cards_with_bfloat16_and_cpus_take_the_sweeps_as_they_are(
    conftest: ModuleType, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None
) -> None:
    on_card(monkeypatch, capability)
    assert conftest.pytest_lmsys_sweeps() is SWEEPS and conftest.pytest_report_header() == []


@pytest.mark.parametrize("name", SWEEPS)
def test_float16_is_in_its_place_on_a_t4(conftest: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    on_card(monkeypatch, (7, 5))
    (line,) = conftest.pytest_report_header()
    assert line.startswith("Tesla T4 has no bfloat16: in its place sweeps take float16")
    sweeps = conftest.pytest_lmsys_sweeps()
    assert sweeps[name]["cpu"] is SWEEPS[name]["cpu"]
    assert sweeps[name]["cuda"].grids.keys() == SWEEPS[name]["cuda"].grids.keys()
    before, after = grids_of(SWEEPS[name]["cuda"]), grids_of(sweeps[name]["cuda"])
    assert len(before) == len(after) >= 7
    for (benchmark, whole), (_, grid) in zip(before, after, strict=True):
        assert {axis: grid[axis] for axis in whole if axis not in AXES} == {
            axis: whole[axis] for axis in whole if axis not in AXES
        }
        # A benchmark that scales no loss cannot take fp16 in place of bf16.
        instead = INSTEAD if benchmark in ("attention", "anatomy", "loss", "model") else INSTEAD | {"bf16": "fp32"}
        for axis in {*AXES} & whole.keys():
            assert grid[axis] == tuple(dict.fromkeys(instead.get(value, value) for value in whole[axis]))


MODELS: dict[str, Any] = {"size": ("tiny",), "context": (16,), "batch": (2,), "precision": ("fp32",)}
MODELS |= {"compile": ("eager",), "attention": ("naive",), "mode": ("forward", "step")}
ATTENTION = {"length": ((33, 33),), "head_dim": (16,), "heads": ((2, 2),), "dtype": ("float32",)}
ATTENTION |= {"direction": ("fwd",), "causal": (True,), "attention": ("naive",)}
LOSS = {"tokens": (40,), "d_model": (16,), "vocab_size": (50,), "precision": ("fp32",), "row": ("chunked", "eager")}
TRAINING = MODELS | {"strategy": ("none", "bucketed"), "world_size": (2,), "train_tokens": 330, "val_tokens": 64}
BENCH = "the bench failed, not the row: "
FAULTS = [  # (benchmark, axes, what fails for want of memory, outcome, reason)
    (Anatomy, MODELS, "bench_anatomy.memory_of", "oom", "no room"),
    (Attention, ATTENTION, "bench_attention.testing.make_inputs", "oom", f"{BENCH}no room"),
    (Attention, ATTENTION, "attention.check.Oracle", "error", f"{BENCH}no room"),
    (Loss, LOSS, "loss.Inputs.in_blocks", "error", f"{BENCH}no room"),
    (Model, MODELS, "bench_model.Rig", "oom", "no room"),
    (Model, MODELS, "model.cases.Gate.judge", "error", f"{BENCH}no room"),
    (Tokenizers, {"task": ("encode",), "tokenizer": ("lmsys",)}, "bench_tokenizer.stdlib", "oom", f"{BENCH}no room"),
    (Training, TRAINING, "bench_training.tokens_of", "oom", f"{BENCH}the reference: no room"),
]


@pytest.mark.parametrize(("kind", "axes", "what", "outcome", "reason"), FAULTS)
def test_what_fails_outside_of_rows_is_in_the_record_of_every_case(
    kind: type[Benchmark], axes: dict[str, Any], what: str, outcome: str, reason: str, monkeypatch: Any
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(f"benchmarks.{what}", fails)
    obtained = results(kind(), cases_of(kind(), **axes), ranks=Ranks())
    assert obtained
    for record in obtained:
        assert (record["outcome"], record["reason"]) == (outcome, reason) and "time_s" not in record
