"""Writes the page, index.html, and the files of its tables and plots beside it: `write`, for `__main__` and `against`.

`fill` replaces an earlier report in the folder. It changes only files that a report has written, whose SHA-256 are in
`manifest.json`; if another file or a link is in the way, it raises ValueError. `html` makes the page from machines,
blocks and chapters (items.py) by `templates/page.html`. `lmsys.leaderboard` and `lmsys.course` make pages of their own
by `render` and `fill`. page.css has the styles, page.js what a click does.

Templates call the methods of `Figures`, which knows what one page has shown so far. They also call the functions below
that class as filters, which TEMPLATES.filters lists at the end of this file. All of these return plain texts, which the
templates escape. To show another fact of a run, add it to FACTS; another setting of a machine, to SETTINGS.
"""

import base64
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2

from lmsys.bench.fields import Record, grouped
from lmsys.files import replacing, sha256_of, write_json
from lmsys.reports import cells, items, load, tables, words
from lmsys.strict_json import read_json
from lmsys.values import hold

MANIFEST = "manifest.json"
ADVICE = "remove it, or name another folder"
# A regular expression for the names that files of a report may have, with at most one folder.
NAME = r"([\w-]{1,100}/)?[\w-]{1,200}\.(html|md|csv|svg)"
FOLDER = Path(__file__).parent
CSS, SCRIPT = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
# With this policy a page loads its own plots and runs its own script only, whatever texts result files put into it.
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; font-src data:; script-src 'sha256-{_HASH}'"
)
BRIEF = 80  # characters: the page repeats a caption that is at most this long; to a longer one it only links
MOST_OPEN = 3  # a page with more chapters than this folds them: each is a line, with its answer, that opens at a click

# Facts of a run, by their names in result files, that are shown as they are.
FACTS = "date commit command sweep seed driver cuda torch triton python platform".split()

SETTINGS = {  # settings of a machine, as a run notes them: label and unit
    "ecc": ("ECC", ""),
    "mig": ("MIG", ""),
    "persistence": ("persistence mode", ""),
    "power_limit_w": ("power limit", "W"),
    "power_sensor": ("sensor of power", ""),
    "max_sm_mhz": ("highest SM clock", "MHz"),
    "max_memory_mhz": ("highest memory clock", "MHz"),
    "governor": ("CPU frequency governor", ""),
}


def _template(name: str) -> str:
    """The text of a template, without the line breaks and spaces that only indent it."""
    text = (FOLDER / "templates" / name).read_text(encoding="utf-8")
    return re.sub(r"\n +", " ", re.sub(r"(?<=[>}])\n +|\n +(?=[<{])", "", text))


TEMPLATES = jinja2.Environment(
    loader=jinja2.FunctionLoader(_template),
    autoescape=True,  # the one place where texts of result files are escaped
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
)


def write(
    out: Path, parts: Sequence[items.Part], records_csv: str, notes: Sequence[str], single_file: bool = False
) -> Path:
    """Writes a report into a folder, in place of an earlier one. Returns the path of its page; InputError if it fails.

    parts        for each machine (machine, block with the answers, chapters)
    records_csv  the text of tables/records.csv: all cases
    notes        sentences for the head of the page
    """
    files = {"index.html": html(parts, notes, single_file), "tables/records.csv": records_csv}
    for _, answers, chapters in parts:
        for block in chain([answers], chain.from_iterable(chapter.blocks for chapter in chapters)):
            for item in block.items:
                files |= item.files()
    try:
        fill(out, files)
    except (OSError, ValueError) as error:
        raise load.InputError(f"cannot write the report to {str(out)!r}: {error}") from error
    return out / "index.html"


def html(parts: Sequence[items.Part], notes: Sequence[str], single_file: bool = False) -> str:
    """The page's text: answers of every machine, a contents list, then facts and chapters of every machine.

    single_file  True: plots are in the page, and it links to no other file
    """
    machines = [machine for machine, _, _ in parts]
    runs = chain.from_iterable(machine.runs for machine in machines)
    shown = [machine.layouts.get(name, {}) for machine in machines for name in machine.benchmarks]
    return render(
        "page.html",
        parts=parts,
        notes=notes,
        figures=Figures(single_file),
        is_short=sum(len(chapters) for _, _, chapters in parts) <= MOST_OPEN,
        letters=dict.fromkeys(layout["letters"] for layout in shown if "letters" in layout),
        rows=sorted({str(case["impl"]) for machine in machines for case in machine.records}),
        # The details of a figure name a run by these words. The page looks its commands up by them: a list, since runs
        # of one minute may share the words.
        commands=grouped((load.run_told(run), str(run["command"])) for run in runs if run.get("command")),
    )


def render(name: str, **values: object) -> str:
    """The text of a page by the template of this name; values are escaped."""
    return TEMPLATES.get_template(name).render(policy=POLICY, css=CSS, script=SCRIPT, **values)


