"""The call that a benchmark times, and what is kept of it. Imports no torch.

`Benchmark.step` returns a `Step`; `lmsys.measure.compare` times it, and leaves a `Kept` for each call to be checked.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Failure = tuple[str, str]  # how a call has failed: the outcome, such as "oom" or "error", and the reason


def nothing(*_: Any) -> None:
    """Stands for a hook that a step leaves out."""


@dataclass
class Step:
    """A call to be timed: `run(prepare())`, without the prepare.

    before       runs before that in a loop
    redraw       makes the inputs of a draw, in place, before each call
    redraw_late  makes those that `prepare` must not see
    keep         called right after `run` with its result and a key. With a key it returns copies of the parts that the
                 key selects; the row cannot know which calls those are. With None it only checks the result's form.
                 ValueError unless the result is what was promised
    num_kept     calls of a row that are checked: a row that is wrong in half of its calls passes 3 in one run of 8
    like         the row's own part of `prepare`, timed alone as a reference: if `prepare` takes much longer than this,
                 the row did timed work there, and is wrong
    """

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = nothing
    before: Callable[[], Any] = nothing
    redraw: Callable[[int], Any] = nothing
    redraw_late: Callable[[int], Any] = nothing
    keep: Callable[[Any, int | None], Any] = nothing
    num_kept: int = 3
    like: Callable[[], Any] | None = None


@dataclass
class Kept:
    """A timed call that is checked afterwards.

    index     its number among the samples
    draw      the seed that its inputs were drawn by
    key       a random number that says which parts of its result were kept
    result    copies of these parts, until they are checked
    evidence  what the check leaves in the record, JSON-safe, for readers who want to repeat it
    """

    index: int
    draw: int
    key: int
    result: Any
    evidence: dict[str, Any] = field(default_factory=dict)
