"""Strategies and collectives that cheat: right in the checks before timing, but fast or wrong while they are timed.

Tests of the benchmarks measure them, and each must be recorded as wrong. The check before timing takes CHECKED_STEPS
steps with a strategy, and calls a collective once. A new strategy derives from `Honest` and is added to CHEATS;
`Late` and `Replacing`, and the collectives at the end, have tests of their own.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmsys.bench import ranks
from lmsys.parallel.collectives import Pending, all_reduce_mean

CHECKED_STEPS = 3  # as many as benchmarks/data_parallel/check.py takes
KEPT: dict[Any, Tensor] = {}  # results and marks that collectives keep from earlier calls


class Honest(nn.Module):
    """An honest strategy, in plain torch.

    `average` averages gradients over ranks in the checked steps, and `after_checks` in all steps after them. A cheat
    overrides `after_checks`. `calls` counts forwards, which are steps.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.calls = module, 0
        for x in module.parameters():
            dist.broadcast(x.data, 0)

    def forward(self, *inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.module(*inputs)

    def finish_gradient_synchronization(self) -> None:
        if self.calls > CHECKED_STEPS:
            self.after_checks()
        else:
            self.average()

    def average(self) -> None:
        for p in self.module.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    def after_checks(self) -> None:
        self.average()


class Idle(Honest):
    """Computes nothing after the checks, so that weights stay as they are."""

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.calls < CHECKED_STEPS:
            return super().forward(*inputs)
        self.calls += 1
        return torch.zeros((), requires_grad=True) * 1

    def after_checks(self) -> None:
        for p in self.module.parameters():
            p.grad = None


class OwnGradients(Honest):
    """All ranks step by the gradients of rank 0 alone, so their weights agree."""

    def after_checks(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.grad, 0)


class StaleGradients(Honest):
    """All ranks step by the mean gradients of the step before."""

    before: list[Tensor]

    def average(self) -> None:
        super().average()
        self.before = [p.grad.clone() for p in self.module.parameters()]

    def after_checks(self) -> None:
        before = self.before
        self.average()
        for p, gradient in zip(self.module.parameters(), before, strict=True):
            p.grad = gradient


class HalvedGradients(Honest):
    """Halves the gradients after the checks."""

    def after_checks(self) -> None:
        self.average()
        for p in self.module.parameters():
            p.grad /= 2


class HalfOfTheBatch(Honest):
    """Computes only half of the batch after the checks."""

    def forward(self, *inputs: Tensor) -> Tensor:
        whole = self.calls < CHECKED_STEPS
        return super().forward(*(x if whole else x[: len(x) // 2] for x in inputs))


class Late(Honest):
    """Takes its steps only when `full_state_dict` is called, which is not timed; the weights are then right."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.postponed: list[tuple[Tensor, ...]] = []

    def make_optimizer(self, optimizer_cls: Any, **kwargs: Any) -> Any:
        """An optimizer that changes nothing; the one that was asked for is kept."""
        self.optimizer = optimizer_cls(self.module.parameters(), **kwargs)
        return torch.optim.SGD(self.module.parameters(), lr=0.0)

    def forward(self, *inputs: Tensor) -> Tensor:
        self.postponed.append(tuple(x.clone() for x in inputs))
        return torch.zeros((), requires_grad=True) * 1

    def finish_gradient_synchronization(self) -> None:
        """Does nothing: `full_state_dict` takes the step."""

    def full_state_dict(self) -> dict[str, Tensor]:
        for inputs in self.postponed:
            self.module(*inputs).backward()
            self.average()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.postponed.clear()
        return self.module.state_dict()


class Replacing(Honest):
    """Replaces the clock of its rank, and the function that times the ranks, to be infinitely fast."""

    def after_checks(self) -> None:
        time.perf_counter = lambda: 0.0  # type: ignore[assignment]
        ranks.times = lambda *_, **__: ([0.0], {})  # type: ignore[assignment]
        self.average()


CHEATS = (Idle, OwnGradients, StaleGradients, HalvedGradients, HalfOfTheBatch)


def right_in_first_call(x: Tensor, group: Any, async_op: bool = True) -> Pending:
    """Returns the first result in every later call."""
    if x.shape not in KEPT:
        all_reduce_mean(x, group, async_op=False).wait()
        KEPT[x.shape] = x.clone()
    x.copy_(KEPT[x.shape])
    return Pending()


def silent(x: Tensor, group: Any, async_op: bool = True) -> Pending:
    """Communicates only in its first call, and does nothing in later ones."""
    if "silent" in KEPT:
        return Pending()
    KEPT["silent"] = x
    return all_reduce_mean(x, group, async_op)


def in_bfloat16(x: Tensor, group: Any, async_op: bool = True) -> Pending:
    """Communicates in bfloat16 from its second call on."""
    if "narrow" not in KEPT:
        KEPT["narrow"] = x
        return all_reduce_mean(x, group, async_op)
    narrow = x.bfloat16()
    dist.all_reduce(narrow, group=group)
    x.copy_(narrow.float() / dist.get_world_size(group))
    return Pending()


def wrong_on_last_rank(x: Tensor, group: Any, async_op: bool = True) -> Pending:
    """Changes one number of the result on the last rank, from its second call on."""
    pending = all_reduce_mean(x, group, async_op=False)
    pending.wait()
    if "one" in KEPT and dist.get_rank() == dist.get_world_size() - 1:
        x[-1] += 1
    KEPT["one"] = x
    return pending
