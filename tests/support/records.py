"""Made-up records of every benchmark, by the fields that it declares, and reports built of them. No result is real.

Tests of reports make records by `record` or `of_everything`, and reports by `report`, or by `save` and `built`. `cells`
and `numbers` read tables of such a report. A row is an implementation; an axis is a parameter of a case, such as
"dtype". A new benchmark is added to ALL, and the axes of its cases to ASKED.
"""

import csv
import io
import json
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from benchmarks.bench_anatomy import Anatomy
from benchmarks.bench_attention import Attention
from benchmarks.bench_collectives import Collectives
from benchmarks.bench_data_parallel import DataParallel
from benchmarks.bench_loss import Loss
from benchmarks.bench_model import Model
from benchmarks.bench_precision import Precision
from benchmarks.bench_steps import TrainingSteps
from benchmarks.bench_tokenizer import Tokenizers
from benchmarks.bench_training import Training
from lmsys.bench.fields import COMMON, Field, declared
from lmsys.bench.record import summarize
from lmsys.config import SIZES
from lmsys.registry import Traits
from lmsys.reports import plots
from lmsys.reports.__main__ import main
from lmsys.reports.page import MANIFEST

Record = dict[str, Any]
EVERY_PLOT, NO_PLOT = "", r"(?!)"  # for `drawn` of `built`: patterns that match every name, or none
ALL = (Attention, Model, Loss, Anatomy, Precision, Collectives, DataParallel, TrainingSteps, Tokenizers, Training)
BENCHMARKS = {cls.name: cls for cls in ALL}
MACHINE = {
    "name": "Synthetic GPU", "device": "cuda", "cores": 2, "memory_bytes": 2**37, "gpu": "Synthetic GPU",
    "gpu_count": 1, "capability": "9.0", "driver": "000.00", "cuda": "0.0", "python": "3.12.0",
    "torch": "0.0.0", "triton": "0.0.0", "platform": "test", "commit": "0123456789abcdef", "dirty": False,
    "date": "2000-01-02T03:04:05+00:00", "command": "pytest", "seed": 0, "sweep": "test",
    "ceilings": {"matmul_flops_per_s": {"bfloat16": 8e14, "float32": 4e14}, "copy_bytes_per_s": 4e12},
}  # fmt: skip
GIB = 2**30
MODEL = {"size": "small", "context": 512, "batch": 4, "precision": "bf16", "compile": "eager", "vocab_size": 10_000}
KEPT = {"checkpoint": "none", "residual": "wide"}  # what a model's blocks keep for their backward
ASKED: dict[str, Record] = {  # {benchmark: the axes of a case, unless a test gives others}
    "attention": {
        "batch": 2, "heads": 8, "kv_heads": 8, "queries": 1024, "keys": 1024, "head_dim": 64,
        "dtype": "bfloat16", "causal": True, "direction": "fwd",
    },
    "model": {**MODEL, **KEPT, "mode": "step"},
    "anatomy": {**MODEL, **KEPT, "mode": "step", "section": "anatomy"},
    "loss": {"tokens": 16_384, "d_model": 1024, "vocab_size": 10_000, "precision": "bf16"},
    "precision": {"section": "accumulation", "addend": 0.01, "times": 1000},
    "collectives": {"megabytes": 1, "world_size": 2, "backend": "nccl"},
    "data_parallel": {
        **MODEL, "world_size": 2, "asked_bucket_mb": None, "comm_dtype": "float32", "sharded_optimizer": False,
        "backend": "nccl", "num_nodes": 1, "bucket_mb": None, "optimizer": "adamw", **KEPT,
    },
    "steps": {
        **MODEL, **KEPT, "world_size": 2, "backend": "nccl", "num_nodes": 1, "steps": 20, "section": "8b",
        "optimizer": "adamw",
    },
    "tokenizer": {"task": "encode", "vocab_size": 10_000, "text_bytes": 30_000_000, "processes": 2},
    "training": {
        **MODEL, "attention": "naive", "num_ranks": 2, "world_size": 2, "backend": "nccl", "num_nodes": 1,
        "bucket_mb": None, "epochs": 3, "train_tokens": 4096, "val_tokens": 2048, "corpus": "stdlib",
    },
}  # fmt: skip
OF_ROWS = {  # axes in which the rows of one comparison, which were sampled together, may differ
    "impl", "label", "peer", "compile", "strategy", "row", "attention", "attention_label", "attention_peer",
    "strategy_peer", "asked_bucket_mb", "bucket_mb", "comm_dtype", "sharded_optimizer", "world_size", "megabytes",
    "processes", "device", "memory_limit_bytes", "checkpoint", "residual", "model", "optimizer",
}  # fmt: skip
KIND_OF = {  # {benchmark: the kind of its rows, if it is not the benchmark's name}
    "model": "attention", "anatomy": "attention", "training": "strategy", "data_parallel": "strategy",
    "collectives": "operation", "precision": "none", "steps": "strategy",
}  # fmt: skip
PHASES = {"forward": (3, 2), "backward": (4, 1), "optimizer": (2, 1)}  # (peak, live) memory in GiB


