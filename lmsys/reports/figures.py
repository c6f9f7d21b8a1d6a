"""Blocks, tables, plots and the facts of a machine as HTML, in which nothing that a result file says is a tag."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from lmsys.bench.fields import Record
from lmsys.reports.cells import DETAILS, STATE
from lmsys.reports.load import Machine, matmul_rates
from lmsys.reports.tables import LEFT_OUT, Block, Plot, Table
from lmsys.reports.words import OUTCOMES, exact, inside_a_sentence, number, span

NO_END = {"img", "input", "li", "tbody", "td", "th", "thead", "tr"}  # as these stand in our pages


class Html(str):
    """Text that is HTML already."""


def tag(name: str, *inside: str, **attributes: str) -> Html:
    """An element. The one place where text is made safe: all but Html is escaped, attributes too.

    End tags that the HTML standard lets a writer omit (13.1.2.4) are omitted, a tenth of a page's bytes.
    """
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{said}>{joined(inside)}" + (f"</{name}>" if name not in NO_END else ""))


def joined(parts: Iterable[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


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


def runs_of(machine: Machine) -> Html:
    """The runs in a line: how many, when, of which commits, and the command where it is one."""
    days = sorted({str(run.get("date") or "undated")[:10] for run in machine.runs})
    commits = dict.fromkeys(str(run.get("commit") or "unknown")[:10] for run in machine.runs)
    count = f"{len(machine.runs)} runs" if len(machine.runs) > 1 else "One run"
    several = f"{len(commits)} commits" if len(commits) > 1 else f"commit {[*commits][0]}"
    said = f"{count}, {span(days)}, {several}: {len(machine.records):,} cases. "
    commands = {str(run.get("command") or "") for run in machine.runs}
    command = commands.pop() if len(commands) == 1 else ""
    return tag("p", said, *([tag("code", command)] if command else []))


def facts_of(runs: Sequence[Record]) -> Html:
    """The runs behind a machine's figures: what all have in common, then a line for each with what they have not."""
    told = [_of_run(run) for run in runs]
    names = dict.fromkeys(name for facts in told for name in facts)
    rows = {name: [facts.get(name, "–") for facts in told] for name in names}
    common = [
        tag("tr", tag("th", name), tag("td", values[0])) for name, values in rows.items() if len(set(values)) == 1
    ]
    own = {name: values for name, values in rows.items() if len(set(values)) > 1}
    head = tag("thead", tag("tr", *(tag("th", name) for name in own)))
    lines = [tag("tr", *(tag("td", value) for value in line)) for line in zip(*own.values(), strict=True)]
    found = [common, [head, tag("tbody", *lines)]] if own else [common]
    return joined(tag("div", tag("table", *rows, class_="facts"), class_="scroll") for rows in found)


def _of_run(run: Record) -> dict[str, str]:
    copy, memory = (run.get("ceilings") or {}).get("copy_bytes_per_s"), run.get("memory_bytes")
    facts = {name: str(run[name]) for name in FACTS if run.get(name) not in (None, "")}
    facts |= {"commit": f"{facts['commit']} with local changes"} if run.get("dirty") and "commit" in facts else {}
    facts |= {"memory": f"{memory / 2**30:.1f} GiB"} if memory else {}
    facts |= {f"matmul {dtype}": f"{number(rate / 1e12)} TFLOP/s" for dtype, rate in sorted(matmul_rates(run).items())}
    facts |= {"copy": f"{number(copy / 1e9)} GB/s"} if copy else {}
    return facts | _sustained(run) | _settings(run.get("settings") or {})


def _sustained(run: Record) -> dict[str, str]:
    """The matmul that the machine keeps up, beside the one that it reaches for a moment."""
    found, short = run.get("sustained") or {}, matmul_rates(run)
    facts = {}
    for dtype, rate in (found.get("matmul_flops_per_s") or {}).items():
        told = [f"{number(rate / 1e12)} TFLOP/s"]
        told += [f"{rate / short[dtype]:.0%} of the short one"] if short.get(dtype) else []
        told += [f"{label} {exact(round(found[name]))} {unit}" for name, label, unit in STATE if found.get(name)]
        facts[f"matmul {dtype}, sustained"] = ", ".join(told)
    return facts


def _settings(found: Record) -> dict[str, str]:
    known = {name: words for name, words in SETTINGS.items() if found.get(name) is not None}
    return {label: f"{_told(found[name])} {unit}".strip() for name, (label, unit) in known.items()}


def _told(value: object) -> str:
    return exact(value) if isinstance(value, int | float) else str(value)
