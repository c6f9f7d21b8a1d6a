"""Blocks, tables and plots as HTML."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmsys.reports.blocks import Block
from lmsys.reports.canvas import Plot
from lmsys.reports.cells import DETAILS
from lmsys.reports.tables import LEFT_OUT, Table
from lmsys.reports.tags import Html, joined, tag
from lmsys.reports.words import OUTCOMES, inside_a_sentence


def _brief(item: Table | Plot) -> str:
    """The title without what the heading above it already says."""
    return item.title.split(" · ")[0]


@dataclass(frozen=True)
class Figures:
    """Blocks, tables and plots as HTML; with `inline` plots stand in the page, and no link leads out of it."""

    inline: bool
    _named: set[str] = field(default_factory=set, init=False)

    def _anchor(self, name: str) -> dict[str, str]:
        """The id of a figure, for the first of those that a page shows twice."""
        if name in self._named:
            return {}
        self._named.add(name)
        return {"id": name}

    def block(self, block: Block, anchors: dict[str, str]) -> Html:
        title = tag("a", block.title, href=f"#{anchors[block.chapter]}") if block.chapter else block.title
        told: set[str] = set()
        inside = [*([tag("h4", title)] if title else []), self._figures(block.lead, told)]
        if names := dict.fromkeys(inside_a_sentence(_brief(item).split(",")[0]) for item in block.more if item):
            more = tag("template", self._figures(block.more, told))
            inside.append(tag("details", tag("summary", f"More: {', '.join(names)}"), more))
        others = [item for item in block.items if not (isinstance(item, Table) and item.runs)]  # those name their runs
        if sources := dict.fromkeys(item.source for item in others if item.source):
            said = tag("template", *(tag("p", source) for source in sources))
            inside.append(tag("details", tag("summary", "Where these numbers are from"), said, class_="source"))
        return joined(inside)

    def _figures(self, items: Sequence[Table | Plot | None], told: set[str]) -> Html:
        """Tables one below another, then plots side by side as far as the screen is wide."""
        tables = [self._table(item, told) for item in items if isinstance(item, Table)]
        plots = [self._plot(item, told) for item in items if isinstance(item, Plot)]
        return joined([*tables, *([tag("div", *plots, class_="plots")] if plots else [])])

    def _plot(self, plot: Plot, told: set[str]) -> Html:
        file = f"plots/{plot.name}.svg"
        if self.inline:
            image = tag("div", Html(plot.svg[plot.svg.index("<svg") :]), role="img", aria_label=plot.title)
        else:
            width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', plot.svg)[:2]
            image = tag("img", src=file, alt=plot.title, loading="lazy", width=width, height=height)
        caption = self._caption(plot, told, {"SVG": file})
        return tag("figure", image, caption, **self._anchor(f"plot-{plot.name}"))

    def _caption(self, item: Table | Plot, told: set[str], files: Mapping[str, str]) -> Html:
        """Says what the item shows, then of its cases what the block has not told above it; links to the files."""
        about, *held = item.caption.splitlines() or [""]
        lines = [line for line in held if line not in told]
        told.update(lines)
        return tag("figcaption", " ".join([about, *lines]), *self._links(files))

    def _links(self, files: Mapping[str, str]) -> list[str]:
        """Links to files beside the page, by what they are called; none in a page that is sent alone."""
        links = [] if self.inline else [tag("a", name, href=file) for name, file in files.items()]
        return [text for link in links for text in (" ", link)]

    def _table(self, table: Table, told: set[str]) -> Html:
        keys = table.keys
        head = [
            tag("th", column or "row", **({"class_": "key"} if i < keys else {}))
            for i, column in enumerate(table.columns)
        ]
        rows = [_line(table, i) for i in range(len(table.rows))]
        inside = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
        below = [note for note in table.notes if note not in told or not note.startswith(LEFT_OUT)]
        told.update(below)
        notes = [tag("ul", *(tag("li", note) for note in below), class_="notes")] if below else []
        ends = {"CSV": "csv", "Markdown": "md"}
        files = {name: f"tables/{table.name}.{end}" for name, end in ends.items()}
        caption = self._caption(table, told, files)
        anchor = f"table-{table.name}"
        title = tag("a", _brief(table), href=f"#{anchor}", class_="title")
        inside = tag("div", inside, class_="scroll")
        return tag("figure", title, inside, *notes, caption, *_made_by(table), **self._anchor(anchor))


def _made_by(table: Table) -> list[Html]:
    """The runs that a table's lines come from, behind a click that needs no script."""
    if not table.runs:
        return []
    told = f"From {len(table.runs)} runs, by these commands" if len(table.runs) > 1 else "From one run, by this command"
    lines = [tag("li", f"{run}, made by: ", tag("code", command)) for run, command in table.runs]
    return [tag("details", tag("summary", told), tag("ul", *lines, class_="notes"), class_="source")]


def _line(table: Table, row: int) -> Html:
    """A row. Details that all its cells share are the row's own, since rows sampled together share most."""
    texts, columns = table.rows[row], range(table.keys, len(table.rows[row]))
    details = {at: said.split(DETAILS) for at in columns if (said := table.details.get((row, at)))}
    shared = next(iter(details.values())) if len(details) > 1 else list[str]()
    common = [part for part in shared if all(part in own for own in details.values())]
    own = {at: DETAILS.join(part for part in parts if part not in common) for at, parts in details.items()}
    cells = [_value(table, row, at, own.get(at, "")) for at in columns]
    title = {"title": DETAILS.join(common)} if common else {}
    return tag("tr", *(tag("th", text) for text in texts[: table.keys]), *cells, **title)


def _value(table: Table, row: int, column: int, said: str) -> Html:
    """A cell; the best of its line, and what was wrong, are told apart."""
    text = table.rows[row][column]
    kind = "wrong" if OUTCOMES["wrong"] in text else "best" if (row, column) in table.best else ""
    facts = {"class_": kind, "title": said}
    return tag("td", text, **{name: value for name, value in facts.items() if value})
