"""`lmsys leaderboard` ranks result files by the speed of their row over the anchor, a row that every file must have.

The files are altered copies of `content`, a small result file of test_verify.py: files of a faster row are ranked;
files that are forged, not sealed, or without the anchor or the same cases are refused, with the reason.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmsys import leaderboard
from lmsys.bench.record import summarize
from lmsys.verify import NO_SEAL
from tests.test_verify import (  # noqa: F401  fixtures, too
    ALTERATIONS,
    RESULT,
    benchmarks,
    content,
    entry,
    records,
    seal_again,
    whole,
)

Content = dict[str, Any]
FORGED = ("time_scaled", "sample_dropped", "samples_of_another_row", "error_ratio_improved", "another_seed")


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, benchmarks: dict[str, Any], tmp_path: Path) -> Callable[..., Any]:  # noqa: F811
    """A function that runs the command on files, given by name, and returns its exit code and the text of its page."""
    monkeypatch.setattr(leaderboard, "benchmarks_in", lambda *_: benchmarks)

    def run(files: dict[str, Content], anchor: str = "sdpa_flash") -> tuple[int, str]:
        for name, file_content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(file_content))
        code = leaderboard.main([str(tmp_path), "-o", str(tmp_path / "site"), "--anchor", anchor])
        return code, (tmp_path / "site" / "index.html").read_text()

    return run


def faster(content: Content, factor: float, machine: str = "") -> Content:  # noqa: F811
    """A file whose row took `factor` of its time, as another run might have measured it."""
    result = copy.deepcopy(content)
    record = records(result)[0]
    record["samples_s"] = [sample * factor for sample in record["samples_s"]]
    record |= summarize(record["samples_s"])
    for name in ("flops_per_s", "bytes_per_s", "matmul_ceiling_fraction", "copy_ceiling_fraction"):
        record[name] /= factor
    result["lmsys"]["machine"]["name"] = machine or result["lmsys"]["machine"]["name"]
    seal_again(result)
    return result


def altered(content: Content, name: str) -> Content:  # noqa: F811
    """A copy with one of the alterations of test_verify.py, not sealed again."""
    result = copy.deepcopy(content)
    ALTERATIONS[name](result)
    return result


def other_workload(content: Content) -> Content:  # noqa: F811
    """A sealed file of other cases: those of the section "flash"."""
    result = json.loads(RESULT.read_text())
    kept = [record for record in records(result) if record["section"] == "flash"]
    for record in kept:
        del record["proof"]["calls"][2:]
    result["lmsys"]["records"], result["benchmarks"] = kept, [entry(result, record) for record in kept]
    seal_again(result)
    return result


def test_seven_of_ten_files_are_ranked(
    content: Content,  # noqa: F811
    board: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {f"student{i}": faster(content, 1 - 0.01 * i, "another" if i == 3 else "") for i in range(7)}
    files |= {"forged": altered(content, "time_scaled"), "unproved": altered(content, "no_proof")}
    seal_again(files["unproved"])
    code, page = board(files | {"other": other_workload(content)})
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and len(lines) == 10
    assert [line.rpartition("student")[2][0] for line in lines[:7]] == list("6543210")  # by speed over the anchor
    assert [line.split()[1] for line in lines[:7]] == list("1231456")  # ranks by time, on each of two machines apart
    refused = {line.split(": ")[1]: line for line in lines[7:]}
    assert refused.keys() == {"forged.json", "unproved.json", "other.json"}
    assert "not proved" in refused["unproved.json"]
    assert "time_s is" in refused["forged.json"] and "anchor 'sdpa_flash'" in refused["other.json"]
    assert page.count("<tr>") - page.count("<thead><tr>") == 7 + 3 and "Not ranked" in page


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_refused(
    name: str,
    content: Content,  # noqa: F811
    board: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, page = board({"forged": altered(content, name)})
    assert code == 1 and "Not ranked" in page and "refused: forged.json: " in capsys.readouterr().out


def test_a_file_without_a_seal_is_refused(
    content: Content,  # noqa: F811
    board: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To `lmsys verify` a missing seal is no fault, as older files have none."""
    unsealed = copy.deepcopy(content)
    del unsealed["lmsys"]["seal"]
    code, _ = board({"sealed": content, "unsealed": unsealed})
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and lines[0].endswith("sealed.json") and lines[1:] == [f"refused: unsealed.json: {NO_SEAL}"]


def test_a_file_without_the_anchor_or_without_another_row_says_which(
    content: Content,  # noqa: F811
    board: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [record["impl"] for record in records(content)]
    files = {"whole": content}
    for name, row in zip(("alone", "unanchored"), rows, strict=True):
        files[name] = copy.deepcopy(content)
        files[name]["lmsys"]["records"] = [record for record in records(content) if record["impl"] != row]
        files[name]["benchmarks"] = [entry(files[name], record) for record in records(files[name])]
        seal_again(files[name])
    code, _ = board(files, anchor=rows[1])
    refused = capsys.readouterr().out.splitlines()[1:]
    assert code == 0 and len(refused) == 2
    assert f"alone.json: no row besides the anchor '{rows[1]}' has all cases" in refused[0]
    assert f"unanchored.json: it lacks the anchor '{rows[1]}' in " in refused[1]


def test_a_bad_folder_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site").write_text("a file of somebody else")
    assert leaderboard.main([str(tmp_path), "-o", str(tmp_path / "site")]) == 2
    assert "a folder is needed" in capsys.readouterr().err
    assert leaderboard.main([str(tmp_path / "no"), "-o", str(tmp_path / "new")]) == 2
    assert "no: is no folder of result files" in capsys.readouterr().err and not (tmp_path / "new").exists()
