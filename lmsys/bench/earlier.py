"""`lmsys.registry` in an earlier state of the code: `--against` appends this file to it there.

Its rows were made when traits were read by name, and when a table took any trait.
"""

from collections.abc import Mapping
from typing import Any

from lmsys.registry import Entry, Traits

_strictly: Any = Traits.stated


def _leniently(table: type[Traits], row: str, values: Mapping[str, Any]) -> Any:
    return _strictly.__func__(table, row, {name: x for name, x in values.items() if hasattr(table, name)})


def _trait(row: Entry, name: str, default: Any = None) -> Any:
    return row.stated[name] if name in row.stated else getattr(row.load(), name, default)


Entry.trait = _trait  # type: ignore[attr-defined]
Traits.stated = classmethod(_leniently)  # type: ignore[assignment]
