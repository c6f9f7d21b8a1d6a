"""Result files for tests of `lmsys verify` and `lmsys leaderboard`: honest ones, and changes that a forger may make.

`h200` has the content of an honest file. A change is a place in it, such as (*RECORD, "time_s"), with what stands there
instead: a value, REMOVED, `CopyOf` another place, or a function of what stands there (`times`, `picked`). `changed`
makes a forged file of several changes, and `seal_again` gives it new seals. A seal is a digest that a record or the
file has of its content.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from lmsys.bench.record import others_seal, seal

RESULT = Path(__file__).parents[1] / "data" / "attention_h200.json"  # eight cases of a run on an H200
FORWARD, OTHER_FORWARD, BACKWARD = 0, 1, 7  # the places of three of them: two rows of one shape, and a backward
FLASH = 4, 5, 6  # the cases of its section "flash"
Content = dict[str, Any]
Place = tuple[str | int, ...]
Change = tuple[Place, Any]

OURS = ("lmsys",)
RECORDS = (*OURS, "records")
RECORD, OTHER_RECORD, LAST_RECORD = (*RECORDS, 0), (*RECORDS, 1), (*RECORDS, -1)
SAMPLES, CALLS = (*RECORD, "samples_s"), (*RECORD, "proof", "calls")
CALL, OTHER_CALL = (*CALLS, 0), (*CALLS, 1)
PARTS = (*CALL, "parts")
PART = (*PARTS, 0)
STATISTICS = "mean_s", "std_s", "p20_s", "p80_s", "min_s", "time_s"
RATES = "flops_per_s", "bytes_per_s", "matmul_ceiling_fraction", "copy_ceiling_fraction"
REMOVED = object()


@dataclass(frozen=True)
class CopyOf:
    """Stands for a copy of what the honest file has at another place."""

    place: Place


def times(factor: float) -> Callable[[Any], Any]:
    """A change of a number, or of all numbers of a list, by a factor."""

    def scaled(old: Any) -> Any:
        return [factor * number for number in old] if isinstance(old, list) else factor * old

    return scaled


def picked(*places: int) -> Callable[[list[Any]], list[Any]]:
    """A change of a list, of which the items at these places are left, in this order."""

    def of(old: list[Any]) -> list[Any]:
        return [copy.deepcopy(old[place]) for place in places]

    return of


def scaled_alike(factor: float) -> list[Change]:
    """Changes after which the first record's times are so many times as long, and nothing contradicts anything."""
    return [
        *(((*RECORD, name), times(factor)) for name in (*STATISTICS, "samples_s")),
        *(((*RECORD, name), times(1 / factor)) for name in RATES),
    ]


def at(content: Content, place: Place) -> Any:
    """The value at a place."""
    return reduce(getitem, place, content)  # type: ignore[arg-type]


def changed(content: Content, *changes: Change) -> Content:
    """A copy of a file's content after these changes. Its seals are those of the honest file."""
    result = copy.deepcopy(content)
    for (*path, last), change in changes:
        holder = at(result, tuple(path))
        if change is REMOVED:
            del holder[last]
        elif isinstance(change, CopyOf):
            holder[last] = copy.deepcopy(at(content, change.place))
        else:
            holder[last] = change(holder[last]) if callable(change) else copy.deepcopy(change)
    return result


def h200(*places: int, num_calls: int = 2) -> Content:
    """The sealed content of a file with these cases of RESULT, each with so many checked calls."""
    content: Content = json.loads(RESULT.read_text())
    ours = content["lmsys"]
    ours["records"] = [ours["records"][place] for place in places]
    for record in ours["records"]:
        del record["proof"]["calls"][num_calls:]
    content["benchmarks"] = [entry(content, record) for record in ours["records"]]
    content |= {"machine_info": {"processor": "x86_64"}, "commit_info": {"id": "1" * 40}}
    return seal_again(content)


def entry(content: Content, record: Content) -> Content:
    """pytest-benchmark's entry of a record."""
    (found,) = (timing for timing in content["benchmarks"] if timing["extra_info"]["id"] == record["id"])
    return dict(found)


def seal_again(content: Content) -> Content:
    """Renews all seals of a file, after pytest-benchmark's entries have been made to agree with the records."""
    for record in content["lmsys"]["records"]:
        record["seal"] = seal(record)
    known = {record["id"]: record for record in content["lmsys"]["records"]}
    for timing in content["benchmarks"]:
        if record := known.get(timing["extra_info"].get("id")):
            timing["extra_info"] |= {name: copy.deepcopy(record[name]) for name in timing["extra_info"]}
            timing["stats"]["data"] = copy.deepcopy(record["samples_s"])
    return seal_file(content)


def seal_file(content: Content) -> Content:
    """Renews the seals of the file, not those of its records."""
    content["lmsys"]["others"] = others_seal(content)
    content["lmsys"]["seal"] = seal(content["lmsys"])
    return content
