"""The measured numbers (figures) of training steps in docs/results.md, docs/training.md and docs/strategy.md.

`python -m dev.figures` calls `figures` and writes what it yields into the pages. Each function reads committed runs or
published tables (`runs.py`) and yields tables and sentences of the pages (`pages.py`). To add a figure, first write its
sentence or table into the page by hand, with any numbers. Then yield a `Sentence` with these words, or a `Table` with
this head: the place on the page is found by them.

A *row* is what a benchmark compares: here a strategy of data parallelism, or a whole model. A *peer* is a row of other
people's code. The field `compile` of a record says in which way a step is run:

eager     no compiler; the host launches one kernel after another
compiled  torch.compile has compiled the model, block by block
graphed   compiled, and replayed as one CUDA graph
fused     blocks run our fused kernels in place of a compiler's, and the step is replayed as one CUDA graph

The field `residual` is "wide" or "narrow", the dtype of the stream between blocks (`lmsys.config.ModelConfig`). The
folder `apart` of reports/results has further runs of cases that are in the published report already: in one report with
the others they would take the place of what was measured side by side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from dev.figures.pages import Sentence, Table, cells_of
from dev.figures.runs import H200, Record, bounds, cell, grouped, mean, path_of, published, ratio, records, run
from lmsys.config import model_config
from lmsys.cost.memory import training_memory
from lmsys.cost.operations import attention_flops, block_matrices

RESULTS = "docs/results.md"
SIZES = "small", "medium", "xl"  # model sizes: the lines of the table of `_gradients`
# Names of published tables; {} is the number of GPUs.
BESIDE_LLAMA = f"{H200}-model-peers-step-beside-llama"
PEERS = "{}-nvidia-h200-data-parallel-sizes-peers"
SHOWN_WAYS = ("graphed", "wide"), ("fused", "wide"), ("fused", "narrow")  # (compile, residual) of lines that are shown
BESIDE_TORCH = {  # {(row, the row that it is compared with): `compile` of the steps of both}
    ("copy_engine", "torch_ddp_tuned"): "graphed",
    ("bucketed", "torch_ddp_tuned"): "graphed",
    ("bucketed", "naive"): "graphed",
    ("zero1", "torch_zero1"): "graphed",
    ("copy_engine_zero1", "torch_zero1"): "graphed",
    ("fsdp", "torch_fsdp2"): "eager",
}
# Kinds of work, whose seconds in a step are fields of a record, such as matmul_s. "exposed" is communication during
# which the GPU computes nothing; the others are kinds of kernels.
KINDS = "matmul", "attention", "elementwise", "reduction", "copy", "other", "optimizer", "exposed"


def figures() -> Iterator[Table | Sentence]:
    """All figures of these pages."""
    yield from _beside_llama()
    yield from _gradients()
    yield from _beside_torch()
    yield from _buckets()
    yield from _eight_billion()
    yield from _what_bounds_it()
    yield from _shorter()
    yield from _trainings()
    yield from _levels()
    yield from _versions()


def _beside_llama() -> Iterator[Table | Sentence]:
    """The speed and memory of steps of our model, relative to Hugging Face's Llama."""
    head, *body = published(BESIDE_LLAMA)
    columns = [head.index(name) for name in ("speedup, ×", "MFU, %", "Llama MFU, %", "memory over Llama's, ×")]
    shown = [line for line in body if (line[2], line[3]) in SHOWN_WAYS]
    lines = [[*line[:4], *(line[column] for column in columns)] for line in shown]
    yield Table(RESULTS, ("size", "batch"), lines)
    sizes = grouped(records("model-peers", H200, compile="compiled", residual="wide"), "size")
    ratios = [f"{sizes[size]['llama']['time_s'] / sizes[size]['auto']['time_s']:.2f}" for size in SIZES[:2]]
    yield Sentence(RESULTS, "is {} times as fast as Llama's at small, and {} times at medium", ratios)


