"""Cheating attention rows (tests/support/cheats.py) are recorded as wrong, without a time; honest rows are not.

A cheat is right while it is checked, and fast or wrong while it is timed. The tests run every cheat in CHEATS.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from benchmarks.bench_attention import Attention, AttentionTest
from lmsys.attention import ATTENTION
from lmsys.bench import Entry, Traits
from lmsys.bench.guard import Guard
from tests.support import harness
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
    by_row = harness.records(Attention(), [case], device=device, seconds_per_row=0.02, **settings)
    return by_row[entry.name]


def cheated(name: str, direction: str, device: str, **settings: Any) -> dict[str, Any]:
    """The record of a cheat; the test is skipped on devices where it cannot run."""
    if device not in CHEATS[name].devices:
        pytest.skip(f"{name} is a cheat on {CHEATS[name].devices[0]} alone")
    return record_of(Entry(name, f"tests.support.cheats:{name}"), direction, device, **settings)


def test_there_are_many_kinds_of_cheats() -> None:
    assert len(CHEATS) >= 20 and len({cheat.family for cheat in CHEATS.values()}) >= 8
    assert sum("cpu" in cheat.devices for cheat in CHEATS.values()) >= 20


@pytest.mark.parametrize("run", few_by_default(list(range(10)), one_in=10))
@pytest.mark.parametrize(("name", "direction"), WAYS)
def test_a_cheat_is_refused(name: str, direction: str, run: int, device: str) -> None:
    torch.manual_seed(run)
    record = cheated(name, direction, device)
    assert record["outcome"] == "wrong" and "time_s" not in record, record
    if not CHEATS[name].seen_at_once and "allowed error" in record["reason"]:
        assert record["reason"].startswith("right before it was timed")


@pytest.mark.parametrize(("name", "direction"), WAYS)
def test_a_cheat_is_right_where_nothing_is_timed(name: str, direction: str, device: str) -> None:
    record = cheated(name, direction, device, timed=False)
    assert record["outcome"] == ("wrong" if CHEATS[name].seen_at_once else "ok"), record["reason"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("name", "direction"), [("rough_when_timed", "fwd"), ("rough_gradients_when_timed", "bwd")])
def test_less_precision_is_seen_in_narrow_dtypes_too(name: str, direction: str, dtype: str, device: str) -> None:
    record = cheated(name, direction, device, dtype=dtype)
    assert record["outcome"] == "wrong" and record["reason"].startswith("right before it was timed")


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
