"""Runs functions in other Python processes, *workers*, which end when this process ends. Imports no torch.

    with Worker() as worker:
        result = worker.call(function, argument, timeout_s=10.0)

The bench, `lmsys.parallel.group`, the tokenizer, `lmsys check` and `lmsys course` use this module. A worker is a new
interpreter, which imports what its calls need. It is not forked, since a process with threads, such as torch's, cannot
be forked safely. It does not run the caller's main module again either, as processes of multiprocessing do.

A function is sent by its module and name, as pickle does, or as a text for `lmsys.registry.load_target`, such as
"path.py:function". Arguments and results are pickled; with `tell` a call sends objects before its result. A worker
prints where this process prints. A worker and all that it starts are in one process group. The group is killed when
the worker is closed, or when this process has ended, whatever the worker is doing then. `_answer` and `tell` send
messages from a worker, and `Worker.receive` reads them: change these together.
"""

import contextlib
import gc
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Function = Callable[..., Any] | str
DIED, TIMEOUT = "died", "timeout"  # how a call may fail without an exception
NO_CPU_MEMORY = "DefaultCPUAllocator: can't allocate"  # words of torch's message when the CPU's memory is exhausted
GRACE_S = 5.0  # how long a process may take to end by itself
# A shell command that waits until its input is closed, then kills its process group. The braces stand for `last_words`
# of `Worker`.
WATCH = "read _; {} kill -9 0"
OUTPUTS = {1: "stdout", 2: "stderr"}  # {file number: name in sys}
_callers_main: dict[str, str] = {}  # in a worker: the caller's main module, as multiprocessing names it
_lines: list[Connection] = []  # in a worker: the one connection to its caller


class ProcessError(RuntimeError):
    """Raised for a call that failed in another process, if the original exception cannot be raised here.

    kind  the exception's name, "died" for a process that has ended, "timeout" for one that was killed for being late
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind

    @property
    def failure(self) -> tuple[str, str]:
        """(outcome, reason in a line), as the bench records them."""
        return "error", str(self).splitlines()[0]


@dataclass(frozen=True)
class Failure:
    """How a call failed.

    kind       as in `ProcessError`
    text       the traceback, or how the process ended
    at_s       when, by time.monotonic(), which all processes of a machine share
    exception  the exception, pickled; empty where it cannot be
    """

    kind: str
    text: str
    at_s: float = 0.0
    exception: bytes = b""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The Failure that describes an error. To be called inside of the `except` block: it takes the traceback."""
        exception = b""
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                exception = pickle.dumps(error)
        return cls(type(error).__name__, traceback.format_exc(), time.monotonic(), exception)

    def error(self) -> Exception:
        """The exception to raise: the original one, with a ProcessError that has its traceback as the cause.

        If the original exception cannot be unpickled here, it is the ProcessError alone.
        """
        if self.kind == DIED:
            return ProcessError(DIED, f"a worker process {self.text}")
        remote = ProcessError(self.kind, f"{self.text.splitlines()[-1]} (in a worker process)\n{self.text}")
        try:
            error: Exception = pickle.loads(self.exception)
        except Exception:
            return remote
        error.__cause__ = remote
        return error


@dataclass(frozen=True)
class Told:
    """An object that a call has sent by `tell`."""

    what: Any


