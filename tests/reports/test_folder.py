"""`lmsys.reports.page.fill`: a report replaces the files of an earlier report in its folder, and touches nothing else.

A manifest in the folder lists the files that a report has written.
"""

import json
import re
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.reports import page
from lmsys.reports.page import POLICY, SCRIPT, html

REPORT = {"index.html": "page", "tables/a.md": "a", "plots/b.svg": "b"}
NAMES = st.sampled_from(["index.html", "tables/a.md", "tables/mine.md", "plots/b.svg", "tables", "notes.txt", "plots"])


def tree(root: Path) -> dict[str, str]:
    """{relative path: text} of all files below a folder."""
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_a_report_replaces_the_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    page.fill(tmp_path, REPORT)
    (tmp_path / "tables" / "mine.md").write_text("mine")
    page.fill(tmp_path, {"index.html": "later", "plots/c.svg": "c"})
    files = tree(tmp_path)
    del files[page.MANIFEST]
    assert files == {"index.html": "later", "plots/c.svg": "c", "tables/mine.md": "mine"}


@given(before=st.dictionaries(NAMES, st.text(max_size=3), max_size=5))
def test_files_of_others_stay_as_they_are(before: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """A report is refused if it would replace one of them."""
    root = tmp_path_factory.mktemp("folder")
    for name, text in sorted(before.items(), reverse=True):  # leaves out files that stand in the place of a folder
        if not (root / name).exists() and not (root / name).parent.is_file():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text, newline="")
    old = tree(root)
    try:
        page.fill(root, REPORT)
    except ValueError as error:
        assert tree(root) == old and re.search("did not write it|no folder", str(error))
    else:
        new = tree(root)
        assert {name: new[name] for name in old} == old and {name: new[name] for name in REPORT} == REPORT


@pytest.mark.parametrize("name", ["tables", "index.html", "plots/b.svg", page.MANIFEST])
def test_nothing_is_written_or_removed_through_a_link(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    page.fill(out, REPORT)
    moved = (out / name).rename(tmp_path / "elsewhere")
    (out / name).symlink_to(moved)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="is a link, and this writes through none"):
        page.fill(out, {"index.html": "later"})
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["index.html", "tables/a.md", page.MANIFEST])
def test_hard_links_to_an_earlier_report_keep_its_content(name: str, tmp_path: Path) -> None:
    """Somebody may keep a copy of an earlier report as hard links."""
    out, kept = tmp_path / "out", tmp_path / "kept"
    page.fill(out, REPORT)
    kept.hardlink_to(out / name)
    before = kept.read_text()
    page.fill(out, {"index.html": "later", "tables/a.md": "later"})
    assert kept.read_text() == before != (out / name).read_text()


@pytest.mark.parametrize(
    "content", ['{"files": ["../a"]}', "[]", "{", '{"files": [3]}', '{"files": {"a.md": ""}}', "[" * 10**5]
)
def test_a_malformed_manifest_is_refused(content: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "a").write_text("precious")
    page.fill(out, REPORT)
    (out / page.MANIFEST).write_text(content)
    with pytest.raises(ValueError, match="is no list of the files of a report"):
        page.fill(out, {"index.html": "later"})
    assert (tmp_path / "a").exists() and (out / "index.html").read_text() == "page"


def test_a_folder_in_the_manifests_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / page.MANIFEST).mkdir()
    with pytest.raises(ValueError, match=rf"{page.MANIFEST}: is no list of the files .*\(cannot be read: Is a dir"):
        page.fill(tmp_path, REPORT)
    assert not tree(tmp_path)


@pytest.mark.parametrize("name", ["../a.md", "/a.md", "tables/../../a.md", "a\0.md", "x" * 300 + ".md", ".md", "a.sh"])
def test_names_that_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        page.fill(tmp_path / "out", {name: ""})
    assert not tree(tmp_path)


def test_a_report_without_one_of_its_files_is_written_again(tmp_path: Path) -> None:
    page.fill(tmp_path, REPORT)
    known = json.loads((tmp_path / page.MANIFEST).read_text())["files"]
    assert list(known) == list(REPORT)
    (tmp_path / "plots" / "b.svg").unlink()
    page.fill(tmp_path, REPORT)
    assert tree(tmp_path).items() >= REPORT.items()


@pytest.mark.parametrize("at", range(4))
def test_an_interrupted_report_is_replaced_by_the_next_one(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file is written whole or not at all: half of one would be taken for a file of somebody else.

    at  the number of the file whose writing is interrupted
    """
    page.fill(tmp_path, REPORT)
    rename, renamed = Path.replace, count()

    def replace(self: Path, target: Path) -> Path:
        if next(renamed) == at:
            raise KeyboardInterrupt
        return rename(self, target)

    later = dict.fromkeys([*REPORT, "plots/c.svg"], "later")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            page.fill(tmp_path, later)
    page.fill(tmp_path, later)
    assert tree(tmp_path).keys() == {*later, page.MANIFEST} and not capsys.readouterr().err


FORGED = "tables/notes.md"


@pytest.mark.parametrize(
    "manifest",
    [
        {"files": [*REPORT, FORGED]},  # as lmsys 0.1 wrote them
        {"files": dict.fromkeys([*REPORT, FORGED], sha256(b"what the forger had").hexdigest())},
    ],
    ids=["names", "digests"],
)
def test_a_forged_manifest_deletes_no_file(manifest: dict[str, Any], tmp_path: Path) -> None:
    """It may have been unpacked with somebody's results, over a folder of notes."""
    for name in [*REPORT, FORGED]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    (tmp_path / page.MANIFEST).write_text(json.dumps(manifest))
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="did not write it as it is|each file must|must be an object"):
        page.fill(tmp_path, REPORT)
    assert tree(tmp_path) == before


def test_a_file_that_a_user_has_changed_is_left_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.fill(tmp_path, REPORT)
    (tmp_path / "tables" / "a.md").write_text("with my notes")
    page.fill(tmp_path, {"index.html": "later"})
    assert capsys.readouterr().err == f"{tmp_path}/tables/a.md: left, since it is not as a report wrote it\n"
    assert tree(tmp_path).keys() == {"index.html", "tables/a.md", page.MANIFEST}
    assert (tmp_path / "tables" / "a.md").read_text() == "with my notes"
    with pytest.raises(ValueError, match=r"a\.md is there, and this did not write it as it is"):
        page.fill(tmp_path, REPORT)
    assert (tmp_path / "index.html").read_text() == "later"


def test_the_page_runs_no_script_but_its_own_and_loads_nothing() -> None:
    text = html([], [])
    assert f'http-equiv="Content-Security-Policy" content="{POLICY}"' in text and "default-src 'none'" in POLICY
    assert text.count("<script") == 1 and f"<script>{SCRIPT}</script>" in text
