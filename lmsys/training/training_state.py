"""The state of a training that a checkpoint holds: the model, the optimizer under a strategy, random numbers.

The training loop calls `capture` and `rng_state` to save, and `restore_optimizer` and `set_rng_state` to resume. An
optimizer's state dict numbers its entries, by parameter or by flat tensor. To support a strategy whose optimizer
numbers them in another way, add a layout to `optimizer_layout`, and its cases to `capture` and `restore_optimizer`.
"""

import torch

from lmsys.parallel import adapter, fsdp, sharded_optimizer
from lmsys.training.checkpoint import Checkpoint, State


def optimizer_layout(strategy: adapter.Adapter) -> str:
    """How the optimizer's state dict numbers its entries; a checkpoint records it as the fact "optimizer".

    "flat"   by flat tensor: `Fsdp` joins the parameters of a block in flat tensors, of which each rank steps its part
    "whole"  by parameter, as in an ordinary optimizer, also if the parameters are divided among ranks
    """
    return "flat" if isinstance(strategy.wrapper, fsdp.Fsdp) else "whole"


def capture(strategy: adapter.Adapter, optimizer: torch.optim.Optimizer, rank: int) -> tuple[State, State]:
    """(the state that rank 0 saves for all, the state that this rank saves). All ranks call it."""
    # Strategies wrap lmsys.model.Loss, in which the model is the attribute `model`.
    shared: State = {"model": {name.removeprefix("model."): x for name, x in strategy.full_state_dict().items()}}
    if isinstance(optimizer, sharded_optimizer.ShardedOptimizer) or optimizer_layout(strategy) == "flat":
        return shared, {"optimizer": optimizer.state_dict()}
    if hasattr(optimizer, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer
        optimizer.consolidate_state_dict(to=0)
    return shared | ({"optimizer": optimizer.state_dict()} if rank == 0 else {}), {}


def restore_optimizer(
    strategy: adapter.Adapter,
    optimizer: torch.optim.Optimizer,
    saved: Checkpoint,
    shared: State,
    rank: int,
    world_size: int,
) -> None:
    """Loads the optimizer's state from a checkpoint, saved by any number of ranks under any strategy.

    shared  the checkpoint's part that all ranks have in common
    """
    flat, was_flat = optimizer_layout(strategy) == "flat", saved.facts.get("optimizer") == "flat"
    if flat and was_flat and saved.world_size == world_size:
        optimizer.load_state_dict(saved.own(rank, "optimizer")["optimizer"])
        return
    module, groups = strategy.module, [group["params"] for group in optimizer.param_groups]
    if flat:  # the optimizer holds flat parts, so the strategy says which parameters are in each param group
        groups = strategy.wrapper.parameters_in(optimizer)
    if "optimizer" in shared:  # the whole state, which rank 0 saved
        state = shared["optimizer"]
    else:  # each rank saved its share
        shares = [saved.own(index, "optimizer")["optimizer"] for index in range(saved.world_size)]
        if was_flat:  # of Fsdp: parts of flat tensors
            state = sharded_optimizer.whole_state(shares, module, groups)
        else:  # of a ShardedOptimizer: the parameters that the rank owned
            state = sharded_optimizer.merge_shares(shares)
    if flat:
        state = sharded_optimizer.flat_share(state, module, rank, world_size, groups)
    optimizer.load_state_dict(state)


def rng_state(device: str | torch.device = "cpu") -> State:
    """The states of torch's generators: of the CPU, and of a CUDA `device`."""
    state = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: State, device: str | torch.device = "cpu") -> None:
    """Sets torch's generators to states that `rng_state` has returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
