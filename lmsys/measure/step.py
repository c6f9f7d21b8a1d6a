"""What is timed. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Step:
    """What is timed: `run(prepare())`, without the prepare. `before` is what comes before that in a loop."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    before: Callable[[], Any] = lambda: None
