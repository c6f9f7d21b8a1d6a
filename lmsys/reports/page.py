"""The page: chapters as one self-contained HTML file, and the folder of tables and plots beside it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from lmsys.reports.load import GIB, InputError, Machine
from lmsys.reports.plots import Plot
from lmsys.reports.tables import Table, number

GENERATOR = '<meta name="generator" content="lmsys reports">'
CSS = (Path(__file__).parent / "page.css").read_text()
# Closed details would be missing on paper; a table wider than the screen says that it scrolls.
SCRIPT = """
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => d.open = true));
addEventListener("DOMContentLoaded", () => {
  const watch = new ResizeObserver(seen => seen.forEach(({target: t}) =>
    t.classList.toggle("wide", t.scrollWidth > t.clientWidth)));
  document.querySelectorAll(".scroll").forEach(t => watch.observe(t));
});
"""


@dataclass(frozen=True)
class Block:
    """What belongs together: `lead` is read at once, `more` behind a click; the title leads to `chapter`, if named."""

    title: str
    lead: Sequence[Table | Plot]
    more: Sequence[Table | Plot] = field(default_factory=list)
    chapter: str = ""


@dataclass(frozen=True)
class Chapter:
    title: str
    blocks: Sequence[Block]


Part = tuple[Machine, list[Chapter]]


def prepare(out: Path) -> None:
    """Make the output folders, cleared of an earlier report's files. InputError when they cannot be written."""
    try:
        ours = (
            GENERATOR in (out / "index.html").read_text(encoding="utf-8", errors="replace")
            if (out / "index.html").is_file()
            else False
        )
        for folder, endings in (("tables", (".md", ".csv")), ("plots", (".svg",))):
            (out / folder).mkdir(parents=True, exist_ok=True)
            for file in sorted((out / folder).iterdir()) if ours else []:
                if file.suffix in endings:
                    file.unlink()
        (out / "index.html").write_text(GENERATOR)
    except OSError as error:
        raise InputError(f"cannot write the report to {str(out)!r}: {error.strerror}") from error


def write(out: Path, parts: Sequence[Part], records_csv: str, notes: Sequence[str]) -> Path:
    """Fill the folder that `prepare` made; returns the path of its index.html."""
    for item in _items(parts):
        if isinstance(item, Plot):
            (out / "plots" / f"{item.name}.svg").write_text(item.svg, encoding="utf-8")
        else:
            (out / "tables" / f"{item.name}.md").write_text(item.markdown(), encoding="utf-8")
            (out / "tables" / f"{item.name}.csv").write_text(item.csv(), encoding="utf-8")
    (out / "tables" / "records.csv").write_text(records_csv, encoding="utf-8")
    (out / "index.html").write_text(html(parts, notes), encoding="utf-8")
    return out / "index.html"


def _items(parts: Sequence[Part]) -> Iterable[Table | Plot]:
    for _, chapters in parts:
        for chapter in chapters:
            for block in chapter.blocks:
                yield from [*block.lead, *block.more]


