"""All-reduces of gradients that begin while the backward goes on: one for each parameter, or one for each bucket.

A bucket is several parameters whose gradients are sent together. Hooks that autograd calls once a gradient is
accumulated begin to send them. Ranks must begin the same collectives in the same order, whatever order their gradients
come in. So a bucket is sent when it is complete and all buckets before it have been sent. At first buckets are planned
in the reverse order of the parameters. After the first backward they are planned once more, in the order in which rank
0 saw gradients come (zero1.py keeps its first plan).

`Overlapped` and `Bucketed` are the rows `overlapped` and `bucketed` of the table in `__init__.py`. Strategies of this
kind, here and in zero1.py and copy_engine.py, differ in two choices: which parameters a bucket has and which rank owns
them (`_partition`, `_bucket`), and by what transport buckets travel (`over`). A transport carries out the communication
of a bucket, and sets the gradients of the parameters that this rank owns to the means. CONTRIBUTING.md says how to add
a strategy or a transport.

Source: Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704), section 3.2.
"""

import math
import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lmsys import values
from lmsys.cost.communication import fit_latency_bandwidth, optimal_bucket_bytes
from lmsys.parallel import buckets, collectives, sharded_optimizer, structure, wrapper


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are sent together.

    number   the bucket's place in the order of sending
    indices  the places of `params` in `Wrapper.trainable`
    params   the parameters
    layout   where the gradients of `params` lie in the bucket's flat tensor
    dtype    dtype of the flat tensor
    owned    those of `params` that this rank owns
    own      where the means of the gradients of `owned` lie in a flat tensor of their own
    whole    True where every rank owns all of `params`
    """

    number: int
    indices: tuple[int, ...]
    params: list[nn.Parameter]
    layout: buckets.Layout
    dtype: torch.dtype
    owned: list[nn.Parameter]
    own: buckets.Layout
    whole: bool = True


class Collectives:
    """The transport by collectives: all-reduces for buckets that every rank owns, else reduce-scatters and all-gathers.

    Each step allocates its buckets anew. `Overlapped` calls `reduce` and `settle`, and `Zero1` also `zeros` and
    `gather`. `CopyEngines` of copy_engine.py overrides all four.
    """

    outside_bytes = 0  # bytes of GPU memory that torch's allocator does not count

    def __init__(self, module: nn.Module, group: collectives.Group):
        self.group = group
        self._scattered = collectives.Pending(), collectives.Pending()  # the last two reduce-scatters

    def zeros(self, like: Tensor, length: int) -> Tensor:
        """Zeros (length,) of the dtype and device of `like`, into which parameters can be gathered."""
        return like.new_zeros(length)

    def settle(self, buckets: Sequence[Bucket], buffers: Sequence[sharded_optimizer.FlatBuffer] = ()) -> None:
        """Called once, when the plan of buckets, and of flat buffers of parameters, is final. Here a no-op."""

    def reduce(self, bucket: Bucket) -> collectives.Pending:
        """Begins a bucket's communication. After the wait, parameters that are `owned` have the mean gradients.

        The .grad of the bucket's other parameters becomes None.
        """
        if not bucket.whole:
            return self._reduce_scatter(bucket)
        params = bucket.params
        if len(params) == 1 and bucket.dtype == params[0].dtype:
            return collectives.all_reduce_mean(wrapper.dense(params[0]), self.group)
        flat, views = buckets.pack(params, bucket.layout, bucket.dtype)
        if bucket.dtype != params[0].dtype:
            return collectives.Pending(
                collectives.all_reduce_mean(flat, self.group), partial(buckets.widen, params, views)
            )
        buckets.set_gradients(params, views)
        return collectives.all_reduce_mean(flat, self.group)

    def _reduce_scatter(self, bucket: Bucket) -> collectives.Pending:
        """`reduce` for a bucket whose parameters are divided among ranks."""
        flat, _ = buckets.pack(bucket.params, bucket.layout, bucket.dtype)
        own = flat.new_empty(bucket.own.length)
        buckets.clear_gradients(bucket.params)
        buckets.set_gradients(bucket.owned, bucket.own.views(own))
        before, last = self._scattered
        before.wait()  # so that the memory of its flat tensor can be used again
        self._scattered = last, collectives.reduce_scatter_mean(own, flat, self.group)
        return self._scattered[1]

    def gather(self, number: int, buffer: sharded_optimizer.FlatBuffer) -> collectives.Pending:
        """Begins to gather the flat buffer of this number: called for all of them in order, from 0 on."""
        return buffer.gather(self.group)


class Overlapped(wrapper.Wrapper):
    """All-reduces each gradient by itself while the backward goes on; base of the strategies with larger buckets.

    A bucket of one gradient is sent from where the gradient lies, without a copy. comm_dtype: as in `Bucketed`.

    `Wrapper` calls the methods that are overridden here: `_watch` when a forward has ended, `_begin_backward` before a
    backward, `_gradient_is_ready` for each gradient that the backward makes, and `_synchronize` in
    `finish_gradient_synchronization`. The constructor plans the buckets by `_partition` and `_bucket`, which subclasses
    override. The first `_synchronize` plans them again.
    """

    halves_sums = True  # a trait of the row: `lmsys.traits` explains all of them
    over: type[Collectives] = Collectives  # the transport of buckets; unused on one rank

    def __init__(
        self, module: nn.Module, process_group: collectives.Group = None, comm_dtype: torch.dtype | None = None
    ):
        wrapper.check_floating("comm_dtype", comm_dtype)
        self.transport = (Collectives if collectives.size_and_rank(process_group)[0] == 1 else self.over)(
            module, process_group
        )
        super().__init__(module, process_group)
        self.comm_dtype = comm_dtype
        self._is_final = False  # True once buckets are planned by the order in which gradients came
        self._plan(list(reversed(range(len(self.trainable)))))

    @property
    def outside_bytes(self) -> int:
        """Bytes of GPU memory that torch's allocator does not count."""
        return self.transport.outside_bytes

    def _partition(self, order: list[int]) -> list[tuple[int, ...]]:
        """The indices of each bucket, in the order in which they are to be sent."""
        return [(index,) for index in order]

    def _bucket(self, number: int, indices: tuple[int, ...]) -> Bucket:
        """The bucket of these parameters. Here every rank owns all of them."""
        params = [self.trainable[index] for index in indices]
        layout = buckets.Layout.of(params)
        return Bucket(
            number, indices, params, layout, dtype=self.comm_dtype or params[0].dtype, owned=params, own=layout
        )

    def _plan(self, order: list[int]) -> None:
        """Makes the buckets anew. order: the indices of parameters, in the order in which gradients will come."""
        self.buckets = [self._bucket(*numbered) for numbered in enumerate(self._partition(order))]
        self._bucket_of = {index: bucket.number for bucket in self.buckets for index in bucket.indices}
        self._begin()

    def _begin(self) -> None:
        """Prepares for the next backward, of which nothing has been sent."""
        self._ready: dict[int, None] = {}  # a dict used as an ordered set: the gradients that this backward has made
        self._waiting = [len(bucket.indices) for bucket in self.buckets]  # gradients to come, by bucket
        self._sent: list[collectives.Pending] = []  # by bucket, in order
        self._absent: list[int] = []  # gradients that were missing when their bucket was sent

    def _watch(self, tensors: list[Tensor], hidden: bool) -> None:
        """As `Wrapper._watch`. ValueError if no tensor is found in the output, though it may hold some (`hidden`).

        Without a tensor nothing would tell when the backward begins.
        """
        values.hold(
            (
                tensors or not hidden or not self.trainable,
                "the module returned nothing that tells when a backward begins: let it return the tensors that it"
                " begins from, in tuples, lists, dicts or dataclasses",
            )
        )
        super()._watch(tensors, hidden)

    def _begin_backward(self) -> None:
        """First synchronizes the gradients of an earlier backward: adding to what is being sent would corrupt it.

        Then moves this wrapper's hooks, which send gradients, behind the user's hooks, which may change them.
        """
        if self._unfinished and self.world_size > 1:
            self._synchronize()
        for hooks, key in (pair for pair in self._hooks if len(pair[0]) > 1):
            hooks[key] = hooks.pop(key)  # now the last one: hooks run in the order of the dict

    def _gradient_is_ready(self, index: int) -> None:
        """Sends the buckets that are complete with this gradient and next in the order of sending.

        RuntimeError where another wrapper would send gradients of the same parameters in this backward, or where a
        parameter gets a second gradient in it. Hooks of parameters call this method. So the first error also comes in a
        backward that has begun from a forward of the other wrapper alone.
        """
        if self.world_size == 1:
            return
        if not self._ready and structure.shares_a_backward(self):
            raise RuntimeError(
                "this backward comes from two wrappers that train one parameter, and both would send its gradient: hold"
                " their modules in one module, and wrap that, or run a backward of one under no_sync() of the other"
            )
        if index in self._ready:
            raise RuntimeError(
                "a second gradient of one parameter in a backward, whose first is on its way: checkpoint what is called"
                " more than once by use_reentrant=False, or run the backward under no_sync()"
            )
        self._ready[index] = None
        self._waiting[self._bucket_of[index]] -= 1
        while (
            not self._waiting[self._bucket_of[index]]
            and len(self._sent) < len(self.buckets)
            and not self._waiting[len(self._sent)]
        ):
            self._send_next()

    def _synchronize(self) -> None:
        """Sends the buckets that are left, waits for all, and prepares the next backward."""
        while len(self._sent) < len(self.buckets):  # gradients are missing, or were all made under no_sync()
            self._send_next()
        for pending in self._sent:
            pending.wait()
        self._use_pending.wait()
        use, absent, seen = self._used, self._absent, list(self._ready)  # `_begin` replaces them
        self._begin()
        if not self._is_final:
            self._plan_again(seen)
        self._conclude(use, absent)  # drops gradients that no rank had, and raises errors that ranks compare

    def _send_next(self) -> None:
        """Begins the communication of the next bucket; with the last one, also the all-reduce of `Wrapper._use`."""
        bucket = self.buckets[len(self._sent)]
        self._absent += [index for index in bucket.indices if self.trainable[index].grad is None]
        if bucket is self.buckets[-1]:  # all gradients that will come have come
            # 1 or 0 for each gradient, then the three numbers of `Wrapper._flags`, by which ranks find out whether they
            # differ. The all-reduce makes means over ranks: for a gradient, the share of the ranks that have it.
            self._used = self._use(self._absent)
            self._use_pending = collectives.all_reduce_mean(self._used, self.group)
        self._sent.append(self.transport.reduce(bucket))

    def _plan_again(self, seen: list[int]) -> None:
        """Plans buckets in the order in which rank 0 saw gradients: that of its `seen`, then parameters without one.

        seen  the indices of the parameters whose gradients this backward has made, in the order in which they came
        """
        unseen = sorted(set(range(len(self.trainable))) - set(seen), reverse=True)
        order = torch.tensor(seen + unseen, device=self.trainable[0].device)
        collectives.broadcast_(order, self.group)
        self._is_final = True
        self._plan(order.tolist())
        self.transport.settle(self.buckets)