def _gradients() -> Iterator[Table | Sentence]:
    """Errors of gradients, relative to the size of the gradients, by model size and way to run a step.

    A way is (compile, residual), as in SHOWN_WAYS.
    """
    runs = [record for name in ("model-peers", "model-peers-xl") for record in records(name, H200)]
    errors = {
        (case["size"], case["impl"], case["compile"], case["residual"]): case["gradient_error"]
        for case in runs
        if case["outcome"] == "ok"
    }
    ours = [("auto", compiled, residual) for residual, compiled in product(("wide", "narrow"), ("graphed", "fused"))]
    columns = [("llama", "graphed", "wide"), *ours]
    lines = [[size, *(f"{1e3 * errors[size, *column]:.4f}" for column in columns)] for size in SIZES]
    yield Table(RESULTS, ("size", "Llama, wide"), lines)

    def ratios(way: tuple[str, str], other: tuple[str, str]) -> list[float]:
        """For each of SIZES, the error of our model's steps in one way over the error in the other way."""
        return [errors[size, "auto", *way] / errors[size, "auto", *other] for size in SIZES]

    # In these two sentences the page says "compiled" of steps that are graphed: they are compiled, and also replayed.
    fused = max(abs(ratio - 1) for ratio in ratios(("fused", "wide"), ("graphed", "wide")))
    yield Sentence(RESULTS, "err as much as compiled ones, within {} %", [f"{100 * fused:.2f}"])
    narrow = [bounds(ratios((way, "narrow"), (way, "wide"))) for way in ("graphed", "fused")]
    yield Sentence(
        RESULTS,
        "steps err {} to {} times as much as with a wide one where they are compiled, and {} to {} times where they are"
        " fused",
        [*narrow[0], *narrow[1]],
    )


def _beside_torch() -> Iterator[Table | Sentence]:
    """The speed of steps of our strategies, relative to torch's strategies and to `naive`."""
    lines = []
    for (row, peer), launched in BESIDE_TORCH.items():
        end = {"graphed": ", as one CUDA graph", "eager": ""}[launched]
        means = [
            cell(PEERS.format(count), [f"geometric mean, {count} ranks{end}"], f"{row} / {peer}") for count in (2, 4)
        ]
        lines.append([row, peer, launched, *means])
    yield Table(RESULTS, ("row", "as fast as"), lines)
    key = ["geometric mean, 2 ranks, blocks compiled"]
    pairs = "copy_engine / torch_ddp_tuned", "copy_engine_zero1 / torch_zero1"
    compiled = [f"{float(cell(PEERS.format(2), key, pair)):.2f}" for pair in pairs]
    words = (
        "`copy_engine` has {} of the speed of `torch_ddp_tuned`, and `copy_engine_zero1` {} of that of `torch_zero1`"
    )
    yield Sentence(RESULTS, words, compiled)
    sizes = grouped(records("data-parallel-zero2", H200, "apart", world_size=2), "size", row="strategy").values()
    for words, ours, theirs in (
        ("`fsdp` is {} times as fast as `torch_fsdp2`.", "fsdp", "torch_fsdp2"),
        ("`zero1` is {} times as fast as `torch_fsdp2_zero2`", "zero1", "torch_fsdp2_zero2"),
        ("and has {} of the speed of `torch_zero1`", "zero1", "torch_zero1"),
    ):
        yield Sentence(RESULTS, words, [mean(ratio(rows[ours], rows[theirs]) for rows in sizes)])


def _buckets() -> Iterator[Table | Sentence]:
    """The speed of `zero1` with larger buckets.

    In the run `before`, the row `Zero128` has the larger buckets; in the later run `now`, `zero1` itself has them.
    """
    before, now = (
        grouped(records(name, H200, "apart"), "compile", "size")
        for name in ("data-parallel-zero1-buckets", "data-parallel-zero1")
    )

    def text(rows: dict[str, Record], ours: str, theirs: str) -> str:
        return f"{ratio(rows[ours], rows[theirs]):.2f}"

    steps = ("compiled", "small"), ("compiled", "xl"), ("graphed", "small")
    small, xl, graphed = (text(before[key], "Zero128", "zero1") for key in steps)
    yield Sentence(RESULTS, "are {} times as fast as with 32 MiB at small, and {} times at xl", [small, xl])
    yield Sentence(RESULTS, "Graphed steps of small, which ask nothing of the host, have {} of their speed", [graphed])
    lines = []
    for way in ("compiled", "graphed"):
        later = [text(now[way, size], "zero1", "torch_zero1") for size in ("medium", "xl")]
        lines.append([way, text(before[way, "small"], "Zero128", "torch_zero1"), *later])
    yield Table(RESULTS, ("steps", "small"), lines)


def _eight_billion() -> Iterator[Table | Sentence]:
    """Steps of the model size `8b`, by strategy and model; a column has times over that of the first row, `fsdp`."""
    cases = records("steps-8b", H200)
    lines = []
    for case in cases:
        times = f"{case['time_s']:.2f}", f"{case['time_s'] / cases[0]['time_s']:.2f}", f"{case['mfu']:.3f}"
        state = f"{case['total_bytes'] / 2**30:.0f}", f"{case['power_w']:.0f}", f"{case['sm_clock_mhz']:.0f}"
        lines.append([case["strategy"], case["model"], case["checkpoint"].replace("*", "\\*"), *times, *state])
    yield Table(RESULTS, ("strategy", "model"), lines)
    (rounds,) = {str(case["rounds"]) for case in cases}
    ((first, last),) = {(f"{case['first_loss']:.2f}", f"{case['last_loss']:.2f}") for case in cases}
    yield Sentence(RESULTS, "from the same weights, for {} steps each", [rounds])
    yield Sentence(RESULTS, "every row falls from {} to {}.", [first, last])
    seconds = [records(*where)[0]["time_s"] for where in (("steps-8b-four", H200), ("steps-8b-two", H200, "apart"))]
    words = (
        "`fsdp` takes {} s a step, and {} s on two GPUs of the same machine. So four GPUs train {} of twice the tokens"
    )
    yield Sentence(RESULTS, words, [f"{value:.2f}" for value in (*seconds, seconds[1] / seconds[0])])


