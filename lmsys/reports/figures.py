"""Blocks, tables, plots and the facts of a machine as HTML, in which nothing that a result file says is a tag."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from lmsys.bench.fields import Record
from lmsys.reports.cells import DETAILS, STATE, SUPERSCRIPTS
from lmsys.reports.items import Block, Chapter, Plot, Table
from lmsys.reports.load import Machine, matmul_rates
from lmsys.reports.tables import LEFT_OUT
from lmsys.reports.words import OUTCOMES, digits, exact, inside_a_sentence, number, sentence, span

BRIEF = 80  # characters: what is no longer is said again rather than linked to
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


def _names(items: Sequence[Table | Plot]) -> str:
    return ", ".join(dict.fromkeys(inside_a_sentence(_brief(item).split(",")[0]) for item in items))


def _brief(item: Table | Plot) -> str:
    """The title without what the heading above it already says."""
    return item.title.split(" · ")[0]


def _has_items(block: Block) -> bool:
    return bool(block.items)


def _gist(block: Block, subject: str = "", otherwise: str = "") -> Html:
    """The answer of a block's first table that has one, for who does not open it."""
    answers = (item.answer for item in block.items if isinstance(item, Table) and item.answer)
    text = next(answers, otherwise)
    return tag("span", f"{subject}: {text}" if subject else text, class_="gist") if text else Html()


