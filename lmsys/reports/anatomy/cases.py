"""Records of opened models as the report sees them: typed, in reading order, and put into words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.load import GIB, InputError, Machine, file_name
from lmsys.reports.model.cases import ORDER
from lmsys.reports.tables import Footnotes

KINDS = ("matmul", "attention", "elementwise", "reduction", "copy", "communication", "other")
CALLS = {"forward": "inference", "step": "step"}  # modes, as they are read
SETTING = ("size", "context", "batch", "precision", "limit")  # one model and what it is fed
VARIANT = ("compile", "label")  # how it is run
KEYS = {  # columns that say what a row is
    "size": "size",
    "context": "context",
    "batch": "batch",
    "precision": "precision",
    "limit": "memory limit",
    "call": "call",
    "compile": "compile",
    "label": "attention",
}
TEXT = ["id", "impl", "label", "size", "precision", "mode", "compile", "device", "outcome", "reason", "clock"]
SHAPE = ["batch", "context", "vocab_size", "d_model", "num_layers", "num_heads", "num_parameters"]
MEASURED = ("parameters", "gradients", "optimizer", "activations")
BYTES = [f"{prefix}{name}_bytes" for prefix in ("", "predicted_") for name in MEASURED]
SECONDS = ["time_s", "profiled_s", "kernel_s"]
SHARES = [f"{kind}_share" for kind in KINDS]
NUMBERS = [*SECONDS, *SHARES, *BYTES, "num_launches", "held_bytes", "peak_bytes", "memory_limit_bytes"]
TIMING = ["p20_s", "p80_s", "rounds", "sm_clock_mhz"]
LISTS = ["kernels", "parts", "phases", "timeline", "allocations"]


@dataclass(frozen=True)
class View:
    """Some cases of one machine, and the words for them."""

    machine: Machine
    frame: pd.DataFrame

    @property
    def cases(self) -> list[Any]:
        return list(self.frame.itertuples(index=False))

    @property
    def heads(self) -> list[str]:
        """The keys that differ among the cases, and always the variant."""
        return [key for key in KEYS if key in VARIANT or self.frame[key].nunique() > 1]

    def stem(self, *words: str) -> str:
        return file_name("-".join([self.machine.slug, *words]))

    def only(self, rows: pd.Series) -> "View":
        return View(self.machine, self.frame[rows].reset_index(drop=True))

    def settings(self) -> Iterator["View"]:
        for _, rows in self.frame.groupby([*SETTING], sort=False):
            yield View(self.machine, rows.reset_index(drop=True))

    @property
    def heading(self) -> str:
        """Of one setting."""
        first = self.cases[0]
        limit = f", memory limit {first.limit}" if first.limit else ""
        return f"{first.size}, context {first.context:,}, batch {first.batch}, {first.precision}{limit}"

    def caption(self, what: str) -> str:
        """What is shown, every variable that is held constant or varied, and where it was measured."""
        values = {key: [_text(value) for value in dict.fromkeys(self.frame[key]) if value] for key in KEYS}
        told = [f"{KEYS[key]} {' / '.join(found)}" for key, found in values.items() if found]
        vocabulary = " / ".join(f"{size:,}" for size in sorted(set(self.frame["vocab_size"])))
        held = ", ".join([*told, f"vocabulary {vocabulary}"])
        return f"{what} {held[0].upper()}{held[1:]}. {self.machine.about(self.frame)}"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def keys_of(case: Any, heads: Sequence[str]) -> list[str]:
    return [_text(getattr(case, key)) for key in heads]


def variant(case: Any) -> str:
    return f"{case.compile}, {case.label}"


def case_name(case: Any) -> str:
    """One case within its setting."""
    return f"{case.call}, {variant(case)}"


def outcome(case: Any, notes: Footnotes) -> str:
    """What stands in a table for a case that was not opened; "" for one that was."""
    return "" if pd.notna(case.time_s) else tables.cell(case, float("nan"), notes)


def memory_unit(most_bytes: float) -> tuple[str, float]:
    """The unit that sizes up to this are read in, and how many bytes it is."""
    return ("GiB", 2.0**30) if most_bytes >= 2**30 else ("MiB", 2.0**20)


def typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The records with every column there, in reading order; InputError for one that is no case of a model."""
    frame = frame.reindex(columns=["run", "benchmark", *TEXT, *SHAPE, *NUMBERS, *TIMING, *LISTS])
    for field in [*SHAPE, *NUMBERS, *TIMING]:
        frame[field] = pd.to_numeric(frame[field], errors="coerce").astype(float)
    for field in LISTS:
        frame[field] = [value if isinstance(value, list) else [] for value in frame[field]]
    required = ["size", "precision", "mode", "compile", *SHAPE]
    for case in frame[frame[required].isna().any(axis=1)].itertuples():
        field = next(field for field in required if pd.isna(getattr(case, field)))
        raise InputError(f"record {case.id!r}: an anatomy record needs a valid {field!r}")
    frame[SHAPE] = frame[SHAPE].astype(int)
    frame["label"] = frame["label"].where(frame["label"].notna(), frame["impl"])
    frame["call"] = [CALLS.get(mode, mode) for mode in frame["mode"]]
    frame["limit"] = ["" if pd.isna(limit) else f"{limit / GIB:g} GiB" for limit in frame["memory_limit_bytes"]]
    places = {field: frame[field].map(_place(field)) for field in ("precision", "mode", "compile", "impl")}
    rest = frame[["num_parameters", "size", "context", "batch", "limit"]]
    order = rest.join(pd.DataFrame(places)).sort_values([*rest.columns, *places], kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def _place(field: str) -> Any:
    known = ORDER[field]
    return lambda value: (known.index(value) if value in known else len(known), value)
