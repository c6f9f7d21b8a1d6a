"""Sharded optimizers in the museum of published faults: each fault is a few lines on top of a right one, `Sharded`.

`lmsys check` must refuse each fault, and must not accuse the right optimizers, which HONEST lists. A new fault is a
class with the decorator `exhibit(kind, where it was published, what users saw, a part of the mistake's name)`. Ranks
import this file.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lmsys.registry import Entry
from tests.museum.exhibit import exhibit

HONEST = [
    Entry("ShardedOptimizer", "lmsys.parallel.sharded_optimizer:ShardedOptimizer"),
    Entry("ZeroRedundancyOptimizer", "torch.distributed.optim:ZeroRedundancyOptimizer", peer=True),
]


class Sharded(torch.optim.Optimizer):
    """A right sharded optimizer: each rank steps every world_size-th parameter, and broadcasts it.

    A fault overrides:
    - `own`: the param groups with the parameters that this rank steps;
    - `options`: copies the options of `param_groups`, which a schedule may have changed, to the local optimizer;
    - `share`: brings the updated parameters to all ranks;
    - `shift`: a parameter is broadcast by the rank that is so many behind its owner;
    - `waits`: True if `share` waits for the broadcasts.
    """

    shift, waits = 0, True

    def __init__(self, params: Any, optimizer_cls: Callable[..., Any], **kwargs: Any):
        super().__init__(params, kwargs)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local = optimizer_cls(self.own(), **kwargs)

    def own(self) -> list[dict[str, Any]]:
        return [{**group, "params": group["params"][self.rank :: self.size]} for group in self.param_groups]

    def step(self, closure: Any = None) -> None:
        self.options()
        self.local.step()
        self.share()

    def options(self) -> None:
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local.update({name: value for name, value in group.items() if name != "params"})

    def share(self) -> None:
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                dist.broadcast(p.detach(), src=(number + self.shift) % self.size, async_op=not self.waits)


@exhibit(
    "sharded_optimizer", "facebookresearch/fairscale#58", "a schedule does not reach the optimizer", "are not used"
)
class ScheduleLost(Sharded):
    def options(self) -> None:
        pass


@exhibit("sharded_optimizer", "facebookresearch/fairscale#66", "only the learning rate is in sync", "momentum")
class OnlyTheLearningRate(Sharded):
    def options(self) -> None:
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            local["lr"] = group["lr"]


@exhibit(
    "sharded_optimizer",
    "deepspeedai/DeepSpeed#6878",
    "a group does not have its own learning rate",
    "group's own options",
)
class GroupsLost(Sharded):
    def own(self) -> list[dict[str, Any]]:
        return [{"params": group["params"]} for group in super().own()]

    def options(self) -> None:
        for local in self.local.param_groups:
            local["lr"] = self.param_groups[0]["lr"]
            local["momentum"] = self.param_groups[0].get("momentum")


@exhibit("sharded_optimizer", "deepspeedai/DeepSpeed#2058", "a part of the parameters is trained", "no rank updates")
class WrongPartition(Sharded):
    """Each parameter is broadcast from the rank after its owner, which has not updated it."""

    shift = 1


@exhibit("sharded_optimizer", "deepspeedai/DeepSpeed#856", "gradients of other partitions are not cleared", "zero_grad")
class LeavesGradients(Sharded):
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.local.zero_grad(set_to_none)


@exhibit("sharded_optimizer", "karpathy/nanochat#843", "weights are read before they are gathered", "not waited for")
class NobodyWaits(Sharded):
    waits = False


@exhibit(
    "sharded_optimizer", "facebookresearch/optimizers#149", "a rank without gradients skips the step", "the same order"
)
class SkipsTheStep(Sharded):
    def step(self, closure: Any = None) -> None:
        if any(p.grad is not None for group in self.local.param_groups for p in group["params"]):
            super().step()
