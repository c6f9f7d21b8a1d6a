"""The sizes to run: named sweeps, the only list of them. Plain data.

A section is one table or figure of the report and part of the test id, so `-k tokens16k` selects it. Its axes are
multiplied; an axis given on the command line takes the place of the section's own.
"""

from dataclasses import replace

from benchmarks.sections import (
    STRATEGIES,
    CollectiveSection,
    LossSection,
    ModelSection,
    ParallelSection,
    Section,
    Sweep,
    TokenizerSection,
    TrainingSection,
)

ANATOMY_MODES = ("forward", "step")  # what is opened up: an inference and a whole training step
POWERS = tuple(2**n for n in range(7, 17))  # 128 ... 65536


def square(*lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((length, length) for length in lengths)


BOTH = (True, False)
COMPILED_ROWS = ("naive_compiled", "flex")
SLOW_ROWS = ("naive", "naive_compiled", "vectorized", "sdpa_math", "flash_torch", "flash_triton_torch_bwd")
FLASH_ROWS = ("naive", "flash_triton_torch_bwd", "flash_triton")

FLASH = Section(
    "flash",
    lengths=square(*POWERS),
    head_dims=(16, 32, 64, 128),
    dtypes=("float32", "bfloat16"),
    causal=(True,),
    directions=("fwd", "bwd", "fwdbwd"),
    rows=FLASH_ROWS,
)
EAGER_COMPILED = Section(
    "eager_compiled",
    lengths=square(256, 1024, 4096, 8192, 16384),
    head_dims=(16, 32, 64, 128),
    dtypes=("float32",),
    causal=(False,),
    directions=("fwd", "bwd"),
    batch=(8,),
    rows=("naive", "naive_compiled"),
)
BY_LENGTH = Section(
    "by_length",
    lengths=square(*(length for length in POWERS if length <= 16384)),
    head_dims=(64,),
    dtypes=("bfloat16",),
    causal=BOTH,
    directions=("fwd",),
    batch=(4,),
    heads=((12, 12),),
)
TIERS = Section(
    "tiers",
    lengths=((128, 64), (64, 128), (256, 128), (128, 256), (512, 256), (1024, 512), (512, 2048), (2048, 1024)),
    head_dims=(64,),
    dtypes=("bfloat16",),
    causal=BOTH,
    directions=("fwd",),
    batch=(4,),
    heads=((12, 12),),
)
TOKENS16K = Section(
    "tokens16k",
    lengths=square(1024, 4096, 16384),
    head_dims=(64, 128),
    dtypes=("bfloat16",),
    causal=BOTH,
    directions=("fwd", "bwd"),
    tokens=16384,
    width=2048,
)
LEADERBOARD = Section(
    "leaderboard",
    lengths=square(16384),
    head_dims=(64,),
    dtypes=("bfloat16",),
    causal=(True,),
    directions=("fwdbwd",),
    heads=((16, 16),),
)
MODEL_SIZES = ("small", "medium", "large", "xl", "2.7b")
MODEL_SMOKE = ModelSection("smoke", ("tiny",), (64,), ("fp32", "bf16"), compiles=("eager",), batch=(2,))
MODEL = ModelSection("default", ("small", "medium"), (512, 1024))
CPU_MODEL = (
    ModelSection("default", ("tiny",), (128,), ("fp32",), batch=(2,)),
    ModelSection("default", ("tiny",), (128,), ("bf16",), compiles=("eager",), batch=(2,)),
)
MODEL_FULL = (
    ModelSection("sizes", MODEL_SIZES, (128, 256, 512, 1024), ("fp32", "bf16")),
    ModelSection(
        "warmup",
        ("small", "medium"),
        (128, 512),
        ("fp32",),
        modes=("forward", "train_forward", "backward"),
        compiles=("eager",),
        warmups=(0, 1, 2, 5),
    ),
    ModelSection("fits", MODEL_SIZES, (512, 1024), modes=("step",), compiles=("eager",), batch=(1, 4, 16)),
)
ANATOMY = ModelSection(
    "anatomy", ("small",), (512,), modes=ANATOMY_MODES, compiles=("eager",), rows=("naive", "flash_triton")
)
ANATOMY_SMOKE = replace(ANATOMY, sizes=("tiny",), contexts=(64,), precisions=("fp32",), batch=(2,), rows=("auto",))
CPU_ANATOMY = replace(ANATOMY_SMOKE, contexts=(128,), rows=("naive", "auto"))
PEER = ModelSection(
    "peers",
    ("small",),
    (1024,),
    modes=("step",),
    compiles=("compiled", "graphed"),
    batch=(16,),
    rows=("auto", "llama"),
)
PEERS = (PEER, replace(PEER, sizes=("medium",), batch=(8,)), replace(PEER, sizes=("xl",), batch=(4,)))
LOSS = LossSection("default", (10_000, 128_000))
LOSS_FULL = LossSection("vocabularies", (10_000, 32_000, 50_257, 128_000))
LOSS_SMOKE = LossSection("smoke", (1000,), (256,), (64,), ("fp32", "bf16"), rows=("chunked", "eager"))
CPU_LOSS = LossSection("default", (2000, 10_000), (256,), (64,), ("fp32",), rows=("chunked", "eager"))
TOKENIZER = TokenizerSection("default", 3_000_000, 4000)
TOKENIZER_SMOKE = TokenizerSection("smoke", 100_000, 500, rounds=1)
TOKENIZER_FULL = TokenizerSection("corpus", None, 10_000)
CPU_BY_LENGTH = replace(
    BY_LENGTH,
    lengths=square(256, 512, 1024),
    dtypes=("float32",),
    causal=(True,),
    directions=("fwd", "bwd"),
    batch=(1,),
    heads=((8, 8),),
)
COLLECTIVES = CollectiveSection("default", (1, 10, 100, 1000))
CPU_COLLECTIVES = replace(COLLECTIVES, megabytes=(1, 10))
SMOKE_COLLECTIVES = replace(COLLECTIVES, name="smoke", megabytes=(1,))
FULL_COLLECTIVES = replace(COLLECTIVES, name="sizes", world_sizes=(2, 4, 8))
PARALLEL = ParallelSection("default", ("small",), (512,), batch=(16,), bucket_mbs=(25, "auto"), compiles=("compiled",))
CPU_PARALLEL = ParallelSection("default", ("tiny",), (32,), ("fp32",), (2,))
SMOKE_PARALLEL = ParallelSection("smoke", ("tiny",), (32,), ("fp32",), (2,), (2,))
# Without copy engines: in one process they work in groups of one size.
SCALING = replace(PARALLEL, name="scaling", world_sizes=(1, 2, 4, 8), strategies=("none", "bucketed", "zero1", "fsdp"))
BUCKETS = ParallelSection(
    "buckets",
    ("xl",),
    (256,),
    batch=(2, 4, 8, 16, 32),
    strategies=("none", "naive", "flat", "overlapped", "bucketed"),
    bucket_mbs=(1, 10, 20, 100, 1000, "auto"),
)
SHARDED = replace(BUCKETS, name="sharded", strategies=("none", "overlapped"), sharded=(False, True))
TARGETS = tuple(
    ParallelSection(
        "sizes",
        (size,),
        (512,),
        batch=(batch,),
        strategies=(*STRATEGIES, "copy_engine", "copy_engine_zero1"),
        bucket_mbs=(25, 100, "auto"),
        compiles=("eager", "compiled", "graphed"),
    )
    for size, batch in (("small", 16), ("medium", 8), ("xl", 4))
)
NARROW = replace(
    TARGETS[-1],
    name="narrow",
    strategies=("none", "bucketed"),
    bucket_mbs=(25,),
    comm_dtypes=("float32", "bfloat16"),
    compiles=("compiled",),
)
PARALLEL_FULL = (*TARGETS, NARROW, BUCKETS, SHARDED, SCALING)
TRAINING = TrainingSection(
    "default",
    ("small",),
    (1024,),
    rows=("flash_triton", "sdpa_cudnn"),
    strategies=("none", "naive", "bucketed", "torch_ddp_tuned"),
    epochs=3,
    train_tokens=262_144,
)
CPU_TRAINING = TrainingSection(
    "default",
    ("tiny",),
    (64,),
    rows=("naive", "vectorized", "sdpa_flash"),
    strategies=("none", "naive", "bucketed", "torch_ddp_tuned"),
    precisions=("fp32",),
    batch=(4,),
    train_tokens=4096,
    val_tokens=2048,
    vocab_size=1000,
)
SMOKE_TRAINING = replace(
    CPU_TRAINING,
    name="smoke",
    rows=("naive", "sdpa_flash"),
    strategies=("none", "bucketed"),
    batch=(2,),
    epochs=2,
    train_tokens=512,
    val_tokens=256,
    vocab_size=300,
)
MATRIX = replace(
    TRAINING,
    name="matrix",
    rows=("naive_compiled", "vectorized", "flash_triton", "sdpa_cudnn"),
    strategies=("none", "naive", "flat", "overlapped", "bucketed", "zero1", "torch_ddp_tuned"),
    epochs=4,
    train_tokens=491_520,
)
CPU_MATRIX = replace(CPU_TRAINING, name="matrix", strategies=MATRIX.strategies, train_tokens=12_800)


def smoke(length: int, head_dim: int, batch: int, heads: int, compiled_dtype: str) -> tuple[Section, ...]:
    """Every direction, dtype and mask at one small shape; rows that compile for seconds in one dtype and mask only."""
    every = Section(
        "smoke",
        lengths=square(length),
        head_dims=(head_dim,),
        dtypes=("float32", "bfloat16"),
        causal=BOTH,
        directions=("fwd", "bwd", "fwdbwd"),
        batch=(batch,),
        heads=((heads, heads),),
        without=COMPILED_ROWS,
    )
    return every, replace(every, dtypes=(compiled_dtype,), causal=(True,), rows=COMPILED_ROWS, without=())


def with_compiled(section: ModelSection) -> tuple[ModelSection, ...]:
    """The section, and its last row compiled."""
    return section, replace(section, compiles=("compiled",), rows=section.rows[-1:])


SWEEPS = {
    "smoke": {
        "cpu": Sweep(
            0.02,
            smoke(length=64, head_dim=32, batch=1, heads=2, compiled_dtype="float32"),
            (MODEL_SMOKE,),
            (ANATOMY_SMOKE,),
            losses=(LOSS_SMOKE,),
            collectives=(SMOKE_COLLECTIVES,),
            parallels=(SMOKE_PARALLEL,),
            tokenizers=(TOKENIZER_SMOKE,),
            trainings=(SMOKE_TRAINING,),
        ),
        "cuda": Sweep(
            0.05,
            smoke(length=512, head_dim=64, batch=2, heads=4, compiled_dtype="bfloat16"),
            (MODEL_SMOKE,),
            (ANATOMY_SMOKE,),
            losses=(LOSS_SMOKE,),
            collectives=(SMOKE_COLLECTIVES,),
            parallels=(SMOKE_PARALLEL,),
            tokenizers=(TOKENIZER_SMOKE,),
            trainings=(SMOKE_TRAINING,),
        ),
    },
    "default": {
        "cpu": Sweep(
            0.1,
            (
                replace(CPU_BY_LENGTH, without=COMPILED_ROWS),
                replace(CPU_BY_LENGTH, lengths=square(256, 1024), rows=COMPILED_ROWS),
                replace(
                    FLASH,
                    lengths=square(128, 1024),
                    head_dims=(64,),
                    dtypes=("float32",),
                    directions=("fwd", "fwdbwd"),
                    rows=(*FLASH_ROWS, "vectorized", "flash_torch"),
                ),
                replace(
                    TIERS,
                    lengths=((128, 64), (256, 128), (256, 512)),
                    dtypes=("float32",),
                    causal=(False,),
                    batch=(1,),
                    heads=((4, 4),),
                    rows=("naive", "vectorized", "flash_torch", "sdpa_math", "sdpa_flash"),
                ),
            ),
            CPU_MODEL,
            (CPU_ANATOMY,),
            losses=(CPU_LOSS,),
            collectives=(CPU_COLLECTIVES,),
            parallels=(CPU_PARALLEL,),
            tokenizers=(TOKENIZER,),
            trainings=(CPU_TRAINING,),
        ),
        "cuda": Sweep(
            0.15,
            (
                replace(TOKENS16K, causal=(True,), without=SLOW_ROWS),
                replace(LEADERBOARD, without=SLOW_ROWS),
                replace(BY_LENGTH, lengths=square(512, 2048, 8192), without=COMPILED_ROWS),
                replace(FLASH, lengths=square(1024, 4096, 16384), head_dims=(64,)),
                replace(TIERS, lengths=((128, 64), (512, 256), (512, 2048)), causal=(False,), without=COMPILED_ROWS),
            ),
            (MODEL, PEER),
            with_compiled(ANATOMY),
            losses=(LOSS,),
            collectives=(COLLECTIVES,),
            parallels=(PARALLEL,),
            tokenizers=(TOKENIZER,),
            trainings=(TRAINING,),
        ),
    },
}
_FULL = Sweep(
    0.3,
    (TOKENS16K, LEADERBOARD, BY_LENGTH, TIERS, EAGER_COMPILED, FLASH),
    MODEL_FULL,
    losses=(LOSS_FULL,),
    collectives=(FULL_COLLECTIVES,),
    parallels=PARALLEL_FULL,
    tokenizers=(TOKENIZER_FULL,),
    trainings=(MATRIX,),
)
_ANATOMY_FULL = replace(ANATOMY, sizes=("small", "medium", "xl"), contexts=(512, 1024))
SWEEPS["full"] = {
    "cpu": replace(_FULL, anatomies=(replace(_ANATOMY_FULL, rows=("naive", "auto")),), trainings=(CPU_MATRIX,)),
    "cuda": replace(_FULL, models=MODEL_FULL + PEERS, anatomies=with_compiled(_ANATOMY_FULL)),
}
