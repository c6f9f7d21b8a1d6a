"""Cheating attention rows are recorded as wrong, without a time; honest rows are not.

A cheat is right while it is checked, and fast or wrong while it is timed. The tests run every cheat of
tests/support/cheats.py, in the bench's own process, and of tests/support/foreign_cheats.py, in processes of their own.
"""

import math
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.bench_attention import Attention, AttentionTest
from lmsys.attention import ATTENTION
from lmsys.bench import Entry, Failed, Settings, Traits, foreign
from lmsys.bench.guard import Guard
from tests.support import foreign_cheats, harness
from tests.support.cheats import CHEATS, forget
from tests.support.variants import few_by_default

SHAPE = {"cpu": (1, 4, 2, 200, 200, 32), "cuda": (2, 8, 4, 1024, 1024, 64)}  # (B, H, Hkv, Q, K, D)
SMALLER = (1, 2, 1, 100, 100, 32)  # the shape for Triton's interpreter, which takes seconds
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
DTYPES = "float32", "float16", "bfloat16"
WAYS = [  # parameters (name, direction) of all cheats
    pytest.param(name, direction, marks=[] if "cpu" in cheat.devices else [pytest.mark.gpu])
    for name, cheat in CHEATS.items()
    for direction in cheat.directions
]
IN_USUAL_DTYPE = [pytest.param(*way.values, "", marks=way.marks) for way in WAYS]
ROUGH = ("rough_when_timed", "fwd"), ("rough_gradients_when_timed", "bwd")
NARROW = [(*way, dtype) for way in ROUGH for dtype in ("float16", "bfloat16")]  # less precision is seen there, too
# The same of foreign cheats: every second one, the others with -m on_request. Those that are told by time need an idle
# machine, so that they are among the others.
FOREIGN_WAYS = [
    pytest.param(name, direction, marks=[pytest.mark.on_request] * (cheat.told_by_time or number % 2))
    for number, (name, cheat) in enumerate(foreign_cheats.CHEATS.items())
    for direction in cheat.directions
]


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """Empties what cheats remember, and puts back functions that they have replaced."""
    forget()
    guard = Guard()
    yield
    guard.mend()


def record_of(entry: Entry, direction: str, device: str, dtype: str = "", **settings: Any) -> dict[str, Any]:
    """The record of a row in one case; settings: those of `harness.records`."""
    shape = SMALLER if device == "cpu" and "triton" in entry.name else SHAPE[device]
    case = AttentionTest("cheats", entry, device, *shape, dtype or DTYPE[device], True, direction)
    by_row = harness.records(Attention(), [case], device=device, **({"seconds_per_row": 0.02} | settings))
    return by_row[entry.name]


def foreign_record(name: str, direction: str, device: str, **settings: Any) -> dict[str, Any]:
    """The record of a row of foreign_cheats.py, which runs in a process of its own."""
    row = foreign.Foreign.of(Settings(device=device), Entry(name, f"tests.support.foreign_cheats:{name}"))
    return record_of(row, direction, device, "float32", seconds_per_row=0.05, **settings)


def cheated(name: str, direction: str, device: str, **settings: Any) -> dict[str, Any]:
    """The record of a cheat; the test is skipped on devices where it cannot run."""
    if device not in CHEATS[name].devices:
        pytest.skip(f"{name} is a cheat on {CHEATS[name].devices[0]} alone")
    return record_of(Entry(name, f"tests.support.cheats:{name}"), direction, device, **settings)


def test_there_are_many_kinds_of_cheats() -> None:
    assert len(CHEATS) >= 20 and len({cheat.family for cheat in CHEATS.values()}) >= 8
    assert sum("cpu" in cheat.devices for cheat in CHEATS.values()) >= 20


@pytest.mark.parametrize("run", few_by_default(list(range(10)), one_in=10))
@pytest.mark.parametrize(("name", "direction", "dtype"), [*IN_USUAL_DTYPE, *NARROW])
def test_a_cheat_is_refused(name: str, direction: str, dtype: str, run: int, device: str) -> None:
    torch.manual_seed(run)
    record = cheated(name, direction, device, dtype=dtype)
    assert record["outcome"] == "wrong" and "time_s" not in record, record
    if dtype or (not CHEATS[name].seen_at_once and "allowed error" in record["reason"]):
        assert record["reason"].startswith("right before it was timed")


