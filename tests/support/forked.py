"""`python -c CODE` as a fork of a process that has imported torch and its compiler, which takes seconds each time.

It stands for `subprocess.Popen` in `lmsys.processes` while tests run: a worker is then a process with a group, files,
an environment and an exit code of its own, as one that ships, and begins within milliseconds. What is told of workers
in `tests/test_processes.py` is asked of both; on machines with a GPU, workers are started as they ship.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

IMPORTED = "torch", "torch._dynamo", "torch.distributed.fsdp", "triton"
AT_START = ("PYTHON", "TORCH", "TRITON", "OMP_", "MKL_", "CUDA_", "CUBLAS_")  # begin of variables that are read once
HIGH = 512  # above all numbers of files that a caller passes


class Forked:
    """What `lmsys.processes` asks of a Popen."""

    def __init__(self, pid: int, status: int):
        self.pid, self._status = pid, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(os.read(self._status, 32) or -signal.SIGKILL)
            os.close(self._status)
        return self.returncode


class Forks:
    """The process that forks, from the first worker on."""

    def __init__(self) -> None:
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.module = SimpleNamespace(**{**vars(subprocess), "Popen": self.popen})

    def popen(self, arguments: Sequence[str], **options: Any) -> Any:
        """A fork for a worker whose environment differs in nothing that an interpreter or torch reads at its start."""
        environment = options.get("env") or os.environ
        if arguments[:2] != [sys.executable, "-c"] or _at_start(environment) != _at_start(os.environ):
            return subprocess.Popen(arguments, **options)
        if self._line is None:
            self._line, self._process = _begin()
        ours, theirs = os.pipe()
        numbers = [1, 2, *options.get("pass_fds", ())]
        request = pickle.dumps((arguments[2], dict(environment), str(options.get("cwd") or os.getcwd()), numbers))
        socket.send_fds(self._line, [request], [theirs, *numbers])
        os.close(theirs)
        return Forked(int(self._line.recv(32)), ours)

    def close(self) -> None:
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.wait()


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(AT_START)}


def _begin() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import serve; serve({theirs.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
    )
    theirs.close()
    return ours, process


def serve(number: int) -> None:
    """Forks for each request, and tells how each fork ended. Returns in a fork when its code is done."""
    line, statuses = socket.socket(fileno=number), dict[int, int]()
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, (
        "a process with threads cannot be forked"
    )
    gc.freeze()
    bell, rope = os.pipe()
    os.set_blocking(rope, False)
    signal.set_wakeup_fd(rope)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([line, bell], [], [])
        if bell in ready:
            os.read(bell, 1024)
            _tell_ends(statuses)
        if line not in ready:
            continue
        request, files, _, _ = socket.recv_fds(line, 2**20, 64)
        if not request:
            return
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for file in (bell, rope, files[0], *statuses.values()):
                os.close(file)
            line.close()
            _become(files[1:], *pickle.loads(request))
            return
        os.setpgid(pid, pid)  # also here: the caller may ask for the group at once
        statuses[pid] = files[0]
        for file in files[1:]:
            os.close(file)
        line.send(str(pid).encode())


def _tell_ends(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with contextlib.suppress(OSError):  # nobody waits for it any more
            os.write(statuses[pid], str(os.waitstatus_to_exitcode(status)).encode())
        os.close(statuses.pop(pid))


def _become(files: Sequence[int], code: str, environment: dict[str, str], folder: str, numbers: Sequence[int]) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for file in files]  # where none of the numbers is
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    exec(code, {"__name__": "__main__"})
