"""The watch over a row's calls: each is announced and has a deadline, and what it leaves changed is put back."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lmsys.bench.benchmark import Candidate, Settings
from lmsys.bench.guard import Changed, State
from lmsys.bench.heartbeat import TIMED, Heartbeat
from lmsys.measure.clock import synchronize
from lmsys.measure.compare import Failure, attempt
from lmsys.measure.step import Step, nothing

WARM_S, TIMES_EXPECTED = 30.0, 20.0  # for a call that has run before: so long, or so often what it should take


class Watch:
    """Over the candidates of one group.

    doing       what is being done, as it goes behind "it crashed": "in its first call"
    expected_s  what a timed call should take; infinity where that is not known
    """

    def __init__(self, candidates: Iterable[Candidate], settings: Settings, heartbeat: Heartbeat, on_gpu: bool):
        self.settings, self.heartbeat, self._on_gpu = settings, heartbeat, on_gpu
        self.rows = {id(one): row for row, one in enumerate(candidates)}
        self.doing, self.expected_s = "in its first call", math.inf
        self.state = State()
        self._last: int | None = None  # the row whose work nobody has looked at since
        self._left: dict[int, str] = {}

    def beat(self, candidate: Candidate) -> None:
        """Says that this row is at work."""
        self.heartbeat.beat(self.rows[id(candidate)], self.doing, self.settings.deadline_s)

    def attempt(self, candidate: Candidate, call: Callable[..., Any], *args: Any) -> tuple[Any, Failure | None]:
        """`attempt` of a row's own work: until the device has done it, and with what it leaves changed put back."""

        def done() -> Any:
            found = call(*args)
            synchronize(self.settings.device)
            return found

        self.beat(candidate)
        found, failure = attempt(done)
        failure = _with(failure, self.state.mend())
        self.heartbeat.rest()
        return None if failure else found, failure

    def settle(self) -> None:
        """Puts back what the last row at work has left changed, after calls behind which nobody has looked."""
        if self._last is not None and (left := self.state.mend()):
            self._left.setdefault(self._last, left)
        self._last = None

    def failure(self, candidate: Candidate, failure: Failure | None) -> Failure | None:
        """How the row has failed in its timed calls, with what it has left changed there."""
        return _with(failure, self._left.pop(self.rows[id(candidate)], None))

    def over(self, step: Step, candidate: Candidate, own_redraw: Callable[[int], None], own_keep: Any) -> Step:
        """The step with each of its timed calls announced, and held to leave nothing changed that others would feel."""
        row = self.rows[id(candidate)]

        def at_work(call: Callable[..., Any], *args: Any) -> Any:
            if self._last != row:
                self.settle()
            self._last = row
            most_s = self.settings.deadline_s
            if self.expected_s < math.inf:
                most_s = max(min(most_s, WARM_S), TIMES_EXPECTED * self.expected_s)
            self.heartbeat.beat(row, TIMED, most_s)
            return call(*args)

        def redraw(draw: int) -> None:
            self.settle()
            _bench_own(own_redraw, draw)
            if self._on_gpu:
                self.heartbeat.beat_on_gpu(row)
            at_work(nothing)

        def keep(result: Any, key: int | None) -> Any:
            self._last = None
            if left := self.state.mend():
                raise Changed(left)
            return own_keep(result, key)

        like = step.like and partial(at_work, step.like)
        return replace(step, redraw=redraw, keep=keep, before=partial(at_work, step.before), like=like)


def _with(failure: Failure | None, left: str | None) -> Failure | None:
    if not left:
        return failure
    return (failure[0], f"{failure[1]}; {left}") if failure else ("error", left)


class BenchFault(RuntimeError):
    """A failure in the bench's own part of a call."""

    failure = property(lambda self: ("error", f"the bench failed, not the row: {self}"))


def _bench_own(call: Callable[..., Any], *args: Any) -> Any:
    found, failure = attempt(call, *args)
    if failure:
        raise BenchFault(failure[1])
    return found


def copied(result: Any, key: int | None) -> Any:
    """A copy of a tensor, or of a tuple or list of them, where a key is given."""
    if key is None:
        return None
    return result.clone() if isinstance(result, Tensor) else [copied(one, key) for one in result]
