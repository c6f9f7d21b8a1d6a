"""The report's chapter on whole trainings: records' numbers, speed-ups, curves, every outcome. No result is real."""

import csv
import io
import math
import subprocess
import sys
from pathlib import Path
from random import Random
from statistics import mean, median, stdev

import pytest

from lmsys.reports.tables import number
from tests.reports.test_reports import ROOT, built, cells, refused, save

STEM = "synthetic-gpu-training-matrix-small-S1024B8-bf16-W2-T491520x4"
ATTENTION = {"naive_compiled": 1.5, "vectorized": 2.0, "flash_triton": 0.9, "sdpa_cudnn": 0.85}
STRATEGIES = {
    "none": 1.9, "naive": 1.2, "flat": 1.15, "overlapped": 1.1, "bucketed": 1.02, "zero1": 1.05, "torch_ddp_tuned": 1.0,
}  # fmt: skip
STEPS = [1 + 2 * place for place in range(60)]


def case(attention: str, strategy: str, **changes: object) -> dict:
    """A synthetic record."""
    noise = Random(f"{attention}{strategy}")
    seconds = ATTENTION.get(attention, 1.0) * STRATEGIES.get(strategy, 1.0)
    samples = [seconds * noise.uniform(0.98, 1.03) for _ in range(3)]
    apart = [noise.gauss(0, 1e-3) for _ in range(50)]
    losses = [4 + 6 * math.exp(-step / 40) + 0.05 * math.sin(step) for step in STEPS]
    record = {
        "id": f"matrix-{attention}-{strategy}", "benchmark": "training", "section": "matrix", "size": "small",
        "impl": f"{attention}-{strategy}", "attention": attention, "attention_label": f"the {attention}",
        "attention_peer": attention.startswith("sdpa"), "strategy": strategy, "row": strategy,
        "label": f"the {strategy}", "strategy_peer": strategy.startswith("torch"), "num_parameters": 124_000_000,
        "corpus": "stdlib", "context": 1024, "batch": 8, "global_batch": 16, "precision": "bf16", "compile": "eager",
        "num_ranks": 2, "world_size": 1 if strategy == "none" else 2, "num_nodes": 1, "backend": "nccl",
        "device": "cuda", "epochs": 4, "train_tokens": 491_520, "val_tokens": 65_536, "outcome": "ok", "reason": None,
        "comparison": "matrix now", "clock": "perf_counter", "memory_limit_bytes": None, "error_ratio": 0.1,
        "time_s": median(samples), "mean_s": mean(samples), "std_s": stdev(samples), "p20_s": min(samples),
        "p80_s": max(samples), "min_s": min(samples), "rounds": 3, "samples_s": samples,
        "tokens_per_s": 491_520 / median(samples), "first_step_s": 3.5, "peak_bytes": 2**34 * noise.uniform(1, 2),
        "curve_steps": STEPS, "curve_losses": losses, "curve_differences": apart, "curve_budget": 0.03,
        "curve_difference": max(map(abs, apart)), "norm_difference": 1e-4, "loss": losses[-1], "valid_loss": 4.4,
    }  # fmt: skip
    if changes.get("outcome", "ok") != "ok":
        record |= dict.fromkeys(
            "time_s mean_s std_s p20_s p80_s min_s rounds samples_s tokens_per_s peak_bytes".split()
        )
    return record | changes


def sweep() -> list[dict]:
    return [case(attention, strategy) for attention in ATTENTION for strategy in STRATEGIES]


def numbers(files: dict[str, bytes], name: str) -> dict[tuple[str, str], dict[str, str]]:
    rows = csv.DictReader(io.StringIO(files[f"tables/{STEM}-{name}.csv"].decode()))
    return {(row["attention"], row["strategy"]): row for row in rows}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("matrix")
    return built(folder / "out", save(folder / "r.json", sweep()))


def test_the_numbers_are_those_of_the_records(files: dict[str, bytes]) -> None:
    for name, fields in (
        ("rate", ["tokens_per_s"]),
        ("time", ["mean_s", "std_s"]),
        ("memory", ["peak_bytes"]),
        ("loss", ["valid_loss", "curve_difference", "norm_difference"]),
        ("runs", ["first_step_s", "loss", "world_size"]),
    ):
        found = numbers(files, name)
        assert len(found) == len(ATTENTION) * len(STRATEGIES)
        for one in sweep():
            row = found[one["attention"], one["strategy"]]
            assert all(float(row[field]) == one[field] for field in fields)
    (shown,) = (row for row in cells(files, f"{STEM}-rate") if row["attention"] == "the flash_triton")
    assert shown["bucketed"] == number(case("flash_triton", "bucketed")["tokens_per_s"])
    assert list(shown)[1:] == list(STRATEGIES)
    text = files[f"tables/{STEM}-runs.md"].decode()
    assert "| none: one process |" in text and "| zero1: the zero1 |" in text
    for plot in ("rate", "time", "memory", "chain", "curves", "differences"):
        assert f"plots/{STEM}-{plot}.svg" in files
    assert b"Matrix of attention rows and strategies" in files["index.html"]


