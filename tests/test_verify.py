"""`lmsys verify` on a result of one H200: an honest file passes, and it says what cannot be judged.

The result is eight cases of reports/results/nvidia-h200_20261126_default.json.gz, sealed as a file of their own; most
tests use `content`, two forwards of it. tests/test_forged_results.py has the files that verify refuses.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmsys import verify
from lmsys.files import read_text
from tests.support.processes import ENVIRONMENT, ROOT
from tests.support.result_files import (
    FORWARD,
    OTHER_FORWARD,
    PART,
    RECORD,
    RESULT,
    Content,
    changed,
    h200,
    seal_again,
    times,
)

RESULTS = ROOT / "reports" / "results"


@pytest.fixture(scope="module")
def benchmarks() -> dict[str, Any]:
    """The benchmarks of the repository, by name, which verify needs to judge calls again."""
    return verify.benchmarks_in(ROOT / "benchmarks")


@pytest.fixture
def content(benchmarks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Content:
    """Two forwards with two checked calls each, and the benchmark is told to expect two."""
    monkeypatch.setattr(type(benchmarks["attention"]), "num_proofs", 2)
    return h200(FORWARD, OTHER_FORWARD)


@pytest.fixture
def path(content: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a file of `content`; the command is run in the repository's folder."""
    monkeypatch.chdir(ROOT)
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    return path


def test_what_nobody_altered_passes(benchmarks: dict[str, Any]) -> None:
    """The whole file passes, in which are forwards and backwards, each with as many checked calls as a run keeps."""
    done, faults = verify.verify(RESULT, benchmarks)
    assert faults == [] and (done.records, done.calls) == (8, 8 * benchmarks["attention"].num_proofs)


def test_a_budget_may_be_larger_than_here_but_excuses_no_error(
    content: Content, path: Path, benchmarks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain PyTorch, whose error makes the budget, may lose more on a GPU than on this CPU."""
    path.write_text(json.dumps(seal_again(changed(content, ((*PART, "budget"), times(3))))))
    assert verify.verify(path, benchmarks)[1] == []
    monkeypatch.setattr("benchmarks.attention.check.BUDGET_RTOL", -1.0)  # as if the oracle's budget were 0
    assert any("more than its budget should be" in fault for fault in verify.verify(path, benchmarks)[1])


def test_the_command_says_so_and_exits_so(
    path: Path, content: Content, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main([str(path)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    path.write_text(json.dumps(changed(content, ((*RECORD, "time_s"), times(0.9)))))
    assert verify.main([str(path)]) == 1
    assert "time_s is" in capsys.readouterr().out
    assert verify.main([str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_file_that_takes_long_says_how_far_it_is(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verify.main([str(path)]) == 0 and capsys.readouterr().err == ""
    monkeypatch.setattr(verify, "TOLD_S", 0.0)
    assert verify.main([str(path)]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"{path}: 0 of 2 records"
    assert re.fullmatch(rf"{re.escape(str(path))}: 1 of 2 records, about \d+ s left", second)


# A program that runs `lmsys` with the words that it is given, and is interrupted when the file cut.json is read.
INTERRUPTED = """
import signal, sys
from lmsys.__main__ import main
from lmsys.bench import record

def load_file(path, load=record.load_file):
    return signal.raise_signal(signal.SIGINT) if path.name == "cut.json" else load(path)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it
record.load_file = load_file
sys.exit(main())
"""


def test_an_interrupt_ends_it_with_a_sentence(path: Path, tmp_path: Path) -> None:
    """The interrupt comes in the second file: what was found in the first is printed, and the exit code is 130."""
    command = [sys.executable, "-c", INTERRUPTED, "verify", str(path), str(tmp_path / "cut.json")]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stdout.splitlines()[-1].startswith(f"{path}: 2 records, 4 timed calls judged again by 512 elements")
    assert done.stderr.startswith("lmsys: interrupted") and done.stderr.count("\n") == 1


def test_without_folders_it_finds_the_benchmark_of_every_committed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    known = verify.benchmarks_in(*verify.FOLDERS)
    named = {
        name for path in RESULTS.rglob("*.json*") for name in re.findall(r'"benchmark": ?"(\w+)"', read_text(path))
    }
    assert {"attention", "plans", "short_plans"} <= named <= known.keys()


def test_in_a_folder_without_benchmarks_those_of_the_checkout_judge(path: Path, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    command = [sys.executable, "-m", "lmsys", "verify", str(path)]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert "there is no benchmark 'attention' here" not in said and "0 timed calls judged again" not in said


def test_every_folder_that_is_named_is_looked_in(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folders in (["benchmarks", str(path.parent)], [str(path.parent), "benchmarks"]):
        named = [word for folder in folders for word in ("--benchmarks", str(ROOT / folder))]
        assert verify.main([*named, str(path)]) == 0
        assert verify.NOT_RECOMPUTED not in capsys.readouterr().out


def test_without_the_benchmarks_it_says_what_it_left_out(path: Path) -> None:
    done, faults = verify.verify(path, verify.benchmarks_in(path.parent))
    assert (done.records, done.calls) == (2, 0)
    assert len(faults) == 2 and all("not proved: there is no benchmark 'attention' here" in fault for fault in faults)
    assert verify.main(["--benchmarks", str(path.parent), str(path)]) == 1


def test_the_journal_of_a_run_that_was_killed_is_verified(content: Content, tmp_path: Path) -> None:
    ours = content["lmsys"]
    lines = [{name: value for name, value in ours.items() if name not in ("records", "seal")}, *ours["records"]]
    (tmp_path / "out.json.partial").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("out.json.partial", "out.json"):
        done, faults = verify.verify(tmp_path / name, {})
        assert done.records == 2 and any("has no seal" in line for line in done.left_out)
        assert all("not proved: there is no benchmark" in fault for fault in faults)
