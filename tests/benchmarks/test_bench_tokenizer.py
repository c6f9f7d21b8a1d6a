"""The benchmark of tokenizers: which cases there are, what is wrong in them, and what their records say."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_tokenizer
from benchmarks.bench_tokenizer import Tokenizers
from benchmarks.tokenizer import rows
from lmsys.training.corpora import END_OF_TEXT, Corpus, text_file
from tests.support.harness import cases_of, records

PACKAGES = {"tiktoken": "tiktoken", "huggingface": "tokenizers"}
SERIAL = ("lmsys_serial",)
CHECKED_ONLY, TIMED = {"timed": False}, {"seconds_per_row": 0.0}
TINY = {"task": ("encode",), "text_bytes": 40_000, "vocab_size": 300, "rounds": 2}


@pytest.fixture(autouse=True)
def small_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules here in the place of the standard library's; memory is measured in a test of its own."""
    sources = sorted(Path(bench_tokenizer.__file__).parent.glob("*.py"))
    (tmp_path / "text").write_text("".join(path.read_text() + END_OF_TEXT for path in sources))
    corpus: Corpus = text_file(tmp_path / "text")
    monkeypatch.setattr(bench_tokenizer, "stdlib", lambda: corpus)
    monkeypatch.setattr(bench_tokenizer, "SMALL_BYTES", 3000)
    monkeypatch.setattr(bench_tokenizer, "peak_resident_bytes", lambda _: 7)


def found(settings: Any = CHECKED_ONLY, **values: Any) -> dict[str, dict[str, Any]]:
    """Records by row."""
    benchmark = Tokenizers()
    return records(benchmark, cases_of(benchmark, **(TINY | values)), **settings)


@pytest.mark.parametrize("task", ["train", "encode"])
def test_rows_are_timed_and_held_to_the_definition(task: str) -> None:
    ended = found(TIMED, task=(task,))
    for row, one in ended.items():
        if one["outcome"] == "unsupported":
            assert row in PACKAGES and (
                "does not train" in one["reason"] or "a package that is not here" in one["reason"]
            )
            continue
        assert one["outcome"] == "ok", one["reason"]
        assert one["rounds"] == 2 and one["peak_bytes"] == 7 and one["device"] == "cpu"
        assert one["bytes_per_s"] == pytest.approx(one["text_bytes"] / one["time_s"])
        assert one["processes"] == (1 if row == "lmsys_serial" else 2) and one["peer"] == (row in PACKAGES)
    assert len({one["comparison"] for one in ended.values()}) == 1
    assert all(39_000 < one["text_bytes"] < 50_000 for one in ended.values())


def test_the_user_says_how_many_rounds_there_are() -> None:
    assert found(TIMED | {"min_rounds": 4}, tokenizer=SERIAL)["lmsys_serial"]["rounds"] == 4


def test_what_is_not_installed_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)
    for row, one in found(tokenizer=tuple(PACKAGES)).items():
        assert one["outcome"] == "unsupported" and f"{row} needs a package that is not here" in one["reason"]
        assert PACKAGES[row] in one["reason"] and "pip install 'lmsys[peers]' brings it" in one["reason"]
    assert found(tokenizer=("tiktoken",), task=("train",))["tiktoken"]["reason"] == "tiktoken does not train"


def test_wrong_ids_and_merges_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    true_encoder, true_train = rows.Ours.encoder, rows.train

    def with_change(change: Any, only: str = "") -> Any:
        def make(text: Path, *arguments: Any) -> Any:
            call = true_encoder(text, *arguments)
            return (lambda: [change(np.concatenate(call()))]) if only in text.name else call

        return make

    for changed, said in (
        (with_change(lambda ids: np.where(np.arange(len(ids)) == 5, 0, ids)), "id 5 is 0, by definition"),
        (with_change(lambda ids: ids[:-1]), "ids, by definition"),
        (with_change(lambda ids: ids + 1, "other"), "right before it was timed, not after: id 0 is"),
    ):
        monkeypatch.setattr(rows.Ours, "encoder", changed)
        one = found(TIMED, tokenizer=SERIAL)["lmsys_serial"]
        assert one["outcome"] == "wrong" and said in one["reason"] and "time_s" not in one

    def in_another_order(*arguments: Any) -> Any:
        learned = true_train(*arguments)
        learned.merges[10:12] = learned.merges[11:9:-1]
        return learned

    monkeypatch.setattr(rows, "train", in_another_order)
    one = found(tokenizer=SERIAL, task=("train",))["lmsys_serial"]
    assert one["outcome"] == "wrong" and "merge 10 is" in one["reason"]


def test_what_fails_outside_a_row_fails_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("no text")

    monkeypatch.setattr(bench_tokenizer, "stdlib", fails)
    one = found()["lmsys"]
    assert one["outcome"] == "error" and "the bench failed, not the row: ValueError: no text" in one["reason"]
    assert one["text_bytes"] is None


def test_without_timing_rows_are_checked_only() -> None:
    one = found(tokenizer=SERIAL)["lmsys_serial"]
    assert one["outcome"] == "ok" and "not timed" in one["reason"] and "time_s" not in one


def test_a_run_writes_a_record_for_each_case(smoke_result: Path) -> None:
    written = json.loads(smoke_result.read_text())["lmsys"]["records"]
    ours = {one["impl"]: one for one in written if one["benchmark"] == "tokenizer" and one["task"] == "encode"}
    assert list(ours) == ["lmsys", "lmsys_serial", "tiktoken", "huggingface"]
    assert ours["lmsys"]["outcome"] == "ok" and ours["lmsys"]["peak_bytes"] > 20_000_000
