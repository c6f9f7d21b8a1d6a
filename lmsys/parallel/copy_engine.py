"""All-reduces of gradients in buckets by the GPUs' copy engines, which move memory while the GPU's kernels run.

NCCL's kernels take multiprocessors from a backward that runs beside them. In a step of a large model this costs more
time than the part of the communication that no computation hides. So here copy engines send gradients from where
autograd left them, and a kernel only adds them up. This works for the GPUs of one node. In the first step gradients
travel by NCCL, except in ZeRO-1: the order in which they come in this step decides how buckets are planned.

`CopyEngines` is the transport of the strategies `copy_engine`, whose class is here, and `copy_engine_zero1` (zero1.py).
A transport carries out the communication of a bucket: see overlapped.py. It consists of two collectives, `Exchange` for
gradients and `AllGather` for parameters. In an `Exchange` each rank adds up one segment of every bucket. It has an
*inbox*, a buffer in torch's symmetric memory that the other ranks, its *peers*, copy their gradients into. For each
bucket, in the order in which all ranks send them, two streams, `_inward` and `_outward`, do this:

    _inward         READY    all ranks have this bucket's gradients, and a free half of their inbox
                    copy     gradients of the peers' segments, from where autograd left them, into the peers' inboxes
                    ARRIVED  all copies of this bucket have come
    _outward        mean     of the own segment over ranks, into the own bucket
                    copy     the mean, into the peers' buckets, unless only its owner needs it
    at the end      DONE     all buckets are whole

READY, ARRIVED and DONE are barriers of all ranks, each a kernel of one warp: the host waits for nothing, so a CUDA
graph can capture all of it. An inbox has two halves, so that copies of one bucket run while another is added up. After
any change, ranks must still pass the same barriers in the same order: so they cannot wait for each other in a circle,
in whatever order a GPU runs its queues. Where signatures change, the stand-ins for tests without GPUs, in
tests/support/engines.py, must change too.

Buckets stay where they are from step to step: a gradient is a view of one, and the next step overwrites it. What
autograd has made is held beside them until the end of the synchronization. From the second step on, and in ZeRO-1 from
the first, a rank that waits for another longer than the group's timeout ends with a CUDA error.

Source: an all-reduce in two steps, reduce-scatter and then all-gather, is that of Thakur et al. 2005, "Optimization of
Collective Communication Operations in MPICH", 4.5; the copies are those of torch's asynchronous tensor parallelism.
"""

import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lmsys import values
from lmsys.parallel import buckets, collectives, overlapped, sharded_optimizer, wrapper

READY, ARRIVED, DONE = range(3)  # the channels of the barriers, by which torch tells concurrent barriers apart
HALVES = 2  # parts of an inbox: bucket n uses part n % HALVES


# What is done for a bucket, in three lists. Sending: (number of a gradient, slice of it, where it goes in a peer's
# inbox). Adding: (number of a gradient, slice of it, what peers send of it (peers by rank, n), where the mean goes).
# Returning: (where the mean goes in a peer's flat tensor, where it is in this rank's own).
_Work = tuple[list[tuple[int, slice, Tensor]], list[tuple[int, slice, Tensor, Tensor]], list[tuple[Tensor, Tensor]]]


