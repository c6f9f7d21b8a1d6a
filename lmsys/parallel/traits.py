"""Facts about a strategy that benchmarks, training and reports act on."""

from lmsys.registry import Entry


class Traits:
    """Class attributes with their defaults. A strategy sets those in which it differs; `Entry.trait` reads them.

    synchronizes      False: every rank trains for itself, and the others are measured against that
    zero_stage        what ranks divide between steps: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too
    shards_gradients  a rank is left with a part of the gradients: their norm is that of all parts
    all_reduces       every rank gets all mean gradients, so that a ShardedOptimizer may step them
    accumulates       backwards under no_sync() may come before one that synchronizes
    sums_each_backward  every backward is summed over ranks, also under no_sync(): ranks come before micro-batches
    local_step        a step under no_sync() is the same computation without communication
    all_reduce_model  latency and bandwidth of an all-reduce predict the communication that its buckets expose
    takes_bucket_mb   the benchmark's bucket sizes are its option `bucket_mb`
    tuned_bucket_mb   the benchmark chooses its option `bucket_mb` by timing a few
    comm_dtypes       the benchmark's communication dtypes are its option `comm_dtype`
    compute_dtype     with bf16 its option `compute_dtype` is bfloat16: parameters are gathered as matmuls read them
    halves_sums       a mean gradient of two ranks is the sum of theirs, halved: in float32 these are the same bits
    fused_adamw       its parameters are DTensors: the optimizer must be torch's own AdamW, on a GPU the fused one
    why_not_graphed   why its step cannot be replayed as a CUDA graph; empty: it can
    why_not_fused     why it cannot train blocks of `TransformerLM.fuse_blocks`: it hooks blocks, or writes parameters
                      without a change of their versions, so that copies of them would be old; empty: it can
    why_not_saved     why the training loop cannot save its state; empty: it can
    why_not_unused    why every rank must use every parameter in each backward; empty: it need not
    why_not_unequal   why ranks must use the same parameters; empty: they need not
    why_not_reproducible  why its sums cannot be those of a tree; empty: they can
    baseline          rows are compared with the timed row of the largest number; 0: never with this one
    rivals            the rows that the report compares it with
    kernels           a regular expression found in the names of its own device kernels: they count as communication

    One trait has no default: `warm_ups_before_graph`, calls before a CUDA graph is captured where the usual number is
    too small.
    """

    synchronizes: bool = True
    zero_stage: int = 0
    shards_gradients: bool = False
    all_reduces: bool = False
    accumulates: bool = True
    sums_each_backward: bool = False
    local_step: bool = True
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
    baseline: int = 0
    rivals: tuple[str, ...] = ()
    kernels: str = ""


def traits_of(row: Entry) -> Traits:
    """All facts of a row: those that neither its table nor its class states have their defaults."""
    traits = Traits()
    for name in Traits.__annotations__:
        setattr(traits, name, row.trait(name, getattr(Traits, name)))
    return traits


SURROUNDS_BLOCKS = "it waits for the parameters of a block when that is called, and fused blocks are not called"
RESIZES_PARAMETERS = (  # why_not_graphed of strategies of stage 3
    "it allocates and frees whole parameters inside of every step, and the memory of what a CUDA graph replays stays"
    " where it is: --compile compiled runs it"
)
