"""`lmsys.watchdog`, a process beside each rank that says how the rank ended, and ends what a dead rank leaves.

A rank of torchrun is imitated by `started`: a process with torchrun's variables, whose parent, torchrun's agent, is the
test. The last tests are about how long a rank counts as stopped, and about `lmsys.doing`, the note of what a rank does.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys import doing, watchdog
from lmsys.watchdog import Stopped

ROOT = Path(__file__).parents[1]
RANK = """
import os, signal, sys, time
from lmsys import doing, watchdog
watchdog.begin()
doing.now("in step 3")
"""
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}


def started(*words: str, **variables: str) -> "subprocess.Popen[str]":
    """A process that runs the program words[0], as torchrun starts a rank: its agent, the parent, is this process."""
    environment = os.environ | TORCHRUN | {"PYTHONPATH": str(ROOT)} | variables
    line = [sys.executable, "-S", "-c", *words]
    return subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "lmsys: rank 5 was killed by SIGKILL, in step 3\n"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "lmsys: rank 5 was killed by SIGSEGV, in step 3\n"),
        ("os._exit(7)", "lmsys: rank 5 ended with exit code 7, in step 3\n"),
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "lmsys: rank 5 was stopped (SIGSTOP) for 1 s, in step 3: it is killed\n",
        ),
        ("pass", ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", ""),
        ("sys.exit(143)", ""),
        ("watchdog.end(); os._exit(1)", ""),
        ("watchdog.tell_reported(); os._exit(1)", ""),
    ],
)
def test_the_watchdog_names_how_a_rank_ended_unless_it_ended_orderly(code: str, message: str) -> None:
    """`code` ends the rank. Orderly ends, of which nothing is printed: Python's own, by SIGTERM, or announced."""
    process = started(RANK + code, LMSYS_STOPPED_S="1")
    # The watchdog shares the rank's stderr, so `read` returns once both have ended. Until `wait` the rank is a zombie,
    # whose status the watchdog can still read.
    assert process.stderr is not None and process.stderr.read() == message
    process.stderr.close()
    process.wait()


# A program that starts a rank, as torchrun's agent does, and sleeps.
AGENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1]])
time.sleep(60)
"""


def test_a_rank_whose_agent_is_killed_is_told_to_end() -> None:
    agent = started(AGENT, RANK + "print('begun', file=sys.stderr, flush=True); time.sleep(60)")
    assert agent.stderr is not None and agent.stderr.readline() == "begun\n"
    agent.kill()
    agent.wait()
    since = time.monotonic()
    message = "lmsys: rank 5 has lost the process that started it, in step 3: it is told to end\n"
    assert agent.stderr.read() == message  # stderr has ended, so the rank has ended, too
    agent.stderr.close()
    assert time.monotonic() - since < watchdog.SAVE_S / 2  # by SIGTERM: SIGKILL comes SAVE_S later


def test_ranks_that_do_not_end_beside_a_dead_one_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.3)
    waiting = [subprocess.Popen(["sleep", "60"], env=os.environ | {"LOCAL_RANK": str(rank)}) for rank in range(2)]
    other = subprocess.Popen(["sleep", "60"], env={})
    others = watchdog._others(os.getpid(), waiting[0].pid)
    assert others == [waiting[1].pid]
    watchdog._end_all(others, os.getpid())
    assert waiting[1].wait(timeout=10) == -signal.SIGKILL
    assert waiting[0].poll() is None and other.poll() is None
    for process in (waiting[0], other):
        process.kill()
        process.wait()


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 5000.0)), max_size=40), st.integers(1, 5))
def test_a_stop_counts_by_looks_not_by_the_clock(looks: list[tuple[bool, float]], limit_s: int) -> None:
    """A look counts as one second of a stop, however long ago the last one was: the watchdog may have slept as well.

    looks: whether the rank is stopped at a look, and the seconds since the look before.
    """
    with pytest.MonkeyPatch.context() as patch:
        now, in_a_row, counted_at = 0.0, 0, -1.0
        stopped, never = Stopped(limit_s), Stopped(0)
        for is_stopped, pause_s in looks:
            now += pause_s
            patch.setattr(time, "monotonic", lambda now=now: now)
            patch.setattr(watchdog, "_stat", lambda _, state="T" if is_stopped else "S": [state])
            late = stopped.among([1])
            if now >= counted_at + watchdog.LOOK_S:
                in_a_row, counted_at = (in_a_row + 1 if is_stopped else 0), now
                assert late == ([1] if in_a_row > limit_s else [])
            else:
                assert late == []
            assert never.among([1]) == []


@given(st.text(max_size=300))
def test_a_note_is_read_by_another(text: str) -> None:
    memory = bytearray(doing.SIZE)
    doing.write(memory, text)
    note = doing.read(memory)
    if not text.strip("\0"):
        assert note == doing.AT_FIRST
    else:  # the beginning of the text, as far as it fits; a character that is cut off is read as U+FFFD
        assert text.startswith(note.rstrip("\ufffd"))
