"""Traits of attention rows and strategies, with types and defaults. Imports no torch.

A row is an implementation in a table (`lmsys.registry`). A trait is a fact about a row on which benchmarks, checks,
reports or the training loop act, so that they need not know rows by name. A row states the traits in which it differs
from the defaults, in its table or as attributes of its function or class; readers call `AttentionTraits.of(row)` and
`StrategyTraits.of(row)`.

A new trait is a field here and a line in the docstring of its class. Traits that rows of every table have, such as
`color` and `compiles`, are in `lmsys.registry.Traits`. With the benchmarks' option `--against` the packages that hold
the tables (`lmsys.attention`, `lmsys.parallel`) are those of an earlier commit. These classes stand outside of the two
packages, so that today's benchmarks can read the traits of rows of that commit.
"""

from dataclasses import dataclass

from lmsys.registry import Traits


@dataclass(frozen=True)
class AttentionTraits(Traits):
    """Traits of an attention row. A function in a user's file has them as attributes.

    keeps_scores  the row holds Q x K scores in memory, which grows as the square of the length
    isolates      NaN and infinity in keys that a pattern hides from a query never reach that query's result
    mask          "module:attr" of a function (pattern, queries, keys, device), which makes the mask or the intervals
                  that the row reads in place of the pattern: benchmarks time it
    """

    keeps_scores: bool = False
    isolates: bool = False
    mask: str = ""


@dataclass(frozen=True)
class StrategyTraits(Traits):
    """Traits of a strategy. Its class has, as attributes, those in which it differs from the defaults.

    synchronizes      False: each rank trains a model of its own, without communication, as the baseline `none` does
    zero_stage        what is divided among ranks between steps (ZeRO). 0: nothing, so every rank has all mean
                      gradients, as a ShardedOptimizer needs them, and a step under no_sync() is the same computation
                      without communication. 1: optimizer state. 2: gradients too. 3: parameters too. None: unknown
    accumulates       gradients can be accumulated: backwards under no_sync() may come before one that synchronizes
    sums_each_backward  the gradients of every backward are summed over ranks, also under no_sync(): they are added over
                      ranks first, and then over micro-batches
    all_reduce_model  the part of its communication time that no computation hides can be predicted from the latency and
                      the bandwidth of an all-reduce
    takes_bucket_mb   it has an option `bucket_mb`, to which the benchmark gives each of its bucket sizes
    tuned_bucket_mb   it has an option `bucket_mb`, which the benchmark chooses by timing a few sizes
    comm_dtypes       it has an option `comm_dtype`, to which the benchmark gives each of its communication dtypes
    compute_dtype     it has an option `compute_dtype`, which the benchmark sets to bfloat16 with precision bf16, so
                      that parameters are gathered in the dtype of the matmuls
    halves_sums       the mean over two ranks is computed as half of their sum, so in float32 two strategies with this
                      trait give the same bits
    fused_adamw       its parameters are DTensors: the optimizer must be torch's own AdamW, on a GPU the fused one
    why_not_graphed   why its step cannot be replayed as a CUDA graph; empty: it can
    why_not_fused     why it cannot train blocks of `TransformerLM.fuse_blocks`: it hooks blocks, or it writes
                      parameters without raising their version counters, so that rounded copies of them are not
                      updated; empty: it can
    why_not_saved     why the training loop cannot save its state in a checkpoint; empty: it can
    why_not_unused    why every rank must use every parameter in each backward; empty: it need not
    why_not_unequal   why ranks must use the same parameters; empty: they need not
    why_not_reproducible  why it cannot add gradients in the order of one tree for any number of ranks, as
                      `train.reproducible` asks; empty: it can

    One fact is an attribute of the class alone, and no trait: `warm_ups_before_graph`, the number of calls before a
    CUDA graph is captured, where the usual number is too small.
    """

    synchronizes: bool = True
    zero_stage: int | None = None
    accumulates: bool = True
    sums_each_backward: bool = False
    all_reduce_model: bool = True
    takes_bucket_mb: bool = False
    tuned_bucket_mb: bool = False
    comm_dtypes: bool = False
    compute_dtype: bool = False
    halves_sums: bool = False
    fused_adamw: bool = False
    why_not_graphed: str = ""
    why_not_fused: str = ""
    why_not_saved: str = ""
    why_not_unused: str = ""
    why_not_unequal: str = ""
    why_not_reproducible: str = ""

    @property
    def shards_gradients(self) -> bool:
        """True if each rank keeps a part of the gradients, so that their norm needs the parts of all ranks."""
        return (self.zero_stage or 0) >= 2
