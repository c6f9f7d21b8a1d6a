"""A watchdog process for each rank of torchrun: it reports a rank that died or is stopped. Imports no torch.

    watchdog.begin()    # in a rank, before it imports torch, which takes seconds
    watchdog.end()      # in the same rank, before it ends as planned: the watchdog reports nothing

`lmsys train` and `TorchrunGroup` call these functions. When the rank dies, its watchdog reports which rank it was and
what it was doing (`lmsys.doing`). torchrun's agent, the parent process of a node's ranks, then tells the other ranks
to end. They have GRACE_S for that. The watchdog then kills those that still run, since they may wait for the dead rank
in a collective where no signal is handled. A rank that SIGSTOP has stopped for $LMSYS_STOPPED_S is reported and killed.
A rank whose agent has died is told to end, and killed after SAVE_S. To change these rules, edit `Watchdog.watch` and
`_look`.

The watchdog reads from /proc that a rank is stopped. It does not conclude this from silence: a rank that compiles,
downloads or saves is not stopped, however long that takes.
"""

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lmsys import doing

LOOK_S = 1.0  # seconds between two looks at /proc
STOPPED_S = 15.0  # how long a rank may be stopped; $LMSYS_STOPPED_S overrides it
GRACE_S = 10.0  # how long ranks may take to end when another has died
SAVE_S = 25.0  # how long a rank may take to save and end when its agent is gone; torchrun itself allows 30
PACKAGES = Path(__file__).parents[1]  # the folder that lmsys is imported from
# Exit statuses, in the form of waitpid(2), of a rank that was done, or that has ended because it was told to.
TOLD_TO_END = (0, signal.SIGTERM, (128 + signal.SIGTERM) << 8, (128 + signal.SIGINT) << 8)
REPORTED = b"said"  # the message to the watchdog of a rank that has reported its own failure, see `tell_reported`
_watchdogs: list["subprocess.Popen[bytes]"] = []  # the running watchdog of this rank, if any


def under_torchrun() -> bool:
    """True in a rank that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def begin() -> None:
    """Starts the watchdog of this rank of torchrun, once."""
    if _watchdogs:
        return
    file = doing.shared_file()
    code = f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); from {__name__} import _main; _main()"
    _watchdogs.append(
        subprocess.Popen(
            # -S: without site-packages, which it does not need. `_main` reads what follows `code` in this order.
            [sys.executable, "-S", "-c", code, *map(str, (os.environ["RANK"], os.getpid(), os.getppid(), file))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[file],
            start_new_session=True,
        )
    )
    doing.share(file)


def end() -> None:
    """Ends this rank's watchdog, which reports nothing: the rank is about to end as planned."""
    while _watchdogs:
        _watchdogs.pop().communicate(b"done")


def tell_reported() -> None:
    """Tells the watchdog that this rank has reported its own failure, so that it only ends the other ranks."""
    for watchdog in _watchdogs:
        assert watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the watchdog was killed as well
            os.write(watchdog.stdin.fileno(), REPORTED)


def stopped_s() -> float:
    """$LMSYS_STOPPED_S, how many seconds a rank may be stopped; 0: no limit. ValueError for a wrong value."""
    text = os.environ.get("LMSYS_STOPPED_S", str(STOPPED_S))
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise ValueError(f"$LMSYS_STOPPED_S is {text!r}; it must be seconds, or 0 for no limit")


class Stopped:
    """Finds processes that have been stopped for longer than a limit, by looking at them again and again.

    `Watchdog` uses it for its rank, and `lmsys.parallel.group` for its workers. With the limit 0 no process is found.
    Looks are counted instead of time: a scheduler that suspends a whole job also suspends the process that looks, and
    such a pause must not count.
    """

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._looks: dict[int, int] = {}  # {process: in how many looks in a row it was stopped}
        self._next = 0.0

    def among(self, pids: Iterable[int]) -> list[int]:
        """The processes that have been stopped for too long; none if called again within LOOK_S."""
        if not self.limit_s or time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + LOOK_S
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in pids if _stat(pid)[:1] == ["T"]}  # T: stopped
        return [pid for pid, looks in self._looks.items() if looks * LOOK_S > self.limit_s]


def told_of_stop(limit_s: float) -> str:
    """The report about a rank that was stopped for too long."""
    return f"was stopped (SIGSTOP) for {limit_s:g} s"


def _main() -> None:
    """The main function of the watchdog's process."""
    rank, pid, agent, file = map(int, sys.argv[1:])
    try:
        limit_s = stopped_s()
    except ValueError:
        return  # the rank itself reports the wrong value
    Watchdog(rank, pid, agent, doing.map_file(file), limit_s).watch()