def fill(out: Path, files: Mapping[str, str]) -> None:
    """Writes these files, texts by relative name, into the folder `out`, in place of those of an earlier report.

    A file belongs to a report while it has the SHA-256 that the manifest has for it. Any other file stays; if the
    manifest names it, a line on stderr says that it was left. ValueError, before anything is changed, where a file of
    somebody else's or a link is in the way; OSError where writing fails.
    """
    hold(
        *((re.fullmatch(NAME, x), f"a file {x[:80]!r} cannot be written: its name must match {NAME}") for x in files),
        *(
            (folder.is_dir() or not folder.exists(), f"{str(out)!r}: {folder} is a file, and a folder is needed")
            for folder in [out] + list(out.parents)
        ),
    )
    noted = _noted(out)  # the files of the earlier report
    for name in list(files) + list(noted) + [MANIFEST]:
        path = out / name
        hold(
            *(
                (not place.is_symlink(), f"{place} is a link, and this writes through none: {ADVICE}")
                for place in {path, path.parent} - {out}
            ),
            (path.parent.is_dir() or not path.parent.exists(), f"{path.parent} is there, and it is no folder"),
        )
    existing = {name for name in list(files) + list(noted) if (out / name).exists()}
    written = {name for name in existing if (out / name).is_file() and sha256_of(out / name) == noted.get(name)}
    others = sorted(existing - written)
    hold(*((x not in files, f"{out / x} is there, and this did not write it as it is: {ADVICE}") for x in others))
    contents = {name: text.encode() for name, text in files.items()}
    for name in others:
        print(f"{out / name}: left, since it is not as a report wrote it", file=sys.stderr)
    for name in written:
        (out / name).unlink()
    # The manifest is written first, and each file whole or not at all. So after an interruption the next run knows all
    # files that this one has left.
    write_json(out / MANIFEST, {"files": {name: hashlib.sha256(x).hexdigest() for name, x in contents.items()}})
    for name, content in contents.items():
        with replacing(out / name) as file:
            file.write(content)


def _noted(out: Path) -> dict[str, str]:
    """{name: SHA-256} by the folder's manifest, {} without one; ValueError for a manifest that no report wrote."""
    path = out / MANIFEST
    if not path.exists():
        return {}
    try:
        noted = read_json(path, files=dict)["files"]  # ValueError unless "files" is an object
        hold(
            *((re.fullmatch(NAME, name), "its files must be names of ours") for name in noted),
            *((re.fullmatch("[0-9a-f]{64}", str(x)), "each file must have its SHA-256") for x in noted.values()),
        )
    except ValueError as error:
        cause = str(error).removeprefix(f"{path}: ")
        raise ValueError(
            f"{path}: is no list of the files of a report ({cause}); remove what an earlier version of lmsys has"
            " written, or name another folder"
        ) from None
    return dict(noted)


@dataclass(frozen=True)
class Figures:
    """The figures (tables and plots) that one page has shown so far, so that nothing is explained twice.

    single_file  as in `html`
    """

    single_file: bool
    _shown: set[str] = field(default_factory=set, init=False)  # anchors
    # {first line of a caption: the anchor of the first figure with this line}
    _explained: dict[str, str] = field(default_factory=dict, init=False)

    def is_new(self, anchor: str) -> bool:
        """True at the first call with this anchor: a page may show a figure twice, but an id only once."""
        is_new = anchor not in self._shown
        self._shown.add(anchor)
        return is_new

    def caption(self, caption: str, anchor: str) -> tuple[str, str, str]:
        """(the first line of the caption, an anchor or "", the other lines).

        Where the first line is long and another figure has shown it, the anchor is that figure's: the page links to it
        in place of the line.
        """
        about, _, rest = caption.partition("\n")
        first = self._explained.setdefault(about, anchor)
        return about, first if first != anchor and len(about) > BRIEF else "", rest

    def parts(self, block: items.Block) -> list[list[items.Table | items.Plot]]:
        """[the first table and plot of a block's `lead`, all other items], without sentences that stand further up."""
        known = set[str]()
        first = of_kind(items.Table, block.lead)[:1] + of_kind(items.Plot, block.lead)[:1]
        more = [item for item in block.items if item not in first]
        return [[_without_repeats(item, block.title, known) for item in group] for group in (first, more)]


def of_kind(kind: Any, figures: Iterable[items.Table | items.Plot | None]) -> list[Any]:
    """The tables among the items, or the plots: `kind` is the class of either."""
    return [item for item in figures if isinstance(item, kind)]


def brief(item: items.Table | items.Plot) -> str:
    """The figure's title up to the first " · ", after which it repeats the heading above."""
    return item.title.partition(" · ")[0]


def names(figures: Iterable[items.Table | items.Plot]) -> str:
    """The subjects of these figures, each once, joined by commas."""
    return ", ".join(dict.fromkeys([words.inside_a_sentence(brief(item).partition(",")[0]) for item in figures]))


