"""Sessions (`lmsys.bench.results`) and journals: a run keeps the results of an earlier run, and of a killed one.

A journal, out.json.partial, gets each record as it is measured. `--resume` carries records over to a new file, and
`--repeat` measures each group of cases several times. The runners here return made-up results.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lmsys import files
from lmsys.bench import Record, Settings, record
from lmsys.bench.isolation import Ended
from lmsys.bench.plugin import _resume
from lmsys.bench.record import seal
from lmsys.bench.results import Session, read_results
from lmsys.measure import machine
from lmsys.verify import verify
from tests.support.harness import Telling

RECORD = {
    "id": "a",
    "benchmark": "attention",
    "section": "s",
    "impl": "i",
    "outcome": "ok",
    "device": "cpu",
    "time_s": 1.0,
}


@cache
def facts() -> dict[str, object]:
    """The machine that a file names."""
    return machine.describe("cpu", command="", seed=0, sweep="smoke")


def head(**changes: object) -> dict[str, object]:
    """A result file's content before its records. changes: of facts about the machine."""
    return {"machine": facts() | changes, "fields": {}, "layouts": {}, "rows": {}}


def result_of(records: list[dict[str, Any]], **changes: object) -> str:
    """The text of a result file with these records. changes: of facts about the machine."""
    return json.dumps({"benchmarks": [], "lmsys": record.payload(head(**changes), records)})


def test_only_results_of_equal_settings_are_resumed(tmp_path: Path) -> None:
    records = [
        RECORD,
        RECORD | {"id": "b", "memory_limit_bytes": 2**30},
        {**RECORD, "id": "c", "outcome": "wrong", "time_s": None},
        {**RECORD, "id": "d", "time_s": None, "reason": "verified, not timed"},
        {**RECORD, "id": "e", "outcome": "error", "time_s": None, "crashed": True},
    ]
    record.Journal(tmp_path / "out.json", head(), records)
    (tmp_path / "out.json").touch()  # as a killed run leaves it
    journaled = record.load(tmp_path / "out.json")
    assert journaled["records"] == records

    def resumed(limit: int | None, timed: bool = True, retries: bool = False, **changed: str) -> list[str]:
        """The ids that a run with these settings carries over. retries: measures errors again."""
        session = Session(Settings(device="cpu", memory_limit_bytes=limit, timed=timed), retries=retries)
        session.resume(journaled | {"machine": journaled["machine"] | changed}, [])
        return [name for _, name in session.carried]

    # Carried over is what was run under the same memory limit, and has a time if this run is timed. "wrong" and "error"
    # are run again, but not what crashed its process, unless the run retries.
    assert (resumed(None), resumed(2**30), resumed(None, timed=False)) == (["a", "e"], ["b"], ["a", "d", "e"])
    assert resumed(None, retries=True) == ["a"]
    for fact in ("name", "torch", "triton", "driver", "commit"):
        with pytest.raises(ValueError, match=f"its {'processor' if fact == 'name' else fact} is 'another', here it is"):
            resumed(None, **{fact: "another"})


def test_a_killed_run_that_resumed_another_keeps_both_results(tmp_path: Path) -> None:
    output, entry = tmp_path / "out.json", {"extra_info": {"id": "a"}, "stats": {}}
    output.write_text(json.dumps({"benchmarks": [entry], "lmsys": record.payload(head(), [RECORD])}))
    record.Journal(output, head()).add(RECORD | {"id": "b"})
    session = Session(Settings(device="cpu"))
    for content, entries in read_results(output):
        session.resume(content, entries)
    assert ([name for _, name in session.carried], session.entries_of_carried) == (["a", "b"], [entry])


