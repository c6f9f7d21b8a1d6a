"""The collectives that strategies call: means over ranks, gathers and broadcasts. It hides how NCCL and gloo differ.

`all_reduce_mean`, `reduce_scatter_mean` and `all_gather` begin a collective and return a `Pending`, whose `wait` ends
it. All ranks call the same functions in the same order. With NCCL a wait makes the current stream wait, not the host. A
caller that waits at once passes `async_op=False`: NCCL then works on the current stream itself, without events between
two streams. In some versions of torch gloo cannot compute a mean. So with gloo a mean is a sum, which is divided once
it has arrived. A group of one rank communicates nothing. A new collective must handle all these cases, and `TreeSums`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmsys.values import instance

APART = (  # the message of the error when ranks differ: of `Agreement`, and of `Wrapper` in wrapper.py
    "ranks have not made the same forwards since they last finished, or not in the same order, so that their gradients"
    " are of different batches: after an exception on one rank, end all; a forward that one rank makes alone belongs"
    " under torch.no_grad()"
)
# In an `Agreement`: the number that ends a step; the most numbers of a step that are kept, as forwards without a
# backward add to them without end.
END, LONGEST = -1, 10_000
Group = Any  # a torch ProcessGroup, None for the default one, or `TreeSums` of either
_UNWRAPPED = dist.ProcessGroup | None  # made once, since every collective checks its group against it

# Renamed in torch 2.13; the older names warn there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class TreeSums:
    """A process group whose means are sums instead: the functions of this file add along a binary tree of ranks.

    For four ranks the order of additions is (0 + 1) + (2 + 3). The world size is a power of two. The result has the
    bits of a single process that adds the same terms in pairs: see `lmsys.training.reproducible`.

    group  the process group; None: the default one
    """

    group: Any = None


def unwrapped(group: Group) -> Any:
    """The ProcessGroup, or None, that torch.distributed takes."""
    return group.group if isinstance(group, TreeSums) else group


@dataclass
class Pending:
    """A collective under way: call `wait` before its result is read. Only the first call has an effect.

    work  what torch.distributed returned, or another `Pending`; None: there is nothing to wait for
    then  called after the wait for `work`, to finish the result, such as by a division
    """

    work: Any = None
    then: Callable[[], Any] | None = None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.then is not None:
            self.then()
        self.work = self.then = None


def size_and_rank(group: Group) -> tuple[int, int]:
    """(world size, this rank); (1, 0) where no process group was made.

    ValueError for a value that is no group, such as the number that `new_group` gives to ranks outside of the new one.
    """
    # torch's get_world_size and get_rank would take longer.
    ranks = instance("process_group", unwrapped(group), _UNWRAPPED) or dist.group.WORLD
    return (ranks.size(), ranks.rank()) if dist.is_initialized() else (1, 0)


def is_nccl(group: Group, x: Tensor) -> bool:
    """True where NCCL carries collectives of x."""
    return x.is_cuda and "nccl" in str(dist.get_backend(unwrapped(group)))


def all_reduce_mean(x: Tensor, group: Group, async_op: bool = True) -> Pending:
    """x becomes its mean over ranks, in place; with `TreeSums` its sum."""
    world_size, _ = size_and_rank(group)
    if world_size == 1:
        return Pending()
    if isinstance(group, TreeSums):
        return _all_reduce_tree(x, group.group, world_size, async_op)
    return (
        Pending(dist.all_reduce(x, dist.ReduceOp.AVG, group=group, async_op=async_op))
        if is_nccl(group, x)
        else Pending(dist.all_reduce(x, group=group, async_op=async_op), lambda: x.div_(world_size))
    )


def reduce_scatter_mean(out: Tensor, x: Tensor, group: Group, async_op: bool = True) -> Pending:
    """x (world_size · n,) -> out (n,): the mean over ranks of this rank's segment of x; with `TreeSums` the sum."""
    world_size, _ = size_and_rank(group)
    if x.is_complex():  # for other collectives torch.distributed does this itself
        out, x = torch.view_as_real(out), torch.view_as_real(x)
    if world_size == 1:
        out.copy_(x)
        return Pending()
    if isinstance(group, TreeSums):
        parts = torch.empty_like(x)
        work = dist.all_to_all_single(parts, x, group=group.group, async_op=async_op)
        return Pending(work, lambda: out.copy_(_tree(parts.view(world_size, -1))))
    return (
        Pending(_reduce_scatter(out, x, dist.ReduceOp.AVG, group=group, async_op=async_op))
        if is_nccl(group, x)
        else Pending(_reduce_scatter(out, x, group=group, async_op=async_op), lambda: out.div_(world_size))
    )


