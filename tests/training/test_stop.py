"""`StopSignals`: what a second signal to end does to a process, in the middle of a training step.

If the step runs Python code within a few seconds, KeyboardInterrupt is raised there, and the process lives on. If it
does not, because it waits in C or C++, the process exits.
"""

import hashlib
import os
import signal
import threading
import time
from functools import partial

import pytest

from lmsys.processes import ProcessError, Worker
from lmsys.training import stopping

ENDED_S = 0.3  # seconds that a step has here


def step_in_c() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # takes minutes, and runs no signal handler


def step_in_python() -> None:
    time.sleep(60.0)


def step_that_ends() -> None:
    time.sleep(0.5)


def outcome_of_signals(step: str, again_s: float) -> str:
    """Runs the function of this name while this process, which is the test's own, gets two signals to end.

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


def test_a_second_signal_raises_in_python_and_ends_a_process_that_runs_none() -> None:
    """Two at once count as one: torchrun's ranks get several when their agent dies, and after Ctrl-C."""
    with Worker() as worker:
        outcome = partial(worker.call, outcome_of_signals, timeout_s=60.0)
        assert outcome("step_in_python", 0.05) == "lives on"
        assert outcome("step_that_ends", 5.0) == "was not interrupted"
        with pytest.raises(ProcessError, match=f"exit code {128 + signal.SIGTERM}"):
            outcome("step_in_c", 0.05)
