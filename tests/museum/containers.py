"""Two right data-parallel strategies, `Container` and `Hooked`, on which faults are built.

The faults are those of `parallel.py` and of tests/support/wrong_strategies.py. Each overrides a method. Ranks import
this file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def mean_(x: Tensor) -> None:
    """Replaces x by its mean over ranks."""
    dist.all_reduce(x)
    x /= dist.get_world_size()


class Container(nn.Module):
    """A right strategy: an all-reduce for each gradient, after the backward.

    A fault overrides:
    - `broadcast`: the tensors that rank 0 sends to all ranks at first;
    - `prepare`: called at the end of the constructor;
    - `reduce`: replaces a gradient by its mean over ranks, in place.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.synchronizing = module, True
        for x in self.broadcast():
            dist.broadcast(x.detach(), src=0)
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.prepare()

    def broadcast(self) -> list[Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    def prepare(self) -> None:
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronizing = False
        yield
        self.synchronizing = True

    def finish_gradient_synchronization(self) -> None:
        for name, p in self.named.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            self.reduce(name, p.grad)

    def reduce(self, name: str, grad: Tensor) -> None:
        mean_(grad)


class Hooked(Container):
    """A right strategy that starts an all-reduce when a gradient is ready, and waits for all of them afterwards."""

    def prepare(self) -> None:
        self.handles: list[tuple[Any, Tensor]] = []
        for name, p in self.named.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self.ready(name, p))

    def ready(self, name: str, p: Tensor) -> None:
        if self.synchronizing:
            self.handles.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish_gradient_synchronization(self) -> None:
        for handle, p in self.handles:
            handle.wait()
            p.grad /= dist.get_world_size()
        self.handles = []
