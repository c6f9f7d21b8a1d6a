"""The folder of deliverables: a file for each problem that a benchmark answers, and four that are computed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dev import deliverables
from dev.deliverables import COMPUTED, PAGE, command_of, main, problems, shown, spread


def test_every_command_of_the_page_has_a_file() -> None:
    page, found = PAGE.read_text(), [*problems()]
    lines = [line for line in page.splitlines() if line.startswith("| ") and "`lmsys bench " in line]
    assert len(found) == len(lines) > 15
    assert len({problem.name for problem in found}) == len(found)
    assert {"benchmarking_script-a-b-2025", "flash_benchmarking", "fsdp_accounting-2026"} <= {x.name for x in found}
    assert all(problem.files for problem in found)
    assert all(f"`{name}.md`" in page for name in COMPUTED)


def test_a_command_is_small_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliverables, "GPU", False)
    for problem in problems():
        for text in problem.commands:
            command = command_of(text, tmp_path / "r.json", ["mine.py:f"])
            assert command is None or command[-2:] == ["-o", str(tmp_path / "r.json")]
            assert (command is None) == text.startswith("steps")
            attention = command is not None and text.startswith("attention")
            assert ("--attention=naive,mine.py:f" in (command or [])) == attention
            assert not attention or "--length" in (command or [])


def result_of(*records: dict[str, Any]) -> str:
    return json.dumps({"lmsys": {"records": records}})


def test_a_table_has_mean_and_deviation(tmp_path: Path) -> None:
    timed = {"id": "a case", "time_s": 2e-3, "mean_s": 2.5e-3, "std_s": 1e-4, "samples_s": [1.0, 2.0]}
    (tmp_path / "r.json").write_text(result_of(timed, {"id": "oom", "time_s": None}))
    assert spread(tmp_path / "r.json").splitlines()[-1] == "| a case | 2.5 | 0.1 | 2 |"
    (tmp_path / "r.json").write_text(result_of({"id": "oom", "time_s": None}))
    assert spread(tmp_path / "r.json") == ""


def test_files_of_a_report_are_shown_by_the_page(tmp_path: Path) -> None:
    for name in ("tables/cpu-2-model-sizes-forward-time-x.md", "tables/cpu-2-other.md", "plots/cpu-2-model-sizes.svg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    parts = [*shown(tmp_path, ["tables/model-sizes-forward-time-*", "plots/model-*"], tmp_path)]
    assert parts == ["![cpu-2-model-sizes](plots/cpu-2-model-sizes.svg)", "tables/cpu-2-model-sizes-forward-time-x.md"]


def test_what_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(deliverables, "SHAPE", ("tiny", 16, 2))
    prefixes = [word for name in COMPUTED for word in ("--problem", name)]
    monkeypatch.setattr(deliverables, "problems", lambda: iter(()))
    assert main(["-o", str(tmp_path), *prefixes]) == 0
    texts = {name: (tmp_path / f"{name}.md").read_text() for name in COMPUTED}
    assert len(capsys.readouterr().out.splitlines()) == len(COMPUTED)
    assert "| layer norm |" in texts["benchmarking_mixed_precision-toy_model"]
    assert len(re.findall(r"^\| .* \d+% \|$", texts["memory_profiling-f-contributors"], re.MULTILINE)) == 5
    rows = [line.split(" | ") for line in texts["gradient_checkpointing"].splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip("| ") for row in rows] == ["none", "1", "2"]
    assert float(rows[1][1]) < float(rows[0][1])  # a checkpointed block saves less
    assert (tmp_path / "gradient_checkpointing.svg").is_file()
    assert "| 2.7b | 12.69 |" in texts["memory_on_paper"]