def tell(what: Any) -> None:
    """Sends an object from within a worker's call to the caller, who receives it as `Told` before the result.

    For calls that `Worker.send` has begun: `Worker.call` takes the first thing that comes as the result.
    """
    _lines[0].send_bytes(pickle.dumps((None, Told(what)), protocol=5))


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A process that runs one call after another; its modules keep their state from call to call.

    If the process has died, the next `call` starts another one.

    environment  variables besides those of this process
    open_files   descriptors of open files that it inherits, under the same numbers
    last_words   a shell command that runs when this process has ended, before the worker is killed. The command
                 inherits `open_files`, too; its text must end with a semicolon
    path         its `sys.path`; None: that of this process
    folder       its working directory; None: that of this process
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        open_files: Sequence[int] = (),
        last_words: str = "",
        path: Sequence[str] | None = None,
        folder: Path | None = None,
    ):
        self._environment = os.environ | (environment or {})
        self._open_files, self._last_words = open_files, last_words
        self._path, self._folder = path, folder
        self._start()

    def call(self, function: Function, *args: Any, timeout_s: float | None = None) -> Any:
        """Calls function(*args) in the worker and returns its result, or raises what it raises.

        ProcessError where the process has died, was killed after `timeout_s`, or its exception cannot be pickled.
        """
        request = pickle.dumps((function, args), protocol=5)
        if answered([self], 0.0):  # readable, though no call is open: the other end was closed, so it is dead
            self.close(0.0)
            self._start()
        try:
            self._write(request)
            if timeout_s is not None and not answered([self], timeout_s):
                raise ProcessError(TIMEOUT, f"a worker process did not answer within {timeout_s:g} s and was killed")
            failure, result = self.receive()
        except BaseException:  # a timeout or an interrupt: nobody would read the answer of this call
            self.kill()
            raise
        if failure is not None:
            raise failure.error()
        return result

    def send(self, function: Function, *args: Any) -> None:
        """Begins a call and does not wait; `answered` waits, and `receive` must come before the next call."""
        self._write(pickle.dumps((function, args), protocol=5))

    def receive(self) -> tuple[Failure | None, Any]:
        """Waits for the worker: (how the call failed or None, its result or what it has `Told`)."""
        if not (answer := read(self._line)):
            return Failure(DIED, self.ending()), None
        try:
            return pickle.loads(answer)
        except Exception as error:
            return Failure.of(error), None

    def end(self) -> None:
        """Tells the process to end when its calls are done."""
        self._write(b"")

    def kill(self) -> None:
        """Kills the process and what it has started."""
        if self.watcher.poll() is None:  # while the watcher lives, the group's number cannot be another group's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
                self._process.kill()  # it may have left the group
            self.watcher.communicate()  # it was killed, too: waits for it, and closes its input
        self._process.wait()

    def close(self, grace_s: float = GRACE_S) -> None:
        """Ends the process; after `grace_s` seconds it is killed."""
        if grace_s > 0:
            self.end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self.kill()
        self._line.close()

    @property
    def pid(self) -> int:
        """The process id, which is the number of the process group as well."""
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor of the connection, by which `answered` waits for it."""
        return self._line.fileno()

    def signal(self, number: int) -> None:
        """Sends a signal to the process alone, unless it has ended."""
        self._process.send_signal(number)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(GRACE_S if kind is None else 0.0)

    def _start(self) -> None:
        """Starts the process, and a shell that ends it if this process ends first."""
        ours, theirs = socket.socketpair()
        self._line = Connection(ours.detach())
        path = [str(folder) for folder in (sys.path if self._path is None else self._path)]
        begin = f"import sys; sys.path[:] = {path}; from {__name__} import _serve"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{begin}; _serve({theirs.fileno()}, {_main_module()})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *self._open_files],
                process_group=0,
                env=self._environment,
                cwd=self._folder,
            )
        # The shell is in the worker's process group. It learns that this process ends from its closed standard input.
        self.watcher = subprocess.Popen(
            ["sh", "-c", WATCH.format(self._last_words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=None if self._last_words else subprocess.DEVNULL,
            pass_fds=self._open_files if self._last_words else (),
            process_group=self._process.pid,
        )

    def _write(self, message: bytes) -> None:
        """Sends a message to the process."""
        with contextlib.suppress(OSError):  # the process has ended, which the next `receive` reports
            self._line.send_bytes(message)

    def ending(self) -> str:
        """How the process ended, in words, after its connection was closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.kill()  # a process may close its connection and live on
        code = self._process.wait()
        return f"died: killed by {signal.Signals(-code).name}" if code < 0 else f"died with exit code {code}"


def in_own_process(function: Function, *args: Any, timeout_s: float | None = None) -> Any:
    """`Worker.call` in a new process, which ends after the call."""
    with Worker() as worker:
        return worker.call(function, *args, timeout_s=timeout_s)


def answered(workers: Iterable[Worker], timeout_s: float) -> list[Worker]:
    """Waits until a worker has sent something; returns the workers that have, or none after `timeout_s`."""
    return wait(list(workers), timeout_s)  # type: ignore[return-value, arg-type]


def futures(
    function: Callable[[Any], Any],
    tasks: Iterable[Any],
    count: int,
    *,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Future[Any]]:
    """Runs function(task) for each task in `count` processes; yields a future of each, in the order of the tasks.

    tasks        may be endless: at most 2 * count tasks are taken before the oldest future is yielded
    timeout_s    seconds for each task; a process that takes longer is killed
    environment  as in `Worker`
    """
    pickled, pending = pickle.dumps(function, protocol=5), deque[Any]()
    workers = [Worker(environment) for _ in range(count)]
    idle = deque(workers)  # safe among threads; it is never empty in `run`, as there are no more threads than workers

    def run(task: Any) -> Any:
        """The result of a task, from an idle worker."""
        worker = idle.popleft()
        try:
            return worker.call(_apply, pickled, task, timeout_s=timeout_s)
        finally:
            idle.append(worker)

    threads = ThreadPoolExecutor(count)
    try:
        for task in tasks:
            pending.append(threads.submit(run, task))
            if len(pending) >= 2 * count:  # for each worker one task that it runs and one that waits
                yield pending.popleft()
        yield from pending
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        threads.shutdown()
        for worker in workers:
            worker.close(0.0)