@dataclass(frozen=True)
class Figures:
    """Blocks, tables and plots as HTML; with `inline` plots stand in the page, and no link leads out of it."""

    inline: bool
    _named: set[str] = field(default_factory=set, init=False)
    _explained: dict[str, str] = field(default_factory=dict, init=False)  # where the page says what a figure shows

    def _anchor(self, name: str) -> dict[str, str]:
        """The id of a figure, for the first of those that a page shows twice."""
        if name in self._named:
            return {}
        self._named.add(name)
        return {"id": name}

    def answers(self, block: Block) -> Html:
        """Each question with its plot beside it; what is seldom asked behind a click."""
        inside = [
            tag("div", self._table(item), *map(self._plot, [item.plot] if item.plot else []), class_="answer")
            for item in block.lead
            if isinstance(item, Table)
        ]
        folded = [
            tag("details", tag("summary", f"{item.title}: {len(item.rows)} reason{'s' * (len(item.rows) > 1)}"), self._table(item))
            for item in block.more
            if isinstance(item, Table)
        ]
        return tag("div", *inside, *folded, class_="answers")

    def chapter(self, chapter: Chapter, anchor: str, is_open: bool) -> Html:
        """Its title and answer, and at a click its first block, then the others, each behind a click of its own."""
        first, *others = filter(_has_items, chapter.blocks)
        subject = "" if chapter.title.endswith(first.title) else first.title
        inside = [tag("h4", subject)] if subject else []
        inside.append(self._block(first))
        for at, block in enumerate(others):
            title = block.title or sentence(_names(block.items))
            summary = tag("summary", tag("h4", title), _gist(block))
            inside.append(tag("details", summary, self._block(block), class_="block", id=f"{anchor}-{at}"))
        summary = tag("summary", tag("h3", chapter.title), _gist(first, subject, _brief(first.items[0])))
        opened = {"open": ""} if is_open else {}
        return tag("details", summary, *inside, class_="chapter", id=anchor, **opened)

    def _block(self, block: Block) -> Html:
        """Its first table beside its first plot, and all else behind a click."""
        told = set[str]()
        tables, plots = ([item for item in block.lead if isinstance(item, kind)] for kind in (Table, Plot))
        first = [_told_once(item, block.title, told) for item in (*tables[:1], *plots[:1])]
        more = [_told_once(item, block.title, told) for item in block.items if item not in (*tables[:1], *plots[:1])]
        inside = [tag("div", *self._figures(first), class_="pair")]
        if more:
            inside.append(
                tag("details", tag("summary", f"More: {_names(more)}"), tag("template", *self._figures(more)))
            )
        return joined(inside)

    def _figures(self, items: Sequence[Table | Plot]) -> list[Html]:
        """Tables one below another, then plots side by side as far as the screen is wide."""
        tables = [self._table(item) for item in items if isinstance(item, Table)]
        plots = [self._plot(item) for item in items if isinstance(item, Plot)]
        return [*tables, *([tag("div", *plots, class_="plots")] if plots else [])]

    def _plot(self, plot: Plot) -> Html:
        file = f"plots/{plot.name}.svg"
        if self.inline:
            image = tag("div", Html(plot.svg[plot.svg.index("<svg") :]), role="img", aria_label=plot.title)
        else:
            width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', plot.svg)[:2]
            image = tag("img", src=file, alt=plot.title, loading="lazy", width=width, height=height)
        anchor = f"plot-{plot.name}"
        caption = tag("figcaption", *self._caption(plot.caption, anchor), *self._links({"SVG": file}))
        return tag("figure", image, caption, **self._anchor(anchor))

    def _caption(self, caption: str, anchor: str) -> list[str]:
        """The caption of a figure, or a link to where the page has said it; then what is held constant in it."""
        about, _, held = caption.partition("\n")
        first = self._explained.setdefault(about, anchor)
        is_said = first != anchor and len(about) > BRIEF
        shown = tag("a", "What this shows.", href=f"#{first}") if is_said else about
        return [shown, f" {held}" if held else ""]

    def _links(self, files: Mapping[str, str]) -> list[str]:
        """Links to files beside the page, by what they are called; none in a page that is sent alone."""
        links = [] if self.inline else [tag("a", name, href=file) for name, file in files.items()]
        return [text for link in links for text in (" ", link)]

    def _table(self, table: Table) -> Html:
        head = [
            tag("th", column or "row", **({"class_": "key"} if at < table.keys else {}))
            for at, column in enumerate(table.columns)
        ]
        rows = [_line(table, at) for at in range(len(table.rows))]
        inside = tag("div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows)), class_="scroll")
        anchor = f"table-{table.name}"
        title = tag("a", _brief(table), href=f"#{anchor}", class_="title")
        ends = {"CSV": f"tables/{table.name}.csv", "Markdown": f"tables/{table.name}.md"}
        caption = tag("figcaption", *self._caption(table.caption, anchor), *self._links(ends))
        if not table.runs:
            return tag("figure", title, inside, *_list(table.notes), caption, **self._anchor(anchor))
        marks = [note for note in table.notes if note[0] in SUPERSCRIPTS]
        behind = [note for note in table.notes if note not in marks]
        made = [joined([f"{run}, made by: ", tag("code", command)]) for run, command in table.runs]
        summary = tag("summary", "How to read this, and the runs and commands behind it")
        details = tag("details", summary, *_list(made), *_list(behind), caption, class_="source")
        return tag("figure", title, inside, *_list(marks), details, **self._anchor(anchor))


def _told_once(item: Table | Plot, heading: str, told: set[str]) -> Table | Plot:
    """The figure without what its block's heading or a figure above it says of its cases."""
    about, *held = item.caption.splitlines() or [""]
    lines = [line for line in held if line not in told]
    about = "" if about in told and isinstance(item, Plot) else about
    told.add(about)
    short = [sentence(line.removeprefix(heading).removeprefix("; ").removeprefix(".")) for line in lines]
    item = replace(item, caption="\n".join([about, " ".join(filter(None, short))]))
    if isinstance(item, Table):
        notes = [note for note in item.notes if note not in told or not note.startswith(LEFT_OUT)]
        told.update(notes)
        item = replace(item, notes=notes)
    told.update(lines)
    return item


def _list(notes: Sequence[str]) -> list[Html]:
    return [tag("ul", *(tag("li", note) for note in notes), class_="notes")] if notes else []


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
    facts = {"class_": kind, "title": said, "data_head": table.columns[column] if table.runs else ""}
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
    return {
        label: f"{digits(found[name])} {unit}".strip()
        for name, (label, unit) in SETTINGS.items()
        if found.get(name) is not None
    }
