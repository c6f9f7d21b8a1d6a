"""The energy of a call (lmsys/measure/energy.py), on a device whose power is known, and on a GPU.

Energy is measured in two ways: from a counter of joules, and as the integral of sampled power. The tests hold both
against the exact energy of `FakeDevice`, whose power follows a curve; on a GPU, against each other. `times` and `marks`
make what a measurement collects: when the sensors were read, and how many calls were done by when.
"""

import itertools
import math
import time
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsys.attention import ATTENTION, AttentionCase
from lmsys.attention.contract import adapt
from lmsys.measure import energy
from lmsys.measure.clock import synchronize
from lmsys.measure.energy import APART, Energy, Sample, calls_between, energy_of, of_call, of_step
from lmsys.measure.sensors import sensors_of
from lmsys.measure.step import Failed, Step
from tests.support.device import FakeDevice

GAP_S, END_S = 0.0075, 2.5
MOST_W = 600.0
# Draws (seconds, watts) of each part of a curve of power, and seconds between two readings.
curves = st.lists(st.tuples(st.floats(0.01, 0.5), st.floats(50, MOST_W)), min_size=1, max_size=5)
gaps = st.lists(st.floats(0.0025, GAP_S), min_size=1, max_size=20)


def times(gaps: list[float]) -> list[float]:
    """The moments of readings from 0 to END_S, with these gaps between them, repeated as often as needed."""
    return list(itertools.takewhile(lambda at: at < END_S, itertools.accumulate(itertools.cycle(gaps))))


def marks(call_s: float) -> list[tuple[float, int]]:
    """(second, calls done by then) of calls that follow one another from 0 to END_S, one entry for each CHUNK_S."""
    chunk = max(1, round(energy.CHUNK_S / call_s))
    return [(n * chunk * call_s, n * chunk) for n in range(math.ceil(END_S / chunk / call_s) + 1)]


@settings(max_examples=50)
@given(curves, gaps, st.floats(1e-4, 0.3), st.floats(0.01, 0.2))
def test_the_energy_of_all_calls_is_the_integral_of_power(
    curve: list[tuple[float, float]], gaps: list[float], call_s: float, period_s: float
) -> None:
    device = FakeDevice(curve, period_s)
    found = energy_of(samples := device.samples(times(gaps)), marks(call_s), 0.5, device.limit_w)
    seconds = found.calls * found.call_s
    jumps = 1 + len(curve) * END_S / sum(s for s, _ in curve)  # of power until END_S: the curve repeats
    (begin_s, _), *_, (end_s, _) = energy.moves_of(samples, 0.5)
    assert seconds == pytest.approx(end_s - begin_s) and found.calls == pytest.approx(seconds / call_s)
    exact = device.used(end_s) - device.used(begin_s)
    assert abs(found.joules * found.calls - exact) <= MOST_W * GAP_S * 1.01  # a counter's move is seen up to GAP_S late
    assert found.integral_j is not None
    assert abs(found.integral_j * found.calls - exact) <= MOST_W * GAP_S * jumps


@settings(max_examples=50)
@given(st.floats(50, MOST_W), gaps, st.floats(0.5, 1.5))
def test_two_ways_that_are_further_apart_than_allowed_are_told(watts: float, gaps: list[float], scale: float) -> None:
    device = FakeDevice([(1.0, watts)], scale=scale)
    doubt = energy_of(device.samples(times(gaps)), marks(0.01), 0.5, None).doubt()
    if abs(1 / scale - 1) < APART - 0.01:
        assert doubt is None
    elif abs(1 / scale - 1) > APART + 0.01:
        assert doubt is not None and doubt.endswith("% apart")


def test_a_counter_alone_says_so() -> None:
    samples = [Sample(at, 100 * at, None) for at in times([0.005])]
    measured = energy_of(samples, marks(0.1), 0.5, None)
    assert measured.joules == pytest.approx(10) and measured.integral_j is None
    assert "no sensor of power" in (measured.doubt() or "")


@pytest.mark.parametrize(
    ("counter", "message"),
    [
        (lambda at: 400 * at - 700 * (at > 1), "went back, from 3"),
        (lambda at: 400 * at + 700 * (at > 1), r"jumped by 70\d\.\d J in 0\.00\d s, where 700 W are the limit"),
        (lambda at: 7.0, "has not moved twice in 2.0 s"),
        (lambda at: 7.0 + (at > 1), "has not moved twice"),
    ],
)
def test_a_counter_that_cannot_be_is_refused(counter: Any, message: str) -> None:
    samples = [Sample(at, counter(at), 400.0) for at in times([0.005])]
    with pytest.raises(Failed, match=message):
        energy_of(samples, marks(0.01), 0.5, 700.0)


