"""Names that rows of an earlier state of the code use, and that `lmsys.registry` no longer has.

A *row* is an implementation under test. In the worker process of an earlier state (`--against`) the rows are the
earlier state's, but the registry is today's: `lmsys.bench.checkout` appends the text of this file to its copy of the
registry. (The import below also works there, since the copy has defined these names by then.) The code of earlier
states reads a trait by `row.trait(name)`, and makes traits by `Traits.stated`, which is `Traits.checked` today. Traits
that no class has today are left out. When the registry drops a name that rows use, add the name here.
"""

from typing import Any

from lmsys.registry import Entry, Traits

_checked: Any = Traits.checked

Entry.trait = lambda row, name, default=None: (  # type: ignore[attr-defined]
    row.stated[name] if name in row.stated else getattr(row.load(), name, default)
)
Traits.checked = Traits.stated = classmethod(  # type: ignore[assignment, attr-defined]
    lambda traits_class, row, values: _checked.__func__(
        traits_class, row, {name: value for name, value in values.items() if hasattr(traits_class, name)}
    )
)
