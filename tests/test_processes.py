"""`lmsys.processes`: calls in a worker process, and every way in which a call can fail.

Only the call that fails is lost: the worker, or a new one in its place, answers the next call. The functions at the top
are called in the worker. `futures`, tested last, hands tasks to several workers.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmsys import processes
from lmsys.processes import Outputs, ProcessError, Worker, answered, futures, in_own_process
from tests.support.processes import PATIENCE_S, Stopwatch

KEPT: list[int] = []  # a worker has a KEPT of its own


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A worker that the tests share."""
    with Worker() as shared:
        yield shared


def keep(value: int) -> list[int]:
    KEPT.append(value)
    return KEPT


def prints(text: str) -> int:
    print(f"{text} in Python", end=" ")
    sys.stdout.flush()
    os.write(1, b"and past it")
    return len(text)


def double(task: int) -> int:
    """Twice the task; 13 raises an exception, and 99 ends the process."""
    if task == 13:
        raise ValueError("13 is refused")
    if task == 99:
        os._exit(7)
    print("a task may print")
    return 2 * task


def hangs_with_a_child(file: Path | None) -> None:
    """Start a process that sleeps, write its id to the file, and sleep, too; without a file do nothing."""
    if file is not None:
        file.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        time.sleep(60)


HARMS: dict[str, Callable[[], Any]] = {  # what a call may do to stdout
    "closed": lambda: sys.stdout.close(),
    "detached": lambda: sys.stdout.detach(),
    "away": lambda: setattr(sys, "stdout", None),
    "closed below": lambda: os.close(1),
}


def harms_stdout(name: str) -> None:
    print(f"before it was {name}")
    HARMS[name]()


class Unpicklable(Exception):
    """Cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise TypeError("not by pickle")


class Unloadable(Exception):
    """Can be sent, but not received, as exceptions of many libraries: pickle makes it anew with a single argument."""

    def __init__(self, first: str, second: str):
        super().__init__(f"{first} and {second}")


def raises(kind: str) -> None:
    raise {
        "unpicklable": Unpicklable("holds a lock"),
        "unloadable": Unloadable("this", "that"),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt("there"),
    }[kind]


def lives(pid: int) -> bool:
    """True for a process that runs; False if there is none, or if it has ended and is a zombie."""
    return Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds; False if it does not within PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_worker_lives_from_call_to_call(worker: Worker) -> None:
    assert [worker.call(keep, value) for value in (1, 2)] == [[1], [1, 2]] and KEPT == []
    assert worker.call(os.getpid) == worker.pid != os.getpid()
    assert [worker.call(abs, -value) for value in range(500)] == list(range(500))


def test_functions_are_named_by_texts_too(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def add(one, other): return one + other")
    assert worker.call(f"{tmp_path}/mine.py:add", 1, 2) == 3
    assert worker.call("os:getpid") == worker.pid
    with pytest.raises(ValueError, match="defines no 'nothing'"):
        worker.call("os:nothing")


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "message"),
    [
        (signal.raise_signal, (signal.SIGKILL,), "died", "a worker process died: killed by SIGKILL"),
        (signal.raise_signal, (signal.SIGSEGV,), "died", "a worker process died: killed by SIGSEGV"),
        (os._exit, (3,), "died", "a worker process died with exit code 3"),
        (os._exit, (0,), "died", "a worker process died with exit code 0"),
        (time.sleep, (60,), "timeout", "a worker process did not answer within 0.5 s and was killed"),
    ],
)
def test_a_dead_worker_loses_one_call(worker: Worker, function: Any, arguments: Any, kind: str, message: str) -> None:
    worker.call(abs, 1)  # so that there is a process
    before, watch = worker.pid, Stopwatch()
    with pytest.raises(ProcessError) as caught:
        worker.call(function, *arguments, timeout_s=0.5 if function is time.sleep else None)
    assert (caught.value.kind, str(caught.value)) == (kind, message) and caught.value.failure == ("error", message)
    assert watch.keeps(20) and not lives(before)
    assert worker.call(double, 4) == 8 and worker.pid != before


def test_a_worker_that_dies_between_calls_is_replaced(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    assert eventually(lambda: bool(answered([worker], 0.0))) and worker.call(double, 4) == 8


def test_an_exception_is_raised_here_with_its_traceback(worker: Worker) -> None:
    with pytest.raises(ValueError, match="^13 is refused$") as caught:
        worker.call(double, 13)
    cause = str(caught.value.__cause__)
    assert cause.startswith("ValueError: 13 is refused (in a worker process)\nTraceback") and "in double" in cause


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("unpicklable", "Unpicklable", "Unpicklable: holds a lock"),
        ("unloadable", "Unloadable", "Unloadable: this and that"),
        ("exit", "SystemExit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt", "KeyboardInterrupt: there"),
    ],
)
def test_an_exception_that_cannot_be_sent_is_described(worker: Worker, kind: str, name: str, message: str) -> None:
    before = worker.pid
    with pytest.raises(ProcessError) as caught:
        worker.call(raises, kind)
    assert caught.value.kind == name and message in caught.value.failure[1] and "in raises" in str(caught.value)
    assert worker.call(abs, -1) == 1 and worker.pid == before


def test_arguments_and_results_that_cannot_be_pickled_are_errors_of_the_call(worker: Worker) -> None:
    before = worker.pid
    with pytest.raises(Exception, match="pickle"):
        worker.call(abs, lambda: 0)
    with pytest.raises(Exception, match="pickle"):
        worker.call(open, os.devnull)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        worker.call("no_such_module:function")
    assert worker.call(abs, -1) == 1 and worker.pid == before


def test_an_interrupt_leaves_no_answer_for_the_next_call(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(worker, "receive", interrupted)
        worker.call(abs, -5)
    assert worker.call(abs, -6) == 6


def test_printed_text_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with Worker() as fresh:  # the process of `worker` has the stdout of the test that has started it
        assert fresh.call(prints, "four") == 4
    assert capfd.readouterr().out == "four in Python and past it"


def test_large_arguments_and_results(worker: Worker) -> None:
    data = os.urandom(2**20) * 8
    assert worker.call(bytes, data, timeout_s=60) == data


def test_a_worker_imports_what_its_calls_need() -> None:
    loaded = in_own_process(eval, "sorted(__import__('sys').modules)")
    assert "lmsys.processes" in loaded and not {"torch", "numpy", "pytest"} & set(loaded)


def test_a_worker_inherits_only_stdout_stderr_and_its_socket() -> None:
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        with Worker() as first, Worker() as second:
            for worker in (first, second):
                open_files = set(worker.call(os.listdir, "/proc/self/fd")) - {"0", "1", "2"}
                # the socket to its caller, copies of stdout and stderr, and /proc/self/fd itself, which is being read
                assert len(open_files) == 4


def leaves_a_thread() -> int:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return os.getpid()


@pytest.mark.parametrize("function", [os.getpid, leaves_a_thread])
def test_a_closed_worker_leaves_no_process(function: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds for a worker whose interpreter, as it ends, waits for a thread that a call has left."""
    monkeypatch.setattr(processes, "GRACE_S", 0.3)
    pid = in_own_process(function)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(KeyError), Worker() as worker:
        worker.call(function)
        raise KeyError
    assert not Path(f"/proc/{worker.pid}").exists()


