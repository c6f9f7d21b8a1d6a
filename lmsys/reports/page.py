"""The page: answers, then chapters, as HTML, with its tables and plots in files beside it."""

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from lmsys.bench.fields import Record
from lmsys.reports import folder
from lmsys.reports.canvas import Plot
from lmsys.reports.cells import DETAILS, STATE
from lmsys.reports.load import InputError, Machine, file_name, matmul_rates
from lmsys.reports.tables import Table
from lmsys.reports.views import View
from lmsys.reports.words import OUTCOMES, exact, number, span

GENERATOR = '<meta name="generator" content="lmsys reports">'
CSS, SCRIPT = ((Path(__file__).parent / name).read_text() for name in ("page.css", "page.js"))
# Whatever a result file says, and wherever it gets: the page loads its own plots alone, and runs its own script alone.
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; font-src data:; script-src 'sha256-{_HASH}'"
)
LEAD = (
    "lmsys measures attention kernels and data-parallel training side by side. Only results that were checked, and are "
    "right, have times. A row is one implementation, such as a kernel or a strategy, named as on the command line. A "
    "case is one row in one setting, such as a shape and a dtype."
)
LETTERS = "B is the batch, H the heads, Q the queries, K the keys, S the queries and keys alike, D the size of a head."
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

Items = list[Table | Plot | None]


@dataclass(frozen=True)
class Block:
    """Tables and plots of one subject: `lead` is read at once, `more` behind a click. The title leads to `chapter`."""

    title: str
    lead: Sequence[Table | Plot | None]
    more: Sequence[Table | Plot | None] = ()
    chapter: str = ""

    @property
    def items(self) -> list[Table | Plot]:
        return [item for item in (*self.lead, *self.more) if item]


@dataclass(frozen=True)
class Chapter:
    title: str
    blocks: Sequence[Block]


Part = tuple[Machine, Block, Sequence[Chapter]]  # the block holds the answers


def with_overview(
    title: str, last: Sequence[Table | None], view: View, section: Callable[[str, View], tuple[Items, list[Block]]]
) -> list[Chapter]:
    """An overview, then a chapter for each grid: `section` makes what the overview shows of it, and its blocks."""
    overview, found = [Block("", last)], []
    for (name,), own in view.groups("section").items():
        glance, blocks = section(name, own)
        heading = own.text("section", name)
        found.append(Chapter(f"{title}: {heading}", blocks))
        overview.insert(-1, Block(heading, glance, chapter=found[-1].title))
    return [Chapter(title, overview), *found]


class Html(str):
    """Text that is HTML already."""


UP = Html('<p class="up"><a href="#top">↑ Top</a> <a href="#contents">Contents</a></p>')


def tag(name: str, *inside: str, **attributes: str) -> Html:
    """An element. The one place where text is made safe: all but Html is escaped, attributes too."""
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{said}>{joined(inside)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def write(out: Path, parts: Sequence[Part], records_csv: str, notes: Sequence[str], single_file: bool = False) -> Path:
    """Fill a folder in place of an earlier report; the path of its page. InputError if it cannot be written."""
    files = {"index.html": html(parts, notes, single_file), "tables/records.csv": records_csv}
    for _, answers, chapters in parts:
        for block in (answers, *(block for chapter in chapters for block in chapter.blocks)):
            for item in block.items:
                files |= item.files()
    try:
        folder.write(out, files)
    except ValueError as error:
        raise InputError(f"cannot write the report: {error}") from error
    except OSError as error:
        raise InputError(f"cannot write the report to {str(out)!r}: {error.strerror}") from error
    return out / "index.html"


def html(parts: Sequence[Part], notes: Sequence[str], single_file: bool = False) -> str:
    """The page: every machine's answers, a contents list, then every machine with its facts and chapters.

    `single_file`: plots stand in the page, not in files beside it.
    """
    first, contents, body = [], [], []
    figures = Figures(single_file)
    for machine, answers, chapters in parts:
        anchors = {chapter.title: f"{machine.slug}-{file_name(chapter.title.lower())}" for chapter in chapters}
        links = [tag("li", tag("a", title, href=f"#{anchor}")) for title, anchor in anchors.items()]
        contents.append(tag("li", tag("a", machine.title, href=f"#{machine.slug}"), tag("ul", *links)))
        shown = tag("div", figures.block(answers, {}), class_="answers")
        first.append(tag("section", tag("h2", machine.title), _runs(machine), shown))
        facts = tag("details", tag("summary", "Machine, versions and runs"), _facts(machine.runs))
        inside = [tag("h2", f"{machine.title}: everything measured", id=machine.slug), facts]
        for chapter in chapters:
            inside.append(tag("h3", chapter.title, id=anchors[chapter.title]))
            inside += [figures.block(block, anchors) for block in chapter.blocks if block.items]
        body.append(tag("section", *inside))
    csv = tag("a", "records.csv", href="tables/records.csv")
    names = sorted({str(case["impl"]) for machine, _, _ in parts for case in machine.records})
    said = [tag("p", note) for note in notes]
    said.append(tag("p", "Every measured case is in ", csv, f"; each table and plot links to its own file. {LETTERS}"))
    made = tag("code", "python -m lmsys.reports RESULT.json ... -o DIR")
    said.append(
        tag(
            "p",
            "The commands that measured this are below each table of answers and, all of them, in “Machine, versions "
            "and runs”. ",
            made,
            " builds this page.",
        )
    )
    head = joined([tag("h1", "lmsys report", id="top"), tag("p", LEAD)])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lmsys report</title>\n<style>\n{CSS}</style>\n<script>{SCRIPT}</script></head>\n<body>\n"
        + tag("main", head, *first, *said, _contents(contents, names), *body, UP)
        + "\n</body></html>\n"
    )


