"""A process beside each rank of torchrun, for what the rank cannot say or do when it has been killed or stopped.

    watchdog.begin()    # in a rank, before it imports torch, which takes seconds
    watchdog.end()      # its end is in order from here on

The watchdog says which rank has died and what it was `doing`. The others of its agent, which torchrun has told to end,
then have GRACE_S for it: they may wait for the dead one where no signal is heard. A rank that has been stopped, by
SIGSTOP, for $LMSYS_STOPPED_S is named and killed. One whose agent is gone is told to end, and killed after SAVE_S.

A stop is read off /proc, not off messages that fail to come: a rank that compiles, downloads or saves is not stopped,
however long that takes. Imports no torch.
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

LOOK_S = 1.0  # between two looks
STOPPED_S = 15.0  # so long a rank may be stopped; $LMSYS_STOPPED_S
GRACE_S = 10.0  # for ranks to end when another has died
SAVE_S = 25.0  # for a rank to save and end when its agent is gone: torchrun gives 30
PACKAGES = Path(__file__).parents[1]
TOLD_TO_END = (0, signal.SIGTERM, (128 + signal.SIGTERM) << 8, (128 + signal.SIGINT) << 8)  # as of waitpid(2)
SAID = b"said"
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
    """This rank's end is in order from here on."""
    while _watchdogs:
        _watchdogs.pop().communicate(b"done")


def said() -> None:
    """This rank has failed and said so. It ends at once, and the others are to end."""
    for watchdog in _watchdogs:
        assert watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed as well
            os.write(watchdog.stdin.fileno(), SAID)


def stopped_s() -> float:
    """$LMSYS_STOPPED_S, the seconds that a rank may be stopped; 0: for ever. ValueError for what is no such number."""
    text = os.environ.get("LMSYS_STOPPED_S", str(STOPPED_S))
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise ValueError(f"$LMSYS_STOPPED_S is {text!r}; it must be seconds, or 0 for no limit")


class Stopped:
    """Processes that have been stopped for too long, by this one's own looks at them.

    While the looking process is stopped too, as when a scheduler suspends a whole job, no time is counted.
    """

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._looks: dict[int, int] = {}
        self._next = 0.0

    def among(self, pids: Iterable[int]) -> list[int]:
        """Looks once every LOOK_S, however often it is called."""
        if not self.limit_s or time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + LOOK_S
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in pids if _stat(pid)[:1] == ["T"]}
        return [pid for pid, looks in self._looks.items() if looks * LOOK_S > self.limit_s]


def told_of_stop(limit_s: float) -> str:
    return f"was stopped (SIGSTOP) for {limit_s:g} s"


def _main() -> None:
    rank, pid, agent, file = map(int, sys.argv[1:])
    try:
        limit_s = stopped_s()
    except ValueError:
        return  # which its rank says
    Watchdog(rank, pid, agent, doing.map_file(file), limit_s).watch()


class Watchdog:
    """The watch over process `pid`, a rank that `agent` has started; standard input ends with it."""

    def __init__(self, rank: int, pid: int, agent: int, memory: Any, limit_s: float):
        self.rank, self.pid, self.agent, self.memory = rank, pid, agent, memory
        self.stopped, self.is_told, self.until = Stopped(limit_s), False, math.inf

    def watch(self) -> None:
        """Until the rank has ended, or its end is in order."""
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
        """As are those that torchrun tells when another has died; it may ask for their status before this process."""
        if how is None:
            return len(_others(self.agent, self.pid)) < int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
        return self.until < math.inf or how in TOLD_TO_END

    def _say(self, text: str, then: str = "") -> None:
        os.write(2, f"lmsys: rank {self.rank} {text}, {doing.read(self.memory)}{then}\n".encode())


def _others(agent: int, pid: int) -> list[int]:
    """The ranks beside `pid` that the agent has started, and that live."""
    try:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    except OSError:  # the agent is gone, and its ranks have watchdogs of their own
        return []
    return [child for child in map(int, children) if child != pid and _is_rank(child)]


def _is_rank(pid: int) -> bool:
    try:
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _end_all(ranks: list[int], agent: int) -> None:
    """They have GRACE_S to end. The agent may start others meanwhile, which are not these."""
    until = time.monotonic() + GRACE_S
    while (ranks := [rank for rank in ranks if _parent(rank) == agent and _is_rank(rank)]) and time.monotonic() < until:
        time.sleep(0.1)
    for rank in ranks:
        _kill(rank, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: state, parent, ...; none for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int | None:
    return int(fields[1]) if (fields := _stat(pid)) else None


def _how_it_ended(pid: int) -> int | None:
    """The status of waitpid(2), as the kernel shows it until the parent has asked; None: the parent was faster."""
    status = 0
    while fields := _stat(pid):  # its files are closed before it has ended
        status = int(fields[-1])
        if fields[0] == "Z":
            return status
        time.sleep(0.002)
    return status or None


def _in_words(status: int | None) -> str:
    if status is None:
        return "died"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
