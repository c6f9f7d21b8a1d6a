"""The mean over ranks of one node by copies between their GPUs: copy engines move, SMs only add. Experimental.

Each rank owns a segment of every bucket, and reads its peers' memory. For each bucket, in the order in which all ranks
send them:

    one stream      READY    all ranks have packed this bucket
                    copy     the peers' parts of the own segment, into scratch
    another         mean     of these and the own part, by rank, into the own segment
                    REDUCED  all ranks have, and so have read what is overwritten next
                    copy     the peers' segments, into the own bucket
    at the end      READ     all ranks have read all buckets, which now may change

A signal is a kernel of one warp: nothing of this waits on the host, so a CUDA graph can record it. Copies of one bucket
run while another is added up, through two halves of the scratch. Before it waits for a signal of its peers, every rank
has given the same one, in the same order on all: whatever a GPU puts into one queue, no ranks wait for each other.

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

READY, REDUCED, READ = range(3)  # channels of a bucket's signals
TIMEOUT_MS = 300_000  # of a signal, in milliseconds: then its kernel traps, and a CUDA error is raised


@dataclass(frozen=True)
class _Bucket:
    """handle: of the symmetric memory. Tensors (n,): parts by rank, of which the own one takes the mean; copies are
    pairs (into, from) of what has peers' memory as its source."""

    handle: Any
    parts: list[Tensor]
    gathering: list[tuple[Tensor, Tensor]]
    returning: list[tuple[Tensor, Tensor]]


class Exchange:
    """flats    (L,) of each bucket, where it is packed in every step; scale: what gradients are multiplied with then
    handles  torch's symmetric memory of each, or what has its rank, world_size, get_buffer and barrier
    mean     mean(parts, rank): parts[rank] becomes the mean of parts
    copy     copy(into, from)
    cuda     torch.cuda, or what has its Stream, stream and current_stream
    """

    scale = 1.0

    def __init__(
        self,
        flats: Sequence[Tensor],
        handles: Sequence[Any],
        mean: Callable[[list[Tensor], int], None],
        copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
        cuda: Any = torch.cuda,
    ):
        self.flats, self._mean, self._copy, self._cuda = list(flats), mean, copy, cuda
        self.rank, world_size = handles[0].rank, handles[0].world_size
        segments = [segments_of(flat.numel(), world_size) for flat in flats]
        most = max(
            (cut[self.rank].stop - cut[self.rank].start) * x.itemsize for cut, x in zip(segments, flats, strict=True)
        )
        scratch = [torch.empty((world_size - 1) * most, dtype=torch.uint8, device=flats[0].device) for _ in range(2)]
        self._buckets = [
            _bucket(flat, handle, cut, scratch[number % 2])
            for number, (flat, handle, cut) in enumerate(zip(flats, handles, segments, strict=True))
        ]
        # Before others: a kernel of these is short, and what follows waits for it.
        self._inward, self._outward = (cuda.Stream(priority=-1) for _ in range(2))
        self._added: list[Any] = []  # of each bucket sent: the event of its addition

    def send(self, number: int) -> Pending:
        """Begins with a bucket that what the current stream has been given packs. From 0 on, one after another."""
        assert number == len(self._added), f"bucket {number} after {len(self._added)} buckets"
        bucket = self._buckets[number]
        self._inward.wait_stream(self._cuda.current_stream())
        if number > 1:
            self._inward.wait_event(self._added[number - 2])  # its half of the scratch is free again
        with self._cuda.stream(self._inward):
            bucket.handle.barrier(channel=READY, timeout_ms=TIMEOUT_MS)
            for into, source in bucket.gathering:
                self._copy(into, source)
        self._outward.wait_event(self._inward.record_event())
        with self._cuda.stream(self._outward):
            if bucket.parts[self.rank].numel():
                self._mean(bucket.parts, self.rank)
            self._added.append(self._outward.record_event())
            bucket.handle.barrier(channel=REDUCED, timeout_ms=TIMEOUT_MS)
            for into, source in bucket.returning:
                self._copy(into, source)
        return Pending(then=self.finish)

    def finish(self) -> None:
        """The current stream waits for every bucket sent: each is the mean, and no peer reads it any more."""
        if not self._added:
            return
        with self._cuda.stream(self._outward):
            self._buckets[0].handle.barrier(channel=READ, timeout_ms=TIMEOUT_MS)
        self._cuda.current_stream().wait_stream(self._outward)
        self._added = []  # of this step: a recording knows no events of before


def segments_of(length: int, world_size: int) -> list[slice]:
    """Of a flat tensor, by rank, in order; the last may be shorter than others, or empty."""
    each = -(-length // (world_size * ALIGNMENT)) * ALIGNMENT
    return [slice(min(rank * each, length), min((rank + 1) * each, length)) for rank in range(world_size)]


def _bucket(flat: Tensor, handle: Any, segments: list[slice], scratch: Tensor) -> _Bucket:
    """scratch (bytes,): room for the peers' parts of the own segment."""
    rank = handle.rank
    peers = [peer for peer in range(handle.world_size) if peer != rank]
    own = flat[segments[rank]]
    bytes_ = own.numel() * own.itemsize
    parts = [scratch[place * bytes_ : (place + 1) * bytes_].view(flat.dtype) for place in range(len(peers))]
    parts.insert(rank, own)

    def of(peer: int, segment: slice) -> Tensor:
        return handle.get_buffer(peer, (segment.stop - segment.start,), flat.dtype, segment.start)

    gathering = [(parts[peer], of(peer, segments[rank])) for peer in peers]
    returning = [(flat[segments[peer]], of(peer, segments[peer])) for peer in peers]
    return _Bucket(handle, parts, *([pair for pair in pairs if pair[0].numel()] for pairs in (gathering, returning)))
