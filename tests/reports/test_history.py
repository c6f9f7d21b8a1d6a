"""`lmsys report --history FOLDER`: the order of commits, which runs stand together, lines and verdicts."""

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from lmsys.reports import plots
from lmsys.reports.__main__ import main
from tests.support.records import cells, record, save

ROWS = {"flash_triton": 1e-3, "sdpa_flash": 2e-3, "naive": 5e-3}
COMMITS = ("aaaaaaa", "bbbbbbb", "ccccccc", "ddddddd")


def run(path: Path, seed: int, clock: float = 1.0, pace: float = 1.0, made: str = "", **told: Any) -> Path:
    """A run whose machine has a clock of its own; `pace` is that of `flash_triton` alone, `made` its commit's date."""
    rng, found = random.Random(seed), []
    for length in (512, 1024, 2048):
        for row, seconds in ROWS.items():
            one = record("attention", row, seconds, queries=length, keys=length)
            factor = clock * (pace if row == "flash_triton" else 1.0)
            one["samples_s"] = [factor * seconds * rng.gauss(1, 0.004) for _ in range(40)]
            found.append(one | {"id": f"S{length}-{row}"})
    save(path, found, **told)
    path.write_text(json.dumps(json.loads(path.read_text()) | ({"commit_info": {"time": made}} if made else {})))
    return path


def four_commits(folder: Path) -> None:
    """The third is slower, on a clock that moves; files are named, and were run, in another order than committed."""
    folder.mkdir()
    for place, (commit, clock, pace) in enumerate(zip(COMMITS, (1.0, 1.2, 0.9, 1.1), (1, 1, 1.3, 1.3), strict=True)):
        hour = f"2026-01-0{place + 1}T00:30:00+02:00"  # the day before, in UTC
        name, date = f"{9 - place}.json", f"2026-02-0{9 - place}T00:00:00+00:00"
        run(folder / name, place, clock, pace, hour, commit=commit + "0" * 33, date=date)


def history(*arguments: object) -> int:
    return main(["--history", *map(str, arguments)])


def files_of(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*.*")}


def test_cases_stand_over_commits_in_the_order_of_their_dates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    four_commits(tmp_path / "runs")
    assert history(tmp_path / "runs", "-o", tmp_path / "out") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["4 runs, the last beside the first", "3 slower, 3 unclear, 3 same, by a margin of 0.05"]
    assert said[-1] == str(tmp_path / "out" / "index.html")
    files = files_of(tmp_path / "out")
    assert {one["row"] for one in cells(files, "changed")} == {"flash_triton"}
    for one in cells(files, "changed"):
        assert 1.28 < float(one["time after / before"]) < 1.32, "the clock is 1.1 times as slow, which is no change"
    plot = files["plots/synthetic-gpu-history-attention.svg"].decode()
    assert re.findall("|".join(COMMITS), plot) == list(COMMITS)
    assert "attention: time by commit" in plot and "flash_triton" in plot and "flash_triton" in said[3]


def test_a_run_of_a_history_may_be_compressed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    four_commits(tmp_path / "runs")
    assert history(tmp_path / "runs", "-o", tmp_path / "out") == 0
    lines = capsys.readouterr().out
    for path in list((tmp_path / "runs").glob("[78].json")):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert history(tmp_path / "runs", "-o", tmp_path / "out") == 0
    assert capsys.readouterr().out == lines and lines.startswith("4 runs")


def test_a_line_goes_by_the_runs_that_have_its_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    four_commits(tmp_path / "runs")
    path = tmp_path / "runs" / "7.json"  # of the third commit, whose first case was not measured
    content = json.loads(path.read_text())
    missing = content["lmsys"]["records"].pop(0)["id"]
    path.write_text(json.dumps(content))
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(plots, "to_svg", lambda axes, *_: drawn.update(axes=axes) or '<svg width="1pt" height="1pt">')
    assert history(tmp_path / "runs", "-o", tmp_path / "out") == 0
    lines = {line.get_label(): line.get_xydata().T for line in drawn["axes"].get_lines()}
    slower = [xy for label, xy in lines.items() if "flash_triton" in label]
    assert sorted(list(places) for places, _ in slower) == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 3]]
    assert list(lines[missing][0]) == [0, 1, 3]
    for places, ratios in slower:
        assert list(ratios) == pytest.approx([1.3 if place >= 2 else 1.0 for place in places], rel=0.02)
    steady = [line.get_ydata() for line in drawn["axes"].get_lines() if line.get_color() == "0.7"]
    assert len(steady) == 3 and all(list(ratios) == pytest.approx([1.0] * 4, rel=0.02) for ratios in steady), "naive"


def test_a_run_without_a_date_of_its_commit_stands_at_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    four_commits(tmp_path / "runs")
    first = run(tmp_path / "runs" / "z.json", 7, commit="e" * 40, date="2020-01-01T00:00:00+00:00")
    assert history(tmp_path / "runs", "-o", tmp_path / "out") == 0
    plot = (tmp_path / "out" / "plots" / "synthetic-gpu-history-attention.svg").read_text()
    assert re.findall("|".join((*COMMITS, "eeeeeee")), plot) == ["eeeeeee", *COMMITS]
    first.write_text(first.read_text().replace("2020-01-01T00:00:00+00:00", "yesterday"))
    assert history(tmp_path / "runs", "-o", tmp_path / "out") == 2
    assert "'yesterday'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"name": "Other GPU", "gpu": "Other GPU"}, "before ran on Other GPU"),
        ({"torch": "9.9"}, "before has torch 9.9"),
    ],
)
def test_runs_of_another_machine_or_version_are_left_out_in_words(
    told: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    four_commits(tmp_path / "runs")
    run(tmp_path / "runs" / "5.json", 7, made="2026-01-02T12:00:00Z", commit="e" * 40, **told)
    assert history(tmp_path / "runs", "-o", tmp_path / "out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"left out: {said}") and lines[1].startswith("4 runs")
    assert "eeeeeee" not in (tmp_path / "out" / "plots" / "synthetic-gpu-history-attention.svg").read_text()


def test_what_makes_no_history_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for folder in (tmp_path / "absent", alone):
        assert history(folder, "-o", tmp_path / "out") == 2
        assert str(folder) in capsys.readouterr().err
        run(alone / "1.json", 1)
    four_commits(tmp_path / "runs")
    for option in (["--anyway"], ["--single-file"], ["--baseline", "naive"], [str(alone / "1.json")]):
        assert history(tmp_path / "runs", *option, "-o", tmp_path / "out") == 2
        assert "--history takes a folder" in capsys.readouterr().err
    run(alone / "2.json", 2)
    content = json.loads((alone / "2.json").read_text())
    content["lmsys"]["records"] = [one | {"id": f"other-{one['id']}"} for one in content["lmsys"]["records"]]
    (alone / "2.json").write_text(json.dumps(content))
    assert history(alone, "-o", tmp_path / "out") == 2
    assert "nothing to compare" in capsys.readouterr().err
    (tmp_path / "runs" / "other.json").write_text("{}")
    assert history(tmp_path / "runs", "-o", tmp_path / "out") == 2
    assert "other.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
