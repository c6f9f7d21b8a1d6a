"""`lmsys report --before OLD NEW`: verdicts, the page, the exit code (1 if a row is slower), and refused comparisons.

There are two kinds of comparison. One is of two result files, OLD and NEW. The other is within one file, of a run that
measured each row of today and of an earlier commit in turns (`lmsys bench --against`). `run` makes up a file of the
first kind, `run_of_both` one of the second. A factor slows down the row "flash_triton".
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lmsys.bench.record import earlier
from lmsys.reports.__main__ import main
from tests.support.records import Record, cells, record, save

ROWS = {"flash_triton": 1e-3, "sdpa_flash": 2e-3, "naive": 5e-3}


def timed(seed: int, factor: float = 1.0, slowed: str = "flash_triton") -> list[Record]:
    """Records of three rows at three lengths; the row `slowed` takes `factor` times as long as it should."""
    rng, records = random.Random(seed), []
    for length in (512, 1024, 2048):
        for row, seconds in ROWS.items():
            pace = seconds * (factor if row == slowed else 1.0)
            samples = [pace * rng.gauss(1, 0.004) for _ in range(40)]
            records.append(record("attention", row, seconds, queries=length, keys=length) | {"samples_s": samples})
    return records


def run(path: Path, seed: int, factor: float = 1.0, **machine: Any) -> Path:
    """Writes a result file of `timed`. `machine`: facts about its machine that differ."""
    return save(path, timed(seed, factor), **machine)


def compared(out: Path, *arguments: object) -> int:
    """The exit code of `lmsys report --before` with these arguments."""
    return main(["--before", *map(str, arguments), "-o", str(out)])


def test_a_slower_row_is_reported_and_the_command_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = run(tmp_path / "old.json", 1), run(tmp_path / "new.json", 2, 1.1, commit="f" * 40)
    assert compared(tmp_path / "out", old, new) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("3 slower, 3 unclear, 3 same, by a margin of 0.05\n")
    assert "slower            1.10" in printed and " to 1.10" in printed and "  default-" in printed
    assert str(tmp_path / "out" / "index.html") in printed
    files = {
        path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in (tmp_path / "out").rglob("*.*")
    }
    assert {line["row"] for line in cells(files, "changed")} == {"flash_triton"}
    assert len(cells(files, "all-attention")) == 9
    page = files["index.html"].decode()
    assert page.index("Verdicts") < page.index("What changed") < page.index("All cases: attention")
    assert "ffffffffff" in page and "0123456789" in page
    assert compared(tmp_path / "again", old, new) == 1
    assert (tmp_path / "again" / "index.html").read_bytes() == files["index.html"]
    assert compared(tmp_path / "faster", new, old) == 0
    assert compared(tmp_path / "same", old, old) == 0
    assert compared(tmp_path / "wide", old, new, "--margin", "0.2") == 0


def test_where_a_peer_became_slower_no_row_of_ours_is_praised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours are faster than the peer, relative to before; that they take as long as before stands beside it."""
    old = run(tmp_path / "old.json", 1)
    new = save(tmp_path / "new.json", timed(2, 1.3, slowed="sdpa_flash"))
    assert compared(tmp_path / "out", old, new) == 0
    faster = [line for line in capsys.readouterr().out.splitlines() if line.startswith("faster ")]
    assert len(faster) == 6 and all("rather sdpa_flash has changed, or the clock" in line for line in faster)
    assert "rather sdpa_flash has changed" in (tmp_path / "out" / "index.html").read_text()
    assert compared(tmp_path / "ours", old, run(tmp_path / "ours.json", 2, 1.3)) == 1
    assert "has changed" not in capsys.readouterr().out


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_case_that_was_disturbed_in_either_run_is_marked(
    side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is marked in the terminal and on the page, so that nobody takes it for a change of the code."""
    paths = {"before": run(tmp_path / "old.json", 1), "after": run(tmp_path / "new.json", 2, 1.1)}
    content = json.loads(paths[side].read_text())
    slower, same = content["lmsys"]["records"][0], content["lmsys"]["records"][2]
    assert (slower["impl"], same["impl"]) == ("flash_triton", "naive")
    for case in (slower, same):
        case["disturbed"] = "other programs took 40 % of the CPU"
    paths[side].write_text(json.dumps(content))
    assert compared(tmp_path / "out", paths["before"], paths["after"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("3 slower (1 disturbed), 3 unclear, 3 same (1 disturbed), by a margin of 0.05\n")
    assert f"{slower['id']}: disturbed {side}: other programs took 40 % of the CPU\n" in printed
    assert "2 cases were measured while the machine was disturbed" in printed
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*.md")]
    changed, verdicts = (next(text for text in texts if f"### {name}" in text) for name in ("What changed", "Verdicts"))
    assert changed.count("slower¹") == 1 and changed.count("| slower |") == 2
    assert f"¹ Disturbed {side}: other programs took 40 % of the CPU." in changed
    assert "| slower | 3 (1 disturbed) |" in verdicts and "a case that was disturbed" in verdicts


OTHER_TORCH = "error: before has torch 0.0.0, after has torch 9.9: measure both alike, or ask for --anyway"
OTHER_GPU = "error: before ran on Synthetic GPU, after on Another GPU: measure both alike, or ask for --anyway"


@pytest.mark.parametrize(
    ("values", "machine", "options", "message"),
    [
        ({}, {"torch": "9.9"}, [], OTHER_TORCH),
        ({}, {"name": "Another GPU"}, [], OTHER_GPU),
        ({"clock": "perf_counter"}, {}, [], "by the clock 'cuda_event' before, and by 'perf_counter' after"),
        ({"queries": 7}, {}, [], "nothing to compare: no case was timed in both runs"),
        *(({}, {}, ["--margin", margin], f"--margin={float(margin)}") for margin in ("0", "nan", "2")),
        ({}, {}, ["--single-file"], "--baseline and --single-file are of one run's report"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    values: dict[str, Any],
    machine: dict[str, Any],
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The later run differs by some values of its record, or by its machine."""
    old = save(tmp_path / "old.json", [record("attention", "naive")])
    new = save(tmp_path / "new.json", [record("attention", "naive", **values)], **machine)
    assert compared(tmp_path / "out", old, new, *options) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert not machine or compared(tmp_path / "out", old, new, "--anyway") == 0


def test_on_a_cpu_runs_with_as_many_threads_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second thread helps some rows more than others, so that one seems to have changed beside its peer."""
    for device, expected in (("cpu", 2), ("cuda", 0)):
        old, new = (run(tmp_path / f"{threads}.json", 1, device=device, threads=threads) for threads in (1, 2))
        assert compared(tmp_path / "out", old, new) == expected
    assert "before has threads 1, after has threads 2: measure both alike" in capsys.readouterr().err


def test_the_page_names_the_machines_and_versions_that_are_compared_anyway(tmp_path: Path) -> None:
    old = run(tmp_path / "old.json", 1, name="Another GPU", torch="9.9")
    assert compared(tmp_path / "out", old, run(tmp_path / "new.json", 1), "--anyway") == 0
    files = {f"tables/{path.name}": path.read_bytes() for path in (tmp_path / "out" / "tables").iterdir()}
    machines = {"before": ("Another GPU", "9.9"), "after": ("Synthetic GPU", "0.0.0")}
    assert {line["run"]: (line["machine"], line["torch"]) for line in cells(files, "runs")} == machines
    sdpa = next(line for line in cells(files, "all-attention") if line["row"] == "sdpa_flash")
    assert float(sdpa["after, µs"].replace(",", "")) == pytest.approx(2000, rel=0.02)


def test_a_run_alone_needs_rows_as_they_were_and_takes_no_margin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path / "one.json", 1)
    assert compared(tmp_path / "out", result) == 2
    assert "it has no rows as they were: name the run after, too" in capsys.readouterr().err
    assert main([str(result), "--margin", "0.2", "-o", str(tmp_path / "out")]) == 2
    assert "--margin is of two runs: name the run before by --before" in capsys.readouterr().err


def run_of_both(path: Path, factor: float) -> Path:
    """Writes a result file of a run that measured earlier rows, and today's, of which one is slower by a factor."""
    against = {"name": "aaaaaaaaaa", "commit": "a" * 40, "margin": 0.03}
    return save(path, [*(earlier(case, against) for case in timed(1)), *timed(1, factor)])


def test_a_run_that_measured_both_states_is_compared_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The margin is that of the run. The usual report begins with the verdicts, and its chapters have today's rows."""
    result = run_of_both(tmp_path / "both.json", 1.06)
    assert compared(tmp_path / "out", result) == 1
    assert capsys.readouterr().out.startswith("3 slower, 6 same, by a margin of 0.03\n")
    assert compared(tmp_path / "wide", result, "--margin", "0.1") == 0
    assert compared(tmp_path / "faster", run_of_both(tmp_path / "faster.json", 0.9)) == 0
    pages = []
    for name in ("site", "again"):
        assert main([str(result), "-o", str(tmp_path / name)]) == 0
        pages.append((tmp_path / name / "index.html").read_bytes())
    assert pages[0] == pages[1]
    site = pages[0].decode()
    assert (
        site.index("Verdicts")
        < site.index("What changed")
        < site.index("All cases: attention")
        < site.index(">Attention: Everyday sizes<")
    )
    tables = {path.name: path.read_text() for path in (tmp_path / "site" / "tables").glob("*.csv")}
    named = [name for name, text in tables.items() if "flash_triton@aaaaaaaaaa" in text]
    comparison = {"all-attention.csv", "changed.csv", "records.csv"}  # no other table names an earlier row
    assert {name.removeprefix("synthetic-gpu-") for name in named} == comparison
    assert f"{'a' * 10}" in site and "Each row took turns with itself as it was" in site


def test_cases_that_are_only_in_the_earlier_run_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = save(tmp_path / "old.json", [record("attention", row) for row in ROWS])
    new = save(tmp_path / "new.json", [record("attention", row) for row in ("naive", "sdpa_flash")])
    assert compared(tmp_path / "out", old, new) == 0
    assert "1 case only in the run before: default-" in capsys.readouterr().out
    assert "only in the run before" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize("name", ["a/b", "changed", "../x"])
def test_a_benchmark_may_have_any_name(name: str, tmp_path: Path) -> None:
    paths = []
    for side in ("old", "new"):
        path = save(tmp_path / f"{side}.json", [record("attention", "naive")])
        path.write_text(path.read_text().replace('"attention"', json.dumps(name)))
        paths.append(path)
    assert compared(tmp_path / "out", *paths) == 0
    assert (tmp_path / "out" / "index.html").is_file() and len(list((tmp_path / "out" / "tables").iterdir())) >= 5
