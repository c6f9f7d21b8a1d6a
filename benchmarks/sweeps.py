"""The sizes to run: named sweeps, the only list of them. Plain data.

A section is one table or figure of the report and part of the test id, so `-k tokens16k` selects it. Its axes are
multiplied; an axis given on the command line takes the place of the section's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

MODES = ("forward", "train_forward", "backward", "optimizer", "step")
STRATEGIES = tuple(
    "none naive flat overlapped bucketed zero1 fsdp torch_ddp torch_ddp_tuned torch_zero1 torch_fsdp2".split()
)
ANATOMY_MODES = ("forward", "step")  # what is opened up: an inference and a whole training step
POWERS = tuple(2**n for n in range(7, 17))  # 128 ... 65536


@dataclass(frozen=True)
class Shape:
    """q (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim)."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int


@dataclass(frozen=True)
class Section:
    """The axes of one table.

    lengths   (queries, keys)
    heads     (query heads, key/value heads)
    tokens    when not 0: batch is tokens / queries, and `batch` is not read
    width     when not 0: heads is width / head_dim, and `heads` is not read
    rows      the implementations to compare; empty: every row of the table, but for those in `without`
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    causal: tuple[bool, ...]
    directions: tuple[str, ...]
    batch: tuple[int, ...] = (1,)
    heads: tuple[tuple[int, int], ...] = ((1, 1),)
    tokens: int = 0
    width: int = 0
    rows: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def takes(self, row: str) -> bool:
        return row not in self.without and (not self.rows or row in self.rows)

    def shapes(self) -> Iterator[Shape]:
        for head_dim, (queries, keys) in product(self.head_dims, self.lengths):
            batches = (max(1, self.tokens // queries),) if self.tokens else self.batch
            num_heads = max(1, self.width // head_dim)
            all_heads = ((num_heads, num_heads),) if self.width else self.heads
            for batch, (heads, kv_heads) in product(batches, all_heads):
                yield Shape(batch, heads, kv_heads, queries, keys, head_dim)


@dataclass(frozen=True)
class ModelSection:
    """The axes of one table of the language model: named sizes, sequence lengths and what is done with them.

    rows     attention rows; "auto" is the fastest that can; "llama" is no row but Hugging Face's whole model
    warmups  when given: so many untimed steps before ten timed ones, each in a process of its own
    """

    name: str
    sizes: tuple[str, ...]
    contexts: tuple[int, ...]
    precisions: tuple[str, ...] = ("bf16",)
    modes: tuple[str, ...] = MODES
    compiles: tuple[str, ...] = ("eager", "compiled")
    batch: tuple[int, ...] = (4,)
    rows: tuple[str, ...] = ("auto",)
    warmups: tuple[int | None, ...] = (None,)


@dataclass(frozen=True)
class LossSection:
    """The axes of one table of the language model's head and loss, forward and backward.

    rows   "chunked" is ours; "eager" and "compiled" make the logits of all tokens at once
    """

    name: str
    vocab_sizes: tuple[int, ...]
    tokens: tuple[int, ...] = (16384,)
    d_models: tuple[int, ...] = (1024,)
    precisions: tuple[str, ...] = ("bf16",)
    rows: tuple[str, ...] = ("chunked", "eager", "compiled")


@dataclass(frozen=True)
class CollectiveSection:
    """The axes of one table of collectives: operations on tensors of some megabytes, 10^6 bytes.

    world_sizes  0: as many ranks as this machine has GPUs, on a CPU two
    backends     empty: every one that this machine has
    """

    name: str
    megabytes: tuple[int, ...]
    operations: tuple[str, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    world_sizes: tuple[int, ...] = (0,)
    backends: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParallelSection:
    """The axes of one table of data parallelism; the batch is each rank's.

    world_sizes  0: as in CollectiveSection; of one rank there is `none` only, which the others are compared with
    bucket_mbs   MiB, or "auto": of `bucketed`
    comm_dtypes  what `bucketed` sends: "float32", as the gradients are, or narrower
    sharded      with the optimizer's state divided among ranks or not, of the strategies that all-reduce gradients
    """

    name: str
    sizes: tuple[str, ...]
    contexts: tuple[int, ...]
    precisions: tuple[str, ...] = ("bf16",)
    batch: tuple[int, ...] = (4,)
    world_sizes: tuple[int, ...] = (1, 0)
    strategies: tuple[str, ...] = STRATEGIES
    bucket_mbs: tuple[int | str, ...] = (25,)
    comm_dtypes: tuple[str, ...] = ("float32",)
    sharded: tuple[bool, ...] = (False,)


@dataclass(frozen=True)
class TokenizerSection:
    """The axes of one table of tokenizers, each training and encoding on the standard library's text.

    text_bytes  how much of the text; None: all, about 30 MB
    processes   of ours, and threads of the others
    rounds      how often each row is sampled at least: a training takes seconds
    """

    name: str
    text_bytes: int | None
    vocab_size: int
    tasks: tuple[str, ...] = ("train", "encode")
    rows: tuple[str, ...] = ("lmsys", "lmsys_serial", "tiktoken", "huggingface")
    processes: int = 2
    rounds: int = 3


@dataclass(frozen=True)
class Sweep:
    """Sections, and for how many seconds each row of a comparison is sampled.

    anatomies   which models are opened up, to see where their time and memory go
    """

    seconds_per_row: float
    sections: tuple[Section, ...]
    models: tuple[ModelSection, ...] = ()
    anatomies: tuple[ModelSection, ...] = ()
    losses: tuple[LossSection, ...] = ()
    collectives: tuple[CollectiveSection, ...] = ()
    parallels: tuple[ParallelSection, ...] = ()
    tokenizers: tuple[TokenizerSection, ...] = ()


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
PARALLEL = ParallelSection("default", ("small",), (512,), batch=(16,), bucket_mbs=(25, "auto"))
CPU_PARALLEL = ParallelSection("default", ("tiny",), (32,), ("fp32",), (2,))
SMOKE_PARALLEL = ParallelSection("smoke", ("tiny",), (32,), ("fp32",), (2,), (2,))
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
    ParallelSection("sizes", (size,), (512,), batch=(batch,), bucket_mbs=(25, 100, "auto"))
    for size, batch in (("small", 16), ("medium", 8), ("xl", 4))
)
NARROW = replace(
    TARGETS[-1],
    name="narrow",
    strategies=("none", "bucketed"),
    bucket_mbs=(25,),
    comm_dtypes=("float32", "bfloat16"),
)
PARALLEL_FULL = (*TARGETS, NARROW, BUCKETS, SHARDED, SCALING)


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
)
_ANATOMY_FULL = replace(ANATOMY, sizes=("small", "medium", "xl"), contexts=(512, 1024))
SWEEPS["full"] = {
    "cpu": replace(_FULL, anatomies=(replace(_ANATOMY_FULL, rows=("naive", "auto")),)),
    "cuda": replace(_FULL, models=MODEL_FULL + PEERS, anatomies=with_compiled(_ANATOMY_FULL)),
}


@dataclass(frozen=True)
class Axes:
    """What the command line puts in the place of a section's own axes; empty: nothing."""

    batch: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    head_dims: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    causal: tuple[bool, ...] = ()
    directions: tuple[str, ...] = ()

    def over(self, section: Section) -> Section:
        given = {name: value for name, value in vars(self).items() if value}
        if self.batch:
            given["tokens"] = 0
        if self.heads:
            given["width"] = 0
        return replace(section, **given)
