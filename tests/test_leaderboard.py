"""`lmsys leaderboard` ranks result files by the speed of their row over the anchor, a row that every file must have.

The files are changed copies of `content`, a small result file of one H200: files of a faster row are ranked; files that
are forged, not sealed, or without the anchor or the same cases are refused, with the reason.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmsys import leaderboard
from lmsys.verify import NO_SEAL, benchmarks_in
from tests.support.processes import ROOT
from tests.support.result_files import (
    FLASH,
    FORWARD,
    OTHER_FORWARD,
    OTHER_RECORD,
    OURS,
    RECORD,
    RECORDS,
    REMOVED,
    Change,
    Content,
    Place,
    changed,
    h200,
    scaled_alike,
    seal_again,
    times,
)

TIME_SCALED: Change = ((*RECORD, "time_s"), times(0.9))


@pytest.fixture(scope="module")
def content() -> Content:
    """The rows flash_gluon and sdpa_flash of one shape."""
    return h200(FORWARD, OTHER_FORWARD)


@pytest.fixture
def board(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str], str]]:
    """A function that runs the command on files, given by name; it returns the exit code, the lines and the page."""
    benchmarks = benchmarks_in(ROOT / "benchmarks")
    monkeypatch.setattr(type(benchmarks["attention"]), "num_proofs", 2)
    monkeypatch.setattr(leaderboard, "benchmarks_in", lambda *_: benchmarks)

    def run(anchor: str = "sdpa_flash", **files: Content) -> tuple[int, list[str], str]:
        for name, file_content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(file_content))
        code = leaderboard.main([str(tmp_path), "-o", str(tmp_path / "site"), "--anchor", anchor])
        return code, capsys.readouterr().out.splitlines(), (tmp_path / "site" / "index.html").read_text()

    return run


def faster(content: Content, factor: float, machine: str) -> Content:
    """A file whose row took `factor` of its time, as another run might have measured it on this machine."""
    named: Change = ((*OURS, "machine", "name"), machine)
    return seal_again(changed(content, named, *scaled_alike(factor)))


def test_four_of_seven_files_are_ranked(content: Content, board: Any) -> None:
    files = {f"student{i}": faster(content, 1 - 0.01 * i, "another" if i == 1 else "one") for i in range(4)}
    files |= {"forged": changed(content, TIME_SCALED), "other": h200(*FLASH)}
    files["unproved"] = seal_again(changed(content, ((*RECORD, "proof"), REMOVED)))
    code, lines, page = board(**files)
    assert code == 0 and len(lines) == 7
    assert [line.rpartition("student")[2][0] for line in lines[:4]] == list("3210")  # by speed over the anchor
    assert [line.split()[1] for line in lines[:4]] == list("1213")  # ranks by time, on each of two machines apart
    refused = {line.split(": ")[1]: line for line in lines[4:]}
    assert refused.keys() == {"forged.json", "unproved.json", "other.json"}
    assert "not proved" in refused["unproved.json"]
    assert "time_s is" in refused["forged.json"] and "anchor 'sdpa_flash'" in refused["other.json"]
    assert page.count("<tr>") - page.count("<thead><tr>") == 4 + 3 and "Not ranked" in page


@pytest.mark.parametrize("disturbed", [RECORD, OTHER_RECORD])
def test_a_file_of_a_disturbed_row_or_anchor_comes_last_and_says_so(
    content: Content, board: Any, disturbed: Place
) -> None:
    change: Change = ((*disturbed, "disturbed"), "the GPU was too hot")
    code, lines, page = board(calm=content, hot=seal_again(changed(faster(content, 0.5, "one"), change)))
    assert code == 0 and [line.rpartition("  ")[2] for line in lines] == ["calm.json", "hot.json"]
    assert [", disturbed" in line for line in lines] == [False, True] and page.count(", disturbed") == 1


def test_a_copy_of_a_file_counts_once_and_is_named(content: Content, board: Any) -> None:
    """Also where the copy has other facts of the machine, or no entries of pytest-benchmark."""
    renamed = seal_again(changed(content, ((*OURS, "machine", "name"), "another")))
    code, lines, page = board(a=content, b=content, c=renamed, d=changed(content, (("benchmarks",), [])))
    assert code == 0 and lines[0].endswith("a.json") and page.count("counts for both") == 3
    assert lines[1:] == [f"refused: {x}.json: it has the measurements of a.json, which counts for both" for x in "bcd"]


def test_a_row_with_the_name_of_another_table_s_row_is_the_user_s(content: Content, board: Any) -> None:
    """So it ranks its file before rows of ours, though one is faster; `zero1` is a strategy, and no attention."""
    like_ours: Content = content["lmsys"]["records"][0]
    mine = like_ours | {key: like_ours[key].replace("flash_gluon", "zero1") for key in ("id", "impl")}
    both = changed(content, ((*RECORDS, 1), mine), (RECORDS, lambda new: [*new, content["lmsys"]["records"][1]]))
    code, (line,), _ = board(mine=seal_again(changed(both, *scaled_alike(0.5))))
    assert code == 0 and line.split()[2] == "zero1"


def test_a_page_beside_the_results_is_none_of_them(
    content: Content, board: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board(a=content)
    for folder in (tmp_path, tmp_path / "site" / ".."):  # the second time the page is there
        assert leaderboard.main([str(tmp_path), "-o", str(folder), "--anchor", "sdpa_flash"]) == 0
        assert "refused" not in capsys.readouterr().out


def test_a_page_does_not_name_the_folder_of_a_refused_file(content: Content, board: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    code, lines, page = board(a=content)
    assert code == 0 and str(tmp_path) not in page
    assert lines[1:] == ['refused: notes.json: not a result of this bench: it has no "lmsys" key with a schema']


def test_without_a_ranked_file_the_command_fails(content: Content, board: Any) -> None:
    code, (line,), page = board(forged=changed(content, TIME_SCALED))
    assert code == 1 and "Not ranked" in page and line.startswith("refused: forged.json: ")


def test_a_file_without_a_seal_is_refused(content: Content, board: Any) -> None:
    """To `lmsys verify` a missing seal is no fault, as older files have none."""
    code, lines, _ = board(sealed=content, unsealed=changed(content, ((*OURS, "seal"), REMOVED)))
    assert code == 0 and lines[0].endswith("sealed.json") and lines[1:] == [f"refused: unsealed.json: {NO_SEAL}"]


def test_a_file_without_the_anchor_or_without_another_row_says_which(content: Content, board: Any) -> None:
    anchor = "sdpa_flash"
    code, (_, *refused), _ = board(anchor, whole=content, alone=h200(OTHER_FORWARD), unanchored=h200(FORWARD))
    assert code == 0 and len(refused) == 2
    assert f"alone.json: no row besides the anchor '{anchor}' has all cases" in refused[0]
    assert f"unanchored.json: it lacks the anchor '{anchor}' in " in refused[1]


@pytest.mark.parametrize(
    "change",
    [
        ((*RECORD, "comparison"), lambda old: f"{old.split()[0]} 2026-11-27T00:00:00+00:00"),
        ((*RECORD, "against"), {"name": "main", "commit": "1" * 40, "margin": 0.02}),
    ],
)
def test_a_row_counts_only_beside_the_anchor_and_as_it_is_today(content: Content, board: Any, change: Change) -> None:
    """A resumed file may have the anchor of an earlier run, and a file of --against has rows as they were."""
    code, lines, _ = board(whole=content, other=seal_again(changed(content, change)))
    assert code == 0 and len(lines) == 2 and lines[0].endswith("whole.json")
    assert lines[1].startswith("refused: other.json: ")


def test_a_bad_folder_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site").write_text("a file of somebody else")
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text("{}")
    assert leaderboard.main([str(tmp_path), "-o", str(tmp_path / "site")]) == 2
    assert "a folder is needed" in capsys.readouterr().err
    for name in ("no", "empty"):
        assert leaderboard.main([str(tmp_path / name), "-o", str(tmp_path / "new")]) == 2
        assert f"{name}: is no folder of result files" in capsys.readouterr().err and not (tmp_path / "new").exists()
