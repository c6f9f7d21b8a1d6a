"""The report's chapters on data parallelism and collectives: ratios to peers, fits, memory. No result is real."""

import csv
import io
from pathlib import Path
from random import Random
from statistics import mean, median, stdev

import pytest

from tests.reports.test_reports import built, refused, save

STEM = "synthetic-gpu-data-parallel-sizes-xl-S512-bf16"
SPEED = {
    "none": 1.0, "naive": 1.4, "flat": 1.35, "overlapped": 1.2, "bucketed-25MiB": 1.12, "bucketed-auto": 1.1,
    "zero1": 1.15, "fsdp": 1.3, "torch_ddp": 1.25, "torch_ddp_tuned": 1.2, "torch_zero1": 1.5, "torch_fsdp2": 1.35,
}  # fmt: skip


def case(impl: str, batch: int = 4, world_size: int = 2, **changes: object) -> dict:
    """A synthetic record; the rows of a comparison share the noise of its rounds."""
    strategy = impl.partition("-")[0]
    noise = Random(batch)
    samples = [0.1 * batch * SPEED[impl] * noise.uniform(0.9, 1.2) for _ in range(12)]
    time, parameters = median(samples), 8 * 10**9
    record = {
        "id": f"sizes-xl-S512B{batch}-bf16-W{world_size}-{impl}", "benchmark": "data_parallel", "section": "sizes",
        "impl": impl, "strategy": strategy, "label": f"the {strategy}", "peer": impl.startswith("torch"),
        "size": "xl", "num_parameters": 2 * 10**9, "context": 512, "batch": batch, "precision": "bf16",
        "world_size": world_size, "num_nodes": 1, "backend": "nccl", "comm_dtype": "float32", "device": "cuda",
        "sharded_optimizer": False, "outcome": "ok", "reason": None, "comparison": f"sizes-xl-B{batch} now",
        "clock": "cuda_event_steps", "error_ratio": 0.3, "memory_limit_bytes": None, "time_s": time,
        "mean_s": mean(samples), "std_s": stdev(samples), "p20_s": min(samples), "p80_s": max(samples), "rounds": 12,
        "samples_s": samples, "tokens_per_s": world_size * batch * 512 / time, "scaling_efficiency": 1 / SPEED[impl],
        "exposed_s": time * (1 - 1 / SPEED[impl]), "unsynchronized_s": time / SPEED[impl], "communication_s": 0.03,
        "communication_fraction": 0.03 / time, "overlap_fraction": 0.5, "improvement": 0.4, "bucket_mb": 24.7,
        "num_buckets": 80, "predicted_exposed_s": 0.004, "init_bytes": parameters, "before_step_peak_bytes": 20 * 10**9,
        "after_step_peak_bytes": 3 * 10**10, "peak_bytes": 3 * 10**10, "parameters_bytes": parameters,
        "gradients_bytes": parameters, "optimizer_bytes": 2 * parameters, "activations_bytes": 10**9,
        "optimizer_fraction": 1.0, "predicted_parameters_bytes": parameters, "predicted_gradients_bytes": parameters,
        "predicted_optimizer_bytes": 2 * parameters,
        "timeline": [["computation", 0.0, 0.08], ["communication", 0.02, 0.1]],
    }  # fmt: skip
    if changes.get("outcome", "ok") != "ok":
        record |= {name: None for name, value in record.items() if name.endswith(("_s", "_bytes", "rounds"))}
    return record | changes


def sweep() -> list[dict]:
    return [case(impl, batch) for batch in (4, 2) for impl in SPEED] + [case("none", batch, 1) for batch in (2, 4)]


def numbers(files: dict[str, bytes], name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(files[f"tables/{name}.csv"].decode())))


def test_ours_stands_beside_torch_s_own(tmp_path: Path) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", sweep()))
    rows = numbers(files, "synthetic-gpu-data-parallel-sizes-peers")
    assert [row["batch"] for row in rows] == ["2", "4"]
    for row in rows:  # of the fastest size of buckets
        assert float(row["bucketed / torch_ddp_tuned"]) == pytest.approx(1.2 / 1.1)
        assert float(row["bucketed / naive"]) == pytest.approx(1.4 / 1.1)
        assert float(row["zero1 / torch_zero1"]) == pytest.approx(1.5 / 1.15)
        assert float(row["fsdp / torch_fsdp2"]) == pytest.approx(1.35 / 1.3)
    text = files["tables/synthetic-gpu-data-parallel-sizes-peers.md"].decode()
    assert "| geometric mean, 2 ranks | 1.09 (2) |" in text
    assert b"Data parallel: Sizes" in files["index.html"]