@pytest.mark.parametrize(("name", "direction"), WAYS)
def test_a_cheat_is_right_where_nothing_is_timed(name: str, direction: str, device: str) -> None:
    record = cheated(name, direction, device, timed=False)
    assert record["outcome"] == ("wrong" if CHEATS[name].seen_at_once else "ok"), record["reason"]


def honest() -> Iterator[Any]:
    """Parameters (row, dtype, direction). Of each row one combination always runs, the others with -m on_request."""
    for number, name in enumerate(["honest", *ATTENTION]):
        ways = list(product(DTYPES, ["fwd", "bwd", "fwdbwd"]))
        # Triton's interpreter does not compute in bfloat16.
        on_cpu = [way for way in ways if "triton" not in name or way[0] != "bfloat16"]
        always = on_cpu[4 * number % len(on_cpu)]
        # On a CPU, rows that compile take minutes; the smoke sweep runs them.
        on_gpus = name != "honest" and Traits.of(ATTENTION[name]).compiles
        for way in ways:
            marks = [pytest.mark.on_request] * (way != always) + [pytest.mark.gpu] * on_gpus
            yield pytest.param(name, *way, marks=marks)


@pytest.mark.parametrize(("name", "dtype", "direction"), [*honest()])
def test_an_honest_row_is_not_refused(name: str, dtype: str, direction: str, device: str) -> None:
    entry = Entry(name, "tests.support.cheats:honest") if name == "honest" else ATTENTION[name]
    record = record_of(entry, direction, device, dtype)
    assert record["outcome"] in ("ok", "unsupported"), record["reason"]


@pytest.mark.usefixtures("foreign_processes")
@pytest.mark.parametrize(("name", "direction"), FOREIGN_WAYS)
def test_a_foreign_cheat_is_refused(name: str, direction: str, device: str) -> None:
    cheat = foreign_cheats.CHEATS[name]
    if device == "cuda" and cheat.is_of_hosts:
        pytest.skip(f"{name} hides time of the host, and on a GPU the time is the device's")
    record = foreign_record(name, direction, device, min_rounds=16)
    assert record["outcome"] in ("wrong", "error") and "time_s" not in record, record
    assert cheat.is_told_in(record["reason"], device), record["reason"]


@pytest.mark.usefixtures("foreign_processes")
def test_a_foreign_row_that_lies_in_most_of_few_calls_gains_nothing(device: str) -> None:
    record = foreign_record("lies_in_most_of_its_calls", "fwd", device, min_rounds=10)
    assert record["outcome"] == "wrong" or record["time_s"] > foreign_cheats.SLOW_S, record


@pytest.mark.usefixtures("foreign_processes")
def test_an_honest_foreign_row_is_not_refused(device: str) -> None:
    for direction in ("fwd", "bwd", "fwdbwd"):
        record = foreign_record("honest", direction, device)
        assert record["outcome"] == "ok" and record["time_s"] > 0 and record["own_process"], record["reason"]


@pytest.mark.usefixtures("foreign_processes")
def test_honest_foreign_rows_that_take_turns_are_not_refused(device: str) -> None:
    """Both are measured beside the same process of `null`, which serves the steps of both."""
    rows = [
        foreign.Foreign.of(Settings(device=device), Entry(module, f"tests.support.{module}:honest"))
        for module in ("cheats", "foreign_cheats")
    ]
    cases = [AttentionTest("s", row, device, *SHAPE[device], "float32", True, "fwd") for row in rows]
    for record in harness.results(Attention(), cases, device=device, seconds_per_row=0.05):
        assert record["outcome"] == "ok" and record["own_process"], record["reason"]


@given(st.text() | st.booleans() | st.none() | st.integers() | st.floats(max_value=-1e-9) | st.floats(min_value=60))
@example(-1.0)
@example(math.nan)
@example("1e-9")
@example(True)
@example(60.0)
def test_what_is_no_time_is_not_believed(said: Any) -> None:
    """A row's process says how long a call took: a float, neither below 0 nor above the time that has passed."""
    row = foreign.Process(Entry("row", "nowhere:row"), Settings())
    row.ask = lambda *_, **__: {"took_s": said}  # type: ignore[method-assign]
    blocks = {"inputs": SimpleNamespace(fill=lambda _: None)}
    with pytest.raises(Failed, match="says that a call took"):
        row._timed_call(row, blocks, {"inputs": {}}, None, "inference")
