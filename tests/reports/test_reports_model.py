"""The report's chapters on models: context by size, every outcome a cell, honest speedups. No result is real."""

import csv
import io
import re
import statistics
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from lmsys import config
from tests.reports.test_reports import ROOT, built, cells, refused, save
from tests.reports.test_reports import case as attention_case

SIZES = {name: tuple(size.values()) for name, size in config.SIZES.items()}  # d_model, d_ff, layers, heads
LABELS = {"naive": "naive PyTorch", "flash_triton": "FlashAttention-2, Triton", "sdpa_flash": "SDPA flash"}
SHARE = {"forward": 2, "train_forward": 2, "backward": 4, "optimizer": 0, "step": 6}
RATE = {("fp32", "eager"): 3e14, ("fp32", "compiled"): 3.6e14, ("bf16", "eager"): 3.5e14, ("bf16", "compiled"): 4.9e14}
MEASURED = (
    "time_s mean_s std_s p20_s p80_s min_s rounds samples_s compile_s held_bytes peak_bytes tokens_per_s flops_per_s"
    " matmul_ceiling_fraction mfu sm_clock_mhz"
).split()
STEM = "synthetic-gpu-model-sizes"


def case(size: str = "small", mode: str = "step", **changes: object) -> dict:
    """A synthetic record: a smooth made-up speed, noise of its own."""
    told = {"section": "sizes", "impl": "flash_triton", "batch": 4, "context": 512, "precision": "bf16"}
    told |= {"compile": "eager", "vocab_size": 10_000}
    told |= {key: changes.pop(key) for key in list(changes) if key in told}
    d_model, d_ff, layers, heads = SIZES[size]
    parameters = 2 * told["vocab_size"] * d_model + layers * (4 * d_model**2 + 3 * d_model * d_ff)
    tokens = told["batch"] * told["context"]
    flops = SHARE[mode] * tokens * (parameters + layers * told["context"] * d_model)
    rate = RATE.get((told["precision"], told["compile"]), 2e14)
    time_s = flops / rate + parameters * (12 / 2e12 if mode in ("optimizer", "step") else 0) + layers * 1e-4
    key = "-".join([size, mode, *map(str, told.values())])
    samples = [time_s * Random(f"{key}{n}").uniform(0.97, 1.06) for n in range(10)]
    record = {
        "id": key, "benchmark": "model", "label": LABELS.get(told["impl"], told["impl"]), "peer": False, "size": size,
        "d_model": d_model, "d_ff": d_ff, "num_layers": layers, "num_heads": heads, "num_parameters": parameters,
        **told, "mode": mode, "attention": told["impl"], "dtype": "bfloat16", "direction": mode, "device": "cuda",
        "outcome": "ok", "reason": None, "comparison": f"{key}#1", "clock": "cuda_event", "compile_s": 3.5,
        "time_s": statistics.median(samples), "mean_s": statistics.fmean(samples), "std_s": statistics.stdev(samples),
        "p20_s": min(samples), "p80_s": max(samples), "min_s": min(samples), "rounds": 10, "samples_s": samples,
        "sm_clock_mhz": 1800, "held_bytes": 12 * parameters,
        "peak_bytes": 4 * parameters + tokens * d_model * layers * 34,
        "tokens": tokens, "tokens_per_s": tokens / time_s, "flops": flops, "flops_per_s": flops / time_s,
        "matmul_ceiling_fraction": flops / time_s / 8e14, "mfu": flops / time_s / 989e12 if flops else None,
        "memory_limit_bytes": None,
    }  # fmt: skip
    if changes.get("outcome", "ok") != "ok" or "time_s" in changes:
        record |= dict.fromkeys(MEASURED)
    return record | changes


def sweep() -> list[dict]:
    """The grid of the source document with cells out of memory, missing and wrong; warm-up, what fits, smoke."""
    records = []
    for size in ("small", "medium", "large", "xl", "2.7b"):
        for context in (128, 256, 512, 1024):
            for precision, compile_ in RATE:
                for mode in SHARE:
                    told = {"context": context, "precision": precision, "compile": compile_}
                    lost = size in ("xl", "2.7b") and context == 1024 and precision == "fp32" and mode != "forward"
                    lost = {"outcome": "oom", "reason": "needs 150 GiB"} if lost else {}
                    records.append(case(size, mode, **told, **lost))
    records = [r for r in records if (r["size"], r["context"], r["compile"]) != ("large", 256, "compiled")]
    index = next(i for i, r in enumerate(records) if r["size"] == "medium" and r["mode"] == "backward")
    records[index] = case("medium", "backward", context=128, precision="fp32", outcome="wrong", reason="dk is off")
    records += warm_up()
    for size in ("small", "medium", "xl"):
        for context in (512, 2048):
            limited = {"section": "fits", "memory_limit_bytes": 16 * 2**30, "context": context}
            over = {"outcome": "oom", "reason": "limit of 16 GiB"} if size == "xl" else {"time_s": None}
            peak = {} if size == "xl" else {"peak_bytes": context * 2**23, "held_bytes": 2**30}
            records.append(case(size, **limited, **over, **peak))
    return [*records, case("tiny", section="smoke")]


