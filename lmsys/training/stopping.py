"""Lets a training end its step before SIGTERM or Ctrl-C stops it. `Trainer.fit` (loop.py) uses `StopSignals`."""

import os
import signal
import threading
import time
from typing import Any, Self

AGAIN_S = 0.5  # signals closer together count as one: torchrun and a terminal may each send one
ENDED_S = 5.0  # how long a process may take to end by itself after a second signal
TWICE = b"lmsys.training: told to end twice, and its step does not: ended at once; what was saved before stands\n"


class StopSignals:
    """Inside of `with`, the first SIGTERM or Ctrl-C only sets `seen` to its number; a second raises KeyboardInterrupt.

    A signal that was ignored before stays ignored. Python runs a handler between two of its instructions. A rank that
    waits in a collective for a stopped rank never comes to its next instruction, so its handlers do not run. Therefore
    a thread reads the signals, too, and ends such a process ENDED_S after the second signal.

    seen  the number of the first signal; 0: none has come
    """

    def __init__(self) -> None:
        self.seen: int = 0
        self._over = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._numbers, self._written = os.pipe()  # Python's C code writes the number of each signal into this pipe
        os.set_blocking(self._written, False)
        self._written_before = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        signal.set_wakeup_fd(self._written_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._written)  # which ends the thread of `_watch`

    def _note(self, number: int, _: Any) -> None:
        """The handler of both signals: notes the first, and raises KeyboardInterrupt on a second one after AGAIN_S."""
        now = time.monotonic()
        if not self.seen:
            self.seen, self._seen_at_s = number, now
        elif now - self._seen_at_s > AGAIN_S:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Run by the thread: reads signals' numbers until the pipe is closed.

        It ends the process if that has not ended by itself ENDED_S after a second signal.
        """
        first, first_at_s = 0, 0.0
        while number := os.read(self._numbers, 1):
            now = time.monotonic()
            if number[0] in self._before and not first:
                first, first_at_s = number[0], now
            elif number[0] in self._before and now - first_at_s > AGAIN_S and not self._over.wait(ENDED_S):
                os.write(2, TWICE)
                os._exit(128 + first)
        os.close(self._numbers)
