"""Settles what must stand before a kernel is imported, and tells the harness's plugin about this repository."""

import os
from collections.abc import Mapping

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores: more threads would wait for one another

import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # triton reads it on import: without a GPU its kernels are interpreted

from benchmarks.axes import NAMED
from lmsys.bench.axes import OPTION, Sweep, add_axis_options
from lmsys.training.reproducible import DETERMINISTIC_CUBLAS

pytest_plugins = ["lmsys.bench.plugin"]  # also where the package is not installed


def pytest_addoption(parser: pytest.Parser) -> None:
    add_axis_options(parser, NAMED)


def pytest_configure(config: pytest.Config) -> None:
    """What torch reads once in a process, in those that this one starts: they multiply before their first case."""
    asked = [config.getoption(OPTION + "--deterministic") or "", *config.getoption("--axis")]
    if any("yes" in text for text in asked if "=" not in text or text.startswith("deterministic=")):
        os.environ.setdefault(*DETERMINISTIC_CUBLAS)


def pytest_lmsys_sweeps() -> Mapping[str, Mapping[str, Sweep]]:
    from benchmarks.sweeps import SWEEPS

    return SWEEPS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "on_request" not in (config.option.markexpr or ""):
        on_request = pytest.mark.skip(reason="takes minutes: python -m pytest -m on_request runs it")
        for item in items:
            if item.get_closest_marker("on_request"):
                item.add_marker(on_request)
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
