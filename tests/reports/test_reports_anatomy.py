"""The report's chapters on where time and memory go, and on mixed precision. No result is real."""

from pathlib import Path

import pytest

from tests.reports.test_reports import built, cells, refused, save
from tests.reports.test_reports import case as attention_case

STEM = "synthetic-gpu-anatomy"
LABELS = {"naive": "naive PyTorch", "flash_triton": "FlashAttention-2, Triton"}
PHASES = {"forward": (3, 2), "backward": (4, 1), "optimizer": (2, 1)}  # peak and live, GiB
SHARES = {"matmul": 0.5, "attention": 0.125, "elementwise": 0.25, "reduction": 0.125}
KINDS = ("matmul", "attention", "elementwise", "reduction", "copy", "communication", "other")
GIB = 2**30


def part(name: str, total_s: float, backward_s: float = 0.0, **kinds: float) -> dict:
    return {"name": name, "total_s": total_s, "backward_s": backward_s, "count": 1.0, "kinds": kinds}


def case(
    mode: str = "step", impl: str = "naive", compile: str = "eager", context: int = 512, **changes: object
) -> dict:
    names = ["forward"] if mode == "forward" else list(PHASES)
    parts = [part("forward", 0.02, 0.04 * (mode == "step")), part("attention", 0.01), part("optimizer", 0.003)]
    if impl == "naive":
        parts += [
            part("scores", 4e-3, 8e-3, matmul=1e-3),
            part("softmax", 2e-3, 3e-3),
            part("values", 1e-3, matmul=1e-3),
        ]
    record = {
        "id": f"anatomy-small-S{context}B4-bf16-{mode}-{compile}-{impl}", "benchmark": "anatomy", "section": "anatomy",
        "impl": impl, "label": LABELS[impl], "peer": False, "size": "small", "d_model": 768, "d_ff": 3072,
        "num_layers": 12, "num_heads": 12, "vocab_size": 10_000, "num_parameters": 128_625_408, "batch": 4,
        "context": context, "precision": "bf16", "mode": mode, "compile": compile, "attention": impl,
        "dtype": "bfloat16", "direction": mode, "device": "cuda", "outcome": "ok", "reason": None,
        "comparison": "one", "clock": "cuda_event", "error_ratio": 0.3, "memory_limit_bytes": None,
        "time_s": 0.05, "mean_s": 0.05, "std_s": 0.001, "p20_s": 0.049, "p80_s": 0.051, "min_s": 0.049, "rounds": 10,
        "samples_s": [0.05] * 10, "sm_clock_mhz": 1800, "profiled_s": 0.1, "kernel_s": 0.048,
        "num_launches": 1234.0, **{f"{kind}_share": SHARES.get(kind, 0.0) for kind in KINDS},
        "kernels": [{"name": "nvjet<a|b>", "kind": "matmul", "total_s": 0.024, "count": 84.0}], "parts": parts,
        "held_bytes": GIB, "peak_bytes": 4 * GIB,
        "phases": [{"name": n, "peak_bytes": PHASES[n][0] * GIB, "live_bytes": PHASES[n][1] * GIB} for n in names],
        "timeline": [
            {"name": n, "points": [[0.01 * i, 0], [0.01 * i + 0.005, PHASES[n][0] * GIB]]} for i, n in enumerate(names)
        ],
        "allocations": [{"bytes": 2**20, "count": 3, "at_peak": 2, "where": "model/loss.py:9", "function": "loss"}],
    }  # fmt: skip
    if mode == "step":
        sizes = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB, "activations": 2 * GIB}
        record |= {f"{name}_bytes": size for name, size in sizes.items()}
        record |= {f"predicted_{name}_bytes": size for name, size in sizes.items()} | {
            "predicted_activations_bytes": 1.5 * GIB
        }
    if changes.get("outcome", "ok") != "ok":
        record = {name: value for name, value in record.items() if name not in ("time_s", "kernels", "parts", "phases")}
    return record | changes


def study(topic: str, dtype: str, **found: object) -> dict:
    told = {"benchmark": "precision", "section": topic, "impl": dtype, "dtype": dtype, "device": "cuda"}
    return {"id": f"precision-{topic}-{dtype}", **told, "outcome": "ok", "reason": "a study", **found}


def sums(dtype: str, result: float) -> list[dict]:
    exact = {"accumulator": "float32", "addend": "float32", "result": 10.0001, "error": 1e-4}
    return [exact, {"accumulator": dtype, "addend": dtype, "result": result, "error": result - 10}]


