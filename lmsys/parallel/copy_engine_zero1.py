"""ZeRO stage 1 whose gradients and parameters the GPUs' copy engines carry: see `zero1` and `exchange`.

Parameters live in memory that the GPUs of one node see of one another. The rank that has stepped them copies them to
its peers.
Unlike those of `zero1`, gradients of all ranks' parameters are held until the end of the synchronization.
"""

from torch import nn

from lmsys.parallel.collectives import Group
from lmsys.parallel.copy_engine import CopyEngine
from lmsys.parallel.zero1 import Zero1


class CopyEngineZero1(Zero1):
    """bucket_mb: as in `Zero1`, but 32 MiB of a segment by default. ValueError as in `CopyEngines`."""

    over = CopyEngine.over
    why_not_reproducible = CopyEngine.why_not_reproducible
    all_reduce_model = CopyEngine.all_reduce_model
    kernels = CopyEngine.kernels

    def __init__(self, module: nn.Module, process_group: Group = None, bucket_mb: float | str = 32):
        super().__init__(module, process_group, bucket_mb)
