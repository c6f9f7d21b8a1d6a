"""Blocks, tables, plots and the facts of a machine as HTML, in which nothing that a result file says is a tag."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import chain
from typing import Any

from lmsys.bench.fields import Record
from lmsys.reports import cells, load, tables, words
from lmsys.reports.items import Block, Chapter, Plot, Table

BRIEF = 80  # characters: what is no longer is said again rather than linked to
NO_END = {"img", "input", "li", "tbody", "td", "th", "thead", "tr"}  # as these stand in our pages


class Html(str):
    """Text that is HTML already."""


Inside = str | Iterable[str]  # Html stays as it is, all else is text


def tag(name: str, *inside: Inside, **attributes: str | None) -> Html:
    """An element, without the attributes that are None. The one place where text is made safe: all but Html is escaped.

    End tags that the HTML standard lets a writer omit (13.1.2.4) are omitted, a tenth of a page's bytes.
    """
    given = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    start = "".join(f' {key}="{escape(value)}"' for key, value in given)
    return Html(f"<{name}{start}>" + "".join(map(joined, inside)) + f"</{name}>" * (name not in NO_END))


def joined(part: Inside) -> Html:
    return (
        part if isinstance(part, Html) else Html(escape(part) if isinstance(part, str) else "".join(map(joined, part)))
    )


def tags(name: str, texts: Iterable[str]) -> Html:
    """An element for each of these."""
    return joined(tag(name, text) for text in texts)


def _names(items: Sequence[Table | Plot]) -> str:
    return ", ".join(dict.fromkeys([words.inside_a_sentence(_brief(item).partition(",")[0]) for item in items]))


def _brief(item: Table | Plot) -> str:
    """The title without what the heading above it already says."""
    return item.title.partition(" · ")[0]


def _of_kind(items: Iterable[Table | Plot | None], kind: type) -> list[Any]:
    return [item for item in items if isinstance(item, kind)]


def _gist(block: Block, subject: str = "", otherwise: str = "") -> Html:
    """The answer of a block's first table that has one, for who does not open it."""
    text = ([table.answer for table in _of_kind(block.items, Table) if table.answer] + [otherwise])[0]
    return tag("span", f"{subject}: {text}" if subject else text, class_="gist") if text else Html()


