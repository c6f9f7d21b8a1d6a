"""benchmarks/bench_tokenizer.py: training and encoding are timed, and wrong merges or ids are refused.

Ids and merges are right if they are those of the definition of byte-level BPE. The corpus is a small one. A row that
remembers an earlier answer must be refused, too: REMEMBERED_BY has the keys under which such rows store answers, and a
new key is added there.
"""

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

PACKAGES = {"gigatoken": "gigatoken", "fastokens": "fastokens", "tiktoken": "tiktoken", "huggingface": "tokenizers"}
RESULTS = {"train": "merges", "encode": "ids"}  # of each task
SERIAL = ("lmsys_serial",)
CHECKED_ONLY, TIMED = {"timed": False}, {"seconds_per_row": 0.0}
BYTES = {number: bytes([number]) for number in range(256)}
TINY = {"task": ("encode",), "text_bytes": 40_000, "vocab_size": 300, "rounds": 2}


@pytest.fixture(autouse=True)
def small_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is the text of benchmarks/*.py, in place of the standard library's. Memory is not measured here."""
    sources = sorted(Path(bench_tokenizer.__file__).parent.glob("*.py"))
    (tmp_path / "text").write_text("".join(path.read_text() + END_OF_TEXT for path in sources))
    corpus: Corpus = text_file(tmp_path / "text")
    monkeypatch.setattr(bench_tokenizer, "stdlib", lambda: corpus)
    monkeypatch.setattr(bench_tokenizer, "SMALL_BYTES", 3000)
    monkeypatch.setattr(bench_tokenizer.memory, "peak_resident_bytes", lambda _: 7)


def measured(settings: Any = CHECKED_ONLY, **values: Any) -> dict[str, dict[str, Any]]:
    """{row: record} of the cases of TINY, but for these values of axes. `settings`: of the runner."""
    benchmark = Tokenizers()
    return records(benchmark, cases_of(benchmark, **(TINY | values)), **settings)


@pytest.mark.parametrize("task", RESULTS)
def test_rows_are_timed_and_held_to_the_definition(task: str) -> None:
    by_row = measured(TIMED, task=(task,))
    for row, record in by_row.items():
        if record["outcome"] == "unsupported":
            assert row in PACKAGES and (
                "does not train" in record["reason"] or "a package that is not here" in record["reason"]
            )
            continue
        assert record["outcome"] == "ok", record["reason"]
        assert record["rounds"] == 2 and record["peak_bytes"] == 7 and record["device"] == "cpu"
        assert record["bytes_per_s"] == pytest.approx(record["text_bytes"] / record["time_s"])
        assert record["processes"] == (1 if row == "lmsys_serial" else 2) and record["peer"] == (row in PACKAGES)
        calls, is_judged = record.get("proof", {"calls": []})["calls"], task == "encode" or row not in PACKAGES
        assert [call["error_ratios"] for call in calls] == [{RESULTS[task]: 0.0}] * (2 * is_judged)
        assert record["error_ratio"] == (0.0 if is_judged else None)
    assert len({record["comparison"] for record in by_row.values()}) == 1
    assert all(36_000 < record["text_bytes"] < 50_000 for record in by_row.values())


def test_the_user_says_how_many_rounds_there_are() -> None:
    assert measured(TIMED | {"min_rounds": 4}, tokenizer=SERIAL)["lmsys_serial"]["rounds"] == 4


def test_what_is_not_installed_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)
    for row, record in measured(tokenizer=tuple(PACKAGES)).items():
        assert record["outcome"] == "unsupported" and f"{row} needs a package that is not here" in record["reason"]
        assert PACKAGES[row] in record["reason"] and "[peers]' brings it" in record["reason"]
    assert measured(tokenizer=("tiktoken",), task=("train",))["tiktoken"]["reason"] == "tiktoken does not train"


def test_a_package_that_a_package_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gigatoken", reason="needs gigatoken: python -m pip install gigatoken")
    monkeypatch.setitem(sys.modules, "awkward", None)
    record = measured(tokenizer=("gigatoken",))["gigatoken"]
    assert record["outcome"] == "unsupported" and "a package that is not here (import of awkward" in record["reason"]


def changing(change: Any, after: int = 0) -> Any:
    """An encoder that applies `change` to its ids, but not in its first `after` calls."""
    encoder, calls = rows.Ours.encoder, count()

    def changed(*arguments: Any) -> Any:
        def call() -> list[Any]:
            ids = np.concatenate(encoder(*arguments)())
            return [change(ids) if next(calls) >= after else ids]

        return call

    return changed


@pytest.mark.parametrize(
    ("change", "after", "reason"),
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
def test_wrong_ids_are_told(change: Any, after: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`after` 2 passes the check: the first call is checked, and the second measures how long a call takes."""
    monkeypatch.setattr(rows.Ours, "encoder", changing(change, after))
    record = measured(TIMED, tokenizer=SERIAL)["lmsys_serial"]
    assert record["outcome"] == "wrong" and re.search(reason, record["reason"]) and "time_s" not in record


# {name: function of a text's path that gives the key}; for small.txt, the text of the check, a key of its own.
REMEMBERED_BY: dict[str, Any] = {
    "path": lambda path: path,
    "size": lambda path: path.name == "small.txt" or path.stat().st_size,
    "beginning": lambda path: path.name == "small.txt" or path.read_bytes()[:4],
}


@pytest.mark.parametrize("by", list(REMEMBERED_BY))
def test_a_row_that_remembers_ids_is_wrong(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All lines of the texts begin alike, so that "beginning" recognises a text that has changed."""
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
    record = measured(TIMED, tokenizer=SERIAL)["lmsys_serial"]
    assert record["outcome"] == "wrong" and "right before it was timed, not in timed call" in record["reason"]


def in_another_order(files: list[Path], *arguments: Any) -> Any:
    learned = train(files, *arguments)
    learned.merges[10:12] = learned.merges[11:9:-1]
    return learned


def remembered(files: list[Path], *arguments: Any, known: dict[Any, Any] = {}) -> Any:  # noqa: B006
    return known.setdefault(files[0], train(files, *arguments))


@pytest.mark.parametrize(
    ("trained", "reason"),
    [(in_another_order, "merge 10 is"), (remembered, "right before it was timed, not in timed call .*merge")],
)
def test_wrong_merges_are_told(trained: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "train", trained)
    record = measured(TIMED, tokenizer=SERIAL, task=("train",))["lmsys_serial"]
    assert record["outcome"] == "wrong" and re.search(reason, record["reason"]), record["reason"]


def test_no_two_texts_are_alike_and_each_can_be_made_again(tmp_path: Path) -> None:
    """A text to train on (`partly`) leaves out a sixteenth of the lines."""
    path, lines = tmp_path / "numbers", [f"{number}\n" for number in range(1600)]
    path.write_text("".join(lines))
    whole, part = (Texts(path, path, Tokenizer(BYTES, [], [END_OF_TEXT]), partly) for partly in (False, True))
    drawn = []
    for draw in (1, 2, 2**53 - 1, 1):
        whole.write(draw)
        drawn.append(path.read_text())
        assert sorted(drawn[-1].split("\n")) == sorted("".join(lines).split("\n"))
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3
    part.write(1)
    assert len(path.read_bytes().split(b"\n")) == 1601 - 100 and drawn[0].startswith(path.read_text())


def test_merges_are_held_to_the_definition_at_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges are refused if only the first are right, and the others are remembered from another text."""
    monkeypatch.setattr(bench_tokenizer, "FIRST_MERGES", 5)
    path = _beginning(bench_tokenizer.stdlib().train, 30_000, tmp_path / "beginning")
    texts = Texts(path, path, Tokenizer(BYTES, [], [END_OF_TEXT]), partly=True)
    texts.write(1)
    others = train([path], 350, [END_OF_TEXT]).merges
    texts.write(2)
    right = train([path], 350, [END_OF_TEXT]).merges
    apart = next(place for place, pair in enumerate(right) if others[place] != pair)
    assert all(texts.drawn.difference_of_merges(right, 93, key) is None for key in range(5))
    mixed = [*right[: max(5, apart)], *others[max(5, apart) :]]
    differences = [texts.drawn.difference_of_merges(mixed, 93, key) for key in range(20)]
    assert sum(text is not None for text in differences) > 5 and all(
        text is None or "by definition" in text for text in differences
    )
    assert "merge 60 is None, by definition" in str(texts.drawn.difference_of_merges(right[:60], 93, 0))
    assert "merge 0 is" in str(texts.drawn.difference_of_merges(right[1:], 93, 0))
