"""Plans which gradients are sent together, as a bucket, and lays tensors out in a flat tensor.

The other files of this folder that have buckets or flat tensors call it, and so does `lmsys.training.gradients`.
`plan` makes the buckets of all-reduces, `plan_segments` those in which each gradient has one owner. Both get a list of
sizes, one for each gradient. A *place* is an index into this list, and a bucket is a tuple of places. Every place is in
one bucket. Buckets come in the order in which their last gradient is ready, which is the order in which they are sent.
A bucket of `plan_segments` consists of *segments* of equal length, one for each rank; a rank owns the tensors in its
segment. A plan must depend on its arguments alone, since every rank makes it by itself and all must have the same.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lmsys.values import hold

MIB = 2**20
ALIGNMENT = 64  # elements: every tensor in a bucket begins at a multiple of it, so that kernels can use wide loads
BALANCED = 0.95  # a bucket of segments is closed once this share of its elements is gradients, not padding


def is_size(value: object) -> TypeGuard[float]:
    """True for a positive, finite number, as the option for the size of a bucket must be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _entries(numbers: Any, indices: Iterable[int]) -> list[int]:
    """numbers[i] for each i of the indices."""
    return [numbers[index] for index in indices]


def plan(
    sizes: Sequence[int], order: Sequence[int], limit: float, edge: float, kinds: Sequence[Hashable] | None = None
) -> list[tuple[int, ...]]:
    """Buckets of at most `limit` bytes, the first and the last of at most `edge` bytes, each for gradients of one kind.

    sizes  bytes of each gradient
    order  the places in `sizes`, in the order in which gradients become ready
    edge   a small first bucket lets communication begin early; the last one should be small because no computation is
           left to hide its communication
    kinds  for each gradient its kind, such as (dtype, device); None: all are of one kind
    A gradient larger than its limit has a bucket of its own. ValueError for a limit that is not positive, and for an
    order that does not have each place once.
    """
    hold(
        (limit > 0, f"a bucket must hold something: its size is {limit:g} bytes, and must be positive"),
        (
            sorted(order) == list(range(len(sizes))),
            f"the order must hold each of {len(sizes)} indices once; got {list(order)}",
        ),
    )
    kinds, edge = kinds or [None] * len(sizes), min(edge, limit)
    closed: list[tuple[int, ...]] = []
    open_: dict[Hashable, list[int]] = {}
    for index in order:
        bucket = open_.setdefault(kinds[index], [])
        if bucket and sum(_entries(sizes, bucket)) + sizes[index] > (limit if closed else edge):
            closed.append(tuple(bucket))
            bucket.clear()
        bucket.append(index)
    turn = dict(zip(order, count(), strict=False))  # of a place: when it becomes ready
    ready = sorted(closed + list(map(tuple, open_.values())), key=lambda bucket: turn[bucket[-1]])
    # Sorted again: without its tail, the bucket that was the last may be ready before others.
    return sorted(_small_tail(ready, sizes, edge), key=lambda bucket: turn[bucket[-1]])


def _small_tail(buckets: list[tuple[int, ...]], sizes: Sequence[int], edge: float) -> list[tuple[int, ...]]:
    """The buckets with the last one cut in two, so that the end has at most `edge` bytes, or one gradient."""
    if not buckets or len(buckets[-1]) == 1:
        return buckets
    last = buckets[-1]
    cut = len(last) - 1
    while cut > 0 and sum(_entries(sizes, last[cut - 1 :])) <= edge:
        cut -= 1
    return buckets[:-1] + [last[:cut], last[cut:]] if cut else buckets


