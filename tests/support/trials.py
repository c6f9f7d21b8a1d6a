"""Trials that end in every way, for tests of `lmsys.kernels.trial`. They import no torch, to start quickly.

A trial is a function that gets a compute capability, and tries a kernel on a version of Triton on which nobody has
tested it. It raises if the kernel cannot be trusted. `trial.refusal` calls it in a process of its own, and keeps the
verdict. Tests name the functions here as "tests.support.trials:right", or import them. A new way to end is a new
function.
"""

import os
import signal
import time
from pathlib import Path

COUNT = "TRIALS_COUNTED_IN"  # environment variable: a file that gets a line for each trial, with its process id


def count() -> None:
    """Notes that a trial has run, so that tests can see whether a verdict was made anew or remembered."""
    with Path(os.environ[COUNT]).open("a") as file:
        file.write(f"{os.getpid()}\n")


def right(capability: tuple[int, int]) -> None:
    count()
    assert capability[0] >= 9, "tests ask about Hopper, (9, 0): the capability did not arrive as it was given"


def wrong(capability: tuple[int, int]) -> None:
    count()
    raise ValueError("dq is wrong")


def uncompiled(capability: tuple[int, int]) -> None:
    """Raises as Triton's compiler does: the place comes first and the reason last, and a refusal has both."""
    raise RuntimeError("at 3:11:\n    wide = tile\nAttributeError: no reinterpret\n")


def crash(capability: tuple[int, int]) -> None:
    """Ends its process as an invalid memory access would."""
    count()
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(capability: tuple[int, int]) -> None:
    """Takes longer than the 3 s that the test sets as the deadline."""
    count()
    time.sleep(60)


def full(capability: tuple[int, int]) -> None:
    """Fails for a reason of the moment, which is no verdict on the kernel and is not kept."""
    count()
    raise RuntimeError("CUDA error: out of memory")
