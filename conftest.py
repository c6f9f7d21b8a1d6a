"""Settles what must stand before a kernel is imported, and tells the harness's plugin about this repository."""

import gc
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
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


LEFT_OUT = pytest.StashKey[dict[str, int]]()  # how many tests by their mark
HOW = {
    "gpu": "which need a GPU: {} (python -m pytest -m gpu, where there is one)",
    "long": "which compile, or start many processes: {} (python3 -m nox -s long, as CI does)",
    "on_request": "which take minutes: {} (python -m pytest -m on_request)",
    "browser": "which open pages in a browser: {} (python3 -m nox -s browser)",
}

ASKED = "on_request", "long", "browser"  # the marks of what runs only with -m


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what a plain run does not run. Where -m names the mark, what needs a GPU is skipped."""
    has_gpu, asked = torch.cuda.is_available(), config.option.markexpr or ""
    left_out: dict[str, list[pytest.Item]] = {mark: [] for mark in HOW}
    for item in items:
        needs_gpu = item.get_closest_marker("gpu") and not has_gpu
        marks = ["gpu"] if needs_gpu else [mark for mark in ASKED if item.get_closest_marker(mark)]
        if marks and marks[0] not in asked:
            left_out[marks[0]].append(item)
        elif needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
    without = {id(item) for several in left_out.values() for item in several}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in without])
    items[:] = [item for item in items if id(item) not in without]
    config.stash[LEFT_OUT] = {mark: len(several) for mark, several in left_out.items()}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells the process that prints the summary, which collects nothing."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker has collected all; one that died says nothing."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for mark, count in config.stash.get(LEFT_OUT, {}).items():
        if count:
            terminalreporter.write_line(f"tests left out, {HOW[mark].format(f'{count:,}')}")


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
