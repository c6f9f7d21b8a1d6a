"""The whole smoke sweep, run once: every benchmark has a record for each case, and pytest-benchmark has its samples.

All that reads it is here, so that no other file waits for it; but tests/reports/test_load.py, which comes late.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_steps import KERNELS
from benchmarks.sweeps import TIMED_STRATEGIES
from lmsys.bench import record
from tests.support.processes import ALIKE


@pytest.fixture(scope="module")
def content(smoke_result: Path) -> dict[str, Any]:
    return json.loads(smoke_result.read_text())


@pytest.fixture(scope="module")
def said(smoke_result: Path) -> str:
    return smoke_result.with_name("smoke.txt").read_text()


def by(name: str, benchmark: str, content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The records of a benchmark by a field."""
    return {one[name]: one for one in content["lmsys"]["records"] if one["benchmark"] == benchmark}


def test_every_case_has_a_record_and_none_failed(smoke_result: Path, said: str) -> None:
    found = record.load(smoke_result)["records"]
    assert len({(one["benchmark"], one["id"]) for one in found}) == len(found)
    bad = [f"{one['id']}: {one['reason']}" for one in found if one["outcome"] in ("wrong", "error")]
    assert not bad
    kinds = Counter(one["benchmark"] for one in found if one["outcome"] == "ok")
    names = "attention model loss anatomy precision collectives data_parallel tokenizer training steps".split()
    assert set(kinds) == set(names)
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


def test_collectives_are_checked_and_timed(content: dict[str, Any]) -> None:
    found = by("impl", "collectives", content)
    assert set(found) == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
    for one in found.values():
        assert one["outcome"] == "ok" and one["rounds"] >= 10 and one["loop_s"] > 0, one["reason"]
        assert one["algorithm_bytes_per_s"] == pytest.approx(one["bytes"] / one["time_s"])
    assert found["all_reduce"]["bus_bytes_per_s"] == found["all_reduce"]["algorithm_bytes_per_s"]
    assert found["all_gather"]["bus_bytes_per_s"] == found["all_gather"]["algorithm_bytes_per_s"] / 2


def test_strategies_and_trainings_have_a_record_each(content: dict[str, Any], said: str) -> None:
    kinds = [name for name in TIMED_STRATEGIES if name not in ALIKE]
    assert list(by("strategy", "data_parallel", content)) == kinds
    names = [f"{attention}-{strategy}" for attention in ("naive", "sdpa_flash") for strategy in ("none", "bucketed")]
    trained = by("impl", "training", content)
    assert list(trained) == names and {one["outcome"] for one in trained.values()} == {"ok"}
    assert "-W2-torch_fsdp2: ok, " in said
    assert "[2/4] naive-bucketed" in said and "smoke-tiny-S64B2-fp32-W2-T512x2" in said


def test_steps_train_ours_beside_torchs_and_say_where_the_time_goes(content: dict[str, Any]) -> None:
    found = by("strategy", "steps", content)
    assert [*found] == ["fsdp", "torch_fsdp2"]
    for one in found.values():
        assert one["outcome"] == "ok", one["reason"]
        assert len(one["losses"]) == one["rounds"] == one["steps"] == 8 and one["alone"]
        assert one["first_loss"] > one["last_loss"] > 0 and 0 < one["error_ratio"] <= 1
        assert one["held_bytes"] + one["peak_bytes"] == one["total_bytes"] > 0
        assert one["held_bytes"] == pytest.approx(6 * one["num_parameters"], rel=0.05)  # 12 of them over two ranks
        assert all(one[f"{kind}_s"] >= 0 for kind in KERNELS) and one["matmul_s"] > 0 and one["optimizer_s"] > 0
        assert 0 <= one["exposed_s"] <= one["communication_s"]
        assert (one["checkpoint"], one["residual"]) == ("attention*1,matmuls*1", "wide")
    ours, theirs = found.values()
    assert theirs["peer"] and ours["comparison"] == theirs["comparison"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)


def test_tokenizers_encode_beside_ours(content: dict[str, Any]) -> None:
    encoded = [
        one for one in content["lmsys"]["records"] if one["benchmark"] == "tokenizer" and one["task"] == "encode"
    ]
    assert [one["impl"] for one in encoded] == ["lmsys", "lmsys_serial", "tiktoken", "huggingface"]
    assert encoded[0]["outcome"] == "ok" and encoded[0]["peak_bytes"] > 20_000_000
