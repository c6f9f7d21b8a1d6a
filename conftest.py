"""Settles what must stand before a kernel is imported, and tells the harness's plugin about this repository."""

import gc
import os
from collections.abc import Mapping
from contextlib import suppress

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores: more threads would wait for one another

import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # triton reads it on import: without a GPU its kernels are interpreted

from benchmarks.axes import NAMED
from lmsys.bench.fields import Sweep, add_axis_options, given_axes
from lmsys.bench.options import add_options, texts
from lmsys.deterministic import CUBLAS_WORKSPACE

pytest_plugins = ["lmsys.bench.plugin"]  # also where the package is not installed


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    add_axis_options(parser, NAMED)


def pytest_configure(config: pytest.Config) -> None:
    """Sets what processes need before their first matmul, which is long before their first deterministic case."""
    axis = [one for one in NAMED if one.name == "deterministic"]
    with suppress(ValueError):  # cases are collected from the same texts, which tells it
        if any(given_axes(axis, texts(config)).get("deterministic", ())):
            os.environ.setdefault(*CUBLAS_WORKSPACE)


def pytest_unconfigure() -> None:
    """An interpreter that ends looks for garbage, in what torch holds for half a second."""
    gc.freeze()


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
