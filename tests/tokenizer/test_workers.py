"""Worker processes: answers in order, errors passed on, deaths reported."""

import os

import pytest

from lmsys.tokenizer.workers import Workers


def _double(task: int) -> int:
    if task == 13:
        raise ValueError("13 is refused")
    if task == 99:
        os._exit(7)
    print("a task may print")
    return 2 * task


@pytest.mark.parametrize("count", [1, 3])
def test_workers_answer_in_order_and_pass_errors_on(count: int) -> None:
    with Workers(count, _double) as workers:
        assert list(workers.map(range(12))) == [2 * task for task in range(12)]
        with pytest.raises(ValueError, match="13 is refused"):
            list(workers.map(range(20)))
        assert list(workers.map([1])) == [2]


def test_a_worker_that_dies_is_reported() -> None:
    with Workers(2, _double) as workers, pytest.raises(RuntimeError, match="died with exit code 7"):
        list(workers.map([1, 99, 2]))
