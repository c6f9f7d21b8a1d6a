"""Checks the content of a result file when it is read, so that readers can rely on types and sizes.

`lmsys.bench.record.load_file` calls `check_content`, and so does `lmsys.bench.plugin` with made-up records before a
run. `lmsys.reports.views` calls `check_value`, and so does `lmsys.bench.instruments` before a record is written. A
field is checked by the declaration that the file has of it, and by its name: a field whose name ends in `_s`, for
example, must be a number. Fields that hold lists or objects are checked by SHAPES, on which the report's chapters rely:
add the shape of such a field there. A fact of the machine that is no text needs its shape in MACHINE. Every ValueError
names the place in the file, the value and what would be right. Imports no torch.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lmsys.bench.fields import ROLES, Record
from lmsys.values import flag, hold, measured, shortly, whole

MOST_CHARACTERS = 1000  # of a name or a label; a reason may have ten times as many


# The functions `check_...` here, and those of `lmsys.values` that SHAPES uses, take (the place in the file as text, the
# value). They raise ValueError for a value that is not as it should be.
def check_text(where: str, value: Any, most: int = MOST_CHARACTERS) -> str:
    """Returns the value. ValueError unless it is text of at most `most` characters."""
    if not isinstance(value, str) or len(value) > most:
        what = f"{len(value):,} characters" if isinstance(value, str) else type(value).__name__
        raise ValueError(f"{where}: must be text of at most {most:,} characters; got {what}")
    return value


def check_object(where: str, value: Any) -> Record:
    """Returns the value. ValueError unless it is an object (a dict) whose keys are text that is not too long."""
    hold((isinstance(value, dict), f"{where}: must be an object; got a {type(value).__name__}"))
    for name in value:
        check_text(f"{where}: a name in it", name)
    return value


# A shape is a function that checks a value; a list, for any number of items of its one shape; a tuple, for items in
# their order; or an object, for its keys. A key that ends in "?" may be missing, and "*" stands for all other keys.
Shape = Callable[[str, Any], Any] | Sequence[Any] | Mapping[str, Any]
NUMBER, TEXT, LONG_TEXT = measured, check_text, partial(check_text, most=10 * MOST_CHARACTERS)
POSITIVE, AMOUNT, COUNT = partial(measured, above=0), partial(measured, least=0), partial(whole, least=0, most=2**63)
# The shape of the rates that the machine reaches (ceilings) and of those that it cannot exceed (limits): numbers, and
# for some of them one number for each dtype.
RATES = {"*": AMOUNT, "matmul_flops_per_s?": {"*": AMOUNT}, "flops_per_s?": {"*": AMOUNT}}
SHAPES: dict[str, dict[str, Shape]] = {  # {benchmark: {field: shape}}; the fields of "" are those of every benchmark
    "": {
        "samples_s": [POSITIVE],
        "between_runs": POSITIVE,
        "against": {"name": TEXT, "commit": TEXT, "margin": POSITIVE},
        "same_bits": {"calls": NUMBER, "differ": {"*": NUMBER}, "elements": [NUMBER], "alone": {"*": NUMBER}},
    },
    "anatomy": {
        "allocations": [{"bytes": NUMBER, "count": NUMBER, "at_peak": NUMBER, "where": TEXT, "function": TEXT}],
        "kernels": [{"name": TEXT, "kind": TEXT, "total_s": NUMBER, "count": NUMBER}],
        "parts": [{"name": TEXT, "total_s": NUMBER, "backward_s": NUMBER, "count": NUMBER, "kinds": {"*": NUMBER}}],
        "phases": [{"name": TEXT, "peak_bytes": NUMBER}],
        "timeline": [{"name": TEXT, "points": [(NUMBER, NUMBER)]}],
    },
    "data_parallel": {"timeline": [(TEXT, NUMBER, NUMBER)], "bucket_mb": NUMBER, "held_by": {"*": TEXT}},
    "steps": {"losses": [NUMBER]},
    "precision": {
        "sums": [{"accumulator": TEXT, "addend": TEXT, "result": NUMBER, "error": NUMBER}],
        "tensors": [{"name": TEXT, "dtype": TEXT}],
    },
    "training": {
        **dict.fromkeys(("curve_budget", "curve_difference", "norm_difference", "loss", "valid_loss"), NUMBER),
        "curve_steps": [NUMBER],
        "curve_losses": [NUMBER],
        "curve_differences": [NUMBER],
        "rank_peak_bytes": [NUMBER],
    },
}
# Names of fields that must be numbers, and of fields that must be texts, whatever the file declares.
NUMBERS = re.compile(
    r".*_(s|bytes|mhz|w|j|c|fraction|ratio|share|efficiency|parameters)|rounds|bytes|flops|times|addend|other_processes"
)
TEXTS = re.compile(r"id|benchmark|impl|label|section|comparison|clock|strategy|clock_reasons|disturbed|energy_note")


def check_named(where: str, benchmark: str, name: str, value: Any) -> None:
    """Raises ValueError unless a field's value has the shape that SHAPES, NUMBERS or TEXTS give to its name.

    where      the value's place in the file, for the message
    benchmark  the benchmark of the record; "" for fields that are checked as those of every benchmark
    """
    by_name = TEXT if TEXTS.fullmatch(name) else NUMBER if NUMBERS.fullmatch(name) else None
    shape = SHAPES.get(benchmark, {}).get(name) or SHAPES[""].get(name) or by_name
    if value is not None and shape is not None:
        check_shape(where, value, shape)


def check_shape(where: str, value: Any, shape: Shape) -> None:
    """Raises ValueError, with the place inside of the value, unless the value has the shape."""
    if callable(shape):
        shape(where, value)
    elif isinstance(shape, Mapping):
        _check_keys(where, value, shape)
    elif not isinstance(value, list) or (isinstance(shape, tuple) and len(value) != len(shape)):
        right = f"a list of {len(shape)}" if isinstance(shape, tuple) else "a list"
        raise ValueError(f"{where}={shortly(value)} must be {right}")
    else:
        for number, item in enumerate(value):
            check_shape(f"{where}[{number}]", item, shape[number if isinstance(shape, tuple) else 0])


def _check_keys(where: str, value: Any, shape: Mapping[str, Any]) -> None:
    """Raises ValueError unless the value is an object that fits the shape. It may have keys that the shape lacks."""
    for key, item in check_object(where, value).items():
        if known := [shape[name] for name in (key, f"{key}?", "*") if name in shape]:
            check_shape(f"{where}.{key}", item, known[0])
    for key in shape:
        if key != "*" and not key.endswith("?") and key not in value:
            raise ValueError(f"{where}={shortly(value)} has no {key!r}")


# Facts of `lmsys.measure.machine.describe`, and facts that a run adds to them. All other facts are text.
MACHINE: dict[str, Shape] = {
    **dict.fromkeys(("cores", "memory_bytes", "gpu_count", "threads", "seed"), COUNT),
    **dict.fromkeys(("ceilings", "limits"), RATES),
    "sustained": RATES | {"clock_reasons?": TEXT},
    "clock_share": check_object,
    "settings": check_object,
    "ceilings_moved": [TEXT],
    "took_s": {"*": AMOUNT},
    "dirty": flag,
}


def check_matching(pattern: str, right: str, where: str, value: Any) -> None:
    """Raises ValueError unless the value is text that the pattern matches as a whole.

    right  what a right value is, for the message
    where  the value's place in the file
    """
    hold((re.fullmatch(pattern, check_text(where, value)), f"{where}: must be {right}; got {value!r}"))


ENTRIES: Shape = [{"extra_info": {"benchmark?": TEXT, "id?": TEXT}, "stats": {}}]  # pytest-benchmark's, of each test
NAME = partial(check_matching, r"[A-Za-z_][A-Za-z0-9_]*", "letters, digits and _")
CONTENT: Shape = {  # what a file has under "lmsys"; a layout is checked further when it is drawn
    "fields": {
        "*": [
            {"name": NAME, "role?": partial(check_matching, "|".join(ROLES), f"one of {', '.join(ROLES)}"), "*": TEXT}
        ]
    },
    "layouts": {
        "*": {
            "place?": NUMBER,
            "letters?": TEXT,
            "words?": {"*": {"*": TEXT}},
            "fastest?": {"word": TEXT, "title": TEXT, "keys": {"*": TEXT}, "bases": [TEXT]},
        }
    },
    "rows": {
        "*": [
            {
                "name": TEXT,
                "label": TEXT,
                "color?": partial(check_matching, r"#[0-9a-fA-F]{6}", "a color such as #2563eb"),
                "baseline?": NUMBER,
                "rivals?": [TEXT],
            }
        ]
    },
    "machine": {},
    "records": [{"id": TEXT, "benchmark": TEXT, "impl": TEXT}],
}


def check_content(content: Record) -> None:
    """Raises ValueError, with the place, unless the content is that of a result.

    content  what the file has under "lmsys", as `lmsys.bench.record.load` reads it
    """
    check_shape("lmsys", content, CONTENT)
    fields = {
        benchmark: {field["name"]: field for field in declared} for benchmark, declared in content["fields"].items()
    }
    for name, value in content["machine"].items():
        if value is not None:
            check_shape(f"machine.{name}", value, MACHINE.get(name, LONG_TEXT))
    for name, value in (content["machine"].get("settings") or {}).items():
        check_named(f"machine.settings.{name}", "", name, value)
        check_value(f"machine.settings.{name}", value, {"name": name, "role": "detail"})
    for record in content["records"]:
        declared = fields.get(record["benchmark"], {})
        for name, value in record.items():
            check_named(f"record {shortly(record['id'])}: {name}", record["benchmark"], name, value)
            if name in declared:
                check_value(f"record {shortly(record['id'])}: {name}", value, declared[name])


def check_value(where: str, value: Any, field: Mapping[str, Any]) -> None:
    """Raises ValueError unless the field may have this value. None is right for every field.

    where  the value's place in the file, as in "record 'id': name"
    field  the field's declaration, of which "name", "role" and "unit" count
    """
    unit, role = field.get("unit", ""), field.get("role", "metric")
    if value is None:
        return
    if role == "outcome":
        LONG_TEXT(where, value)
    elif isinstance(value, list | tuple | dict):  # a tuple becomes a list when a run writes it
        hold((role == "detail", f"{where}={shortly(value)} must be one value"))
    elif isinstance(value, str | bool):
        # An axis may have a word beside its numbers, such as a size of "auto".
        hold((role != "metric", f"{where}={shortly(value)} must be a number"))
        check_text(where, str(value), 10 * MOST_CHARACTERS if role == "detail" else MOST_CHARACTERS)
    elif field["name"] == "time_s":
        measured(where, value, above=0)
    else:
        is_amount = unit in ("B", "FLOP", "FLOP/s", "B/s", "tokens/s", "MHz", "Hz", "MiB", "W", "J")
        measured(where, value, least=0 if is_amount else -math.inf)
