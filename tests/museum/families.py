"""Lists the exhibits and the honest (right) rows of all files of the museum. A new file is added to HONEST_OF."""

import importlib
from types import ModuleType

from lmsys.registry import Entry
from tests.museum.exhibit import EXHIBITS, Exhibit

HONEST_OF = {  # {a file here: kind of the rows in its list HONEST}
    "attention": "attention",
    "loss": "loss",
    "norm": "norm",
    "swiglu": "swiglu",
    "rotary": "rotary",
    "optimizer": "optimizer",
    "parallel": "strategy",
    "sharded_optimizer": "sharded_optimizer",
}


def modules() -> dict[str, ModuleType]:
    """The imported files, by their modules' names."""
    return {name: importlib.import_module(name) for name in (f"tests.museum.{family}" for family in HONEST_OF)}


def exhibits(kind: str | None = None) -> list[Exhibit]:
    """The exhibits of a kind, or of all kinds, in the order of the files."""
    order = list(modules())
    ordered = sorted(EXHIBITS, key=lambda exhibit: order.index(exhibit.target.partition(":")[0]))
    return [exhibit for exhibit in ordered if kind in (None, exhibit.kind)]


def honest(kind: str | None = None) -> list[tuple[str, Entry]]:
    """(kind, row) for each honest row of a kind, or of all kinds."""
    rows = []
    for kind_of_rows, module in zip(HONEST_OF.values(), modules().values(), strict=True):
        if kind in (None, kind_of_rows):
            rows += [(kind_of_rows, entry) for entry in module.HONEST]
    return rows
