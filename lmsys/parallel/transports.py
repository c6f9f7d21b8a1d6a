"""What carries buckets between the GPUs of one node, other than NCCL's all-reduce of new tensors. Experimental.

NCCL's kernels take SMs from the computation that hides them. With these, buckets stay where they are from step to step:

    registered  memory that NCCL has registered as symmetric: its all-reduce then reads peers' memory on few SMs
    copy        copies by the GPUs' copy engines, which take none: see `exchange`

So a gradient that is a view of a bucket is overwritten by the next step's: clone what is to be kept.
"""

import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmsys.parallel.buckets import ALIGNMENT
from lmsys.parallel.collectives import Group, Pending, gather_objects, is_nccl, size_and_rank
from lmsys.parallel.exchange import Exchange

TRANSPORTS = ("nccl", "registered", "copy")


def check_transport(transport: str, group: Group, params: Sequence[Tensor]) -> None:
    """ValueError for one that is not known, and where ranks are not GPUs of one node. Asked of all ranks."""
    if transport not in TRANSPORTS:
        raise ValueError(f"{transport=} must be one of {TRANSPORTS}")
    if transport == "nccl" or size_and_rank(group)[0] == 1:
        return
    if not all(is_nccl(group, p) for p in params):
        raise ValueError(f'{transport=} is for NCCL and parameters on GPUs: elsewhere it must be "nccl", the default')
    if len(nodes := sorted(set(gather_objects(platform.node(), group)))) > 1:
        raise ValueError(f'{transport=} is for ranks of one node, and these are on {", ".join(nodes)}: use "nccl"')


def keep(transport: str, lengths: Sequence[int], dtypes: Sequence[torch.dtype], group: Group) -> Any:
    """What has the `flats` that buckets are packed into, the `scale` of what is, and `send`. Asked of all ranks."""
    group = dist.group.WORLD if group is None else group
    lengths = [max(length, ALIGNMENT) for length in lengths]  # none without an address
    return {"registered": Registered, "copy": exchange}[transport](lengths, dtypes, group)


class Registered:
    """Buckets in NCCL's symmetric memory. NCCL has kernels for it that sum, and none that average: gradients are
    packed divided by the number of ranks (NCCL 2.28, src/sym_kernels.cc, ncclSymkImplemented)."""

    def __init__(self, lengths: Sequence[int], dtypes: Sequence[torch.dtype], group: Any):
        device = torch.device("cuda", torch.cuda.current_device())
        self.group, self.scale = group, 1 / dist.get_world_size(group)
        backend = group._get_backend(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self.flats = [
                torch.empty(length, dtype=dtype, device=device) for length, dtype in zip(lengths, dtypes, strict=True)
            ]
        torch.cuda.synchronize()
        backend.register_mem_pool(self._pool, symm=True)

    def send(self, number: int) -> Pending:
        return Pending(dist.all_reduce(self.flats[number], group=self.group, async_op=True))


def exchange(lengths: Sequence[int], dtypes: Sequence[torch.dtype], group: Any) -> Exchange:
    """Over torch's symmetric memory, an allocation of its own for each bucket, with the signals of its own."""
    from torch.distributed._symmetric_memory import _SymmetricMemory, rendezvous

    from lmsys.parallel.mean_triton import mean_

    device, name = torch.device("cuda", torch.cuda.current_device()), group.group_name
    flats = [
        _SymmetricMemory.empty_strided_p2p((length,), (1,), dtype, device, name)
        for length, dtype in zip(lengths, dtypes, strict=True)
    ]
    return Exchange(flats, [rendezvous(flat, name) for flat in flats], mean_)
