"""The report's chapter on tokenizers: rates, paired speeds, memory. No result is real."""

import csv
import io
from pathlib import Path
from random import Random
from statistics import median

import pytest

from tests.reports.test_reports import built, refused, save

STEM = "synthetic-gpu-tokenizer-corpus-V10000"
SECONDS = {"lmsys": 2.0, "lmsys_serial": 3.0, "tiktoken": 4.0, "huggingface": 8.0}


def case(task: str, impl: str, **changes: object) -> dict:
    """A synthetic record; the rows of a comparison share the noise of its rounds."""
    noise = Random(task)
    samples = [SECONDS[impl] * noise.uniform(0.9, 1.2) for _ in range(3)]
    record = {
        "id": f"corpus-{task}-{impl}", "benchmark": "tokenizer", "section": "corpus", "impl": impl, "task": task,
        "label": f"the {impl} one", "peer": not impl.startswith("lmsys"), "vocab_size": 10_000,
        "text_bytes": 30_000_000, "processes": 1 if impl == "lmsys_serial" else 2, "device": "cpu", "outcome": "ok",
        "reason": None, "comparison": f"corpus-{task} now", "clock": "perf_counter", "time_s": median(samples),
        "mean_s": sum(samples) / 3, "std_s": 0.0, "p20_s": min(samples), "p80_s": max(samples), "min_s": min(samples),
        "rounds": 3, "samples_s": samples, "sm_clock_mhz": None, "peak_bytes": 200_000_000,
        "bytes_per_s": 3e7 / median(samples), "memory_limit_bytes": None,
    }  # fmt: skip
    if changes.get("outcome", "ok") != "ok":
        record |= dict.fromkeys("time_s mean_s std_s p20_s p80_s min_s rounds samples_s peak_bytes bytes_per_s".split())
    return record | changes


def sweep() -> list[dict]:
    records = [case(task, impl) for task in ("encode", "train") for impl in SECONDS]
    records.remove(case("train", "tiktoken"))
    return [*records, case("train", "tiktoken", outcome="unsupported", reason="tiktoken does not train")]


def test_speed_is_paired_and_rates_are_bytes_over_time(tmp_path: Path) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", sweep()))
    rows = list(csv.DictReader(io.StringIO(files[f"tables/{STEM}.csv"].decode())))
    assert [(row["task"], row["impl"]) for row in rows] == [(task, i) for task in ("train", "encode") for i in SECONDS]
    found = {(row["task"], row["impl"]): row for row in rows}
    for task in ("train", "encode"):
        assert float(found[task, "lmsys"]["speed of huggingface"]) == pytest.approx(4)
        assert float(found[task, "lmsys"]["bytes_per_s"]) == pytest.approx(3e7 / float(found[task, "lmsys"]["time_s"]))
    assert float(found["encode", "lmsys_serial"]["speed of tiktoken"]) == pytest.approx(4 / 3)
    assert not found["train", "lmsys"]["speed of tiktoken"] and not found["train", "tiktoken"]["time_s"]
    text = files[f"tables/{STEM}.md"].decode()
    assert "tiktoken does not train" in text and "speed, × of huggingface" in text and "30.0 MB" in text
    assert f"plots/{STEM}-rate.svg" in files and b"Tokenizers" in files["index.html"]


def test_another_baseline_can_be_named(tmp_path: Path) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", sweep()), "--baseline", "lmsys_serial")
    assert "speed, × of lmsys_serial" in files[f"tables/{STEM}.md"].decode()


def test_cells_without_a_text_are_shown(tmp_path: Path) -> None:
    failed = [case("encode", impl, outcome="error", reason="no text", text_bytes=None) for impl in SECONDS]
    files = built(tmp_path / "out", save(tmp_path / "r.json", failed))
    assert "no text" in files[f"tables/{STEM}.md"].decode()


def test_a_record_without_its_task_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = save(tmp_path / "r.json", [case("train", "lmsys") | {"task": None}])
    refused([str(result), "-o", str(tmp_path / "out")], "a tokenizer record needs a valid 'task'", capsys)
