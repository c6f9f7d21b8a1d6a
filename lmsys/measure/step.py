"""The call that a benchmark times, and what is kept of it. Imports no torch.

The method `step` of a benchmark (`lmsys.bench.benchmark`) returns a `Step`. `lmsys.measure.compare` times it, and
returns a `Kept` for each call to be checked; profile.py and energy.py take a `Step`, too. *The row* is the
implementation under test. A new hook is a field of `Step`, a call in `lmsys.measure.compare._sample` and in
`profile.call_in_ranges`, and, if it runs a row's code, a wrapper in `lmsys.bench.watch.Watch.over`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Failure = tuple[str, str]  # how a call has failed: the outcome, such as "oom" or "error", and the reason


class Failed(RuntimeError):
    """Raised as Failed(outcome, reason). `lmsys.measure.compare.attempt` catches it and returns the two as a `Failure`.

    Its text is the reason.
    """

    failure = property(lambda self: self.args)

    def __str__(self) -> str:
        return str(self.args[1])


def nothing(*_: Any) -> None:
    """Does nothing: the default of hooks that a `Step` may leave out."""


@dataclass
class Step:
    """A call to be timed: `run(prepare())`, of which `run` alone is timed.

    run          the timed call; gets what `prepare` returned, and returns the result
    prepare      the row's untimed work before the call, such as a forward where `run` is its backward
    before       called before `redraw`, but for a sample only if its clock times calls in a loop
                 (`CudaClock(ahead=False)`); `profile.call_in_ranges` always calls it
    redraw       called with a seed before each `prepare`: draws new inputs, in place
    redraw_late  called with the seed between `prepare` and `run`: draws the inputs that `prepare` must not see
    keep         called right after `run` with its result and a key. With a key it returns copies of the parts that the
                 key selects; the row cannot know which calls those are. With None it only checks the result's form.
                 It raises `Failed` unless the result has the promised form
    num_kept     how many calls are checked. With 3, a row that is wrong in half of its calls passes 1 time in 8
    clock        turns the run's clock into this step's, whose calls may run in another process (`lmsys.bench.foreign`)
    like         what the row does in `prepare`, timed alone as a reference: if `prepare` takes much longer than this,
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
    clock: Callable[[Any], Any] = lambda clock: clock

    def once(self) -> Any:
        """The result of one call, untimed and on the inputs as they are."""
        return self.run(self.prepare())


@dataclass
class Kept:
    """A timed call that is checked afterwards, once `redraw(draw)` has made its inputs again.

    index     the call's number among the samples
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