class Exchange:
    """The all-reduce, or reduce-scatter, of a step's buckets by copy engines.

    layouts     for each bucket of length L, where gradients lie in it
    flats       for each bucket the tensor for its means: (L,), or, without handles, this rank's segment alone
    inbox       (`inbox_bytes`,) uint8, for the gradients that peers send
    inboxes     torch's symmetric-memory handle of the inbox; of it rank, world_size, get_buffer and barrier are used
    handles     such a handle for each flat tensor; empty for a reduce-scatter
    mean        mean(own, others, out, rank): out becomes the mean of own and others, added in the order of ranks
    timeout_ms  how long a barrier waits before its kernel traps, which is a CUDA error
    copy        copy(into, from); tests replace it
    cuda        torch.cuda, of which Stream, stream and current_stream are used; tests replace it
    """

    def __init__(
        self,
        layouts: Sequence[buckets.Layout],
        flats: Sequence[Tensor],
        inbox: Tensor,
        inboxes: Any,
        handles: Sequence[Any],
        mean: Callable[[Tensor, Tensor, Tensor, int], None],
        timeout_ms: int,
        copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
        cuda: Any = torch.cuda,
    ):
        self.flats, self._mean, self._copy, self._cuda = list(flats), mean, copy, cuda
        self.rank, self._signal = inboxes.rank, partial(inboxes.barrier, timeout_ms=timeout_ms)
        parts = zip(layouts, flats, handles or [None] * len(flats), strict=True)
        self._buckets = [
            _work_on(layout, flat, inbox, inboxes, half_byte=number % HALVES * (inbox.numel() // HALVES), handle=handle)
            for number, (layout, flat, handle) in enumerate(parts)
        ]
        # High-priority streams: their kernels are short, and what follows waits for them.
        self._inward, self._outward = cuda.Stream(priority=-1), cuda.Stream(priority=-1)
        self._begin()

    def _begin(self) -> None:
        """Prepares for the next step, of which no bucket has been sent."""
        self._added: list[Any] = []  # for each bucket sent, the event after its addition
        self._held: list[Sequence[Tensor]] = []  # gradients that streams may still read, so that none is freed

    def send(self, number: int, gradients: Sequence[Tensor]) -> collectives.Pending:
        """Begins the exchange of bucket `number`. Called for all buckets in order, from 0 on.

        gradients  those that the current stream computes, in the order of the layout, contiguous; they may lie in the
                   bucket's flat tensor, if each is at its own place there
        The `wait` of the result calls `finish`.
        """
        assert number == len(self._added), f"bucket {number} after {len(self._added)} buckets"
        (sending, adding, returning), flat_gradients = self._buckets[number], [x.view(-1) for x in gradients]
        self._held.append(flat_gradients)
        self._inward.wait_stream(self._cuda.current_stream())
        if number >= HALVES:
            self._inward.wait_event(self._added[number - HALVES])  # its half of the inbox is free again
        with self._cuda.stream(self._inward):
            self._signal(channel=READY)
            for index, part, into in sending:
                self._copy(into, flat_gradients[index][part])
            self._signal(channel=ARRIVED)
        self._outward.wait_event(self._inward.record_event())
        with self._cuda.stream(self._outward):
            for index, part, others, out in adding:
                self._mean(flat_gradients[index][part], others, out, self.rank)
            self._added.append(self._outward.record_event())
            for into, source in returning:
                self._copy(into, source)
        return collectives.Pending(then=self.finish)

    def finish(self) -> None:
        """Makes the current stream wait for all buckets sent. After that, gradients may be changed and freed."""
        if not self._added:
            return
        with self._cuda.stream(self._outward):
            self._signal(channel=DONE)
        self._cuda.current_stream().wait_stream(self._outward)
        self._begin()  # a CUDA graph cannot wait for events from before its capture


class AllGather:
    """An all-gather by copy engines: each of W ranks copies its segment (n,) of each flat tensor (W n,) to all peers.

    One stream      READY    for the first flat tensor only: no rank reads any longer what peers sent before
                    copy     the own segment, to the peers
                    ARRIVED  all segments have come

    Barriers are its only kernels. flats, handles, timeout_ms, copy, cuda: as in `Exchange`.
    """

    def __init__(
        self,
        flats: Sequence[Tensor],
        handles: Sequence[Any],
        timeout_ms: int,
        copy: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
        cuda: Any = torch.cuda,
    ):
        self._copy, self._cuda = copy, cuda
        self._signal = partial(handles[0].barrier, timeout_ms=timeout_ms)
        rank, world_size = handles[0].rank, handles[0].world_size
        peers, self._copies = peers_of(rank, world_size), []
        for flat, handle in zip(flats, handles, strict=True):
            length = flat.numel() // world_size
            own = flat[rank * length : (rank + 1) * length]
            self._copies.append(
                [(handle.get_buffer(peer, (length,), flat.dtype, rank * length), own) for peer in peers]
            )
        self._stream = cuda.Stream(priority=-1)
        self._next = 0

    def send(self, number: int) -> collectives.Pending:
        """Begins to gather flat tensor `number` after the current stream's work; after the wait it is whole.

        Called for all flat tensors in order, from 0 on, and then from 0 again. The own segment must not change before
        the wait.
        """
        assert number in (0, self._next), f"flat {number}, and the next is {self._next}"
        self._next = (number + 1) % len(self._copies)
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            if number == 0:
                self._signal(channel=READY)
            for into, source in self._copies[number]:
                self._copy(into, source)
            self._signal(channel=ARRIVED)
            arrived = self._stream.record_event()
        return collectives.Pending(then=lambda: self._cuda.current_stream().wait_event(arrived))


def peers_of(rank: int, world_size: int) -> list[int]:
    """The other ranks, in the order in which this one sends to them, so that each receives from one at a time."""
    return [(rank + i) % world_size for i in range(1, world_size)]


def segments_of(length: int, world_size: int) -> list[slice]:
    """By rank the slice of a flat tensor of `length` elements that it adds up; the last ones may be short or empty."""
    each = -(-length // (world_size * buckets.ALIGNMENT)) * buckets.ALIGNMENT
    return [slice(min(rank * each, length), min((rank + 1) * each, length)) for rank in range(world_size)]


def inbox_bytes(layouts: Sequence[buckets.Layout], itemsizes: Sequence[int], world_size: int) -> int:
    """The size of an inbox in bytes: each half has room for what every peer sends of the largest bucket.

    Where all buckets are empty it still has ALIGNMENT bytes for each peer in each half.
    """
    longest = max(
        segments_of(layout.length, world_size)[0].stop * size for layout, size in zip(layouts, itemsizes, strict=True)
    )
    return HALVES * (world_size - 1) * max(longest, buckets.ALIGNMENT)


def parts_of(layout: buckets.Layout, segment: slice) -> list[tuple[int, slice, int]]:
    """For each tensor that has elements in a segment: (its number, the slice of it there, its first element there)."""
    parts = []
    for index, (shape, _, start) in enumerate(layout.places):
        first, last = max(segment.start, start), min(segment.stop, start + shape.numel())
        if first < last:
            parts.append((index, slice(first - start, last - start), first - segment.start))
    return parts


def _work_on(layout: buckets.Layout, flat: Tensor, inbox: Tensor, inboxes: Any, half_byte: int, handle: Any) -> _Work:
    """The work on a bucket, see `_Work`. half_byte: where in every rank's inbox the bucket's half begins, in bytes."""
    rank, world_size = inboxes.rank, inboxes.world_size
    peers = peers_of(rank, world_size)
    segments = segments_of(layout.length, world_size)
    mine = flat if handle is None else flat[segments[rank]]
    between = segments[0].stop  # elements from what one peer sends to what the next does
    first = half_byte // flat.itemsize
    sending = []
    for peer in peers:
        place = first + (rank - (rank > peer)) * between  # where that peer keeps what this rank sends
        for index, part, start in parts_of(layout, segments[peer]):
            sending.append(
                (index, part, inboxes.get_buffer(peer, (part.stop - part.start,), flat.dtype, place + start))
            )
    theirs = inbox.view(flat.dtype)[first : first + len(peers) * between].view(len(peers), between)
    adding = []
    for index, part, start in parts_of(layout, segments[rank]):
        cut = slice(start, start + part.stop - part.start)
        adding.append((index, part, theirs[:, cut], mine[cut]))
    returning = []
    if handle is not None and mine.numel():
        returning = [
            (handle.get_buffer(peer, (mine.numel(),), flat.dtype, segments[rank].start), mine) for peer in peers
        ]
    return sending, adding, returning


INSTEAD = "take bucketed or zero1, which are the same by collectives"  # the advice in errors of this file


class CopyEngines(overlapped.Collectives):
    """The transport by copy engines, through torch's symmetric memory; before `settle` buckets travel by NCCL.

    It overrides methods of `overlapped.Collectives`, which says what each does and when strategies call it.

    shared  how often this process has shared memory with peers. torch numbers its messages for this by process, not by
            group: two ranks with different numbers would wait for each other without end.
    ValueError as in `check_gpus`.
    """

    shared: ClassVar[int] = 0
    _exchange: Exchange | None = None

    def __init__(self, module: nn.Module, group: collectives.Group):
        super().__init__(module, group)
        check_gpus(module, group)
        from lmsys.parallel.mean_triton import mean_  # without triton it fails now, not after the first step

        self._mean, self.group = mean_, torch.distributed.group.WORLD if group is None else group

    def zeros(self, like: Tensor, length: int) -> Tensor:
        return self._empty(length, like.dtype).zero_()

    def settle(
        self, buckets: Sequence[overlapped.Bucket], buffers: Sequence[sharded_optimizer.FlatBuffer] = ()
    ) -> None:
        self._agree()
        if buckets:
            self._exchange = self._exchange_of(buckets)
            self._means = [_means(*pair) for pair in zip(buckets, self._exchange.flats, strict=True)]
        if buffers:
            self._all_gather = self._all_gather_of([buffer.flat for buffer in buffers])

    @torch.no_grad()
    def reduce(self, bucket: overlapped.Bucket) -> collectives.Pending:
        if self._exchange is None:
            return super().reduce(bucket)
        params, means = bucket.params, self._means[bucket.number]
        if bucket.dtype != params[0].dtype:
            buckets.copy_gradients(params, means)
            return collectives.Pending(self._exchange.send(bucket.number, means), partial(buckets.widen, params, means))
        gradients = [
            mean.zero_() if p.grad is None and mean is not None else wrapper.dense(p)
            for p, mean in zip(params, means, strict=True)
        ]
        buckets.set_gradients(params, means)
        return self._exchange.send(bucket.number, gradients)

    def gather(self, number: int, buffer: sharded_optimizer.FlatBuffer) -> collectives.Pending:
        return self._all_gather.send(number)

    def _exchange_of(self, buckets: Sequence[overlapped.Bucket]) -> Exchange:
        """The exchange of these buckets: an all-reduce if each rank owns all parameters, else a reduce-scatter."""
        layouts = [bucket.layout for bucket in buckets]
        inbox = self._empty(
            inbox_bytes(layouts, [bucket.dtype.itemsize for bucket in buckets], self.group.size()), torch.uint8
        )
        inboxes = self._handle(inbox)
        if buckets[0].whole:
            flats = [self._empty(bucket.layout.length, bucket.dtype) for bucket in buckets]
            handles = list(map(self._handle, flats))
        else:
            flats, handles = [inbox.new_empty(bucket.own.length, dtype=bucket.dtype) for bucket in buckets], []
        return Exchange(layouts, flats, inbox, inboxes, handles, self._mean, self._timeout_ms())

    def _all_gather_of(self, flats: Sequence[Tensor]) -> AllGather:
        """The all-gather of flat tensors of parameters, which `zeros` has made."""
        return AllGather(flats, list(map(self._handle, flats)), self._timeout_ms())

    def _empty(self, length: int, dtype: torch.dtype) -> Tensor:
        """An unwritten tensor (length,) in symmetric memory of the current GPU; one of length 0 has an address, too."""
        from torch.distributed._symmetric_memory import _SymmetricMemory

        device = torch.device("cuda", torch.cuda.current_device())
        made = _SymmetricMemory.empty_strided_p2p((max(length, 1),), (1,), dtype, device, self.group.group_name)
        self.outside_bytes += made.nbytes
        return made if length else made[:0]

    def _handle(self, flat: Tensor) -> Any:
        """torch's symmetric-memory handle of a tensor that `_empty` has made. All ranks call it."""
        from torch.distributed._symmetric_memory import rendezvous

        CopyEngines.shared += 1
        return rendezvous(flat, self.group.group_name)

    def _agree(self) -> None:
        """ValueError on all ranks unless all have shared memory equally often: else they would wait without end."""
        shared = collectives.gather_objects(CopyEngines.shared, self.group)
        values.hold(
            (
                len(set(shared)) == 1,
                f"ranks have shared memory {', '.join(map(str, shared))} times, and must have as often as one another:"
                " in one process let copy engines work in groups of one size",
            )
        )

    def _timeout_ms(self) -> int:
        """The process group's timeout in milliseconds."""
        backend = self.group._get_backend(torch.device("cuda", torch.cuda.current_device()))
        return round(1000 * backend.options._timeout.total_seconds())


def _means(bucket: overlapped.Bucket, flat: Tensor) -> list[Any]:
    """The view of `flat` where each parameter's mean will be; None for a parameter that this rank does not own."""
    return list(map(dict(zip(bucket.owned, bucket.own.views(flat), strict=True)).get, bucket.params))


class ByCopyEngines:
    """Base of each strategy whose buckets travel by copy engines: the transport, and traits (see `lmsys.traits`)."""

    over: type[overlapped.Collectives] = CopyEngines
    why_not_reproducible = "copy engines add by rank, and not as a tree: take bucketed or zero1"
    all_reduce_model = False  # the model's latency and bandwidth are measured with NCCL's all-reduce
    kernels = r"^_mean_kernel$"  # of mean_triton.py, our only kernel: barriers are torch's, and copies have none


class CopyEngine(ByCopyEngines, overlapped.Bucketed):
    """`Bucketed` with copy engines as its transport; same bucket_mb and comm_dtype. ValueError as in `check_gpus`."""

    rivals = ("torch_ddp_tuned",)


def copy_engine_supports(case: Any) -> str | None:
    """None for a case on a CUDA device, else why it cannot run. It is `supports` of the rows in `__init__.py`."""
    return None if case.device == "cuda" else f"copy engines need GPUs; on a CPU {INSTEAD}"


def check_gpus(module: nn.Module, group: collectives.Group) -> None:
    """ValueError unless the ranks' parameters are on their current GPUs, of one node, under NCCL. All ranks call it."""
    values.hold(
        (
            all(collectives.is_nccl(group, p) for p in module.parameters()),
            f"copy engines need NCCL and parameters on GPUs; elsewhere {INSTEAD}",
        )
    )
    here = torch.device("cuda", torch.cuda.current_device())
    others = sorted({str(p.device) for p in module.parameters()} - {str(here)})
    values.hold(
        (
            not others,
            f"parameters are on {', '.join(others)}, and the current GPU is {here}: set_device, or {INSTEAD}",
        )
    )
    nodes = sorted(set(collectives.gather_objects(platform.node(), group)))
    values.hold(
        (len(nodes) == 1, f"copy engines are for ranks of one node, and these are on {', '.join(nodes)}: {INSTEAD}")
    )
