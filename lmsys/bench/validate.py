"""A result file's content, held to what it declares of itself: whatever comes behind this can rely on types and sizes.

Every ValueError names the place in the file, the value and what would be right. Imports no torch.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from lmsys.bench.fields import ROLES, Record
from lmsys.bench.shapes import MOST_CHARACTERS, ROWS, check_named, check_object, check_shape, check_text
from lmsys.values import choice, flag, measured, shortly, whole

AMOUNTS = ("B", "FLOP", "FLOP/s", "B/s", "tokens/s", "MHz", "Hz", "MiB", "W", "J")  # units of what is never negative
COUNTS, MOST_COUNTED = ("cores", "memory_bytes", "gpu_count", "threads", "seed"), 2**63  # of a machine
RATES, RATES_OF_DTYPES = ("ceilings", "limits", "sustained"), ("matmul_flops_per_s", "flops_per_s")  # of a machine
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
COLOR = r"#[0-9a-fA-F]{6}"


def check_content(found: Record) -> None:
    """`found`: what `lmsys.bench.record.load` gives."""
    fields = {name: _fields(f"fields.{name}", one) for name, one in check_object("fields", found["fields"]).items()}
    for kind, rows in check_object("rows", found["rows"]).items():
        for number, row in enumerate(_list(f"rows.{kind}", rows)):
            _row(f"rows.{kind}[{number}]", row)
    for name, value in check_object("machine", found["machine"]).items():
        if value is not None:
            _fact(f"machine.{name}", name, value)
    for number, record in enumerate(found["records"]):
        for name in ("id", "benchmark", "impl"):
            check_text(f"records[{number}].{name}", record.get(name))
        check_object(f"records[{number}]", record)
        declared = fields.get(record["benchmark"], {})
        for name, value in record.items():
            check_named(f"record {shortly(record['id'])}: {name}", record["benchmark"], name, value)
            if name in declared:
                check_value(f"record {shortly(record['id'])}: {name}", value, declared[name])


def _fields(where: str, declared: Any) -> dict[str, Mapping[str, Any]]:
    found = {}
    for number, one in enumerate(_list(where, declared)):
        here = f"{where}[{number}]"
        for key, value in check_object(here, one).items():
            check_text(f"{here}.{key}", value)
        if not re.fullmatch(NAME, one.get("name", "")):
            raise ValueError(f"{here}: its name must be letters, digits and _; got {one.get('name')!r}")
        try:
            choice(one.get("role", "metric"), ROLES)
        except ValueError as error:
            raise ValueError(f"{here}: role={one['role']!r} {error}") from None
        found[one["name"]] = one
    return found


def _fact(where: str, name: str, value: Any) -> None:
    """One of `lmsys.measure.machine.describe` and of what a run adds to it; None where it is not known."""
    if name in COUNTS:
        whole(where, value, least=0, most=MOST_COUNTED)
    elif name in RATES:
        for kind, rate in check_object(where, value).items():
            of_each = check_object(f"{where}.{kind}", rate) if kind in RATES_OF_DTYPES else {"": rate}
            for dtype, one in of_each.items():
                measured(f"{where}.{kind}" + (f".{dtype}" if dtype else ""), one, least=0)
    elif name == "clock_share":
        check_object(where, value)
    elif name == "settings":
        for setting, one in check_object(where, value).items():
            check_named(f"{where}.{setting}", "", setting, one)
            check_value(f"{where}.{setting}", one, {"name": setting, "role": "detail"})
    elif name == "ceilings_moved":
        for number, told in enumerate(_list(where, value)):
            check_text(f"{where}[{number}]", told)
    elif name == "dirty":
        flag(where, value)
    else:
        check_text(where, value, 10 * MOST_CHARACTERS)


def _row(where: str, row: Any) -> None:
    for key in ("name", "label"):
        check_text(f"{where}.{key}", check_object(where, row).get(key))
    for key, shape in ROWS.items():
        if row.get(key) is not None:
            check_shape(f"{where}.{key}", row[key], shape)
    if "color" in row and not re.fullmatch(COLOR, check_text(f"{where}.color", row["color"])):
        raise ValueError(f"{where}.color: must be a color such as #2563eb; got {row['color']!r}")


def check_value(where: str, value: Any, field: Mapping[str, Any]) -> None:
    """ValueError unless the value is one of the field. `where` says whose, as in "record 'id': name"."""
    unit, role = field.get("unit", ""), field.get("role", "metric")
    if value is None:
        return
    if role == "outcome":
        check_text(where, value, 10 * MOST_CHARACTERS)
    elif isinstance(value, list | dict):
        if role != "detail":
            raise ValueError(f"{where}={shortly(value)} must be one value")
    elif isinstance(value, str | bool):
        if role == "metric":  # an axis may have a word beside its numbers, such as a size of "auto"
            raise ValueError(f"{where}={shortly(value)} must be a number")
        check_text(where, str(value), 10 * MOST_CHARACTERS if role == "detail" else MOST_CHARACTERS)
    elif field["name"] == "time_s":
        measured(where, value, above=0)
    else:
        measured(where, value, least=0 if unit in AMOUNTS else -math.inf)


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: must be a list; got a {type(value).__name__}")
    return value
