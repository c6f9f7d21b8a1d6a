"""A function on many tasks, in Python interpreters of their own.

They are started, not forked: a process with threads (torch has some) cannot be forked safely, and multiprocessing's
other ways run the caller's main module again, with all that it imports.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_COMMAND = "from lmsys.tokenizer.workers import serve; serve()"
_AHEAD = 2  # tasks given out for each worker: one that it does, one that waits


class Workers(Generic[Task, Result]):
    """`with Workers(4, function) as workers: for result in workers.map(tasks): ...`, in the order of the tasks.

    `function` goes to each worker once, tasks and results one by one, so all three must pickle; one worker is this
    process itself. An exception in a task is raised here; RuntimeError when a worker dies.
    """

    def __init__(self, count: int, function: Callable[[Task], Result]):
        assert count >= 1
        self._function = function
        self._all = [_start() for _ in range(count if count > 1 else 0)]
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for worker in self._all:
            _send(worker, function)
            self._idle.put(worker)

    def map(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """Each task's result; no more tasks are taken than are soon done, so that `tasks` may be endless."""
        if not self._all:
            yield from map(self._function, tasks)
            return
        pending: deque[Future[Result]] = deque()
        pool = ThreadPoolExecutor(len(self._all))
        try:
            for task in tasks:
                pending.append(pool.submit(self._run, task))
                if len(pending) >= _AHEAD * len(self._all):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(self, task: Task) -> Result:
        worker = self._idle.get()
        try:
            _send(worker, task)
            failed, result = pickle.load(worker.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise RuntimeError(f"a worker process died with exit code {worker.wait()}") from error
        finally:
            self._idle.put(worker)
        if failed:
            raise result
        return result  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for worker in self._all:
            if kind is not None:
                worker.kill()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # it died with something unsent
                    pipe.close()
        for worker in self._all:
            worker.wait()


def _start() -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", _COMMAND], stdin=pipe, stdout=pipe, env=environment)


def _send(worker: "subprocess.Popen[bytes]", value: Any) -> None:
    assert worker.stdin is not None
    pickle.dump(value, worker.stdin, protocol=5)
    worker.stdin.flush()


def serve() -> None:
    """A worker's life: the function, then task after task, until the pipe is closed."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the caller ends its workers
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a task's output is no result
    function = pickle.load(sys.stdin.buffer)
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = (False, function(task))
        except Exception as error:
            reply = (True, error)
        pickle.dump(reply, out, protocol=5)
        out.flush()