def test_speed_is_relative_to_naive_and_to_one_process_of_the_same_attention_row(files: dict[str, bytes]) -> None:
    found = numbers(files, "runs")
    for attention in ATTENTION:
        times = {strategy: case(attention, strategy)["time_s"] for strategy in STRATEGIES}
        for strategy in STRATEGIES:
            row = found[attention, strategy]
            assert float(row["speedup"]) == pytest.approx(times["naive"] / times[strategy])
            share = times["none"] / times[strategy] / (1 if strategy == "none" else 2)
            assert float(row["efficiency"]) == pytest.approx(share)


def test_every_outcome_is_a_cell_with_its_reason(tmp_path: Path) -> None:
    records = sweep()[-7:]
    unrun = dict.fromkeys(
        ("curve_steps", "curve_losses", "curve_differences", "curve_difference", "valid_loss", "loss")
    )
    records[-1] = case("sdpa_cudnn", "torch_ddp_tuned", outcome="wrong", reason="the loss of step 3", valid_loss=None)
    records[-2] = case("sdpa_cudnn", "zero1", outcome="oom", reason="needs 40 GiB", **unrun)
    records[-3] = case("sdpa_cudnn", "bucketed", outcome="unsupported", reason="no such thing", **unrun)
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    (row,) = (row for row in cells(files, f"{STEM}-loss") if row["attention"] == "the sdpa_cudnn")
    assert [row[name][:3] for name in ("bucketed", "zero1", "torch_ddp_tuned")] == ["n/a", "OOM", "wro"]
    assert "e-03" in row["torch_ddp_tuned"], "how far a wrong one went is told"
    text = files[f"tables/{STEM}-rate.md"].decode()
    assert all(reason in text for reason in ("the loss of step 3", "needs 40 GiB", "no such thing"))


def test_without_naive_there_is_no_chain_and_without_times_no_bars(tmp_path: Path) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", [case("flash_triton", "none")]))
    assert f"plots/{STEM}-chain.svg" not in files and f"plots/{STEM}-rate.svg" in files
    untimed = case("flash_triton", "none") | {"time_s": None, "tokens_per_s": None, "mean_s": None, "std_s": None}
    files = built(tmp_path / "more", save(tmp_path / "s.json", [untimed | {"reason": "verified, not timed"}]))
    assert f"plots/{STEM}-rate.svg" not in files and b"untimed" in files[f"tables/{STEM}-rate.md"]


def test_variants_and_other_settings_stay_apart(tmp_path: Path) -> None:
    wide = [
        case("flash_triton", "bucketed", row=f"bucketed-{size}MiB", bucket_mb=size, id=f"{size}") for size in (10, 100)
    ]
    limited = case("flash_triton", "bucketed", memory_limit_bytes=2**34, compile="compiled")
    files = built(tmp_path / "out", save(tmp_path / "r.json", [*wide, limited]))
    assert "bucketed-10MiB | bucketed-100MiB" in files[f"tables/{STEM}-rate.md"].decode()
    other = STEM.replace("bf16-", "bf16-compiled-") + "-16gib"
    assert "blocks compiled" in files[f"tables/{other}-rate.md"].decode()


def test_same_results_same_bytes_without_torch(tmp_path: Path) -> None:
    result = save(tmp_path / "run.json", sweep()[:9])
    first = built(tmp_path / "a", result)
    without = "import sys; sys.modules['torch'] = None; from lmsys.reports.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", without, str(result), "-o", str(tmp_path / "b")]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONHASHSEED": "7", "HOME": str(tmp_path)}, capture_output=True)
    assert done.returncode == 0, done.stderr
    second = {str(f.relative_to(tmp_path / "b")): f.read_bytes() for f in (tmp_path / "b").rglob("*") if f.is_file()}
    assert first == second


def test_a_record_without_its_batch_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = save(tmp_path / "r.json", [case("flash_triton", "none", batch=None)])
    refused([str(result), "-o", str(tmp_path / "out")], "a training record needs a valid 'batch'", capsys)
