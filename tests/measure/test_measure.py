"""The parts of a measurement (lmsys/measure), on functions whose cost is known.

In this order: `interleave`, which times several steps in turns; outcomes of a call that fails; and the clock of a GPU.
"""

import itertools
import math
import statistics
import time
from unittest.mock import Mock

import pytest
import torch

from lmsys.attention import attention
from lmsys.measure import compare
from lmsys.measure.clock import CpuClock, clock_of
from lmsys.measure.compare import MOST_LOOKS, Step, attempt, interleave
from lmsys.measure.step import Failed


def test_rows_take_turns_and_prepare_is_not_timed() -> None:
    order: list[str] = []

    def row(name: str, duration: float) -> Step:
        def prepare() -> str:
            time.sleep(0.01)
            return name

        def run(prepared: str) -> None:
            order.append(prepared)
            time.sleep(duration)

        return Step(run, prepare)

    sampled = interleave({"a": row("a", 0.001), "b": row("b", 0.002)}, CpuClock(), seconds=0, min_rounds=12)
    assert {name: len(samples) for name, samples in sampled.samples.items()} == {"a": 12, "b": 12}
    rounds = list(zip(order[-24::2], order[-23::2], strict=True))
    assert set(rounds) == {("a", "b"), ("b", "a")}
    assert 0.001 <= min(sampled.samples["a"]) < 0.009
    assert 0.002 <= min(sampled.samples["b"]) < 0.009
    assert not sampled.failures


@pytest.mark.parametrize(("own_s", "refused"), [(0.0, False), (0.02, True)])
def test_a_prepare_is_held_against_its_like_in_the_same_place(own_s: float, refused: bool) -> None:
    """A prepare is refused where it takes far longer than the step's `like`; both are timed right after a run.

    A backward leaves spinning threads, which slow down whatever comes next. `forward` imitates that: it takes 10 ms
    longer right after a run. A prepare that is just such a forward must pass; one that takes 20 ms more must not.
    """
    wait_s = 0.0

    def run(_: None) -> None:
        nonlocal wait_s
        wait_s = 0.01

    def forward() -> None:
        nonlocal wait_s
        time.sleep(wait_s)
        wait_s = 0.0

    def prepare() -> None:
        forward()
        time.sleep(own_s)

    sampled = interleave({"a": Step(run, prepare, like=forward)}, CpuClock(), seconds=0, min_rounds=3)
    assert {name: outcome for name, (outcome, _) in sampled.failures.items()} == ({"a": "wrong"} if refused else {})


def test_of_rows_with_a_single_round_that_is_kept() -> None:
    """The result of the only timed round is kept, although rounds are kept at random."""
    step = Step(lambda _: "result", keep=lambda result, key: None if key is None else result)
    (kept,) = interleave({"a": step}, CpuClock(), seconds=0, min_rounds=1).kept["a"]
    assert (kept.index, kept.result) == (0, "result")


def test_a_slow_row_stops_early_and_a_failing_one_takes_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise, on a busy machine, the quick row might get no more rounds than the slow one.
    monkeypatch.setattr(compare, "MOST_OF_EXPECTED", math.inf)
    fails_later = Mock(side_effect=[*range(7), MemoryError("no more")])
    steps = {"quick": Step(lambda _: None), "slow": Step(lambda _: time.sleep(0.01)), "fails": Step(fails_later)}
    sampled = interleave(steps, CpuClock(), seconds=0.1, min_rounds=10)
    assert sampled.failures == {"fails": ("oom", "no more")}
    assert len(sampled.samples["slow"]) == 10 < len(sampled.samples["quick"])
    assert sampled.samples.keys() == {"quick", "slow"}


def test_rows_that_all_fail_end_at_once_also_on_a_clock_that_warms() -> None:
    class Warming(CpuClock):
        warm_s = 0.1

    for calls in (0, 6):
        fails = Mock(side_effect=[*range(calls), TypeError("no such kernel")])
        assert interleave({"a": Step(fails)}, Warming(), seconds=1, min_rounds=10).failures.keys() == {"a"}
    warmed = interleave({"a": Step(lambda _: time.sleep(0.01))}, Warming(), seconds=0, min_rounds=10)
    assert len(warmed.samples["a"]) == 10


