"""Buckets of gradients whose all-reduces the GPUs' copy engines carry, which take no SM from the backward beside them.

NCCL's kernels do take SMs: in a large model's step they cost more than the part of them that no computation hides. So
gradients are copied from where autograd left them, and only added up by a kernel; see `exchange`. For the GPUs of one
node. NCCL carries the first step, by which buckets are planned.

Buckets stay where they are from step to step: a gradient is a view of one, and overwritten by the next step's. What
autograd has made is held beside them until the end of the synchronization. From the second step on a rank that waits
for another beyond the group's time limit ends with a CUDA error.
"""

import platform
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lmsys.parallel.bucketed import Bucketed
from lmsys.parallel.collectives import Group, Pending, gather_objects, is_nccl, size_and_rank
from lmsys.parallel.exchange import Exchange, Symmetric
from lmsys.parallel.overlapped import widen
from lmsys.parallel.packing import copy_gradients
from lmsys.parallel.wrapper import Wrapper, dense

INSTEAD = "take bucketed or zero1, which are the same by collectives"


class OverSymmetricMemory(Wrapper):
    """A strategy that sends through symmetric memory, which the GPUs of a node see of one another."""

    why_not_reproducible = "copy engines add by rank, and not as a tree: take bucketed or zero1"
    all_reduce_model = False  # latency and bandwidth are those of NCCL's all-reduce
    kernels = r"^_mean_kernel$"  # signals are torch's kernels, and copies have none

    def _prepare(self) -> None:
        self._symmetric = symmetric_memory(self.module, self.group)

    @property
    def outside_bytes(self) -> int:
        """Bytes of GPU memory that torch's allocator does not count."""
        return self._symmetric.num_bytes


class CopyEngine(OverSymmetricMemory, Bucketed):
    """bucket_mb, comm_dtype: as in `Bucketed`. ValueError where ranks are not GPUs of one node under NCCL."""

    rivals = ("torch_ddp_tuned",)
    _exchange: Exchange | None = None

    def _plan_again(self, seen: list[int]) -> None:
        super()._plan_again(seen)
        dtypes = [self.comm_dtype or members[0].dtype for members in self._members]
        self._exchange = self._symmetric.exchange(self._layouts, dtypes, whole=True)
        self._views = [layout.views(x) for layout, x in zip(self._layouts, self._exchange.flats, strict=True)]

    @torch.no_grad()
    def _send(self, number: int) -> Pending:
        if self._exchange is None:
            return super()._send(number)
        params, views = self._members[number], self._views[number]
        if views[0].dtype != params[0].dtype:
            copy_gradients(params, views)
            return Pending(self._exchange.send(number, views), partial(widen, params, views))
        gradients = [view.zero_() if p.grad is None else dense(p) for p, view in zip(params, views, strict=True)]
        for p, view in zip(params, views, strict=True):
            p.grad = view
        return self._exchange.send(number, gradients)


def copy_engine_supports(case: Any) -> str | None:
    """None for a `case` that has a CUDA device, else why it cannot run."""
    return None if case.device == "cuda" else f"copy engines need GPUs; on a CPU {INSTEAD}"


def symmetric_memory(module: nn.Module, group: Group) -> Symmetric:
    """ValueError where ranks are not GPUs of one node under NCCL, each the current one. All ranks call it."""
    if size_and_rank(group)[0] == 1:
        return Symmetric(None, None)
    if not all(is_nccl(group, p) for p in module.parameters()):
        raise ValueError(f"copy engines need NCCL and parameters on GPUs; elsewhere {INSTEAD}")
    here = torch.device("cuda", torch.cuda.current_device())
    if others := sorted({str(p.device) for p in module.parameters()} - {str(here)}):
        places = ", ".join(others)
        raise ValueError(f"parameters are on {places}, and the current GPU is {here}: set_device, or {INSTEAD}")
    if len(nodes := sorted(set(gather_objects(platform.node(), group)))) > 1:
        raise ValueError(f"copy engines are for ranks of one node, and these are on {', '.join(nodes)}: {INSTEAD}")
    from lmsys.parallel.mean_triton import mean_  # without triton it fails now, not after the first step

    return Symmetric(dist.group.WORLD if group is None else group, mean_)