def _apply(function: bytes, task: Any) -> Any:
    """In a worker: the pickled function's result for a task."""
    return _loaded(function)(task)


@lru_cache(1)
def _loaded(pickled: bytes) -> Any:
    """The object of these bytes, kept for the next task: a function may hold much, such as a vocabulary."""
    return _Unpickler(io.BytesIO(pickled)).load()


class _Unpickler(pickle.Unpickler):
    """Unpickles in a worker; runs the caller's main module only when an object of it is asked for."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and _callers_main:
            spawn.prepare(_callers_main)
            _callers_main.clear()  # it has been run
        return super().find_class(module, name)


def _main_module() -> dict[str, str]:
    """This process's main module, as multiprocessing's `prepare` takes it."""
    facts = spawn.get_preparation_data("worker")
    return {name: fact for name, fact in facts.items() if name.startswith("init_main_from_")}


def read(line: Connection) -> bytes:
    """The next message; b"" when the other end has sent an empty one or is gone."""
    try:
        return line.recv_bytes()
    except (EOFError, OSError):
        return b""


class Outputs:
    """Remembers stdout and stderr, as file descriptors 1 and 2 and as `sys.stdout` and `sys.stderr`, to put them back.

    Workers, the bench and `lmsys check` run code of users, which may close or replace them. What is printed afterwards
    must still be seen, so they call `mend` after it. The owner calls `close` at the end, which closes the copies of the
    descriptors.
    """

    def __init__(self) -> None:
        self._streams = {number: stream for number, name in OUTPUTS.items() if (stream := getattr(sys, name))}
        self._files = {number: (os.dup(number), file) for number in OUTPUTS if (file := _file(number))}

    def mend(self) -> list[str]:
        """Puts back what has been closed or replaced, and returns the names of these files and streams, for messages.

        A closed stream is opened anew.
        """
        changed = []
        for number, (copy, file) in self._files.items():
            if _file(number) != file:
                os.dup2(copy, number)
                changed.append(f"file {number}, which is {OUTPUTS[number]}")
        for number, stream in self._streams.items():
            try:
                stream.writable()
            except ValueError:  # it is closed, or detached from its buffer
                self._streams[number] = open(  # noqa: SIM115
                    number, "w", encoding=getattr(stream, "encoding", None), closefd=False
                )
            if getattr(sys, OUTPUTS[number]) is not self._streams[number]:
                setattr(sys, OUTPUTS[number], self._streams[number])
                changed.append(f"sys.{OUTPUTS[number]}")
        return changed

    def close(self) -> None:
        """Closes the copies of the files; after that nothing can be put back."""
        for copy, _ in self._files.values():
            os.close(copy)


def _file(number: int) -> tuple[int, int] | None:
    """(inode, device) of the file that is open under this number; None if none is."""
    with contextlib.suppress(OSError):
        return os.fstat(number)[1:3]
    return None


def _serve(number: int, callers_main: dict[str, str]) -> None:
    """The main function of a worker: runs calls until an empty message comes. number: the connection's descriptor."""
    _callers_main.update(callers_main)
    os.set_inheritable(number, False)  # processes that the worker starts must not keep the connection open
    line = Connection(number)
    _lines.append(line)
    outputs = Outputs()
    while request := read(line):
        _answer(line, request)
        _flush()  # what the call has printed goes to its own stdout, before `mend` puts the earlier one back
        outputs.mend()  # the call may have closed sys.stdout, or replaced it
        _flush()
    gc.freeze()  # else the interpreter searches all of torch's objects for garbage as it ends, for half a second


def _flush() -> None:
    """Writes what stdout still holds."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, nobody reads it, or it is closed
        sys.stdout.flush()


def _answer(line: Connection, request: bytes) -> None:
    """Runs a call and sends (failure, result)."""
    try:
        function, args = _Unpickler(io.BytesIO(request)).load()
        if isinstance(function, str):
            from lmsys.registry import load_target

            function = load_target(function)
        answer = pickle.dumps((None, function(*args)), protocol=5)
    except BaseException as error:
        # Sent inside of this block: its end frees the call's objects, and that may wait for other processes.
        line.send_bytes(pickle.dumps((Failure.of(error), None)))
    else:
        line.send_bytes(answer)