@pytest.mark.parametrize("rounds", [1, 12, 20, 21, 70])
def test_looks_are_between_rounds_and_not_too_many(rounds: int) -> None:
    numbers = itertools.count()
    step = Step(lambda _: None)
    sampled = interleave({"a": step}, CpuClock(), seconds=0, min_rounds=rounds, look=lambda: next(numbers))
    assert min(rounds, MOST_LOOKS) / 2 <= len(sampled.looks) <= MOST_LOOKS
    assert sampled.looks == [*range(1, next(numbers))]  # number 0 was called before, to measure what a look costs


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (RuntimeError("shapes differ\nand more"), "error"),
        (ValueError(), "error"),
        # What would make a file of results unreadable, or a terminal do something.
        (RuntimeError("x" * 20_000), "error"),
        (RuntimeError("half of a character: \ud800"), "error"),
        (Failed("wrong", "x" * 20_000 + "\ud800"), "wrong"),
        (Failed("wrong", "red: \x1b[31m\nand more"), "wrong"),
    ],
)
def test_running_out_of_memory_is_an_outcome_of_its_own(error: Exception, outcome: str) -> None:
    result, (kind, reason) = attempt(Mock(side_effect=error))
    assert result is None and kind == outcome
    assert reason and reason.isprintable() and len(reason) < 1000


def test_an_interrupt_is_not_an_outcome() -> None:
    with pytest.raises(KeyboardInterrupt):
        attempt(Mock(side_effect=KeyboardInterrupt))


@pytest.mark.gpu
def test_only_the_clock_of_a_loop_counts_the_host() -> None:
    """With `ahead`, the host launches before the device begins, and its 10 ms are not counted; in a loop they are."""
    x, order = torch.zeros(2**20, device="cuda"), []

    def slow(_: object) -> None:
        order.append("run")
        time.sleep(0.01)
        x.add_(1)

    step = Step(slow, prepare=lambda: order.append("prepare"), before=lambda: order.append("before"))
    alone, in_a_loop = (
        interleave({"x": step}, clock_of("cuda", ahead=ahead), seconds=0, min_rounds=10).samples["x"]
        for ahead in (True, False)
    )
    assert max(alone) < 0.001 and min(in_a_loop) >= 0.01
    looped = order[order.index("before") :]
    assert looped == ["before", "prepare", "run"] * (len(looped) // 3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "heads", "length"), [("flash_triton", 64, 8192), ("flash_triton", 16, 16384), ("sdpa_flash", 16, 8192)]
)
@pytest.mark.parametrize("direction", ["fwd", "fwdbwd"])
def test_the_device_clock_agrees_with_triton(
    name: str, heads: int, length: int, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our clock and Triton's do_bench take turns, five times each; their medians must agree to 3 %.

    The attention takes 0.2 ms or more, and longer than its launch. do_bench launches a call while the one before runs,
    so where the host is slower than the device it also measures the gaps between calls, which our clock does not.
    """
    from triton.testing import do_bench

    monkeypatch.undo()  # the fixtures of tests/conftest.py: poisoning memory and trying tiles would be timed, too
    q, k, v, do = torch.randn(4, 1, heads, length, 64, device="cuda", dtype=torch.bfloat16)
    leaves = [x.requires_grad_(direction == "fwdbwd") for x in (q, k, v)]

    def call() -> object:
        o = attention(*leaves, causal=True, impl=name)
        return torch.autograd.grad(o, leaves, do) if direction == "fwdbwd" else o

    clock = clock_of("cuda")
    costs = [clock.cost(call, 0.02) for _ in range(5)]
    assert min(cost.device_s for cost in costs) > 2e-4, "too short a call to compare clocks by"
    assert min(cost.host_s for cost in costs) < costs[-1].device_s, "a host too slow to compare clocks by"
    ours, theirs = [], []
    for _ in range(5):
        sampled = interleave({name: Step(lambda _: call())}, clock, seconds=0.2, min_rounds=20)
        ours.append(statistics.median(sampled.samples[name]))
        theirs.append(do_bench(call, warmup=100, rep=200, return_mode="median") / 1e3)
    assert statistics.median(ours) == pytest.approx(statistics.median(theirs), rel=0.03)
