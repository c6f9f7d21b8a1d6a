"""All-reduces that begin while the backward goes on: one per parameter, from its post-accumulate-grad hook.

Ranks must begin the same collectives in the same order, whatever order their gradients come in: a bucket is sent when
it is complete and all before it have been. The order is at first the reverse of the parameters', then, once, the one in
which rank 0 saw gradients come in the first backward. Here every parameter is a bucket of its own.

Source: Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704), section 3.2.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from lmsys.parallel.collectives import Group, Pending, all_reduce_mean, broadcast_
from lmsys.parallel.packing import Layout, pack
from lmsys.parallel.wrapper import Wrapper, check_floating, dense


class Overlapped(Wrapper):
    """Gradients of one bucket travel in one call. A bucket of one gradient is that gradient, without a copy."""

    all_reduces = True

    def __init__(self, module: nn.Module, process_group: Group = None, comm_dtype: torch.dtype | None = None):
        check_floating("comm_dtype", comm_dtype)
        super().__init__(module, process_group)
        self.comm_dtype = comm_dtype
        self._seen: list[int] | None = []  # the order of gradients, until buckets are planned by it
        self._plan(list(reversed(range(len(self.trainable)))))

    def _partition(self, order: list[int]) -> list[tuple[int, ...]]:
        """The buckets, in the order in which they are to be sent."""
        return [(index,) for index in order]

    def _plan(self, order: list[int]) -> None:
        self.buckets = self._partition(order)
        self._bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket}
        self._members = [[self.trainable[index] for index in bucket] for bucket in self.buckets]
        self._layouts = [self._layout(number) for number in range(len(self.buckets))]
        self._begin()

    def _layout(self, number: int) -> Layout:
        """Where the gradients of a bucket lie in its flat tensor."""
        return Layout.of(self._members[number])

    def _begin(self) -> None:
        """Prepares for the next backward, of which nothing has been sent."""
        self._ready: set[int] = set()
        self._waiting = [len(bucket) for bucket in self.buckets]
        self._sent: list[Pending] = []
        self._absent: list[int] = []

    def _gradient_is_ready(self, index: int) -> None:
        if self.world_size == 1:
            return
        if index in self._ready:
            raise RuntimeError(
                "a second backward before finish_gradient_synchronization(): the first belongs under no_sync()"
            )
        self._ready.add(index)
        if self._seen is not None:
            self._seen.append(index)
        number = self._bucket_of[index]
        self._waiting[number] -= 1
        if not self._waiting[number]:
            while len(self._sent) < len(self.buckets) and not self._waiting[len(self._sent)]:
                self._send_next()

    def _synchronize(self) -> None:
        while len(self._sent) < len(self.buckets):  # gradients are missing, or were all made under no_sync()
            self._send_next()
        for pending in self._sent:
            pending.wait()
        self._use_pending.wait()
        use, absent = self._used, self._absent
        self._begin()
        if self._seen is not None:
            self._plan_again(self._seen)
        self._conclude(use, absent)

    def _send_next(self) -> None:
        number = len(self._sent)
        self._absent += [index for index in self.buckets[number] if self.trainable[index].grad is None]
        if number == len(self.buckets) - 1:  # all gradients that will come have come
            self._used = self._use(self._absent)
            self._use_pending = all_reduce_mean(self._used, self.group)
        self._sent.append(self._send(number))

    def _send(self, number: int) -> Pending:
        """Begins a bucket's communication."""
        params = self._members[number]
        dtype = self.comm_dtype or params[0].dtype
        if len(params) == 1 and dtype == params[0].dtype:
            if params[0].grad is None:
                params[0].grad = torch.zeros_like(params[0])
            return all_reduce_mean(dense(params[0]), self.group)
        flat, views = pack(params, self._layouts[number], dtype)
        if dtype != params[0].dtype:
            return Pending(all_reduce_mean(flat, self.group), partial(widen, params, views))
        for p, view in zip(params, views, strict=True):
            p.grad = view
        return all_reduce_mean(flat, self.group)

    def _plan_again(self, seen: list[int]) -> None:
        """Plans buckets in the order in which rank 0 saw gradients; those that it did not see come last."""
        unseen = [index for index in reversed(range(len(self.trainable))) if index not in set(seen)]
        order = torch.tensor(seen + unseen, device=self.trainable[0].device)
        broadcast_(order, self.group)
        self._seen = None
        self._plan(order.tolist())


@torch.no_grad()
def widen(params: list[Any], views: list[Any]) -> None:
    """Copies gradients back from the dtype in which they were sent."""
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    torch._foreach_copy_([p.grad for p in params], views)