# Bytes of the all-reduces that `latency_and_bandwidth` times, by the type of the device.
SIZES = {"cpu": (2**12, 2**20, 2**22), "cuda": (2**12, 2**22, 2**26)}
CALLS, ROUNDS = 5, 8  # timed calls of each size in a round; the most rounds


def latency_and_bandwidth(group: collectives.Group, device: torch.device) -> tuple[float, float]:
    """Times all-reduces and fits t = o + bytes / w over SIZES: (o in seconds, w in bytes/s). All ranks call it.

    Every rank keeps its least time of each size, and the fit takes the slowest rank's. If these times do not grow with
    the size, as on a busy machine, the ranks measure again, at most ROUNDS times. ValueError if they never grow.
    """
    sizes = SIZES[device.type]
    least = torch.full((len(sizes),), float("inf"), dtype=torch.float64, device=device)
    for _ in range(ROUNDS):
        times = [_seconds(torch.zeros(size // 4, device=device), group) for size in sizes]
        least = torch.minimum(least, least.new_tensor(times))
        slowest = least.clone()
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX, group=group)
        seconds = slowest.tolist()
        if seconds == sorted(seconds):  # all ranks decide alike, by the same `seconds`
            break
    return fit_latency_bandwidth(sizes, seconds)


def _seconds(x: torch.Tensor, group: collectives.Group) -> float:
    """The seconds of one all-reduce of x: the least of CALLS, after one that does not count, in which ranks connect."""

    def wait() -> None:
        if collectives.is_nccl(group, x):
            torch.cuda.synchronize(x.device)
        else:
            torch.distributed.barrier(group)

    def call() -> None:
        torch.distributed.all_reduce(x, group=group)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    return min(timeit.repeat(call, wait, number=1, repeat=1 + CALLS)[1:])


class Bucketed(Overlapped):
    """All-reduces gradients in buckets of a given size while the backward goes on.

    bucket_mb   MiB of a bucket; None: no limit, one bucket for each dtype and device; or "auto": √(s o w) bytes for s
                bytes of gradients, with the measured latency o and bandwidth w of an all-reduce
    comm_dtype  dtype in which gradients are sent, such as torch.bfloat16; None: their own. The gradients on a rank keep
                their own dtype

    ValueError for a bucket size that is not positive.
    """

    takes_bucket_mb = True  # this and the next two are traits of the row
    comm_dtypes = True
    rivals: tuple[str, ...] = ("torch_ddp_tuned", "torch_ddp", "naive")

    def __init__(
        self,
        module: nn.Module,
        process_group: collectives.Group = None,
        bucket_mb: float | str | None = 25,
        comm_dtype: torch.dtype | None = None,
    ):
        values.hold(
            (
                bucket_mb in (None, "auto") or buckets.is_size(bucket_mb),
                f'{bucket_mb=} must be a positive number of MiB, "auto", or None for one bucket',
            )
        )
        self.bucket_mb = bucket_mb
        super().__init__(module, process_group, comm_dtype)

    def _partition(self, order: list[int]) -> list[tuple[int, ...]]:
        sizes = [p.numel() * (self.comm_dtype or p.dtype).itemsize for p in self.trainable]
        if self.bucket_mb == "auto":
            self.bucket_mb = self._best(sum(sizes))
        kinds = [(p.device, p.dtype) for p in self.trainable]
        # The first bucket is small so that communication begins early, the last since nothing hides its communication.
        limit, edge = (
            (math.inf, math.inf) if self.bucket_mb is None else (float(self.bucket_mb) * buckets.MIB, buckets.MIB)
        )
        return buckets.plan(sizes, order, limit, edge, kinds)

    def _best(self, total: int) -> float:
        """The size of a bucket in MiB that bucket_mb="auto" stands for, with `total` bytes of gradients."""
        if self.world_size == 1 or not total:
            return 25  # as by default: nothing is sent
        latency_s, bytes_per_s = latency_and_bandwidth(collectives.unwrapped(self.group), self.trainable[0].device)
        return optimal_bucket_bytes(total, latency_s, bytes_per_s) / buckets.MIB
