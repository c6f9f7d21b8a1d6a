"""No row that cheats gets a figure, in any run; and no honest one is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.bench_attention import Attention, AttentionTest
from lmsys.attention import ATTENTION
from lmsys.bench import Entry
from lmsys.bench.guard import Guard
from tests.support import harness
from tests.support.cheats import CHEATS
from tests.support.variants import some

SHAPE = {"cpu": (1, 4, 2, 200, 200, 32), "cuda": (2, 8, 4, 1024, 1024, 64)}
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
WAYS = [(name, direction) for name, one in CHEATS.items() for direction in one.directions]


@pytest.fixture(autouse=True)
def leave_no_patch() -> Iterator[None]:
    guard = Guard()
    yield
    guard.mend()


def record_of(entry: Entry, direction: str, device: str, dtype: str = "") -> dict[str, Any]:
    case = AttentionTest("cheats", entry, device, *SHAPE[device], dtype or DTYPE[device], True, direction)
    found = harness.records(Attention(), [case], device=device, seconds_per_row=0.02)
    return found[entry.name]


def test_there_are_enough_of_them() -> None:
    assert len(CHEATS) >= 20 and len({one.family for one in CHEATS.values()}) >= 8
    assert sum("cpu" in one.devices for one in CHEATS.values()) >= 20


@pytest.mark.parametrize("run", some(list(range(10)), one_in=10))
@pytest.mark.parametrize(("name", "direction"), WAYS)
def test_a_cheat_is_refused(name: str, direction: str, run: int, device: str) -> None:
    if device not in CHEATS[name].devices:
        pytest.skip(f"{name} is a cheat on {CHEATS[name].devices[0]} alone")
    torch.manual_seed(run)
    found = record_of(Entry(name, f"tests.support.cheats:{name}"), direction, device)
    assert found["outcome"] in ("wrong", "error") and "time_s" not in found, found


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwdbwd"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["honest", *ATTENTION])
def test_an_honest_row_is_not(name: str, dtype: str, direction: str, device: str) -> None:
    entry = Entry(name, "tests.support.cheats:honest") if name == "honest" else ATTENTION[name]
    if device == "cpu" and entry.trait("compiles", False):
        pytest.skip("on a CPU what is compiled takes minutes; the sweep has it")
    found = record_of(entry, direction, device, dtype)
    assert found["outcome"] in ("ok", "unsupported"), found["reason"]
