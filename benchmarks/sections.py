"""What the tables of a sweep are made of: their axes. Plain data."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, TypeVar

MODES = ("forward", "train_forward", "backward", "optimizer", "step")
STRATEGIES = tuple(
    "none naive flat overlapped bucketed zero1 fsdp torch_ddp torch_ddp_tuned torch_zero1 torch_fsdp2".split()
)


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
    bucket_mbs   MiB, or "auto": of `bucketed` and `copy_engine`
    comm_dtypes  what these send: "float32", as the gradients are, or narrower
    sharded      with the optimizer's state divided among ranks or not, of the strategies that all-reduce gradients
    compiles     eager, compiled block by block, or graphed: that, replayed as one CUDA graph with all that is sent
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
    compiles: tuple[str, ...] = ("eager",)


@dataclass(frozen=True)
class TrainingSection:
    """The axes of one table of whole trainings, attention rows by strategies, on text; the batch is each rank's.

    world_sizes   0: as in CollectiveSection; `none` is one rank that accumulates the batches of all
    bucket_mbs    MiB: of the strategies that have buckets to set
    epochs        passes over train_tokens tokens, rounded down to whole steps; the first is not timed
    val_tokens    of held-out text, on which the loss after the last epoch is taken
    """

    name: str
    sizes: tuple[str, ...]
    contexts: tuple[int, ...]
    rows: tuple[str, ...]
    strategies: tuple[str, ...]
    precisions: tuple[str, ...] = ("bf16",)
    compiles: tuple[str, ...] = ("eager",)
    batch: tuple[int, ...] = (8,)
    world_sizes: tuple[int, ...] = (0,)
    bucket_mbs: tuple[int | str, ...] = (25,)
    epochs: int = 4
    train_tokens: int = 491_520
    val_tokens: int = 65_536
    vocab_size: int = 10_000


S = TypeVar("S", ParallelSection, TrainingSection)


def with_axes(section: S, axes: dict[str, Any]) -> S:
    """The section with what the command line gives in the place of its own."""
    known = {field.name for field in fields(section)}
    return replace(section, **{name: value for name, value in axes.items() if name in known})


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
    trainings: tuple[TrainingSection, ...] = ()


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
