r"""Random calls of `attention()`: shapes, dtypes, memory, options and contexts, by every row that can and by auto.

tests/support/random_cases.py draws a case by its number, and judges it. A row is an implementation, and a context is
how a call is run, such as under autocast.

Environment variables choose the cases. LMSYS_RANDOM is their number: by default 300 on a GPU and ten on a CPU.
LMSYS_RANDOM_SEED is the seed, LMSYS_RANDOM_FIRST the number of the first case: both 0 by default. LMSYS_RANDOM_ONLY=17
runs case 17 alone. The command below runs 2,000 on one GPU, in as many processes as there are cores, but 12 at most. It
does so in parts, since kernels compile for minutes. After each part it prints how many calls each row had, by context:

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
ALONE = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # environment of each process: one thread
EVERY_S = 10.0  # between lines that print the progress
LATE_S = 200.0  # time limit of a task of several cases, whose first calls compile


def numbers(device: str) -> list[int]:
    """The numbers of the cases to run."""
    return list(range(FIRST, FIRST + COUNT[device])) if ONLY is None else [int(ONLY)]


def results_of(device: str, lists: list[list[int]]) -> Iterator[Judged]:
    """Yields the result of each task, which is a list of case numbers. On a GPU each task runs in a process of its own.

    An error that ends a process, such as one of CUDA, is then a fault of its task alone.
    """
    if device == "cpu":
        yield from (judge_all(device, task) for task in lists)
        return
    function = partial(judge_all, device)
    running: Iterator[Future[Any]] = processes.futures(function, lists, PROCESSES, timeout_s=LATE_S, environment=ALONE)
    for task, future in zip(lists, running, strict=True):
        try:
            yield future.result()
        except Exception as error:
            yield Judged([f"cases {task}: {type(error).__name__}: {str(error)[:300]}"])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_calls_are_right_by_every_row(device: str) -> None:
    lists, total = tasks(numbers(device), device), Judged()
    shown_at = time.monotonic()
    for done, result in enumerate(results_of(device, lists), 1):
        total.faults += result.faults
        total.asked += result.asked
        if time.monotonic() > shown_at + EVERY_S:
            shown_at = time.monotonic()
            print(f"{done} of {len(lists)} tasks, {total.asked.total()} calls, {len(total.faults)} faults", flush=True)
    print(f"\n{total.table()}")
    assert not total.faults, f"{len(total.faults)} of {total.asked.total()} calls:\n" + "\n".join(total.faults[:40])
    assert total.asked.total() >= 3 * len(numbers(device))
