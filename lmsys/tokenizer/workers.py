"""A function on many tasks, here or in several processes."""

from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from lmsys.processes import futures
from lmsys.tokenizer.chunks import Chunk, chunks, plan, whole
from lmsys.tokenizer.pretokens import Pretokenizer

Task = TypeVar("Task")
Result = TypeVar("Result")


def each(function: Callable[[Task], Result], tasks: Iterable[Task], processes: int) -> Generator[Result, None, None]:
    """function(task) of each task, in order. One process is this one."""
    if processes == 1:
        yield from map(function, tasks)
        return
    for future in futures(function, tasks, processes, environment={"OPENBLAS_NUM_THREADS": "1"}):
        yield future.result()


def each_chunk(
    function: Callable[[Chunk], Result],
    files: Sequence[str | Path | Chunk],
    special_tokens: Sequence[str],
    processes: int,
) -> Generator[Result, None, None]:
    """function(chunk) of the files' text in pieces, in order."""
    parts = [whole(file) for file in files]
    size, processes = plan(parts, processes)
    yield from each(function, chunks(parts, Pretokenizer(special_tokens), size), processes)
