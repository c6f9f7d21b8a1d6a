"""`lmsys.registry` in an earlier state of the code: `--against` appends this file to it there.

Its rows were made when traits were read by name, and when a table took any trait.
"""

from typing import Any

from lmsys.registry import Entry, Traits

_strictly: Any = Traits.stated


Entry.trait = lambda row, name, default=None: (  # type: ignore[attr-defined]
    row.stated[name] if name in row.stated else getattr(row.load(), name, default)
)
Traits.stated = classmethod(  # type: ignore[assignment]
    lambda table, row, values: _strictly.__func__(
        table, row, {name: x for name, x in values.items() if hasattr(table, name)}
    )
)
