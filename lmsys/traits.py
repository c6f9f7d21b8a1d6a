"""The traits of attention rows and strategies: facts that others act on, with types and defaults. Imports no torch.

A row states those in which it differs, in its table or as attributes of its function or class; readers call
`AttentionTraits.of(row)` and `StrategyTraits.of(row)`. A new trait is a field here and a line in the docstring. The
classes stand outside of the tables' packages, so that under `--against` today's benchmarks can read the traits of rows
in an earlier state of the code.
"""

from dataclasses import dataclass

from lmsys.registry import Traits


@dataclass(frozen=True)
class AttentionTraits(Traits):
    """Traits of an attention row. A function in a user's file has them as attributes.

    keeps_scores  it holds Q x K scores: memory grows as the square of the length
    isolates      nothing that a pattern hides from a query changes its result, be it NaN
    mask          module:attr of a function (pattern, queries, keys, device), which makes what it reads of a pattern
    """

    keeps_scores: bool = False
    isolates: bool = False
    mask: str = ""


@dataclass(frozen=True)
class StrategyTraits(Traits):
    """Traits of a strategy. Its class has those in which it differs from the defaults as attributes.

    synchronizes      False: every rank trains for itself, as the row `none` does, which others are measured against
    zero_stage        what ranks divide between steps: 0 nothing, so that every rank has all mean gradients, as a
                      ShardedOptimizer needs them, and a step under no_sync() is the same computation without
                      communication; 1 optimizer state, 2 gradients too, 3 parameters too; None: it does not say
    accumulates       backwards under no_sync() may come before one that synchronizes
    sums_each_backward  every backward is summed over ranks, also under no_sync(): ranks come before micro-batches
    all_reduce_model  latency and bandwidth of an all-reduce predict the communication that its buckets expose
    takes_bucket_mb   the benchmark's bucket sizes are its option `bucket_mb`
    tuned_bucket_mb   the benchmark chooses its option `bucket_mb` by timing a few
    comm_dtypes       the benchmark's communication dtypes are its option `comm_dtype`
    compute_dtype     with bf16 its option `compute_dtype` is bfloat16: parameters are gathered as matmuls read them
    halves_sums       the mean over two ranks is their sum, halved: two such strategies have the same bits in float32
    fused_adamw       its parameters are DTensors: the optimizer must be torch's own AdamW, on a GPU the fused one
    why_not_graphed   why its step cannot be replayed as a CUDA graph; empty: it can
    why_not_fused     why it cannot train blocks of `TransformerLM.fuse_blocks`: it hooks blocks, or writes parameters
                      without a change of their versions, so that copies of them would be old; empty: it can
    why_not_saved     why the training loop cannot save its state; empty: it can
    why_not_unused    why every rank must use every parameter in each backward; empty: it need not
    why_not_unequal   why ranks must use the same parameters; empty: they need not
    why_not_reproducible  why its sums cannot be those of a tree; empty: they can

    One fact is an attribute of the class alone, and no trait: `warm_ups_before_graph`, calls before a CUDA graph is
    captured where the usual number is too small.
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
        """True where a rank is left with a part of the gradients: their norm is that of all parts."""
        return (self.zero_stage or 0) >= 2
