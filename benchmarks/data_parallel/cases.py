"""The tests of data parallelism: what each is asked, how its strategy is built, and what holds two of them together.

Two versions of a step take the same steps from the same weights on the same batches. They are held to each other by
their bits where these must agree, else by the tolerance: `benchmarks.data_parallel.passes` says how each is held to
plain steps in float64. A pair whose bits agree needs no tolerance, whatever was expected.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import torch

from benchmarks.models import AUTOCAST, LLAMA, TrainedCase
from lmsys.bench import Entry, Grid, Record

NARROW = ("comm_dtype", "compute_dtype")
Narrow = tuple[str, torch.dtype] | None  # which of these, and what it is
MODELS = {"ours": None, "llama": replace(LLAMA, target="benchmarks.model.llama:ShardedLlama")}


@dataclass(frozen=True)
class ParallelCase(TrainedCase):
    """A model trained by a strategy on so many ranks; all strategies, sizes of buckets and numbers of ranks compare.

    asked_bucket_mb  MiB, "auto", "all" for one bucket, or None: the strategy has no buckets, or a size of its own
    comm_dtype       the dtype that is sent; float32 is that of the gradients
    """

    world_size: int
    asked_bucket_mb: float | str | None = None
    comm_dtype: str = "float32"
    sharded_optimizer: bool = False

    @property
    def impl(self) -> str:
        mb = self.asked_bucket_mb
        bucket = "" if mb is None else f"-{mb}" if isinstance(mb, str) else f"-{mb}MiB"
        comm = "" if self.comm_dtype == "float32" else f"-{self.comm_dtype}"
        return f"{self.entry.name}{bucket}{comm}{'-sharded' if self.sharded_optimizer else ''}{self.keeps}"

    @property
    def id(self) -> str:
        return f"{self.comparison}-W{self.world_size}-{self.impl}"

    @property
    def options(self) -> dict[str, Any]:
        """The options that the strategy is built with."""
        asked = {
            "bucket_mb": self.asked_bucket_mb,
            "comm_dtype": None if self.comm_dtype == "float32" else getattr(torch, self.comm_dtype),
            "compute_dtype": torch.bfloat16 if self.precision == "bf16" and self.entry.trait("compute_dtype") else None,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        return given | {"bucket_mb": None} if self.asked_bucket_mb == "all" else given

    @property
    def whole_model(self) -> Entry | None:
        """The row of somebody else's model that is trained instead of ours."""
        return None

    @property
    def narrow(self) -> Narrow:
        """The option whose dtype is narrower than the precision says: of what is sent, or computed with."""
        return next(((name, self.options[name]) for name in NARROW if name in self.options), None)

    def same_bits(self, other: "ParallelCase") -> bool:
        """True if steps of both add the same numbers in the same order, so that no bit of the weights may differ.

        These are eager ones on a CPU, of one precision and stream. What blocks keep changes no number there. Nor do
        strategies that say so (`halves_sums`): two ranks have one order alone, unless what they add is rounded.
        """
        if (self.device, self.compile, self.world_size) != (other.device, other.compile, other.world_size):
            return False
        if (self.device, self.compile) != ("cpu", "eager") or self.residual != other.residual:
            return False
        exact = self.precision == "fp32" and self.narrow == other.narrow is None and self.world_size <= 2
        adds = all(one.entry.trait("halves_sums", False) for one in (self, other))
        return replace(self, checkpoint=other.checkpoint) == other or (exact and adds)


@dataclass(frozen=True)
class StepsCase(ParallelCase):
    """A row that trains a model of MODELS alone, for so many timed steps."""

    steps: int = field(default=20, kw_only=True)
    model: str = field(default="ours", kw_only=True)

    @property
    def whole_model(self) -> Entry | None:
        return MODELS[self.model]

    @property
    def keeps(self) -> str:
        return f"-{self.model}" * (self.model != "ours") + super().keeps

    @property
    def why_not_runtime(self) -> str | None:
        """None, or why the model cannot be computed so here, or lacks its packages. ValueError as of any model."""
        if (reason := super().why_not_runtime) is None and self.whole_model is not None:
            if self.precision in AUTOCAST and self.residual == "wide":
                return "the stream between its layers has the dtype of its matmuls: --residual narrow"
            reason = self.whole_model.why_not(self)
        return reason

    @property
    def axes(self) -> Record:
        defaults = "asked_bucket_mb", "comm_dtype", "sharded_optimizer"  # always
        return {name: value for name, value in super().axes.items() if name not in defaults}


def variants(grid: Grid, entry: Entry) -> Iterable[tuple[float | str | None, str, bool]]:
    """(asked_bucket_mb, comm_dtype, sharded_optimizer): of each the grid's values, where the strategy takes them."""
    return product(
        grid["bucket_mb"] if entry.trait("takes_bucket_mb", False) else (None,),
        grid["comm_dtype"] if entry.trait("comm_dtypes", False) else ("float32",),
        grid["sharded_optimizer"] if entry.trait("all_reduces", False) else (False,),
    )


BITS, TOLERANCE, WRONG, UNKNOWN = "bits", "tolerance", "wrong", "unknown"


@dataclass(frozen=True)
class Steps:
    """Steps that a version has taken.

    bits    sha256 of the weights, or of those rows of them that are looked at
    ratios  errors against float64 over their budgets, by parameter; None where plain steps find no room
    """

    case: ParallelCase
    bits: str
    ratios: Mapping[str, float] | None

    @property
    def error_ratio(self) -> float | None:
        return None if self.ratios is None else max(self.ratios.values())


@dataclass(frozen=True)
class Pair:
    """Two versions, what holds them together (BITS or TOLERANCE), or why nothing does (WRONG) or may (UNKNOWN)."""

    first: Steps
    second: Steps
    held_by: str
    why: str


def pair(first: Steps, second: Steps) -> Pair:
    if first.bits == second.bits:
        return Pair(first, second, BITS, "")
    if first.case.same_bits(second.case):
        return Pair(first, second, WRONG, "their weights must have the same bits, and have not")
    for one in (first, second):
        beyond = {name: ratio for name, ratio in (one.ratios or {}).items() if not ratio <= 1}
        for name, ratio in beyond.items():
            return Pair(first, second, WRONG, f"{one.case.impl}: {name} is {ratio:.3g} times the allowed error off")
    if first.ratios is None or second.ratios is None:
        return Pair(first, second, UNKNOWN, "plain steps in float64 do not fit in this memory")
    return Pair(first, second, TOLERANCE, "")


def pairs(versions: Iterable[Steps]) -> list[Pair]:
    """All pairs of versions on as many ranks: others have other batches."""
    both = combinations(versions, 2)
    return [pair(*two) for two in both if len({one.case.world_size for one in two}) == 1]
