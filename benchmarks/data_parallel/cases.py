"""The tests of data parallelism: what each is asked, and how its strategy is built."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from lmsys.bench import Case, Entry, Grid
from lmsys.bench.fields import Record
from lmsys.bench.ranks import backend_of
from lmsys.config import ModelConfig, model_config


@dataclass(frozen=True)
class ParallelCase(Case):
    """A model trained by a strategy on so many ranks, each with a batch of its own.

    compile          eager; compiled, block by block; graphed: that, replayed as one CUDA graph with all that is sent
    asked_bucket_mb  MiB, "auto", or None: the strategy has no buckets, or a size of its own for them
    comm_dtype       the dtype that is sent; float32 is that of the gradients
    """

    size: str
    context: int
    batch: int
    precision: str
    compile: str
    world_size: int
    asked_bucket_mb: float | str | None = None
    comm_dtype: str = "float32"
    sharded_optimizer: bool = False

    @property
    def axes(self) -> Record:
        return {"strategy": self.entry.name, **super().axes, "backend": self.backend}

    @property
    def rows(self) -> Mapping[str, Entry]:
        return {"strategy": self.entry}

    @property
    def comparison(self) -> str:
        """All strategies, sizes of buckets and numbers of ranks."""
        compiled = "" if self.compile == "eager" else f"-{self.compile}"
        return f"{self.section}-{self.size}-S{self.context}B{self.batch}-{self.precision}{compiled}"

    @property
    def impl(self) -> str:
        mb = self.asked_bucket_mb
        bucket = "" if mb is None else f"-{mb}" + "MiB" * (mb != "auto")
        comm = "" if self.comm_dtype == "float32" else f"-{self.comm_dtype}"
        return f"{self.entry.name}{bucket}{comm}{'-sharded' if self.sharded_optimizer else ''}"

    @property
    def id(self) -> str:
        return f"{self.comparison}-W{self.world_size}-{self.impl}"

    @property
    def config(self) -> ModelConfig:
        return model_config(self.size, context_length=self.context)

    @property
    def backend(self) -> str:
        return backend_of(self.device)

    @property
    def synchronizes(self) -> bool:
        return self.entry.trait("synchronizes", True)

    @property
    def options(self) -> dict[str, Any]:
        """The options that the strategy is built with."""
        options: dict[str, Any] = {}
        if self.asked_bucket_mb is not None:
            options["bucket_mb"] = self.asked_bucket_mb
        if self.comm_dtype != "float32":
            options["comm_dtype"] = getattr(torch, self.comm_dtype)
        if self.entry.trait("compute_dtype", False) and self.precision == "bf16":
            options["compute_dtype"] = torch.bfloat16
        return options


def variants(grid: Grid, entry: Entry) -> Iterable[tuple[float | str | None, str, bool]]:
    """(asked_bucket_mb, comm_dtype, sharded_optimizer): of each the grid's values, where the strategy takes them."""
    return product(
        grid["bucket_mb"] if entry.trait("takes_bucket_mb", False) else (None,),
        grid["comm_dtype"] if entry.trait("comm_dtypes", False) else ("float32",),
        grid["sharded_optimizer"] if entry.trait("all_reduces", False) else (False,),
    )