class Watchdog:
    """Watches process `pid`, a rank, from a process of its own, which `_main` runs.

    Standard input is a pipe from the rank: it closes when the rank ends, and `end` and `tell_reported` write to it.

    agent        the process that has started the rank
    memory       the shared memory where the rank notes what it does (`lmsys.doing`)
    is_reported  True once the rank's failure has been reported, by the rank itself or by the watchdog
    kill_at      the time, by time.monotonic, at which the rank is killed; inf: it is not to be
    """

    def __init__(self, rank: int, pid: int, agent: int, memory: Any, limit_s: float):
        self.rank, self.pid, self.agent, self.memory = rank, pid, agent, memory
        self.stopped, self.is_reported, self.kill_at = Stopped(limit_s), False, math.inf

    def watch(self) -> None:
        """Watches until the rank has ended or called `end`. If it has died, reports that and ends the other ranks."""
        while True:
            if select.select([0], [], [], LOOK_S)[0]:
                word = os.read(0, len(REPORTED))  # empty: the pipe was closed
                if word != REPORTED:
                    break
                self.is_reported = True
            self._look()
        if not word and not self._was_told_to_end(status := _exit_status(self.pid)):
            if not self.is_reported:
                self._say(_in_words(status))
            _end_all(_others(self.agent, self.pid), self.agent)

    def _look(self) -> None:
        """Acts on a rank that is stopped or has lost its agent."""
        if self.stopped.among([self.pid]):
            self._say(told_of_stop(self.stopped.limit_s), ": it is killed")
            self.is_reported = True
            _kill(self.pid, signal.SIGKILL)
        elif self.kill_at == math.inf and _parent(self.pid) not in (self.agent, None):
            self._say("has lost the process that started it", ": it is told to end")
            self.kill_at = time.monotonic() + SAVE_S
            _kill(self.pid, signal.SIGTERM)
        elif time.monotonic() > self.kill_at:
            _kill(self.pid, signal.SIGKILL)

    def _was_told_to_end(self, status: int | None) -> bool:
        """True for a rank that has ended because torchrun told it to, after the death of another rank.

        status  the rank's exit status; None if torchrun has already collected it, and /proc no longer shows it: then
                the rank was told to end if another rank is missing, too
        """
        if status is None:
            return len(_others(self.agent, self.pid)) < int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
        return self.kill_at < math.inf or status in TOLD_TO_END

    def _say(self, text: str, then: str = "") -> None:
        """Reports to standard error what happened to the rank, what it was doing, and what happens `then` (": ...")."""
        os.write(2, f"lmsys: rank {self.rank} {text}, {doing.read(self.memory)}{then}\n".encode())


def _others(agent: int, pid: int) -> list[int]:
    """The other live ranks that the agent has started."""
    children = map(int, _read_of(agent, f"task/{agent}/children").split())
    return [child for child in children if child != pid and _is_rank(child)]


def _read_of(pid: int, name: str) -> bytes:
    """The content of a file of /proc/PID; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _is_rank(pid: int) -> bool:
    """True for a process that torchrun has started as a rank; False too for one that is gone."""
    return b"\0LOCAL_RANK=" in _read_of(pid, "environ")


def _end_all(ranks: list[int], agent: int) -> None:
    """Kills those of the ranks that have not ended after GRACE_S. A process that got an ended rank's pid is spared."""
    until = time.monotonic() + GRACE_S
    while (ranks := [rank for rank in ranks if _parent(rank) == agent and _is_rank(rank)]) and time.monotonic() < until:
        time.sleep(0.1)
    for rank in ranks:
        _kill(rank, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: state, parent, ...; none for a process that is gone."""
    return _read_of(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _parent(pid: int) -> int | None:
    """The process's parent; None for a process that is gone."""
    return int(fields[1]) if (fields := _stat(pid)) else None


def _exit_status(pid: int) -> int | None:
    """The exit status in the form of waitpid(2); None if the parent has collected it: then /proc no longer shows it."""
    status = 0
    while fields := _stat(pid):  # a process closes its files, and so the pipe, a moment before it becomes a zombie
        status = int(fields[-1])  # the last field of stat is the exit status; 0 while the process lives
        if fields[0] == "Z":
            return status
        time.sleep(0.002)
    return status or None


def _in_words(status: int | None) -> str:
    """How a rank has ended, in words, by its exit status."""
    if status is None:
        return "died"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _kill(pid: int, number: int) -> None:
    """Sends a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