VARIANTS = (("naive", "eager"), ("flash_triton", "eager"), ("flash_triton", "compiled"))
RECORDS = [case(mode, *variant) for mode in ("forward", "step") for variant in VARIANTS]
STUDIES = [
    *(
        study("accumulation", d, addend=0.01, times=1000, sums=sums(d, r))
        for d, r in (("bfloat16", 4), ("float16", 9.95))
    ),
    *(study("autocast", d, tensors=[{"name": "loss", "dtype": "float32"}]) for d in ("bfloat16", "float16")),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("anatomy")
    first = built(folder / "a", save(folder / "r.json", [*RECORDS, *STUDIES]))
    assert built(folder / "b", save(folder / "s.json", [*STUDIES, *RECORDS][::-1])) == first
    return first


def test_chapters_stand_in_the_page(report: dict[str, bytes]) -> None:
    page = report["index.html"].decode()
    places = [page.index(f">{title}</h3>") for title in ("Where time goes", "Where memory goes", "Mixed precision")]
    assert places == sorted(places)
    assert "kernels" not in report["tables/records.csv"].decode().splitlines()[0].split(",")


def test_time_is_divided_by_kind_part_and_kernel(report: dict[str, bytes]) -> None:
    rows = cells(report, f"{STEM}-shares")
    assert [(row["call"], row["compile"]) for row in rows][:3] == [("inference", "eager")] * 2 + [
        ("inference", "compiled")
    ]
    assert (rows[0]["kernels, ms"], rows[0]["matmul, %"], rows[0]["elementwise, %"]) == ("48.0", "50.0", "25.0")
    assert "copy, %" not in rows[0]
    clocks = cells(report, f"{STEM}-clocks")[0]
    assert [clocks[head] for head in ("clocked", "kernels", "profiled", "profiled / clocked")] == [
        "50.0", "48.0", "100", "2.00"
    ]  # fmt: skip
    (forward, *_) = cells(report, f"{STEM}-small-S512B4-bf16-step-parts")
    assert forward["eager, naive PyTorch"] == "20.0 / 40.0"
    (kernel,) = cells_of_pipes(report, f"{STEM}-small-S512B4-bf16-step-eager-naive-kernels")
    assert kernel == [r"nvjet<a\|b>", "matmul", "24.0", "84", "50.0"]
    assert f"plots/{STEM}-small-S512B4-bf16-shares.svg" in report


def cells_of_pipes(files: dict[str, bytes], name: str) -> list[list[str]]:
    lines = [line for line in files[f"tables/{name}.md"].decode().splitlines() if line.startswith("|")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_softmax_stands_beside_matmul(report: dict[str, bytes]) -> None:
    scores, softmax, values = cells(report, f"{STEM}-small-S512B4-bf16-softmax")
    square = 12 * 4 * 12 * 512**2  # layers, batch, heads, scores
    assert float(scores["forward, GFLOP"]) == pytest.approx(2 * 64 * square / 1e9, rel=0.01)
    assert float(softmax["forward, GFLOP"]) == pytest.approx(5 * square / 1e9, rel=0.01)
    assert (scores["inference, ms"], scores["of it matmul kernels, ms"], scores["step: backward, ms"]) == (
        "4.00", "1.00", "8.00"
    )  # fmt: skip
    assert values["forward, GFLOP"] == scores["forward, GFLOP"]


def test_memory_is_told_by_phase_and_prediction(report: dict[str, bytes]) -> None:
    (first, *_) = cells(report, f"{STEM}-peaks")
    assert [first[f"step: {name}"] for name in ("held", *PHASES)] == ["1.00", "4.00", "5.00", "3.00"]
    assert first["inference: forward"] == "4.00"
    (held, *_) = cells(report, f"{STEM}-predicted")
    assert held["activations"] == "2.00 / 1.50 (-25.0 %)" and held["gradients"] == "1.00 / 1.00 (+0.0 %)"
    (largest,) = cells(report, f"{STEM}-small-S512B4-bf16-step-eager-naive-allocations")
    assert list(largest.values()) == ["lmsys/model/loss.py:9", "loss", "1.00", "3", "2"]
    svg = report[f"plots/{STEM}-small-S512B4-bf16-step-eager-naive-timeline.svg"].decode()
    assert "peak 5.00 GiB" in svg and all(f">{name}<" in svg for name in ("held before", *PHASES))


def test_the_precision_study_is_two_tables(report: dict[str, bytes]) -> None:
    rows = cells(report, "synthetic-gpu-precision-accumulation")
    assert [(row["sum"], row["result"]) for row in rows] == [
        ("float32", "10.00010"), ("float16", "9.95000"), ("bfloat16", "4.00000")
    ]  # fmt: skip
    (loss,) = cells(report, "synthetic-gpu-precision-autocast")
    assert list(loss.values()) == ["loss", "float32", "float32"]


def test_outcomes_are_cells_with_reasons(tmp_path: Path) -> None:
    lost = [case(mode, context=1024, outcome="oom", reason="needs 200 GiB") for mode in ("forward", "step")]
    limited = case("forward", "flash_triton", memory_limit_bytes=16 * GIB)
    files = built(tmp_path / "out", save(tmp_path / "r.json", [*RECORDS, *lost, limited]))
    rows = cells(files, f"{STEM}-shares")
    assert [row["kernels, ms"] for row in rows if row["context"] == "1,024"] == ["OOM¹", "OOM¹"]
    assert [row["kernels, ms"] for row in rows if row["memory limit"] == "16 GiB"] == ["48.0"]
    assert "¹ out of memory: needs 200 GiB" in files[f"tables/{STEM}-peaks.md"].decode()


def test_nothing_opened_is_a_table_of_outcomes(tmp_path: Path) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", [case(outcome="error", reason="it broke")]))
    assert cells(files, f"{STEM}-shares")[0]["kernels, ms"] == "error¹"
    assert not [name for name in files if name.startswith("plots/")]


def test_a_record_without_its_size_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = save(tmp_path / "r.json", [attention_case("naive"), case(size=None)])
    refused([str(result), "-o", str(tmp_path)], "an anatomy record needs a valid 'size'", capsys)
