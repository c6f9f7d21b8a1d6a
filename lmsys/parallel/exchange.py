"""Means over the GPUs of one node, where copy engines move what is sent, and SMs only add.

Each rank adds up one segment of every bucket. For each bucket, in the order in which all ranks send them:

    one stream      READY    all ranks have this bucket's gradients, and a free half of their inbox
                    copy     gradients of the peers' segments, from where autograd left them, to the peers
                    ARRIVED  all have come
    another         mean     of the own segment, by rank, into the own bucket
                    copy     that, into the peers' buckets, unless all is reduced to its owner only
    at the end      DONE     all buckets are whole

A signal is a kernel of one warp: nothing of this waits on the host, so a CUDA graph can record it. Copies of one bucket
run while another is added up, through the two halves of an inbox. Before it waits for a signal of its peers, every rank
has given the same one, in the same order on all: whatever a GPU puts into one queue, no ranks wait for each other.

Source: the two halves are Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", 4.5
(reduce-scatter, then all-gather); the copies are those of torch's asynchronous tensor parallelism.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.parallel.buckets import ALIGNMENT
from lmsys.parallel.collectives import Pending
from lmsys.parallel.packing import Layout

READY, ARRIVED, DONE = range(3)  # channels of a bucket's signals
HALVES = 2
Mean = Callable[[Tensor, Tensor, Tensor, int], None]


# A part is (number of the gradient, which of its elements). Sending: parts, and where they go in a peer's memory;
# adding: parts, what peers send of them (peers by rank, n), and where the mean goes; returning: pairs (into a peer's
# flat tensor, from the own).
_Bucket = tuple[list[tuple[int, slice, Tensor]], list[tuple[int, slice, Tensor, Tensor]], list[tuple[Tensor, Tensor]]]


class Exchange:
    """layouts  for each bucket of length L, where gradients lie in it
    flats    for each bucket, where its means are to be: (L,), or, without handles, this rank's segment only
    inbox    (`inbox_bytes`,) for what peers send
    inboxes  torch's symmetric memory of it, or what has its rank, world_size, get_buffer and barrier
    handles  the same for each flat tensor
    mean     mean(own, others, out, rank): out becomes the mean of own and others by rank
    timeout_ms  how long a signal waits: then its kernel traps, and a CUDA error is raised
    copy     copy(into, from)
    cuda     torch.cuda, or what has its Stream, stream and current_stream
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        flats: Sequence[Tensor],
        inbox: Tensor,
        inboxes: Any,
        handles: Sequence[Any],
        mean: Mean,
        timeout_ms: int,
        copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
        cuda: Any = torch.cuda,
    ):
        self.flats, self._mean, self._copy, self._cuda = list(flats), mean, copy, cuda
        self._inboxes, self.rank, self._timeout_ms = inboxes, inboxes.rank, timeout_ms
        half = inbox.numel() // HALVES
        self._buckets = [
            _bucket(layout, flat, inbox, inboxes, number % HALVES * half, handle)
            for number, (layout, flat, handle) in enumerate(
                zip(layouts, flats, handles or [None] * len(flats), strict=True)
            )
        ]
        # High-priority streams: their kernels are short, and what follows waits for them.
        self._inward, self._outward = (cuda.Stream(priority=-1) for _ in range(2))
        self._begin()

    def _begin(self) -> None:
        self._added: list[Any] = []  # for each bucket sent, the event of its addition
        self._held: list[Sequence[Tensor]] = []  # gradients that are still read

    def send(self, number: int, gradients: Sequence[Tensor]) -> Pending:
        """Begins with a bucket, whose gradients the current stream makes. From 0 on, one after another.

        gradients  as its layout has them, contiguous; elsewhere than in its flat tensor, or where they belong in it
        """
        assert number == len(self._added), f"bucket {number} after {len(self._added)} buckets"
        (sending, adding, returning), flat_gradients = self._buckets[number], [x.view(-1) for x in gradients]
        self._held.append(flat_gradients)
        self._inward.wait_stream(self._cuda.current_stream())
        if number >= HALVES:
            self._inward.wait_event(self._added[number - HALVES])  # its half of the inbox is free again
        with self._cuda.stream(self._inward):
            self._signal(READY)
            for index, part, into in sending:
                self._copy(into, flat_gradients[index][part])
            self._signal(ARRIVED)
        self._outward.wait_event(self._inward.record_event())
        with self._cuda.stream(self._outward):
            for index, part, others, out in adding:
                self._mean(flat_gradients[index][part], others, out, self.rank)
            self._added.append(self._outward.record_event())
            for into, source in returning:
                self._copy(into, source)
        return Pending(then=self.finish)

    def finish(self) -> None:
        """The current stream waits for every bucket sent, and its gradients may change."""
        if not self._added:
            return
        with self._cuda.stream(self._outward):
            self._signal(DONE)
        self._cuda.current_stream().wait_stream(self._outward)
        self._begin()  # events are of this step: a recording knows none of before

    def _signal(self, channel: int) -> None:
        self._inboxes.barrier(channel=channel, timeout_ms=self._timeout_ms)


