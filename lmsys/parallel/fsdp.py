"""Fully sharded data parallelism: a rank keeps a part of every parameter, gradient and optimizer state.

The parameters of a block (an entry of a ModuleList), and those of no block, lie side by side in a flat tensor of which
a rank keeps one of world_size equal parts, in its full precision: that is what the optimizer steps. Before a block's
forward, and again before its backward, the whole is gathered, the next block's while this one computes; after it the
whole is freed. A block's gradients are reduce-scattered while the block before it goes on with the backward.

Source: Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277), sections 3.2 and 3.3; Rajbhandari et al. 2020, "ZeRO"
(1910.02054), P_os+g+p.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lmsys.parallel.collectives import Group, all_reduce_mean
from lmsys.parallel.flat_shard import FlatShard
from lmsys.parallel.steps import Among, watch
from lmsys.parallel.traits import RESIZES_PARAMETERS, SURROUNDS_BLOCKS
from lmsys.parallel.units import blocks_of, flats_by_block, read_as_kept, read_rounded, surround, weakly
from lmsys.parallel.wrapper import Wrapper, check_floating, compared, whole


class Fsdp(Wrapper):
    """compute_dtype  of the gathered parameters, of inputs and so of the computation; None: the parameters' own

    Where modules read rounded copies of their parameters under autocast (`reads_rounded`, the linear layers of
    `TransformerLM`), only these copies are gathered in compute_dtype, all else is in its own, and the forward is under
    autocast: gradients then are what they are without sharding, and none is rounded. In a model of other modules all
    is gathered in compute_dtype. A module whose attribute `reads_own_dtype` is True when it is wrapped, such as a norm
    that computes in float32, reads its own parameters (not those of its children) as they are; its inputs are cast all
    the same.

    `parameters()` are the parts that this rank keeps, flat: an optimizer that works element by element steps them as it
    would the whole. The module's own parameters keep their names and shapes, and have as gradients this rank's parts of
    them; without values they refuse to be read, until `unshard` shows them whole. Gradients are reduced in the
    parameters' precision, in every backward: under no_sync() too, as no rank could keep them whole. A parameter that no
    rank has used has a gradient of zeros. What is to be compiled, block by block, is compiled before it is wrapped.
    """

    zero_stage = 3
    shards_gradients = True
    halves_sums = True
    sums_each_backward = True
    local_step = False
    compute_dtype = True
    why_not_graphed = RESIZES_PARAMETERS
    why_not_fused = SURROUNDS_BLOCKS
    rivals = ("torch_fsdp2",)

    def __init__(self, module: nn.Module, process_group: Group = None, compute_dtype: torch.dtype | None = None):
        check_floating("compute_dtype", compute_dtype)
        super().__init__(module, process_group)
        self._dtype = compute_dtype
        rounded = read_rounded(module) if compute_dtype in (torch.bfloat16, torch.float16) else set[int]()
        self._autocasts = bool(rounded)
        kept = {id(p) for p in module.parameters()} - rounded if rounded else read_as_kept(module)
        self._units = [[self._flat(params, rounded, kept) for params in unit] for unit in flats_by_block(module)]
        self._to_reduce = len(self._units) - 1  # the next, from the last block to what is in no block
        self._in_backward = False
        self._reducing: list[_Unit] = []
        for number, block in enumerate(blocks_of(module), start=1):
            surround(block, weakly(self._enter_forward, number), weakly(self._leave_forward, number))
        self._whole, self._parts = Among(module.parameters()), Among(self.parameters())
        watch(self)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        for number, unit in enumerate(self._units):
            for part, flat in enumerate(unit):
                yield f"{prefix}{'.' if prefix else ''}unit{number}.part{part}", flat.shard

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._unfinished:
            return super().forward(*args, **kwargs)  # which refuses
        if self._in_backward:  # one under no_sync()
            self._end_backward()
        for unit in self._units[:2]:
            _each(unit, FlatShard.gather)
        _each(self._units[0], FlatShard.wait)
        if self._autocasts:
            with torch.autocast(next(self._flats()).whole.device.type, self._dtype):
                output = super().forward(*args, **kwargs)
        else:
            args, kwargs = tree_map(self._cast, (args, kwargs))
            output = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            _each(self._units[0], FlatShard.free)
        return output

    def finish_gradient_synchronization(self) -> None:
        self._end_backward()
        self._unfinished = False
        if self.world_size > 1 and self.trainable:
            flag = torch.full((1,), float(bool(self._change)), device=self.trainable[0].device)
            all_reduce_mean(flag, self.group, async_op=False).wait()
            self._refuse_change(flag)

    def unshard(self) -> None:
        """Shows the module's parameters and their gradients whole, in their own dtype, as copies to be read.

        They are so until `reshard`, or until the optimizer's step or the next forward. All ranks call it.
        """
        if self._unfinished:
            raise RuntimeError(
                "gradients are still on their way: finish_gradient_synchronization() comes before unshard()"
            )
        _each(self._flats(), FlatShard.unshard)

    def reshard(self) -> None:
        """Leaves the module's parameters without values again."""
        _each(self._flats(), FlatShard.reshard)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "fsdp has no state dict of one rank alone: on all ranks, full_state_dict() gives all values, and"
            " sharded_state_dict() what torch.distributed.checkpoint saves"
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        return self._state(lambda x: x.clone())

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Parameters as DTensors, divided by their first dimension as FSDP2 has them, in memory of their own."""
        from lmsys.parallel.dtensors import divided

        return self._state(lambda x: divided(x, self.group))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """ValueError for an optimizer over the module's own parameters; else what was gathered is old from now on."""
        if self._whole.held_by(optimizer):
            raise ValueError(
                "this optimizer holds the module's parameters, which fsdp has divided among ranks: make it by"
                " make_optimizer(), or over parameters() of the wrapper"
            )
        if self._parts.held_by(optimizer):
            self.reshard()
            _each(self._flats(), FlatShard.free)

    def _state(self, of: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """By name, what `of` makes of each whole parameter, one unit after another; buffers are copied."""
        made: dict[int, Tensor] = {}
        for flat in self._flats():
            for p, x in zip(flat.params, flat.gathered(flat.shard), strict=True):
                made[id(p)] = of(x)
        held = self.module.state_dict(keep_vars=True)
        return {name: made[id(x)] if id(x) in made else copy.deepcopy(x) for name, x in held.items()}

    def _load(self, state: dict[str, Any], strict: bool) -> Any:
        held = self.module.state_dict(keep_vars=True)
        told = compared(held, state, strict)
        values = {id(x): whole(state[name]) for name, x in held.items() if name in state}
        for flat in self._flats():
            flat.load(values)
        with torch.no_grad():
            for x in self.module.buffers():
                if id(x) in values:
                    x.copy_(values[id(x)])
        return told

    def _flat(self, params: list[nn.Parameter], rounded: set[int], kept: set[int]) -> FlatShard:
        one = id(params[0])  # the others have the same marks
        return FlatShard(params, self.group, None if one in kept else self._dtype, one in rounded)

    def _flats(self) -> Iterator[FlatShard]:
        for unit in self._units:
            yield from unit

    def _cast(self, x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return x.to(self._dtype) if floating and self._dtype is not None else x

    def _on_grad(self, index: int, _: Tensor) -> None:
        if not self._in_backward:  # attributes are slow to set, as in Wrapper
            self._in_backward = True
        if self._synchronizing and not self._unfinished:
            self._unfinished = True

    def _end_backward(self) -> None:
        self._reduce_down_to(0)
        for unit in self._units:
            _each(unit, FlatShard.finish_reduce)
            _each(unit, FlatShard.free)
        self._reducing.clear()
        self._to_reduce, self._in_backward = len(self._units) - 1, False

    def _reduce_down_to(self, number: int) -> None:
        """Sends the gradients of units that are done with their backward, and frees their parameters.

        On every rank at the same point, whichever of its parameters have gradients: collectives keep one order.
        """
        while self._to_reduce >= number:
            unit = self._units[self._to_reduce]
            _each(unit, FlatShard.reduce)
            _each(unit, FlatShard.free)
            self._reducing.append(unit)
            self._to_reduce -= 1
            if len(self._reducing) > 1:  # gradients that have arrived give back the memory they came in
                _each(self._reducing.pop(0), FlatShard.finish_reduce)

    def _enter_forward(self, number: int, *_: Any) -> None:
        for unit in self._units[number : number + 1 if self._in_backward else number + 2]:
            _each(unit, FlatShard.gather)
        _each(self._units[number], FlatShard.wait)

    def _leave_forward(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        if self._in_backward:  # activation checkpointing runs a forward again, and then the backward of it
            return
        is_last = number == len(self._units) - 1
        if not (is_last and torch.is_grad_enabled()):
            _each(self._units[number], FlatShard.free)
        tensors = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
        if tensors:
            begin = weakly(self._enter_backward, number)
            torch.autograd.graph.register_multi_grad_hook(tensors, begin, mode="any")

    def _enter_backward(self, number: int, _: Tensor) -> None:
        self._in_backward = True
        _each(self._units[number], FlatShard.gather)
        if number > 1:
            _each(self._units[number - 1], FlatShard.gather)
        self._reduce_down_to(number + 1)
        _each(self._units[number], FlatShard.wait)


_Unit = list[FlatShard]  # of parameters that are gathered and freed together


def _each(unit: Iterable[FlatShard], do: Callable[[FlatShard], None]) -> None:
    for flat in unit:
        do(flat)
