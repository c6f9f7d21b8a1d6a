"""A report that is refused (exit code 2) leaves the folder of an earlier report as it is, and writes nothing elsewhere.

A new command that must be refused is added to REFUSED; `results` makes the files that commands name. FOREIGN has
changes of the folder after which it is no longer the report's own.
"""

from pathlib import Path

import pytest

from lmsys.reports import page, plots
from lmsys.reports.__main__ import main
from tests.support.files import tree
from tests.support.records import record, save


def results(root: Path) -> None:
    """Writes result files that can be reported, and others, whose names say what is wrong with them."""
    rows = [record("attention", "naive"), record("attention", "flex", 2e-3)]
    for name, records, machine in (
        ("new", rows, {}),
        ("old", rows, {"commit": "0" * 40}),
        ("machine", rows, {"name": "another GPU", "gpu": "another GPU"}),
        ("cases", [record("attention", "naive", queries=77)], {}),
        ("empty", [], {}),
        ("text", [rows[0] | {"time_s": "soon"}], {}),
        ("undeclared", [rows[0] | {"benchmark": "nobodys"}], {}),
    ):
        save(root / f"{name}.json", records, **machine)
    (root / "broken.json").write_text((root / "new.json").read_text()[:-40])
    (root / "list.json").write_text("[]")
    (root / "nothing.json").touch()
    (root / "runs").mkdir()
    for name in ("a", "b"):
        save(root / "runs" / f"{name}.json", rows)


REFUSED = (  # the arguments of each command
    "",
    "missing.json",
    "new.json missing.json",
    "runs",
    "broken.json",
    "list.json",
    "nothing.json",
    "new.json broken.json",
    "text.json",
    "empty.json",
    "undeclared.json",
    "new.json --baseline nobody",
    "new.json --margin 0.1",
    "new.json --anyway",
    "new.json --sort time",
    "new.json --against old.json",
    "new.json --repeats old.json",
    "new.json --output",
    "--before old.json new.json --margin 0",
    "--before old.json new.json --margin nan",
    "--before old.json new.json --margin 2",
    "--before old.json new.json --margin much",
    "--before old.json new.json --baseline naive",
    "--before old.json new.json --single-file",
    "--before old.json machine.json",
    "--before old.json cases.json",
    "--before old.json new.json machine.json",
    "--before missing.json new.json",
    "--before broken.json new.json",
    "--before old.json",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with these results, and in `site` the report of one of them."""
    monkeypatch.setattr(plots, "to_svg", lambda *_: '<svg width="1pt" height="1pt"></svg>')
    monkeypatch.chdir(tmp_path)
    results(tmp_path)
    assert main(["new.json"]) == 0 and (tmp_path / "site" / "index.html").is_file()
    return tmp_path


def ended(command: str, program: str = "") -> int:
    """The exit code of the report's command with these arguments. program: its name in messages."""
    try:
        return main(command.split(), (), Path("site"), program)
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize("program", ["lmsys report", "python -m reports"])
def test_whatever_is_refused_the_report_stays_as_it_is(
    program: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(folder)
    for command in REFUSED:
        capsys.readouterr()
        code, printed = ended(command, program), capsys.readouterr()
        assert code == 2 and printed.err.strip().splitlines()[-1].startswith(f"{program}: error: "), (command, printed)
        assert not printed.out and tree(folder) == before, command


LINK, NOTHING = "a link to it", ""
# (a file or folder in the report's folder, or "" for that, and what takes its place: LINK, NOTHING, or a file's text)
FOREIGN = (
    ("index.html", LINK),
    ("tables", LINK),
    ("tables", "mine"),
    ("", "mine"),
    (page.MANIFEST, NOTHING),
    (page.MANIFEST, '{"files": ["../new.json"]}'),
    (page.MANIFEST, '{"files": ["index.html"]}'),
)
WRITING = ("old.json", "old.json --single-file", "--before old.json new.json")


@pytest.mark.parametrize(("name", "instead"), FOREIGN)
def test_a_folder_of_somebody_else_stays_as_it_is(
    name: str, instead: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder / "site" / name
    moved = place.rename(folder / "elsewhere")
    if instead == LINK:
        place.symlink_to(moved)
    elif instead != NOTHING:
        place.write_text(instead)
    before = tree(folder)
    for command in WRITING:
        assert ended(command) == 2 and "cannot write the report" in capsys.readouterr().err, command
        assert tree(folder) == before, command


def test_what_is_not_refused_takes_its_place(folder: Path) -> None:
    """Commands that are not refused do change the folder."""
    for command in WRITING:
        before = tree(folder)
        assert ended(command) == 0 and tree(folder) != before, command
