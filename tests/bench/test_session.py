"""A run of the benchmarks keeps results of an earlier run and of a killed one, and its own failures."""

import json
from pathlib import Path

import pytest

from benchmarks.attention_trial import attention_trial, cells_of
from benchmarks.sections import Axes, Section
from benchmarks.session import Session, Settings, read_results
from lmsys.attention import ATTENTION
from lmsys.measure import machine, record


def test_only_answers_to_the_same_question_are_resumed(tmp_path: Path) -> None:
    facts = machine.describe("cpu", command="", seed=0, sweep="smoke")
    one = {"id": "a", "benchmark": "attention", "section": "s", "impl": "i", "outcome": "ok", "device": "cpu"}
    records = [one, one | {"id": "b", "memory_limit_bytes": 2**30}, one | {"id": "c", "outcome": "wrong"}]
    journal = record.Journal(tmp_path / "out.json", facts)
    for each in records:
        journal.add(each)
    (tmp_path / "out.json").touch()  # as a killed run leaves it
    found = record.load(tmp_path / "out.json")
    assert found["records"] == records

    def resumed(limit: int | None, **changed: str) -> list[str]:
        settings = Settings("cpu", "smoke", 0.1, 10, True, limit, "")
        session = Session(settings, None)
        session.resume(found | {"machine": facts | changed}, [])
        return list(session.carried)

    assert (resumed(None), resumed(2**30)) == (["a"], ["b"])
    for fact in ("name", "torch", "triton", "driver", "commit"):
        with pytest.raises(ValueError, match=f"measured with {fact} 'another'"):
            resumed(None, **{fact: "another"})


def test_a_killed_run_that_resumed_another_loses_neither(tmp_path: Path) -> None:
    facts = machine.describe("cpu", command="", seed=0, sweep="smoke")
    one = {"id": "a", "benchmark": "attention", "section": "s", "impl": "i", "outcome": "ok", "device": "cpu"}
    output, entry = tmp_path / "out.json", {"extra_info": {"id": "a"}}
    output.write_text(json.dumps({"benchmarks": [entry], "lmsys": record.payload(facts, [one])}))
    record.Journal(output, facts).add(one | {"id": "b"})
    session = Session(Settings("cpu", "smoke", 0.1, 10, True, None, ""), None)
    for found, entries in read_results(output):
        session.resume(found, entries)
    assert (list(session.carried), session.carried_entries) == (["a", "b"], [entry])


@pytest.mark.parametrize(
    ("what", "outcome"), [("attention_trial.make_inputs", "oom"), ("attention_gate.Oracle", "error")]
)
def test_what_fails_in_the_bench_itself_is_a_cell_too(what: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(f"benchmarks.{what}", fails)
    section = Section("s", ((8, 8),), (16,), ("float32",), (True,), ("fwd", "bwd"))
    cells = list(cells_of(section, Axes(), ATTENTION.select(["naive", "sdpa_cudnn"]), True, "cpu"))
    results = list(attention_trial(cells, Settings("cpu", "smoke", 0.1, 10, True, None, "")))
    outcomes = {(one.record["impl"], one.record["outcome"]) for one in results}
    assert ("naive", outcome) in outcomes and len(results) == len(cells)
    assert all("no room" in one.record["reason"] for one in results if one.record["impl"] == "naive")
