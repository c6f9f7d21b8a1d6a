"""Trials that end in every way, for tests of `lmsys.kernels.trial`. They import no torch, to start quickly."""

import os
import signal
import time
from pathlib import Path

COUNT = "TRIALS_COUNTED_IN"  # environment variable: a file that gets a line for each trial, with its process id


def count() -> None:
    with Path(os.environ[COUNT]).open("a") as file:
        file.write(f"{os.getpid()}\n")


def right(capability: tuple[int, int]) -> None:
    count()
    assert capability[0] >= 9


def wrong(capability: tuple[int, int]) -> None:
    count()
    raise ValueError("dq is wrong")


def uncompiled(capability: tuple[int, int]) -> None:
    raise RuntimeError("at 3:11:\n    wide = tile\nAttributeError: no reinterpret\n")


def crash(capability: tuple[int, int]) -> None:
    count()
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(capability: tuple[int, int]) -> None:
    count()
    time.sleep(60)


def full(capability: tuple[int, int]) -> None:
    count()
    raise RuntimeError("CUDA error: out of memory")
