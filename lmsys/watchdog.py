"""A process beside each rank of torchrun, which reports and ends a rank that was killed or stopped. Imports no torch.

    watchdog.begin()    # in a rank, before it imports torch, which takes seconds
    watchdog.end()      # from here on its end is in order

`lmsys train` and `TorchrunGroup` call it. When its rank dies the watchdog reports which rank it was and what it was
doing (`lmsys.doing`). torchrun then tells the other ranks of its agent to end. They have GRACE_S for that, and are
killed after it, since they may wait for the dead rank in a collective where no signal is handled. A rank that SIGSTOP
has stopped for $LMSYS_STOPPED_S is reported and killed. A rank whose agent is gone is told to end, and killed after
SAVE_S.

That a rank is stopped is read from /proc, not concluded from its silence: a rank that compiles, downloads or saves is
not stopped, however long that takes.
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

LOOK_S = 1.0  # between two looks at /proc
STOPPED_S = 15.0  # how long a rank may be stopped; $LMSYS_STOPPED_S overrides it
GRACE_S = 10.0  # for ranks to end when another has died
SAVE_S = 25.0  # for a rank to save and end when its agent is gone; torchrun itself gives 30
PACKAGES = Path(__file__).parents[1]
# Statuses, as of waitpid(2), of a rank that was done or was told to end.
TOLD_TO_END = (0, signal.SIGTERM, (128 + signal.SIGTERM) << 8, (128 + signal.SIGINT) << 8)
SAID = b"said"  # what a rank writes to its watchdog when it has reported its own failure
_watchdogs: list["subprocess.Popen[bytes]"] = []  # of this rank


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def begin() -> None:
    """Starts the watchdog of this rank of torchrun, once."""
    if _watchdogs:
        return
    file = doing.shared_file()
    code = f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); from {__name__} import _main; _main()"
    _watchdogs.append(
        subprocess.Popen(
            [sys.executable, "-S", "-c", code, *map(str, (os.environ["RANK"], os.getpid(), os.getppid(), file))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[file],
            start_new_session=True,
        )
    )
    doing.share(file)


def end() -> None:
    """Ends this rank's watchdog: from here on the rank's end is in order."""
    while _watchdogs:
        _watchdogs.pop().communicate(b"done")


def said() -> None:
    """Tells the watchdog that this rank has failed and reported it: the watchdog only ends the other ranks."""
    for watchdog in _watchdogs:
        assert watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the watchdog was killed as well
            os.write(watchdog.stdin.fileno(), SAID)


def stopped_s() -> float:
    """$LMSYS_STOPPED_S, how many seconds a rank may be stopped; 0: no limit. ValueError for a wrong value."""
    text = os.environ.get("LMSYS_STOPPED_S", str(STOPPED_S))
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise ValueError(f"$LMSYS_STOPPED_S is {text!r}; it must be seconds, or 0 for no limit")


class Stopped:
    """Finds processes that have been stopped for longer than a limit, by looking at them again and again.

    No time is counted while the looking process is stopped too, as when a scheduler suspends a whole job.
    """

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._looks: dict[int, int] = {}
        self._next = 0.0

    def among(self, pids: Iterable[int]) -> list[int]:
        """Those of the processes that have been stopped for too long. It looks at most once in LOOK_S."""
        if not self.limit_s or time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + LOOK_S
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in pids if _stat(pid)[:1] == ["T"]}
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
        return  # its rank reports the wrong value
    Watchdog(rank, pid, agent, doing.map_file(file), limit_s).watch()


class Watchdog:
    """Watches process `pid`, a rank that process `agent` has started, and whose end closes standard input.

    memory   where the rank's `doing` notes are
    is_told  its failure was reported
    until    when the rank is killed
    """

    def __init__(self, rank: int, pid: int, agent: int, memory: Any, limit_s: float):
        self.rank, self.pid, self.agent, self.memory = rank, pid, agent, memory
        self.stopped, self.is_told, self.until = Stopped(limit_s), False, math.inf

    def watch(self) -> None:
        """Watches until the rank has ended, or has called `end`."""
        while True:
            if select.select([0], [], [], LOOK_S)[0]:
                word = os.read(0, len(SAID))
                if word != SAID:
                    break
                self.is_told = True
            self._look()
        if not word and not self._was_told_to_end(how := _how_it_ended(self.pid)):
            if not self.is_told:
                self._say(_in_words(how))
            _end_all(_others(self.agent, self.pid), self.agent)

    def _look(self) -> None:
        """Acts on a rank that is stopped or has lost its agent."""
        if self.stopped.among([self.pid]):
            self._say(told_of_stop(self.stopped.limit_s), ": it is killed")
            self.is_told = True
            _kill(self.pid, signal.SIGKILL)
        elif self.until == math.inf and _parent(self.pid) not in (self.agent, None):
            self._say("has lost the process that started it", ": it is told to end")
            self.until = time.monotonic() + SAVE_S
            _kill(self.pid, signal.SIGTERM)
        elif time.monotonic() > self.until:
            _kill(self.pid, signal.SIGKILL)

    def _was_told_to_end(self, how: int | None) -> bool:
        """True for a rank that torchrun has told to end, as another has died.

        how  its status; None where torchrun has read it before: then another rank must be missing
        """
        if how is None:
            return len(_others(self.agent, self.pid)) < int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
        return self.until < math.inf or how in TOLD_TO_END

    def _say(self, text: str, then: str = "") -> None:
        """Reports to standard error what happened to the rank, what it was doing, and what happens `then`."""
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
    return b"\0LOCAL_RANK=" in _read_of(pid, "environ")


def _end_all(ranks: list[int], agent: int) -> None:
    """Kills those of the ranks that have not ended after GRACE_S, unless their number is another process's by then."""
    until = time.monotonic() + GRACE_S
    while (ranks := [rank for rank in ranks if _parent(rank) == agent and _is_rank(rank)]) and time.monotonic() < until:
        time.sleep(0.1)
    for rank in ranks:
        _kill(rank, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: state, parent, ...; none for a process that is gone."""
    return _read_of(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _parent(pid: int) -> int | None:
    return int(fields[1]) if (fields := _stat(pid)) else None


def _how_it_ended(pid: int) -> int | None:
    """The status, as of waitpid(2), that /proc shows until the parent has read it; None: it has read it already."""
    status = 0
    while fields := _stat(pid):  # a process closes its files before it has ended
        status = int(fields[-1])
        if fields[0] == "Z":
            return status
        time.sleep(0.002)
    return status or None


def _in_words(status: int | None) -> str:
    """How a rank has ended, by its status."""
    if status is None:
        return "died"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
