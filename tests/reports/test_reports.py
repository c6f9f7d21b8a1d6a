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

from lmsys.reports import plots, tables
from lmsys.reports.__main__ import main
from lmsys.reports.load import read

ROOT = Path(__file__).parents[2]
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
    command = [sys.executable, "-m", "lmsys.reports", str(result), "-o", str(tmp_path / "b")]
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


def test_the_later_run_wins_and_machines_stay_apart(tmp_path: Path) -> None:
    first = save(tmp_path / "1.json", [case("naive", peak_bytes=2**20)])
    later = save(tmp_path / "2.json", [case("naive", peak_bytes=2**21)], commit="fedcba", date="2000-01-03")
    other = save(tmp_path / "3.json", [case("naive", peak_bytes=2**22)], name="Other GPU")
    undated = save(tmp_path / "4.json", [case("naive", peak_bytes=2**23)], date=None)
    files = built(tmp_path / "out", undated, first, later, other)
    assert cells(files, f"{STEM}-peak")[0]["naive PyTorch"] == "2.00"
    assert cells(files, f"{STEM.replace('synthetic', 'other')}-peak")[0]["naive PyTorch"] == "4.00"
    assert b"commit fedcba, 2000-01-03" in files[f"tables/{STEM}-peak.md"]
    assert b"0123456789" not in files[f"tables/{STEM}-peak.md"]
    assert built(tmp_path / "reversed", other, later, first, undated) == files


@pytest.mark.parametrize(("device", "titles"), [("cpu", ["{}, 4 cores", "{}, 8 cores"]), ("cuda", ["{}"])])
def test_a_cpu_is_known_by_its_cores_and_a_gpu_in_whatever_host(device: str, titles: list[str], tmp_path: Path) -> None:
    few = save(tmp_path / "1.json", [case("naive", peak_bytes=2**20)], cores=4, device=device)
    many = save(tmp_path / "2.json", [case("sdpa_flash", peak_bytes=2**21)], cores=8, device=device)
    files = built(tmp_path / "out", few, many)
    found = re.findall(r"<h2[^>]*>([^<]*)</h2>", files["index.html"].decode())
    assert found[: len(titles)] == [title.format(MACHINE["name"]) for title in titles]
    if device == "cuda":
        table = files[f"tables/{STEM}-peak.md"].decode()
        assert "4 CPU cores" in table and "8 CPU cores" in table


def test_of_one_date_the_file_named_last_wins(tmp_path: Path) -> None:
    one, two = (save(tmp_path / f"{n}.json", [case("naive", peak_bytes=n * 2**20)]) for n in (1, 2))
    for paths, shown in (((one, two), "2.00"), ((two, one), "1.00")):
        assert cells(built(tmp_path / "out", *paths), f"{STEM}-peak")[0]["naive PyTorch"] == shown


def test_times_of_another_run_are_marked(tmp_path: Path) -> None:
    first = save(tmp_path / "1.json", [case(i) for i in ROWS])
    again = [case(i, comparison="the second run") for i in ("flash_triton", "naive")]
    files = built(tmp_path / "out", first, save(tmp_path / "2.json", again, date="2000-01-03"))
    for metric in ("time", "tflops"):
        row = cells(files, f"{STEM}-{metric}")[0]
        marked = {head for head, text in row.items() if text.endswith("¹")}
        assert marked == {"FlashAttention-2, Triton", "naive PyTorch"}
        note = "¹ measured in another run than SDPA flash: not comparable within a few per cent"
        assert note in files[f"tables/{STEM}-{metric}.md"].decode()
    assert "¹" not in files[f"tables/{STEM}-peak.md"].decode()


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