@dataclass(frozen=True)
class Figures:
    """Blocks, tables and plots as HTML; with `inline` plots stand in the page, and no link leads out of it."""

    inline: bool
    _named: set[str] = field(default_factory=set, init=False)
    _explained: dict[str, str] = field(default_factory=dict, init=False)  # where the page says what a figure shows

    def _anchor(self, name: str) -> str | None:
        """The id of a figure, for the first of those that a page shows twice."""
        is_first = name not in self._named
        self._named.add(name)
        return name if is_first else None

    def answers(self, block: Block) -> Html:
        """Each question with its plot beside it; what is seldom asked behind a click."""
        inside = [
            tag("div", self._table(table), self._plot(table.plot) if table.plot else "", class_="answer")
            for table in _of_kind(block.lead, Table)
        ]
        inside += [
            tag(
                "details",
                tag("summary", f"{table.title}: {len(table.rows)} reason{'s' * (len(table.rows) > 1)}"),
                self._table(table),
            )
            for table in _of_kind(block.more, Table)
        ]
        return tag("div", inside, class_="answers")

    def chapter(self, chapter: Chapter, anchor: str, is_open: bool) -> Html:
        """Its title and answer, and at a click its first block, then the others, each behind a click of its own."""
        first, *others = (block for block in chapter.blocks if block.items)
        subject = "" if chapter.title.endswith(first.title) else first.title
        inside = [tag("h4", subject) if subject else "", self._block(first)]
        inside += [
            tag(
                "details",
                tag("summary", tag("h4", block.title or words.sentence(_names(block.items))), _gist(block)),
                self._block(block),
                class_="block",
                id=f"{anchor}-{at}",
            )
            for at, block in enumerate(others)
        ]
        summary = tag("summary", tag("h3", chapter.title), _gist(first, subject, _brief(first.items[0])))
        return tag("details", summary, inside, class_="chapter", id=anchor, open="" if is_open else None)

    def _block(self, block: Block) -> Html:
        """Its first table beside its first plot, and all else behind a click."""
        known = set[str]()
        first = _of_kind(block.lead, Table)[:1] + _of_kind(block.lead, Plot)[:1]
        more = [item for item in block.items if item not in first]
        first, more = ([_said_once(item, block.title, known) for item in items] for items in (first, more))
        pair = tag("div", self._figures(first), class_="pair")
        summary = tag("summary", f"More: {_names(more)}")
        return joined([pair, tag("details", summary, tag("template", self._figures(more))) if more else ""])

    def _figures(self, items: Sequence[Table | Plot]) -> list[Html]:
        """Tables one below another, then plots side by side as far as the screen is wide."""
        figures = list(map(self._table, _of_kind(items, Table)))
        plots = list(map(self._plot, _of_kind(items, Plot)))
        return figures + [tag("div", plots, class_="plots")] * bool(plots)

    def _plot(self, plot: Plot) -> Html:
        file = f"plots/{plot.name}.svg"
        if self.inline:
            image = tag("div", Html(plot.svg[plot.svg.index("<svg") :]), role="img", aria_label=plot.title)
        else:
            width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', plot.svg)[:2]
            image = tag("img", src=file, alt=plot.title, loading="lazy", width=width, height=height)
        anchor = f"plot-{plot.name}"
        caption = tag("figcaption", self._caption(plot.caption, anchor), self._link("SVG", file))
        return tag("figure", image, caption, id=self._anchor(anchor))

    def _caption(self, caption: str, anchor: str) -> list[str]:
        """The caption of a figure, or a link to where the page has said it; then what is held constant in it."""
        about, _, held = caption.partition("\n")
        first = self._explained.setdefault(about, anchor)
        is_known = first != anchor and len(about) > BRIEF
        shown = tag("a", "What this shows.", href=f"#{first}") if is_known else about
        return [shown, f" {held}" if held else ""]

    def _link(self, name: str, file: str) -> Html:
        """A link to a file beside the page; none in a page that is sent alone."""
        return Html() if self.inline else joined([" ", tag("a", name, href=file)])

    def _table(self, table: Table) -> Html:
        keys, others = table.columns[: table.keys], table.columns[table.keys :]
        head = [tag("th", key or "row", class_="key") for key in keys] + [tags("th", others)]
        rows = [_line(table, at) for at in range(len(table.rows))]
        inside = tag("div", tag("table", tag("thead", tag("tr", head)), tag("tbody", rows)), class_="scroll")
        anchor = f"table-{table.name}"
        title = tag("a", _brief(table), href=f"#{anchor}", class_="title")
        links = self._link("CSV", f"tables/{table.name}.csv"), self._link("Markdown", f"tables/{table.name}.md")
        caption = tag("figcaption", self._caption(table.caption, anchor), links)
        if not table.runs:
            return tag("figure", title, inside, _list(table.notes), caption, id=self._anchor(anchor))
        marks = [note for note in table.notes if note[0] in cells.SUPERSCRIPTS]
        behind = [note for note in table.notes if note not in marks]
        made = [joined([f"{run}, made by: ", tag("code", command)]) for run, command in table.runs]
        summary = tag("summary", "How to read this, and the runs and commands behind it")
        details = tag("details", summary, _list(made), _list(behind), caption, class_="source")
        return tag("figure", title, inside, _list(marks), details, id=self._anchor(anchor))


def _said_once(item: Table | Plot, heading: str, known: set[str]) -> Table | Plot:
    """The figure without what its block's heading or a figure above it says of its cases."""
    about, *held = item.caption.splitlines() or [""]
    lines = [line for line in held if line not in known]
    if isinstance(item, Table):
        notes = [note for note in item.notes if note not in known or not note.startswith(tables.LEFT_OUT)]
        item = replace(item, notes=notes)
        known.update(notes)
    elif about in known:
        about = ""
    known.update(lines, [about])
    short = [words.sentence(line.removeprefix(heading).removeprefix("; ").removeprefix(".")) for line in lines]
    return replace(item, caption="\n".join([about, " ".join(filter(None, short))]))


def _list(notes: Sequence[str]) -> Html:
    return tag("ul", tags("li", notes), class_="notes") if notes else Html()


