"""A run of benchmarks keeps the results of an earlier run, of a killed one, and of files of schema 1."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lmsys import files
from lmsys.bench import Settings, record
from lmsys.bench.plugin import _resume
from lmsys.bench.results import Session, read_results
from lmsys.measure import machine
from lmsys.verify import verify

ONE = {
    "id": "a",
    "benchmark": "attention",
    "section": "s",
    "impl": "i",
    "outcome": "ok",
    "device": "cpu",
    "time_s": 1.0,
}


def facts() -> dict[str, object]:
    return machine.describe("cpu", command="", seed=0, sweep="smoke")


def head(**changes: object) -> dict[str, object]:
    return {"machine": facts() | changes, "fields": {}, "rows": {}}


def test_only_answers_to_the_same_question_are_resumed(tmp_path: Path) -> None:
    records = [
        ONE,
        ONE | {"id": "b", "memory_limit_bytes": 2**30},
        {**ONE, "id": "c", "outcome": "wrong", "time_s": None},
        {**ONE, "id": "d", "time_s": None, "reason": "verified, not timed"},
        {**ONE, "id": "e", "outcome": "error", "time_s": None, "crashed": True},
    ]
    journal = record.Journal(tmp_path / "out.json", head())
    for each in records:
        journal.add(each)
    (tmp_path / "out.json").touch()  # as a killed run leaves it
    found = record.load(tmp_path / "out.json")
    assert found["records"] == records

    def resumed(limit: int | None, timed: bool = True, retries: bool = False, **changed: str) -> list[str]:
        session = Session(Settings(device="cpu", memory_limit_bytes=limit, timed=timed), retries=retries)
        session.resume(found | {"machine": found["machine"] | changed}, [])
        return [name for _, name in session.carried]

    assert (resumed(None), resumed(2**30), resumed(None, timed=False)) == (["a", "e"], ["b"], ["a", "d", "e"])
    assert resumed(None, retries=True) == ["a"]
    for fact in ("name", "torch", "triton", "driver", "commit"):
        with pytest.raises(ValueError, match=f"its {'processor' if fact == 'name' else fact} is 'another', here it is"):
            resumed(None, **{fact: "another"})


def test_a_killed_run_that_resumed_another_loses_neither(tmp_path: Path) -> None:
    output, entry = tmp_path / "out.json", {"extra_info": {"id": "a"}, "stats": {}}
    output.write_text(json.dumps({"benchmarks": [entry], "lmsys": record.payload(head(), [ONE])}))
    record.Journal(output, head()).add(ONE | {"id": "b"})
    session = Session(Settings(device="cpu"))
    for found, entries in read_results(output):
        session.resume(found, entries)
    assert ([name for _, name in session.carried], session.carried_entries) == (["a", "b"], [entry])


@pytest.mark.parametrize("moment", range(3))
def test_a_journal_that_goes_on_from_another_never_holds_less(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill on the way, in place of which a write, a flush to the disk or the renaming fails."""
    output = tmp_path / "out.json"
    record.Journal(output, head()).add(ONE)
    names = (files.os, "fsync"), (Path, "replace"), (record, "_line")
    monkeypatch.setattr(*names[moment], lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        record.Journal(output, head(), [ONE, ONE | {"id": "b"}])
    monkeypatch.undo()
    assert record.load(output)["records"] == [ONE] and [path.name for path in tmp_path.iterdir()] == [
        "out.json.partial"
    ]
    record.Journal(output, head(), [ONE, ONE | {"id": "b"}])
    assert [one["id"] for one in record.load(output)["records"]] == ["a", "b"]


def test_files_of_schema_1_are_read_and_resumed(tmp_path: Path) -> None:
    old = ONE | {"matmul_fraction": 0.5, "copy_fraction": 0.1, "mode": "eager"}
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"lmsys": {"schema": 1, "machine": facts(), "records": [old]}, "benchmarks": []}))
    found = record.load(path)
    (upgraded,) = found["records"]
    assert upgraded == ONE | {"matmul_ceiling_fraction": 0.5, "copy_ceiling_fraction": 0.1}
    session = Session(Settings(device="cpu"))
    for found, entries in read_results(path):
        session.resume(found, entries)
    assert list(session.carried) == [("attention", "a")]


BENCHMARKS = {
    "null": "benchmarks=None must be a list of pytest-benchmark's entries",
    '{"a": 1}': "benchmarks={'a': 1} must be a list of pytest-benchmark's entries",
    "[3]": "benchmarks[0] must be an object with 'extra_info', an object; got 3",
    "[{}]": "benchmarks[0] must be an object with 'extra_info', an object; got {}",
    '[{"extra_info": null}]': "benchmarks[0] must be an object with 'extra_info', an object; got {'extra_info': None}",
    '[{"extra_info": {}}]': "benchmarks[0] must be an object with 'stats', an object; got {'extra_info': {}}",
    '[{"extra_info": {"id": []}, "stats": {}}]': "benchmarks[0].extra_info: id=[] must be text",
}


@pytest.mark.parametrize("benchmarks", BENCHMARKS)
def test_what_is_no_entry_of_pytest_benchmark_is_named(benchmarks: str, tmp_path: Path) -> None:
    """By whoever reads such entries: a run that resumes the file, and who verifies it."""
    path, ours = tmp_path / "out.json", json.dumps(record.payload(head(), [ONE]))
    path.write_text(f'{{"benchmarks": {benchmarks}, "lmsys": {ours}}}')
    readers: list[Callable[[], object]] = [lambda: list(read_results(path)), lambda: verify(path, {})]
    for reads in readers:
        with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {BENCHMARKS[benchmarks]}')}$"):
            reads()


def test_a_file_of_another_schema_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"lmsys": record.payload(head(), [ONE]) | {"schema": 3}}))
    with pytest.raises(ValueError, match=f"^--resume {path}: schema 3 is not the 2 that this version reads"):
        _resume(Session(Settings(device="cpu")), path)
