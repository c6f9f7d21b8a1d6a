"""A function on many tasks, here or in several processes."""

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from lmsys.processes import futures

Task = TypeVar("Task")
Result = TypeVar("Result")


def each(function: Callable[[Task], Result], tasks: Iterable[Task], processes: int) -> Generator[Result, None, None]:
    """function(task) of each task, in order. One process is this one."""
    if processes == 1:
        yield from map(function, tasks)
        return
    for future in futures(function, tasks, processes, environment={"OPENBLAS_NUM_THREADS": "1"}):
        yield future.result()
