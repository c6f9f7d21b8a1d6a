"""Units in the order in which a pass uses them: which is gathered next, and whose last use is over.

Ranks must begin the same collectives in the same order. A rank that passes over a unit gathers it all the same, since
another may use it. A unit that is not expected is gathered when it is asked for, which is right where all ranks do so.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lmsys.parallel.flat_shard import FlatShard


class Unit:
    """Parameters that are gathered and released together.

    note    is called with a number at each collective
    calls   of its forward that have not ended
    pinned  it is not released before the step: nobody can tell when its last use will be over
    """

    def __init__(self, number: int, flats: Sequence[FlatShard], note: Callable[[int], Any]):
        self.number, self.flats, self._note = number, flats, note
        self.calls, self.pinned = 0, False

    def gather(self) -> None:
        if any(flat.gather() for flat in self.flats):
            self._note(2 * self.number)

    def wait(self) -> None:
        for flat in self.flats:
            flat.wait()

    def hide(self) -> None:
        if not (self.pinned or self.calls):
            for flat in self.flats:
                flat.hide()

    def free(self) -> None:
        if not (self.pinned or self.calls):
            for flat in self.flats:
                flat.free()

    def reduce(self) -> None:
        self._note(2 * self.number + 1)
        for flat in self.flats:
            flat.reduce()

    def finish_reduce(self) -> None:
        for flat in self.flats:
            flat.finish_reduce()


class Walk:
    """order     in which units are expected, each as often as it will be used
    release   is called with a unit whose last expected use is over: before the next is gathered, or then
    seen      the order in which they were used
    visits    those that a backward will come back to, in the order of the forward
    strayed   some were not expected
    """

    def __init__(self, order: Iterable[Unit], release: Callable[[Unit], Any], release_first: bool = False):
        self.order, self._release, self._release_first = list(order), release, release_first
        self._left, self._at = Counter(self.order), -1
        self.seen, self.visits, self.strayed = list[Unit](), list[Unit](), False

    def extend(self, order: Iterable[Unit]) -> None:
        more = list(order)
        self.order += more
        self._left.update(more)

    def enter(self, unit: Unit) -> None:
        """Begins to gather a unit, and the one that is expected next."""
        _append(self.seen, unit)
        try:
            to = self.order.index(unit, max(self._at, 0))
        except ValueError:
            self.strayed = True
            unit.gather()
        else:
            self._advance(to)

    def leave(self, unit: Unit, returns: bool) -> None:
        """Called when a forward of a unit has ended. returns: a backward will come back to it."""
        if returns:
            _append(self.visits, unit)
        if self._left[unit]:
            unit.hide()
        else:
            unit.free()

    def end(self) -> None:
        """Passes over all that is left."""
        self._advance(len(self.order))

    def _advance(self, to: int) -> None:
        """Goes on to a place in the order. Those in between are only passed over."""
        last = len(self.order) - 1
        while self._at < min(to, last):
            before = self.order[self._at] if self._at >= 0 else None
            self._at += 1
            self.order[self._at].gather()
            if self._release_first:
                self._pass(before)
            for unit in self.order[self._at + 1 : self._at + 2]:
                unit.gather()
            if not self._release_first:
                self._pass(before)
            if self._at < to:
                _append(self.visits, self.order[self._at])

    def _pass(self, unit: Unit | None) -> None:
        if unit is not None:
            self._left[unit] -= 1
            if not self._left[unit]:
                self._release(unit)


def _append(units: list[Unit], unit: Unit) -> None:
    """Uses in a row are one."""
    if not units or units[-1] is not unit:
        units.append(unit)
