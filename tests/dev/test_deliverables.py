"""`dev.deliverables` writes a file for each problem of CS336: those that a benchmark answers, and computed ones."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dev import deliverables
from dev.deliverables import COMPUTED, PAGE, command_of, main, problems, saved_by, shown, spread


def test_every_problem_of_the_page_with_a_command_has_a_file() -> None:
    page, found = PAGE.read_text(), [*problems()]
    lines = [line for line in page.splitlines() if line.startswith("| ") and "`lmsys bench " in line]
    names = {problem.name for problem in found}
    assert len(names) == len(found) == len(lines) > 15
    assert {"benchmarking_script-a-b-2025", "flash_benchmarking", "fsdp_accounting-2026"} <= names
    assert all(problem.files for problem in found)
    assert all(f"`{name}.md`" in page for name in COMPUTED)
    files = {problem.name: problem.files for problem in found}
    timelines = "plots/anatomy-*-timeline", "tables/anatomy-peaks", "tables/anatomy-*-allocations"
    assert all({*timelines} <= {*files[f"memory_profiling-a-c-e-{year}"]} for year in (2025, 2026))
    # Forward, backward and both, in both precisions.
    assert "tables/flash-*-causal-*-time" in files["flash_benchmarking"]


def test_a_command_is_small_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliverables, "GPU", False)
    for problem in problems():
        for text in problem.commands:
            command = command_of(text, tmp_path / "r.json", ["mine.py:f"])
            assert command is None or command[-2:] == ["-o", str(tmp_path / "r.json")]
            assert (command is None) == text.startswith("steps")  # the one benchmark that needs a GPU
            attention = command is not None and text.startswith("attention")
            assert ("--attention=naive,mine.py:f" in (command or [])) == attention
            assert not attention or "--length" in (command or [])


def test_a_file_names_the_command_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliverables, "GPU", False)
    ran: list[Any] = []

    def run(command: Any, **_: Any) -> Any:
        ran.append(command)
        result = tmp_path / "results" / "sums.json"
        older = "lmsys.bench" in command and result.is_file()
        result.write_text(result_of())
        return SimpleNamespace(stdout="ERROR: it is the result of another command" * older, stderr="")

    monkeypatch.setattr(deliverables.subprocess, "run", run)
    problem = deliverables.Problem("`sums`", "a sum", ("model -k sizes --size 2.7b -o sums.json",), ("tables/sums",))
    text = deliverables.write(problem, tmp_path, []).read_text()
    assert "In full it is `lmsys bench model -k sizes --size 2.7b -o sums.json`." in text
    assert "--size tiny" in text and len(ran) == 2  # the benchmark, and its report
    deliverables.write(problem, tmp_path, [])
    assert len(ran) == 5  # the benchmark again, as the older result is another command's


def result_of(*records: dict[str, Any]) -> str:
    return json.dumps({"lmsys": {"records": records}})


def test_a_table_has_mean_and_deviation(tmp_path: Path) -> None:
    timed = {"id": "a case", "time_s": 2e-3, "mean_s": 2.5e-3, "std_s": 1e-4, "samples_s": [1.0, 2.0]}
    (tmp_path / "r.json").write_text(result_of(timed, {"id": "oom", "time_s": None}))
    assert spread(tmp_path / "r.json").splitlines()[-1] == "| a case | 2.5 | 0.1 | 2 |"
    (tmp_path / "r.json").write_text(result_of({"id": "oom", "time_s": None}))
    assert spread(tmp_path / "r.json") == ""


def test_tables_and_plots_that_the_page_names_are_shown(tmp_path: Path) -> None:
    for name in ("tables/cpu-2-model-sizes-forward-time-x.md", "tables/cpu-2-other.md", "plots/cpu-2-model-sizes.svg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    parts = [*shown(tmp_path, ["tables/model-sizes-forward-time-*", "plots/model-*"], tmp_path)]
    assert parts == ["![cpu-2-model-sizes](plots/cpu-2-model-sizes.svg)", "tables/cpu-2-model-sizes-forward-time-x.md"]


def test_a_misspelt_problem_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["-o", str(tmp_path / "new"), "--problem", "memory", "--problem", "gradient_chekpointing"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out and not (tmp_path / "new").exists()
    assert "--problem gradient_chekpointing: no problem's name begins so" in said.err
    assert all(name in said.err for name in COMPUTED)


def test_computed_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(deliverables, "SHAPE", ("tiny", 16, 2))
    options = [word for name in COMPUTED for word in ("--problem", name)]
    monkeypatch.setattr(deliverables, "problems", lambda: iter(()))
    assert main(["-o", str(tmp_path), *options]) == 0
    texts = {name: (tmp_path / f"{name}.md").read_text() for name in COMPUTED}
    assert len(capsys.readouterr().out.splitlines()) == len(COMPUTED)
    assert "| layer norm |" in texts["benchmarking_mixed_precision-toy_model"]
    assert len(re.findall(r"^\| .* \d+% \|$", texts["memory_profiling-f-contributors"], re.MULTILINE)) == 5
    rows = [line.split(" | ") for line in texts["gradient_checkpointing"].splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip("| ") for row in rows] == ["none", "1", "2"]  # blocks in a group
    assert float(rows[1][1]) < float(rows[0][1])  # a checkpointed block saves less
    assert (tmp_path / "gradient_checkpointing.svg").is_file()
    # 12.69 GiB of parameters, and 20 MiB of the residual stream.
    assert re.search(r"^\| 2.7b \| 12.69 \|.* \| 20 \|$", texts["memory_on_paper"], re.MULTILINE)
    assert "| 3,518 GB |" in texts["communication_accounting-2025"]
    overheads = re.findall(r"^\| \d+ \| (.*) \|$", texts["ddp_bucketed_benchmarking-b-2025"], re.MULTILINE)
    assert min(map(float, overheads)) == 3.098  # ms with the best number of buckets: 2 √(s · o / w)
    assert "| tensor | backward | 1386 | 133.6 | 73.61 |" in texts["parallelism_calcs-2026"]


def test_saved_tensors_by_operation() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    z = (x * y).exp()
    saved = [(name, tensor.data_ptr()) for name, tensor in saved_by(z.grad_fn)]
    assert sorted(saved) == sorted([("Exp", z.data_ptr()), ("Mul", x.data_ptr()), ("Mul", y.data_ptr())])


def test_out_of_memory_is_a_gap_in_table_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(deliverables, "SHAPE", ("tiny", 16, 2))
    monkeypatch.setattr(deliverables, "peak_bytes", full)
    assert "| none | nan | nan |" in deliverables.checkpointing(tmp_path)
