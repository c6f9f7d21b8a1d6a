"""Two processes that measure in turns (`Turns`, lmsys/measure/turns.py), so that both see the same conditions.

Each measures rows (functions) in rounds; a round measures every row once, on both sides if both have it. One side works
at a time. Either may go first in a round: it leads, and draws the inputs of the round for both. If one side leaves, the
other goes on alone. Here the sides are threads that talk by a pipe: see `results_of`.
"""

import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.measure.clock import CpuClock
from lmsys.measure.compare import Sampled, _order, interleave
from lmsys.measure.step import Step
from lmsys.measure.turns import ALONE, Turns
from tests.support.processes import PATIENCE_S


def results_of(*sides: Callable[[Turns], Any]) -> list[Any]:
    """Run two functions of `Turns`, each in a thread of its own, and return their two results."""
    results: list[Any] = [None, None]

    def run(number: int, turns: Turns) -> None:
        results[number] = sides[number](turns)

    lines = Pipe()
    threads = [
        threading.Thread(target=run, args=(number, Turns(line, is_first=number == 0)), daemon=True)
        for number, line in enumerate(lines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the two wait for one another"
    return results


@given(st.integers(0, 20), st.integers(0, 20), st.integers(-5, 0))
def test_both_sides_take_part_in_each_round_with_the_leaders_draw(first: int, second: int, start: int) -> None:
    """In each of two sessions, both sides log the rounds that they share, with the leader's draw of the round.

    The side with fewer rounds leaves the session then, and the other goes on alone.
    """
    log: list[tuple[int, int, int]] = []
    at_work = threading.Lock()

    def side(number: int, rounds: int) -> Callable[[Turns], None]:
        def run(turns: Turns) -> None:
            for session in range(2):
                with turns.session():
                    theirs = turns.exchange([rounds])
                    assert theirs == [(second, first)[number]]
                    turns.begin(start)
                    for index in range(start, rounds):
                        draw = turns.before(index, 1000 * number + index)
                        assert at_work.acquire(blocking=False), "two at once"
                        log.append((session, index, draw))
                        at_work.release()
                        turns.after(index, draw)

        return run

    results_of(side(0, first), side(1, second))
    both = min(first, second)
    for session in range(2):
        own = [(index, draw) for which, index, draw in log if which == session]
        paired = own[: 2 * (both - start)]
        assert [index for index, _ in paired] == [index for index in range(start, both) for _ in range(2)]
        assert all(leader == follower for leader, follower in zip(paired[::2], paired[1::2], strict=True))
        assert len(own) == first + second - 2 * start


def test_the_leader_differs_from_round_to_round() -> None:
    first, second = (Turns(line, is_first) for line, is_first in zip(Pipe(), (True, False), strict=True))
    leads = [first.leads(index) for index in range(200)]
    assert 70 < sum(leads) < 130  # about half of the rounds
    assert leads == [not second.leads(index) for index in range(200)]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_side_that_fails_leaves_the_other_alone(leaver: int) -> None:
    def fails(turns: Turns) -> str:
        with pytest.raises(ZeroDivisionError), turns.session():
            raise ZeroDivisionError
        with turns.session():
            return "came again"

    def goes_on(turns: Turns) -> str:
        with turns.session():
            assert turns.exchange("mine") is None and not turns.together
        with turns.session():
            return "came again"

    sides = [goes_on, goes_on]
    sides[leaver] = fails
    assert results_of(*sides) == ["came again"] * 2


def interleaved(
    turns: Turns, names: dict[str, int], fails_at: int | None = None
) -> tuple[Sampled, dict[str, list[int]]]:
    """The result of `interleave` on one side, and the draws that each row saw.

    names     the rows, each with a number that its work grows with
    fails_at  the number of the call, counted over all rows, that raises
    """
    draws: dict[str, list[int]] = {name: [] for name in names}
    calls = iter(range(10**6))

    def step(name: str) -> Step:
        def run(_: Any) -> None:
            if fails_at == next(calls):
                raise RuntimeError("on purpose")
            sum(range(names[name]))

        return Step(run, redraw=draws[name].append)

    with turns.session():
        result = interleave({name: step(name) for name in names}, CpuClock(), seconds=0.002, min_rounds=10, turns=turns)
    return result, draws


def test_rows_of_both_sides_have_the_same_rounds_and_draws() -> None:
    names = {"short": 10, "long": 3000}
    (ours, drawn), (theirs, also_drawn) = results_of(
        lambda turns: interleaved(turns, names | {"new": 10}), lambda turns: interleaved(turns, dict.fromkeys(names, 9))
    )
    assert not ours.failures and not theirs.failures and len(ours.samples["new"]) >= 10
    for name in names:
        rounds = len(ours.samples[name])
        assert rounds == len(theirs.samples[name]) >= 10
        both = [draw for draw in drawn[name] if draw in also_drawn[name]]
        assert both == [draw for draw in also_drawn[name] if draw in drawn[name]] and len(both) == rounds


@pytest.mark.parametrize("apart", [False, True])
def test_no_row_sees_inputs_twice(apart: bool) -> None:
    """A row that remembers results by the content of its inputs finds none, also in a call that is no sample.

    apart  the row has a clock of its own, as one in a process of its own has
    """
    draws: list[int] = []
    step = Step(lambda _: None, redraw=draws.append, clock=(lambda _: CpuClock()) if apart else Step.clock)
    if apart:
        interleave({"row": step}, CpuClock(), seconds=0.002, min_rounds=10)
    else:
        (_, drawn), _ = results_of(*2 * (lambda turns: interleaved(turns, {"row": 10}),))
        draws += drawn["row"]
    assert len(set(draws)) == len(draws) >= 20


def test_a_row_that_fails_on_one_side_loses_its_own_samples_alone() -> None:
    names = {"one": 10, "other": 10}
    (ours, _), (theirs, _) = results_of(
        lambda turns: interleaved(turns, names), lambda turns: interleaved(turns, names, fails_at=12)
    )
    (failed,) = theirs.failures
    (measured,) = names.keys() - {failed}
    assert "on purpose" in theirs.failures[failed][1] and not ours.failures
    assert len(ours.samples[measured]) == len(theirs.samples[measured])


@given(st.integers(-5, 50), st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_rows_that_both_have_come_first_in_one_order(index: int, ours: set[str], theirs: set[str]) -> None:
    one, other = _order(index, sorted(ours), theirs), _order(index, sorted(theirs, reverse=True), ours)
    shared = len(ours & theirs)
    assert one[:shared] == other[:shared] and set(one[:shared]) == ours & theirs
    assert sorted(one) == sorted(ours) and sorted(other) == sorted(theirs)


def test_alone_waits_for_nobody() -> None:
    result, _ = interleaved(ALONE, {"one": 10})
    assert len(result.samples["one"]) >= 10
