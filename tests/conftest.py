"""hypothesis profiles, and memory that no test may mistake for a result."""

import gc
import importlib.util
import os
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Each process that compiles for a CPU would try for a second whether AVX code can be compiled and loaded, the first on
# a machine for seven. It can. Also for the processes that tests start.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Workers of xdist and what tests start share the cores: more threads would wait for one another, with tiny tensors for
# ten times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from lmsys.bench.ranks import Ranks
from lmsys.check.question import poison
from lmsys.parallel.group import WorkerGroup
from tests.support.processes import STARTUP, smoke_sweep

torch.set_num_threads(1)  # here, where torch is imported already
os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])])

# "ci" draws the same few examples every time; --hypothesis-profile explore draws others, and more.
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")


# Rooms and files whose tests start processes or compile, those that take longest first: last, one worker would be left
# alone with one of them. "tests": what stands in none of the rooms.
SLOW_FILES = "test_training test_check test_graphs test_plugin test_passes test_isolation".split()
SLOW_ROOMS = "bench benchmarks attention training parallel check model course tests reports dev fuzz kernels".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, and before them one of those that read the smoke sweep, which it makes: nobody waits for it."""
    readers = list(dict.fromkeys(item.path for item in items if "smoke_result" in getattr(item, "fixturenames", ())))

    def place(item: pytest.Item) -> tuple[bool, bool, int, bool]:
        room = item.path.parent.name
        among = SLOW_ROOMS.index(room) if room in SLOW_ROOMS else len(SLOW_ROOMS)
        return item.path not in readers[:1], item.path.stem not in SLOW_FILES, among, item.path in readers

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage is not looked for meanwhile, nor later in what is there by then: benchmarks look for it often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised floating-point memory is NaN, so an output that a kernel does not write cannot pass."""

    poison(monkeypatch.setattr)


@pytest.fixture(scope="session")
def smoke_result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result file of the smoke sweep, run once for all tests; what it printed is beside it, in smoke.txt."""
    own = tmp_path_factory.getbasetemp()
    return smoke_sweep(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[str, WorkerGroup]]:
    """Processes that stand ready, by their backend."""
    found: dict[str, WorkerGroup] = {}
    yield found
    for group in found.values():
        group.close()


def _ready(groups: dict[str, WorkerGroup], world_size: int, backend: str) -> WorkerGroup:
    """Others where a test before has ended them."""
    if backend not in groups or groups[backend].ended:
        groups[backend] = WorkerGroup(world_size, backend, timeout_s=60)
    return groups[backend]


@pytest.fixture(scope="module")  # hypothesis takes none that is made for each example
def ranks(groups: dict[str, WorkerGroup]) -> WorkerGroup:
    """Four processes that stand ready, on the CPU."""
    return _ready(groups, 4, "gloo")


@pytest.fixture(scope="module")
def ready_ranks(groups: dict[str, WorkerGroup]) -> Callable[[], WorkerGroup]:
    """Gives the same, others after a call that has ended them."""
    return partial(_ready, groups, 4, "gloo")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two ranks of a benchmark, on the CPU: others where a test before has ended them."""
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(scope="module")
def ready_gpus(groups: dict[str, WorkerGroup]) -> Callable[[], WorkerGroup]:
    """Gives two processes with a GPU each that stand ready, others after a call that has ended them."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL needs a GPU for each of two ranks, and here are {torch.cuda.device_count()}")
    return partial(_ready, groups, 2, "nccl")


@pytest.fixture
def gpu_ranks(ready_gpus: Callable[[], WorkerGroup]) -> WorkerGroup:
    return ready_gpus()


@pytest.fixture(autouse=True)
def any_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton rows take a tile by the hash of their case, not by its speed: every candidate must be right."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.errors import OutOfResources

    from tests.support.triton_interpreter import trust_indices

    trust_indices()

    def choose(case: tuple[object, ...], tiles: tuple[Any, ...], launch: Callable[[Any], None], _: object) -> Any:
        first = zlib.crc32(repr(case).encode()) % len(tiles)
        for tile in tiles[first:] + tiles[:first]:
            try:
                launch(tile)
            except OutOfResources:
                continue
            return tile
        raise AssertionError(f"no tile of {tiles} fits this GPU")

    monkeypatch.setattr("lmsys.attention.flash_triton.tune", choose)
