"""The benchmark of tokenizers: which cases there are, what is wrong in them, and what their records say."""

import re
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_tokenizer
from benchmarks.bench_tokenizer import Texts, Tokenizers, _beginning
from benchmarks.tokenizer import rows
from lmsys.tokenizer import Tokenizer, train
from lmsys.training.corpora import END_OF_TEXT, Corpus, text_file
from tests.support.harness import cases_of, records

PACKAGES = {"tiktoken": "tiktoken", "huggingface": "tokenizers"}
SERIAL = ("lmsys_serial",)
CHECKED_ONLY, TIMED = {"timed": False}, {"seconds_per_row": 0.0}
BYTES = {number: bytes([number]) for number in range(256)}
TINY = {"task": ("encode",), "text_bytes": 40_000, "vocab_size": 300, "rounds": 2}


@pytest.fixture(autouse=True)
def small_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules here in the place of the standard library's; memory is measured in a test of its own."""
    sources = sorted(Path(bench_tokenizer.__file__).parent.glob("*.py"))
    (tmp_path / "text").write_text("".join(path.read_text() + END_OF_TEXT for path in sources))
    corpus: Corpus = text_file(tmp_path / "text")
    monkeypatch.setattr(bench_tokenizer, "stdlib", lambda: corpus)
    monkeypatch.setattr(bench_tokenizer, "SMALL_BYTES", 3000)
    monkeypatch.setattr(bench_tokenizer.memory, "peak_resident_bytes", lambda _: 7)


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
    assert all(36_000 < one["text_bytes"] < 50_000 for one in ended.values())


def test_the_user_says_how_many_rounds_there_are() -> None:
    assert found(TIMED | {"min_rounds": 4}, tokenizer=SERIAL)["lmsys_serial"]["rounds"] == 4


def test_what_is_not_installed_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)
    for row, one in found(tokenizer=tuple(PACKAGES)).items():
        assert one["outcome"] == "unsupported" and f"{row} needs a package that is not here" in one["reason"]
        assert PACKAGES[row] in one["reason"] and "[peers]' brings it" in one["reason"]
    assert found(tokenizer=("tiktoken",), task=("train",))["tiktoken"]["reason"] == "tiktoken does not train"


def changing(change: Any, after: int = 0) -> Any:
    """An encoder that changes its ids, from so many calls on."""
    encoder, calls = rows.Ours.encoder, count()
    return lambda *arguments: (
        lambda: [change(ids) if next(calls) >= after else ids for ids in [np.concatenate(encoder(*arguments)())]]
    )


