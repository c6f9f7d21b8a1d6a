"""Shapes of the lists in our own benchmarks' records, and what a field's name says of its value.

Chapters of the report rely on both. Imports no torch.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmsys.bench.fields import Record
from lmsys.values import measured, shortly

NUMBER, TEXT, POSITIVE = "a finite number", "text", "a number above 0"
MOST_CHARACTERS = 1000  # of a name or a label; a reason may have ten times as many
Shape = str | Sequence[Any] | Mapping[str, Any]
# A list stands for any number of its one item, a tuple for items in their order, an object for these keys and others.
SHAPES: dict[str, dict[str, Shape]] = {  # by benchmark and field; "" is of every benchmark
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
ROWS: dict[str, Shape] = {"baseline": NUMBER, "rivals": [TEXT]}  # of a row of a table, which may have others
# A name with a unit is that of a number, and so are these.
NUMBERS = re.compile(
    r".*_(s|bytes|mhz|w|j|c|fraction|ratio|share|efficiency|parameters)|rounds|bytes|flops|times|addend|other_processes"
)
TEXTS = re.compile(r"id|benchmark|impl|label|section|comparison|clock|strategy|clock_reasons|disturbed|energy_note")


def check_named(where: str, benchmark: str, name: str, value: Any) -> None:
    """ValueError where a field's value is not what its name says, whatever the file declares of it."""
    shape = SHAPES.get(benchmark, {}).get(name) or SHAPES[""].get(name)
    if value is None:
        return
    if shape is not None:
        check_shape(where, value, shape)
    elif TEXTS.fullmatch(name):
        check_shape(where, value, TEXT)
    elif NUMBERS.fullmatch(name):
        check_shape(where, value, NUMBER)


def check_shape(where: str, value: Any, shape: Shape) -> None:
    """ValueError with the place inside of the value."""
    if shape in (NUMBER, POSITIVE):
        measured(where, value, **({"above": 0} if shape == POSITIVE else {}))
    elif shape == TEXT:
        check_text(where, value)
    elif isinstance(shape, Mapping):
        _check_keys(where, value, shape)
    elif not isinstance(value, list) or (isinstance(shape, tuple) and len(value) != len(shape)):
        told = f"a list of {len(shape)}" if isinstance(shape, tuple) else "a list"
        raise ValueError(f"{where}={shortly(value)} must be {told}")
    else:
        for number, one in enumerate(value):
            check_shape(f"{where}[{number}]", one, shape[number if isinstance(shape, tuple) else 0])


def _check_keys(where: str, value: Any, shape: Mapping[str, Any]) -> None:
    for key, one in check_object(where, value).items():
        if key in shape or "*" in shape:
            check_shape(f"{where}.{key}", one, shape.get(key, shape.get("*")))
    if missing := [key for key in shape if key != "*" and key not in value]:
        raise ValueError(f"{where}={shortly(value)} has no {missing[0]!r}")


def check_text(where: str, value: Any, most: int = MOST_CHARACTERS) -> str:
    if not isinstance(value, str) or len(value) > most:
        told = f"{len(value):,} characters" if isinstance(value, str) else type(value).__name__
        raise ValueError(f"{where}: must be text of at most {most:,} characters; got {told}")
    return value


def check_object(where: str, value: Any) -> Record:
    """The value, an object whose names are text that is not too long."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object; got a {type(value).__name__}")
    for name in value:
        check_text(f"{where}: a name in it", name)
    return value