def test_tables_and_plots_of_one_size(tmp_path: Path) -> None:
    lost = [case("flat", 8, outcome="oom", reason="needs 40 GiB"), case("none", 8)]
    files = built(tmp_path / "out", save(tmp_path / "r.json", sweep() + lost))
    step = files[f"tables/{STEM}-step.md"].decode()
    assert "the bucketed, 25 MiB" in step and "the bucketed, auto (25 MiB)" in step and "OOM¹" in step
    assert "CUDA events, one call after another" in step
    assert [row["batch"] for row in numbers(files, f"{STEM}-by-batch")][0] == "2"
    memory = files[f"tables/{STEM}-memory.md"].decode()
    assert "optimizer state" in memory and "29.8" in memory  # 32 GB predicted
    for plot in ("rate", "exposed", "memory", "scaling", "timeline"):
        assert f"plots/{STEM}-{plot}.svg" in files


def test_ways_of_compiling_are_kept_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case of an older file, which does not say how it was compiled, is eager and keeps its names."""
    eager = [case(impl) for impl in SPEED]
    others = [
        case(impl, id=f"sizes-{how}-W2-{impl}", compile=how, comparison=f"sizes-{how} now")
        for how in ("graphed", "compiled")
        for impl in SPEED
    ]
    files = built(tmp_path / "out", save(tmp_path / "r.json", others + eager))
    for suffix in ("", "-compiled", "-graphed"):
        memory = files[f"tables/{STEM}{suffix}-memory.md"].decode()
        assert ("before one is recorded" in memory) == (suffix == "-graphed")
    for stem, said in ((STEM, "xl, context 512, bf16;"), (f"{STEM}-compiled", "bf16, blocks compiled;")):
        assert len(numbers(files, f"{stem}-step")) == len(SPEED)
        assert said in files[f"tables/{stem}-step.md"].decode()
    assert b"blocks eager" not in files["index.html"]
    text = files["tables/synthetic-gpu-data-parallel-sizes-peers.md"].decode()
    assert "| xl b4 s512, bf16, 2 ranks |" in text and "| xl b4 s512, bf16, 2 ranks, blocks compiled |" in text
    assert "| geometric mean, 2 ranks, blocks compiled |" in text
    capsys.readouterr()
    result = save(tmp_path / "bad.json", [case("none", compile="jit")])
    refused([str(result), "-o", str(tmp_path / "bad")], "'compile' must be one of eager, compiled, graphed", capsys)


def test_without_peers_and_samples_there_is_no_comparison(tmp_path: Path) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", [case("none"), case("bucketed-auto")]))
    assert "tables/synthetic-gpu-data-parallel-sizes-peers.md" not in files
    assert f"tables/{STEM}-by-batch.md" not in files


def collective(operation: str, megabytes: int, **changes: object) -> dict:
    size = megabytes * 10**6
    time = 2e-5 + size / 3e11
    return {
        "id": f"default-W2-nccl-{operation}-{megabytes}MB", "benchmark": "collectives", "section": "default",
        "impl": operation, "megabytes": megabytes, "bytes": size, "world_size": 2, "backend": "nccl",
        "dtype": "float32", "device": "cuda", "outcome": "ok", "reason": None, "comparison": "default-W2-nccl now",
        "clock": "cuda_event_steps", "memory_limit_bytes": None, "time_s": time, "mean_s": time, "std_s": 0.0,
        "p20_s": time, "p80_s": time, "rounds": 10, "samples_s": [time] * 10, "loop_s": 0.98 * time,
        "loop_fraction": 0.98, "algorithm_bytes_per_s": size / time, "bus_bytes_per_s": size / time,
    } | changes  # fmt: skip


def test_collectives_have_a_fitted_latency_and_bandwidth(tmp_path: Path) -> None:
    records = [collective(name, size) for name in ("broadcast", "all_reduce") for size in (100, 1, 1000, 10)]
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    fits = numbers(files, "synthetic-gpu-collectives-default-nccl-fit")
    assert [row["impl"] for row in fits] == ["all_reduce", "broadcast"]
    for row in fits:
        assert float(row["latency_s"]) == pytest.approx(2e-5) and float(row["bytes_per_s"]) == pytest.approx(3e11)
    assert "plots/synthetic-gpu-collectives-default-nccl-W2-bandwidth.svg" in files
    text = files["tables/synthetic-gpu-collectives-default-nccl-time.md"].decode()
    assert "| operation | ranks | 1 MB | 10 MB | 100 MB | 1,000 MB |" in text
    assert "98.0" in files["tables/synthetic-gpu-collectives-default-nccl-rates.md"].decode()


def test_records_without_their_shape_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = save(tmp_path / "r.json", [case("none") | {"world_size": None}])
    refused([str(result), "-o", str(tmp_path / "out")], "a data-parallel record needs a valid 'world_size'", capsys)
    result = save(tmp_path / "c.json", [collective("all_reduce", 1) | {"megabytes": None}])
    refused([str(result), "-o", str(tmp_path / "out")], "a record of a collective needs a section", capsys)