def _what_bounds_it() -> Iterator[Table | Sentence]:
    """The time of each kind of kernel in a step of `8b`, beside the least time that its arithmetic could take.

    The least time is the number of operations over the rate of matmuls that the machine sustains. The step is that of
    the run's first record, in which 12 of the 34 blocks have the checkpointing level "attention", and 22 "matmuls"
    (`lmsys.checkpointing`).
    """
    config = model_config("8b")
    case, rate = (
        records("steps-8b", H200)[0],
        run("steps-8b", H200)["machine"]["sustained"]["matmul_flops_per_s"]["bfloat16"],
    )
    tokens, heads = case["batch"] * case["context"], config.num_heads
    # again: the number of weights whose matmul runs again in the backward, those of W1 and W3 in the 12 blocks of the
    # level "attention". Every weight takes part in three matmuls, one in the forward and two in the backward, and each
    # of these does 2 * tokens operations with it.
    again = 12 * 2 * config.d_model * config.d_ff
    weights = config.num_layers * block_matrices(config) + config.vocab_size * config.d_model
    attention = attention_flops(1, heads, tokens, tokens, config.head_dim, causal=True, direction="fwdbwd")
    work = {"matmuls": 2 * tokens * (3 * weights + again), "attention": config.num_layers * attention}
    kinds = {
        "matmuls": case["matmul_s"],
        "attention": case["attention_s"],
        "elementwise, reductions, copies": case["elementwise_s"] + case["reduction_s"] + case["copy_s"],
        "optimizer": case["optimizer_s"],
        "exposed communication": case["exposed_s"],
    }
    lines = []
    for kind, time_s in kinds.items():
        least = work.get(kind, 0) / rate
        sustained = f"{1e3 * least:,.0f}" if least else ""
        lines.append([kind, f"{1e3 * time_s:,.0f}", sustained, f"{1e3 * max(time_s - least, 0):,.0f}"])
    yield Table(RESULTS, ("kind", "time, ms"), lines)
    # kept: the bytes of the outputs of W1 and W3 of these 12 blocks, in bfloat16. To save the time of computing them
    # again, they would have to be offloaded: copied to the host's memory in the forward, and back for the backward.
    seconds, kept = 2 * tokens * again / rate, 12 * 2 * tokens * config.d_ff * 2
    yield Sentence(RESULTS, "Of the matmuls, {} ms at the sustained rate are computed again", [f"{1e3 * seconds:.0f}"])
    yield Sentence(RESULTS, "{} GiB would have to go there and back", [f"{kept / 2**30:.0f}"])
    yield Sentence(RESULTS, "That could save {} % of the step at most", [f"{100 * seconds / case['time_s']:.1f}"])


def complete_shapes() -> list[list[Record]]:
    """The three records of each run, size and length.

    If a run was interrupted in a shape, the shape has fewer than three records, and is left out.
    """
    shapes: dict[tuple[str, str, int], list[Record]] = {}
    for name in ("steps-1b-3b-4096", "steps-8b-4096", "steps-1b-32768", "steps-3b-32768"):
        for case in records(name, H200):
            shapes.setdefault((name, case["size"], case["context"]), []).append(case)
    return [cases for cases in shapes.values() if len(cases) == 3]


def _shorter() -> Iterator[Table | Sentence]:
    """Steps of smaller models, or of shorter sequences, than in `_eight_billion`."""
    shapes, lines = complete_shapes(), []
    for cases in shapes:
        for case in cases:
            keys = [case["size"], f"{case['context']:,}", case["strategy"], case["model"]]
            times = f"{1e3 * case['time_s']:,.0f}", f"{case['time_s'] / cases[0]['time_s']:.2f}", f"{case['mfu']:.3f}"
            lines.append([*keys, *times, f"{case['total_bytes'] / 2**30:.0f}"])
    yield Table(RESULTS, ("size", "tokens"), lines)
    small, middle, large = (cases for cases in shapes if cases[0]["context"] == 4096)
    # Of the three rows of a size, the sentence is about the second (torch_fsdp2) and the third (llama).
    (_, fsdp2, llama), (_, *both) = (
        [f"{100 * share_at_work(case):.0f}" for case in cases] for cases in (small, middle)
    )
    yield Sentence(
        RESULTS,
        "In the size `1b` they take {} % of a step of `torch_fsdp2` and {} % of one of `llama`, in `3b` {} and {} %",
        [fsdp2, llama, *both],
    )
    yield Sentence(RESULTS, "and matmuls take {} to {} % of the time", _shares("matmul", [large]))
    long = [cases for cases in shapes if cases[0]["context"] == 32768]
    yield Sentence(RESULTS, "attention takes {} to {} % of the time", _shares("attention", long))


