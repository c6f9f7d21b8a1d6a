"""`impl="auto"` takes a row that is within 2 % of the fastest one in every measured shape.

A row is an implementation of attention. The measurements are the committed runs on Hopper, and tables of small shapes
in reports/results/auto. If a test fails after new measurements, change FASTER in `lmsys/attention/auto.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmsys.attention import ATTENTION, AttentionCase
from lmsys.attention.pattern import OPTIONS
from lmsys.files import read_text
from lmsys.traits import AttentionTraits

RESULTS = Path(__file__).parents[2] / "reports" / "results"
PUBLISHED = [*RESULTS.glob("*.json.gz"), *(RESULTS / "h100").glob("*.json.gz")]
CLASSES = sorted((RESULTS / "auto").glob("*.json"))  # the tables of small shapes
BEHIND = 1.02  # the time of auto's row over that of the fastest row is at most this
TORCH = ("sdpa", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "flex", "varlen_attn")
HOPPER = {"device": "cuda", "capability": (9, 0)}


def contends(row: str, case: AttentionCase) -> bool:
    """True for rows that "auto" is compared with: ours and torch's.

    If options hide keys, only rows with the trait `isolates` count: runs time the other rows without the work that
    `attention` adds to them (`hidden.py`). Runs before 2026-11-30 time `flash_gluon` without the kernels that look for
    NaN behind its own, one in the forward and two in the backward.
    """
    if row not in ATTENTION or (ATTENTION[row].peer and row not in TORCH):
        return False
    return AttentionTraits.of(ATTENTION[row]).isolates or not case.options.keys() - {"softcap", "offset"}


def case_of(record: dict[str, Any]) -> AttentionCase:
    """The case that attention() would make of the call of a record."""
    names = "batch", "heads", "kv_heads", "queries", "keys", "head_dim", "dtype", "causal"
    given = {name: record[name] for name in OPTIONS if record.get(name)}
    given |= {name: True for name in ("documents", "key_lengths", "mask") if name in given}
    values = {name: record[name] for name in names}
    if given.get("offset", 0) >= record["keys"] - 1:  # it hides nothing
        values["causal"] = given.pop("offset") is None
    return AttentionCase(**values, **given, grad=record["direction"] != "fwd", **HOPPER)


def cells() -> Iterator[Any]:
    """(case, seconds by row) for each machine and shape, from the latest committed run that has it.

    A case with options and gradients has the time of both passes, as a row that auto picks runs both.
    """
    latest: dict[tuple[str, str], tuple[str, AttentionCase, dict[str, float | None]]] = {}
    for path in PUBLISHED:
        content = json.loads(read_text(path))["lmsys"]
        for record in content["records"]:
            if record.get("benchmark") != "attention" or record["device"] != "cuda" or record.get("memory_limit_bytes"):
                continue
            cell, _, date = record["comparison"].partition(" ")
            key = content["machine"]["gpu"], cell
            if key not in latest or latest[key][0] < date:
                latest[key] = date, case_of(record), {}
            if latest[key][0] == date:
                latest[key][2][record["impl"]] = record.get("time_s") if record["outcome"] == "ok" else None
    for (gpu, cell), (date, case, times) in sorted(latest.items()):
        before, _, forward = latest.get((gpu, cell.replace("-bwd", "-fwd")), ("", case, {}))
        if case.options and case.grad and before[:10] == date[:10] and forward.keys() >= times.keys():
            pairs = {row: (time, forward[row]) for row, time in times.items()}
            times = {row: None if None in pair else sum(pair) for row, pair in pairs.items()}
        yield pytest.param(case, times, id=f"{gpu} {cell}")


def classes() -> Iterator[Any]:
    """(case, seconds by row) for each shape of the tables, whose calls were replayed by a CUDA graph."""
    for path in CLASSES:
        for cell in json.loads(path.read_text())["cells"]:
            case = AttentionCase(**cell["case"], **HOPPER)
            yield pytest.param(case, cell["time_s"], id=f"{path.stem} {case}")


@pytest.mark.parametrize(("case", "times"), [*cells(), *classes()])
def test_auto_is_never_behind_the_best_row(case: AttentionCase, times: dict[str, float | None]) -> None:
    order = iter(ATTENTION.auto(case))
    picked = next(row for row in order if times.get(row, 0) is not None)  # None: it cannot run this
    if picked not in times:
        pytest.skip(f"{picked} was not timed in this shape")
    best = min((time, row) for row, time in times.items() if time is not None and contends(row, case))
    assert times[picked] <= BEHIND * best[0], f"{picked}, not {best[1]}"
