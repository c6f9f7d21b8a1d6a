"""The benchmark of tokenizers: which cells there are, what is wrong in them, and what their records say."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import tokenizer_trial
from benchmarks.sections import TokenizerSection
from benchmarks.session import Settings
from benchmarks.sweeps import SWEEPS
from benchmarks.tokenizer_rows import PACKAGES, why_not
from benchmarks.tokenizer_trial import cells_of
from benchmarks.tokenizer_trial import tokenizer_trial as run_trial
from lmsys.measure.memory import peak_resident_bytes
from lmsys.training.corpora import END_OF_TEXT, Corpus, text_file
from tests.support import processes

TINY = TokenizerSection("s", 40_000, 300, rounds=2)
OTHERS = "attention", "model", "data_parallel", "collectives", "training"  # what selects other benchmarks


@pytest.fixture
def settings() -> Settings:
    found = Settings("cpu", "smoke", 0.0, 10, True, None, "")
    found.__dict__["machine"] = {"date": "now", "gpu": None}
    return found


@pytest.fixture(autouse=True)
def small_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules here in the place of the standard library's; memory is measured in a test of its own."""
    sources = sorted(Path(tokenizer_trial.__file__).parent.glob("*.py"))
    (tmp_path / "text").write_text("".join(path.read_text() + END_OF_TEXT for path in sources))
    corpus: Corpus = text_file(tmp_path / "text")
    monkeypatch.setattr(tokenizer_trial, "stdlib", lambda: corpus)
    monkeypatch.setattr(tokenizer_trial, "SMALL_BYTES", 3000)
    monkeypatch.setattr(tokenizer_trial, "peak_resident_bytes", lambda _: 7)


def records(section: TokenizerSection, task: str, settings: Settings) -> dict[str, dict[str, Any]]:
    """By row."""
    cells = list(cells_of(replace(section, tasks=(task,))))
    found = [result.record for result in run_trial(cells, settings)]
    assert [one["id"] for one in found] == [cell.id for cell in cells]
    return {one["impl"]: one for one in found}


def test_every_sweep_has_cells_of_its_own() -> None:
    for sweep in SWEEPS.values():
        for device in sweep.values():
            ids = [cell.id for part in device.tokenizers for cell in cells_of(part)]
            assert ids and len(set(ids)) == len(ids)
            assert not any(word in one for one in ids for word in OTHERS)


@pytest.mark.parametrize("task", ["train", "encode"])
def test_rows_are_timed_and_held_to_the_definition(task: str, settings: Settings) -> None:
    found = records(TINY, task, settings)
    for row, one in found.items():
        if reason := why_not(task, row):
            assert one["outcome"] == "unsupported" and one["reason"] == reason
            continue
        assert one["outcome"] == "ok", one["reason"]
        assert one["rounds"] >= 2 and 39_000 < one["text_bytes"] < 50_000 and one["peak_bytes"] == 7
        assert one["bytes_per_s"] == pytest.approx(one["text_bytes"] / one["time_s"])
        assert one["processes"] == (1 if row == "lmsys_serial" else 2) and one["peer"] == (row in PACKAGES)
    assert len({one["comparison"] for one in found.values()}) == 1


def test_what_is_not_installed_is_unsupported(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    found = records(replace(TINY, rows=("tiktoken", "huggingface")), "encode", settings)
    assert {row: one["reason"] for row, one in found.items()} == {
        row: f"{package} is not installed: pip install {package}" for row, package in PACKAGES.items()
    }
    assert "does not train" in records(replace(TINY, rows=("tiktoken",)), "train", settings)["tiktoken"]["reason"]


def test_wrong_ids_and_merges_are_cells(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    true_encoder, section = tokenizer_trial.encoder, replace(TINY, rows=("lmsys_serial",))

    def with_change(change: Any, only: str = "") -> Any:
        def make(row: str, processes: int, tokenizer: Any, text: Path) -> Any:
            call = true_encoder(row, processes, tokenizer, text)
            return (lambda: [change(np.concatenate(call()))]) if only in text.name else call

        return make

    for changed, said in (
        (with_change(lambda ids: np.where(np.arange(len(ids)) == 5, 0, ids)), "id 5 is 0, by definition"),
        (with_change(lambda ids: ids[:-1]), "ids, by definition"),
        (with_change(lambda ids: ids + 1, "other"), "right before it was timed, not after: id 0 is"),
    ):
        monkeypatch.setattr(tokenizer_trial, "encoder", changed)
        one = records(section, "encode", settings)["lmsys_serial"]
        assert one["outcome"] == "wrong" and said in one["reason"] and "time_s" not in one
    true_train = tokenizer_trial.train

    def in_another_order(*arguments: Any) -> Any:
        found = true_train(*arguments)
        found.merges[10:12] = found.merges[11:9:-1]
        return found

    monkeypatch.setattr(tokenizer_trial, "train", in_another_order)
    one = records(section, "train", settings)["lmsys_serial"]
    assert one["outcome"] == "wrong" and "merge 10 is" in one["reason"]


def test_what_fails_outside_a_row_fails_every_cell(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("no text")

    monkeypatch.setattr(tokenizer_trial, "stdlib", fails)
    one = records(TINY, "encode", settings)["lmsys"]
    assert one["outcome"] == "error" and "the bench failed, not the row: ValueError: no text" in one["reason"]


def test_without_timing_rows_are_checked_only(settings: Settings) -> None:
    one = records(replace(TINY, rows=("lmsys_serial",)), "encode", replace(settings, timed=False))["lmsys_serial"]
    assert one["outcome"] == "ok" and "not timed" in one["reason"] and "time_s" not in one


def test_a_run_writes_a_record_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.json"
    monkeypatch.setitem(processes.ENVIRONMENT, "LMSYS_CACHE_DIR", str(tmp_path / "cache"))
    ended = processes.run("tokenizer and encode", *"--sweep smoke --benchmark-only --benchmark-json".split(), output)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {one["impl"]: one for one in json.loads(output.read_text())["lmsys"]["records"]}
    assert list(found) == ["lmsys", "lmsys_serial", "tiktoken", "huggingface"]
    assert found["lmsys"]["outcome"] == "ok" and found["lmsys"]["peak_bytes"] > 20_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which Linux has")
def test_the_memory_of_a_command_is_that_of_its_processes_together() -> None:
    alone = "import time; x = bytearray(50_000_000); time.sleep(0.3)"
    start = time.perf_counter()
    small = peak_resident_bytes([sys.executable, "-c", alone])
    assert 50_000_000 < small < 80_000_000 and time.perf_counter() - start < 10
    both = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {alone!r}]); {alone}; p.wait()"
    assert peak_resident_bytes([sys.executable, "-c", both]) > 1.8 * small
    with pytest.raises(RuntimeError, match="ended with 1: .*no such thing"):
        peak_resident_bytes([sys.executable, "-c", "raise ValueError('no such thing')"])
