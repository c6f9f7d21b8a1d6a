"""The tests of data parallelism: what each is asked, and what it is called."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.ranks import default_world_size
from benchmarks.sections import ParallelSection, with_axes
from lmsys.attention.compiled import why_no_compiler
from lmsys.config import ModelConfig, model_config
from lmsys.parallel import STRATEGIES
from lmsys.registry import Entry

BUCKETED = ("bucketed", "copy_engine")
COPY_ENGINES = ("copy_engine", "copy_engine_zero1")
ALL_REDUCE = ("naive", "flat", "overlapped", *BUCKETED, "torch_ddp", "torch_ddp_tuned")  # others shard by themselves
TUNED = "torch_ddp_tuned"
FULLY_SHARDED = ("fsdp", "torch_fsdp2")  # parameters are gathered inside of a step, in what the matmuls read


@dataclass(frozen=True)
class Cell:
    """One test: a model trained by a strategy on so many ranks, each with a batch of its own.

    compile     eager; compiled, each block for itself; graphed: that, replayed as one CUDA graph with all that it sends
    bucket_mb   MiB, "auto", or None: the strategy has no buckets, or its own size for them
    comm_dtype  what is sent, where that is not what gradients are
    """

    section: str
    size: str
    context: int
    batch: int
    precision: str
    compile: str
    world_size: int
    entry: Entry
    device: str
    bucket_mb: float | str | None = None
    comm_dtype: str | None = None
    sharded: bool = False

    @property
    def group(self) -> str:
        """What is compared: all strategies, sizes of buckets and numbers of ranks."""
        compiled = "" if self.compile == "eager" else f"-{self.compile}"
        return f"{self.section}-{self.size}-S{self.context}B{self.batch}-{self.precision}{compiled}"

    @property
    def row(self) -> str:
        """The strategy with its options."""
        bucket = "" if self.bucket_mb is None else f"-{self.bucket_mb}" + "MiB" * (self.bucket_mb != "auto")
        comm = f"-{self.comm_dtype}" if self.comm_dtype else ""
        return f"{self.entry.name}{bucket}{comm}{'-sharded' if self.sharded else ''}"

    @property
    def id(self) -> str:
        return f"{self.group}-W{self.world_size}-{self.row}"

    @property
    def config(self) -> ModelConfig:
        return model_config(self.size, context_length=self.context)

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    def why_not(self) -> str | None:
        """The reason why this cannot be run, if there is one."""
        if self.compile != "eager" and (reason := why_no_compiler(self.device)):
            return reason
        if self.compile == "graphed" and self.device != "cuda":
            return "CUDA graphs are of CUDA devices"
        if self.compile == "graphed" and self.entry.name in FULLY_SHARDED:
            return (
                "it allocates and frees whole parameters inside of every step, and the memory of what a CUDA graph"
                " replays stays where it is: --compile compiled runs it"
            )
        if self.precision == "fp16":
            return "float16 gradients need loss scaling, which no strategy here does: --precision bf16"
        return self.entry.why_not(self)


def cells_of(section: ParallelSection, axes: dict[str, Any], device: str) -> Iterator[Cell]:
    """Numbers of ranks that the section sets and the machine has not are left out; those asked for are not."""
    one = with_axes(section, axes)
    entries = STRATEGIES.select(one.strategies)
    most = default_world_size("nccl" if device == "cuda" else "gloo")
    asked = "world_sizes" in axes
    sizes = list(dict.fromkeys(size or most for size in one.world_sizes if asked or size <= most))
    for group in product(one.sizes, one.contexts, one.batch, one.precisions, one.compiles):
        for world_size, entry in product(sizes, entries):
            if world_size > 1 or entry.name == "none":
                start = (section.name, *group, world_size, entry, device)
                yield from (Cell(*start, *variant) for variant in variants(one, entry.name))


def variants(section: ParallelSection, strategy: str) -> Iterable[tuple[float | str | None, str | None, bool]]:
    """(bucket_mb, comm_dtype, sharded): of the bucketed strategies all, of the others what they know."""
    bucketed = strategy in BUCKETED
    buckets = section.bucket_mbs if bucketed else (None,)
    dtypes = [None if name == "float32" else name for name in section.comm_dtypes] if bucketed else [None]
    sharded = section.sharded if strategy in ALL_REDUCE else (False,)
    return product(buckets, dtypes, sharded)
