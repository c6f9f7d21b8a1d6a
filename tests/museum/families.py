"""Lists the exhibits and the honest (right) rows of all files of the museum. A new file is added to HONEST_OF."""

import importlib
from pathlib import Path

from lmsys.registry import Entry
from tests.museum.exhibit import EXHIBITS, Exhibit

HONEST_OF = {  # {(family, which is a file here; the name of its list of honest rows): kind of its rows}
    ("attention", "HONEST"): "attention",
    ("loss", "HONEST"): "loss",
    ("norm", "HONEST"): "norm",
    ("swiglu", "HONEST"): "swiglu",
    ("rotary", "HONEST"): "rotary",
    ("optimizer", "HONEST"): "optimizer",
    ("parallel", "HONEST"): "strategy",
    ("sharded_optimizer", "HONEST"): "sharded_optimizer",
}
FAMILIES = [
    name for name in dict.fromkeys(family for family, _ in HONEST_OF) if (Path(__file__).parent / f"{name}.py").exists()
]


def exhibits(kind: str | None = None) -> list[Exhibit]:
    """The exhibits of a kind, or of all kinds, in the order of the families."""
    for name in FAMILIES:
        importlib.import_module(f"tests.museum.{name}")
    modules = [f"tests.museum.{name}" for name in FAMILIES]
    ordered = sorted(EXHIBITS, key=lambda exhibit: modules.index(exhibit.target.partition(":")[0]))
    return [exhibit for exhibit in ordered if kind in (None, exhibit.kind)]


def honest(kind: str | None = None) -> list[tuple[str, Entry]]:
    """(kind, row) for each honest row of a kind, or of all kinds."""
    rows = []
    for (family, name), kind_of_rows in HONEST_OF.items():
        if family in FAMILIES and kind in (None, kind_of_rows):
            rows += [
                (kind_of_rows, entry) for entry in getattr(importlib.import_module(f"tests.museum.{family}"), name, [])
            ]
    return rows
