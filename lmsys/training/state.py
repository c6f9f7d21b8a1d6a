"""The state of a training run for a checkpoint, and back: at the same world size, or sharded state at another."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmsys.parallel.adapter import Adapter
from lmsys.parallel.fsdp import Fsdp
from lmsys.parallel.sharded_optimizer import ShardedOptimizer, merge_shares
from lmsys.training.checkpoint import Checkpoint, State

PREFIX = "model."  # the names of parameters begin with it: strategies wrap lmsys.model.Loss


def layout(strategy: Adapter) -> str:
    """How the optimizer numbers its state: `flat` parts of blocks, or `whole` parameters. Neither loads the other."""
    return "flat" if isinstance(strategy.wrapper, Fsdp) else "whole"


def capture(strategy: Adapter, optimizer: Optimizer, rank: int) -> tuple[State, State]:
    """(the state that rank 0 saves for all, the state that this rank saves). All ranks call it."""
    model = {name.removeprefix(PREFIX): x for name, x in strategy.full_state_dict().items()}
    shared: State = {"model": model}
    if isinstance(optimizer, ShardedOptimizer) or layout(strategy) == "flat":
        return shared, {"optimizer": optimizer.state_dict()}
    if hasattr(optimizer, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer
        optimizer.consolidate_state_dict(to=0)
        return shared | ({"optimizer": optimizer.state_dict()} if rank == 0 else {}), {}
    return shared | {"optimizer": optimizer.state_dict()}, {}


def restore_optimizer(
    strategy: Adapter, optimizer: Optimizer, found: Checkpoint, shared: State, rank: int, world_size: int
) -> None:
    """The optimizer's state of a checkpoint, saved by any number of ranks; `shared` is what it has in common."""
    if "optimizer" in shared:
        optimizer.load_state_dict(shared["optimizer"])
        return
    if layout(strategy) == "flat" and found.world_size == world_size:
        optimizer.load_state_dict(found.own(rank)["optimizer"])
        return
    shares = [found.own(index)["optimizer"] for index in range(found.world_size)]
    if layout(strategy) == "flat":
        params = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.load_state_dict(_reparted(shares, params, rank, world_size))
    else:
        optimizer.load_state_dict(merge_shares(shares))


def _reparted(shares: list[State], params: list[nn.Parameter], rank: int, world_size: int) -> State:
    """Flat parts of one number of ranks as those of another: put together, padded or cut behind, divided anew."""
    state: dict[int, Any] = {}
    for number, p in enumerate(params):
        if number not in shares[0]["state"]:
            continue
        state[number] = {}
        for name, first in shares[0]["state"][number].items():
            parts = [share["state"][number][name] for share in shares]
            state[number][name] = _part(parts, p.numel(), rank, world_size) if _is_flat(first) else first
    return {"state": state, "param_groups": shares[0]["param_groups"]}


def _part(parts: list[Tensor], length: int, rank: int, world_size: int) -> Tensor:
    before = torch.cat(parts)
    whole = before.new_zeros(world_size * length)
    common = min(len(before), len(whole))  # the rest is padding
    whole[:common] = before[:common]
    return whole[rank * length : (rank + 1) * length].clone()


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1
