"""The report's chapter on the head and loss: shares of the peers' memory, paired speed. No result is real."""

import csv
import io
from pathlib import Path
from random import Random
from statistics import median

import pytest

from tests.reports.test_reports import built, refused, save

STEM = "synthetic-gpu-loss-vocabularies-bf16-N16384-M1024"
RATES = {"chunked": (6e14, 0.1), "eager": (3e14, 1.0), "compiled": (5e14, 0.4)}  # FLOP/s; peak, of all logits


def case(impl: str, vocab_size: int, section: str = "vocabularies", **changes: object) -> dict:
    """A synthetic record; the rows of a comparison share the noise of its rounds."""
    rate, share = RATES[impl]
    flops = 6 * 16384 * 1024 * vocab_size
    noise = Random(vocab_size)
    samples = [flops / rate * noise.uniform(0.9, 1.2) for _ in range(10)]
    record = {
        "id": f"{section}-V{vocab_size}-{impl}", "benchmark": "loss", "section": section, "impl": impl,
        "label": f"the {impl} one", "peer": impl == "compiled", "tokens": 16384, "d_model": 1024,
        "vocab_size": vocab_size, "precision": "bf16", "dtype": "bfloat16", "direction": "fwdbwd", "device": "cuda",
        "outcome": "ok", "reason": None, "comparison": f"{section}-V{vocab_size}#1", "clock": "cuda_event",
        "compile_s": 1.0, "error_ratio": 0.2, "time_s": median(samples), "mean_s": sum(samples) / 10, "std_s": 0.0,
        "p20_s": min(samples), "p80_s": max(samples), "min_s": min(samples), "rounds": 10, "samples_s": samples,
        "sm_clock_mhz": 1800, "peak_bytes": int(share * 16384 * vocab_size * 12), "memory_limit_bytes": None,
        "flops": flops, "flops_per_s": flops / median(samples), "matmul_ceiling_fraction": rate / 8e14,
    }  # fmt: skip
    if changes.get("outcome", "ok") != "ok":
        record |= dict.fromkeys("time_s mean_s std_s p20_s p80_s min_s rounds samples_s peak_bytes".split())
        record["matmul_ceiling_fraction"] = None
    return record | changes


def sweep() -> list[dict]:
    records = [case(impl, size) for size in (128_000, 10_000) for impl in RATES]
    return records + [case("chunked", 200_000), case("eager", 200_000, outcome="oom", reason="needs 40 GiB")]


def numbers(files: dict[str, bytes]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(files[f"tables/{STEM}.csv"].decode())))


def test_speed_is_paired_and_memory_a_share_of_the_others(tmp_path: Path) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", sweep()))
    rows = {(int(row["vocab_size"]), row["impl"]): row for row in numbers(files)}
    assert list(rows)[:3] == [(10_000, impl) for impl in ("chunked", "compiled", "eager")]
    for size in (10_000, 128_000):
        ours = rows[size, "chunked"]
        assert float(ours["speedup"]) == pytest.approx(1.2) and float(rows[size, "compiled"]["speedup"]) == 1
        assert float(ours["peak_of_compiled"]) == pytest.approx(0.25)
        assert float(ours["peak_of_eager"]) == pytest.approx(0.1)
    alone = rows[200_000, "chunked"]
    assert not alone["speedup"] and not alone["peak_of_compiled"] and float(alone["time_s"]) > 0
    text = files[f"tables/{STEM}.md"].decode()
    assert "OOM¹" in text and "¹ out of memory: needs 40 GiB" in text and "speed, × of compiled" in text
    assert {f"plots/{STEM}-time.svg", f"plots/{STEM}-peak.svg"} <= files.keys()
    assert b"Head and loss" in files["index.html"]


def test_without_a_compiled_row_eager_is_what_speed_is_relative_to(tmp_path: Path) -> None:
    records = [one for one in sweep() if one["impl"] != "compiled"]
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    found = [float(row["speedup"]) for row in numbers(files) if row["impl"] == "chunked" and row["speedup"]]
    assert found == [pytest.approx(2.0)] * 2 and "speed, × of eager" in files[f"tables/{STEM}.md"].decode()


def test_a_record_without_its_shape_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = save(tmp_path / "r.json", [case("eager", 10_000) | {"d_model": None}])
    refused([str(result), "-o", str(tmp_path / "out")], "a loss record needs a valid 'd_model'", capsys)
