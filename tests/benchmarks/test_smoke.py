"""The smoke sweep of all benchmarks: each case has a record, and pytest-benchmark has the samples.

The fixture `smoke_result` (tests/conftest.py) runs the sweep once, which takes minutes. All tests that read its result
are here, so that others need not wait for it; only tests/reports/test_load.py reads it, too. A row is an
implementation.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_steps import KERNELS
from benchmarks.sweeps import TIMED_STRATEGIES
from lmsys.bench import record
from tests.support.processes import ALIKE  # strategies that the fixture leaves out of the sweep, to save time


@pytest.fixture(scope="module")
def content(smoke_result: Path) -> dict[str, Any]:
    return json.loads(smoke_result.read_text())


@pytest.fixture(scope="module")
def printed(smoke_result: Path) -> str:
    """The output of that run."""
    return smoke_result.with_name("smoke.txt").read_text()


def by(name: str, benchmark: str, content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A benchmark's records by the value of their field `name`."""
    return {record[name]: record for record in content["lmsys"]["records"] if record["benchmark"] == benchmark}


def test_every_case_has_a_record_and_none_failed(smoke_result: Path, printed: str) -> None:
    records = record.load(smoke_result)["records"]
    assert len({(row["benchmark"], row["id"]) for row in records}) == len(records)
    bad = [f"{row['id']}: {row['reason']}" for row in records if row["outcome"] in ("wrong", "error")]
    assert not bad
    kinds = Counter(row["benchmark"] for row in records if row["outcome"] == "ok")
    names = "attention model loss anatomy precision collectives data_parallel tokenizer training steps".split()
    assert set(kinds) == set(names)
    assert "cases" in printed and "lost" not in printed  # "lost" would be an error message of ranks


def test_the_result_has_the_parts_of_pytest_benchmark_and_of_lmsys(content: dict[str, Any]) -> None:
    records = {row["id"]: row for row in content["lmsys"]["records"]}
    assert {"name", "torch", "commit", "command", "ceilings"} <= content["lmsys"]["machine"].keys()
    assert "node" not in content["machine_info"]
    timed = [name for name, row in records.items() if row.get("time_s") is not None]
    assert sorted(entry["extra_info"]["id"] for entry in content["benchmarks"]) == sorted(timed)
    for entry in content["benchmarks"]:
        row = records[entry["extra_info"]["id"]]
        assert entry["stats"]["data"] == row["samples_s"] and len(row["samples_s"]) == row["rounds"]
        assert (entry["stats"]["median"], entry["stats"]["rounds"]) == (row["time_s"], row["rounds"])
        assert entry["group"] == row["comparison"].partition(" ")[0]


def test_the_result_lists_rows_in_the_order_of_their_tables(content: dict[str, Any]) -> None:
    rows = content["lmsys"]["rows"]
    names = [row["name"] for row in rows["attention"]]
    assert names[0] == "naive" and {"sdpa_flash", "flash_gluon"} <= set(names)
    assert {row["name"] for row in rows["strategy"]} >= {"none", "bucketed", "torch_fsdp2"}


def test_strategies_and_trainings_have_a_record_each(content: dict[str, Any], printed: str) -> None:
    kinds = [name for name in TIMED_STRATEGIES if name not in ALIKE]
    assert list(by("strategy", "data_parallel", content)) == kinds
    names = [f"{attention}-{strategy}" for attention in ("naive", "sdpa_flash") for strategy in ("none", "bucketed")]
    trained = by("impl", "training", content)
    assert list(trained) == names and {row["outcome"] for row in trained.values()} == {"ok"}
    assert "-W2-torch_fsdp2: ok, " in printed
    assert "[2/4] naive-bucketed" in printed and "smoke-tiny-S64B2-fp32-W2-T512x2" in printed


def test_training_steps_of_ours_and_torchs_have_times_by_kind_of_kernel(content: dict[str, Any]) -> None:
    by_row = by("strategy", "steps", content)
    assert [*by_row] == ["fsdp", "torch_fsdp2"]
    for row in by_row.values():
        assert row["outcome"] == "ok", row["reason"]
        assert len(row["losses"]) == row["rounds"] == row["steps"] == 8 and row["alone"]
        assert row["first_loss"] > row["last_loss"] > 0 and 0 < row["error_ratio"] <= 1
        assert row["held_bytes"] + row["peak_bytes"] == row["total_bytes"] > 0
        # The parameter and AdamW's two moments, 12 bytes in float32, over two ranks.
        assert row["held_bytes"] == pytest.approx(6 * row["num_parameters"], rel=0.05)
        assert all(row[f"{kind}_s"] >= 0 for kind in KERNELS) and row["matmul_s"] > 0 and row["optimizer_s"] > 0
        assert 0 <= row["exposed_s"] <= row["communication_s"]
        assert (row["checkpoint"], row["residual"]) == ("attention*1,matmuls*1", "wide")
    ours, theirs = by_row.values()
    assert theirs["peer"] and ours["comparison"] == theirs["comparison"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)


def test_tokenizers_encode(content: dict[str, Any]) -> None:
    encoded = [
        row for row in content["lmsys"]["records"] if row["benchmark"] == "tokenizer" and row["task"] == "encode"
    ]
    assert [row["impl"] for row in encoded] == ["lmsys", "lmsys_serial", "huggingface"]
    assert encoded[0]["outcome"] == "ok" and encoded[0]["peak_bytes"] > 20_000_000
