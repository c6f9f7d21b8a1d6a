"""Coefficients of Muon's Newton-Schulz iterations: a triple (a, b, c) for each step.

A step maps each singular value x to a x + b x³ + c x⁵, so that all come near 1. POLAR_EXPRESS, the triples of the Polar
Express, is compared with the algorithm of its paper; COEFFICIENTS has the one triple of Jordan's Muon.
"""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmsys.training.muon import COEFFICIENTS, POLAR_EXPRESS, Muon, newton_schulz, normalized

LEAST = 1e-3  # the least singular value that is to be brought to 1
CUSHION = 0.024  # a polynomial's range is no wider than from this share of its end: else it would amplify rounding
SAFETY = 1.01  # rounding may take a value above 1, by this factor at most


def best_quintic(low: float, high: float) -> np.ndarray:
    """(a, b, c) of the a x + b x³ + c x⁵ that is nearest to 1 on [low, high], by Remez's exchange.

    Its error has one size at both ends and at the two extrema between them, with alternating signs.
    """
    extrema = (3 * low + high) / 4, (low + 3 * high) / 4
    error, change = math.inf, math.inf
    while change > 1e-14:
        points = np.array([low, *extrema, high])
        system = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        *triple, new_error = np.linalg.solve(system, np.ones(4))
        change, error = abs(new_error - error), new_error
        a, b, c = triple
        root = math.sqrt(9 * b**2 - 20 * a * c)
        extrema = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return np.array(triple)


def value(triple: np.ndarray, x: float) -> float:
    """The value of the polynomial at x."""
    return triple @ np.array([x, x**3, x**5])


def test_the_coefficients_are_those_of_the_papers_algorithm() -> None:
    """Each is the best for the range that the steps before it have left, and is scaled so that its values lie around 1.

    The last is the limit of best polynomials for a range that narrows to 1.
    """
    low, high = LEAST, 1.0
    for triple in POLAR_EXPRESS[:-1]:
        best = best_quintic(max(low, CUSHION * high), high)
        best = best * 2 / (value(best, low) + value(best, high))
        low = value(best, low)
        high = 2 - low
        np.testing.assert_allclose(triple, best / SAFETY ** np.array([1, 3, 5]), atol=5.1e-5, rtol=0)
    assert POLAR_EXPRESS[-1] == (15 / 8, -10 / 8, 3 / 8)


@pytest.mark.parametrize(("steps", "off"), [(5, 0.16), (6, 0.006), (7, 1e-6), (9, 1e-14)])
def test_singular_values_come_to_one(steps: int, off: float) -> None:
    """off: the largest distance from 1. Jordan's coefficients let large values vary between 0.68 and 1.21."""
    values = torch.logspace(math.log10(LEAST), math.log10(1.008), 2000, dtype=torch.float64)[:, None, None]
    ours, jordans = (newton_schulz(values, steps, triples) for triples in (POLAR_EXPRESS, COEFFICIENTS))
    assert (ours - 1).abs().max() < off < 0.3 < (jordans - 1).abs().max()


@given(st.integers(1, 9), st.lists(st.tuples(*3 * [st.floats(-2, 2)]), min_size=1, max_size=4), st.integers(0, 99))
def test_each_step_has_its_triple_and_the_last_goes_on(steps: int, triples: list[tuple[float, ...]], seed: int) -> None:
    x = normalized(list(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(seed))), torch.float64)
    expected = x
    for step in range(steps):
        expected = newton_schulz(expected, 1, triples[min(step, len(triples) - 1)])
    torch.testing.assert_close(newton_schulz(x, steps, triples), expected, rtol=0, atol=0, equal_nan=True)


def test_muon_takes_the_coefficients_and_saves_them() -> None:
    p, q = (torch.eye(4, 6).requires_grad_() for _ in range(2))
    saved, loaded = Muon([p], ns_coefficients=POLAR_EXPRESS, ns_steps=7, ns_dtype=torch.float32), Muon([q])
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for x, optimizer in ((p, saved), (q, loaded)):
        x.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        start = x.detach().clone()
        optimizer.step()
        step = (start * (1 - 1e-4) - x.detach()) / 1e-3  # by Muon's default lr and weight decay
        torch.testing.assert_close(step @ step.T, torch.eye(4), atol=2e-3, rtol=0)
    assert torch.equal(p, q)