@cache
def fields_of(benchmark: str) -> dict[str, Field]:
    """The fields of a benchmark's records, by name."""
    return declared(COMMON, BENCHMARKS[benchmark].fields)


@cache
def rows_of(kind: str) -> dict[str, Record]:
    """{name: row} of all rows of a kind, as a result file has them, with the traits that a report reads."""
    table = {name: row for cls in ALL for name, row in cls.tables.get(kind, {}).items()}
    return {name: row.to_json() | Traits.of(row).changed for name, row in table.items()}


def record(benchmark: str, impl: str, seconds: float = 1e-3, outcome: str = "ok", **values: Any) -> Record:
    """The record of a case of row `impl` that took `seconds`.

    values  fields that a test sets; other axes are as in ASKED, and other metrics are made-up numbers

    Rows of one comparison have the same noise in their samples, so that their ratios are exact.
    """
    fields = fields_of(benchmark)
    kind = KIND_OF.get(benchmark, benchmark)
    strategy = impl.partition("-")[0]
    row = rows_of(kind).get(strategy, {})
    made: Record = {"benchmark": benchmark, "section": "default", "impl": impl, "device": "cuda"}
    made |= {"label": row.get("label", impl), "peer": row.get("peer", False), "memory_limit_bytes": None}
    made |= ASKED[benchmark] | ({"strategy": strategy, "row": impl} if kind == "strategy" else {})
    made |= SIZES.get(values.get("size", made.get("size")), {}) if "d_ff" in fields else {}
    made |= {name: value for name, value in values.items() if fields[name].role == "axis"}
    assert values.keys() <= fields.keys(), values.keys() - fields.keys()
    # `comparison` names the axes that rows of one comparison share; the record's id also has those of the row itself.
    shared = [f"{name}{made.get(name)}" for name in fields if fields[name].role == "axis" and name not in OF_ROWS]
    own = [str(made[name]) for name in sorted(OF_ROWS & made.keys() - {"label", "peer", "device"})]
    made |= {"comparison": "-".join(shared), "id": values.get("id", f"{made['section']}-" + "-".join([*shared, *own]))}
    made |= {"outcome": outcome, "reason": None, "clock": "cuda_event", "num_parameters": 1000 * made.get("d_ff", 1)}
    if outcome == "ok":
        noise = Random(made["comparison"])
        samples = [seconds * noise.uniform(0.97, 1.06) for _ in range(10)]
        made |= summarize(samples) | {"samples_s": samples, "sm_clock_mhz": 1800.0, **MEASURED.get(benchmark, {})}
        numbers = [field for field in fields.values() if field.role == "metric" or field.unit in ("s", "B", "FLOP")]
        for field in sorted(numbers, key=lambda field: field.of is not None):  # computed fields last
            if field.name not in made:
                made[field.name] = field.of(made) if field.of else _some_number(field, made)
    made |= values
    return {name: made.get(name) for name in fields}


def _some_number(field: Field, record: Record) -> Any:
    """A made-up value of a metric in its unit, the same in every run. A new unit is a line in `scales`."""
    number = Random(f"{record['id']}{field.name}").uniform(0.1, 0.9)
    scales = {"B": 8 * GIB, "FLOP": 1e12, "FLOP/s": 1e15, "B/s": 1e11, "tokens/s": 1e5, "nats": 1e-2}
    scale = scales.get(field.unit, 1.0)
    return int(scale * number) if field.unit == "B" else scale * number


