"""The whole smoke sweep, run once: every benchmark has a record for each case, and pytest-benchmark has its samples."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lmsys.bench import record


@pytest.fixture(scope="module")
def content(smoke_result: Path) -> dict[str, Any]:
    return json.loads(smoke_result.read_text())


def test_every_case_has_a_record_and_none_failed(content: dict[str, Any], smoke_result: Path) -> None:
    found = record.load(smoke_result)["records"]
    assert len({(one["benchmark"], one["id"]) for one in found}) == len(found)
    bad = [f"{one['id']}: {one['reason']}" for one in found if one["outcome"] in ("wrong", "error")]
    assert not bad
    kinds = Counter(one["benchmark"] for one in found if one["outcome"] == "ok")
    names = "attention model loss anatomy precision collectives data_parallel tokenizer training steps".split()
    assert set(kinds) == set(names)
    said = smoke_result.with_name("smoke.txt").read_text()
    assert "cases" in said and "lost" not in said  # ranks end with the run, without a word


def test_the_result_is_pytest_benchmarks_and_ours(content: dict[str, Any]) -> None:
    records = {one["id"]: one for one in content["lmsys"]["records"]}
    assert {"name", "torch", "commit", "command", "ceilings"} <= content["lmsys"]["machine"].keys()
    assert "node" not in content["machine_info"]
    timed = [name for name, one in records.items() if one.get("time_s") is not None]
    assert sorted(entry["extra_info"]["id"] for entry in content["benchmarks"]) == sorted(timed)
    for entry in content["benchmarks"]:
        one = records[entry["extra_info"]["id"]]
        assert entry["stats"]["data"] == one["samples_s"] and len(one["samples_s"]) == one["rounds"]
        assert (entry["stats"]["median"], entry["stats"]["rounds"]) == (one["time_s"], one["rounds"])
        assert entry["group"] == one["comparison"].partition(" ")[0]


def test_every_field_of_a_record_is_declared(content: dict[str, Any]) -> None:
    ours = content["lmsys"]
    for name, fields in ours["fields"].items():
        own = [one for one in ours["records"] if one["benchmark"] == name]
        declared, written = {field["name"] for field in fields}, {key for one in own for key in one}
        assert written <= declared, f"{name}: {sorted(written - declared)}"


def test_rows_travel_with_the_result_in_their_tables_order(content: dict[str, Any]) -> None:
    rows = content["lmsys"]["rows"]
    names = [row["name"] for row in rows["attention"]]
    assert names[0] == "naive" and {"sdpa_flash", "flash_gluon"} <= set(names)
    assert {row["name"] for row in rows["strategy"]} >= {"none", "bucketed", "torch_fsdp2"}
