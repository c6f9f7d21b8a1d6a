"""The state of a training run for a checkpoint, and back: at the same world size, or sharded state at another."""

from typing import Any

import torch
import torch.nn.functional as F
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
        optimizer.load_state_dict(found.own(rank, "optimizer")["optimizer"])
        return
    shares = [found.own(index, "optimizer")["optimizer"] for index in range(found.world_size)]
    if layout(strategy) == "flat":
        params = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.load_state_dict(_reparted(shares, params, rank, world_size))
    else:
        optimizer.load_state_dict(merge_shares(shares))


def _reparted(shares: list[State], params: list[nn.Parameter], rank: int, world_size: int) -> State:
    """Flat parts of one number of ranks as those of another: put together, padded or cut behind, divided anew."""
    state: dict[int, Any] = {}
    for number, values in shares[0]["state"].items():
        parts = {name: [share["state"][number][name] for share in shares] for name in values}
        length = params[number].numel()
        state[number] = {name: _part(of, length, rank, world_size) for name, of in parts.items()}
    return {"state": state, "param_groups": shares[0]["param_groups"]}


def _part(parts: list[Any], length: int, rank: int, world_size: int) -> Any:
    if not isinstance(parts[0], Tensor) or parts[0].dim() != 1:  # a counter of steps, the same in all
        return parts[0]
    before = torch.cat(parts)
    return F.pad(before, (0, world_size * length - len(before))).chunk(world_size)[rank].clone()  # the rest is padding