def part(name: str, total_s: float, backward_s: float = 0.0, **kinds: float) -> Record:
    """A part of a model's step in an anatomy's record. `kinds`: {kind of kernel: seconds in it}."""
    return {"name": name, "total_s": total_s, "backward_s": backward_s, "count": 1.0, "kinds": kinds}


KINDS = ("matmul", "attention", "elementwise", "reduction", "copy", "communication", "other")
MEASURED: dict[str, Record] = {  # {benchmark: metrics and lists of a timed case, unless a test gives others}
    "anatomy": {
        **{f"{kind}_share": share for kind, share in zip(KINDS, (0.5, 0.125, 0.25, 0.125, 0.0, 0.0, 0.0), strict=True)},
        "kernels": [{"name": "nvjet<a|b>", "kind": "matmul", "total_s": 0.024, "count": 84.0}],
        "parts": [part("forward", 0.02, 0.04), part("scores", 4e-3, 8e-3, matmul=1e-3), part("softmax", 2e-3, 3e-3)],
        "phases": [{"name": n, "peak_bytes": peak * GIB, "live_bytes": GIB} for n, (peak, _) in PHASES.items()],
        "timeline": [{"name": n, "points": [[0.01, 0], [0.02, p * GIB]]} for n, (p, _) in PHASES.items()],
        "allocations": [{"bytes": 2**20, "count": 3, "at_peak": 2, "where": "loss.py:9", "function": "loss"}],
    },
    "data_parallel": {"timeline": [["computation", 0.0, 0.08], ["communication", 0.02, 0.1]], "bucket_mb": 24.7},
    "training": {
        "curve_steps": [1, 3, 5], "curve_losses": [9.0, 8.0, 7.5], "curve_differences": [0.0, 1e-3, -2e-3],
        "curve_budget": 0.03,
    },
}  # fmt: skip


def sums(dtype: str, result: float) -> list[Record]:
    """Sums in a record of "precision" whose right result is 10: in float32, and in `dtype` with this result."""
    exact = {"accumulator": "float32", "addend": "float32", "result": 10.0001, "error": 1e-4}
    return [exact, {"accumulator": dtype, "addend": dtype, "result": result, "error": result - 10}]


def of_everything() -> list[Record]:
    """Some cases of every benchmark, with rows to compare and each outcome."""
    lost = {"outcome": "oom", "reason": "needs 64 GiB"}
    attention = [
        record("attention", impl, seconds * length, queries=length, keys=length, direction=direction)
        for impl, seconds in (("naive", 4e-6), ("flash_triton", 1e-6), ("sdpa_flash", 2e-6))
        for length in (512, 1024)
        for direction in ("fwd", "bwd")
    ]
    attention.append(record("attention", "naive", queries=65536, keys=65536, **lost))
    attention.append(record("attention", "mine", outcome="wrong", reason="dk is off", error_ratio=37.2))
    models = [
        record("model", "auto", seconds, mode=mode, compile=way, context=context, label="auto: SDPA flash")
        for mode, seconds in (("train_forward", 0.1), ("backward", 0.2), ("optimizer", 0.05), ("step", 0.35))
        for way in ("eager", "compiled")
        for context in (512, 1024)
    ]
    losses = [
        record("loss", impl, vocab_size=size) for impl in ("chunked", "eager", "compiled") for size in (10_000, 128_000)
    ]
    opened = [record("anatomy", impl, mode=mode) for impl in ("naive", "flash_triton") for mode in ("forward", "step")]
    studies = [record("precision", dtype, sums=sums(dtype, 9.95)) for dtype in ("float16", "bfloat16")]
    tensors = [{"name": "loss", "dtype": "float32"}]
    studies += [record("precision", dtype, section="autocast", tensors=tensors) for dtype in ("float16", "bfloat16")]
    parallel = [
        record("data_parallel", impl, seconds, batch=batch)
        for impl, seconds in (("naive", 0.14), ("bucketed-auto", 0.11), ("torch_ddp_tuned", 0.12))
        for batch in (2, 4)
    ]
    parallel += [record("data_parallel", "none", 0.1, world_size=1), record("data_parallel", "flat", **lost)]
    trained = [
        record("training", strategy, seconds, attention=attention)
        for strategy, seconds in (("none", 1.9), ("naive", 1.2), ("bucketed", 1.0))
        for attention in ("naive", "sdpa_flash")
    ]
    words = [record("tokenizer", impl, task=task) for impl in ("lmsys", "huggingface") for task in ("train", "encode")]
    sent = [record("collectives", "all_reduce", 1e-5 * mb, megabytes=mb, bytes=mb * 10**6) for mb in (1, 10, 100)]
    return [*attention, *models, *losses, *opened, *studies, *sent, *parallel, *words, *trained]


