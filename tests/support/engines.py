"""Stand-ins for copy engines on CPUs: `EnginesOverGloo` is their transport, with collectives of gloo.

Copy engines are parts of a GPU that move memory between GPUs while kernels run.
Tests put it in place of `CopyEngines` by `ranks.stand_in`. The stand-ins deliver nothing before it is waited for, so
that a strategy that reads too early fails. When the signature of `Exchange`, `AllGather` or `CopyEngines` changes in
lmsys/parallel, change it here, too.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmsys.parallel.collectives import Pending, all_gather, all_reduce_mean
from lmsys.parallel.copy_engine import CopyEngines
from lmsys.parallel.overlapped import Bucket, Collectives


class ExchangeOverGloo:
    """An `Exchange`, which averages buckets of gradients over ranks. Means arrive when they are waited for, no earlier.

    When gradients are sent, it overwrites them with NaN, unless they are stored where their means will be.
    """

    def __init__(self, buckets: Sequence[Bucket], group: Any):
        self.buckets, self.group, self.rank = buckets, group, dist.get_rank(group)
        self.flats = [torch.empty(bucket.own.length, dtype=bucket.dtype) for bucket in buckets]
        self.turns = cycle(range(len(buckets)))

    def send(self, number: int, gradients: Sequence[Tensor]) -> Pending:
        assert number == next(self.turns)
        bucket, flat = self.buckets[number], self.flats[number]
        assert [x.shape for x in gradients] == [p.shape for p in bucket.params]
        assert {x.dtype for x in gradients} == {bucket.dtype}
        packed = torch.zeros(bucket.layout.length, dtype=flat.dtype)
        for x, view in zip(gradients, bucket.layout.views(packed), strict=True):
            view.copy_(x)
            if x.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
                x.view(-1).fill_(torch.nan)  # `view` raises if a gradient is not contiguous, as it must be
        flat.fill_(torch.nan)
        pending = all_reduce_mean(packed, self.group)

        def finish() -> None:
            pending.wait()
            start = 0 if bucket.whole else self.rank * len(flat)
            flat.copy_(packed[start : start + len(flat)])

        return Pending(then=finish)


class AllGatherOverGloo:
    """An `AllGather`, which gathers parameters of all ranks. They arrive when they are waited for, and no earlier."""

    def __init__(self, flats: Sequence[Tensor], group: Any):
        self.flats, self.group = flats, group
        self.turns = cycle(range(len(flats)))

    def send(self, number: int) -> Pending:
        assert number == next(self.turns)
        flat = self.flats[number]
        own = flat.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        elsewhere = torch.empty_like(flat)
        pending = all_gather(elsewhere, own, self.group)
        return Pending(then=lambda: (pending.wait(), flat.copy_(elsewhere)))


class EnginesOverGloo(CopyEngines):
    """`CopyEngines` for ranks on CPUs, with the exchange and the all-gather of this file."""

    __init__ = Collectives.__init__  # that of `CopyEngines` looks for GPUs

    def _empty(self, length: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(length, dtype=dtype)

    def _exchange_of(self, buckets: Sequence[Bucket]) -> Any:
        return ExchangeOverGloo(buckets, self.group)

    def _all_gather_of(self, flats: Sequence[Tensor]) -> Any:
        return AllGatherOverGloo(flats, self.group)
