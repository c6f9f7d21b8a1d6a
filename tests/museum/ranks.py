"""Trainings of the mini model on two ranks, with a strategy or a sharded optimizer, and on one process.

`gates.py` compares the two, to judge a fault of such an optimizer or strategy.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmsys.parallel.adapter import Adapter
from lmsys.parallel.group import WorkerError, WorkerGroup
from lmsys.registry import Entry
from tests.museum.mini import MiniModel, tokens_of

WORLD_SIZE = 2
LIMIT_S = 60.0  # for the start of two processes, and for a training, which takes milliseconds
SETTINGS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 1e-4}}
Trained = tuple[list[float], list[Tensor]]  # (each step's loss, a mean over ranks; the weights after the last step)


def on_ranks(entry: Entry, kind: str, seed: int, steps: int, optimizer: str) -> Trained:
    """Trains on this rank with an implementation, `entry`, of kind "strategy" or "sharded_optimizer".

    optimizer  a key of SETTINGS
    """
    model, rank = MiniModel(seed), dist.get_rank()
    make, settings = getattr(torch.optim, optimizer), SETTINGS[optimizer]
    if kind == "strategy":
        strategy = Adapter(entry.load(), model, dist.group.WORLD)
        stepper = strategy.make_optimizer(make, **settings)
    else:
        stepper = entry.load()(model.parameters(), make, **settings)
    losses = []
    for step in range(steps):
        tokens = tokens_of(seed, step, rank)
        value = strategy(tokens) if kind == "strategy" else model(tokens)
        value.backward()
        if kind == "strategy":
            strategy.finish()
        else:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        stepper.step()
        stepper.zero_grad()
        losses.append(value.detach().clone())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    weights = strategy.full_state_dict() if kind == "strategy" else model.state_dict()
    names = sorted(name for name, _ in model.named_parameters())
    return (mean / dist.get_world_size()).tolist(), [weights[name].detach().cpu().clone() for name in names]


@lru_cache
def on_one(seed: int, steps: int, optimizer: str) -> Trained:
    """Trains on one process, on the batches of all ranks, as `on_ranks` does on two."""
    model = MiniModel(seed)
    stepper = getattr(torch.optim, optimizer)(model.parameters(), **SETTINGS[optimizer])
    losses = []
    for step in range(steps):
        value = torch.stack([model(tokens_of(seed, step, rank)) for rank in range(WORLD_SIZE)]).mean()
        value.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(value.item())
    weights = dict(model.named_parameters())
    return losses, [weights[name].detach().clone() for name in sorted(weights)]


class Ranks:
    """Two ranks that train. They start with the first training, and start again after a training that ended them."""

    def __init__(self) -> None:
        self.group: WorkerGroup | None = None

    def train(self, entry: Entry, kind: str, seed: int, steps: int, optimizer: str) -> Trained | None:
        """The losses and weights of rank 0; None if a rank fails or hangs."""
        if self.group is None or self.group.ended:
            self.group = WorkerGroup(WORLD_SIZE, timeout_s=LIMIT_S)
        try:
            trained: Trained = self.group.run(on_ranks, entry, kind, seed, steps, optimizer, timeout_s=LIMIT_S)[0]
            return trained
        except WorkerError:
            self.close()
            return None

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None