def save(path: Path, records: list[Record], **machine: Any) -> Path:
    """Writes a result file with these records, and returns its path. `machine`: changes of MACHINE."""
    path.write_text(json.dumps({"lmsys": content_of(records, **machine)}))
    return path


def content_of(records: list[Record], **machine: Any) -> Record:
    """The part "lmsys" of a file that `save` writes."""
    names = {record["benchmark"] for record in records} & BENCHMARKS.keys()
    fields = {name: [field.to_json() for field in fields_of(name).values()] for name in sorted(names)}
    rows = {kind: list(rows_of(kind).values()) for kind in ("attention", "strategy", "loss", "tokenizer", "operation")}
    layouts = {name: BENCHMARKS[name].layout for name in sorted(names)}
    head = {"fields": fields, "layouts": layouts, "rows": rows}
    return {"schema": 2, "machine": MACHINE | machine, **head, "records": records}


def built(out: Path, *arguments: object, drawn: str = NO_PLOT) -> dict[str, bytes]:
    """Builds a report in the folder `out`, and returns its files but the manifest, {path: content}.

    arguments  the command's, such as result files
    drawn      a pattern: only plots with matching names are drawn, since drawing takes most of a report's time. Others
               are empty
    """
    to_svg = plots.to_svg

    def svg_or_empty(axes: Any, name: str, title: str) -> str:
        return to_svg(axes, name, title) if re.search(drawn, name) else '<svg width="1pt" height="1pt"></svg>'

    with (
        mock.patch.object(plots, "to_svg", svg_or_empty),
        mock.patch("os.fsync"),
    ):  # a disk may take longer than all else
        assert main([*map(str, arguments), "-o", str(out)]) == 0
    files = [file for file in sorted(out.rglob("*")) if file.is_file() and file.name != MANIFEST]
    return {file.relative_to(out).as_posix(): file.read_bytes() for file in files}


def report(
    folder: Path, records: list[Record], *arguments: str, drawn: str = NO_PLOT, **machine: Any
) -> dict[str, bytes]:
    """The files of a report of these records, built in a folder, which is made if there is none."""
    folder.mkdir(exist_ok=True)
    return built(folder / "out", save(folder / "r.json", records, **machine), *arguments, drawn=drawn)


def cells(files: dict[str, bytes], name: str) -> list[dict[str, str]]:
    """A Markdown table in a report on MACHINE: for each row, {head of a column: cell}."""
    text = files[f"tables/synthetic-gpu-{name}.md"].decode().replace("\\|", "¦").replace("\N{NO-BREAK SPACE}", " ")
    text = re.sub(r"\\([\\`*<\[])", r"\1", text)  # as a reader of Markdown sees it
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [dict(zip(head, row, strict=True)) for row in rows]


def numbers(files: dict[str, bytes], name: str) -> list[dict[str, str]]:
    """The CSV file of such a table: for each row, {head of a column: value}."""
    return list(csv.DictReader(io.StringIO(files[f"tables/synthetic-gpu-{name}.csv"].decode())))


NOT, ONCE, TWICE = "not: ", "once: ", "twice: "  # begin lines that a file must have so often; others, once or more
TIMES = {NOT: 0, ONCE: 1, TWICE: 2}


def hold_shown(files: dict[str, bytes], tables: dict[str, list[dict[str, Any]]], texts: dict[str, str]) -> None:
    """AssertionError unless each table has these rows, of which some cells are given, and each file these lines.

    A cell None is of a column that the table must not have. Without rows there must be no file of this name.
    """
    for name, rows in tables.items():
        assert rows or not [file for file in files if name in file], name
        for row, expected in zip(cells(files, name) if rows else (), rows, strict=True):
            assert {head: row.get(head) for head in expected} == expected, (name, row)
    for name, lines in texts.items():
        for line in lines.splitlines() or ("",):
            prefix = next((prefix for prefix in TIMES if line.startswith(prefix)), "")
            count = files[name].decode().count(line.removeprefix(prefix))
            assert count == TIMES.get(prefix, max(count, 1)), (name, line, count)
