"""Settings of threads and hypothesis, the order of the test files, and fixtures that all tests share.

Two fixtures apply to every test: `poisoned_empty` fills uninitialised memory with NaN, and `any_tile` lets Triton rows
choose a tile without timing it. `foreign_processes` ends processes. The others start processes that several tests
share: groups of ranks, and one smoke sweep of the benchmark.
"""

import gc
import importlib.util
import os
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Each process in which torch.compile compiles for a CPU would first spend a second, and the first process on a machine
# seven seconds, on testing whether AVX code can be compiled and loaded. This variable says that it can; the processes
# that tests start inherit it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# The workers of xdist and the processes that tests start share the cores. With more threads each, they would wait for
# one another: with tiny tensors, ten times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from lmsys.bench.ranks import Ranks
from lmsys.check.question import poison
from lmsys.parallel.group import WorkerGroup
from tests.support.processes import STARTUP, smoke_sweep

torch.set_num_threads(1)  # in this process, in case that torch was imported before OMP_NUM_THREADS was set
# The stand-in for torch's compiler that STARTUP has would hide faults which only a user's process shows. Trainings that
# tests start as a command (`start` of tests/support/training_runs.py) do without it, also on two ranks.
os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])])

# "ci" draws the same few examples every time; --hypothesis-profile explore draws others, and more.
# Neither has a limit of time: a busy machine would fail a test by it.
ANY_TIME: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", **ANY_TIME, print_blob=True, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("explore", **ANY_TIME, print_blob=True)
hypothesis.settings.load_profile("ci")


# Files, and rooms (folders of tests/), whose tests start processes or compile; the slowest come first. They are run
# before all others: if a slow file came last, one worker would still run it when the other workers have nothing left.
# The room "tests" stands for the files directly in tests/.
SLOW_FILES = "test_training test_check test_graphs test_plugin test_passes test_isolation test_notebook".split()
SLOW_ROOMS = "bench benchmarks attention training parallel check model course tests reports dev fuzz kernels".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: one file that needs the smoke sweep, then the slow files, then the slow rooms, then the others.

    The first file runs the sweep, which takes long; the other files that read its result come last in their room, so
    that they need not wait for it.
    """
    readers = list(dict.fromkeys(item.path for item in items if "smoke_result" in getattr(item, "fixturenames", ())))

    def place(item: pytest.Item) -> tuple[bool, bool, int, bool]:
        """The key by which a test is sorted: False comes before True."""
        room = item.path.parent.name
        among = SLOW_ROOMS.index(room) if room in SLOW_ROOMS else len(SLOW_ROOMS)
        return item.path not in readers[:1], item.path.stem not in SLOW_FILES, among, item.path in readers

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collection, and exempt the objects that then exist from all later collections.

    Benchmarks call `gc.collect` often, and would otherwise go through all collected tests each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised floating-point memory is NaN, so that an output which a kernel does not write fails its test."""

    poison(monkeypatch.setattr)


@pytest.fixture
def foreign_processes() -> Iterator[None]:
    """Ends the processes of foreign rows after a test, but not that of `null`, which all rows share."""
    yield
    from lmsys.bench import foreign

    for (target, _), process in foreign._processes.items():
        if not target.endswith("foreign:null"):
            process.close()


@pytest.fixture(scope="session")
def smoke_result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result file of the smoke sweep, run once for all tests; what it printed is beside it, in smoke.txt."""
    folder = tmp_path_factory.getbasetemp()
    return smoke_sweep(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


Groups = dict[tuple[int, str], WorkerGroup]  # by world size and backend ("gloo", "nccl")


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    """The groups of processes that tests share: `_ready` adds, and this closes them."""
    groups: Groups = {}
    yield groups
    for group in groups.values():
        group.close()


def _ready(groups: Groups, world_size: int, backend: str) -> WorkerGroup:
    """The group of this size and backend, started where there is none yet or where an earlier test has ended it."""
    key = world_size, backend
    if key not in groups or groups[key].ended:
        groups[key] = WorkerGroup(world_size, backend, timeout_s=60)
    return groups[key]


@pytest.fixture(scope="module")  # hypothesis refuses fixtures of function scope, which it would not renew per example
def ranks(groups: Groups) -> WorkerGroup:
    """A running group of four processes on the CPU."""
    return _ready(groups, 4, "gloo")


@pytest.fixture(scope="module")
def ready_ranks(groups: Groups) -> Callable[[], WorkerGroup]:
    """A function that returns a group of two processes on the CPU, a new one if a call has ended it meanwhile."""
    return partial(_ready, groups, 2, "gloo")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two ranks of a benchmark on the CPU; `Ranks` starts new ones where an earlier test has ended them."""
    ranks_of_benchmark = Ranks()
    yield ranks_of_benchmark
    ranks_of_benchmark.close()


@pytest.fixture(scope="module")
def ready_gpus(groups: Groups) -> Callable[[], WorkerGroup]:
    """A function that returns a running group of two processes with a GPU each, a new one if a call has ended it."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL needs a GPU for each of two ranks, and here are {torch.cuda.device_count()}")
    return partial(_ready, groups, 2, "nccl")


@pytest.fixture
def gpu_ranks(ready_gpus: Callable[[], WorkerGroup]) -> WorkerGroup:
    return ready_gpus()


@pytest.fixture(autouse=True)
def any_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton rows choose a tile by the hash of their case, not by timing.

    So each candidate is chosen in some case, and is tested there; and no test spends time on tuning.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.errors import OutOfResources

    from tests.support.triton_interpreter import trust_indices

    trust_indices()  # makes the interpreter faster

    def choose(case: tuple[object, ...], tiles: tuple[Any, ...], launch: Callable[[Any], None], _: object) -> Any:
        """In place of `tune`: the tile that the hash names, or the next one that fits."""
        first = zlib.crc32(repr(case).encode()) % len(tiles)
        for tile in tiles[first:] + tiles[:first]:
            try:
                launch(tile)
            except OutOfResources:
                continue
            return tile
        raise AssertionError(f"no tile of {tiles} fits this GPU")

    monkeypatch.setattr("lmsys.attention.flash_triton.tune", choose)