def offsets(numels: Sequence[int], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """(the element at which each tensor begins in a flat tensor, the flat tensor's length in elements).

    Every tensor begins at a multiple of `alignment` elements, and the length is one, too.
    """
    *starts, end = accumulate((-(-numel // alignment) * alignment for numel in numels), initial=0)
    return starts, end


@dataclass(frozen=True)
class Segmented:
    """A bucket of world_size segments of `length` elements each. members: by rank the places that the rank owns."""

    members: tuple[tuple[int, ...], ...]
    length: int

    @property
    def indices(self) -> tuple[int, ...]:
        """All places in the bucket, in the order of the ranks that own them."""
        return tuple(chain(*self.members))


def share_out(costs: Sequence[float], world_size: int) -> list[list[int]]:
    """The places of `costs`, shared out to world_size parts of about equal sums.

    The largest goes first, to the part that has least (Graham 1969, longest processing time).
    """
    parts: list[list[int]] = [[] for _ in range(world_size)]
    loads: list[float] = [0] * world_size
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += costs[index]
    return parts


def plan_segments(
    numels: Sequence[int],
    order: Sequence[int],
    limit: float,
    world_size: int,
    kinds: Sequence[Hashable] | None = None,
    loads: list[Any] | None = None,
    costs: Sequence[float] | None = None,
) -> list[Segmented]:
    """Buckets of world_size segments of whole tensors. A segment has about `limit` elements, or more to save padding.

    A bucket grows until its segments average `limit` elements and at least the share BALANCED of it is not padding. If
    it reaches four times that size first, it is cut where its segments were most even. The segment that costs most goes
    to the rank whose segments have cost least so far.

    numels  elements of each tensor
    order   the places in `numels`, in the order in which gradients become ready
    kinds   as in `plan`
    loads   for each rank the cost of its segments so far, from earlier calls; it is updated
    costs   for each tensor its cost, by which tensors are shared out to segments; None: its number of elements
    ValueError for a limit that is not positive.
    """
    hold((limit > 0, f"a bucket must hold something: its size is {limit:g} elements, and must be positive"))
    kinds = kinds or [None] * len(numels)
    loads = [0] * world_size if loads is None else loads
    costs = numels if costs is None else costs
    segments = []
    for kind in dict.fromkeys(_entries(kinds, order)):
        left = [index for index in order if kinds[index] == kind]
        while left:
            end = _cut(numels, left, limit * world_size, world_size, costs)
            segments.append(_segmented(numels, left[:end], world_size, loads, costs))
            left = left[end:]
    turn = dict(zip(order, count(), strict=False))
    return sorted(segments, key=lambda bucket: max(_entries(turn, bucket.indices)))


def _cut(numels: Sequence[int], order: Sequence[int], least: float, world_size: int, costs: Sequence[float]) -> int:
    """How many places, from the start of `order`, make the next bucket of `plan_segments`: about `least` elements."""
    best, most_even, total = len(order), 0.0, 0
    for end, index in enumerate(order, start=1):
        total += numels[index]
        if total > 4 * least and most_even:
            break
        if total >= least or end == len(order):
            parts = share_out(_entries(costs, order[:end]), world_size)
            longest = max(sum(_entries(numels, _entries(order, part))) for part in parts)
            evenness = total / (world_size * longest) if longest else 1.0
            if evenness > most_even:
                best, most_even = end, evenness
            if evenness >= BALANCED:
                break
    return best


def _segmented(
    numels: Sequence[int], indices: Sequence[int], world_size: int, loads: list[Any], costs: Sequence[float]
) -> Segmented:
    """The bucket of the places `indices`, whose tensors are shared out to ranks; updates `loads`."""
    parts = [_entries(indices, part) for part in share_out(_entries(costs, indices), world_size)]
    parts.sort(key=lambda part: sum(_entries(costs, part)), reverse=True)
    ranks = sorted(range(world_size), key=loads.__getitem__)
    members: list[tuple[int, ...]] = [()] * world_size
    for rank, part in zip(ranks, parts, strict=True):
        members[rank] = tuple(part)
        loads[rank] += sum(_entries(costs, part))
    return Segmented(tuple(members), max(offsets(_entries(numels, owned))[1] for owned in members))


PART_MULTIPLE = 8  # elements: the length of a rank's part of a flat tensor is a multiple of it


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a flat tensor of `length` elements.

    Strategies with buckets compute a layout once for all steps, since a step often waits for the host.

    places  for each tensor its shape, its strides, and the element of the flat tensor at which it begins
    """

    places: tuple[tuple[torch.Size, tuple[int, ...], int], ...]
    length: int

    @classmethod
    def of(cls, like: Sequence[Tensor]) -> "Layout":
        """The layout of tensors of these shapes, one behind another."""
        return cls.at(like, *offsets([x.numel() for x in like]))

    @classmethod
    def at(cls, like: Sequence[Tensor], starts: Sequence[int], length: int) -> "Layout":
        """The layout of tensors of these shapes that begin at the elements `starts`."""
        contiguous = (torch.empty(x.shape, device="meta").stride() for x in like)
        return cls(tuple(zip((x.shape for x in like), contiguous, starts, strict=True)), length)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors as views of flat (length,)."""
        return [flat.as_strided(shape, strides, start) for shape, strides, start in self.places]

    def part(self, world_size: int) -> int:
        """The length in elements of each of world_size equal parts, which together hold the flat tensor.

        It is a multiple of PART_MULTIPLE: in dtypes of 2 bytes or more each part begins at a multiple of 16 bytes.
        """
        return -(-self.length // (world_size * PART_MULTIPLE)) * PART_MULTIPLE

    def gaps(self, numel: int) -> list[slice]:
        """The slices of a flat tensor of `numel` elements, at least `length`, that hold no tensor."""
        gaps, end = [], 0
        for shape, _, start in self.places:
            gaps.append(slice(end, start))
            end = start + shape.numel()
        return [gap for gap in gaps + [slice(end, numel)] if gap.start < gap.stop]


@torch.no_grad()
def pack(params: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Copies gradients into a new flat tensor of `dtype`, zeros for one that is None. Returns (flat tensor, its views).

    The elements between tensors (`layout.gaps`) are not written, and may have any value.
    """
    flat = params[0].new_empty(layout.length, dtype=dtype)
    views = layout.views(flat)
    copy_gradients(params, views)
    return flat, views


def copy_gradients(params: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Copies gradients into `views`, in one kernel; zero where a parameter has no gradient."""
    grads = [p.grad for p in params]
    there = [grad for grad in grads if grad is not None]
    if len(there) == len(params):
        torch._foreach_copy_(views, there)
        return
    if there:
        torch._foreach_copy_([view for view, grad in zip(views, grads, strict=True) if grad is not None], there)
    torch._foreach_zero_([view for view, grad in zip(views, grads, strict=True) if grad is None])


def set_gradients(params: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Sets .grad of each parameter to its gradient."""
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient


def clear_gradients(params: Iterable[Tensor]) -> None:
    """Sets .grad of each parameter to None."""
    for p in params:
        p.grad = None


@torch.no_grad()
def widen(params: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Copies gradients from `views`, in the dtype in which they were sent, into .grad in the parameters' own dtype."""
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    torch._foreach_copy_([p.grad for p in params], views)