def test_a_baseline_without_a_time_is_named_as_the_reason(tmp_path: Path) -> None:
    lost = case("sdpa_flash", queries=4096, keys=4096, outcome="oom", reason="needs 64 GiB")
    absent = {"queries": 8192, "keys": 8192}
    records = [case("sdpa_flash"), case("naive"), lost, case("naive", queries=4096, keys=4096), case("naive", **absent)]
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    assert [row["naive PyTorch"] for row in cells(files, f"{STEM}-speedup")[1:3]] == ["no baseline²", "no baseline³"]
    text = files[f"tables/{STEM}-speedup.md"].decode()
    assert "² SDPA flash has no time here: out of memory (needs 64 GiB)" in text
    assert "³ SDPA flash was not run here" in text and "Blank" not in text
    assert "no base<" in files[f"plots/{STEM}-heat.svg"].decode()


@pytest.mark.parametrize(
    "records",
    [
        [case("flash_triton"), case("sdpa_cudnn"), case("naive", outcome="oom")],
        [case("sdpa_flash"), case("flash_triton", comparison="another run")],
        [case("sdpa_flash"), case("naive", outcome="wrong")],
    ],
    ids=["none timed", "none beside it", "none but it"],
)
def test_no_speedups_without_a_baseline_beside_something(tmp_path: Path, records: list[dict]) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    assert not [name for name in files if "speedup" in name or "heat" in name or "summary" in name]


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


def test_key_columns_are_in_sort_order(swept: dict[str, bytes]) -> None:
    """Read from left to right, the rows of every table only grow: masks, head dimensions, lengths."""
    for name in (name[7:-3] for name in swept if re.search(r"-(time|tflops|peak|saved|error)\.md$", name)):
        table = cells(swept, name)
        heads = [head for head in table[0] if head in ("mask", "D", "H", "S", "B", "Q×K")]
        keys = [
            [[int(n) for n in re.findall(r"\d+", row[h].replace(",", ""))] or row[h] for h in heads] for row in table
        ]
        assert keys == sorted(keys) and len({str(key) for key in keys}) == len(keys), name


