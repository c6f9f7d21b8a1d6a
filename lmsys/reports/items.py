"""The parts of a report, as data: `Table` and `Plot` with their files, `Block` and `Chapter` that hold them.

`tables`, `plots`, `special`, `answers` and `against` make tables and plots; `layout`, `answers`, `against` and
`__main__` put them into blocks and chapters. `page` and the templates read all of these. A new attribute is shown only
if templates/figures.html, `page.lines` or `Table.markdown` reads it.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmsys.reports.load import Machine


@dataclass(frozen=True)
class Table:
    """A table as texts (`columns`, `rows`, and `notes` below it) and as numbers (`data` in SI units, by field).

    name     the stem of its files' names
    keys     how many of the first columns say what a line is about; the others hold figures
    source   where its numbers are from: machine, versions, commits, dates
    best     the places, (line, column), of each line's best figures; only rows that were sampled together compete
    details  {(line, column): the text for a reader who points at the figure there}
    runs     (the run in words, its command) for each run that the lines come from
    plot     a drawing of the same figures
    answer   a sentence that sums the table up, shown while its chapter is folded
    """

    name: str
    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    data: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = field(default_factory=list)
    keys: int = 1
    source: str = ""
    best: frozenset[tuple[int, int]] = frozenset()
    details: Mapping[tuple[int, int], str] = field(default_factory=dict)
    runs: Sequence[tuple[str, str]] = ()
    plot: "Plot | None" = None
    answer: str = ""

    def markdown(self) -> str:
        """The table as Markdown, with its title, caption, source, notes and commands."""
        lines = [self.columns, ["---"] * self.keys + ["---:"] * (len(self.columns) - self.keys)] + list(self.rows)
        body = "\n".join("| " + " | ".join(map(_plain, line)) + " |" for line in lines)
        commands = [
            f"{_plain(run)}, made by: `" + _on_a_line(command).replace("`", "'") + "`" for run, command in self.runs
        ]
        notes = "".join(f"{note}  \n" for note in list(map(_plain, self.notes)) + commands)
        head = f"### {_plain(self.title)}\n\n{_plain(f'{self.caption} {self.source}'.strip())}"
        return f"{head}\n\n{body}\n" + f"\n{notes}" * bool(notes)

    def files(self) -> dict[str, str]:
        """The content of each of its files, by path."""
        files = {f"tables/{self.name}.md": self.markdown(), f"tables/{self.name}.csv": csv_of(self.data)}
        return files | self.plot.files() if self.plot else files


def _plain(text: str) -> str:
    """The text with Markdown's signs escaped, so that text of a result file makes no tag, link, code or cell."""
    return re.sub(r"([\\`*<\[|])", r"\\\1", _on_a_line(text))


def _on_a_line(text: str) -> str:
    """The text without line breaks, which would end a table's row."""
    return " ".join(text.split()) if "\n" in text or "\r" in text else text


def csv_of(records: Sequence[Mapping[str, Any]]) -> str:
    """The records as CSV, fields in order of appearance; a field that is a list or object in any record is left out."""
    names = dict.fromkeys(name for record in records for name in record)
    lists = {name for record in records for name, value in record.items() if isinstance(value, list | dict)}
    file = io.StringIO()
    writer = csv.DictWriter(
        file, [name for name in names if name not in lists], lineterminator="\n", extrasaction="ignore"
    )
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in record.items()} for record in records)
    return file.getvalue()


def _no_formula(value: Any) -> Any:
    """Puts a quote before a text that begins as a formula, which a spreadsheet would run."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


@dataclass(frozen=True)
class Plot:
    """A drawing, as an SVG text; `name` is the stem of its file's name."""

    name: str
    title: str
    caption: str
    svg: str

    def files(self) -> dict[str, str]:
        """The content of its file, by path."""
        return {f"plots/{self.name}.svg": self.svg}

    @property
    def size_pt(self) -> list[str]:
        """[width, height] of the drawing, in points, as text."""
        return re.findall(r'(?:width|height)="([\d.]+)pt"', self.svg)[:2]


Items = list[Table | Plot | None]  # what a step of a layout (steps.py) returns; None: there is nothing to draw


@dataclass(frozen=True)
class Block:
    """Tables and plots of one subject. The page shows the first table and plot of `lead`, and folds all others.

    A None in `lead` or `more` stands for nothing to draw, and is ignored.
    """

    title: str
    lead: Sequence[Table | Plot | None]
    more: Sequence[Table | Plot | None] = ()

    @property
    def items(self) -> list[Table | Plot]:
        """All tables and plots, those of `lead` first."""
        return list(filter(None, list(self.lead) + list(self.more)))


@dataclass(frozen=True)
class Chapter:
    """A chapter of the page: blocks under a title."""

    title: str
    blocks: Sequence[Block]


Part = tuple[Machine, Block, Sequence[Chapter]]  # a machine's part of the page; the block holds the answers
