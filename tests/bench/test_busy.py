"""Messages to a user while a sweep runs, on a busy machine, too: the load of others, progress, and the time left.

The time left is `lmsys.bench.results.time_left`, progress comes from `lmsys.bench.isolation`, and the load of other
programs from `lmsys.measure.host`. Clocks are moved by hand.
"""

import os
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lmsys.bench import Settings, Sweep
from lmsys.bench.isolation import POLL_S, QUIET_S, Isolated
from lmsys.bench.plugin import _ease_waiting
from lmsys.bench.results import Session, time_left
from lmsys.bench.watch import Heartbeat
from lmsys.doing import map_file, shared_file
from lmsys.measure import compare, host
from lmsys.measure.clock import CpuClock
from lmsys.measure.compare import interleave
from lmsys.measure.step import Step
from tests.bench.test_results import RECORD


class Hand:
    """A clock that moves by hand."""

    def __init__(self) -> None:
        self.now_s = 1e6

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("share", "before", "after"),
    [
        (None, None, None),
        (0.0, None, None),
        (host.BUSY, None, None),
        (0.75, None, "passive"),
        (0.75, "active", "active"),  # the user's own
    ],
)
def test_what_others_take_is_told_once_and_threads_then_sleep(
    share: float | None, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    environment = {"OMP_WAIT_POLICY": before} if before else {}
    monkeypatch.setattr("lmsys.bench.plugin.os", SimpleNamespace(environ=environment))
    _ease_waiting(lines.append, share)
    assert environment.get("OMP_WAIT_POLICY") == after
    assert ["other programs take 75% of its CPU" in line for line in lines] == [True] * (share == 0.75)


def test_the_share_of_others_is_of_the_time_that_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    before = host.Load(at_s=1.0, busy_s=10.0, own_s=5.0)
    loads = iter([before, host.Load(at_s=2.0, busy_s=10.0 + 0.8 * cores, own_s=5.2)])
    slept: list[float] = []
    monkeypatch.setattr(host, "load", lambda _: next(loads))
    monkeypatch.setattr(host.time, "sleep", slept.append)
    assert host.others_now() == pytest.approx((0.8 * cores - 0.2) / cores)
    assert slept[0] >= host.LEAST_LOAD_S  # over a shorter time no share is reported


SECONDS = st.lists(st.floats(1e-2, 1e3), min_size=1, max_size=12)
NOISE = st.floats(1 / 1.2, 1.2)  # a group's factor on another machine, beside the machine's own factor on all groups
LEFT = re.compile(r", about (\d+) (min|s) left")


def told_s(text: str) -> float:
    """The seconds that such a text says are left."""
    match = LEFT.fullmatch(text)
    assert match, text
    return float(match[1]) * (60 if match[2] == "min" else 1)


def assert_told(done: list[float], to_do: list[float], usual: list[float], cases: int = 1) -> None:
    """Once a tenth of the time has passed, the time left is right within a factor of 1.5.

    done   seconds that groups have taken
    to_do  seconds that the others will take
    usual  seconds of all groups in an earlier run
    cases  cases of each group
    """
    assume(sum(done) >= 0.1 * (sum(done) + sum(to_do)) and sum(to_do) >= 2)
    took = {str(at): seconds for at, seconds in enumerate(done)}
    count = {str(at): cases for at in range(len(done) + len(to_do))}
    text = time_left(took, count, {str(at): seconds for at, seconds in enumerate(usual)})
    assert 1 / 1.5 < told_s(text) / sum(to_do) < 1.5


@given(done=SECONDS, to_do=SECONDS, pace=st.floats(0.1, 30.0), cases=st.integers(1, 40), noises=st.data())
def test_what_is_left_is_right_on_a_machine_of_any_pace(
    done: list[float], to_do: list[float], pace: float, cases: int, noises: st.DataObject
) -> None:
    """It is computed from the seconds of the same groups on another machine, or on this one on another day."""
    noise = noises.draw(st.lists(NOISE, min_size=len(done) + len(to_do), max_size=len(done) + len(to_do)))
    true_s = [pace * factor * seconds for factor, seconds in zip(noise, [*done, *to_do], strict=True)]
    assert_told(true_s[: len(done)], true_s[len(done) :], [*done, *to_do], cases)


@given(done=SECONDS, to_do=SECONDS, pace=st.floats(0.1, 30.0), odd=st.floats(0.01, 100.0))
def test_a_group_that_compiled_elsewhere_and_not_here_does_not_tell_the_rest(
    done: list[float], to_do: list[float], pace: float, odd: float
) -> None:
    """Nor does a group that compiled here alone. This holds once two other groups have run."""
    assume(len(done) >= 3)
    true_s = [pace * seconds for seconds in [*done, *to_do]]
    assert_told([true_s[0] * odd, *true_s[1 : len(done)]], true_s[len(done) :], [*done, *to_do])


@given(cases=st.lists(st.integers(1, 40), min_size=2, max_size=12), case_s=st.floats(0.1, 100.0))
def test_without_an_earlier_run_the_rest_is_what_its_cases_have_cost(cases: list[int], case_s: float) -> None:
    """Groups cost as much a case as the one that has run. `time_left` then appends its last argument."""
    assume(case_s * sum(cases[1:]) >= 2)
    text = time_left({"0": cases[0] * case_s}, {str(at): one for at, one in enumerate(cases)}, {}, " in doubt")
    text, doubt, _ = text.partition(" in doubt")
    assert doubt and 1 / 1.5 < told_s(text) / (case_s * sum(cases[1:])) < 1.5


@pytest.mark.parametrize(
    ("took", "cases", "usual", "left"),
    [
        # Before anything is known, nothing is told.
        ({}, {"a": 1}, {}, ""),
        ({}, {"a": 1, "b": 1}, {"a": 1.0}, ""),
        ({}, {"a": 1, "b": 1}, {"a": 1.0, "b": 9.0}, ", about 10 s left"),
        # Group b is known: here it takes twice its usual 10 s. A group that never ran takes 3 s a case, as a did.
        ({"a": 6.0}, {"a": 2, "b": 5, "new": 4}, {"a": 3.0, "b": 10.0}, f", about {2 * 10 + 4 * 3} s left in doubt"),
        # The end is told in seconds.
        *(({}, {"a": 1}, {"a": s}, f", about {s:.0f} s left") for s in (90.0, 119.0, 149.0)),
        ({}, {"a": 1}, {"a": 151.0}, ", about 3 min left"),
        ({}, {"a": 1}, {"a": 400.0}, ", about 7 min left"),
    ],
)
def test_what_is_left_is_told_in_words(
    took: dict[str, float], cases: dict[str, int], usual: dict[str, float], left: str
) -> None:
    assert time_left(took, cases, usual, " in doubt") == left


def test_the_next_run_knows_what_groups_take(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hand()
    monkeypatch.setenv("LMSYS_CACHE_DIR", str(tmp_path / "not" / "there"))
    monkeypatch.setattr("lmsys.bench.results.time", SimpleNamespace(monotonic=clock))

    def lines(pace: float, took_s: dict[str, float] | None = None) -> list[str]:
        """The lines of a run of two groups of cases, a and b, which take `pace` and 100 * `pace` seconds."""

        def run(benchmark: object, cases: list[str]) -> Iterator[dict[str, Any]]:
            clock.now_s += pace * {"a": 1.0, "b": 100.0}[cases[0]]
            yield from (RECORD | {"id": f"{cases[0]}{number}"} for number in range(len(cases)))

        messages: list[str] = []
        session = Session(Settings(device="cpu"), Sweep(took_s=took_s or {}), say=messages.append)
        session.__dict__["runner"] = Mock(machine={}, run=run)
        session.benchmarks["attention"] = None  # type: ignore[assignment]
        session._groups |= {("attention", name): [name] * 2 for name in "ab"}
        for name in "ab":
            session._run(("attention", name))
        session.close()
        return [line.partition(" attention")[0].partition(":")[0] for line in messages]

    assert lines(1.0) == ["[1/2] a", "[2/2, about 1 s left if the rest costs as much a case] b"]
    assert lines(3.0) == ["[1/2, about 101 s left] a", "[2/2, about 5 min left] b"]
    (kept,) = (tmp_path / "not" / "there").iterdir()
    kept.write_text('{"attention a": "soon"}')  # a file that lmsys did not write
    assert lines(1.0)[0] == "[1/2] a"
    kept.unlink()
    elsewhere = {"attention a": 0.25, "attention b": 30.0}
    # By the seconds that the sweep brings from another machine: this one is 16 times as slow.
    assert lines(4.0, elsewhere) == ["[1/2] a", "[2/2, about 8 min left] b"]
    kept.write_text('{"attention a": 0.5}')  # seconds of this machine on another day
    assert lines(4.0, elsewhere) == ["[1/2, about 60 s left] a", "[2/2, about 8 min left] b"]
    kept.write_text('{"attention c": 0.5}')  # seconds of this machine, of no group that another machine has run
    assert lines(4.0, elsewhere)[0] == "[1/2] a"


def test_nobody_waits_in_silence_for_thirty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line names who is at work: a row, or the bench itself. The worker runs nothing, but its heart beats."""
    clock, file = Hand(), shared_file()
    monkeypatch.setattr("lmsys.bench.isolation.time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    told = [(clock.now_s, "")]
    isolated = Isolated(Settings(device="cpu"), lambda text: told.append((clock.now_s, text)))
    isolated._memory, isolated._most_bytes = map_file(file), float("inf")
    isolated.rows = [["first-fwd", "first-bwd"], ["second-fwd"]]
    heartbeat, worker = Heartbeat(file), Mock(pid=os.getpid())
    for at in range(int(100 / POLL_S)):
        clock.now_s += POLL_S
        # A beat now and then: of the first row, then of the second, then of the bench itself.
        if at % 7 == 0:
            heartbeat.beat(at // 300, "in its check", 600.0) if at < 600 else heartbeat.rest()
        isolated._look_at(worker)
    os.close(file)
    moments, (_, *lines) = zip(*told, strict=True)
    assert max(later - earlier for earlier, later in pairwise(moments)) < 30
    assert len(lines) == int(100 / (QUIET_S + POLL_S))
    assert lines[0] == "  at work: first-fwd, in its check" and "  at work: second-fwd, in its check" in lines
    assert lines[-1].startswith("  at work: the bench itself")


@pytest.mark.parametrize(("slower", "rounds"), [(1.0, 100), (1.9, 100), (10.0, 20), (1000.0, 10)])
def test_sampling_keeps_its_wall_time_where_the_machine_becomes_busy(
    slower: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling takes at most twice the time that first trials have promised, or that of the rounds a median needs.

    `expect` is called between trials and sampling, so calls become slower just then.
    """
    clock, pace = Hand(), [0.01]
    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("lmsys.measure.clock.perf_counter", clock)

    def run(_: Any) -> None:
        clock.now_s += pace[0]

    def becomes_slower(_: float) -> None:
        pace[0] *= slower

    sampled = interleave({"a": Step(run)}, CpuClock(), seconds=1.0, min_rounds=10, expect=becomes_slower)
    assert abs(len(sampled.samples["a"]) - rounds) <= 1
