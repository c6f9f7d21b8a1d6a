"""`StopSignals`: a process gets two signals to end. It lives on if its step ends then, else it ends at once.

After the second signal a step has a few seconds, here ENDED_S, to end.
"""

import hashlib
import os
import signal
import threading
import time

import pytest

from lmsys import processes
from lmsys.training import stopping

ENDED_S = 0.3  # in place of the seconds that a step has in a training


def step_in_c() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # takes minutes, and runs no signal handler


def step_in_python() -> None:
    time.sleep(60.0)


def step_that_ends() -> None:
    time.sleep(0.5)


def told_twice(step: str, again_s: float) -> str:
    """Runs this step in a process that gets two signals: the outcome. It needs a process of its own.

    again_s  a second signal within so many seconds of the first does not count
    """
    stopping.AGAIN_S, stopping.ENDED_S = again_s, ENDED_S
    for at_s in (0.1, 0.2):
        threading.Timer(at_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        with stopping.StopSignals():
            globals()[step]()
    except KeyboardInterrupt:
        time.sleep(3 * ENDED_S)
        return "lives on"
    return "was not interrupted"


def test_it_lives_on_where_its_step_ends() -> None:
    assert processes.in_own_process(told_twice, "step_in_python", 0.05, timeout_s=60.0) == "lives on"


def test_two_signals_at_once_are_one_wish() -> None:
    """torchrun's ranks get several when their agent dies, and after Ctrl-C."""
    assert processes.in_own_process(told_twice, "step_that_ends", 5.0, timeout_s=60.0) == "was not interrupted"


def test_it_ends_where_its_step_does_not() -> None:
    with pytest.raises(processes.ProcessError, match=f"exit code {128 + signal.SIGTERM}"):
        processes.in_own_process(told_twice, "step_in_c", 0.05, timeout_s=60.0)