def test_all_cells_of_both_masks_in_one_table(tmp_path: Path) -> None:
    records = []
    for causal in (True, False):
        for d in (64, 128):
            for s in (1024, 4096):
                shape = {"batch": 16384 // s, "heads": 2048 // d, "kv_heads": 2048 // d, "queries": s, "keys": s}
                records += [case(i, "tokens16k", head_dim=d, causal=causal, **shape) for i in ROWS]
                records.append(case("flex", "tokens16k", head_dim=d, causal=causal, outcome="unsupported", **shape))
    name = "synthetic-gpu-tokens16k-bfloat16-fwd-tflops"
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    rows = cells(files, name)
    assert list(rows[0])[:3] == ["mask", "D", "S"]
    assert set(list(rows[0])[3:]) == {label for label, _, _ in ROWS.values()}  # without the row that was never timed
    assert [row["mask"] for row in rows] == ["causal"] * 4 + ["not causal"] * 4
    caption = files[f"tables/{name}.md"].decode()
    assert "S 1,024 to 4,096 (B·S = 16,384)" in caption and "D 64 to 128 (H·D = 2,048)" in caption
    assert "sequence length S (B·S = 16,384)" in files[f"plots/{name.replace('fwd', 'causal-fwd')}-D64.svg"].decode()


def test_summary_has_a_row_for_each_implementation_with_a_value(swept: dict[str, bytes]) -> None:
    rows = cells(swept, "synthetic-gpu-by_length-summary")
    assert {row[""] for row in rows} == {label for label, _, _ in ROWS.values()}
    assert re.fullmatch(r"1\.00 \(5\)", rows[-2]["Forward, bfloat16, causal"])
    rows = cells(swept, "synthetic-gpu-tiers-summary")
    assert "SDPA cuDNN" not in {row[""] for row in rows}  # refused every tier
    page = swept["index.html"].decode()
    assert '<h4><a href="#synthetic-gpu-attention-by-sequence-length">By sequence length</a></h4>' in page
    for target in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{target}"' in page


@pytest.mark.parametrize(
    ("direction", "peak", "first"),
    [
        ("fwd", "Peak memory of the forward (above", "First call of the forward ("),
        ("bwd", "Peak memory of the backward alone (above", "First call of forward and backward together"),
        ("fwdbwd", "Peak memory of forward and backward (above", "First call of forward and backward together"),
    ],
)
def test_captions_say_what_is_measured(tmp_path: Path, direction: str, peak: str, first: str) -> None:
    files = built(tmp_path / "out", save(tmp_path / "r.json", [case("naive", direction=direction)]))
    text = {m: files[f"tables/{STEM[:-3]}{direction}-{m}.md"].decode() for m in ("peak", "saved", "compile", "error")}
    assert peak in text["peak"] and ("what the forward saved" in text["peak"]) == (direction == "bwd")
    assert "q, k and v included" in text["saved"]
    assert first in text["compile"] and "tuned choices already on disk are not timed again" in text["compile"]
    for check in ("check in this dtype", "check in float32", "root-mean-square rule"):
        assert check in text["error"]


def test_words_of_bars_stand_at_their_tiers(tmp_path: Path) -> None:
    records = [case("naive", "tiers", queries=q, keys=64) for q in (64, 128, 256)]
    for lost in (0, 2):
        records[lost] = case("naive", "tiers", queries=records[lost]["queries"], keys=64, outcome="oom")
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    drawing = files["plots/synthetic-gpu-tiers-bfloat16-causal-fwd-bars.svg"].decode()
    words = [float(x) for x in re.findall(r"translate\(([-\d.]+) [^>]*>OOM<", drawing)]
    ticks = [float(x) for x in re.findall(r'x="([-\d.]+)"[^>]*>(?:64|128:64|256:64)<', drawing)]
    assert len(words) == 2 and len(ticks) == 3
    assert words == pytest.approx([ticks[0], ticks[2]], abs=5)
    assert 0 < words[0] < words[1] < 360


def test_heat_map_keeps_rows_of_words(swept: dict[str, bytes]) -> None:
    drawing = swept["plots/synthetic-gpu-tiers-bfloat16-causal-fwd-heat.svg"].decode()
    assert ">SDPA cuDNN<" in drawing and drawing.count(">n/a<") == 4


@pytest.mark.parametrize(("growth", "from_zero"), [(1, True), (8, False)])
def test_memory_of_a_narrow_range_is_drawn_from_zero(tmp_path: Path, growth: int, from_zero: bool) -> None:
    records = [case("naive", queries=s, keys=s, peak_bytes=(s // 256) ** growth * 2**20) for s in (512, 1024)]
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    assert (">0</text>" in files[f"plots/{STEM}-peak.svg"].decode()) is from_zero


def test_roofline_by_head_dimension(swept: dict[str, bytes]) -> None:
    for d in (64, 128):
        assert f"plots/synthetic-gpu-tokens16k-bfloat16-causal-fwd-roofline-D{d}.svg" in swept


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
    block = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; from lmsys.reports.__main__ import main; "
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


@pytest.mark.parametrize(("length", "rows"), [(5, 2), (15, 2), (25, 4), (45, 4)])
def test_legends_lie_within_the_drawing(length: int, rows: int) -> None:
    """Two columns of long labels would be cut off on both sides; the drawing keeps its own height."""
    figure, axes = plots.canvas("title", 3.0 + plots.legend_height(4))
    height = figure.get_figheight()
    for i in range(4):
        axes.plot([0, 1], [0, i], label=f"{i}" * length)
    plots.add_legend(figure, axes)
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width
    assert figure.get_figheight() == pytest.approx(height + 0.2 * (rows - 2))


def test_labels_that_would_run_into_one_another_are_slanted() -> None:
    assert not plots.crowded(["64", "128", "256"])
    assert plots.crowded(["none", "bucketed-25MiB", "bucketed-25MiB-bfloat16"])
