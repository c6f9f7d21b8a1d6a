"""A busy machine: it is noticed and told, nobody waits in silence, and what is left is told rightly."""

import os
import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lmsys.bench import Settings
from lmsys.bench.isolation import POLL_S, QUIET_S, Isolated
from lmsys.bench.plugin import _ease_waiting
from lmsys.bench.results import Session, time_left
from lmsys.bench.watch import Heartbeat
from lmsys.doing import map_file, shared_file
from lmsys.measure import compare, host
from lmsys.measure.clock import CpuClock
from lmsys.measure.compare import interleave
from lmsys.measure.step import Step
from tests.bench.test_results import ONE, Result


class Hand:
    """A clock that moves by hand."""

    def __init__(self) -> None:
        self.now_s = 1e6

    def __call__(self) -> float:
        return self.now_s


def test_what_others_take_is_told_once_and_threads_then_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    for share in (None, 0.0, host.BUSY):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        _ease_waiting(lambda text: pytest.fail(text), share)
        assert "OMP_WAIT_POLICY" not in os.environ
    said: list[str] = []
    _ease_waiting(said.append, 0.75)
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert len(said) == 1 and "other programs take 75% of its CPU" in said[0]
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    _ease_waiting(said.append, 0.75)
    assert os.environ["OMP_WAIT_POLICY"] == "active"  # the user's own


def test_the_share_of_others_is_of_the_time_that_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    loads = iter([host.Load(1.0, 10.0, 5.0, frozenset()), host.Load(2.0, 10.0 + 0.8 * cores, 5.2, frozenset())])
    slept: list[float] = []
    monkeypatch.setattr(host, "load", lambda _: next(loads))
    monkeypatch.setattr(host.time, "sleep", slept.append)
    assert host.others_now() == pytest.approx((0.8 * cores - 0.2) / cores)
    assert slept[0] >= host.LEAST_LOAD_S  # for less it is not told


SECONDS = st.lists(st.floats(1e-2, 1e3), min_size=1, max_size=12)
LEFT = re.compile(r", about (\d+) (min|s) left")


def told_s(text: str) -> float:
    found = LEFT.fullmatch(text)
    assert found, text
    return float(found[1]) * (60 if found[2] == "min" else 1)


@given(done=SECONDS, to_do=SECONDS, pace=st.floats(0.1, 30.0), cases=st.integers(1, 40))
def test_on_a_steady_machine_what_is_left_is_right(
    done: list[float], to_do: list[float], pace: float, cases: int
) -> None:
    """Where groups have run before here, at whatever pace, and a tenth of the work is done: within a factor of 1.5."""
    assume(sum(done) >= 0.1 * (sum(done) + sum(to_do)) and pace * sum(to_do) >= 2)
    usual = {str(at): seconds for at, seconds in enumerate([*done, *to_do])}
    names = [*usual]
    took = {name: (pace * usual[name], cases) for name in names[: len(done)]}
    text = time_left(took, dict.fromkeys(names[len(done) :], cases), usual)
    assert 1 / 1.5 < told_s(text) / (pace * sum(to_do)) < 1.5


@given(cases=st.lists(st.integers(1, 40), min_size=2, max_size=12), case_s=st.floats(0.1, 100.0))
def test_without_an_earlier_run_the_rest_is_what_its_cases_have_cost(cases: list[int], case_s: float) -> None:
    first, *rest = cases
    assume(case_s * sum(rest) >= 2)
    text = time_left({"0": (first * case_s, first)}, {str(1 + at): one for at, one in enumerate(rest)}, {}, " in doubt")
    text, said, _ = text.partition(" in doubt")
    assert said and 1 / 1.5 < told_s(text) / (case_s * sum(rest)) < 1.5


def test_before_anything_is_known_nothing_is_told() -> None:
    assert time_left({}, {"a": 1}, {}) == "" and time_left({}, {"a": 1, "b": 1}, {"a": 1.0}) == ""
    assert time_left({}, {"a": 1, "b": 1}, {"a": 1.0, "b": 9.0}) == ", about 10 s left"


