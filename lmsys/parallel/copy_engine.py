"""Buckets of gradients whose all-reduces the GPUs' copy engines carry, which take no SM from the backward beside them.

NCCL's kernels do take SMs: in a large model's step they cost more than the part of them that no computation hides. So
gradients are copied from where autograd left them, and only added up by a kernel; see `exchange`. For the GPUs of one
node. NCCL carries the first step, by which buckets are planned.

Buckets stay where they are from step to step: a gradient is a view of one, and overwritten by the next step's. What
autograd has made is held beside them until the end of the synchronization. From the second step on a rank that waits
for another beyond the group's time limit ends with a CUDA error.
"""

import platform
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmsys.parallel.bucketed import Bucketed
from lmsys.parallel.collectives import Group, Pending, gather_objects, is_nccl
from lmsys.parallel.exchange import AllGather, Exchange, inbox_bytes
from lmsys.parallel.packing import copy_gradients, widen
from lmsys.parallel.sharded_optimizer import FlatBuffer
from lmsys.parallel.transport import Bucket, Collectives
from lmsys.parallel.wrapper import dense

INSTEAD = "take bucketed or zero1, which are the same by collectives"


class CopyEngines(Collectives):
    """Buckets travel through symmetric memory, which the GPUs of a node see of one another, once they are settled.

    shared  how often this process has shared memory in this way. Torch numbers what ranks tell one another for that by
            the process, not by the group: where two have other numbers, each waits for the other without end.
    ValueError where ranks are not GPUs of one node under NCCL, each the current one.
    """

    shared: ClassVar[int] = 0
    _exchange: Exchange | None = None

    def __init__(self, module: nn.Module, group: Group):
        super().__init__(module, group)
        check_gpus(module, group)
        from lmsys.parallel.mean_triton import mean_  # without triton it fails now, not after the first step

        self._mean, self.group = mean_, dist.group.WORLD if group is None else group

    def zeros(self, like: Tensor, length: int) -> Tensor:
        return self._empty(length, like.dtype).zero_()

    def settle(self, buckets: Sequence[Bucket], buffers: Sequence[FlatBuffer] = ()) -> None:
        self._agree()
        if buckets:
            self._exchange = self._exchange_of(buckets)
            self._means = [_means(*one) for one in zip(buckets, self._exchange.flats, strict=True)]
        if buffers:
            self._all_gather = self._all_gather_of([buffer.flat for buffer in buffers])

    @torch.no_grad()
    def reduce(self, bucket: Bucket) -> Pending:
        if self._exchange is None:
            return super().reduce(bucket)
        params, means = bucket.params, self._means[bucket.number]
        if bucket.dtype != params[0].dtype:
            copy_gradients(params, means)
            return Pending(self._exchange.send(bucket.number, means), partial(widen, params, means))
        gradients = [
            dense(p) if p.grad is not None else torch.zeros_like(p) if mean is None else mean.zero_()
            for p, mean in zip(params, means, strict=True)
        ]
        for p, mean in zip(params, means, strict=True):
            p.grad = mean
        return self._exchange.send(bucket.number, gradients)

    def gather(self, number: int, buffer: FlatBuffer) -> Pending:
        return self._all_gather.send(number)

    def _exchange_of(self, buckets: Sequence[Bucket]) -> Exchange:
        layouts = [bucket.layout for bucket in buckets]
        room = inbox_bytes(layouts, [bucket.dtype.itemsize for bucket in buckets], self.group.size())
        inbox = self._empty(room, torch.uint8)
        inboxes = self._handle(inbox)
        if buckets[0].whole:
            flats = [self._empty(bucket.layout.length, bucket.dtype) for bucket in buckets]
            handles = [self._handle(flat) for flat in flats]
        else:
            flats, handles = [inbox.new_empty(bucket.own.length, dtype=bucket.dtype) for bucket in buckets], []
        return Exchange(layouts, flats, inbox, inboxes, handles, self._mean, self._timeout_ms())

    def _all_gather_of(self, flats: Sequence[Tensor]) -> AllGather:
        return AllGather(flats, [self._handle(flat) for flat in flats], self._timeout_ms())

    def _empty(self, length: int, dtype: torch.dtype) -> Tensor:
        """(length,) of symmetric memory, on the current device; one element at least, for an address."""
        from torch.distributed._symmetric_memory import _SymmetricMemory

        device = torch.device("cuda", torch.cuda.current_device())
        made = _SymmetricMemory.empty_strided_p2p((max(length, 1),), (1,), dtype, device, self.group.group_name)
        self.outside_bytes += made.nbytes
        return made if length else made[:0]

    def _handle(self, flat: Tensor) -> Any:
        from torch.distributed._symmetric_memory import rendezvous

        CopyEngines.shared += 1
        return rendezvous(flat, self.group.group_name)

    def _agree(self) -> None:
        """ValueError on all ranks, where they would wait without end."""
        shared = gather_objects(CopyEngines.shared, self.group)
        if len(set(shared)) > 1:
            raise ValueError(
                f"ranks have shared memory {', '.join(map(str, shared))} times, and must have as often as one another:"
                " in one process let copy engines work in groups of one size"
            )

    def _timeout_ms(self) -> int:
        """The group's own timeout."""
        backend = self.group._get_backend(torch.device("cuda", torch.cuda.current_device()))
        return round(1000 * backend.options._timeout.total_seconds())


def _means(bucket: Bucket, flat: Tensor) -> list[Any]:
    """For each parameter the view of `flat` where its mean will be; None for one that this rank does not own."""
    found = dict(zip(bucket.owned, bucket.own.views(flat), strict=True))
    return [found.get(p) for p in bucket.params]


class CopyEngine(Bucketed):
    """bucket_mb, comm_dtype: as in `Bucketed`. ValueError as in `CopyEngines`."""

    over = CopyEngines
    why_not_reproducible = "copy engines add by rank, and not as a tree: take bucketed or zero1"
    all_reduce_model = False  # latency and bandwidth are those of NCCL's all-reduce
    kernels = r"^_mean_kernel$"  # signals are torch's kernels, and copies have none
    rivals = ("torch_ddp_tuned",)


def copy_engine_supports(case: Any) -> str | None:
    """None for a `case` that has a CUDA device, else why it cannot run."""
    return None if case.device == "cuda" else f"copy engines need GPUs; on a CPU {INSTEAD}"


def check_gpus(module: nn.Module, group: Group) -> None:
    """ValueError where ranks are not GPUs of one node under NCCL, each the current one. All ranks call it."""
    if not all(is_nccl(group, p) for p in module.parameters()):
        raise ValueError(f"copy engines need NCCL and parameters on GPUs; elsewhere {INSTEAD}")
    here = torch.device("cuda", torch.cuda.current_device())
    if others := sorted({str(p.device) for p in module.parameters()} - {str(here)}):
        places = ", ".join(others)
        raise ValueError(f"parameters are on {places}, and the current GPU is {here}: set_device, or {INSTEAD}")
    if len(nodes := sorted(set(gather_objects(platform.node(), group)))) > 1:
        raise ValueError(f"copy engines are for ranks of one node, and these are on {', '.join(nodes)}: {INSTEAD}")
