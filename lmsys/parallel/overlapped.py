"""All-reduces that begin while the backward goes on: one per parameter, from its post-accumulate-grad hook.

Ranks must begin the same collectives in the same order, whatever order their gradients come in: a bucket is sent when
it is complete and all before it have been. The order is at first the reverse of the parameters', then, once, the one in
which rank 0 saw gradients come in the first backward. Here every parameter is a bucket of its own.

Strategies of this kind differ in two choices: who owns what, which `_partition` and `_bucket` say, and how buckets
travel, which `over` says.

Source: Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704), section 3.2.
"""

import torch
from torch import Tensor, nn

from lmsys.parallel.collectives import Group, Pending, all_reduce_mean, broadcast_, size_and_rank
from lmsys.parallel.packing import Layout
from lmsys.parallel.transport import Bucket, Collectives
from lmsys.parallel.wrapper import Wrapper, check_floating


class Overlapped(Wrapper):
    """Gradients of one bucket travel in one call. A bucket of one gradient is that gradient, without a copy."""

    all_reduces = True
    halves_sums = True
    over: type[Collectives] = Collectives  # how buckets travel; on one rank nothing does

    def __init__(self, module: nn.Module, process_group: Group = None, comm_dtype: torch.dtype | None = None):
        check_floating("comm_dtype", comm_dtype)
        alone = size_and_rank(process_group)[0] == 1
        self.transport = (Collectives if alone else self.over)(module, process_group)
        super().__init__(module, process_group)
        self.comm_dtype = comm_dtype
        self._seen: list[int] | None = []  # the order of gradients, until buckets are planned by it
        self._plan(list(reversed(range(len(self.trainable)))))

    @property
    def outside_bytes(self) -> int:
        """Bytes of GPU memory that torch's allocator does not count."""
        return self.transport.outside_bytes

    def _partition(self, order: list[int]) -> list[tuple[int, ...]]:
        """The indices of each bucket, in the order in which they are to be sent."""
        return [(index,) for index in order]

    def _bucket(self, number: int, indices: tuple[int, ...]) -> Bucket:
        """The bucket of these parameters, and who owns them: here every rank all."""
        params = [self.trainable[index] for index in indices]
        layout = Layout.of(params)
        return Bucket(number, indices, params, layout, self.comm_dtype or params[0].dtype, params, layout)

    def _plan(self, order: list[int]) -> None:
        self.buckets = [self._bucket(*one) for one in enumerate(self._partition(order))]
        self._bucket_of = {index: bucket.number for bucket in self.buckets for index in bucket.indices}
        self._begin()

    def _begin(self) -> None:
        """Prepares for the next backward, of which nothing has been sent."""
        self._ready: set[int] = set()
        self._waiting = [len(bucket.indices) for bucket in self.buckets]
        self._sent: list[Pending] = []
        self._absent: list[int] = []

    def _watch(self, tensors: list[Tensor], hidden: bool) -> None:
        if hidden and not tensors and self.trainable:
            raise ValueError(
                "the module returned nothing that tells when a backward begins: let it return the tensors that it"
                " begins from, in tuples, lists, dicts or dataclasses"
            )
        super()._watch(tensors, hidden)

    def _begin_backward(self) -> None:
        """Gradients of a backward before this one are means first: to add to what travels would spoil it."""
        if self._unfinished and self.world_size > 1:
            self._synchronize()

    def _gradient_is_ready(self, index: int) -> None:
        if self.world_size == 1:
            return
        if index in self._ready:
            raise RuntimeError(
                "a second gradient of one parameter in a backward, whose first is on its way: checkpoint what is called"
                " more than once by use_reentrant=False, or run the backward under no_sync()"
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
        bucket = self.buckets[len(self._sent)]
        self._absent += [index for index in bucket.indices if self.trainable[index].grad is None]
        if bucket is self.buckets[-1]:  # all gradients that will come have come
            self._used = self._use(self._absent)
            self._use_pending = all_reduce_mean(self._used, self.group)
        self._sent.append(self.transport.reduce(bucket))

    def _plan_again(self, seen: list[int]) -> None:
        """Plans buckets in the order in which rank 0 saw gradients; those that it did not see come last."""
        unseen = [index for index in reversed(range(len(self.trainable))) if index not in set(seen)]
        order = torch.tensor(seen + unseen, device=self.trainable[0].device)
        broadcast_(order, self.group)
        self._seen = None
        self._plan(order.tolist())
        self.transport.settle(self.buckets)