def _all_reduce_tree(x: Tensor, group: Any, world_size: int, async_op: bool) -> Pending:
    """x becomes the sum over ranks: each rank adds up one part of x, then all ranks gather all parts.

    With two ranks there is only one order to add in, so an ordinary all-reduce does.
    """
    if world_size == 2:
        return Pending(dist.all_reduce(x, group=group, async_op=async_op))
    sent = x.new_zeros(world_size * -(-x.numel() // world_size))
    sent[: x.numel()] = x.reshape(-1)
    parts = torch.empty_like(sent)
    work = dist.all_to_all_single(parts, sent, group=group, async_op=async_op)

    def gather() -> None:
        _all_gather(sent, _tree(parts.view(world_size, -1)), group=group)
        x.copy_(sent[: x.numel()].view_as(x))

    return Pending(work, gather)


def _tree(terms: Tensor) -> Tensor:
    """terms (W, n) -> their sum (n,): pairs of neighbours are added until one is left."""
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def all_gather(out: Tensor, x: Tensor, group: Group, async_op: bool = True) -> Pending:
    """x (n,) of every rank -> out (world_size · n,); x may be this rank's segment of out."""
    if size_and_rank(group)[0] == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Pending()
    return Pending(_all_gather(out, x, group=unwrapped(group), async_op=async_op))


def broadcast_(x: Tensor, group: Group) -> None:
    """Writes rank 0's x into x on every rank, whatever its dtype and layout."""
    if size_and_rank(group)[0] == 1 or not x.numel():
        return
    content = x.detach().contiguous()
    dist.broadcast(content.reshape(-1).view(torch.uint8), group=unwrapped(group), group_src=0)
    if content.data_ptr() != x.data_ptr():
        x.detach().copy_(content)
    torch.autograd.graph.increment_version(x)  # so that autograd sees the write: collectives do not raise the version


def gather_objects(value: Any, group: Group) -> list[Any]:
    """The `value` of every rank, by rank, on all ranks."""
    world_size, _ = size_and_rank(group)
    if world_size == 1:
        return [value]
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, value, group=unwrapped(group))
    return objects


class Agreement:
    """Makes sure that all ranks begin the same collective next, so that none waits for ever. `Fsdp` uses it.

    Each collective has a number. Before it begins, ranks compare its number in a small collective that has none. Once
    two steps in a row had the same order of numbers, ranks follow this order without comparing. When a rank is to begin
    a collective that does not come next in this order, it first takes part in all collectives that are left in the
    order, by blank(number), since other ranks may still begin them. Then it compares its own number. The other ranks
    compare too, at the step's end at the latest. If the numbers differ, all ranks get the error.

    blank  blank(number) takes part in the collective of this number, and drops its result

    The attribute `since` has the numbers of this step; it is empty after an error.
    """

    def __init__(self, group: Group, blank: Callable[[int], None]):
        self._group, self._blank, self._are_apart = group, blank, False
        # Numbers: of the known order, of the last step, and of this step.
        self._order, self._before, self.since = list[int](), list[int](), list[int]()

    def on(self, number: int) -> None:
        """Called before the collective of this number. A number below 0 marks a point where no numbered one follows.

        RuntimeError on all ranks unless all have the same number. From then on every call raises it: a rank may still
        come to collectives, as at the end of the forward that the error has ended, and the others would not join them.
        """
        if self._are_apart:
            raise RuntimeError(APART)
        rest = self._order[len(self.since) :]
        if len(self.since) < LONGEST:
            self.since.append(number)
        if rest[:1] == [number]:
            return
        for other in (x for x in rest if x >= 0):
            self._blank(other)
        self._order = []
        # The maximum of x and that of -x over ranks add up to the spread of x: 0 where all ranks have the same x. The
        # length of `rest` is compared as well: it says how far a rank was in the known order.
        extremes = torch.tensor([number, -number, len(rest), -len(rest)])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=unwrapped(self._group))
        if extremes.sum():
            self._are_apart, self.since = True, []
            raise RuntimeError(APART)

    def end(self) -> None:
        """Called after the last collective of a step. RuntimeError as in `on`.

        Here ranks always compare, since the known order never has END in it.
        """
        self.on(END)
        self._order = self.since[:-1] if self.since == self._before else []
        self._before, self.since = self.since, []
