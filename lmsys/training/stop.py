"""The wish to stop, told by signals: SIGTERM and Ctrl-C."""

import os
import signal
import threading
import time
from typing import Any, Self

AGAIN_S = 0.5  # signals closer together are one wish: torchrun and a terminal each pass one on
ENDED_S = 5.0  # for a process to end by itself after a second signal
TWICE = "told to end twice, and its step does not: ended at once; what was saved before stands"


class StopSignals:
    """SIGTERM and Ctrl-C, kept until the step is done; what is ignored stays so. A second one, later, ends at once.

    Python runs handlers between two of its own instructions, which a rank that waits for a stopped one never reaches:
    a thread reads the signals, too, and ends such a process some seconds after the second.
    """

    def __init__(self) -> None:
        self.seen: int = 0
        self._seen_at_s = 0.0
        self._over = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._told, tell = os.pipe()
        os.set_blocking(tell, False)
        self._tell, self._told_before = tell, signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        signal.set_wakeup_fd(self._told_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._tell)

    def _note(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if not self.seen:
            self.seen, self._seen_at_s = number, now
        elif now - self._seen_at_s > AGAIN_S:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Reads until the other end is closed. A step that does not end when told twice ends with its process."""
        first, first_at_s = 0, 0.0
        while number := os.read(self._told, 1):
            now = time.monotonic()
            if number[0] in self._before and not first:
                first, first_at_s = number[0], now
            elif number[0] in self._before and now - first_at_s > AGAIN_S and not self._over.wait(ENDED_S):
                _end(first)
        os.close(self._told)


def _end(number: int) -> None:
    os.write(2, f"lmsys.training: {TWICE}\n".encode())
    os._exit(128 + number)
