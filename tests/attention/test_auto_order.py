"""The order of `impl="auto"`, held to what was measured: the committed runs on Hopper, and a table of small shapes."""

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
CLASSES = sorted((RESULTS / "auto").glob("*.json"))
BEHIND = 1.02  # the most that auto's row may take of the time of the best
TORCH = ("sdpa", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "flex", "varlen_attn")
HOPPER = {"device": "cuda", "capability": (9, 0)}


def contends(row: str, case: AttentionCase) -> bool:
    """A row of ours or of torch's; where keys are hidden one that keeps them apart itself, since runs time it alone."""
    if row not in ATTENTION or (ATTENTION[row].peer and row not in TORCH):
        return False
    return AttentionTraits.of(ATTENTION[row]).isolates or not case.options.keys() - {"softcap", "offset"}


def case_of(record: dict[str, Any]) -> AttentionCase:
    """The case as attention() makes it of a call."""
    names = "batch", "heads", "kv_heads", "queries", "keys", "head_dim", "dtype", "causal"
    given = {name: record[name] for name in OPTIONS if record.get(name)}
    given |= {name: True for name in ("documents", "key_lengths", "mask") if name in given}
    values = {name: record[name] for name in names}
    if given.get("offset", 0) >= record["keys"] - 1:  # it hides nothing
        values["causal"] = given.pop("offset") is None
    return AttentionCase(**values, **given, grad=record["direction"] != "fwd", **HOPPER)


def cells() -> Iterator[Any]:
    """Each shape of the committed runs, of a machine's latest run that has it: its case, and seconds by row."""
    latest: dict[tuple[str, str], tuple[str, AttentionCase, dict[str, float | None]]] = {}
    for path in PUBLISHED:
        found = json.loads(read_text(path))["lmsys"]
        for record in found["records"]:
            if record.get("benchmark") != "attention" or record["device"] != "cuda" or record.get("memory_limit_bytes"):
                continue
            cell, _, date = record["comparison"].partition(" ")
            key = found["machine"]["gpu"], cell
            if key not in latest or latest[key][0] < date:
                latest[key] = date, case_of(record), {}
            if latest[key][0] == date:
                latest[key][2][record["impl"]] = record.get("time_s") if record["outcome"] == "ok" else None
    for (gpu, cell), (_, case, times) in sorted(latest.items()):
        yield pytest.param(case, times, id=f"{gpu} {cell}")


def classes() -> Iterator[Any]:
    """Shapes of the table, whose times are of calls of attention() that a CUDA graph replays."""
    for path in CLASSES:
        for one in json.loads(path.read_text())["cells"]:
            case = AttentionCase(**one["case"], **HOPPER)
            yield pytest.param(case, one["time_s"], id=f"{path.stem} {case}")


@pytest.mark.parametrize(("case", "times"), [*cells(), *classes()])
def test_auto_is_nowhere_behind_the_best_row(case: AttentionCase, times: dict[str, float | None]) -> None:
    order = iter(ATTENTION.auto(case))
    picked = next(row for row in order if times.get(row, 0) is not None)  # others cannot run it
    if picked not in times:
        pytest.skip(f"{picked} was not timed in this shape")
    best = min((time, row) for row, time in times.items() if time is not None and contends(row, case))
    assert times[picked] <= BEHIND * best[0], f"{picked}, not {best[1]}"
