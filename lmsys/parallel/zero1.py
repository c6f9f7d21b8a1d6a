"""ZeRO stage 1: each parameter has an owner rank, which gets its mean gradient and steps it; then all ranks gather it.

A bucket is a flat tensor of world_size equal segments, one for each rank, which hold the gradients of whole parameters.
Its reduce-scatter begins while the backward goes on, and leaves each rank the mean gradients of its own parameters
only. Parameters lie in flat buffers with the same segments. After the step one flat buffer after another is gathered,
while the next forward begins: a block (an entry of a ModuleList) waits for the buffers of its own parameters. A forward
that is captured in a CUDA graph begins only a few gathers ahead of the block that needs them.

overlapped.py sends the gradients; this file divides them into segments and gathers parameters. The optimizer is
`Zero1Optimizer`, which `Zero1.make_optimizer` makes. The strategies `zero1` and `copy_engine_zero1` of
`lmsys.parallel.STRATEGIES` are the classes `Zero1` and `CopyEngineZero1`.

BUCKET_MB and LEAST_SEGMENT_MB set the default size of segments, AHEAD how far a captured forward gathers ahead. To send
by another transport, derive a class as `CopyEngineZero1` does, and add its row to STRATEGIES.

Source: Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), section 7.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from lmsys import values
from lmsys.parallel import buckets, collectives, copy_engine, overlapped, part, sharded_optimizer, structure, traits

# How many flat buffers a captured forward gathers ahead of the one that it waits for. If it began all at its start, the
# first memset of cuBLAS in the CUDA graph would wait until the last gather is over, as traces on two H200s show. In the
# committed runs there, a step of the model `medium` took 31.1 ms in this way, and takes 29.1 ms with AHEAD.
AHEAD = 2
# For bucket_mb="auto": MiB of a bucket, and the fewest MiB of a segment. Few buckets cost the host less time: on two
# H200s, compiled steps of the model `xl` are 1.22 times as fast with 28 buckets as with 96. On many ranks a segment
# must still be large enough to be worth a collective.
BUCKET_MB, LEAST_SEGMENT_MB = 256, 32


def segment_mb(world_size: int) -> float:
    """MiB of a segment for bucket_mb="auto"."""
    return max(LEAST_SEGMENT_MB, BUCKET_MB / world_size)


class Zero1(overlapped.Overlapped):
    """Reduces each gradient to the rank that owns its parameter; that rank steps it, then parameters are gathered.

    bucket_mb  MiB of a segment; up to four times as many if that makes the segments more even. "auto": 256 MiB divided
               by the number of ranks, and at least 32

    The optimizer must come from `make_optimizer`, and takes only parameters that were trained when the module was
    wrapped (ValueError). Parameters are whole again from the next forward on, or from `wait()`. Several backwards
    between two steps add up, even if gradients were averaged in between. torch.compile of the wrapper has no effect:
    compile its blocks.
    If the forward is captured in a CUDA graph, the all-gathers are captured with it, and step() no longer starts them.
    From then on any other forward and `wait()` are collective operations: every rank must call them.

    `Wrapper` and `Overlapped` call the methods that are overridden here, and say when.
    """

    # Traits of the strategy, which `lmsys.traits` explains.
    zero_stage = 2  # gradients are divided too, though the course CS336 calls this strategy ZeRO-1
    why_not_fused = traits.SURROUNDS_BLOCKS
    rivals = ("torch_fsdp2_zero2", "torch_zero1")

    def __init__(self, module: nn.Module, process_group: collectives.Group = None, bucket_mb: float | str = "auto"):
        bucket_mb = segment_mb(collectives.size_and_rank(process_group)[0]) if bucket_mb == "auto" else bucket_mb
        values.hold((buckets.is_size(bucket_mb), f'{bucket_mb=} must be a positive number of MiB, or "auto"'))
        self.bucket_mb: Any = bucket_mb
        super().__init__(module, process_group)
        self._is_final = True  # buckets are not planned again: the division among ranks stays as it is
        self.flat_buffers = [
            sharded_optimizer.flatten(self.trainable, segmented, self.transport.zeros) for segmented in self._segments
        ]
        self.owners = sharded_optimizer.owners_in(self.flat_buffers)
        # The gathers that have begun, by the number of the flat buffer. These first ones have nothing to wait for.
        self._gathering = [collectives.Pending() for _ in self.flat_buffers]
        # `_stale`: other ranks have stepped parameters whose new values are not gathered yet. `_recorded`: the forward
        # was captured in a CUDA graph, whose replays do the gathering. `_are_means`: this rank's gradients are means
        # over ranks, and no backward has begun to add to them.
        self._stale, self._recorded, self._are_means = False, False, False
        self._wait_in_forward()
        self.transport.settle(self.buckets, self.flat_buffers)
        self._own = [p for p, rank in self.owners.items() if rank == self.rank]
        # True if this rank owns a parameter of each device and dtype that parameters have: see `_conclude`.
        self._owns_each_kind = len(structure.by_kind(self._own)) == len(structure.by_kind(self.trainable))
        # Mean gradients that `_scale` has turned into sums: (the parameter, its gradient, the gradient's version then).
        self._scaled: list[tuple[nn.Parameter, Any, int]] = []
        self._trained, self.optimizers = frozenset(map(id, self.trainable)), WeakSet[Any]()

    @_disable_dynamo  # no compiler can trace parameters that change their class as they arrive; it may trace blocks
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recorded = self.world_size > 1 and self._is_being_recorded()
        if recorded:
            # Each replay will find stale parameters, so the capture records all gathers. None of them runs yet: if the
            # capture fails, parameters stay stale.
            self._recorded = self._stale = True
            self._gathering = []
        else:
            self._fetch()
        self._wait_for(self._at_start)
        output = super().forward(*args, **kwargs)
        if recorded:
            self._wait_for(range(len(self.flat_buffers)))  # also for blocks that this forward has not run
            self._stale = False
        return output

    def make_optimizer(
        self, optimizer_cls: Any, groups: structure.Groups | None = None, **kwargs: Any
    ) -> "Zero1Optimizer":
        """As `Wrapper.make_optimizer`; the optimizer steps this rank's parameters, and then begins to gather all."""
        return Zero1Optimizer(
            self, optimizer_cls, **{"params": groups and structure.grouped(self.module, groups), **kwargs}
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        self.wait()
        return super().full_state_dict()

    def wait(self) -> None:
        """Waits until every parameter is whole."""
        self._fetch()
        self._wait_for(range(len(self.flat_buffers)))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """ValueError for an optimizer that `make_optimizer` did not make; else waits for gathers still under way."""
        super().before_step(optimizer)
        if not structure.holds_any(optimizer, self._trained):
            return
        values.hold(
            (
                optimizer in self.optimizers,
                f"this {type(optimizer).__name__} holds parameters whose gradients ZeRO-1 has divided among ranks: make"
                " it by make_optimizer(), which gathers what each rank has stepped",
            ),
        )
        if not structure.is_in_backward():
            self._leave_backward(late=True)  # if torch.autograd.grad of an input has failed since the synchronization
        # Gathers may still be under way for blocks that no forward has run. Another optimizer of this strategy may also
        # have begun some.
        _arrive(self._gathering)

    def stepped(self) -> None:
        """Called by `Zero1Optimizer` when it has stepped this rank's parameters: all ranks' are now to be gathered.

        Until then other ranks' parameters are marked (`part.leave`), so that reading one waits, or fails if only a
        replay will gather it. If gathers have begun, this rank's own are marked as well: they must not be written
        while they are sent.
        """
        self._stale = True
        if not self._recorded:
            self._fetch()
        arrive = _refuse_stale if self._recorded else partial(_arrive, self._gathering)
        for params in self._others if self._recorded else self._held:
            part.leave(params, arrive)

    def _is_being_recorded(self) -> bool:
        """True while a CUDA graph is captured."""
        return bool(self.trainable) and self.trainable[0].is_cuda and torch.cuda.is_current_stream_capturing()

    def _fetch(self) -> None:
        """Begins to gather all flat buffers, if parameters are stale.

        It begins all of them at once, so that a later forward that one rank makes alone begins no collective.
        """
        if self._stale and self.world_size > 1:
            self._gathering, self._stale = [], False
            self._begin_gathering(len(self.flat_buffers))

    def _begin_gathering(self, count: int) -> None:
        """Begins to gather flat buffers, in order, until `count` of them, or all, have been begun."""
        for number in range(len(self._gathering), min(count, len(self.flat_buffers))):
            gathered = self.transport.gather(number, self.flat_buffers[number])
            self._gathering.append(collectives.Pending(gathered, partial(part.appear, self._held[number])))

    def _wait_for(self, numbers: Sequence[int], *_: Any) -> None:
        """Waits until the flat buffers of these numbers are whole, and begins to gather those that come next.

        A hook before the forward of each block calls it; the other arguments, block and inputs, have no effect.
        """
        count = max(numbers, default=-1) + 1
        self._begin_gathering(count)
        for number in numbers:
            self._gathering[number].wait()
        self._begin_gathering(count + AHEAD)

    def _partition(self, order: list[int]) -> list[tuple[int, ...]]:
        """The indices of each bucket; `_segments` keeps which rank owns which of them."""
        sizes = [p.numel() for p in self.trainable]
        kinds = [(p.device, p.dtype) for p in self.trainable]
        limit = self.bucket_mb * buckets.MIB / max((p.element_size() for p in self.trainable), default=1)
        self._segments = buckets.plan_segments(sizes, order, limit, self.world_size, kinds)
        return [segmented.indices for segmented in self._segments]

    def _bucket(self, number: int, indices: tuple[int, ...]) -> overlapped.Bucket:
        """The bucket whose flat tensor has a segment for the parameters of each rank."""
        segmented = self._segments[number]
        layout = sharded_optimizer.layout_of(self.trainable, segmented)
        owned = [self.trainable[index] for index in segmented.members[self.rank]]
        own = replace(buckets.Layout.of(owned), length=segmented.length)
        return replace(super()._bucket(number, indices), layout=layout, owned=owned, own=own, whole=False)

    def _on_grad(self, index: int, p: Tensor) -> None:
        if self._are_means and not self._in_backward:  # no tensor that the module returned has told of this backward
            self._are_means = any(isinstance(own.grad, part.Part) for own in self._own)
            values.hold(
                (
                    not self._are_means,
                    "a backward that began from no tensor of the module's output has added to gradients that are means"
                    " already: let the module return what it begins from, or zero_grad(set_to_none=True) comes before"
                    " it",
                ),
                error=RuntimeError,
            )
        super()._on_grad(index, p)

    def _begin_backward(self) -> None:
        """As `Overlapped._begin_backward`; then turns mean gradients into sums, since the backward adds to them."""
        super()._begin_backward()
        self._scale()

    def _leave_backward(self, late: bool = False) -> None:
        """Turns sums back into means if the backward changed none of them, such as torch.autograd.grad of an input."""
        super()._leave_backward(late)
        with torch._C.DisableTorchFunctionSubclass():
            if self._scaled and all(p.grad is x and x._version == version for p, x, version in self._scaled):
                torch._foreach_div_([x for _, x, _ in self._scaled], self.world_size)
                self._are_means = True
            self._scaled = []

    @torch.no_grad()
    def _scale(self) -> None:
        """Multiplies this rank's mean gradients by the number of ranks.

        Other ranks have dropped theirs: the next mean over ranks divides the whole sum by the number of ranks again.
        """
        # A gradient that is no `Part` is no mean: the user has set it since then, and it counts as a backward's.
        means = [(p, p.grad) for p in self._own if self._are_means and isinstance(p.grad, part.Part)]
        self._are_means = False
        if means:
            torch._foreach_mul_([x for _, x in means], self.world_size)
            self._scaled = [(p, x, x._version) for p, x in means]

    def _conclude(self, use: Tensor, missing: list[int]) -> None:
        """As `Wrapper._conclude`; then sets a gradient of zeros if this rank has none of some device and dtype.

        For each device and dtype of which only other ranks have gradients, one parameter gets zeros here. Without them
        GradScaler would find nothing to check on this rank, and this rank would not hear of other ranks' inf.
        """
        super()._conclude(use, missing)
        if missing or not self._owns_each_kind:
            unused = {index for index in missing if use[index] == 0}
            here = {(p.device, p.dtype) for p in self._own if p.grad is not None}
            used = (p for index, p in enumerate(self.trainable) if index not in unused)
            for p in {(p.device, p.dtype): p for p in used if (p.device, p.dtype) not in here}.values():
                p.grad = part.as_part(torch.zeros_like(p), self.group)

    def _synchronize(self) -> None:
        """As `Overlapped._synchronize`. Then this rank's gradients are means, and get the class `part.Part`."""
        self._scale()  # has an effect only if no backward has run since the last synchronization
        self._scaled = []
        super()._synchronize()
        self._are_means = True
        for p in self._own:
            if p.grad is not None:
                part.as_part(p.grad, self.group)

    def _wait_in_forward(self) -> None:
        """Makes each block wait before its forward for its own parameters; `forward` waits for the others."""
        units = structure.parameters_by_block(self.module)
        unit_of = {p: number for number, params in enumerate(units) for p in params}
        self.flat_buffers.sort(key=lambda buffer: min(unit_of[p] for p in buffer.owners))
        # Numbers of flat buffers: those with parameters in no block or in several, then those of each block.
        self._at_start, *needed = (
            [number for number, buffer in enumerate(self.flat_buffers) if not buffer.owners.keys().isdisjoint(params)]
            for params in units
        )
        # `_held`: the parameters of each flat buffer. `_others`: those of them that other ranks own. Both are empty on
        # a single rank, which gathers nothing.
        self._held = [list(flat_buffer.owners) for flat_buffer in self.flat_buffers if self.world_size > 1]
        self._others = [[p for p in held if self.owners[p] != self.rank] for held in self._held]
        for block, numbers in zip(structure.blocks_of(self.module), needed, strict=True):
            structure.surround(block, structure.weakly(self._wait_for, numbers))


def _arrive(gathering: Sequence[collectives.Pending], _: Any = None) -> None:
    """Called when a parameter is read while new values are on their way: waits for the values of all parameters.

    It is a function and not a method, since the wrapper may not exist any more.
    """
    for pending in gathering:
        pending.wait()


def _refuse_stale(_: Any) -> None:
    """Called when a parameter is read before a CUDA graph's replay gathers its new values: RuntimeError."""
    raise RuntimeError(
        "a parameter was read that another rank has stepped, and the next replay of a CUDA graph gathers: wait() brings"
        " it now, on all ranks"
    )


class Zero1Optimizer(sharded_optimizer.ShardedOptimizer):
    """A ShardedOptimizer whose step does not wait for the gathering: the next forward does, block by block.

    `Zero1.make_optimizer` makes it.

    params  as of any optimizer; None: all parameters that the wrapper trains
    """

    def __init__(self, wrapper: Zero1, optimizer_cls: Any, params: Any = None, **kwargs: Any):
        self._wrapper = ref(wrapper)
        super().__init__(
            wrapper.trainable if params is None else params,
            optimizer_cls,
            wrapper.group,
            wrapper.flat_buffers,
            **kwargs,
        )
        wrapper.optimizers.update((self, self._local))

    def _flatten(self, params: list[Tensor], options: dict[str, Any]) -> None:
        """Raises ValueError: `add_param_group` calls this for parameters that no flat buffer of the wrapper has."""
        self.param_groups.pop()  # the group of `params`, which is refused
        raise ValueError(
            f"{len(params)} parameters, of {sum(p.numel() for p in params)} numbers, are none that ZeRO-1 trains: of"
            " what is unfrozen or added after wrapping no rank reduces gradients; wrap the module again"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, but without the host time that reading or setting the gradient of a `part.Absent` takes."""
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._wrapper() is not None, "the strategy that this optimizer belongs to is gone"
        return super().step(*args, **kwargs)

    def _gather(self) -> None:
        wrapper: Any = self._wrapper()
        wrapper.stepped()


class CopyEngineZero1(copy_engine.ByCopyEngines, Zero1):
    """ZeRO-1 whose gradients and parameters travel by the GPUs' copy engines (copy_engine.py), not by NCCL's kernels.

    bucket_mb  MiB of a segment, by default 32; other values as in `Zero1`
    With several ranks, ValueError unless the backend is NCCL, all ranks are on one node, and each rank's parameters are
    on its current GPU; also if ranks have set up shared memory unequally often before.

    Parameters live in memory that the GPUs of one node share. The rank that has stepped a parameter copies it to the
    others. Unlike in `Zero1`, a rank holds the gradients of all parameters until the synchronization ends.
    """

    def __init__(self, module: nn.Module, process_group: collectives.Group = None, bucket_mb: float | str = 32):
        super().__init__(module, process_group, bucket_mb)
