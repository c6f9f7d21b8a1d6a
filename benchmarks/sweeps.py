"""The sizes that benchmarks run, as named sweeps. Sizes that a grid leaves out have defaults in `axes.py`. Plain data.

`conftest.py` at the root hands SWEEPS, {name: {device: sweep}}, to the pytest plugin of `lmsys.bench`, which makes the
cases; `pytest --sweep NAME` picks one. To add sizes, write a grid and name it in SWEEPS or in FULL, which is the part
of the sweep "full" that CPUs and GPUs share. A new name of a grid also gets a title in WORDS of `layouts.py`, and a
place in docs/options.md. After a change of the sweep "default" for a CPU, `python -m dev.durations` makes
`durations_cpu.json` again from a result of `nox -s bench`.

A sweep has grids for benchmarks; one without grids runs its defaults. A grid is one section of the report, and its name
is part of the test id, so `-k tokens16k` selects it. Its cases are all combinations of the values of its axes; an axis
given on the command line replaces the grid's own values. `axes.py` says what each axis means; an axis that a grid
leaves out has the default of the benchmark or of `axes.py`. `grid.but(...)` is a copy with other values or another
name.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.axes import END
from lmsys.bench import Grid, Sweep

ANATOMY_MODES = ("forward", "step")  # what `bench_anatomy.py` divides into its parts: an inference and a training step
POWERS = tuple(2**n for n in range(7, 17))  # lengths: 128 ... 65536
BOTH = (True, False)  # values of an axis that is yes or no
# Rows (implementations) of attention: those that torch.compile makes, those that large sizes leave out since they are
# slow, and those of the grid "flash".
COMPILED_ROWS = ("naive_compiled", "flex")
SLOW_ROWS = ("naive", "naive_compiled", "vectorized", "sdpa_math", "flash_torch", "flash_triton_torch_bwd")
FLASH_ROWS = ("naive", "flash_triton_torch_bwd", "flash_triton")
# Rows of lmsys.parallel.STRATEGIES that default sweeps time; a new one is timed only if it is named here.
TIMED_STRATEGIES = tuple(
    "none naive flat overlapped bucketed zero1 fsdp torch_ddp torch_ddp_tuned torch_zero1 torch_fsdp2"
    " torch_fsdp2_zero2".split()
)


def square(*lengths: int) -> tuple[tuple[int, int], ...]:
    """Values of the axis `length` with as many queries as keys: (queries, keys)."""
    return tuple((length, length) for length in lengths)


# Attention. length: (queries, keys); heads: (query heads, key/value heads); tokens: the batch is tokens / queries;
# width: there are width / head_dim heads; attention: the rows (implementations) to compare, by default all but those in
# `without`; direction "fwdbwd": a forward and its backward in one call.
FLASH = Grid(
    "flash",
    length=square(*POWERS),
    head_dim=(16, 32, 64, 128),
    dtype=("float32", "bfloat16"),
    causal=(True,),
    direction=("fwd", "bwd", "fwdbwd"),
    attention=FLASH_ROWS,
)
BY_LENGTH = Grid(
    "by_length",
    length=square(*(length for length in POWERS if length <= 16384)),
    head_dim=(64,),
    dtype=("bfloat16",),
    causal=BOTH,
    direction=("fwd",),
    batch=(4,),
    heads=((12, 12),),
)
TIERS = BY_LENGTH.but(  # more queries than keys, and the reverse
    "tiers",
    length=((128, 64), (64, 128), (256, 128), (128, 256), (512, 256), (1024, 512), (512, 2048), (2048, 1024)),
)
TOKENS16K = Grid(
    "tokens16k",
    length=square(1024, 4096, 16384),
    head_dim=(64, 128),
    dtype=("bfloat16",),
    causal=BOTH,
    direction=("fwd", "bwd"),
    tokens=16384,
    width=2048,
)
LEADERBOARD = Grid(
    "leaderboard",
    length=square(16384),
    head_dim=(64,),
    dtype=("bfloat16",),
    causal=(True,),
    direction=("fwdbwd",),
    heads=((16, 16),),
)
# Attention as people train and serve with it: several documents packed into each sequence, a sliding window, grouped
# heads (GQA), and one query with a long cache of keys. `axes.py` says what the values of documents and offset mean.
DOCUMENTS = TOKENS16K.but(
    "documents",
    length=square(16384),
    causal=(True,),
    documents=("mixed", "equal16"),
    without=SLOW_ROWS,
)
WINDOW = TOKENS16K.but("window", length=square(4096, 16384, 65536), causal=(True,), window=(1024,), without=SLOW_ROWS)
GROUPED = Grid(
    "grouped",
    length=square(4096, 16384),
    head_dim=(128,),
    dtype=("bfloat16",),
    causal=(True,),
    direction=("fwd", "bwd"),
    batch=(4,),
    heads=((32, 8), (64, 8)),
    without=SLOW_ROWS,
)
DECODE = GROUPED.but(
    "decode",
    length=tuple((1, keys) for keys in (1024, 8192, 32768, 131072)),
    direction=("fwd",),
    batch=(1, 8, 64),
    heads=((32, 8),),
    offset=(END,),
)
# Values by which the four grids above differ on a CPU. `attention` names the rows here, so `without` is emptied.
SMALL: dict[str, Any] = {
    "length": square(512),
    "head_dim": (64,),
    "dtype": ("float32",),
    "direction": ("fwdbwd",),
    "attention": ("naive", "vectorized", "flash_torch", "sdpa"),
    "without": (),
}
CPU_BY_LENGTH = BY_LENGTH.but(
    length=square(256, 512, 1024),
    dtype=("float32",),
    causal=(True,),
    direction=("fwd", "bwd"),
    batch=(1,),
    heads=((8, 8),),
)


def smoke(length: int, odd: int, head_dim: int, batch: int, compiled_dtype: str) -> tuple[Grid, ...]:
    """Six grids (full, causal, compiled, documents, window, decode) of small shapes.

    full      no mask, `length` queries and keys, in float32 and bfloat16
    causal    `odd` queries and keys, a number that no tile size divides, and grouped heads, in float32 and bfloat16
    compiled  the rows of torch.compile, which takes seconds: causal, `length`, in `compiled_dtype` alone
    documents, window, decode  one case for each of these options of attention, on few rows

    The first three are named "smoke" and have every direction. The others have one direction each, in float32.
    """
    full = Grid(
        "smoke",
        length=square(length),
        head_dim=(head_dim,),
        dtype=("float32", "bfloat16"),
        causal=(False,),
        direction=("fwd", "bwd", "fwdbwd"),
        batch=(batch,),
        heads=((2, 2),),
        without=COMPILED_ROWS,
    )
    causal = full.but(length=square(odd), causal=(True,), heads=((4, 2),))
    compiled = full.but(dtype=(compiled_dtype,), causal=(True,), attention=COMPILED_ROWS, without=())
    few = causal.but(
        dtype=("float32",),
        direction=("fwdbwd",),
        batch=(1,),
        heads=((2, 1),),
        attention=("naive", "flash_torch", "flash_triton", "sdpa"),
        without=(),
    )
    return (
        full,
        causal,
        compiled,
        few.but("documents", documents=("mixed",)),
        few.but("window", window=(20,), softcap=(5.0,)),
        few.but("decode", length=((3, odd),), batch=(2,), direction=("fwd",), offset=(END,), key_lengths=(True,)),
    )


# The language model. attention: the rows to compare; "auto" is the fastest row that can run the case, "llama" is
# Hugging Face's whole model as it comes, "llama_tuned" the same model as an expert runs it. against: a row; if the
# command line leaves it out, the grid has no cases. warmup: the number of untimed steps before ten timed ones; each
# case of the grid "warmup" has a process of its own.
MODEL_SIZES = ("small", "medium", "large", "xl", "2.7b")
MODEL_FULL = (
    Grid("sizes", size=MODEL_SIZES, context=(128, 256, 512, 1024), precision=("fp32", "bf16")),
    Grid(
        "warmup",
        size=("small", "medium"),
        context=(128, 512),
        precision=("fp32",),
        mode=("forward", "train_forward", "backward"),
        compile=("eager",),
        warmup=(0, 1, 2, 5),
    ),
    Grid("fits", size=MODEL_SIZES, context=(512, 1024), mode=("step",), compile=("eager",), batch=(1, 4, 16)),
)
# Memory against time, by what the backward recomputes (activation checkpointing). Steps are replayed as a CUDA graph:
# if the host launched the kernels one by one, the recomputed ones would wait for it and seem slower than they are.
LEVELS = Grid(
    "levels",
    size=("medium",),
    context=(1024,),
    mode=("step",),
    compile=("graphed",),
    batch=(8,),
    checkpoint=("none", "matmuls", "attention", "whole"),
    residual=("wide", "narrow"),
)
PEER = Grid(
    "peers",
    size=("small",),
    context=(1024,),
    mode=("step",),
    compile=("compiled", "graphed", "fused"),
    batch=(16,),
    attention=("auto", "llama_tuned", "llama"),
    against="llama_tuned",
)
ANATOMY = Grid(
    "anatomy",
    size=("small",),
    context=(512,),
    mode=ANATOMY_MODES,
    compile=("eager",),
    attention=("naive", "flash_triton"),
)
ANATOMY_SMOKE = ANATOMY.but(size=("tiny",), context=(64,), precision=("fp32",), batch=(2,), attention=("auto",))

# The head and loss. row: "chunked" is ours; "eager" and "compiled" make the logits of all tokens at once, and
# "torch_chunked", torch's own loss, makes them in chunks. The rows of other packages run on GPUs alone.
CPU_LOSS = Grid(
    "default",
    vocab_size=(2000, 10_000),
    tokens=(256,),
    d_model=(64,),
    precision=("fp32",),
    row=("chunked", "eager", "torch_chunked"),
)

# Tokenizers, on the text of Python's standard library. text_bytes: how much of the text, None for all, about 30 MB;
# rounds: the least number of samples of each row; it is small, since a training takes seconds.
TOKENIZER = Grid("default", text_bytes=2_000_000, vocab_size=4000)

# Collectives. megabytes: the size of the tensor, in 10^6 bytes. world_size: the number of ranks; if it is left out,
# there are as many ranks as GPUs, or two on a CPU.
COLLECTIVES = Grid("default", megabytes=(1, 10, 100, 1000))

# Data parallelism. batch: sequences of each rank; bucket_mb: MiB. On one rank only the strategy `none` runs, which
# sends nothing: the scaling of the others is measured against it.
PARALLEL = Grid(
    "default",
    size=("small",),
    context=(512,),
    batch=(16,),
    strategy=TIMED_STRATEGIES,
    bucket_mb=(25, "auto"),
    compile=("compiled",),
)
CPU_PARALLEL = Grid(
    "default", size=("tiny",), context=(32,), precision=("fp32",), batch=(2,), strategy=TIMED_STRATEGIES
)
BUCKETS = Grid(
    "buckets",
    size=("xl",),
    context=(256,),
    batch=(2, 4, 8, 16, 32),
    strategy=("none", "naive", "flat", "overlapped", "bucketed"),
    bucket_mb=(1, 10, 20, 100, 1000, "auto"),
)
TARGETS = tuple(  # all strategies at three model sizes; larger models have smaller batches
    Grid(
        "sizes",
        size=(size,),
        context=(512,),
        batch=(batch,),
        strategy=(*TIMED_STRATEGIES, "copy_engine", "copy_engine_zero1"),
        bucket_mb=(25, 100, "auto"),
        compile=("eager", "compiled", "graphed"),
    )
    for size, batch in (("small", 16), ("medium", 8), ("xl", 4))
)

# Training steps of large models, each row alone, on two ranks or more. batch: sequences of each rank; checkpoint: what
# the backward recomputes, such as "attention*12,matmuls*22" for 12 blocks of the level "attention" and 22 of the level
# "matmuls" (`lmsys.checkpointing`). The grid "8b" has the levels that just fit into memory: Llama's layers keep more,
# so Llama has another level. The grid "large" has smaller sizes too, and levels of which each may be the fastest for
# some model.
EIGHT_B = Grid(
    "8b",
    size=("8b",),
    context=(32_768,),
    batch=(1,),
    strategy=("fsdp", "torch_fsdp2"),
    compile=("compiled",),
    checkpoint=("attention*12,matmuls*22",),
    residual=("narrow",),
    model=("ours",),
)
LARGE = EIGHT_B.but("large", model=("ours", "llama"))
STEPS = (
    EIGHT_B,
    EIGHT_B.but(strategy=("torch_fsdp2",), checkpoint=("attention",), model=("llama",)),
    LARGE.but(checkpoint=("attention*12,matmuls*22", "attention", "whole")),
    LARGE.but(size=("1b", "3b", "8b"), context=(4096,), checkpoint=("none", "matmuls", "attention")),
    LARGE.but(size=("1b", "3b"), checkpoint=("none", "matmuls", "attention")),
)

# Whole trainings of each attention row by each strategy. batch: sequences of each rank; the strategy `none` is one rank
# that accumulates the gradients of all batches.
TRAINING = Grid(
    "default",
    size=("small",),
    context=(1024,),
    attention=("flash_triton", "sdpa_cudnn"),
    strategy=("none", "naive", "bucketed", "torch_ddp_tuned"),
    epochs=3,
    train_tokens=262_144,
)
CPU_TRAINING = Grid(
    "default",
    size=("tiny",),
    context=(64,),
    attention=("naive", "vectorized", "sdpa_flash"),
    strategy=("none", "naive", "bucketed", "torch_ddp_tuned"),
    precision=("fp32",),
    batch=(4,),
    train_tokens=4096,
    val_tokens=2048,
    vocab_size=1000,
)
MATRIX = TRAINING.but(
    "matrix",
    attention=("naive_compiled", "vectorized", "flash_triton", "sdpa_cudnn"),
    strategy=("none", "naive", "flat", "overlapped", "bucketed", "zero1", "torch_ddp_tuned"),
    epochs=4,
    train_tokens=491_520,
)
REPRODUCIBLE = TRAINING.but(
    "reproducible",
    attention=("flash_gluon", "flash_triton"),
    strategy=("none", "naive", "bucketed", "zero1", "fsdp"),
    compile=("eager", "graphed"),
    reproducible=BOTH,
)

SMOKE = {
    "model": (
        Grid("smoke", size=("tiny",), context=(64,), precision=("fp32", "bf16"), compile=("eager",), batch=(2,)),
    ),
    "anatomy": (ANATOMY_SMOKE,),
    "loss": (CPU_LOSS.but("smoke", vocab_size=(1000,), precision=("fp32", "bf16"), row=("chunked", "eager")),),
    "collectives": (COLLECTIVES.but("smoke", megabytes=(1,)),),
    "data_parallel": (CPU_PARALLEL.but("smoke", world_size=(2,)),),
    "tokenizer": (Grid("smoke", text_bytes=100_000, vocab_size=500, rounds=1),),
    "training": (
        CPU_TRAINING.but(
            "smoke",
            attention=("naive", "sdpa_flash"),
            strategy=("none", "bucketed"),
            batch=(2,),
            epochs=2,
            train_tokens=512,
            val_tokens=256,
            vocab_size=300,
        ),
    ),
    "steps": (
        EIGHT_B.but(
            "smoke",
            size=("tiny",),
            context=(32,),
            compile=("eager",),
            checkpoint=("attention*1,matmuls*1",),
            residual=("wide",),
            world_size=(2,),
            steps=8,
        ),
    ),
}
FULL = {
    "attention": (
        TOKENS16K,
        TOKENS16K.but(
            "dtypes", length=square(2048), head_dim=(128,), dtype=("float32", "float16", "bfloat16"), causal=(True,)
        ),
        LEADERBOARD,
        BY_LENGTH,
        TIERS,
        Grid(
            "eager_compiled",
            length=square(256, 1024, 4096, 8192, 16384),
            head_dim=(16, 32, 64, 128),
            dtype=("float32",),
            causal=(False,),
            direction=("fwd", "bwd"),
            batch=(8,),
            attention=("naive", "naive_compiled"),
        ),
        FLASH,
        DOCUMENTS,
        WINDOW,
        GROUPED,
        DECODE,
    ),
    "loss": (Grid("vocabularies", vocab_size=(10_000, 32_000, 50_257, 128_000)),),
    "collectives": (COLLECTIVES.but("sizes", world_size=(2, 4, 8)),),
    "data_parallel": (
        *TARGETS,
        TARGETS[-1].but(
            "narrow",
            strategy=("none", "bucketed"),
            bucket_mb=(25,),
            comm_dtype=("float32", "bfloat16"),
            compile=("compiled",),
        ),
        BUCKETS,
        BUCKETS.but("sharded", strategy=("none", "overlapped"), sharded_optimizer=(False, True)),
        # Strategies with copy engines are left out: in one process they work in groups of a single size only.
        PARALLEL.but("scaling", world_size=(1, 2, 4, 8), strategy=("none", "bucketed", "zero1", "fsdp")),
    ),
    "tokenizer": (Grid("corpus", text_bytes=None, vocab_size=10_000),),
}
ANATOMY_FULL = ANATOMY.but(size=("small", "medium", "xl"), context=(512, 1024))
SWEEPS = {
    "smoke": {
        "cpu": Sweep(
            seconds_per_row=0.02,
            grids={"attention": smoke(length=64, odd=137, head_dim=32, batch=1, compiled_dtype="float32"), **SMOKE},
        ),
        "cuda": Sweep(
            seconds_per_row=0.05,
            grids={"attention": smoke(length=512, odd=545, head_dim=64, batch=2, compiled_dtype="bfloat16"), **SMOKE},
        ),
    },
    "default": {
        "cpu": Sweep(
            seconds_per_row=0.1,
            grids={
                "attention": (
                    CPU_BY_LENGTH.but(without=COMPILED_ROWS),
                    CPU_BY_LENGTH.but(length=square(256, 1024), attention=COMPILED_ROWS),
                    FLASH.but(
                        length=square(128, 1024),
                        head_dim=(64,),
                        dtype=("float32",),
                        direction=("fwd", "fwdbwd"),
                        attention=(*FLASH_ROWS, "vectorized", "flash_torch"),
                    ),
                    TIERS.but(
                        length=((128, 64), (256, 128), (256, 512)),
                        dtype=("float32",),
                        causal=(False,),
                        batch=(1,),
                        heads=((4, 4),),
                        attention=("naive", "vectorized", "flash_torch", "sdpa_math", "sdpa_flash"),
                    ),
                    DOCUMENTS.but(**SMALL, tokens=1024, width=256, documents=("mixed",)),
                    WINDOW.but(**SMALL, tokens=1024, width=256, window=(128,)),
                    GROUPED.but(**SMALL, batch=(1,), heads=((8, 2),)),
                    DECODE.but(
                        **SMALL | {"length": ((1, 4096),), "direction": ("fwd",)}, batch=(1, 8), heads=((8, 2),)
                    ),
                ),
                "model": (Grid("default", size=("tiny",), context=(128,), precision=("fp32",), batch=(2,)),),
                "anatomy": (ANATOMY_SMOKE.but(context=(128,), attention=("naive", "auto")),),
                "loss": (CPU_LOSS,),
                "collectives": (COLLECTIVES.but(megabytes=(1, 10)),),
                "data_parallel": (CPU_PARALLEL,),
                "tokenizer": (TOKENIZER.but(text_bytes=1_000_000),),
                "training": (CPU_TRAINING,),
            },
            took_s=json.loads(Path(__file__).with_name("durations_cpu.json").read_text()),
        ),
        "cuda": Sweep(
            seconds_per_row=0.15,
            grids={
                "attention": (
                    TOKENS16K.but(length=square(1024, 16384), causal=(True,), without=(*SLOW_ROWS, "flex")),
                    TOKENS16K.but(length=square(1024), head_dim=(128,), causal=(True,), attention=("flex",)),
                    LEADERBOARD.but(without=(*SLOW_ROWS, "flex")),
                    BY_LENGTH.but(length=square(512, 8192), causal=(True,), without=COMPILED_ROWS),
                    FLASH.but(
                        length=square(1024, 16384), head_dim=(64,), dtype=("bfloat16",), direction=("fwd", "fwdbwd")
                    ),
                    TIERS.but(length=((128, 64), (512, 2048)), causal=(False,), without=COMPILED_ROWS),
                    DOCUMENTS.but(head_dim=(128,), length=square(4096), documents=("mixed",)),
                    WINDOW.but(head_dim=(128,), length=square(4096)),
                    GROUPED.but(length=square(4096), batch=(1,), heads=((32, 8),), without=(*SLOW_ROWS, "flex")),
                    DECODE.but(length=((1, 32768),), batch=(8,), without=(*SLOW_ROWS, "flex")),
                ),
                "model": (Grid("default", size=("small",), context=(512,)), PEER),
                "anatomy": (ANATOMY,),
                "loss": (Grid("default", vocab_size=(10_000, 128_000)),),
                "collectives": (COLLECTIVES.but(megabytes=(1, 10, 100)),),
                "data_parallel": (PARALLEL,),
                "tokenizer": (TOKENIZER,),
                "training": (TRAINING,),
            },
        ),
    },
    "full": {
        "cpu": Sweep(
            seconds_per_row=0.3,
            grids=FULL
            | {"model": MODEL_FULL, "anatomy": (ANATOMY_FULL.but(attention=("naive", "auto")),)}
            | {
                "training": (
                    CPU_TRAINING.but("matrix", strategy=MATRIX["strategy"], train_tokens=12_800),
                    CPU_TRAINING.but(
                        "reproducible",
                        attention=("sdpa_flash",),
                        strategy=REPRODUCIBLE["strategy"],
                        reproducible=BOTH,
                        train_tokens=12_800,
                    ),
                )
            },
            sustained=True,
        ),
        "cuda": Sweep(
            seconds_per_row=0.3,
            grids=FULL
            | {
                "model": (
                    *MODEL_FULL,
                    LEVELS,
                    PEER,
                    PEER.but(size=("medium",), batch=(8,)),
                    PEER.but(size=("xl",), batch=(4,)),
                ),
                "anatomy": (
                    ANATOMY_FULL,
                    ANATOMY_FULL.but(compile=("compiled",), attention=ANATOMY_FULL["attention"][-1:]),
                ),
            }
            | {"training": (MATRIX, REPRODUCIBLE), "steps": STEPS},
            sustained=True,
        ),
    },
}


def without_bfloat16(sweep: Sweep) -> Sweep:
    """A copy of the sweep for a GPU without bfloat16: float16 takes its place.

    The precision fp16 needs a scaled loss, so fp32 takes the place of bf16 in benchmarks that do not scale the loss.
    `conftest.py` calls this for GPUs of compute capability below 8.0.
    """
    grids = dict[str, tuple[Grid, ...]]()
    for benchmark, originals in sweep.grids.items():
        instead = {"bfloat16": "float16", "bf16": "fp16" if benchmark in ("model", "anatomy", "loss") else "fp32"}
        grids[benchmark] = tuple(_with_replaced(grid, instead) for grid in originals)
    return replace(sweep, grids=grids)


def _with_replaced(grid: Grid, instead: dict[str, str]) -> Grid:
    """The grid with other dtypes and precisions, by `instead`, {name: the name in its place}.

    A grid without precisions has the default of `axes.py`, bf16.
    """
    values: dict[str, Any] = {"precision": ("bf16",), **grid}
    for axis in values.keys() & {"dtype", "precision", "comm_dtype"}:
        values[axis] = tuple(dict.fromkeys(instead.get(name, name) for name in values[axis]))
    return grid.but(**values)