def html(parts: Sequence[Part], notes: Sequence[str]) -> str:
    """The page: a contents list, then every machine with its facts and chapters."""
    contents, body = [], []
    for machine, chapters in parts:
        links = "".join(
            f'<li><a href="#{_anchor(machine, chapter.title)}">{escape(chapter.title)}</a>' for chapter in chapters
        )
        contents.append(f'<li><a href="#{machine.slug}">{escape(machine.title)}</a><ul>{links}</ul>')
        body.append(f'<section><h2 id="{machine.slug}">{escape(machine.title)}</h2>{_facts(machine)}')
        for chapter in chapters:
            body.append(f'<h3 id="{_anchor(machine, chapter.title)}">{escape(chapter.title)}</h3>')
            body += [_block(machine, block) for block in chapter.blocks]
        body.append("</section>")
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lmsys report</title>\n<style>\n{CSS}</style>\n<script>{SCRIPT}</script></head>\n<body>\n"
        f'<h1>lmsys report</h1>\n{said}<p>Every measured case is in <a href="tables/records.csv">records.csv</a>; '
        "each table and plot links to its own file.</p>\n"
        f"<nav><ul>{''.join(contents)}</ul></nav>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _anchor(machine: Machine, title: str) -> str:
    return f"{machine.slug}-" + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _facts(machine: Machine) -> str:
    """The runs behind this machine's figures: what all have in common, then a line for each with what they have not."""
    runs = [
        {**run, "commit": f"{run.get('commit')}{' with local changes' * bool(run.get('dirty'))}"}
        for run in machine.runs
    ]
    rows = []
    for name in "date commit command sweep seed driver cuda torch triton python platform".split():
        values = ["–" if run.get(name) in (None, "") else str(run[name]) for run in runs]
        if any(value != "–" for value in values):
            rows.append((name, values))
    memory = [f"{run['memory_bytes'] / GIB:.1f} GiB" if run.get("memory_bytes") else "–" for run in machine.runs]
    rows.append(("memory", memory))
    for dtype in sorted({d for run in machine.runs for d in _ceilings(run)}):
        rates = [_ceilings(run).get(dtype) for run in machine.runs]
        rows.append((f"matmul {dtype}", [f"{number(rate / 1e12)} TFLOP/s" if rate else "–" for rate in rates]))
    copies = [(run.get("ceilings") or {}).get("copy_bytes_per_s") for run in machine.runs]
    if any(copies):
        rows.append(("copy", [f"{number(rate / 1e9)} GB/s" if rate else "–" for rate in copies]))
    common = "".join(f"<tr><th>{name}<td>{escape(values[0])}" for name, values in rows if len(set(values)) == 1)
    own = [(name, values) for name, values in rows if len(set(values)) > 1]
    head = "".join(f"<th>{name}" for name, _ in own)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(v)}" for v in line) for line in zip(*(v for _, v in own), strict=True)
    )
    each = f'<div class="scroll"><table class="facts"><thead><tr>{head}<tbody>{lines}</table></div>' if own else ""
    return f'<div class="scroll"><table class="facts">{common}</table></div>{each}'


def _ceilings(run: dict[str, object]) -> dict[str, float]:
    ceilings = run.get("ceilings")
    return (ceilings.get("matmul_flops_per_s") or {}) if isinstance(ceilings, dict) else {}


def _block(machine: Machine, block: Block) -> str:
    title = escape(block.title)
    title = f'<a href="#{_anchor(machine, block.chapter)}">{title}</a>' if block.chapter else title
    title = f"<h4>{title}</h4>" if title else ""
    more = ""
    if block.more:
        names = ", ".join(dict.fromkeys(_brief(item).split(",")[0].lower() for item in block.more))
        more = f"<details><summary>More: {escape(names)}</summary>{_figures(block.more)}</details>"
    return f"{title}{_figures(block.lead)}{more}"


def _brief(item: Table | Plot) -> str:
    """The title without what the heading above it already says."""
    return item.title.split(" · ")[0]


def _figures(items: Sequence[Table | Plot]) -> str:
    """Tables one below another, then plots side by side as far as the screen is wide."""
    tables = "".join(_table(item) for item in items if isinstance(item, Table))
    plots = "".join(_plot(item) for item in items if isinstance(item, Plot))
    return tables + (f'<div class="plots">{plots}</div>' if plots else "")


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}" for column in table.columns[: table.keys])
    head += "".join(f'<th class="value">{escape(column)}' for column in table.columns[table.keys :])
    rows = "".join(
        "<tr>"
        + "".join(f"<th>{escape(text)}" for text in row[: table.keys])
        + "".join(f"<td>{escape(text)}" for text in row[table.keys :])
        for row in table.rows
    )
    notes = "".join(f"<li>{escape(note)}" for note in table.notes)
    notes = f'<ul class="notes">{notes}</ul>' if notes else ""
    links = f'<a href="tables/{table.name}.csv">CSV</a> <a href="tables/{table.name}.md">Markdown</a>'
    return (
        f"<figure><h5>{escape(_brief(table))}</h5>"
        f'<div class="scroll"><table><thead><tr>{head}</thead><tbody>{rows}</tbody></table></div>{notes}'
        f"<figcaption>{escape(table.caption)} {links}</figcaption></figure>\n"
    )


def _plot(plot: Plot) -> str:
    drawing = plot.svg[plot.svg.index("<svg") :]
    label = escape(plot.title, quote=True)
    drawing = drawing.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    link = f'<a href="plots/{plot.name}.svg">SVG</a>'
    return f"<figure>{drawing}<figcaption>{escape(plot.caption)} {link}</figcaption></figure>\n"
