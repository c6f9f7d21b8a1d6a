"""Whole tensors as DTensors, divided as torch's FSDP2 and torch.distributed.checkpoint do."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lmsys.parallel.collectives import Group, size_and_rank


def divided(x: Tensor, group: Group) -> Tensor:
    """x, the same on every rank, divided by its first dimension: this rank's part in memory of its own.

    On one rank without a process group it is a copy of x.
    """
    world_size, rank = size_and_rank(group)
    if not dist.is_initialized():
        return x.clone()
    mesh: Any = DeviceMesh.from_group(dist.group.WORLD if group is None else group, x.device.type)
    if not x.dim():
        return DTensor.from_local(x.clone(), mesh, [Replicate()], run_check=False)
    parts = x.chunk(world_size)
    own = parts[rank].clone() if rank < len(parts) else x.new_empty((0, *x.shape[1:]))
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())
