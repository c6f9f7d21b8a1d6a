"""The report builder: the same bytes for the same results, honest speedups, every outcome a cell. No result is real."""

import csv
import io
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path
from random import Random

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports import tables
from reports.__main__ import main
from reports.load import read

ROOT = Path(__file__).parents[1]
ROWS = {  # label, peer, synthetic TFLOP/s
    "naive": ("naive PyTorch", False, 60),
    "naive_compiled": ("naive, torch.compile", False, 95),
    "flash_triton": ("FlashAttention-2, Triton", False, 410),
    "flash_triton_torch_bwd": ("Triton forward, PyTorch backward", False, 300),
    "sdpa_flash": ("SDPA flash", True, 310),
    "sdpa_cudnn": ("SDPA cuDNN", True, 450),
}
MACHINE = {
    "name": "Synthetic GPU", "device": "cuda", "cores": 2, "memory_bytes": 2**37, "gpu": "Synthetic GPU",
    "gpu_count": 1, "capability": [9, 0], "driver": "000.00", "cuda": "0.0", "python": "3.12.0",
    "torch": "0.0.0", "triton": "0.0.0", "platform": "test", "commit": "0123456789abcdef", "dirty": False,
    "date": "2000-01-02T03:04:05+00:00", "command": "pytest", "seed": 0, "sweep": "test",
    "ceilings": {"matmul_flops_per_s": {"bfloat16": 8e14, "float32": 4e14}, "copy_bytes_per_s": 4e12},
}  # fmt: skip


def case(impl: str, section: str = "default", **changes: object) -> dict:
    """A synthetic record: a smooth made-up speed, noise shared by the rows of a round."""
    label, peer, rate = ROWS.get(impl, (impl, False, 100))
    shape = {"batch": 2, "heads": 8, "kv_heads": 8, "queries": 1024, "keys": 1024, "head_dim": 64}
    shape |= {key: changes.pop(key) for key in list(changes) if key in shape}
    told = {"dtype": "bfloat16", "causal": True, "direction": "fwd"}
    told |= {key: changes.pop(key) for key in list(changes) if key in told}
    b, h, _, q, k, d = shape.values()
    group = (
        f"{section}-B{b}H{h}Q{q}K{k}D{d}-{told['dtype']}-{'causal' if told['causal'] else 'full'}-{told['direction']}"
    )
    flops = 4 * b * h * q * k * d * {"fwd": 1, "bwd": 2.5, "fwdbwd": 3.5}[told["direction"]] / (1 + told["causal"])
    moved = 2 * b * h * (q + k) * d * 2 * {"fwd": 1, "bwd": 2, "fwdbwd": 3}[told["direction"]]
    time_s = flops / (rate * 1e12) + 8e-6
    noise = Random(group)
    samples = [float(f"{time_s * noise.uniform(0.97, 1.06):.5g}") for _ in range(10)]
    record = {
        "id": f"{group}-{impl}", "benchmark": "attention", "section": section, "impl": impl, "label": label,
        "peer": peer, **shape, **told, "device": "cuda", "outcome": "ok", "reason": None,
        "time_s": statistics.median(samples), "mean_s": statistics.fmean(samples), "std_s": statistics.stdev(samples),
        "p20_s": min(samples), "p80_s": max(samples), "min_s": min(samples), "rounds": 10, "samples_s": samples,
        "comparison": f"{group}#1", "clock": "cuda_event", "mode": "eager", "sm_clock_mhz": 1800, "compile_s": 1.5,
        "peak_bytes": b * h * q * d * 4 + (b * h * q * k * 4 if "naive" in impl else 0),
        "saved_bytes": b * h * q * d * 8 + (b * h * q * k * 2 if "naive" in impl else 0),
        "error_ratio": 0.31, "flops": flops, "bytes": moved, "flops_per_s": flops / time_s,
        "bytes_per_s": moved / time_s, "matmul_fraction": flops / time_s / 8e14, "copy_fraction": None,
        "memory_limit_bytes": None,
    }  # fmt: skip
    if changes.get("outcome", "ok") != "ok" or "time_s" in changes:
        unmeasured = (
            "time_s mean_s std_s p20_s p80_s min_s rounds samples_s compile_s peak_bytes saved_bytes flops_per_s"
        )
        record |= dict.fromkeys(unmeasured.split())
        record["error_ratio"] = None
    return record | changes


