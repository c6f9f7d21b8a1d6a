"""Two processes that take turns on one device: the one that has the baton is at work, the other waits for it.

With --against, today's worker and the earlier one measure the same rows in this way (`lmsys.bench.paired`):

    with turns.session():                   # both come; the first has the baton
        theirs = turns.exchange(ours)       # what each has found out, told to the other
        turns.begin(0)
        for index in range(rounds):
            draw = turns.before(index, ours)    # of whoever leads this round
            ...
            turns.after(index, draw)

Who leads a round is drawn by its number, which both know, so that neither always comes behind the other. A side that
leaves a session early leaves the baton to the other, which then goes on alone. Imports no torch.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from lmsys.measure.step import nothing

LEAVES = "leaves"


class Turns:
    """One of two sides of a line. Without a line nobody takes turns with this side, and its sessions do nothing.

    is_first  has the baton when a session begins
    rest      called before this side waits
    together  while the other side is in the session
    """

    def __init__(self, line: Connection | None = None, is_first: bool = True, rest: Callable[[], Any] = nothing):
        self.is_first, self.together, self._rest = is_first, False, rest
        self._line: Any = line
        self._heard: Any = None  # with the baton, the last time

    @contextmanager
    def session(self) -> Iterator[None]:
        """Both sides come to the same sessions, in the same order, and leave each when both have done their work."""
        if self._line is None:
            yield
            return
        self.together, self._heard = True, None
        if not self.is_first:
            self._wait()
        try:
            yield
        except Exception:  # what is none, such as an interrupt, ends the process
            self._leave()
            raise
        self._leave()

    def exchange(self, ours: Any) -> Any:
        """Tells ours, and returns theirs, JSON-safe; None where it has left; before the first round."""
        before, after = self._heard, self._pass_on(ours)
        return after if self.is_first else before

    def begin(self, index: int) -> None:
        """Before the first of the rounds, which is `index`."""
        if self.is_first and not self.leads(index):
            self._pass_on(None)

    def leads(self, index: int) -> bool:
        return (random.Random(index).random() < 0.5) == self.is_first

    def before(self, index: int, ours: Any) -> Any:
        """Returns what holds for both in this round: ours where we lead it or are alone, else theirs."""
        return ours if self.leads(index) or not self.together else self._heard

    def after(self, index: int, word: Any) -> None:
        """Behind our part of a round. Whoever was second in it and leads the next keeps the baton."""
        if self.leads(index) or not self.leads(index + 1):
            self._pass_on(word)

    def _pass_on(self, word: Any) -> Any:
        """The baton and a word with it; what the other tells when it passes it back, None when it has left."""
        if self.together:
            self._send(word)
            self._wait()
        return self._heard

    def _leave(self) -> None:
        was_together, self.together = self.together, False
        self._send(LEAVES)
        if was_together:
            self._wait()  # the other has the baton until it leaves, too

    def _send(self, word: Any) -> None:
        self._line.send_bytes(json.dumps(word).encode())

    def _wait(self) -> None:
        self._rest()
        self._heard = json.loads(self._line.recv_bytes())
        if self._heard == LEAVES:
            self.together, self._heard = False, None


ALONE = Turns()