def share_at_work(case: Record) -> float:
    """The share of a step's time in which kernels run or communication is exposed; in the rest of it the GPU waits."""
    return float(sum(case[f"{kind}_s"] for kind in KINDS) / case["time_s"])


def _shares(kind: str, shapes: Sequence[Sequence[Record]]) -> tuple[str, str]:
    """The smallest and the largest share of a profiled step that kernels of one of KINDS take, in percent."""
    shares = [100 * case[f"{kind}_s"] / case["profiled_s"] for cases in shapes for case in cases]
    return bounds(shares, "{:.0f}".format)


def _trainings() -> Iterator[Sentence]:
    """The numbers by which the page explains that the runs of whole trainings do not rank strategies."""
    cases = records("training-matrix", H200)
    rows = grouped(cases, "attention", row="strategy")
    steps, names = cases[0]["steps"] / cases[0]["epochs"], ("naive", "bucketed")
    eager = [f"{1e3 * rows['sdpa_cudnn'][name]['time_s'] / steps:.0f}" for name in names]
    yield Sentence(RESULTS, "a step takes {} ms with `naive` and {} ms with `bucketed`", eager)
    tokens = cases[0]["context"] * cases[0]["batch"]
    graphed = {
        (case["strategy"], case["bucket_mb"]): f"{1e3 * case['time_s']:.0f}"
        for case in records("data-parallel-graphed", H200, size="small")
        if case["context"] * case["batch"] == tokens
    }
    times = [graphed["naive", None], graphed["bucketed", rows["sdpa_cudnn"]["bucketed"]["bucket_mb"]]]
    yield Sentence(RESULTS, "with as many tokens, takes {} and {} ms", times)
    spread = max(max(case["samples_s"]) / min(case["samples_s"]) for case in cases)
    yield Sentence(RESULTS, "differ by up to {} times", [f"{spread:.2f}"])
    ratios = bounds(by_name["bucketed"]["time_s"] / by_name["naive"]["time_s"] for by_name in rows.values())
    yield Sentence(RESULTS, "`naive` has {} to {} times the speed of `bucketed`", ratios)


def _levels() -> Iterator[Table | Sentence]:
    """Time and memory by checkpointing level, and the predicted memory."""
    lines, errors = [], {}  # errors: {(peak - prediction) / prediction: level}
    for case in records("model-levels", H200):
        settings = {"checkpoint_blocks": case["checkpoint"], "residual": case["residual"]}
        config = replace(model_config(case["size"], context_length=case["context"]), **settings)
        predicted = training_memory(config, case["batch"], case["context"], case["precision"]).peak
        gib = [f"{size / 2**30:.1f}" for size in (case["total_bytes"], predicted)]
        lines.append([case["checkpoint"], case["residual"], f"{1e3 * case['time_s']:.1f}", *gib])
        errors[case["total_bytes"] / predicted - 1] = case["checkpoint"]
    page, most = "docs/training.md", max(errors)
    yield Table(page, ("level", "residual"), lines)
    yield Sentence(page, f"take up to {{}} % more than predicted at `{errors[most]}`", [f"{100 * most:.0f}"])


def _versions() -> Iterator[Sentence]:
    """Errors of steps over the error allowed, from a committed table such as `python -m dev.steps` prints.

    The first two lines are the table's head and its dashes, which `cells_of` keeps since no spaces are around them.
    """
    _, _, *pairs = cells_of(path_of("step-versions.md", H200, "apart").read_text())
    errors: dict[str, float] = {}
    for first, second, _, ratios in pairs:
        errors |= zip((first, second), map(float, ratios.split(" and ")), strict=True)
    (fsdp,) = {f"{error:.3f}" for name, error in errors.items() if name.startswith("fsdp")}
    others = [error for name, error in errors.items() if not name.startswith("fsdp")]
    words = "{} of what is allowed with `fsdp`, and {} to {} with the others"
    yield Sentence("docs/strategy.md", words, [fsdp, *bounds(others, "{:.3f}".format)])
