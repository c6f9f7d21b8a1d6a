"""The mean over the GPUs of one node, where copy engines move what is sent, and SMs only add.

Each rank adds up one segment of every bucket. For each bucket, in the order in which all ranks send them:

    one stream      READY    all ranks have this bucket's gradients, and a free half of their inbox
                    copy     gradients of the peers' segments, from where autograd left them, to the peers
                    ARRIVED  all have come
    another         mean     of the own segment, by rank, into the own bucket
                    copy     that, into the peers' buckets
    at the end      DONE     all buckets are whole

A signal is a kernel of one warp: nothing of this waits on the host, so a CUDA graph can record it. Copies of one bucket
run while another is added up, through the two halves of an inbox. Before it waits for a signal of its
peers, every rank has given the same one, in the same order on all: whatever a GPU puts into one queue, no ranks wait
for each other.

Source: the two halves are Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", 4.5
(reduce-scatter, then all-gather); the copies are those of torch's asynchronous tensor parallelism.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmsys.parallel.buckets import ALIGNMENT
from lmsys.parallel.collectives import Pending
from lmsys.parallel.packing import Layout

READY, ARRIVED, DONE = range(3)  # channels of a bucket's signals
HALVES = 2
TIMEOUT_MS = 300_000  # of a signal, in milliseconds: then its kernel traps, and a CUDA error is raised


@dataclass(frozen=True)
class _Bucket:
    """handle: of the flat tensor's symmetric memory. A part is (number of the gradient, which of its elements).

    sending    parts, and where they go in a peer's memory
    adding     parts, what peers send of them, by rank, and where the mean goes
    returning  pairs (into a peer's flat tensor, from the own)
    """

    handle: Any
    sending: list[tuple[int, slice, Tensor]]
    adding: list[tuple[int, slice, list[Tensor], Tensor]]
    returning: list[tuple[Tensor, Tensor]]


class Exchange:
    """flats    (L,) of each bucket, where its means are to be; layouts: where gradients lie in it
    handles  torch's symmetric memory of each, or what has its rank, world_size, get_buffer and barrier
    inbox    (`inbox_bytes`,) for what peers send; inboxes: the handle of it
    mean     mean(own, others, out, rank): out becomes the mean of own and others by rank
    copy     copy(into, from)
    cuda     torch.cuda, or what has its Stream, stream and current_stream
    """

    def __init__(
        self,
        flats: Sequence[Tensor],
        layouts: Sequence[Layout],
        handles: Sequence[Any],
        inbox: Tensor,
        inboxes: Any,
        mean: Callable[[Tensor, list[Tensor], Tensor, int], None],
        copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
        cuda: Any = torch.cuda,
    ):
        self.flats, self._mean, self._copy, self._cuda = list(flats), mean, copy, cuda
        self.rank = inboxes.rank
        self.num_bytes = sum(x.nbytes for x in (*flats, inbox))
        half = inbox.numel() // HALVES
        self._buckets = [
            _bucket(flat, layout, handle, inbox, inboxes, number % HALVES * half)
            for number, (flat, layout, handle) in enumerate(zip(flats, layouts, handles, strict=True))
        ]
        # Before others: a kernel of these is short, and what follows waits for it.
        self._inward, self._outward = (cuda.Stream(priority=-1) for _ in range(2))
        self._begin()

    def _begin(self) -> None:
        self._added: list[Any] = []  # of each bucket sent: the event of its addition
        self._held: list[Sequence[Tensor]] = []  # gradients that are still read

    def send(self, number: int, gradients: Sequence[Tensor]) -> Pending:
        """Begins with a bucket, whose gradients the current stream makes. From 0 on, one after another.

        gradients  as its layout has them, contiguous; elsewhere than in its flat tensor, or where they belong in it
        """
        assert number == len(self._added), f"bucket {number} after {len(self._added)} buckets"
        bucket, flat_gradients = self._buckets[number], [x.view(-1) for x in gradients]
        self._held.append(flat_gradients)
        self._inward.wait_stream(self._cuda.current_stream())
        if number >= HALVES:
            self._inward.wait_event(self._added[number - HALVES])  # its half of the inbox is free again
        with self._cuda.stream(self._inward):
            bucket.handle.barrier(channel=READY, timeout_ms=TIMEOUT_MS)
            for index, part, into in bucket.sending:
                self._copy(into, flat_gradients[index][part])
            bucket.handle.barrier(channel=ARRIVED, timeout_ms=TIMEOUT_MS)
        self._outward.wait_event(self._inward.record_event())
        with self._cuda.stream(self._outward):
            for index, part, others, out in bucket.adding:
                self._mean(flat_gradients[index][part], others, out, self.rank)
            self._added.append(self._outward.record_event())
            for into, source in bucket.returning:
                self._copy(into, source)
        return Pending(then=self.finish)

    def finish(self) -> None:
        """The current stream waits for every bucket sent, and its gradients may change."""
        if not self._added:
            return
        with self._cuda.stream(self._outward):
            self._buckets[0].handle.barrier(channel=DONE, timeout_ms=TIMEOUT_MS)
        self._cuda.current_stream().wait_stream(self._outward)
        self._begin()  # events are of this step: a recording knows none of before


def segments_of(length: int, world_size: int) -> list[slice]:
    """Of a flat tensor, by rank, in order; the last may be shorter than others, or empty."""
    each = -(-length // (world_size * ALIGNMENT)) * ALIGNMENT
    return [slice(min(rank * each, length), min((rank + 1) * each, length)) for rank in range(world_size)]


def inbox_bytes(flats: Sequence[Tensor], world_size: int) -> int:
    """In each half the largest bucket's segment of every peer."""
    longest = max(segments_of(x.numel(), world_size)[0].stop * x.itemsize for x in flats)
    return HALVES * (world_size - 1) * longest


def parts_of(layout: Layout, segment: slice) -> list[tuple[int, slice, int]]:
    """Of each tensor that has elements in a segment: its number, which these are, and where in the segment."""
    found = []
    for index, (shape, _, start) in enumerate(layout.places):
        first, last = max(segment.start, start), min(segment.stop, start + shape.numel())
        if first < last:
            found.append((index, slice(first - start, last - start), first - segment.start))
    return found


def _bucket(flat: Tensor, layout: Layout, handle: Any, inbox: Tensor, inboxes: Any, half: int) -> _Bucket:
    """half: where its half of every rank's inbox begins, in bytes."""
    rank, world_size = inboxes.rank, inboxes.world_size
    peers = [peer for peer in range(world_size) if peer != rank]
    segments = segments_of(flat.numel(), world_size)
    between = segments[0].stop  # elements from what one peer sends to what the next does
    first = half // flat.itemsize
    own = inbox.view(flat.dtype)

    def at(peer: int, part: slice, start: int) -> tuple[int, int]:
        """Where `peer` keeps what this rank sends: first element, and how many."""
        place = rank - (rank > peer)
        return first + place * between + start, part.stop - part.start

    sending = []
    for peer in peers:
        for index, part, start in parts_of(layout, segments[peer]):
            offset, length = at(peer, part, start)
            sending.append((index, part, inboxes.get_buffer(peer, (length,), flat.dtype, offset)))
    adding = []
    for index, part, start in parts_of(layout, segments[rank]):
        length = part.stop - part.start
        places = [first + place * between + start for place in range(len(peers))]
        out = flat[segments[rank]][start : start + length]
        adding.append((index, part, [own[place : place + length] for place in places], out))
    mine = flat[segments[rank]]
    into = [handle.get_buffer(peer, (mine.numel(),), flat.dtype, segments[rank].start) for peer in peers]
    return _Bucket(handle, sending, adding, [(x, mine) for x in into if mine.numel()])


def over_symmetric_memory(layouts: Sequence[Layout], dtypes: Sequence[torch.dtype], group: Any) -> Exchange:
    """Over torch's symmetric memory, an allocation of its own for each bucket, with the signals of its own."""
    from torch.distributed._symmetric_memory import _SymmetricMemory, rendezvous

    from lmsys.parallel.mean_triton import mean_

    device, name = torch.device("cuda", torch.cuda.current_device()), group.group_name

    def allocated(length: int, dtype: torch.dtype) -> Tensor:
        return _SymmetricMemory.empty_strided_p2p((length,), (1,), dtype, device, name)

    lengths = [max(layout.length, ALIGNMENT) for layout in layouts]  # none without an address
    flats = [allocated(length, dtype) for length, dtype in zip(lengths, dtypes, strict=True)]
    inbox = allocated(inbox_bytes(flats, group.size()), torch.uint8)
    return Exchange(flats, layouts, [rendezvous(x, name) for x in flats], inbox, rendezvous(inbox, name), mean_)
