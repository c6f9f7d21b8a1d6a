r"""Random calls of `attention()`: shapes, dtypes, memory, options and contexts, by every row that can and by auto.

LMSYS_RANDOM cases, by default 300 on a GPU and ten on a CPU, from the seed LMSYS_RANDOM_SEED, by default 0, and from
the number LMSYS_RANDOM_FIRST on, by default 0. One is run again by its number: `LMSYS_RANDOM_ONLY=17`. This command
runs 2,000 on one GPU, in as many processes as there are cores, but 12 at most, in parts, since kernels compile for
minutes. After each part it prints how many calls each row had, by context:

    for first in 0 250 500 750 1000 1250 1500 1750; do LMSYS_RANDOM=250 LMSYS_RANDOM_FIRST=$first LMSYS_RANDOM_SEED=1 \
        python -m pytest -q -s -m gpu tests/attention/test_random_cases.py; done
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from lmsys import processes
from tests.support.random_cases import Judged, judge_all, tasks

ONLY = os.environ.get("LMSYS_RANDOM_ONLY")
FIRST = int(os.environ.get("LMSYS_RANDOM_FIRST", "0"))
COUNT = {device: int(os.environ.get("LMSYS_RANDOM", few)) for device, few in (("cpu", 10), ("cuda", 300))}
PROCESSES = min(12, os.cpu_count() or 1)
ALONE = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # of each, or they would be in each other's way
EVERY_S = 10.0  # a line of how far it is
LATE_S = 200.0  # for the cases of a process that are done together: their first calls compile


def numbers(device: str) -> list[int]:
    return list(range(FIRST, FIRST + COUNT[device])) if ONLY is None else [int(ONLY)]


def judged(device: str, given: list[list[int]]) -> Iterator[Judged]:
    """On a GPU in processes: what ends one, such as a CUDA error, is a fault of its cases alone."""
    if device == "cpu":
        yield from (judge_all(device, task) for task in given)
        return
    function = partial(judge_all, device)
    running: Iterator[Future[Any]] = processes.futures(function, given, PROCESSES, timeout_s=LATE_S, environment=ALONE)
    for task, future in zip(given, running, strict=True):
        try:
            yield future.result()
        except Exception as error:
            yield Judged([f"cases {task}: {type(error).__name__}: {str(error)[:300]}"])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_calls_are_right_by_every_row(device: str) -> None:
    given, found = tasks(numbers(device), device), Judged()
    shown_at = time.monotonic()
    for done, one in enumerate(judged(device, given), 1):
        found.faults += one.faults
        found.asked += one.asked
        if time.monotonic() > shown_at + EVERY_S:
            shown_at = time.monotonic()
            print(f"{done} of {len(given)} tasks, {found.asked.total()} calls, {len(found.faults)} faults", flush=True)
    print(f"\n{found.table()}")
    assert not found.faults, f"{len(found.faults)} of {found.asked.total()} calls:\n" + "\n".join(found.faults[:40])
    assert found.asked.total() >= 3 * len(numbers(device))
