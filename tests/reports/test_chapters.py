"""The chapters of the report, as benchmarks' layouts declare them: their tables, and numbers that only they compute.

Each test makes up records (tests/support/records.py), builds a report and reads its tables by `cells` or `numbers`. The
fixtures `attention` and `models` are such reports. A new table of a layout has an entry in SHOWN, or a test here.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.layouts import KEPT
from lmsys import checkpointing
from lmsys.reports.page import MOST_OPEN
from tests.support.records import GIB, NOT, Record, cells, hold_shown, numbers, part, record, report, sums

ROWS = {"naive": 6e-3, "naive_compiled": 4e-3, "flash_triton": 1e-3, "flash_triton_torch_bwd": 2e-3, "sdpa_flash": 3e-3}


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A report with a grid of each kind: both masks at 16k tokens, head dimensions by lengths, and tiers."""
    records = []
    for causal in (True, False):
        for dim, length in ((64, 1024), (64, 4096), (128, 1024), (128, 4096)):
            shape = {"batch": 16384 // length, "heads": 2048 // dim, "kv_heads": 2048 // dim, "head_dim": dim}
            shape |= {"queries": length, "keys": length, "causal": causal, "section": "tokens16k"}
            records += [record("attention", impl, seconds, **shape) for impl, seconds in ROWS.items()]
            records.append(record("attention", "flex", outcome="unsupported", **shape))
    for dim in (16, 64):
        for length in (512, 65536):
            axes = {"section": "flash", "head_dim": dim, "queries": length, "keys": length, "direction": "fwdbwd"}
            lost = {"outcome": "oom", "reason": "needs 64 GiB"} if length == 65536 else {}
            records.append(record("attention", "naive", **axes, **lost))
            records += [record("attention", impl, **axes) for impl in ("flash_triton_torch_bwd", "flash_triton")]
    for q, k in ((1024, 512), (128, 64), (256, 128)):
        records += [record("attention", impl, section="tiers", queries=q, keys=k) for impl in ("naive", "sdpa_flash")]
    return report(tmp_path_factory.mktemp("attention"), records)


def test_all_cells_of_both_masks_stand_in_one_table(attention: dict[str, bytes]) -> None:
    name = "tokens16k-bfloat16-fwd-tflops"
    rows = cells(attention, name)
    assert list(rows[0])[:3] == ["mask", "D", "S"] and "flex" not in rows[0], "flex was never timed"
    assert [row["mask"] for row in rows] == ["causal"] * 4 + ["not causal"] * 4
    caption = attention[f"tables/synthetic-gpu-{name}.md"].decode()
    assert "B·S = 16,384, H·D = 2,048" in caption and "S 1,024 to 4,096" in caption
    drawn = {path.removeprefix("plots/synthetic-gpu-tokens16k-bfloat16-causal-fwd-") for path in attention}
    assert {f"{what}-D{dim}.svg" for what in ("time", "tflops", "peak") for dim in (64, 128)} <= drawn


def test_rows_stand_side_by_side_by_head_dimension(attention: dict[str, bytes]) -> None:
    rows = cells(attention, "flash-bfloat16-causal-fwdbwd-time-by-dim")
    assert [row["D"] for row in rows] == ["16", "64"] and list(rows[0])[1:] == ["S 512", "S 65,536"]
    assert re.fullmatch(r"OOM¹ / [\d.,]+ / [\d.,]+", rows[0]["S 65,536"])


def test_tiers_are_in_order_of_length(attention: dict[str, bytes]) -> None:
    rows = cells(attention, "tiers-bfloat16-causal-fwd-time")
    assert [row["Q×K"] for row in rows] == ["128×64", "256×128", "1,024×512"]


def test_key_columns_are_in_sort_order(attention: dict[str, bytes]) -> None:
    """Lines of every table are sorted by their key columns, from left to right."""
    for name in (path[21:-3] for path in attention if re.search(r"-(time|tflops|peak|saved|error)\.md$", path)):
        table = cells(attention, name)
        heads = [head for head in table[0] if head in ("mask", "D", "H", "S", "B", "Q×K")]
        texts = [[row[head].replace(",", "") for head in heads] for row in table]
        keys = [[[int(n) for n in re.findall(r"\d+", text)] or text for text in row] for row in texts]
        assert keys == sorted(keys) and len({str(key) for key in keys}) == len(keys), name


def test_the_summary_has_a_row_for_each_implementation_with_a_value(attention: dict[str, bytes]) -> None:
    rows = {row[""]: row["Forward, bfloat16, causal"] for row in cells(attention, "tokens16k-summary")}
    assert rows["sdpa_flash"] == "1.00 (4)" and rows["naive"] == "0.500 (4)" and "flex" not in rows


MODES = {"forward": 0.02, "train_forward": 0.1, "backward": 0.2, "optimizer": 0.05, "step": 0.4}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A report of models: sizes by contexts, with an "oom" and a missing case."""
    records = []
    for size, scale in (("small", 1), ("xl", 10)):
        for context in (128, 1024):
            for precision, compile_, share in (
                ("fp32", "eager", 1.0),
                ("fp32", "compiled", 0.8),
                ("bf16", "eager", 0.5),
            ):
                axes = {"section": "sizes", "size": size, "context": context}
                axes |= {"precision": precision, "compile": compile_}
                is_lost = (size, context, precision) == ("xl", 1024, "fp32")
                lost = {"outcome": "oom", "reason": "needs 150 GiB"} if is_lost else {}
                records += [
                    record("model", "naive", seconds * scale * share, mode=mode, **axes, **lost)
                    for mode, seconds in MODES.items()
                ]
    records = [
        case for case in records if (case["size"], case["context"], case["precision"]) != ("small", 1024, "bf16")
    ]
    return report(tmp_path_factory.mktemp("models"), records, drawn="phases-naive-(small-S128|xl-S1024)-B4")


def test_models_are_contexts_by_sizes(models: dict[str, bytes]) -> None:
    for mode in MODES:
        rows = cells(models, f"model-sizes-{mode}-time-fp32-naive")
        assert list(rows[0]) == ["context", "small", "xl"] and [row["context"] for row in rows] == ["128", "1,024"]
        assert re.fullmatch(r"[\d.,]+ / [\d.,]+", rows[0]["small"]) and rows[1]["xl"] == "OOM¹ / OOM¹"
    assert cells(models, "model-sizes-step-time-eager-naive")[1]["small"].endswith(" / –")
    assert cells(models, "model-sizes-step-speedup-over-eager-fp32-compiled-naive")[0]["small"] == "1.25"
    assert cells(models, "model-sizes-summary")[-1]["fp32"] == "1.25 (3)"
    assert [row["size"] for row in cells(models, "model-sizes-best")] == ["small", "xl"]
    assert [row["parameters"] for row in cells(models, "model-sizes")] == ["3,072,000", "6,400,000"]
    outcomes = cells(models, "model-outcomes")
    assert sum(int(row["cases"]) for row in outcomes) == 5 * 11 and outcomes[0]["out of memory"] == "5"


def test_what_is_kept_and_the_stream_stand_side_by_side_in_several_shapes(tmp_path: Path) -> None:
    assert ["defaulted", "checkpoint", checkpointing.LEVELS[0], [*checkpointing.LEVELS[1:]]] in KEPT
    files = report(tmp_path, by_way(128) + by_way(256))
    start, both = "model-levels-step-{}-bf16-compiled", r"[\d.]+ / [\d.]+"
    kept = "attention-12-matmuls-22"
    for fixed in ("narrow", "wide", kept, "none"):
        assert re.fullmatch(both, cells(files, f"{start.format('time')}-{fixed}-naive")[0]["small"])
    for word, fixed, speedup in (
        ("over-none", f"{kept}-wide", "4.00"),
        ("over-none", f"{kept}-narrow", "4.00"),
        ("over-wide", f"{kept}-narrow", "2.00"),
        ("over-wide", "none-narrow", "2.00"),
    ):
        assert cells(files, f"{start.format(f'speedup-{word}')}-{fixed}-naive")[0]["small"] == speedup
    alone = report(tmp_path / "alone", by_way(128))
    assert not [name for name in alone if "model-levels-step-time" in name]


WAYS = [(kept, stream) for kept in ("none", "attention*12,matmuls*22") for stream in ("wide", "narrow")]


def by_way(context: int) -> list[dict[str, Any]]:
    axes = {"section": "levels", "mode": "step", "compile": "compiled", "context": context}
    records = [
        record("model", "naive", seconds, checkpoint=kept, residual=stream, **axes)
        for seconds, (kept, stream) in zip((8e-3, 4e-3, 2e-3, 1e-3), WAYS, strict=True)
    ]
    del records[0]["checkpoint"], records[0]["residual"]  # older files lack these fields
    return records


STEM = "training-matrix-small-S512B4-bf16-W2-T4096x3"
SPEEDS = {"none": 1.9, "naive": 1.2, "bucketed": 1.0, "torch_ddp_tuned": 0.9}


def training(attention: str, strategy: str, **values: object) -> dict:
    values = {"section": "matrix", "attention": attention, "world_size": 1 if strategy == "none" else 2, **values}
    return record("training", strategy, SPEEDS[strategy] * (2 if attention == "naive" else 1), **values)


def bits(alone: dict[str, float] | None = None, **differ: float) -> dict[str, Any]:
    """Fields on the bits of a record: largest differences between calls, and between an element alone and in a batch.

    alone  None: no element was tried alone
    """
    elements = [] if alone is None else [0, 1]
    return {"calls": 3, "differ": differ, "elements": elements, "alone": alone or {}, "failure": None}


def repeated(impl: str, direction: str, *of_lengths: dict[str, Any] | None) -> list[Record]:
    """Records of a row at two lengths with what each says of its bits."""
    return [
        record("attention", impl, direction=direction, queries=length, keys=length, same_bits=same_bits)
        for length, same_bits in zip((512, 1024), of_lengths, strict=True)
    ]


def fits(size: str, predicted: int, **measured: Any) -> Record:
    """The record of a model of which so many GiB were predicted, where there are 16."""
    limits = {"memory_limit_bytes": 16 * GIB, "predicted_bytes": predicted * GIB}
    return record("model", "naive", section="fits", size=size, **limits, **measured)


def large(name: str, seconds: float = 1.0, **axes: Any) -> Record:
    """The record of a step of a model of 8 billion parameters."""
    shared = {"size": "8b", "context": 32_768, "batch": 1, "compile": "compiled", "residual": "narrow"}
    return record("steps", name, seconds, losses=[12.0, 11.0, 10.0], **shared | axes)


EVERY_SIZE = {
    f"{way}{name}_bytes": GIB for way in ("", "predicted_") for name in ("parameters", "gradients", "optimizer")
}
OPENED = EVERY_SIZE | {
    "activations_bytes": 2 * GIB, "predicted_activations_bytes": 1.5 * GIB, "held_bytes": GIB, "time_s": 0.05,
    "kernel_s": 0.048, "profiled_s": 0.1,
    "parts": [part("forward", 0.02, 0.04), part("scores", 4e-3, 8e-3, matmul=1e-3), part("softmax", 2e-3, 3e-3)],
}  # fmt: skip
PARTS = "anatomy-small-S512B4-bf16"
PEERS = {"section": "peers", "context": 1024, "size": "small", "batch": 16}
LLAMA = PEERS | {"label": "Hugging Face Llama", "peer": True}
LOST_BITS = bits() | {"calls": 0, "failure": "no room"}
SHARES = {"mfu": 0.5, "matmul_ceiling_fraction": 0.625, "sustained_ceiling_fraction": 0.75}
STRATEGIES = {
    "none": 1.0, "naive": 1.4, "bucketed-25MiB": 1.12, "bucketed-auto": 1.1, "zero1": 1.15, "fsdp": 1.3,
    "torch_ddp_tuned": 1.2, "torch_zero1": 1.5, "torch_fsdp2": 1.35,
}  # fmt: skip
PARALLEL, WAY_TEXTS = "data-parallel-sizes-small-S512-bf16", ("", ", blocks compiled", ", as one CUDA graph")
OVER_TORCHS = {  # ratios of STRATEGIES
    "bucketed / torch_ddp_tuned": "1.09",
    "bucketed / naive": "1.27",
    "zero1 / torch_zero1": "1.30",
    "fsdp / torch_fsdp2": "1.04",
}
MEANS_OVER_TORCHS = {pair: f"{ratio} (2)" for pair, ratio in OVER_TORCHS.items()}
STEPS = [  # of a batch of 2 on two ranks
    "none", "naive", "bucketed, 25 MiB", "bucketed, auto (25 MiB)", "zero1", "fsdp", "torch_ddp_tuned", "torch_zero1",
    "torch_fsdp2",
]  # fmt: skip
BUSY = "other programs took half of the CPU"
SENDS_LESS = {"strategy": "bucketed", "comm_dtype": "float16"}
BESIDE = {"section": "peers", "context": 1024, "compile": "compiled"}
PEAKS = "held", "forward", "backward", "optimizer"
PREDICTED = "measured, GiB", "predicted, GiB", "measured / predicted, %", "on paper", "tried"
RATIOS = "MFU, %", "Short ceiling, %", "Sustained ceiling, %"
SHOWN: dict[str, tuple[list[Record], dict[str, list[dict[str, Any]]], dict[str, str]]] = {
    # {law: (records, the rows of each of these tables with some of their cells, lines of text that files have)}
    "what is kept and the stream are one table of a single shape": (
        by_way(128),
        {
            "model-levels-step-all": [
                {"checkpoint": kept, "residual": stream, "Speedup over none, ×": "1.00" if kept == "none" else "4.00"}
                for kept, stream in WAYS
            ]
        },
        {},
    ),
    "all steps stand in one table of shares": (
        [
            record("steps", "fsdp-Ca", 4.0, size="8b", num_parameters=10**10, checkpoint="attention", **SHARES),
            record(
                "data_parallel", "naive", 2e-3, num_parameters=10**8, **SHARES | {"sustained_ceiling_fraction": None}
            ),
            record("model", "naive", 1e-3, residual="narrow", num_parameters=10**8, **SHARES | {"mfu": 0.25}),
            record("model", "naive", mode="backward", num_parameters=10**8, **SHARES),
            record("model", "flex", outcome="oom", num_parameters=10**8),
            record("attention", "naive"),
        ],
        {
            "mfu": [
                {"in": told, "row": row, "residual": stream, "checkpoint": kept}
                | dict(zip(RATIOS, ratios, strict=True))
                for told, row, stream, kept, ratios in (
                    ("model, default", "naive", "narrow", "none", ("25.0", "62.5", "75.0")),
                    ("data parallel, default", "naive", "wide", "none", ("50.0", "62.5", "")),
                    ("steps, 8b", "fsdp-Ca", "wide", "attention", ("50.0", "62.5", "75.0")),
                )
            ]
        },
        {"tables/synthetic-gpu-mfu.md": "All: "},
    ),
    "what holds two strategies together is a table": (
        [
            record("data_parallel", "naive", held_by={"fsdp-Cw": "bits", "torch_ddp": "tolerance"}),
            record("data_parallel", "fsdp-Cw", held_by={"naive": "bits", "torch_ddp": "unknown"}, checkpoint="whole"),
        ],
        {
            "data-parallel-default-small-S512-bf16-pairs": [
                {"strategy": "naive", "torch_ddp": "tolerance", "fsdp-Cw": "the same bits"},
                {"strategy": "fsdp, whole", "torch_ddp": "not known", "fsdp-Cw": "itself", "naive": "the same bits"},
            ]
        },
        {},
    ),
    "each way of our model stands beside the fastest of a peer's, which does not have all of our ways": (
        [
            *(record("model", "auto", 0.1, compile=way, **PEERS) for way in ("compiled", "graphed", "fused")),
            record("model", "llama", 0.2, compile="compiled", **LLAMA),
            record("model", "llama", 0.15, compile="graphed", **LLAMA),
            record("model", "llama", compile="fused", outcome="unsupported", reason="ours alone", **LLAMA),
        ],
        {
            "model-peers-step-beside-llama": [
                {"compile": way, "Llama run as": "graphed", "speedup, ×": "1.50"}
                for way in ("compiled", "graphed", "fused")
            ],
            "model-peers-step-all": [
                {"attention": name, "compile": way}
                for name, way in (
                    ("auto", "compiled"),
                    ("llama", "compiled"),
                    ("auto", "graphed"),
                    ("llama", "graphed"),
                    ("auto", "fused"),
                )
            ],
        },
        {},
    ),
    "the precision study is two tables": (
        [
            *(record("precision", name, sums=sums(name, x)) for name, x in (("bfloat16", 4), ("float16", 9.95))),
            *(
                record("precision", name, section="autocast", tensors=[{"name": "loss", "dtype": "float32"}])
                for name in ("bfloat16", "float16")
            ),
        ],
        {
            "precision-accumulation": [
                {"sum": name, "result": result}
                for name, result in (("float32", "10.00010"), ("float16", "9.95000"), ("bfloat16", "4.00000"))
            ],
            "precision-autocast": [{"tensor": "loss", "float16": "float32", "bfloat16": "float32"}],
        },
        {},
    ),
    "the loss stands beside all logits at once": (
        [
            record("loss", impl, seconds, vocab_size=size, peak_bytes=peak)
            for size in (128_000, 10_000)
            for impl, seconds, peak in (
                ("chunked", 1e-3, GIB),
                ("eager", 2e-3, 10 * GIB),
                ("compiled", 1.2e-3, 4 * GIB),
            )
        ]
        + [
            record("loss", "chunked", vocab_size=200_000),
            record("loss", "eager", vocab_size=200_000, outcome="oom"),
        ],
        {
            "loss-default-bf16-N16384-M1024": [
                {
                    "vocabulary": "10,000",
                    "implementation": "chunked",
                    "Speedup over compiled, ×": "1.20",
                    "Speedup over eager, ×": "2.00",
                    "peak, share of compiled, %": "25.0",
                    "peak, share of eager, %": "10.0",
                },
                {"vocabulary": "10,000", "implementation": "eager"},
                {"vocabulary": "10,000", "implementation": "compiled"},
                *[{"vocabulary": "128,000"}] * 3,
                {"vocabulary": "200,000", "implementation": "chunked"},
                {"vocabulary": "200,000", "implementation": "eager", "Time, ms": "OOM¹"},
            ]
        },
        {},
    ),
    "the warm-up study is means and deviations": (
        [
            record("model", "naive", mode=mode, mean_s=0.1, std_s=0.01, section="warmup", warmup_steps=steps)
            for steps in (0, 5, 1)
            for mode in ("forward", "backward")
        ],
        {"model-warmup-spread-bf16-eager-naive": [{"warm-up": n, "Backward": "100 ± 10.0"} for n in ("0", "1", "5")]},
        {
            "tables/synthetic-gpu-model-warmup-spread-bf16-eager-naive.md": (
                "| size | context | warm-up | Forward (inference) | Backward |"
            )
        },
    ),
    "what was predicted stands beside what was measured": (
        [
            fits("small", 4, total_bytes=5 * GIB, held_bytes=GIB, peak_bytes=4 * GIB),
            fits("medium", 18, total_bytes=15 * GIB, held_bytes=GIB, peak_bytes=14 * GIB),
            fits("large", 18, outcome="oom"),
        ],
        {
            "model-fits-16gib-step-predicted": [
                dict(zip(PREDICTED, row, strict=True))
                for row in (
                    ("5.00", "4.00", "125", "fits", "fits"),
                    ("15.0", "18.0", "83.3", "too large", "fits"),
                    ("OOM¹", "18.0", "", "too large", "too large"),
                )
            ]
        },
        {"index.html": "Room for 16.0 GiB: 2 of 3 cases ended as predicted"},
    ),
    "steps of large models stand beside torch's fastest": (
        [
            large("fsdp-Ca", 4.0, checkpoint="attention"),
            large("torch_fsdp2-Cw", 6.0, checkpoint="whole"),
            large("torch_fsdp2-Ca", 5.0, checkpoint="attention"),
            large("torch_fsdp2-Cm", outcome="oom", checkpoint="matmuls"),
            large("torch_fsdp2-llama-Ca", 8.0, checkpoint="attention", strategy="torch_fsdp2", model="llama"),
        ],
        {
            "steps-8b-speed": [
                dict(zip(("strategy", "model", "checkpoint", "Speed over torch's, ×"), row, strict=True))
                for row in (
                    ("fsdp", "ours", "attention", "1.25"),
                    ("torch_fsdp2", "ours", "matmuls", ""),
                    ("torch_fsdp2", "ours", "attention", "1.00"),
                    ("torch_fsdp2", "ours", "whole", "0.833"),
                    ("torch_fsdp2", "llama", "attention", "0.625"),
                )
            ]
        },
        {
            "tables/synthetic-gpu-steps-8b-speed.md": "one after another\nOOM¹",
            "tables/synthetic-gpu-steps-8b-kinds.md": "matmuls, ms",
            "plots/synthetic-gpu-steps-8b-8b-S32768-losses.svg": "",
        },
    ),
    "an opened model is divided by kind, part, phase and kernel": (
        [
            record("anatomy", "naive", **OPENED),
            record("anatomy", "naive", context=1024, outcome="oom", reason="needs 200 GiB"),
        ],
        {
            "anatomy-shares": [
                {"kernels, ms": "48.0", "matmul, %": "50.0", "elementwise, %": "25.0"},
                {"kernels, ms": "OOM¹"},
            ],
            "anatomy-clocks": [{"kernels, ms": "48.0", "profiled, ms": "100", "profiled / clocked": "2.00"}, {}],
            f"{PARTS}-step-parts": [{"eager, naive": "20.0 / 40.0"}, {}, {}],
            # GFLOP of 12 layers, a batch of 4, 12 heads and 512 x 512 scores: 2 x 64 for each score, and 5 for softmax.
            f"{PARTS}-softmax": [
                {
                    "forward, GFLOP": "19.3",
                    "time, ms": "4.00",
                    "of it matmul kernels, ms": "1.00",
                    "backward, ms": "8.00",
                },
                {"forward, GFLOP": "0.755"},
            ],
            f"{PARTS}-step-eager-naive-kernels": [
                {"kernel": "nvjet<a¦b>", "kind": "matmul", "time, ms": "24.0", "launches": "84", "share, %": "50.0"}
            ],
            "anatomy-peaks": [
                {f"step: {name}": peak for name, peak in zip(PEAKS, peaks, strict=True)}
                for peaks in (("1.00", "4.00", "5.00", "3.00"), ["OOM¹"] * 4)
            ],
            "anatomy-predicted": [{"activations": "2.00 / 1.50 (-25.0 %)", "gradients": "1.00 / 1.00 (+0.0 %)"}],
            f"{PARTS}-step-eager-naive-allocations": [
                {"line": "loss.py:9", "function": "loss", "size of each, MiB": "1.00", "count": "3", "at the peak": "2"}
            ],
        },
        {
            f"plots/synthetic-gpu-{PARTS}-step-eager-naive-timeline.svg": (
                "peak 5.00 GiB\n>held before<\n>forward<\n>backward<\n>optimizer<"
            ),
            f"plots/synthetic-gpu-{PARTS}-shares.svg": "",
        },
    ),
    "strategies stand beside torch's own": (
        [
            *(
                record(
                    "data_parallel",
                    impl,
                    0.1 * seconds * batch,
                    section="sizes",
                    batch=batch,
                    compile=way,
                    comparison=f"{way}{batch}",
                )
                for way in ("eager", "graphed", "compiled")
                for batch in (4, 2)
                for impl, seconds in STRATEGIES.items()
            ),
            record("data_parallel", "none", section="sizes", batch=2, world_size=1),
            record("data_parallel", "flat", section="sizes", batch=8, outcome="oom", reason="needs 40 GiB"),
        ],
        {
            "data-parallel-sizes-peers": [
                *(
                    {"training": f"small b{batch} s512, bf16, 2 ranks{way}"} | OVER_TORCHS
                    for way in WAY_TEXTS
                    for batch in (2, 4)
                ),
                *({"training": f"geometric mean, 2 ranks{way}"} | MEANS_OVER_TORCHS for way in WAY_TEXTS),
            ],
            f"{PARALLEL}-step": [
                {"strategy": "none", "ranks": "1", "step, mean ± std, ms": "1.02 ± 0.0360"},
                *({"strategy": name, "batch": batch, "ranks": "2"} for batch in ("2", "4") for name in STEPS),
                {"strategy": "flat", "batch": "8", "step, mean ± std, ms": "OOM¹"},
            ],
            f"{PARALLEL}-by-batch": [{"batch": batch} for batch in ("2", "4", "8")],
        },
        dict.fromkeys(
            (
                f"plots/synthetic-gpu-{PARALLEL}-{name}.svg"
                for name in ("rate", "exposed", "memory", "scaling", "timeline")
            ),
            "",
        ),
    ),
    "trainings are relative to naive, and to one process, of the same attention row": (
        [
            training(attention, strategy, tokens_per_s=1e5 / seconds)
            for attention in ("naive", "sdpa_flash")
            for strategy, seconds in SPEEDS.items()
        ],
        {
            f"{STEM}-runs": [
                {"attention": attention, "row": row, "Speed-up over naive, ×": speed, "scaling, %": scaling}
                for attention in ("naive", "sdpa_flash")
                for row, speed, scaling in (
                    ("none", "0.632", "100"),
                    ("naive", "1.00", "79.2"),
                    ("bucketed", "1.20", "95.0"),
                    ("torch_ddp_tuned", "1.33", "106"),
                )
            ],
            f"{STEM}-rate": [{"attention": "naive"}, {"attention": "sdpa_flash", "bucketed": "100,000"}],
        },
        {f"tables/synthetic-gpu-{STEM}-rate.md": "| attention | none | naive | bucketed | torch_ddp_tuned |"}
        | {
            f"plots/synthetic-gpu-{STEM}-{name}.svg": ""
            for name in ("rate", "time", "memory", "chain", "curves", "differences")
        },
    ),
    "what repeats is one table": (
        [
            *repeated("naive", "fwd", bits(alone={}), bits(alone={})),
            *repeated("flash_gluon", "fwd", bits(alone={}), bits(alone={"o": 0.25})),
            *repeated("flash_gluon", "bwd", bits(dq=1e-3), bits(dq=2e-3, dk=1e-4, alone={})),
            *repeated("sdpa", "fwd", LOST_BITS, bits()),
            *repeated("sdpa_flash", "fwd", None, None),
        ],
        {
            "attention-same-bits": [
                dict(
                    zip(
                        ("impl", "forward, repeated", "forward, alone", "forward and backward, repeated"),
                        row,
                        strict=True,
                    )
                )
                for row in (
                    ("naive", "yes (2)", "yes (2)", ""),
                    ("flash_gluon", "yes (2)", "no: o (1 of 2)¹", "no: dq, dk (2 of 2)²"),
                    ("sdpa", "yes (1)³", "³", ""),
                )
            ]
        },
        {
            "tables/synthetic-gpu-attention-same-bits.csv": "bwd,ok,False,,3,dq dk,0.002,\nfwd,ok,True,,3,,,",
            "tables/synthetic-gpu-attention-same-bits.md": (
                "¹ Differs: o by at most 0.250.  \n² Differs: dq by at most 0.00200, dk by at most 0.000100.  \n"
                "³ Not known of all cases: no room."
            ),
        },
    ),
    **{
        f"the grid of dtypes has a line for each case, of {len(lengths)} lengths": (
            [
                record("attention", impl, seconds, section="dtypes", dtype=dtype, direction=way, queries=s, keys=s)
                for s in lengths
                for dtype in ("bfloat16", "float32")
                for way in ("fwd", "bwd")
                for impl, seconds in (("naive", 4e-3), ("sdpa_flash", 2e-3))
            ],
            {
                "dtypes-time": [
                    {"direction": way, "dtype": dtype, "S": told}
                    for way in ("forward", "backward")
                    for dtype in ("bfloat16", "float32")
                    for told in (("512", "1,024") if len(lengths) > 1 else (None,))
                ],
                "dtypes-speedup": [
                    {"naive": ratio} for ratio in (*["0.500"] * 4 * len(lengths), f"0.500 ({4 * len(lengths)})")
                ],
            },
            {},
        )
        for lengths in ([512], [512, 1024])
    },
    **{
        f"the line of a chapter says its answer: {answer}": (
            [record("attention", name, s, time_s=s, disturbed=busy) for name, (s, busy) in rows.items()],
            {},
            {"index.html": f'Everyday sizes</h3><span class="gist">Forward, bfloat16, causal: {answer}<'},
        )
        for answer, rows in {
            "best time: sdpa_flash, 1.00 ms": {"naive": (2e-3, None), "sdpa_flash": (1e-3, None)},
            "best time: naive, 2.00 ms": {"naive": (2e-3, None), "sdpa_flash": (1e-3, BUSY)},  # of undisturbed figures
            "best time: sdpa_flash, 1.00 ms, disturbed": {"naive": (2e-3, BUSY), "sdpa_flash": (1e-3, BUSY)},
            "Time, ms": {"naive": (2e-3, None), "flash_triton": (1e-3, None)},  # without a peer no row is the best
        }.items()
    },
    **{
        f"only graphs say that memory was measured before one was recorded: {way}": (
            [record("data_parallel", "naive", compile=way)],
            {},
            {
                f"tables/synthetic-gpu-data-parallel-default-small-S512-bf16-{way}-memory.md".replace("-eager", ""): (
                    f"Optimizer state, GiB\n{'' if way == 'graphed' else NOT}before one is recorded"
                )
            },
        )
        for way in ("eager", "compiled", "graphed")
    },
    # Older files say nothing of bits, attention has no MFU, one process has no chain, and one size no bandwidth.
    "what would be empty is left out": (
        [
            *(record("attention", impl) for impl in ("naive", "sdpa")),
            training("naive", "none"),
            record("collectives", "all_reduce"),
        ],
        {"same-bits": [], "-mfu": [], "-chain": [], "-fit": []},
        {f"plots/synthetic-gpu-{STEM}-rate.svg": ""},
    ),
    # The row "none" does not synchronize: it trains nothing. A row that sends less is no rival.
    "the best strategy is one that does what is asked": (
        [
            record("data_parallel", name, s, time_s=s, mfu=5e-4 / s)
            for name, s in {"none": 1e-3, "flat": 2e-3, "torch_ddp": 3e-3}.items()
        ]
        + [
            record("data_parallel", "bucketed-25MiB-float16", 1.5e-3, time_s=1.5e-3, mfu=0.2, **SENDS_LESS),
        ],
        {"data-parallel-default-peers": []},
        {
            "index.html": (
                "best step: flat, 2.05 ms\n>highest: 25.0 %, flat, small<\n"
                f'<td class="best">2.05 ±\n{NOT}<td class="best">1.02 ±'
            )
        },
    ),
    "our model stands beside a peer's": (
        [
            record("model", impl, s, size=size, batch=batch, **BESIDE | more)
            for size, batch, lost in (("small", 16, {}), ("xl", 4, {"outcome": "oom", "reason": "no room"}))
            for impl, s, more in (
                ("auto", 0.1, {"total_bytes": GIB, "held_bytes": GIB, "peak_bytes": GIB, "tokens_per_s": 1e5}),
                ("llama", 0.12, {"held_bytes": GIB, "peak_bytes": 3 * GIB, "label": "Llama", "peer": True} | lost),
            )
        ],
        {
            "model-peers-step-beside-llama": [
                {"size": "small", "batch": "16", "speedup, ×": "1.20", "memory over Llama's, ×": "0.500"}
                | {"rate, tokens/s": "100,000"},
                {"size": "xl", "batch": "4", "speedup, ×": "no baseline¹", "Llama rate, tokens/s": "OOM"},
            ]
        },
        {},
    ),
    "trainings of other settings stay apart": (
        [
            *(training("naive", "bucketed", row=f"bucketed-{mb}MiB", bucket_mb=mb, id=f"{mb}") for mb in (100, 10)),
            training("naive", "bucketed", memory_limit_bytes=16 * GIB, compile="compiled"),
        ],
        {f"{STEM}-rate": [{"bucketed": None}]},
        {
            f"tables/synthetic-gpu-{STEM}-rate.md": " | bucketed-10MiB | bucketed-100MiB |",
            f"tables/synthetic-gpu-{STEM.replace('bf16-', 'bf16-compiled-')}-16gib-rate.md": "blocks compiled",
        },
    ),
    "tokenizers stand beside the packages": (
        [
            record("tokenizer", impl, s, section="corpus", task=task)
            for task in ("encode", "train")
            for impl, s in (("lmsys", 2.0), ("lmsys_serial", 3.0), ("tiktoken", 4.0), ("huggingface", 8.0))
            if (task, impl) != ("train", "tiktoken")
        ]
        + [record("tokenizer", "tiktoken", section="corpus", task="train", outcome="unsupported", reason="no")],
        {
            "tokenizer-corpus-V10000-30000000B": [
                *[{"task": "training"}] * 2,
                {"task": "training", "Time, s": "n/a¹"},
                {"task": "training"},
                {
                    "task": "encoding",
                    "Speedup over huggingface, ×": "4.00",
                    "Speedup over tiktoken, ×": "2.00",
                },
                *[{"task": "encoding"}] * 3,
            ]
        },
        {
            "plots/synthetic-gpu-tokenizer-corpus-V10000-30000000B-rate.svg": "",
            "tables/synthetic-gpu-tokenizer-corpus-V10000-30000000B.md": "30 MB",
        },
    ),
    "a training that failed is a word with how far it went": (
        [
            training("naive", "none", valid_loss=3.25, curve_difference=1e-3),
            training(
                "naive",
                "bucketed",
                outcome="wrong",
                reason="the loss of step 3",
                valid_loss=None,
                curve_difference=2e-3,
            ),
        ],
        {f"{STEM}-loss": [{"none": "3.2500 (1.0e-03)", "bucketed": "(2.0e-03) wrong¹"}]},
        {f"tables/synthetic-gpu-{STEM}-rate.md": "the loss of step 3"},
    ),
}


@pytest.mark.parametrize("law", SHOWN)
def test_a_chapter_shows_its_benchmark(law: str, tmp_path: Path) -> None:
    records, tables, texts = SHOWN[law]
    hold_shown(report(tmp_path, records, drawn="timeline"), tables, texts)


@pytest.mark.parametrize(("sections", "is_open"), [(1, True), (4, False)])
def test_chapters_of_a_long_page_are_lines(sections: int, is_open: bool, tmp_path: Path) -> None:
    records = [record("attention", "naive", section=f"s{number}") for number in range(sections)]
    page = report(tmp_path, records)["index.html"].decode()
    chapters = re.findall('<details class="chapter"([^>]*)>', page)
    assert (len(chapters) <= MOST_OPEN) == is_open and all(
        (" open" in attributes) == is_open for attributes in chapters
    )


def test_phases_stand_side_by_side_with_the_whole_step(models: dict[str, bytes]) -> None:
    drawing = models["plots/synthetic-gpu-model-sizes-phases-naive-small-S128-B4.svg"].decode()
    phases = re.findall(">(Forward .training.|Backward|Optimizer|Whole step)</text>", drawing)
    assert phases == ["Forward (training)", "Backward", "Optimizer", "Whole step"] and "OOM" not in drawing
    lost = models["plots/synthetic-gpu-model-sizes-phases-naive-xl-S1024-B4.svg"].decode()
    assert 0 < lost.count("OOM<") <= 2 * len(phases)  # fp32, eager and compiled


def test_collectives_have_a_fitted_latency_and_bandwidth(tmp_path: Path) -> None:
    records = [
        record("collectives", impl, megabytes=mb, bytes=mb * 10**6, time_s=2e-5 + mb * 1e6 / 3e11)
        for impl in ("broadcast", "all_reduce")
        for mb in (100, 1, 1000, 10)
    ]
    records[3] |= {"time_s": 1.0, "disturbed": "another program had the device"}  # it must not move the fit
    files = report(tmp_path, records)
    fits = numbers(files, "collectives-default-nccl-fit")
    assert [row["impl"] for row in fits] == ["all_reduce", "broadcast"]
    for row in fits:
        assert float(row["latency_s"]) == pytest.approx(2e-5) and float(row["bytes_per_s"]) == pytest.approx(3e11)
    rows = cells(files, "collectives-default-nccl-time")
    assert list(rows[0]) == ["operation", "ranks", "1 MB", "10 MB", "100 MB", "1,000 MB"]
    assert "plots/synthetic-gpu-collectives-default-nccl-W2-bandwidth.svg" in files
