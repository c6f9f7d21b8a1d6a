"""Tables of measurements: cells with outcomes and footnotes, Markdown and CSV, and the speedup law."""

import math
import textwrap
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

WORDS = {"oom": "OOM", "unsupported": "n/a", "wrong": "wrong", "error": "error"}
MEANINGS = {"oom": "out of memory", "unsupported": "not supported", "wrong": "wrong result", "error": "error"}
ENDINGS = ["cases", "timed", "verified, untimed", *MEANINGS.values()]
NOT_RUN = "–"
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Table:
    """A table as it is read (`columns`, `rows` of text, `notes` below) and as numbers (`frame`, SI units).

    The first `keys` columns say what a row is; `name` is the stem of its files.
    """

    name: str
    title: str
    caption: str
    columns: list[str]
    rows: list[list[str]]
    frame: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    keys: int = 1

    def markdown(self) -> str:
        align = ["---"] * self.keys + ["---:"] * (len(self.columns) - self.keys)
        lines = [self.columns, align, *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        notes = "".join(f"{note}  \n" for note in self.notes)
        return f"### {self.title}\n\n{self.caption}\n\n{body}\n" + (f"\n{notes}" if notes else "")

    def csv(self) -> str:
        return str(self.frame.to_csv(index=False, lineterminator="\n"))


class Footnotes:
    """Numbers the reasons that stand below a table, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        """The superscript that refers to this reason."""
        text = textwrap.shorten(text, 160, placeholder=" …")
        return str(self._numbers.setdefault(text, len(self._numbers) + 1)).translate(SUPERSCRIPT)

    def notes(self) -> list[str]:
        return [f"{str(number).translate(SUPERSCRIPT)} {text}" for text, number in self._numbers.items()]


def number(value: float) -> str:
    """Three significant digits, never an exponent: 0.0123, 1.23, 12.3, 12,345."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{value:,.{max(0, digits)}f}"


def cell(case: Any, value: float, notes: Footnotes) -> str:
    """What stands in the table for one case (None: not run), given its value in the table's unit or NaN."""
    if case is None:
        return NOT_RUN
    reason = case.reason if isinstance(case.reason, str) and case.reason else ""
    shown = "" if pd.isna(value) else number(value)
    if case.outcome != "ok":
        text = MEANINGS[case.outcome] + (f": {reason}" if reason else "")
        return f"{shown} {WORDS[case.outcome]}".strip() + notes.mark(text)
    if not shown and reason:
        return "untimed" + notes.mark(reason)
    return shown


def value_or_word(case: Any, value: float) -> float | str | None:
    """The CSV cell: the number as it is, else the outcome's word; nothing when not run or not measured."""
    if case is None or (pd.isna(value) and case.outcome == "ok"):
        return None
    return WORDS[case.outcome] if pd.isna(value) else float(value)


def by_key(frame: pd.DataFrame, keys: list[str]) -> dict[tuple[Hashable, ...], Any]:
    """The rows of a frame, as named tuples, by the values of some columns."""
    return {tuple(getattr(row, key) for key in keys): row for row in frame.itertuples(index=False)}


def distinct(frame: pd.DataFrame, keys: list[str]) -> list[tuple[Any, ...]]:
    """The values that some columns take together, in order of first appearance."""
    return list(dict.fromkeys(frame[keys].itertuples(index=False, name=None)))


def legend(rows: Iterable[Iterable[str]]) -> list[str]:
    """The line that explains a dash, where there is one."""
    return [f"{NOT_RUN} not run."] if any(NOT_RUN in text for row in rows for text in row) else []


def endings(frame: pd.DataFrame) -> list[int]:
    """How many of these cases ended how, in the order of ENDINGS."""
    ok, timed = frame["outcome"] == "ok", frame["time_s"].notna()
    counts = [ok & timed, ok & ~timed, *(frame["outcome"] == word for word in MEANINGS)]
    return [len(frame), *(int(rows.sum()) for rows in counts)]


def counts(endings: list[int]) -> list[str]:
    """Those numbers as they are read: nothing for none."""
    return [f"{count:,}" if count else "" for count in endings]


def paired_speedups(frame: pd.DataFrame, same: list[str], baseline: str, axis: str = "impl") -> list[float]:
    """Baseline time / row time for each row: the median over rounds sampled side by side.

    `same` are the columns that say what was run, `axis` the one that has the baseline as a value. NaN unless the
    row and the baseline carry samples of one `comparison`: rows measured at different times, under different
    clocks, have no ratio.
    """
    together = [*same, "comparison"]
    rows = list(frame.itertuples(index=False))
    base = {
        tuple(getattr(row, key) for key in together): row.samples_s for row in rows if getattr(row, axis) == baseline
    }
    speedups = []
    for row in rows:
        ours, theirs = row.samples_s, base.get(tuple(getattr(row, key) for key in together))
        ratios = []
        if isinstance(row.comparison, str) and isinstance(ours, list) and isinstance(theirs, list):
            ratios = [b / a for a, b in zip(ours, theirs, strict=False) if a > 0]
        speedups.append(float(np.median(ratios)) if ratios else math.nan)
    return speedups


def geometric_mean(values: Iterable[float]) -> tuple[float, int]:
    """The geometric mean of the finite values, NaN of none, and how many there are."""
    finite = [value for value in values if pd.notna(value) and value > 0]
    return (math.exp(math.fsum(map(math.log, finite)) / len(finite)) if finite else math.nan), len(finite)