@given(st.floats(0, 2), st.floats(0, 2), st.floats(0, 2))
def test_calls_between_moments_add_up(a: float, b: float, c: float) -> None:
    series = marks(0.03)
    a, b, c = sorted((a, b, c))
    assert calls_between(series, a, c) == pytest.approx(calls_between(series, a, b) + calls_between(series, b, c))
    assert calls_between(series, a, c) == pytest.approx((c - a) / 0.03)


def test_calls_follow_one_another_until_the_counter_has_moved_for_long_enough() -> None:
    device, called = FakeDevice([(1.0, 400.0)], period_s=0.03), []

    def call() -> None:
        called.append(time.perf_counter())
        time.sleep(0.002)

    measured = of_call(call, device, lambda: None, seconds=0.2, warm_s=0.05)
    assert measured.calls * measured.call_s >= 0.2 and len(called) > measured.calls
    assert measured.joules == pytest.approx(400 * measured.call_s, rel=0.25)  # a sample may come late on a busy machine
    assert measured.integral_j == pytest.approx(400 * measured.call_s, rel=0.25)


def test_a_sensor_that_fails_is_told() -> None:
    device = FakeDevice()
    device.joules = Mock(side_effect=RuntimeError("GPU is lost"))
    with pytest.raises(Failed, match="a sensor failed: GPU is lost"):
        of_call(lambda: time.sleep(0.01), device, lambda: None, seconds=0.1, warm_s=0.05)


def test_what_is_prepared_untimed_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The energy of the prepare, measured alone, is subtracted from that of the whole step."""
    joules = {"whole": 5.0, "part": 2.0}

    def of_call(call: Any, *_: Any) -> Energy:
        name = call()
        return Energy(joules[name], joules[name] * 1.01, joules[name] / 400, 100.0)

    monkeypatch.setattr(energy, "of_call", of_call)
    step = Step(lambda prepared: prepared and "whole", prepare=lambda: "part")
    measured = of_step(step, FakeDevice(), lambda: None)
    assert (
        measured.joules == 3.0
        and measured.integral_j == pytest.approx(3.03)
        and measured.call_s == pytest.approx(3 / 400)
    )
    record = measured.record(tokens=6)
    assert record["energy_per_token_j"] == 0.5 and record["energy_power_w"] == pytest.approx(400)
    assert of_step(Step(lambda _: "whole"), FakeDevice(), lambda: None).joules == 5.0
    joules["part"] = 5.0
    with pytest.raises(Failed, match="takes less than can be told from its untimed part of 5 J"):
        of_step(step, FakeDevice(), lambda: None)


def agreement(name: str, measured: Energy) -> float:
    """How far counter and integral are apart, as a share of the integral; also prints it as a line of a table."""
    assert measured.integral_j is not None
    apart = measured.joules / measured.integral_j - 1
    watts = measured.joules / measured.call_s
    figures = f"{measured.joules:.4g} | {measured.integral_j:.4g} | {apart:+.2%} | {watts:.0f}"
    print(f"| {name} | {figures} | {measured.call_s:.3e} |")
    return abs(apart)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2048, 8192])
def test_the_energy_of_a_matmul_is_the_integral_of_its_power(size: int) -> None:
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    measured = of_call(partial(torch.matmul, a, a), sensors_of("cuda"), partial(synchronize, "cuda"), energy.PASS_S)
    assert agreement(f"matmul {size}", measured) <= APART
    assert measured.calls * measured.call_s >= 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", list(ATTENTION))
def test_the_energy_of_attention_is_the_integral_of_its_power(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"batch": 4, "heads": 16, "kv_heads": 16, "queries": 4096, "keys": 4096, "head_dim": 128}
    capability, grad = torch.cuda.get_device_capability(), direction == "bwd"
    case = AttentionCase(
        **shape, dtype="bfloat16", causal=True, grad=grad, device="cuda", capability=capability
    )  # the case of the sweeps
    if why_not := ATTENTION[name].why_not(case):
        pytest.skip(why_not)
    q, k, v, do = (torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(grad)
    call = adapt(ATTENTION[name].load())
    forward = partial(call, q, k, v, causal=True, scale=None)
    step = Step(lambda o: torch.autograd.grad(o, (q, k, v), do), prepare=forward) if grad else Step(lambda _: forward())

    def of_call_with_table(*arguments: Any) -> Energy:
        measured = of_call(*arguments)
        agreement(f"{name} {direction}, a pass", measured)
        return measured

    monkeypatch.setattr(energy, "of_call", of_call_with_table)
    measured = of_step(step, sensors_of("cuda"), partial(synchronize, "cuda"))
    assert agreement(f"{name} {direction}", measured) <= APART
