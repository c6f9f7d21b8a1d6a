"""How far two sets of timings are apart (lmsys/bench/changes.py): laws of the estimate, and how often it errs.

`between` compares timings that were taken apart from one another, `paired` the differences of two rows in each round.
Both return a `Shift`: an estimate with its standard error, from which an interval and verdicts follow.
"""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.bench.changes import FEWEST_ROUNDS, Shift, between, discoveries, paired

samples = st.lists(st.floats(-1, 1), min_size=FEWEST_ROUNDS, max_size=30)


@given(old=samples, new=samples, by=st.floats(-3, 3))
def test_the_estimate_is_what_is_added_to_one_side(old: list[float], new: list[float], by: float) -> None:
    shift, moved, back = between(old, new), between(old, [value + by for value in new]), between(new, old)
    assert shift and moved and back
    assert moved.estimate == pytest.approx(shift.estimate + by, abs=1e-9)
    assert back.estimate == pytest.approx(-shift.estimate, abs=1e-9)
    assert back.error == pytest.approx(shift.error, abs=1e-9)


@given(differences=samples, by=st.floats(-3, 3))
def test_the_paired_estimate_is_what_is_added_to_each_round(differences: list[float], by: float) -> None:
    shift, moved, back = (paired(list(map(f, differences))) for f in (float, lambda x: x + by, lambda x: -x))
    assert shift and moved and back
    assert moved.estimate == pytest.approx(shift.estimate + by, abs=1e-9)
    assert back.estimate == pytest.approx(-shift.estimate, abs=1e-9)


def test_a_few_slow_rounds_do_not_move_the_estimate() -> None:
    steady = [0.001 * (number % 7) for number in range(100)]
    for shift in (between(steady, [*steady[:90], *[5.0] * 10]), paired([*[0.0] * 90, *[5.0] * 10])):
        assert shift and abs(shift.estimate) < 0.002


def noise(rng: random.Random, count: int, alike: float) -> list[float]:
    """`count` timings of which each resembles the one before; `alike` is their correlation, from 0 to below 1."""
    timings = [rng.gauss(0, 1)]
    while len(timings) < count:
        timings.append(alike * timings[-1] + math.sqrt(1 - alike * alike) * rng.gauss(0, 1))
    return [0.01 * value for value in timings]


@pytest.mark.parametrize("alike", [0.0, 0.6])
def test_the_interval_holds_the_true_shift_about_as_often_as_it_says(alike: float) -> None:
    rng = random.Random(1)
    hits, trials = {"between": 0, "paired": 0}, 300
    for _ in range(trials):
        old, new = noise(rng, 60, alike), [value + 0.02 for value in noise(rng, 60, alike)]
        differences = [b - a for a, b in zip(old, new, strict=True)]
        for name, shift in (("between", between(old, new)), ("paired", paired(differences))):
            assert shift
            hits[name] += shift.interval[0] <= 0.02 <= shift.interval[1]
    assert all(count / trials > 0.92 for count in hits.values())


def test_few_of_the_reported_changes_are_false() -> None:
    """In each of 40 trials 20 cases change by three times the margin, 80 by the margin, so that they must not count."""
    rng, called, false = random.Random(2), 0, 0
    for _ in range(40):
        shifts = [0.06 if number < 20 else 0.02 for number in range(100)]
        chances = [Shift(rng.gauss(shift, 0.01), 0.01).p_beyond(0.02) for shift in shifts]
        counted = discoveries(chances, 0.05)
        called += sum(counted)
        false += sum(counted[20:])
    assert called > 0.9 * 800 and false / called < 0.06


def test_timings_without_noise_leave_no_doubt() -> None:
    assert Shift(0.1, 0.0).p_beyond(0.05) == 0 and Shift(0.01, 0.0).p_beyond(0.05) == 1
    assert discoveries([], 0.05) == [] and discoveries([0.0, 1.0], 0.05) == [True, False]
    assert between([0.5] * 10, [0.5] * 10) == Shift(0.0, 0.0)