@pytest.mark.parametrize(
    ("change", "after", "said"),
    [
        (lambda ids: np.where(np.arange(len(ids)) == 5, 0, ids), 0, "id 5 is 0, by definition"),
        (lambda ids: ids[:-1], 0, "ids, by definition"),
        (
            lambda ids: np.where(ids < 299, (ids + 1) % 299, ids),
            2,
            "not in timed call 0: document",
        ),
        (
            lambda ids: ids[: np.flatnonzero(ids == 299)[-1]],
            2,
            r"not in timed call 0: ids of \d+ documents",
        ),
    ],
)
def test_wrong_ids_are_told(change: Any, after: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is the check, the second tells what a call costs."""
    monkeypatch.setattr(rows.Ours, "encoder", changing(change, after))
    one = found(TIMED, tokenizer=SERIAL)["lmsys_serial"]
    assert one["outcome"] == "wrong" and re.search(said, one["reason"]) and "time_s" not in one


def test_wrong_merges_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    true_train = rows.train

    def in_another_order(*arguments: Any) -> Any:
        learned = true_train(*arguments)
        learned.merges[10:12] = learned.merges[11:9:-1]
        return learned

    monkeypatch.setattr(rows, "train", in_another_order)
    one = found(tokenizer=SERIAL, task=("train",))["lmsys_serial"]
    assert one["outcome"] == "wrong" and "merge 10 is" in one["reason"]


def test_timed_calls_are_checked() -> None:
    for task, what in (("encode", "ids"), ("train", "merges")):
        for row, one in found(TIMED, task=(task,)).items():
            calls = one.get("proof", {"calls": []})["calls"]
            judged = one["outcome"] == "ok" and (task == "encode" or row not in PACKAGES)
            assert [call["error_ratios"] for call in calls] == ([{what: 0.0}] * 2 if judged else []), one["reason"]
            assert one["error_ratio"] == (0.0 if judged else None)


REMEMBERED_BY: dict[str, Any] = {
    "path": lambda path: path,
    "size": lambda path: path.name == "small.txt" or path.stat().st_size,
    "beginning": lambda path: path.name == "small.txt" or path.read_bytes()[:4],
}


@pytest.mark.parametrize("by", list(REMEMBERED_BY))
def test_a_row_that_remembers_ids_is_wrong(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the texts all begin alike."""
    lines = [f"line {number} of {number**2 % 97}\n{END_OF_TEXT if number % 50 == 49 else ''}" for number in range(3000)]
    (tmp_path / "lines").write_text("".join(lines).replace(f"\n{END_OF_TEXT}", f"{END_OF_TEXT}\n"))
    monkeypatch.setattr(bench_tokenizer, "stdlib", lambda: text_file(tmp_path / "lines"))
    encoder, known = rows.Ours.encoder, dict[Any, Any]()

    def remembering(text: Path, *arguments: Any) -> Any:
        def call() -> Any:
            if (key := REMEMBERED_BY[by](text)) not in known:
                known[key] = encoder(text, *arguments)()
            return known[key]

        return call

    monkeypatch.setattr(rows.Ours, "encoder", remembering)
    one = found(TIMED, tokenizer=SERIAL)["lmsys_serial"]
    assert one["outcome"] == "wrong" and "right before it was timed, not in timed call" in one["reason"]


def test_a_row_that_remembers_merges_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    learn, known = rows.train, dict[Any, Any]()

    def remembering(files: list[Path], *arguments: Any) -> Any:
        if files[0] not in known:
            known[files[0]] = learn(files, *arguments)
        return known[files[0]]

    monkeypatch.setattr(rows, "train", remembering)
    one = found(TIMED, tokenizer=SERIAL, task=("train",))["lmsys_serial"]
    assert one["outcome"] == "wrong" and "right before it was timed, not in timed call" in one["reason"]
    assert "merge" in one["reason"]


def test_no_two_texts_are_alike_and_each_can_be_made_again(tmp_path: Path) -> None:
    """A text to train on leaves out a sixteenth."""
    path, lines = tmp_path / "numbers", [f"{number}\n" for number in range(1600)]
    path.write_text("".join(lines))
    whole, part = (Texts(path, path, Tokenizer(BYTES, [], [END_OF_TEXT]), partly) for partly in (False, True))
    found = []
    for draw in (1, 2, 2**53 - 1, 1):
        whole.write(draw)
        found.append(path.read_text())
        assert sorted(found[-1].split("\n")) == sorted("".join(lines).split("\n"))
    assert found[0] == found[3] and len(set(found)) == 3
    part.write(1)
    assert len(path.read_bytes().split(b"\n")) == 1601 - 100 and found[0].startswith(path.read_text())


def test_merges_are_held_to_the_definition_at_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges of which only the first are right, and the others remembered from another text, are found out."""
    monkeypatch.setattr(bench_tokenizer, "FIRST_MERGES", 5)
    path = _beginning(bench_tokenizer.stdlib().train, 30_000, tmp_path / "beginning")
    one = Texts(path, path, Tokenizer(BYTES, [], [END_OF_TEXT]), partly=True)
    one.write(1)
    others = train([path], 350, [END_OF_TEXT]).merges
    one.write(2)
    right = train([path], 350, [END_OF_TEXT]).merges
    apart = next(place for place, pair in enumerate(right) if others[place] != pair)
    assert all(one.drawn.difference_of_merges(right, 93, key) is None for key in range(5))
    mixed = [*right[: max(5, apart)], *others[max(5, apart) :]]
    said = [one.drawn.difference_of_merges(mixed, 93, key) for key in range(20)]
    assert sum(one is not None for one in said) > 5 and all(one is None or "by definition" in one for one in said)
    assert "merge 60 is None, by definition" in str(one.drawn.difference_of_merges(right[:60], 93, 0))
    assert "merge 0 is" in str(one.drawn.difference_of_merges(right[1:], 93, 0))


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