@pytest.mark.parametrize(("owner", "name"), [(record, "_line"), (files.os, "fsync"), (Path, "replace")])
def test_a_journal_that_continues_another_never_has_less(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write, a flush to the disk or the renaming fails, as if the run were killed there."""
    output = tmp_path / "out.json"
    record.Journal(output, head()).add(RECORD)
    monkeypatch.setattr(owner, name, Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        record.Journal(output, head(), [RECORD, RECORD | {"id": "b"}])
    monkeypatch.undo()
    assert record.load(output)["records"] == [RECORD] and [path.name for path in tmp_path.iterdir()] == [
        "out.json.partial"
    ]
    record.Journal(output, head(), [RECORD, RECORD | {"id": "b"}])
    assert [line["id"] for line in record.load(output)["records"]] == ["a", "b"]


BENCHMARKS = {  # wrong lists of pytest-benchmark's entries, with the error
    "null": "benchmarks=None must be a list",
    '{"a": 1}': "benchmarks={'a': 1} must be a list",
    "[3]": "benchmarks[0]: must be an object; got a int",
    "[{}]": "benchmarks[0]={} has no 'extra_info'",
    '[{"extra_info": null}]': "benchmarks[0].extra_info: must be an object; got a NoneType",
    '[{"extra_info": {}}]': "benchmarks[0]={'extra_info': {}} has no 'stats'",
    '[{"extra_info": {"id": []}, "stats": {}}]': (
        "benchmarks[0].extra_info.id: must be text of at most 1,000 characters; got list"
    ),
}


@pytest.mark.parametrize("benchmarks", BENCHMARKS)
def test_a_wrong_entry_of_pytest_benchmark_is_named(benchmarks: str, tmp_path: Path) -> None:
    """Both readers of such entries name it: a run that resumes the file, and `lmsys verify`."""
    path, ours = tmp_path / "out.json", json.dumps(record.payload(head(), [RECORD]))
    path.write_text(f'{{"benchmarks": {benchmarks}, "lmsys": {ours}}}')
    readers: list[Callable[[], object]] = [lambda: list(read_results(path)), lambda: verify(path, {})]
    for reads in readers:
        with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {BENCHMARKS[benchmarks]}')}$"):
            reads()


def test_a_file_of_another_schema_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"lmsys": record.payload(head(), [RECORD]) | {"schema": 3}}))
    with pytest.raises(ValueError, match=f"^--resume {path}: schema 3 is not the 2 that this version reads"):
        _resume(Session(Settings(device="cpu")), path)


def repeated(*runs: dict[str, tuple[str, float]]) -> tuple[dict[str, dict], Mock]:
    """({row: record}, the runner) of a session that repeats a group in these runs, which are made up.

    A run is {row: (outcome, seconds of a sample)}, or {} for an interrupt.
    """
    to_do = [*runs]

    def run(benchmark: object, cases: object) -> Iterator[dict[str, Any]]:
        rows = to_do.pop(0)
        if not rows:
            raise KeyboardInterrupt
        for name, (outcome, pace) in rows.items():
            samples = [pace * (1 + 0.001 * number) for number in range(10)] if outcome == "ok" else None
            fields = {"id": name, "impl": name, "peer": name == "sdpa", "comparison": "c", "samples_s": samples}
            yield {**RECORD, **fields, "outcome": outcome}

    session = Session(Settings(device="cpu"), repeats=len(runs))
    session.__dict__["runner"] = runner = Mock(run=run)
    session.benchmarks["b"] = None  # type: ignore[assignment]
    session._groups["b", "g"] = []
    with nullcontext() if all(runs) else pytest.raises(KeyboardInterrupt):
        session._run(("b", "g"))
    return {name: record for (_, name), record in session.results.items()}, runner


def test_repeats_run_in_new_processes_and_say_how_much_they_differ() -> None:
    """The last run is kept. `between_runs`: how far the log of a time over that of a peer, sdpa, moves in a run."""
    pace = {"sdpa": ("ok", 2.0)}
    records, runner = repeated(*({"mine": ("ok", 1.02**number), **pace} for number in range(3)))
    assert records["mine"]["between_runs"] == pytest.approx(math.log(1.02)) and runner.close.call_count == 2
    assert records["mine"]["samples_s"][0] == 1.02**2 and records["mine"]["seal"] == seal(records["mine"])
    assert "between_runs" not in records["sdpa"]  # no other peer took turns with it


GOOD = {"mine": ("ok", 1.0), "sdpa": ("ok", 2.0)}


@pytest.mark.parametrize(
    ("runs", "outcomes"),
    [
        ((GOOD, GOOD | {"mine": ("wrong", 1.0)}, GOOD), {"mine": "wrong", "sdpa": "ok"}),
        ((GOOD, GOOD, {}), {"mine": "ok", "sdpa": "ok"}),
        (({},), {}),
    ],
)
def test_a_row_has_failed_if_one_repeat_fails_and_an_interrupt_keeps_those_that_are_complete(
    runs: tuple[dict[str, tuple[str, float]], ...], outcomes: dict[str, str]
) -> None:
    records, _ = repeated(*runs)
    assert {row: record["outcome"] for row, record in records.items()} == outcomes


@pytest.mark.parametrize(
    ("fault", "ending"), [(KeyboardInterrupt(), "interrupted"), (Ended("the process was killed"), "was killed")]
)
def test_an_end_during_the_last_measurement_of_ceilings_loses_no_record(fault: BaseException, ending: str) -> None:
    session = Session(Settings(device="cpu"))
    session.__dict__["runner"] = Mock(machine=head()["machine"], ask=Mock(side_effect=fault))  # asked for ceilings
    session.results["attention", "a"] = dict(RECORD)
    session.benchmarks["attention"], session._cases["attention", "a"] = Telling(), None
    content: dict[str, Any] = {"benchmarks": []}
    session.complete(content)
    assert content["lmsys"]["records"] == [RECORD] and content["lmsys"]["seal"] == record.seal(content["lmsys"])
    (sentence,) = content["lmsys"]["machine"]["ceilings_moved"]
    assert sentence.startswith("ceilings were not measured again") and sentence.endswith(ending)
    assert any(sentence in line for line in session.summary())


def test_carried_records_have_shares_of_the_ceilings_of_the_new_file() -> None:
    """Ceilings are the rates that the machine reaches. Here each record has a share of 0.5 of the new ones."""

    def ask(name: str, rated: list[tuple[object, object, Any]], again: bool) -> tuple[object, list[object]]:
        return {"ceilings_moved": []}, [row | {"matmul_ceiling_fraction": 0.5} for _, _, row in rated]

    carried, measured = (RECORD | {"id": name, "matmul_ceiling_fraction": 0.25} for name in "ab")
    session = Session(Settings(device="cpu"), benchmarks={"attention": Telling()})
    session.resume(head() | {"records": [carried]}, [{"extra_info": dict(carried), "stats": {}}])
    session.__dict__["runner"] = Mock(machine=head()["machine"], ask=ask)
    session.results["attention", "b"] = measured
    session._cases |= {("attention", name): object() for name in "ab"}
    content: dict[str, Any] = {"benchmarks": [{"extra_info": dict(measured), "stats": {}}]}
    session.complete(content)
    records = [*content["lmsys"]["records"], *(row["extra_info"] for row in content["benchmarks"])]
    assert [(row["id"], row["matmul_ceiling_fraction"]) for row in records] == [("a", 0.5), ("b", 0.5)] * 2


@pytest.mark.parametrize("fault", [None, ValueError("a wrong metric"), Ended("the process was killed")])
def test_so_have_those_of_its_journal(fault: Exception | None, tmp_path: Path) -> None:
    """A journal states the ceilings of the run that began it: if that is killed, they are all that a reader has.

    fault  raised where the carried records are rated: the group is measured all the same, and they stay as they were
    """
    carried, measured = (RECORD | {"id": name, "matmul_ceiling_fraction": 0.25} for name in "ab")
    session = Session(Settings(device="cpu"), benchmarks={"attention": Telling()}, output=tmp_path / "out.json")
    session.resume(head() | {"records": [carried]}, [{"extra_info": dict(carried), "stats": {}}])
    asked: list[Any] = []

    def ask(name: str, rated: Any, again: bool) -> Any:
        asked.append((name, again))
        if fault is not None:
            raise fault
        return {}, [row | {"matmul_ceiling_fraction": 0.5} for _, _, row in rated]

    found: list[Record] = []
    session.__dict__["runner"] = Mock(machine=head()["machine"], ask=ask, run=lambda *_: found)
    session._groups["attention", "s"], session._cases["attention", "a"] = [], object()
    session._run(("attention", "s"))  # without a record, as if it were interrupted: nothing has changed
    assert session.content["records"] == [carried] and not (tmp_path / "out.json.partial").exists()
    found.append(measured)
    session._run(("attention", "s"))
    share = 0.25 if fault else 0.5
    journaled = [(row["id"], row["matmul_ceiling_fraction"]) for row in record.load(tmp_path / "out.json")["records"]]
    assert journaled == [("a", share), ("b", 0.25)] and asked == [("rate", False)]
    assert [entry["extra_info"]["matmul_ceiling_fraction"] for entry in session.entries_of_carried] == [share]


@pytest.mark.parametrize(
    ("facts", "fail_on", "sentences"),
    [
        ({"outcome": "wrong"}, (), ["wrong, which fails the run, as a peer's would not: i"]),
        ({"outcome": "wrong", "peer": True}, (), []),
        ({"outcome": "wrong", "peer": True}, ("error", "wrong"), ["--fail-on: 1 wrong"]),
        ({"outcome": "error"}, ("wrong",), []),
    ],
)
def test_a_run_fails_by_wrong_rows_of_ours_and_by_the_outcomes_that_it_is_told(
    facts: dict[str, Any], fail_on: tuple[str, ...], sentences: list[str]
) -> None:
    session = Session(Settings(device="cpu"), fail_on=fail_on)
    session.results["attention", "a"] = RECORD | facts
    assert session.failing == sentences


def test_records_of_a_benchmark_that_is_not_collected_are_not_carried_over() -> None:
    session = Session(Settings(device="cpu"), benchmarks={"attention": Telling()})
    session.resume(head() | {"records": [RECORD, RECORD | {"benchmark": "model"}]}, [])
    with pytest.raises(ValueError, match="--resume: it has records of model, which this run has not: run the files"):
        session.select([])