def _without_repeats(item: items.Table | items.Plot, heading: str, known: set[str]) -> items.Table | items.Plot:
    """A copy of the figure without sentences that its block's heading or a figure above it has.

    A table keeps the first line of its caption, and all notes but repeated ones that begin with `tables.LEFT_OUT`.

    known  the sentences above; those of this figure are added
    """
    about, *rest = item.caption.splitlines() or [""]
    lines = [line for line in rest if line not in known]
    if isinstance(item, items.Table):
        notes = [note for note in item.notes if note not in known or not note.startswith(tables.LEFT_OUT)]
        item = replace(item, notes=notes)
        known.update(notes)
    elif about in known:
        about = ""
    known.update(lines, [about])
    short = [words.sentence(line.removeprefix(heading).removeprefix("; ").removeprefix(".")) for line in lines]
    return replace(item, caption="\n".join([about, " ".join(filter(None, short))]))


def marks(table: items.Table) -> list[str]:
    """The footnotes of a table: those of its notes that begin with a digit, which is a superscript."""
    return [note for note in table.notes if note[0].isdigit()]


def lines(table: items.Table) -> Iterator[tuple[Sequence[str], str, list[tuple[str, str, str, str]]]]:
    """Yields for each line of a table (the texts of its key columns, the details that all its figures share, figures).

    A figure is (head of its column, text, kind, its other details). The kind, a CSS class, is "best", "wrong" or "".
    """
    for row, texts in enumerate(table.rows):
        details = [table.details.get((row, column), "") for column in range(len(texts))]
        several = [text.split(cells.DETAILS) for text in details if text]
        common = [fact for fact in several[0] if all(fact in facts for facts in several)] if len(several) > 1 else []
        shown = []
        for column in range(table.keys, len(texts)):
            text, known = texts[column], details[column].split(cells.DETAILS)
            kind = "wrong" if words.OUTCOMES["wrong"] in text else "best" * ((row, column) in table.best)
            own = cells.DETAILS.join(fact for fact in known if fact not in common)
            shown.append((table.columns[column], text, kind, own))
        yield texts[: table.keys], cells.DETAILS.join(common), shown


def runs_of(machine: load.Machine) -> tuple[str, str]:
    """(a sentence on the number, dates, commits and cases of the runs, their command or "" if they have several)."""
    days = sorted({str(run.get("date") or "undated")[:10] for run in machine.runs})
    commits = dict.fromkeys(str(run.get("commit") or "unknown")[:10] for run in machine.runs)
    count = f"{len(machine.runs)} runs" if len(machine.runs) > 1 else "One run"
    several = f"{len(commits)} commits" if len(commits) > 1 else f"commit {''.join(commits)}"
    command, *others = {str(run.get("command") or "") for run in machine.runs}
    return f"{count}, {words.span(days)}, {several}: {len(machine.records):,} cases. ", "" if others else command


def facts_of(runs: Sequence[Record]) -> tuple[Mapping[str, str], Mapping[str, list[str]]]:
    """({name: text} of the facts that are the same in all runs, {name: [text in each run]} of the other facts)."""
    facts = list(map(_of_run, runs))
    common = {name: text for name, text in facts[0].items() if all(run.get(name) == text for run in facts)}
    others = [name for name in dict.fromkeys(chain.from_iterable(facts)) if name not in common]
    return common, {name: [run.get(name, "–") for run in facts] for name in others}


def _of_run(run: Record) -> dict[str, str]:
    """The known facts of a run, as texts, by name."""
    ceilings, sustained, settings = (run.get(name) or {} for name in ("ceilings", "sustained", "settings"))
    short, memory, copy = load.matmul_rates(run), run.get("memory_bytes"), ceilings.get("copy_bytes_per_s")
    commit = run.get("commit")
    facts = {name: run.get(name) for name in FACTS} | {
        "commit": commit and commit + " with local changes" * bool(run.get("dirty")),
        "memory": memory and f"{memory / 2**30:.1f} GiB",
        **{f"matmul {dtype}": f"{words.number(rate / 1e12)} TFLOP/s" for dtype, rate in sorted(short.items())},
        "copy": copy and f"{words.number(copy / 1e9)} GB/s",
    }
    state, reasons = cells.state_of(sustained), sustained.get("clock_reasons")
    for dtype, rate in (sustained.get("matmul_flops_per_s") or {}).items():
        share = short.get(dtype) and f"{rate / short[dtype]:.0%} of the short one"
        parts = [f"{words.number(rate / 1e12)} TFLOP/s", share] + state + [reasons and f"clock held by {reasons}"]
        facts[f"matmul {dtype}, sustained"] = ", ".join(filter(None, parts))
    facts |= {
        label: f"{words.exact(settings[name])} {unit}".strip()
        for name, (label, unit) in SETTINGS.items()
        if settings.get(name) not in (None, "")
    }
    return {name: str(fact) for name, fact in facts.items() if fact not in (None, "")}


TEMPLATES.filters |= {  # `value | name` in a template
    "brief": brief,
    "facts": facts_of,
    "file_name": load.file_name,
    "lines": lines,
    "marks": marks,
    "names": names,
    "plots": partial(of_kind, items.Plot),
    "runs": runs_of,
    "sentence": words.sentence,
    "tables": partial(of_kind, items.Table),
}
