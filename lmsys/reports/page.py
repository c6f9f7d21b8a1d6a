"""Writes the page, index.html, and the files of its tables and plots beside it: `write`, for `__main__` and `against`.

`fill` replaces an earlier report in the folder, and touches only files that a report has written: `manifest.json` has
their SHA-256. ValueError where another file, or a link, stands in the way. `html` makes the page of machines, blocks
and chapters by `templates/page.html`. `lmsys.leaderboard` and `lmsys.course` make pages of their own by `render` and
`fill`. page.css has the styles, page.js what a click does.
"""

import base64
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import jinja2

from lmsys.bench.fields import grouped
from lmsys.files import replacing, sha256_of, write_json
from lmsys.reports import figures, items, load
from lmsys.strict_json import read_json
from lmsys.values import hold

MANIFEST = "manifest.json"
ADVICE = "remove it, or name another folder"
# The names that files of a report may have, with at most one folder.
NAME = r"([\w-]{1,100}/)?[\w-]{1,200}\.(html|md|csv|svg)"
FOLDER = Path(__file__).parent
CSS, SCRIPT = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
# With this policy a page loads its own plots and runs its own script only, whatever texts result files put into it.
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; font-src data:; script-src 'sha256-{_HASH}'"
)
MOST_OPEN = 3  # a page with more chapters than this shows each as a line, with its answer, that opens at a click


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
TEMPLATES.filters |= figures.FILTERS


def write(
    out: Path, parts: Sequence[items.Part], records_csv: str, notes: Sequence[str], single_file: bool = False
) -> Path:
    """Writes a report into a folder, in place of an earlier one. Returns the path of its page; InputError if it fails.

    parts        each machine with its answers and chapters
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

    `single_file`: plots stand in the page, and it links to no other file.
    """
    machines = [machine for machine, _, _ in parts]
    runs = chain.from_iterable(machine.runs for machine in machines)
    shown = [machine.layouts.get(name, {}) for machine in machines for name in machine.benchmarks]
    return render(
        "page.html",
        parts=parts,
        notes=notes,
        figures=figures.Figures(single_file),
        is_short=sum(len(chapters) for _, _, chapters in parts) <= MOST_OPEN,
        letters=dict.fromkeys(layout["letters"] for layout in shown if "letters" in layout),
        rows=sorted({str(case["impl"]) for machine in machines for case in machine.records}),
        # Commands by a run's words in the details of a figure; runs of one minute may share these words.
        commands=grouped((load.run_told(run), str(run["command"])) for run in runs if run.get("command")),
    )


def render(name: str, **values: object) -> str:
    """The text of a page by the template of this name; values are escaped."""
    return TEMPLATES.get_template(name).render(policy=POLICY, css=CSS, script=SCRIPT, **values)


def fill(out: Path, files: Mapping[str, str]) -> None:
    """Writes these files, texts by relative name, into the folder `out`, in place of those of an earlier report.

    A file is a report's while it has the SHA-256 that the manifest says; any other stays, and a line on stderr names it
    where the manifest does. ValueError, before anything is changed, where that would touch a file of somebody else's;
    OSError where it fails.
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
    # The manifest comes first, and each file is written whole or not at all: so the next run knows all files that an
    # interrupted one leaves.
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
