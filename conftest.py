"""pytest's configuration for this repository: pytest loads it for tests and for benchmarks.

This file sets environment variables that Triton and CUDA read when they start, gives the plugin `lmsys.bench.plugin`
this repository's options and sweeps, and deselects tests that a plain run leaves out: those with the marks in HOW. To
add such a mark, declare it in pyproject.toml, and add a line to HOW and a name to ASKED. Helpers and fixtures that only
tests use are in tests/conftest.py.
"""

import gc
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch

# Without a GPU Triton's kernels run in its interpreter. Triton reads the variable when it is imported, so the imports
# below must come after this line.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from benchmarks.axes import NAMED
from lmsys.bench.fields import Sweep, given_axes
from lmsys.bench.options import add_options, texts
from lmsys.deterministic import CUBLAS_WORKSPACE

pytest_plugins = ["lmsys.bench.plugin"]  # an installed lmsys has an entry point for it; a bare checkout has none


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser, axes=NAMED)


def pytest_configure(config: pytest.Config) -> None:
    """With --deterministic, sets cuBLAS's workspace now: the variable is read only once, at the first matmul."""
    axis = [axis for axis in NAMED if axis.name == "deterministic"]
    with suppress(ValueError):  # a wrong value is reported later, when cases are collected
        if any(given_axes(axis, texts(config)).get("deterministic", ())):
            os.environ.setdefault(*CUBLAS_WORKSPACE)


def pytest_unconfigure() -> None:
    """Saves half a second at exit: Python's garbage collector then skips the objects that torch holds."""
    gc.freeze()


def pytest_lmsys_sweeps() -> Mapping[str, Mapping[str, Sweep]]:
    """The sweeps that --sweep can name, {name: {device: sweep}}; on a GPU without bfloat16 they take other dtypes.

    The plugin `lmsys.bench.plugin` calls this hook.
    """
    from benchmarks.sweeps import SWEEPS, without_bfloat16

    if has_bfloat16():
        return SWEEPS
    return {name: {**sweeps, "cuda": without_bfloat16(sweeps["cuda"])} for name, sweeps in SWEEPS.items()}


def pytest_report_header() -> list[str]:
    """A line that says which dtypes sweeps take if the GPU has no bfloat16."""
    if has_bfloat16():
        return []
    instead = "in its place sweeps take float16, and float32 where a benchmark scales no loss"
    return [f"{torch.cuda.get_device_name()} has no bfloat16: {instead}"]


def has_bfloat16() -> bool:
    """True on a CPU, and on GPUs of compute capability 8.0 or later."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


LEFT_OUT = pytest.StashKey[dict[str, int]]()  # key of `config.stash`; value: {mark: how many tests were left out}
HOW = {  # by mark: the end of the line "tests left out, ..." in pytest's summary; {} is their number
    "gpu": "which need a GPU: {} (python -m pytest -m gpu, where there is one)",
    "long": "which compile, or start many processes: {} (python3 -m nox -s long, as CI does)",
    "on_request": "which take minutes: {} (python -m pytest -m on_request)",
    "browser": "which open pages in a browser: {} (python3 -m nox -s browser)",
}

ASKED = "on_request", "long", "browser"  # tests with one of these marks run only if -m names the mark


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests with a mark in ASKED that -m does not name and, without a GPU, tests with the mark `gpu`.

    With -m gpu on a machine without a GPU, tests with the mark `gpu` are not deselected but skipped.
    """
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
    """In a worker process of pytest-xdist, sends the counts to the main process, which prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the main process, takes the counts of a worker of pytest-xdist that ends.

    Any worker will do, since each collects all tests. A worker that died has sent none.
    """
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints how many tests were left out by each mark, and how to run them."""
    for mark, count in config.stash.get(LEFT_OUT, {}).items():
        if count:
            terminalreporter.write_line(f"tests left out, {HOW[mark].format(f'{count:,}')}")


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
