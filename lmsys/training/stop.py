"""The wish to stop, told by signals: SIGTERM and Ctrl-C."""

import os
import signal
import threading
from typing import Any, Self

ENDED_S = 5.0  # for a process to end by itself after a second signal
TWICE = "told to end twice, and its step does not: ended at once; what was saved before stands"


class StopSignals:
    """SIGTERM and Ctrl-C, kept until the step is done; what is ignored stays so. A second one ends at once.

    Python runs handlers between two of its own instructions, which a rank that waits for a stopped one never reaches:
    a thread reads the signals, too, and ends such a process some seconds after the second.
    """

    def __init__(self) -> None:
        self.seen: int = 0
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
        if self.seen:
            raise KeyboardInterrupt
        self.seen = number

    def _watch(self) -> None:
        """Reads until the other end is closed. A step that does not end when told twice ends with its process."""
        numbers: list[int] = []
        while number := os.read(self._told, 1):
            numbers += [number[0]] if number[0] in self._before else []
            if len(numbers) == 2 and not self._over.wait(ENDED_S):
                _end(numbers[0])
        os.close(self._told)


def _end(number: int) -> None:
    os.write(2, f"lmsys.training: {TWICE}\n".encode())
    os._exit(128 + number)
