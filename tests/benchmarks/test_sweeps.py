"""Sweeps on a GPU without bfloat16: other dtypes and precisions, the same cases, and a line that says so."""

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
from benchmarks.bench_training import Training
from benchmarks.sweeps import SWEEPS
from lmsys.bench.fields import Grid, filled
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
