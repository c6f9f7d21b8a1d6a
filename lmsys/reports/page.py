"""The page: answers, then chapters, as HTML, with its tables and plots in files beside it.

The folder of these files is written again and again, and no file that this did not write is touched. `manifest.json`
names what was written. Files beside it that others made stay as they are; one that stands where a file is to be
written, and a link in its place or in a folder's, are refused.
"""

import base64
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from lmsys.reports import items, load
from lmsys.reports.figures import Figures, Html, facts_of, joined, runs_of, tag, tags
from lmsys.strict_json import read_json
from lmsys.values import hold

MANIFEST = "manifest.json"
NAME = r"([\w-]{1,100}/)?[\w-]{1,200}\.(html|md|csv|svg)"
GENERATOR = '<meta name="generator" content="lmsys reports">'
CSS, SCRIPT = ((Path(__file__).parent / name).read_text() for name in ("page.css", "page.js"))
# Whatever a result file says, and wherever it gets: the page loads its own plots alone, and runs its own script alone.
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; font-src data:; script-src 'sha256-{_HASH}'"
)
MOST_OPEN = 3  # chapters of a page that are read at once; of more, each is a line with its answer
LEAD = (
    "Only results that passed their check have figures. A row is one implementation, such as a kernel or a strategy, "
    "named as on the command line; a case is one row in one setting."
)
UP = Html(
    '<p class="up"><a href="#top">↑ Top</a> <a href="#contents">Contents</a> <a href="#only" id="asked" hidden></a></p>'
)


def write(
    out: Path, parts: Sequence[items.Part], records_csv: str, notes: Sequence[str], single_file: bool = False
) -> Path:
    """Fill a folder in place of an earlier report; the path of its page. InputError if it cannot be written."""
    files = {"index.html": html(parts, notes, single_file), "tables/records.csv": records_csv}
    for _, answers, chapters in parts:
        for block in (answers, *(block for chapter in chapters for block in chapter.blocks)):
            for item in block.items:
                files |= item.files()
    try:
        fill(out, files)
    except ValueError as error:
        raise load.InputError(f"cannot write the report: {error}") from error
    except OSError as error:
        raise load.InputError(f"cannot write the report to {str(out)!r}: {error.strerror}") from error
    return out / "index.html"


def html(parts: Sequence[items.Part], notes: Sequence[str], single_file: bool = False) -> str:
    """The page: every machine's answers, a contents list, then every machine with its facts and chapters.

    `single_file`: plots stand in the page, not in files beside it, and it links to no file.
    """
    first, contents, body = [], [], []
    figures = Figures(single_file)
    is_short = sum(len(chapters) for _, _, chapters in parts) <= MOST_OPEN
    for machine, answers, chapters in parts:
        contents.append(tag("li", tag("a", f"{machine.title}: everything measured", href=f"#{machine.slug}")))
        first.append(tag("section", tag("h2", machine.title), runs_of(machine), figures.answers(answers)))
        facts = tag("details", tag("summary", "Machine, versions and runs"), facts_of(machine.runs))
        inside = [
            figures.chapter(chapter, f"{machine.slug}-{load.file_name(chapter.title.lower())}", is_short)
            for chapter in chapters
        ]
        body.append(tag("section", tag("h2", f"{machine.title}: everything measured", id=machine.slug), facts, inside))
    remarks = tags("p", notes), tag("p", _about(parts, single_file)), _contents(contents, parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lmsys report</title>\n<style>\n{CSS}</style>\n<script>{SCRIPT}</script></head>\n<body>\n"
        + tag("main", tag("h1", "lmsys report", id="top"), tag("p", LEAD), first, *remarks, body, UP)
        + "\n</body></html>\n"
    )