def sweep() -> list[dict]:
    """Every section, both kinds of rows, every outcome, with some cases that were not run."""
    records = []
    for direction in ("fwd", "bwd", "fwdbwd"):
        for d in (64, 128):
            for s in (1024, 4096, 16384):
                shape = {"batch": 16384 // s, "heads": 2048 // d, "kv_heads": 2048 // d, "queries": s, "keys": s}
                records += [case(i, "tokens16k", direction=direction, head_dim=d, **shape) for i in ROWS]
        for dtype in {"fwd": (), "bwd": ("float32",), "fwdbwd": ("bfloat16",)}[direction]:
            told = {"direction": direction, "dtype": dtype, "batch": 1, "heads": 1, "kv_heads": 1}
            for d in (16, 32, 64, 128):
                for s in [2**n for n in range(7, 17)]:
                    for i in ("naive", "flash_triton_torch_bwd", "flash_triton"):
                        lost = {"outcome": "oom", "reason": "needs 64 GiB beyond the inputs"}
                        lost = lost if i == "naive" and s == 65536 else {}
                        records.append(case(i, "flash", head_dim=d, queries=s, keys=s, **told, **lost))
    for direction in ("fwd", "bwd"):
        for d in (16, 64):
            for s in (256, 1024, 4096):
                told = {"dtype": "float32", "causal": False, "batch": 8, "heads": 1, "kv_heads": 1}
                shape = {"head_dim": d, "queries": s, "keys": s}
                for i in ("naive", "naive_compiled"):
                    records.append(case(i, "eager_compiled", direction=direction, **shape, **told))
    refused = {"outcome": "unsupported", "reason": "cuDNN aligns the causal mask to the other corner"}
    for q, k in ((128, 64), (256, 128), (1024, 512), (2048, 4096)):
        for i in ROWS:
            records.append(case(i, "tiers", queries=q, keys=k, **(refused if i == "sdpa_cudnn" else {})))
    for s in (512, 1024, 2048, 4096, 8192):
        records += [case(i, "by_length", queries=s, keys=s, batch=4, heads=12, kv_heads=12) for i in ROWS]
    untimed = {"time_s": None, "reason": "verified in Triton's interpreter, never timed"}
    records += [case("naive"), case("flash_triton", **untimed), case("mine", outcome="wrong", reason="dk is off")]
    records[-1]["error_ratio"] = 37.2
    records += [case("sdpa_flash", head_dim=96), case("naive", head_dim=96, outcome="error", reason="it broke")]
    return records


def small() -> list[dict]:
    impls = ("naive", "flash_triton", "sdpa_flash")
    return [case(i, queries=s, keys=s, direction=d) for s in (512, 1024) for i in impls for d in ("fwd", "bwd")]


def save(path: Path, records: list[dict], **machine: object) -> Path:
    path.write_text(json.dumps({"lmsys": {"schema": 1, "machine": MACHINE | machine, "records": records}}))
    return path


def built(out: Path, *arguments: object) -> dict[str, bytes]:
    """The files of a report, by path."""
    assert main([*map(str, arguments), "-o", str(out)]) == 0
    return {str(file.relative_to(out)): file.read_bytes() for file in sorted(out.rglob("*")) if file.is_file()}


def cells(files: dict[str, bytes], name: str) -> list[dict[str, str]]:
    """A Markdown table, as a list of rows by column head."""
    lines = [line for line in files[f"tables/{name}.md"].decode().splitlines() if line.startswith("|")]
    head, _, *rows = [[text.strip() for text in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


STEM = "synthetic-gpu-default-bfloat16-causal-fwd"


def test_same_results_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = save(tmp_path / "run.json", small())
    first = built(tmp_path / "a", result)
    # Another process with another hash seed, which would shuffle every set.
    command = [sys.executable, "-m", "reports", str(result), "-o", str(tmp_path / "b")]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONHASHSEED": "7", "HOME": str(tmp_path)}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == str(tmp_path / "b" / "index.html")
    second = {str(f.relative_to(tmp_path / "b")): f.read_bytes() for f in (tmp_path / "b").rglob("*") if f.is_file()}
    assert first == second
    assert any(name.startswith("plots/") for name in first)


def test_split_files_equal_the_whole(tmp_path: Path) -> None:
    records = small()
    whole = built(tmp_path / "whole", save(tmp_path / "whole.json", records))
    one = save(tmp_path / "one.json", records[1::2])
    journal = tmp_path / "two.json.partial"
    lines = [{"schema": 1, "machine": MACHINE}, *records[::2]]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": "cut sho')
    assert built(tmp_path / "split", journal, one) == whole
    assert built(tmp_path / "named-by-result", one, tmp_path / "two.json") == whole


def test_later_file_wins_and_machines_stay_apart(tmp_path: Path) -> None:
    first = save(tmp_path / "1.json", [case("naive", peak_bytes=2**20)])
    later = save(tmp_path / "2.json", [case("naive", peak_bytes=2**21)], commit="fedcba", date="2000-01-03")
    other = save(tmp_path / "3.json", [case("naive", peak_bytes=2**22)], name="Other GPU")
    files = built(tmp_path / "out", first, later, other)
    assert cells(files, f"{STEM}-peak")[0]["naive PyTorch"] == "2.00"
    assert cells(files, f"{STEM.replace('synthetic', 'other')}-peak")[0]["naive PyTorch"] == "4.00"
    assert b"commit fedcba, 2000-01-03" in files[f"tables/{STEM}-peak.md"]
    assert b"0123456789" not in files[f"tables/{STEM}-peak.md"]


@given(st.lists(st.tuples(*[st.floats(1e-6, 1e-1)] * 3), min_size=1, max_size=12))
def test_speedup_is_the_median_of_per_round_ratios(rounds: list[tuple[float, ...]]) -> None:
    columns = [list(column) for column in zip(*rounds, strict=True)]
    frame = pd.DataFrame(
        [
            {"impl": "base", "S": 1, "comparison": "run 1", "samples_s": columns[0]},
            {"impl": "beside", "S": 1, "comparison": "run 1", "samples_s": columns[1]},
            {"impl": "later", "S": 1, "comparison": "run 2", "samples_s": columns[2]},
            {"impl": "elsewhere", "S": 2, "comparison": "run 1", "samples_s": columns[2]},
            {"impl": "alone", "S": 1, "comparison": None, "samples_s": columns[2]},
            {"impl": "unsampled", "S": 1, "comparison": "run 1", "samples_s": None},
        ]
    )
    base, beside, *unpaired = tables.paired_speedups(frame, ["S"], "base")
    assert base == 1
    assert beside == pytest.approx(statistics.median(b / a for b, a, _ in rounds))
    assert all(map(math.isnan, unpaired))


def test_unpaired_speedup_is_blank(tmp_path: Path) -> None:
    records = [case("sdpa_flash"), case("naive"), case("flash_triton", comparison="another run")]
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    row, mean = cells(files, f"{STEM}-speedup")
    assert row["FlashAttention-2, Triton"] == "" == mean["FlashAttention-2, Triton"]
    expected = statistics.median(b / a for b, a in zip(records[0]["samples_s"], records[1]["samples_s"], strict=True))
    assert row["naive PyTorch"] == tables.number(expected)
    assert mean["naive PyTorch"] == f"{tables.number(expected)} (1)"
    assert b"Blank: not sampled together with SDPA flash." in files[f"tables/{STEM}-speedup.md"]


def test_baseline_by_name(tmp_path: Path) -> None:
    result = save(tmp_path / "r.json", small())
    row = cells(built(tmp_path / "out", result, "--baseline", "flash_triton"), f"{STEM}-speedup")[0]
    assert row["FlashAttention-2, Triton"] == "1.00"
    assert float(row["SDPA flash"]) < 1


def test_outcomes_are_cells_with_reasons(tmp_path: Path) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", sweep()[-5:] + [
        case("sdpa_cudnn", outcome="unsupported", reason="head_dim 64 | no"), case("flex", outcome="oom"),
    ]))  # fmt: skip
    first, second = cells({k: v.replace(b"\\|", b"/") for k, v in files.items()}, f"{STEM}-time")
    assert first["naive PyTorch"][0].isdigit()
    marks = {head: re.sub(r"[⁰-⁹¹²³]", "", text) for head, text in (first | {"": ""}).items()}
    assert marks["mine"] == "wrong" and marks["SDPA cuDNN"] == "n/a" and marks["flex"] == "OOM"
    assert marks["FlashAttention-2, Triton"] == "untimed" and marks["SDPA flash"] == "–"
    assert second["naive PyTorch"].startswith("error") and second["mine"] == "–"
    text = files[f"tables/{STEM}-time.md"].decode()
    for reason in (
        "wrong result: dk is off",
        "not supported: head_dim 64",
        "out of memory",
        "error: it broke",
        "– not run",
    ):
        assert reason in text
    assert cells(files, f"{STEM}-error")[0]["mine"].startswith("37.2 wrong")
    assert "0.31" in cells(files, f"{STEM}-error")[0]["naive PyTorch"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The report of the whole synthetic sweep."""
    folder = tmp_path_factory.mktemp("sweep")
    return built(folder / "out", save(folder / "r.json", sweep()))


def test_csv_round_trips_the_numbers(swept: dict[str, bytes]) -> None:
    files, records = swept, sweep()
    tidy = {row["id"]: row for row in csv.DictReader(io.StringIO(files["tables/records.csv"].decode()))}
    assert tidy.keys() == {record["id"] for record in records}
    for record in records:
        for field in ("time_s", "flops_per_s", "peak_bytes", "error_ratio"):
            text = tidy[record["id"]][field]
            assert (float(text) if text else None) == record[field]
    rows = csv.DictReader(io.StringIO(files["tables/synthetic-gpu-flash-float32-causal-bwd-time-by-dim.csv"].decode()))
    table = {(int(row["head_dim"]), int(row["queries"])): row for row in rows}
    for record in records:
        if (record["section"], record["dtype"], record["direction"]) == ("flash", "float32", "bwd"):
            found = table[record["head_dim"], record["queries"]][record["impl"]]
            assert (found == "OOM") if record["time_s"] is None else (float(found) == record["time_s"])


def test_tables_of_the_course(swept: dict[str, bytes]) -> None:
    files = swept
    rows = cells(files, "synthetic-gpu-flash-bfloat16-causal-fwdbwd-time-by-dim")
    assert [row["D"] for row in rows] == ["16", "32", "64", "128"]
    assert list(rows[0])[1:] == [f"S {2**n:,}" for n in range(7, 17)]
    assert re.fullmatch(r"OOM¹ / [\d.,]+ / [\d.,]+", rows[0]["S 65,536"])
    for name in ("fwd-time", "bwd-time", "fwd-saved"):
        rows = cells(files, f"synthetic-gpu-eager_compiled-float32-full-{name}-by-dim")
        assert re.fullmatch(r"[\d.,]+ / [\d.,]+", rows[0]["S 256"])
    caption = files["tables/synthetic-gpu-tiers-bfloat16-causal-fwd-time.md"].decode()
    for fact in (
        "Synthetic GPU",
        "batch 2, heads 8",
        "D 64",
        "torch 0.0.0",
        "commit 0123456789",
        "2000-01-02",
        "bfloat16",
    ):
        assert fact in caption
    plots = {name.removeprefix("plots/synthetic-gpu-") for name in files if name.startswith("plots/")}
    assert {"tiers-bfloat16-causal-fwd-bars.svg", "tokens16k-bfloat16-causal-fwd-tflops-D64.svg"} <= plots
    assert not any("default" in name and "time" in name for name in plots)  # one length: no line to draw
    page = files["index.html"].decode()
    assert not re.search(r'(src|href)="(https?:)?//', page) and page.count("<svg") == len(plots)


def test_memory_limit_is_a_question_of_its_own(tmp_path: Path) -> None:
    limited = case("naive", outcome="oom", reason="limit", memory_limit_bytes=24 * 2**30)
    files = built(tmp_path / "out", save(tmp_path / "r.json", [case("naive"), limited]))
    assert cells(files, f"{STEM}-time")[0]["naive PyTorch"][0].isdigit()
    assert cells(files, f"{STEM}-24gib-time")[0]["naive PyTorch"] == "OOM¹"


def test_a_second_report_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    full, part = save(tmp_path / "full.json", small()), save(tmp_path / "part.json", [case("naive")])
    built(tmp_path / "out", full)
    assert built(tmp_path / "out", part) == built(tmp_path / "fresh", part)


def test_needs_no_torch(tmp_path: Path) -> None:
    result = save(tmp_path / "r.json", [case("naive")])
    block = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; from reports.__main__ import main; "
    code = f"{block}sys.exit(main([{str(result)!r}, '-o', {str(tmp_path / 'out')!r}]))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "not JSON"),
        ("{}", "not a result of this bench"),
        ("[1]", "not"),
        ('{"lmsys": {"schema": 99, "machine": {}, "records": []}}', "schema 99"),
        ('{"lmsys": {"schema": 1, "machine": {}, "records": [1]}}', "not a result of this bench"),
        ('{"lmsys": {"schema": 1, "machine": [], "records": []}}', "not a result of this bench"),
        ('{"lmsys": {"schema": 1, "machine": {}, "records": []}}', "nothing to report"),
        (json.dumps({"lmsys": {"schema": 1, "machine": {}, "records": [case("naive") | {"heads": None}]}}), "'heads'"),
        (json.dumps({"lmsys": {"schema": 1, "machine": {}, "records": [case("naive") | {"direction": "up"}]}}), "'up'"),
        (json.dumps({"lmsys": {"schema": 1, "machine": {}, "records": [case("a") | {"benchmark": "b"}]}}), "'b'"),
    ],
)
def test_unusable_results_are_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    refused([str(path), "-o", str(tmp_path / "out")], said, capsys)


def test_other_bad_input_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = str(save(tmp_path / "r.json", [case("naive"), case("sdpa_flash")]))
    refused([result, "-o", str(tmp_path / "out"), "--baseline", "sdpa_flush"], "sdpa_flash", capsys)
    refused([result, "-o", f"{result}/site"], "r.json/site", capsys)
    refused([str(tmp_path / "absent.json")], "absent.json", capsys)
    refused([str(tmp_path)], str(tmp_path), capsys)


def refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_one_frame_of_all_machines(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{n}.json", small(), name=f"GPU {n}") for n in (1, 2)]
    results = read(paths)
    assert len(results.frame) == 2 * len(small())
    assert results.frame.groupby("machine").size().to_dict() == {"gpu-1": len(small()), "gpu-2": len(small())}
