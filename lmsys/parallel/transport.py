"""How buckets travel: gradients to the ranks that own their parameters, and parameters from these to all.

A strategy plans buckets and says who owns what in them. Its transport sends them, and makes the means the gradients of
the parameters that this rank owns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lmsys.parallel.collectives import Group, Pending, all_reduce_mean, reduce_scatter_mean, size_and_rank
from lmsys.parallel.packing import Layout, copy_gradients, pack, widen
from lmsys.parallel.sharded_optimizer import FlatBuffer
from lmsys.parallel.wrapper import dense


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel as one.

    number   of the bucket, in the order of sending
    indices  of `params` among the parameters that are trained
    layout   where the gradients of `params` lie side by side
    dtype    of what travels
    owned    those of `params` that this rank owns; `own` is where their means lie side by side
    whole    True where every rank owns all of `params`
    """

    number: int
    indices: tuple[int, ...]
    params: list[nn.Parameter]
    layout: Layout
    dtype: torch.dtype
    owned: list[nn.Parameter]
    own: Layout
    whole: bool = True


class Collectives:
    """Buckets travel by all-reduces, or by reduce-scatters and all-gathers. Each step's are in memory of their own."""

    outside_bytes = 0  # of GPU memory that torch's allocator does not count

    def __init__(self, module: nn.Module, group: Group):
        self.group = group
        _, self.rank = size_and_rank(group)
        self._scattered = Pending(), Pending()  # the last two reduce-scatters

    def zeros(self, like: Tensor, length: int) -> Tensor:
        """Zeros (length,) of the dtype and device of `like`, into which parameters can be gathered."""
        return like.new_zeros(length)

    def settle(self, buckets: Sequence[Bucket], buffers: Sequence[FlatBuffer] = ()) -> None:
        """Called when no other buckets of gradients, and no other flat buffers of parameters, will follow."""

    def reduce(self, bucket: Bucket) -> Pending:
        """Begins a bucket's communication: then gradients are the means, or None where this rank owns no more."""
        if not bucket.whole:
            return self._reduce_scatter(bucket)
        params = bucket.params
        if len(params) == 1 and bucket.dtype == params[0].dtype:
            if params[0].grad is None:
                params[0].grad = torch.zeros_like(params[0])
            return all_reduce_mean(dense(params[0]), self.group)
        flat, views = pack(params, bucket.layout, bucket.dtype)
        if bucket.dtype != params[0].dtype:
            return Pending(all_reduce_mean(flat, self.group), partial(widen, params, views))
        for p, view in zip(params, views, strict=True):
            p.grad = view
        return all_reduce_mean(flat, self.group)

    def _reduce_scatter(self, bucket: Bucket) -> Pending:
        flat = bucket.params[0].new_empty(bucket.layout.length)
        with torch.no_grad():
            copy_gradients(bucket.params, bucket.layout.views(flat))
            own = flat.new_empty(bucket.own.length)
            views = bucket.own.views(own)
        for p in bucket.params:
            p.grad = None
        for p, view in zip(bucket.owned, views, strict=True):
            p.grad = view
        before, last = self._scattered
        before.wait()  # so that its flat tensor can be used again
        self._scattered = last, reduce_scatter_mean(own, flat, self.group)
        return self._scattered[1]

    def gather(self, number: int, buffer: FlatBuffer) -> Pending:
        """Begins to gather one of the flat buffers: called from 0 on, one after another."""
        return buffer.gather(self.rank, self.group)