def _contents(links: Sequence[Html], names: Sequence[str]) -> Html:
    """The contents, the field that filters rows, what a click on a figure says, and a line for who has no scripts."""
    field = Html('<input id="only" type="search" list="rows" placeholder="flash_gluon, sdpa">')
    said = (
        " Type parts of names, and the tables show these rows alone. A click on a column's head sorts by it; one on a"
        " figure says its rounds, spread, error and run."
    )
    return joined(
        [
            tag("p", tag("label", "Rows: ", field), said, class_="controls"),
            tag("nav", tag("ul", *links, id="contents")),
            tag("datalist", *(tag("option", value=name) for name in names), id="rows"),
            tag("output", id="said"),
            tag("noscript", tag("p", "Without scripts, what is behind “More” is in the folders tables/ and plots/.")),
        ]
    )


def _runs(machine: Machine) -> Html:
    """The runs in a line: how many, when, of which commits, and the command where it is one."""
    days = sorted({str(run.get("date") or "undated")[:10] for run in machine.runs})
    commits = dict.fromkeys(str(run.get("commit") or "unknown")[:10] for run in machine.runs)
    count = f"{len(machine.runs)} runs" if len(machine.runs) > 1 else "One run"
    several = f"{len(commits)} commits" if len(commits) > 1 else f"commit {[*commits][0]}"
    said = f"{count}, {span(days)}, {several}: {len(machine.records):,} cases. "
    commands = {str(run.get("command") or "") for run in machine.runs}
    command = commands.pop() if len(commands) == 1 else ""
    return tag("p", said, *([tag("code", command)] if command else []))


def _facts(runs: Sequence[Record]) -> Html:
    """The runs behind a machine's figures: what all have in common, then a line for each with what they have not."""
    told = [_facts_of(run) for run in runs]
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


def _facts_of(run: Record) -> dict[str, str]:
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


def _brief(item: Table | Plot) -> str:
    """The title without what the heading above it already says."""
    return item.title.split(" · ")[0]


@dataclass(frozen=True)
class Figures:
    """Blocks, tables and plots as HTML; with `inline` plots stand in the page."""

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
        inside = [*([tag("h4", title)] if title else []), self._figures(block.lead)]
        if names := dict.fromkeys(_brief(item).split(",")[0].lower() for item in block.more if item):
            more = tag("template", self._figures(block.more))
            inside.append(tag("details", tag("summary", f"More: {', '.join(names)}"), more))
        if sources := dict.fromkeys(item.source for item in block.items if item.source):
            said = tag("template", *(tag("p", source) for source in sources))
            inside.append(tag("details", tag("summary", "Where these numbers are from"), said, class_="source"))
        return joined(inside)

    def _figures(self, items: Sequence[Table | Plot | None]) -> Html:
        """Tables one below another, then plots side by side as far as the screen is wide."""
        plots = [self._plot(item) for item in items if isinstance(item, Plot)]
        tables = [self._table(item) for item in items if isinstance(item, Table)]
        return joined([*tables, *([tag("div", *plots, class_="plots")] if plots else [])])

    def _plot(self, plot: Plot) -> Html:
        file = f"plots/{plot.name}.svg"
        if self.inline:
            image = tag("div", Html(plot.svg[plot.svg.index("<svg") :]), role="img", aria_label=plot.title)
        else:
            width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', plot.svg)[:2]
            image = tag("img", src=file, alt=plot.title, loading="lazy", width=width, height=height)
        caption = tag("figcaption", plot.caption, " ", tag("a", "SVG", href=file))
        return tag("figure", image, caption, **self._anchor(f"plot-{plot.name}"))

    def _table(self, table: Table) -> Html:
        keys = table.keys
        head = [
            tag("th", column or "row", **({"class_": "value"} if i >= keys else {}))
            for i, column in enumerate(table.columns)
        ]
        rows = [_line(table, i) for i in range(len(table.rows))]
        inside = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
        notes = [tag("ul", *(tag("li", note) for note in table.notes), class_="notes")] if table.notes else []
        ends = ("CSV", "csv"), ("Markdown", "md")
        files = [tag("a", name, href=f"tables/{table.name}.{end}") for name, end in ends]
        caption = tag("figcaption", table.caption, " ", files[0], " ", files[1])
        anchor = f"table-{table.name}"
        title = tag("p", tag("a", _brief(table), href=f"#{anchor}"), class_="title")
        inside = tag("div", inside, class_="scroll")
        return tag("figure", title, inside, *notes, caption, *_made_by(table), **self._anchor(anchor))


def _made_by(table: Table) -> list[Html]:
    """The runs that a table's lines come from, behind a click that needs no script."""
    if not table.runs:
        return []
    told = f"From {len(table.runs)} runs, by these commands" if len(table.runs) > 1 else "From one run, by this command"
    lines = [tag("li", f"From the run of {run}, made by: ", tag("code", command)) for run, command in table.runs]
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
