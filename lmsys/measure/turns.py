"""Lets two processes take turns on one device: the one that has the *baton*, the right to work, passes it to the other.

With --against, the worker that runs today's rows and the worker that runs those of an earlier state of the code measure
in this way (`lmsys.bench.paired`). `lmsys.bench.isolation` and `lmsys.bench.runner` open sessions, and
`lmsys.measure.compare` makes the calls inside of them:

    with turns.session():                   # begins when both have come; the side with `is_first` has the baton
        theirs = turns.exchange(ours)       # each sends a value to the other, and gets the other's
        turns.begin(0)
        for index in range(rounds):
            draw = turns.before(index, ours)    # the value of the process that leads this round
            ...                                 # this process's part of the round
            turns.after(index, draw)    # passes the baton on, unless this process was second and leads the next round

In each round one process leads, that is, works first. Both compute the leader from the round's number by the same
random draw, so that neither always comes second. If a process leaves a session early, the other one goes on alone. Both
processes run today's version of this file, so the messages between them may be changed here. Imports no torch.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from lmsys.measure.step import nothing

# A *word* is a JSON value that is sent with the baton. This one says that the sender leaves the session.
LEAVES = "leaves"


class Turns:
    """One of two processes ("sides") that take turns.

    line      the connection to the other side; None: there is no other side, and sessions do nothing
    is_first  True: this side has the baton when a session begins
    rest      called before this side waits for the baton. It tells the process that watches this one that no row (the
              implementation under test) is at work, so that the row's deadline does not run meanwhile

    The attribute `together` is True while both sides are in a session.
    """

    def __init__(self, line: Connection | None = None, is_first: bool = True, rest: Callable[[], Any] = nothing):
        self.is_first, self.together, self._rest = is_first, False, rest
        self._line: Any = line
        self._heard: Any = None  # the last word that came from the other side

    @contextmanager
    def session(self) -> Iterator[None]:
        """A context that both sides must enter equally often. It ends when both sides have left it."""
        if self._line is None:
            yield
            return
        self.together, self._heard = True, None
        if not self.is_first:
            self._wait()
        try:
            yield
        except Exception:  # other exceptions, such as an interrupt, end the process
            self._leave()
            raise
        self._leave()

    def exchange(self, ours: Any) -> Any:
        """Sends `ours`, a JSON value; returns the other side's value, None if it has left. Called before `begin`."""
        # The first side sends its value first: the second side has the other's value before it sends its own.
        before, after = self._heard, self._pass_on(ours)
        return after if self.is_first else before

    def begin(self, index: int) -> None:
        """Gives the baton to the side that leads the first round, whose number is `index`."""
        if self.is_first and not self.leads(index):
            self._pass_on(None)

    def leads(self, index: int) -> bool:
        """True where this side works first in the round `index`."""
        return (random.Random(index).random() < 0.5) == self.is_first

    def before(self, index: int, ours: Any) -> Any:
        """The leader's value, which both sides use in this round: `ours` where this side leads it or is alone."""
        return ours if self.leads(index) or not self.together else self._heard

    def after(self, index: int, word: Any) -> None:
        """Passes the baton on, with `word`, after this side's part of the round `index`.

        If this side was the second in this round and leads the next one, it keeps the baton.
        """
        if self.leads(index) or not self.leads(index + 1):
            self._pass_on(word)

    def _pass_on(self, word: Any) -> Any:
        """Passes the baton on with a word, waits for it, and returns the other side's word; None if that has left."""
        if self.together:
            self._send(word)
            self._wait()
        return self._heard

    def _leave(self) -> None:
        """Tells the other side that this side takes no more turns, and waits until the other side leaves, too."""
        was_together, self.together = self.together, False
        self._send(LEAVES)
        if was_together:
            self._wait()

    def _send(self, word: Any) -> None:
        self._line.send_bytes(json.dumps(word).encode())

    def _wait(self) -> None:
        """Waits for the other side's word, and stores it; for LEAVES, stores that the other side has left."""
        self._rest()
        self._heard = json.loads(self._line.recv_bytes())
        if self._heard == LEAVES:
            self.together, self._heard = False, None


ALONE = Turns()  # for a process that has no other side
