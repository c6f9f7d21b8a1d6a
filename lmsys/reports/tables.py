"""Tables of cases: their cells with outcomes and footnotes, as Markdown and as CSV; and the blocks of a page."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmsys.bench.fields import Field, Record, grouped
from lmsys.bench.verdict import undisturbed
from lmsys.reports.cells import CEILINGS, NOT_RUN, SPEEDUP, Notes, below, cell, detail, is_compared, mark, mean_text
from lmsys.reports.load import Machine
from lmsys.reports.views import View
from lmsys.reports.words import (
    FILES,
    MEANINGS,
    head_of,
    inside_a_sentence,
    is_clocked,
    label_of,
    sentence,
    unit_of,
)

ENDINGS = ("timed", "verified, untimed", *MEANINGS.values())
LEFT_OUT = "Left out, as no case of it could run"
SPREAD = ("mean_s", "std_s", "p20_s", "p80_s", "rounds")  # stand beside a time in its CSV


@dataclass(frozen=True)
class Table:
    """A table as it is read (`columns`, `rows` of text, `notes` below) and as numbers (`data`, SI units, by field).

    The first `keys` columns say what a row is; `name` is the stem of its files, `source` where its numbers are from.
    `best` are the places, row and column, of the best of those in its row that were sampled together; `details` says
    more of some places. `runs` are the runs of its lines, each with its command; `plot` draws what it answers.
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

    def markdown(self) -> str:
        align = ["---"] * self.keys + ["---:"] * (len(self.columns) - self.keys)
        lines = [self.columns, align, *self.rows]
        body = "\n".join("| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
        made = [f"{run}, made by: `" + command.replace("`", "'") + "`" for run, command in self.runs]
        notes = "".join(f"{_plain(note)}  \n" for note in (*self.notes, *made))
        caption = _plain(f"{self.caption} {self.source}".strip())
        return f"### {_plain(self.title)}\n\n{caption}\n\n{body}\n" + (f"\n{notes}" if notes else "")

    def files(self) -> dict[str, str]:
        drawn = self.plot.files() if self.plot else {}
        return {f"tables/{self.name}.md": self.markdown(), f"tables/{self.name}.csv": csv_of(self.data), **drawn}


def _plain(text: str) -> str:
    """Puts a text on one line: a line break of a result file must not end a table's row."""
    return " ".join(text.split()) if "\n" in text or "\r" in text else text


def csv_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Every field that is no list and no object, in order of appearance."""
    names = dict.fromkeys(name for one in records for name in one)
    lists = {name for one in records for name, value in one.items() if isinstance(value, list | dict)}
    file = io.StringIO()
    writer = csv.DictWriter(
        file, [name for name in names if name not in lists], lineterminator="\n", extrasaction="ignore"
    )
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in one.items()} for one in records)
    return file.getvalue()


def _no_formula(value: Any) -> Any:
    """A word of a result file that begins as a formula gets a quote: a spreadsheet would run it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def data_of(view: View, *names: str) -> list[Record]:
    """A line for each case: its axes, how it ended, and these fields."""
    axes = [
        one.name
        for one in view.machine.fields[view.benchmark].values()
        if one.role == "axis" and one.name not in ("label", "peer") and view.has(one.name)
    ]
    fields = dict.fromkeys([*axes, "outcome", *names])
    return [{name: case.get(name) for name in fields} for case in view.cases]


def pivot(
    view: View,
    metric: str,
    rows: Sequence[str],
    columns: str = "impl",
    inside: str = "",
    word: str = "",
    about: str = "",
    data: Sequence[str] = (),
) -> Table | None:
    """A metric; rows: the values of some fields, columns: those of another, in a cell: those of `inside`, as a / b.

    An axis that is none of these, but tells cases apart, is one more field of the rows. None without a number to show,
    unless it is the table of times, which says how cases ended. `data` are the fields of the CSV where the metric is
    text.
    """
    one = view.fields[metric]
    if not (is_compared(view) if metric == SPEEDUP else view.has(metric) or metric == "time_s"):
        return None
    rows = view.telling(view.chosen(rows), columns, inside) or ["section"]
    cases = {(*(case[name] for name in rows), case[columns], case.get(inside)): case for case in view.cases}
    view, left_out = _with_something(view, columns)
    heads, inner, notes = view.values(columns), view.values(inside) if inside else [None], Notes()
    lines: list[list[str]] = []
    best: set[tuple[int, int]] = set()
    details: dict[tuple[int, int], str] = {}
    compares = is_clocked(one) and metric != SPEEDUP and "impl" in (columns, inside)
    for key in view.ordered(*rows).distinct(*rows):
        found = [[cases.get((*key, head, value)) for value in inner] for head in heads]
        line = [case for group in found for case in group] if compares else []
        texts = [_group(view, metric, group, group if inside == "impl" else line, notes) for group in found]
        if columns == "impl" and len(inner) == 1:
            best |= {(len(lines), len(rows) + at) for at in _best(view, one, [group[0] for group in found])}
        if is_clocked(one) and len(inner) == 1:
            details |= {(len(lines), len(rows) + at): detail(view, group[0]) for at, group in enumerate(found)}
        lines.append([*map(view.text, rows, key), *texts])
    blank = []
    if metric == SPEEDUP and columns == "impl":
        blank = [f"Blank: not sampled together with {view.text('impl', view.base)}."] * any(
            "" in line for line in lines
        )
        of_heads = [
            undisturbed([case for case in view.cases if case[columns] == head and case[SPEEDUP]]) for head in heads
        ]
        means = [mean_text(case[SPEEDUP] for case in cases) for cases in of_heads]
        lines.append(["geometric mean (cells)", *[""] * (len(rows) - 1), *means])
    several = " / ".join(view.text(inside, value) for value in inner) if len(inner) > 1 else ""
    inside_a_cell = f"\nIn each cell: {several}." if several else ""
    return Table(
        name=view.file(word or FILES.get(metric, metric)),
        title=titled(head_of(one) + (f" ({several})" if several else ""), view),
        caption=view.caption(about or about_of(one), is_clocked(one)) + inside_a_cell,
        columns=[*(label_of(view.fields[name]) for name in rows), *(value_head(view, columns, head) for head in heads)],
        rows=lines,
        data=data_of(view, *(data or (metric, *(SPREAD if metric in ("time_s", "mean_s") else ())))),
        notes=[*below(notes, lines), *blank, *left_out],
        keys=len(rows),
        source=view.machine.about(view.cases),
        best=frozenset(best),
        details=details,
    )


def _with_something(view: View, columns: str) -> tuple[View, list[str]]:
    """The cases without columns that say of every cell that it is not supported, and a note on those."""
    ended = grouped((case[columns], case["outcome"]) for case in view.cases)
    without = [value for value in view.values(columns) if set(ended[value]) == {"unsupported"}]
    if columns != "impl" or len(without) in (0, len(ended)):
        return view, []
    names = ", ".join(view.text(columns, value) for value in without)
    return view.only(lambda case: case[columns] not in without), [f"{LEFT_OUT}: {names}. “Not run here” says why."]


def _best(view: View, one: Field, line: Sequence[Record | None]) -> list[int]:
    """The place of the best value among those that were sampled together, as `_group` marks the others; none where no
    value is better than another."""
    timed = [(at, case) for at, case in enumerate(line) if case and case["time_s"] and case.get(one.name) is not None]
    against = _against(view, [case for _, case in timed])
    together = [(at, case) for at, case in timed if against and case["comparison"] == against["comparison"]]
    if len(together) < 2 or one.unit not in ("s", "B") and not _more_is_better(one):
        return []
    choose = max if _more_is_better(one) else min
    best = choose(case[one.name] for case in undisturbed([case for _, case in together]))
    return [at for at, case in together if case[one.name] == best]


def _more_is_better(one: Field) -> bool:
    return one.unit.endswith("/s") or one.name in (SPEEDUP, "mfu", *CEILINGS)


def value_head(view: View, name: str, value: Any) -> str:
    """The head of a column: a number says of what it is, and so does a yes or no."""
    is_bare = isinstance(value, int | float) and value not in view.words.get(name, ())
    return f"{label_of(view.fields[name])} " * is_bare + view.text(name, value)


def _group(
    view: View, metric: str, group: Sequence[Record | None], beside: Sequence[Record | None], notes: Notes
) -> str:
    """One cell, of one case or of several. Marked is what was not sampled together with those beside it."""
    timed = [case for case in beside if case and case["time_s"] is not None]
    against = _against(view, timed)
    texts = [cell(view, metric, case, notes) for case in group]
    for place, case in enumerate(group):
        if case and against and case in timed and case["comparison"] != against["comparison"]:
            other = view.text("impl", against["impl"])
            texts[place] += mark(notes, f"measured in another run than {other}: not comparable within a few per cent")
    if len(group) > 1 and not any(group):
        return NOT_RUN
    return " / ".join(text or "·" for text in texts) if len(group) > 1 else texts[0]


def _against(view: View, timed: Sequence[Record]) -> Record | None:
    """The case that others have to be sampled with: the base, else the first."""
    return next((case for case in timed if case["impl"] == view.base), timed[0] if timed else None)


def about_of(field: Field) -> str:
    """A field in words, with its unit."""
    unit, _ = unit_of(field)
    return (field.about or sentence(label_of(field))) + (f", {unit}" if unit else "")


def titled(head: str, view: View) -> str:
    return f"{head} · {view.title}" if view.heading else head


def listing(
    view: View,
    keys: Sequence[str],
    metrics: Sequence[str],
    word: str,
    title: str,
    about: str = "",
    data: Sequence[str] = (),
) -> Table | None:
    """Rows: cases; columns: what tells them apart, then metrics, of which the first says how a case ended."""
    if not view.cases:
        return None
    keys, metrics, notes = view.telling(view.chosen(keys)), view.chosen(metrics), Notes()
    fields = [view.fields[name] for name in metrics]
    rows: list[list[str]] = []
    details: dict[tuple[int, int], str] = {}
    clocked = [len(keys) + at for at, one in enumerate(fields) if is_clocked(one)]
    for case in view.cases:
        details |= dict.fromkeys([(len(rows), at) for at in clocked], detail(view, case))
        found = [cell(view, name, case, notes, ending=name == metrics[0]) for name in metrics]
        rows.append([*replace(view, cases=[case]).constants(keys).values(), *found])
    told = [_told(sentence(label_of(one)), one.about) for one in fields if one.about]
    best: set[tuple[int, int]] = set()
    single = len({case["id"] for case in view.cases}) == len(view.cases)  # else a case has several lines
    for rivals in view.groups("comparison") if single else ():
        line = [case if case["comparison"] == rivals[0] else None for case in view.cases]
        for at, one in enumerate(fields):
            best |= {(row, len(keys) + at) for row in _best(view, one, line)}
    return Table(
        name=view.file(view.filled(word)),
        title=titled(view.filled(title), view),
        caption=view.caption(about or ". ".join(told), any(map(is_clocked, fields))),
        columns=[*(label_of(view.fields[name]) for name in keys), *map(head_of, fields)],
        rows=rows,
        data=data_of(view, *(data or metrics), *(SPREAD if {"time_s", "mean_s"} & {*metrics} else ())),
        notes=below(notes, rows),
        keys=len(keys),
        source=view.machine.about(view.cases),
        best=frozenset(best),
        details=details,
    )


def _told(label: str, about: str) -> str:
    return about if about.startswith(f"{label}:") else f"{label}: {inside_a_sentence(about)}"


def endings(view: View, *keys: str, word: str, title: str) -> Table:
    """How the cases of each row ended."""
    keys = tuple(view.chosen(keys))
    counts, data, rows = ("cases", *ENDINGS), [], []
    for key, own in view.groups(*keys).items():
        found = {"cases": len(own.cases), **Counter(map(_ending, own.cases))}
        data.append({**dict(zip(keys, key, strict=True)), **{name: found.get(name, 0) for name in counts}})
        rows.append([*map(own.text, keys, key), *(f"{found[name]:,}" if name in found else "" for name in counts)])
    return Table(
        name=view.file(word),
        title=title,
        caption="How the cases ended.",
        source=view.machine.about(view.cases),
        columns=[*(label_of(view.fields[key]) for key in keys), *counts],
        rows=rows,
        data=data,
        keys=len(keys),
    )


def _ending(case: Record) -> str:
    if case["outcome"] != "ok":
        return MEANINGS[case["outcome"]]
    return ENDINGS[0] if case["time_s"] is not None else ENDINGS[1]


@dataclass(frozen=True)
class Plot:
    """A drawing; `name` is the stem of its file."""

    name: str
    title: str
    caption: str
    svg: str

    def files(self) -> dict[str, str]:
        return {f"plots/{self.name}.svg": self.svg}


Items = list[Table | Plot | None]


@dataclass(frozen=True)
class Block:
    """Tables and plots of one subject; `lead` comes first, and its first table and plot are read at once."""

    title: str
    lead: Sequence[Table | Plot | None]
    more: Sequence[Table | Plot | None] = ()

    @property
    def items(self) -> list[Table | Plot]:
        return [item for item in (*self.lead, *self.more) if item]


@dataclass(frozen=True)
class Chapter:
    title: str
    blocks: Sequence[Block]


Part = tuple[Machine, Block, Sequence[Chapter]]  # the block holds the answers