# A program that starts a worker, which starts a child, writes both ids to a file, and sleeps.
CALLER = """
import os, subprocess, sys, time
from lmsys.processes import Worker

def begin(file):
    child = subprocess.Popen(["sleep", "1000"])
    with open(file + ".new", "w") as out:
        print(os.getpid(), child.pid, file=out)
    os.rename(file + ".new", file)
    time.sleep(1000)

if __name__ == "__main__":
    print("ran as main", flush=True)
    Worker().call(begin, sys.argv[1])
"""


def test_workers_end_with_their_caller_and_find_functions_in_its_main_module(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    command = [sys.executable, tmp_path / "caller.py", tmp_path / "pids"]
    with open(tmp_path / "printed", "w") as printed:
        path = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        caller = subprocess.Popen(command, env=path, stdout=printed)
    try:
        assert eventually((tmp_path / "pids").exists), "the call has not begun"
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(map(lives, pids))
    finally:
        caller.kill()
        caller.wait()
    assert eventually(lambda: not any(map(lives, pids)))
    assert (tmp_path / "printed").read_text() == "ran as main\n"


@pytest.mark.parametrize("processes", [1, 3])
def test_tasks_are_answered_in_order_and_errors_passed_on(processes: int) -> None:
    assert [future.result() for future in futures(double, range(12), processes)] == [2 * task for task in range(12)]
    with pytest.raises(ValueError, match="13 is refused"):
        [future.result() for future in futures(double, range(20), processes)]


def test_a_failure_among_many_tasks_is_that_of_its_task_alone() -> None:
    answers = []
    for future in futures(double, (1, 99, 2, 13, 3, 4), 2):
        error = future.exception()
        answers.append(future.result() if error is None else str(error))
    assert answers == [2, "a worker process died with exit code 7", 4, "13 is refused", 6, 8]


def test_few_tasks_are_taken_before_they_are_needed() -> None:
    taken: list[int] = []
    endless = (taken.append(task) or task for task in itertools.count())  # type: ignore[func-returns-value]
    answers = futures(double, endless, 2)
    assert [next(answers).result() for _ in range(5)] == [0, 2, 4, 6, 8] and len(taken) <= 5 + 2 * 2
    answers.close()  # type: ignore[attr-defined]


def test_each_task_has_a_deadline_which_also_ends_processes_that_the_task_has_started(tmp_path: Path) -> None:
    tasks = futures(hangs_with_a_child, (tmp_path / "pid", None), 2, timeout_s=3)
    late, right = [future.exception() for future in tasks]
    assert isinstance(late, ProcessError) and late.kind == "timeout" and right is None
    child = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not lives(child))


def latin_stdout_again() -> str:
    """The encoding of stdout once it was Latin-1, closed by a call, and put back."""
    sys.stdout.reconfigure(encoding="latin-1")  # type: ignore[union-attr]
    outputs = Outputs()
    sys.stdout.close()
    outputs.mend()
    outputs.close()
    return sys.stdout.encoding


def test_a_stdout_that_was_closed_has_its_encoding_again() -> None:
    with Worker() as fresh:
        assert fresh.call(latin_stdout_again) == "latin-1"


@pytest.mark.parametrize("name", HARMS)
def test_later_calls_can_print_after_one_that_has_closed_stdout(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with Worker() as fresh:  # it prints where this test's output is captured
        fresh.call(harms_stdout, name)
        fresh.call(prints, "behind it")
    printed = capfd.readouterr()
    assert printed.out == f"before it was {name}\nbehind it in Python and past it" and not printed.err
