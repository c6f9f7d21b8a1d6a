"""All-reduces of buckets of gradients that begin while the backward goes on.

A bucket is a flat tensor that its gradients are views of. It is made when its last gradient is ready, and lives as long
as the gradients do: `zero_grad(set_to_none=True)` frees it. The first bucket is small, so that communication begins
early, and the last, which no computation is left to hide. See `overlapped` for the order.
"""

import math

import torch
from torch import nn

from lmsys.cost.communication import optimal_bucket_bytes
from lmsys.parallel.alpha_beta import latency_and_bandwidth
from lmsys.parallel.buckets import EDGE_BYTES, MIB, is_size, plan
from lmsys.parallel.collectives import Group
from lmsys.parallel.overlapped import Overlapped


class Bucketed(Overlapped):
    """bucket_mb   MiB of a bucket; None: no limit, one bucket for each dtype and device; or "auto": √(s o w) of the
                measured latency o and bandwidth w of an all-reduce
    comm_dtype  of what travels, such as torch.bfloat16; None: the gradients'. Gradients keep their own dtype.

    ValueError for a bucket size that is not positive.
    """

    takes_bucket_mb = True
    comm_dtypes = True
    rivals: tuple[str, ...] = ("torch_ddp_tuned", "torch_ddp", "naive")

    def __init__(
        self,
        module: nn.Module,
        process_group: Group = None,
        bucket_mb: float | str | None = 25,
        comm_dtype: torch.dtype | None = None,
    ):
        if bucket_mb is not None and bucket_mb != "auto" and not is_size(bucket_mb):
            raise ValueError(f'{bucket_mb=} must be a positive number of MiB, "auto", or None for one bucket')
        self.bucket_mb = bucket_mb
        super().__init__(module, process_group, comm_dtype)

    def _partition(self, order: list[int]) -> list[tuple[int, ...]]:
        sizes = [p.numel() * (self.comm_dtype or p.dtype).itemsize for p in self.trainable]
        if self.bucket_mb == "auto":
            self.bucket_mb = self._best(sum(sizes))
        kinds = [(p.device, p.dtype) for p in self.trainable]
        if self.bucket_mb is None:
            return plan(sizes, order, math.inf, math.inf, kinds)
        return plan(sizes, order, float(self.bucket_mb) * MIB, EDGE_BYTES, kinds)

    def _best(self, total: int) -> float:
        if self.world_size == 1 or not total:
            return 25
        latency_s, bytes_per_s = latency_and_bandwidth(self.group, self.trainable[0].device)
        return optimal_bucket_bytes(total, latency_s, bytes_per_s) / MIB