def _line(table: Table, row: int) -> Html:
    """A row. Details that all its cells share are the row's own, since rows sampled together share most."""
    columns = range(table.keys, len(table.rows[row]))
    details = {at: table.details.get((row, at), "").split(cells.DETAILS) for at in columns}
    several = [facts for facts in details.values() if facts != [""]]
    common = [fact for fact in several[0] if all(fact in facts for facts in several)] if len(several) > 1 else []
    values = [_value(table, row, at, [fact for fact in details[at] if fact not in common]) for at in columns]
    return tag("tr", tags("th", table.rows[row][: table.keys]), values, title=cells.DETAILS.join(common) or None)


def _value(table: Table, row: int, column: int, details: Sequence[str]) -> Html:
    """A cell; the best of its line, and what was wrong, are told apart."""
    text = table.rows[row][column]
    kind = "wrong" if words.OUTCOMES["wrong"] in text else "best" if (row, column) in table.best else None
    head = table.columns[column] if table.runs else None
    return tag("td", text, class_=kind, title=cells.DETAILS.join(details) or None, data_head=head)


FACTS = "date commit command sweep seed driver cuda torch triton python platform".split()

SETTINGS = {  # of a machine: label and unit
    "ecc": ("ECC", ""),
    "mig": ("MIG", ""),
    "persistence": ("persistence mode", ""),
    "power_limit_w": ("power limit", "W"),
    "power_sensor": ("sensor of power", ""),
    "max_sm_mhz": ("highest SM clock", "MHz"),
    "max_memory_mhz": ("highest memory clock", "MHz"),
    "governor": ("CPU frequency governor", ""),
}


def runs_of(machine: load.Machine) -> Html:
    """The runs in a line: how many, when, of which commits, and the command where it is one."""
    days = sorted({str(run.get("date") or "undated")[:10] for run in machine.runs})
    commits = dict.fromkeys(str(run.get("commit") or "unknown")[:10] for run in machine.runs)
    count = f"{len(machine.runs)} runs" if len(machine.runs) > 1 else "One run"
    several = f"{len(commits)} commits" if len(commits) > 1 else f"commit {''.join(commits)}"
    text = f"{count}, {words.span(days)}, {several}: {len(machine.records):,} cases. "
    command, *others = {str(run.get("command") or "") for run in machine.runs}
    return tag("p", text, tag("code", command) if command and not others else "")


def facts_of(runs: Sequence[Record]) -> Html:
    """The runs behind a machine's figures: what all have in common, then a line for each with what they have not."""
    facts = list(map(_of_run, runs))
    values = {name: [run.get(name, "–") for run in facts] for name in dict.fromkeys(chain(*facts))}
    differing = {name: texts for name, texts in values.items() if len(set(texts)) > 1}
    tables = [[tag("tr", tag("th", name), tag("td", values[name][0])) for name in values if name not in differing]]
    if differing:
        body = [tag("tr", tags("td", texts)) for texts in zip(*differing.values(), strict=True)]
        tables.append([tag("thead", tag("tr", tags("th", differing))), tag("tbody", body)])
    return joined(tag("div", tag("table", rows, class_="facts"), class_="scroll") for rows in tables)


def _of_run(run: Record) -> dict[str, str]:
    facts = {name: str(run[name]) for name in FACTS if run.get(name) not in (None, "")}
    if run.get("dirty") and "commit" in facts:
        facts["commit"] += " with local changes"
    if run.get("memory_bytes"):
        facts["memory"] = f"{run['memory_bytes'] / 2**30:.1f} GiB"
    short = load.matmul_rates(run)
    for dtype, rate in sorted(short.items()):
        facts[f"matmul {dtype}"] = f"{words.number(rate / 1e12)} TFLOP/s"
    if copy := (run.get("ceilings") or {}).get("copy_bytes_per_s"):
        facts["copy"] = f"{words.number(copy / 1e9)} GB/s"
    sustained = run.get("sustained") or {}
    state = cells.state_of(sustained) + [f"clock held by {sustained.get('clock_reasons')}"] * bool(
        sustained.get("clock_reasons")
    )
    for dtype, rate in (sustained.get("matmul_flops_per_s") or {}).items():
        share = [f"{rate / short[dtype]:.0%} of the short one"] if short.get(dtype) else []
        facts[f"matmul {dtype}, sustained"] = ", ".join([f"{words.number(rate / 1e12)} TFLOP/s", *share, *state])
    settings = run.get("settings") or {}
    for name, (label, unit) in SETTINGS.items():
        if settings.get(name) not in (None, ""):
            facts[label] = f"{words.exact(settings[name])} {unit}".strip()
    return facts
