"""The call that a benchmark times. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Step:
    """A call to be timed: `run(prepare())`, without the prepare. `before` runs before that in a loop."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    before: Callable[[], Any] = lambda: None
