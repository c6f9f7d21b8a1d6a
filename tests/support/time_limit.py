"""A time limit for work on a GPU that may hang. It ends the process: no exception reaches a thread that waits."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 20.0  # for work that takes milliseconds


@contextmanager
def time_limit(what: str, limit_s: float = LIMIT_S) -> Iterator[None]:
    """A context that prints `what` and ends the process if it takes longer than `limit_s`."""

    def give_up() -> None:
        print(f"no end after {limit_s:g} s: {what}", file=sys.__stderr__, flush=True)
        os._exit(1)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