def warm_up() -> list[dict]:
    records = []
    for size in ("small", "medium"):
        for context in (128, 1024):
            for steps in (0, 1, 2, 5):
                for mode in ("forward", "train_forward", "backward"):
                    told = {"section": "warmup", "context": context, "warmup_steps": steps, "precision": "fp32"}
                    record = case(size, mode, **told)
                    record["id"] += f"-warm{steps}"
                    record["std_s"] = [0.2, 0.001, 0.0005, 0.0002][(0, 1, 2, 5).index(steps)]
                    records.append(record)
    return records


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The report of the whole synthetic sweep."""
    folder = tmp_path_factory.mktemp("sweep")
    return built(folder / "out", save(folder / "r.json", sweep()))


def table(tmp_path: Path, records: list[dict], name: str, *arguments: str) -> list[dict[str, str]]:
    return cells(built(tmp_path / "out", save(tmp_path / "r.json", records), *arguments), name)


def test_tables_of_the_source_document(swept: dict[str, bytes]) -> None:
    for mode in SHARE:
        for fixed in ("fp32", "bf16", "eager", "compiled"):
            rows = cells(swept, f"{STEM}-{mode}-time-{fixed}-flash_triton")
            assert list(rows[0]) == ["context", "small", "medium", "large", "xl", "2.7b"]
            assert [row["context"] for row in rows] == ["128", "256", "512", "1,024"]
            assert re.fullmatch(r"[\d.,]+ / [\d.,]+", rows[0]["small"])
    rows = cells(swept, f"{STEM}-step-time-eager-flash_triton")
    assert re.fullmatch(r"OOM¹ / [\d.,]+", rows[3]["xl"])
    assert cells(swept, f"{STEM}-step-time-compiled-flash_triton")[1]["large"] == "–"
    assert re.fullmatch(r"[\d.,]+ / –", cells(swept, f"{STEM}-step-time-bf16-flash_triton")[1]["large"])
    assert cells(swept, f"{STEM}-backward-time-eager-flash_triton")[0]["medium"].startswith("wrong¹ / ")
    for metric in ("tokens", "mfu", "fraction", "peak", "memory", "compile"):
        assert cells(swept, f"{STEM}-step-{metric}-bf16-flash_triton")


def test_captions_fix_what_is_constant(swept: dict[str, bytes]) -> None:
    text = swept[f"tables/{STEM}-step-time-bf16-flash_triton.md"].decode()
    for fact in (
        "In each cell: eager / compiled",
        "Whole step; batch 4, context 128 to 1,024",
        "vocabulary 10,000, bf16, eager / compiled, attention FlashAttention-2, Triton",
        "at least 10 rounds",
        "Synthetic GPU; 2 CPU cores, driver 000.00",
        "torch 0.0.0",
        "commit 0123456789, 2000-01-02",
    ):
        assert fact in text
    assert b"out of memory: needs 150 GiB" in swept[f"tables/{STEM}-step-time-fp32-flash_triton.md"]


def test_csv_holds_means_and_deviations_of_every_case(swept: dict[str, bytes]) -> None:
    text = swept[f"tables/{STEM}-step-time-bf16-flash_triton.csv"].decode()
    found = {(row["size"], int(row["context"]), row["compile"]): row for row in csv.DictReader(io.StringIO(text))}
    records = [r for r in sweep() if (r["section"], r["mode"], r["precision"]) == ("sizes", "step", "bf16")]
    assert len(found) == len(records) > 30
    for record in records:
        row = found[record["size"], record["context"], record["compile"]]
        assert all(float(row[field]) == record[field] for field in ("time_s", "mean_s", "std_s"))


def test_warm_up_study(swept: dict[str, bytes]) -> None:
    rows = cells(swept, "synthetic-gpu-model-warmup-spread-fp32-eager-flash_triton")
    assert list(rows[0]) == ["size", "context", "warm-up", "forward (inference)", "forward (training)", "backward"]
    assert [row["warm-up"] for row in rows] == ["0", "1", "2", "5"] * 4
    assert rows[0]["backward"].endswith("± 200") and rows[3]["backward"].endswith("± 0.200")


def test_a_lost_case_of_the_warm_up_study_is_a_word(tmp_path: Path) -> None:
    told = {"section": "warmup", "warmup_steps": 0}
    records = [case("xl", "backward", outcome="oom", reason="too big", **told), case("xl", "forward", **told)]
    rows = table(tmp_path, records, "synthetic-gpu-model-warmup-spread-bf16-eager-flash_triton")
    assert [row["backward"] for row in rows] == ["OOM¹"]
    assert "±" in rows[0]["forward (inference)"]


def test_what_fits_reads_memory_first(swept: dict[str, bytes]) -> None:
    rows = cells(swept, "synthetic-gpu-model-fits-16gib-step-peak-bf16-eager-flash_triton")
    assert [row["small"] for row in rows] == ["4.00", "16.0"]
    assert {row["xl"] for row in rows} == {"OOM¹"}
    rows = cells(swept, "synthetic-gpu-model-fits-16gib-step-memory-bf16-eager-flash_triton")
    assert [row["small"] for row in rows] == ["5.00", "17.0"]
    assert not [name for name in swept if "fits" in name and "time" in name]


def test_speedups_of_cases_sampled_apart_are_ratios_of_medians(swept: dict[str, bytes]) -> None:
    name = f"{STEM}-step-speedup-bf16-compiled-flash_triton"
    pair = [case("small", context=128, compile=way) for way in ("eager", "compiled")]
    expected = pair[0]["time_s"] / pair[1]["time_s"]
    assert cells(swept, name)[0]["small"] == f"{expected:.2f}"
    assert (
        b"Time of eager divided by time of compiled, ratio of medians, not sampled together"
        in (swept[f"tables/{name}.md"])
    )
    rows = cells(swept, f"{STEM}-backward-speedup-fp32-compiled-flash_triton")
    assert rows[0]["medium"] == "no baseline¹" and rows[3]["xl"] == "OOM²" and rows[1]["large"] == "–"


def test_speedups_of_cases_sampled_together_are_medians_of_ratios(tmp_path: Path) -> None:
    ways = ("eager", "compiled")
    records = [case(context=c, compile=way, comparison=f"group {c}") for c in (128, 256) for way in ways]
    records += [case(context=512, compile=way) for way in ways]
    name = f"{STEM}-step-speedup-bf16-compiled-flash_triton"
    rows = table(tmp_path, records, name)
    rounds = zip(records[0]["samples_s"], records[1]["samples_s"], strict=True)
    assert rows[0]["small"] == f"{statistics.median(a / b for a, b in rounds):.2f}"
    assert rows[2]["small"].endswith("¹")
    text = (tmp_path / "out" / "tables" / f"{name}.md").read_text()
    assert "median of rounds sampled side by side" in text
    assert "¹ ratio of medians: not sampled together" in text


def test_attention_rows_side_by_side(tmp_path: Path) -> None:
    records = [case(impl=impl, comparison="all") for impl in LABELS]
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    assert re.fullmatch(r"[\d.]+ / [\d.]+ / [\d.]+", cells(files, f"{STEM}-step-time-bf16-eager")[0]["small"])
    assert "Time of SDPA flash divided" in files[f"tables/{STEM}-step-speedup-bf16-eager.md"].decode()
    again = built(tmp_path / "out", tmp_path / "r.json", "--baseline", "naive")
    assert "Time of naive PyTorch divided" in again[f"tables/{STEM}-step-speedup-bf16-eager.md"].decode()


def beside(size: str, batch: int, **changes: object) -> list[dict]:
    """Our model and Llama in one comparison, Llama a fifth slower and of more memory."""
    told = {"section": "peers", "context": 1024, "batch": batch, "compile": "compiled", "comparison": f"{size} {batch}"}
    ours = case(size, impl="auto", **told)
    theirs = ours | {"id": f"{ours['id']}-llama", "impl": "llama", "label": "Hugging Face Llama", "peer": True}
    theirs |= {"samples_s": [1.2 * x for x in ours["samples_s"]], "tokens_per_s": ours["tokens_per_s"] / 1.2}
    return [ours, theirs | {"time_s": ours["time_s"] * 1.2, "peak_bytes": ours["peak_bytes"] + 2**30} | changes]


def test_ours_beside_a_peer(tmp_path: Path) -> None:
    lost = {"outcome": "oom", "reason": "no room"} | dict.fromkeys(MEASURED)
    records = [*beside("small", 16), *beside("medium", 8), *beside("xl", 4, **lost)]
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    rows = cells(files, "synthetic-gpu-model-peers-step-beside-llama")
    assert [(row["size"], row["batch"]) for row in rows] == [("small", "16"), ("medium", "8"), ("xl", "4")]
    assert [row["speedup, ×"] for row in rows] == ["1.20", "1.20", "²"]
    total = records[0]["held_bytes"] + records[0]["peak_bytes"]
    assert rows[0]["memory, ×"] == f"{total / (total + 2**30):#.3g}"
    assert float(rows[0]["tokens/s"].replace(",", "")) == pytest.approx(records[0]["tokens_per_s"], rel=0.01)
    assert rows[0]["Llama MFU, %"] and rows[2]["Llama tokens/s"] == "OOM¹"
    page = files["index.html"].decode()
    assert "Model: Beside Hugging Face Llama" in page and "median of rounds sampled side by side" in page


def test_a_peer_stands_first_in_any_section(tmp_path: Path) -> None:
    records = [one | {"section": "sizes"} for one in beside("small", 4)]
    files = built(tmp_path / "out", save(tmp_path / "r.json", records))
    assert cells(files, f"{STEM}-step-beside-llama")[0]["speedup, ×"] == "1.20"
    assert cells(files, f"{STEM}-step-speedup-bf16-compiled-auto")[0]["small"] == "1.20"


def fitting(size: str, predicted: float, measured: float | None, limit: float | None) -> dict:
    """A case of what fits; GiB."""
    told = {"section": "fits", "memory_limit_bytes": limit and limit * 2**30, "predicted_bytes": predicted * 2**30}
    if measured is None:
        return case(size, **told, outcome="oom", reason="no room")
    return case(size, **told, held_bytes=2**30, peak_bytes=(measured - 1) * 2**30)


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    records = [fitting("small", 4, 5, 16), fitting("medium", 18, 15, 16), fitting("large", 18, None, 16)]
    files = built(tmp_path / "out", save(tmp_path / "r.json", [*records, fitting("small", 4, 5, None)]))
    rows = cells(files, "synthetic-gpu-model-fits-16gib-step-predicted")
    assert [(row["predicted, GiB"], row["measured, GiB"]) for row in rows] == [
        ("4.00", "5.00"), ("18.0", "15.0"), ("18.0", "OOM¹")
    ]  # fmt: skip
    assert [row["measured / predicted, %"] for row in rows] == ["125", "83.3", ""]
    verdicts = [("fits", "fits"), ("too large", "fits"), ("too large", "too large")]
    assert [(row["predicted"], row["tried"]) for row in rows] == verdicts
    assert b"Room for 16.0 GiB: 2 of 3 cases ended as predicted" in files["index.html"]
    assert b"Room for 128 GiB: 1 of 1 cases" in files["tables/synthetic-gpu-model-fits-step-predicted.md"]
    assert [name for name in files if "fits-16gib-step-time" in name]


def test_elsewhere_nothing_is_asked_to_fit(tmp_path: Path) -> None:
    records = [case(predicted_bytes=2**32), case("medium"), case("small", "forward")]
    rows = table(tmp_path, records, f"{STEM}-step-predicted")
    assert [list(row) for row in rows] == [
        ["size", "batch", "predicted, GiB", "measured, GiB", "measured / predicted, %"]
    ]


def test_batches_are_rows(tmp_path: Path) -> None:
    records = [case("small", batch=16), case("medium", batch=8)]
    rows = table(tmp_path, records, f"{STEM}-step-time-bf16-eager-flash_triton")
    assert [row["batch"] for row in rows] == ["8", "16"]
    assert [row["small"] == "–" for row in rows] == [True, False] == [row["medium"] != "–" for row in rows]


def test_phases_stand_on_one_another(swept: dict[str, bytes], tmp_path: Path) -> None:
    drawing = swept[f"plots/{STEM}-phases-flash_triton-S1024.svg"].decode()
    assert drawing.count("OOM<") == 4  # xl and 2.7b in fp32, eager and compiled
    wanted = [case("small", mode, context=128) for mode in ("train_forward", "backward", "optimizer")]
    total = f"{1e3 * sum(record['time_s'] for record in wanted):.3g}"
    assert f">{total}<" in swept[f"plots/{STEM}-phases-flash_triton-S128.svg"].decode().replace("> ", ">")
    without = built(tmp_path / "out", save(tmp_path / "r.json", wanted[:2]))
    assert not [name for name in without if "phases" in name]


def test_lines_by_context(swept: dict[str, bytes]) -> None:
    assert f"plots/{STEM}-step-mfu-bf16-flash_triton.svg" in swept
    page = swept["index.html"].decode()
    assert "Out of memory: xl eager at 1,024, xl compiled at 1,024, 2.7b eager at 1,024" in page
    assert page.count("<svg") == len([name for name in swept if name.endswith(".svg")])
    for target in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{target}"' in page


@pytest.mark.parametrize(
    "changes",
    [{}, {"mfu": None}, {"outcome": "oom"}, {"outcome": "error", "reason": "a | b"}, {"time_s": None}, {"std_s": 0.0}],
    ids=lambda changes: "-".join(map(str, changes)) or "timed",
)
@pytest.mark.parametrize("section", ["smoke", "warmup", "fits", "new"])
def test_one_cell_is_a_report(tmp_path: Path, section: str, changes: dict) -> None:
    told = {"section": section, "warmup_steps": 0} if section == "warmup" else {"section": section}
    files = built(tmp_path / "out", save(tmp_path / "r.json", [case("tiny", **told, **changes)]))
    stem = f"synthetic-gpu-model-{section}-"
    assert [name for name in files if name.startswith(f"tables/{stem}") and name.endswith(".md")]
    assert cells(files, "synthetic-gpu-model-sizes")[0]["size"] == "tiny"


def test_best_and_summary(swept: dict[str, bytes]) -> None:
    rows = cells(swept, f"{STEM}-best")
    assert [row["size"] for row in rows] == ["small", "medium", "large", "xl", "2.7b"]
    assert {(row["context"], row["precision"], row["compile"]) for row in rows} == {("1,024", "bf16", "compiled")}
    rows = cells(swept, f"{STEM}-summary")
    assert [row[""] for row in rows][-1] == "Whole step" and re.fullmatch(r"1\.\d\d \(19\)", rows[-1]["bf16"])
    counts = cells(swept, "synthetic-gpu-model-outcomes")
    assert sum(int(row["cases"]) for row in counts) == len(sweep())


def test_attention_and_model_on_one_page(tmp_path: Path) -> None:
    attention, model = [attention_case("naive"), attention_case("sdpa_flash")], [case(), case("small", "forward")]
    one, two = save(tmp_path / "1.json", attention), save(tmp_path / "2.json", model, date="2000-01-03")
    files = built(tmp_path / "out", one, two)
    assert built(tmp_path / "other-order", two, one) == files
    assert {len(list(csv.reader(io.StringIO(files["tables/records.csv"].decode()))))} == {5}
    titles = re.findall(r"<h3[^>]*>([^<]+)", files["index.html"].decode())
    assert titles == ["Attention", "Attention: Everyday shapes", "Model", "Model: Sizes by context"]
    alone = {**built(tmp_path / "1", one), **built(tmp_path / "2", two)}
    shared = ("index.html", "tables/records.csv")
    assert {name: files[name] for name in files if name not in shared} == {
        name: alone[name] for name in alone if name not in shared
    }


def test_same_results_same_bytes_without_torch(tmp_path: Path, swept: dict[str, bytes]) -> None:
    records = sweep()
    Random(0).shuffle(records)
    result = save(tmp_path / "r.json", records)
    block = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; from lmsys.reports.__main__ import main; "
    code = f"{block}sys.exit(main([{str(result)!r}, '-o', {str(tmp_path / 'out')!r}]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": "7", "HOME": str(tmp_path)})
    assert done.returncode == 0
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert {str(file.relative_to(tmp_path / "out")): file.read_bytes() for file in files} == swept


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"context": None}, "'context'"), ({"size": None}, "'size'"), ({"section": "warmup"}, "'warmup_steps'")],
)
def test_a_record_that_is_no_case_of_a_model_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, said: str
) -> None:
    result = save(tmp_path / "r.json", [case() | changes])
    refused([str(result), "-o", str(tmp_path / "out")], said, capsys)