class Slow:
    """A runner whose groups take so many seconds of a clock that is moved by hand."""

    machine: dict[str, Any] = {}

    def __init__(self, clock: Hand, seconds: dict[str, float]):
        self.clock, self.seconds = clock, seconds

    def ready(self) -> None: ...

    def close(self) -> None: ...

    def run(self, benchmark: object, cases: list[str]) -> Iterator[Result]:
        self.clock.now_s += self.seconds[cases[0]]
        yield from (Result(ONE | {"id": f"{cases[0]}{number}"}, [1.0]) for number in range(len(cases)))


def test_the_next_run_knows_what_groups_take(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hand()
    monkeypatch.setenv("LMSYS_CACHE_DIR", str(tmp_path / "not" / "there"))
    monkeypatch.setattr("lmsys.bench.results.time", SimpleNamespace(monotonic=clock))

    def lines(pace: float) -> list[str]:
        said: list[str] = []
        session = Session(Settings(device="cpu"), say=said.append)
        session.__dict__["runner"] = Slow(clock, {"a": 1.0 * pace, "b": 100.0 * pace})
        session.benchmarks["attention"] = None  # type: ignore[assignment]
        session._groups |= {("attention", name): [name] * 2 for name in "ab"}
        for name in "ab":
            session._run(("attention", name))
        session.close()
        return [line.partition(" attention")[0].partition(":")[0] for line in said]

    assert lines(1.0) == ["[1/2] a", "[2/2, about 1 s left if the rest costs as much a case] b"]
    assert lines(3.0) == ["[1/2, about 2 min left] a", "[2/2, about 5 min left] b"]
    (kept,) = (tmp_path / "not" / "there").iterdir()
    kept.write_text('{"attention a": "soon"}')  # as nobody wrote it
    assert lines(1.0)[0] == "[1/2] a"


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Isolated, Hand, Heartbeat, list[str]]]:
    """A worker's parent whose clock is moved by hand, and the heartbeat of a worker that runs nothing."""
    said: list[str] = []
    clock, file = Hand(), shared_file()
    monkeypatch.setattr("lmsys.bench.isolation.time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    found = Isolated(Settings(device="cpu"), said.append)
    found._memory, found._most_bytes = map_file(file), float("inf")
    yield found, clock, Heartbeat(file), said
    os.close(file)


def test_nobody_waits_in_silence_for_thirty_seconds(watched: tuple[Isolated, Hand, Heartbeat, list[str]]) -> None:
    """Whoever is at work is told, whichever row, and so is the bench itself."""
    isolated, clock, heartbeat, said = watched
    isolated.rows = [["first-fwd", "first-bwd"], ["second-fwd"]]
    worker: Any = SimpleNamespace(pid=os.getpid())
    lines_at = [clock.now_s]
    tell: Callable[[str], None] = isolated._say
    isolated._say = lambda text: (lines_at.append(clock.now_s), tell(text))[1]
    for at in range(int(100 / POLL_S)):
        clock.now_s += POLL_S
        if at % 7 == 0:
            heartbeat.beat(at // 300, "in its check", 600.0) if at < 600 else heartbeat.rest()
        isolated._look_at(worker, 0.0)
    assert max(later - earlier for earlier, later in zip(lines_at, lines_at[1:], strict=False)) < 30
    assert len(said) == int(100 / (QUIET_S + POLL_S))
    assert said[0] == "  at work: first-fwd, in its check" and "  at work: second-fwd, in its check" in said
    assert said[-1].startswith("  at work: the bench itself")


@pytest.mark.parametrize(("slower", "rounds"), [(1.0, 100), (1.9, 100), (10.0, 20), (1000.0, 10)])
def test_sampling_keeps_its_wall_time_where_the_machine_becomes_busy(
    slower: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most twice what trials have promised, but for the rounds that a median needs."""
    clock, pace = Hand(), [0.01]
    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("lmsys.measure.clock.perf_counter", clock)

    def run(_: Any) -> None:
        clock.now_s += pace[0]

    def grows(_: float) -> None:
        pace[0] *= slower

    sampled = interleave({"a": Step(run)}, CpuClock(), seconds=1.0, min_rounds=10, expect=grows)
    assert abs(len(sampled.samples["a"]) - rounds) <= 1
