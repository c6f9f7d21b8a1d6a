"""The state of a training run for a checkpoint, and back: under another strategy and on other ranks too."""

from torch.optim import Optimizer

from lmsys.parallel.adapter import Adapter
from lmsys.parallel.fsdp import Fsdp
from lmsys.parallel.sharded_optimizer import ShardedOptimizer, flat_share, merge_shares, whole_state
from lmsys.training.checkpoint import Checkpoint, State

PREFIX = "model."  # the names of parameters begin with it: strategies wrap lmsys.model.Loss


def layout(strategy: Adapter) -> str:
    """How the optimizer numbers its state: `flat` parts of blocks, or `whole` parameters."""
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
    """The optimizer's state of a checkpoint, saved by any number of ranks under any strategy.

    shared  what the checkpoint has in common for all ranks
    """
    flat, was_flat = layout(strategy) == "flat", found.facts.get("optimizer") == "flat"
    if flat and was_flat and found.world_size == world_size:
        optimizer.load_state_dict(found.own(rank, "optimizer")["optimizer"])
        return
    groups = strategy.wrapper.parameters_in(optimizer) if flat else [one["params"] for one in optimizer.param_groups]
    if "optimizer" in shared:
        state = shared["optimizer"]
    else:
        shares = [found.own(index, "optimizer")["optimizer"] for index in range(found.world_size)]
        state = whole_state(shares, strategy.module, groups) if was_flat else merge_shares(shares)
    optimizer.load_state_dict(flat_share(state, strategy.module, rank, world_size, groups) if flat else state)
