"""ZeRO stage 1 whose gradients and parameters the GPUs' copy engines carry: see `zero1` and `exchange`.

Parameters live in memory that the GPUs of one node see of one another. The rank that has stepped them copies them to
its peers.
Unlike those of `zero1`, gradients of all ranks' parameters are held until the end of the synchronization.
"""

import torch
from torch import nn

from lmsys.parallel.buckets import Segmented
from lmsys.parallel.collectives import Group, Pending
from lmsys.parallel.copy_engine import OverSymmetricMemory
from lmsys.parallel.sharded_optimizer import FlatBuffer, flatten
from lmsys.parallel.wrapper import dense
from lmsys.parallel.zero1 import Zero1


class CopyEngineZero1(OverSymmetricMemory, Zero1):
    """bucket_mb: as in `Zero1`. ValueError where ranks are not GPUs of one node under NCCL."""

    def __init__(self, module: nn.Module, process_group: Group = None, bucket_mb: float = 32):
        super().__init__(module, process_group, bucket_mb)
        if self.world_size > 1 and self.trainable:
            dtypes = [members[0].dtype for members in self._members]
            self._exchange = self._symmetric.exchange(self._layouts, dtypes, whole=False)
            self._views = [layout.views(x) for layout, x in zip(self._owned, self._exchange.flats, strict=True)]
            self._all_gather = self._symmetric.all_gather([buffer.flat for buffer in self.flat_buffers])

    def _flatten(self, segmented: Segmented) -> FlatBuffer:
        if self.world_size == 1:
            return super()._flatten(segmented)
        first = self.trainable[segmented.indices[0]]
        length = self.world_size * segmented.length
        return flatten(self.trainable, segmented, self._symmetric.empty(length, first.dtype).zero_())

    def _gather(self, number: int) -> Pending:
        return self._all_gather.send(number)

    def _synchronize(self) -> None:
        self._wait_for(range(len(self.flat_buffers)))  # before the next step moves what is still sent
        super()._synchronize()

    @torch.no_grad()
    def _send(self, number: int) -> Pending:
        params, own = self._members[number], self.segments[number].members[self.rank]
        gradients = [torch.zeros_like(p) if p.grad is None else dense(p) for p in params]
        for p in params:
            p.grad = None
        for index, view in zip(own, self._views[number], strict=True):
            self.trainable[index].grad = view
        return self._exchange.send(number, gradients)
