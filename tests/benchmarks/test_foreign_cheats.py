"""Rows that cheat in a process of their own are recorded as wrong, without a time; honest ones are not.

The cheats are those of tests/support/foreign_cheats.py.
"""

from typing import Any

import pytest

from benchmarks.bench_attention import Attention, AttentionTest
from lmsys.bench import Entry, Settings, foreign
from tests.support import harness
from tests.support.foreign_cheats import CHEATS

pytestmark = pytest.mark.usefixtures("foreign_processes")
SHAPE = {"cpu": (1, 4, 2, 100, 100, 32), "cuda": (2, 8, 4, 1024, 1024, 64)}
WAYS = [  # cheats that are told by time need an idle machine: python -m pytest -m on_request
    pytest.param(name, direction, marks=[pytest.mark.on_request] * cheat.told_by_time)
    for name, cheat in CHEATS.items()
    for direction in cheat.directions
]


def record_of(name: str, direction: str, device: str, **settings: Any) -> dict[str, Any]:
    """The record of a row of foreign_cheats.py in one case."""
    entry = Entry(name, f"tests.support.foreign_cheats:{name}")
    row = foreign.Foreign.of(Settings(device=device), entry)
    case = AttentionTest("cheats", row, device, *SHAPE[device], "float32", True, direction)
    return harness.records(Attention(), [case], device=device, seconds_per_row=0.05, **settings)[name]


@pytest.mark.parametrize(("name", "direction"), WAYS)
def test_a_cheat_is_refused(name: str, direction: str, device: str) -> None:
    record = record_of(name, direction, device, min_rounds=16)
    assert record["outcome"] in ("wrong", "error") and "time_s" not in record, record
    assert CHEATS[name].told in record["reason"], record["reason"]


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwdbwd"])
def test_an_honest_row_is_not_refused(direction: str, device: str) -> None:
    record = record_of("honest", direction, device)
    assert record["outcome"] == "ok" and record["time_s"] > 0 and record["own_process"], record["reason"]
