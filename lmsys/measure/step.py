"""The call that a benchmark times. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _nothing(*_: Any) -> None:
    """What a step leaves out."""


@dataclass
class Step:
    """A call to be timed: `run(prepare())`, without the prepare.

    before       runs before that in a loop
    redraw       makes the inputs of a draw, in place, before each call
    redraw_late  makes those that `prepare` must not see
    keep         copies of what `run` returned, taken right behind it in calls that the row cannot tell; for any call,
                 ValueError unless it is what was promised. Called with (result, whether to copy).
    """

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = _nothing
    before: Callable[[], Any] = _nothing
    redraw: Callable[[int], Any] = _nothing
    redraw_late: Callable[[int], Any] = _nothing
    keep: Callable[[Any, bool], Any] | None = None