class AllGather:
    """An all-gather by copy engines: a rank copies its segment of each flat tensor (W n,) to all peers.

    One stream      READY    for the first flat only: no rank reads any longer what peers had sent before
                    copy     the own segment, to the peers
                    ARRIVED  all have come

    Its signals are its only kernels. flats, handles, timeout_ms, copy, cuda: as in `Exchange`.
    """

    def __init__(
        self,
        flats: Sequence[Tensor],
        handles: Sequence[Any],
        timeout_ms: int,
        copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
        cuda: Any = torch.cuda,
    ):
        self._handle, self._timeout_ms, self._copy, self._cuda = handles[0], timeout_ms, copy, cuda
        rank, world_size = self._handle.rank, self._handle.world_size
        peers, self._copies = peers_of(rank, world_size), []
        for flat, handle in zip(flats, handles, strict=True):
            length = flat.numel() // world_size
            own = flat[rank * length : (rank + 1) * length]
            self._copies.append(
                [(handle.get_buffer(peer, (length,), flat.dtype, rank * length), own) for peer in peers]
            )
        self._stream = cuda.Stream(priority=-1)
        self._next = 0

    def send(self, number: int) -> Pending:
        """Begins to gather a flat tensor, after all that the current stream has so far. The wait ends when it is whole.

        From 0 on, one after another; 0 begins anew. The own segment stays as it is until the wait.
        """
        assert number in (0, self._next), f"flat {number}, and the next is {self._next}"
        self._next = (number + 1) % len(self._copies)
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            if number == 0:
                self._signal(READY)
            for into, source in self._copies[number]:
                self._copy(into, source)
            self._signal(ARRIVED)
            return Pending(then=partial(self._await, self._stream.record_event()))

    def _signal(self, channel: int) -> None:
        self._handle.barrier(channel=channel, timeout_ms=self._timeout_ms)

    def _await(self, event: Any) -> None:
        self._cuda.current_stream().wait_event(event)


def peers_of(rank: int, world_size: int) -> list[int]:
    """The other ranks, in the order in which this one sends to them: each rank receives from one at a time."""
    return [(rank + i) % world_size for i in range(1, world_size)]


def segments_of(length: int, world_size: int) -> list[slice]:
    """The segments of a flat tensor, by rank, in order; the last may be shorter than others, or empty."""
    each = -(-length // (world_size * ALIGNMENT)) * ALIGNMENT
    return [slice(min(rank * each, length), min((rank + 1) * each, length)) for rank in range(world_size)]


def inbox_bytes(layouts: Sequence[Layout], itemsizes: Sequence[int], world_size: int) -> int:
    """The size of an inbox: each half holds every peer's segment of the largest bucket."""
    ends = [segments_of(layout.length, world_size)[0].stop for layout in layouts]
    longest = max(end * size for end, size in zip(ends, itemsizes, strict=True))
    return HALVES * (world_size - 1) * max(longest, ALIGNMENT)


def parts_of(layout: Layout, segment: slice) -> list[tuple[int, slice, int]]:
    """The tensors that have elements in a segment: the number of each, which elements, and where in the segment."""
    found = []
    for index, (shape, _, start) in enumerate(layout.places):
        first, last = max(segment.start, start), min(segment.stop, start + shape.numel())
        if first < last:
            found.append((index, slice(first - start, last - start), first - segment.start))
    return found


def _bucket(layout: Layout, flat: Tensor, inbox: Tensor, inboxes: Any, half: int, handle: Any) -> _Bucket:
    """half: where its half of every rank's inbox begins, in bytes."""
    rank, world_size = inboxes.rank, inboxes.world_size
    peers = peers_of(rank, world_size)
    segments = segments_of(layout.length, world_size)
    mine = flat if handle is None else flat[segments[rank]]
    between = segments[0].stop  # elements from what one peer sends to what the next does
    first = half // flat.itemsize
    sending = []
    for peer in peers:
        place = first + (rank - (rank > peer)) * between  # where that peer keeps what this rank sends
        for index, part, start in parts_of(layout, segments[peer]):
            into = inboxes.get_buffer(peer, (part.stop - part.start,), flat.dtype, place + start)
            sending.append((index, part, into))
    theirs = inbox.view(flat.dtype)[first : first + len(peers) * between].view(len(peers), between)
    adding = []
    for index, part, start in parts_of(layout, segments[rank]):
        cut = slice(start, start + part.stop - part.start)
        adding.append((index, part, theirs[:, cut], mine[cut]))
    returning = []
    if handle is not None and mine.numel():
        shape, start = (mine.numel(),), segments[rank].start
        returning = [(handle.get_buffer(peer, shape, flat.dtype, start), mine) for peer in peers]
    return sending, adding, returning