def simple_page(title: str, *blocks: Html) -> str:
    """A page of these blocks alone, in the same style."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"{tag('title', title)}\n<style>\n{CSS}</style></head>\n<body>\n{tag('main', *blocks)}\n</body></html>\n"
    )


def table(heads: Iterable[str], rows: Iterable[Iterable[object]], bad: Collection[object] = ()) -> Html:
    """A table of texts, which scrolls where it is wider than the screen. bad: cells that are marked as wrong."""
    cells = (tag("tr", *(tag("td", str(x), class_="wrong" if x in bad else None) for x in row)) for row in rows)
    parts = tag("thead", tag("tr", *(tag("th", head) for head in heads))), tag("tbody", *cells)
    return tag("div", tag("table", *parts, class_="texts"), class_="scroll")


def _about(parts: Sequence[items.Part], single_file: bool) -> list[str]:
    """Where the figures are as files, what letters mean, and how the page is made."""
    csv = tag("a", "records.csv", href="tables/records.csv")
    files = ["Every measured case is in ", csv, "; each table and plot links to its own file. "]
    if single_file:
        files = ["This page links to no other file: the folder that it was made in has each table and plot as a file. "]
    shown = [machine.layouts.get(name, {}) for machine, _, _ in parts for name in machine.benchmarks]
    return [
        *files,
        *dict.fromkeys(layout["letters"] for layout in shown if "letters" in layout),
        tag("code", "lmsys report RESULT.json ... -o DIR"),
        " builds this page.",
    ]


def _contents(links: Sequence[Html], parts: Sequence[items.Part]) -> Html:
    """The contents, the field that filters rows, what a click on a figure says, and a line for who has no scripts."""
    names = sorted({str(case["impl"]) for machine, _, _ in parts for case in machine.records})
    commands: dict[str, dict[str, None]] = {}  # of what a figure says of its run; several began in the same minute
    for run in (run for machine, _, _ in parts for run in machine.runs):
        if run.get("command"):
            commands.setdefault(load.run_told(run), {})[str(run["command"])] = None
    field = tag("input", id="only", type="search", list="rows", placeholder=", ".join(names[:2]))
    help_text = (
        " Type parts of names, and the tables show these rows alone; the address keeps them. A click on a column's head"
        " sorts by it; one on a figure says its rounds, spread, error, run and command."
    )
    return joined(
        [
            tag("p", tag("label", "Rows: ", field), help_text, class_="controls"),
            tag("nav", tag("ul", links, id="contents")),
            tag("datalist", [tag("option", value=name) for name in names], id="rows"),
            tag(
                "datalist",
                [tag("option", value=" or ".join(lines), label=run) for run, lines in commands.items()],
                id="runs",
            ),
            tag("output", id="said"),
            tag("noscript", tag("p", "Without scripts, what is behind “More” is in the folders tables/ and plots/.")),
        ]
    )


def fill(out: Path, files: Mapping[str, str]) -> None:
    """Make `out` hold these files, by relative name, and none of those written there before.

    ValueError, before anything is changed, where that would touch what is somebody else's; OSError where it fails.
    """
    hold(
        *(
            (re.fullmatch(NAME, name), f"a file {name[:80]!r} cannot be written: its name must match {NAME}")
            for name in files
        ),
        *(
            (folder.is_dir() or not folder.exists(), f"{str(out)!r}: {folder} is a file, and a folder is needed")
            for folder in (out, *out.parents)
        ),
    )
    before = _written(out)
    for name in (*files, *before, MANIFEST):
        _check_place(out, name)
    hold(
        *(
            (not path.exists(), f"{path} is there, and this did not write it: remove it, or name another folder")
            for path in (out / name for name in files if name not in before)
        )
    )
    out.mkdir(parents=True, exist_ok=True)
    _note(out, before | files.keys())  # before they are there: what an interrupted run leaves is known, too
    for name, text in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    for name in before - files.keys():
        (out / name).unlink(missing_ok=True)
    _note(out, files)


def _note(out: Path, names: Iterable[str]) -> None:
    (out / MANIFEST).write_text(json.dumps({"files": sorted(names)}, indent=1) + "\n")


def _written(out: Path) -> set[str]:
    """The names of what was written there before."""
    path = out / MANIFEST
    if not path.exists():
        return set()
    try:
        names = read_json(path, files=list)["files"]
        hold(*((isinstance(x, str) and re.fullmatch(NAME, x), "its files must be names of ours") for x in names))
    except ValueError as error:
        cause = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path}: is no list of the files of a report ({cause}); name another folder") from None
    return set(names)


def _check_place(out: Path, name: str) -> None:
    path = out / name
    hold(
        *(
            (
                not place.is_symlink(),
                f"{place} is a link, and this writes through none: remove it, or name another folder",
            )
            for place in ((path, path.parent) if path.parent != out else (path,))
        ),
        (path.parent.is_dir() or not path.parent.exists(), f"{path.parent} is there, and it is no folder"),
    )
