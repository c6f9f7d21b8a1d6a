"""Fully sharded data parallelism: a rank keeps a part of every parameter, gradient and optimizer state.

The parameters of a block (an entry of a ModuleList), and those of no block, lie side by side in a flat tensor of which
a rank keeps one of world_size equal parts, in its full precision: that is what the optimizer steps. Before a block's
forward, and again before its backward, the whole is gathered, the next block's while this one computes; after it the
whole is freed. A block's gradients are reduce-scattered while the block before it goes on with the backward.

Source: Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277), sections 3.2 and 3.3; Rajbhandari et al. 2020, "ZeRO"
(1910.02054), P_os+g+p.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lmsys.parallel.collectives import Group, Pending, all_gather, reduce_scatter_mean
from lmsys.parallel.packing import Layout, copy_gradients
from lmsys.parallel.traits import RESIZES_PARAMETERS
from lmsys.parallel.units import blocks_of, parameters_by_block, surround, weakly
from lmsys.parallel.wrapper import Wrapper, check_floating


class Fsdp(Wrapper):
    """compute_dtype  of the gathered parameters, of inputs and so of the computation; None: the parameters' own

    `parameters()` are the parts that this rank keeps, flat: an optimizer that works element by element steps them as it
    would the whole. Gradients are reduced in the parameters' precision, in every backward: under no_sync() too, as no
    rank could keep them whole. A parameter that no rank has used has a gradient of zeros. What is to be compiled, block
    by block, is compiled before it is wrapped.
    """

    zero_stage = 3
    shards_gradients = True
    local_step = False
    compute_dtype = True
    why_not_graphed = RESIZES_PARAMETERS
    rivals = ("torch_fsdp2",)

    def __init__(self, module: nn.Module, process_group: Group = None, compute_dtype: torch.dtype | None = None):
        check_floating("compute_dtype", compute_dtype)
        super().__init__(module, process_group)
        self.gathered_dtype = compute_dtype
        self._units = [_flats(self, params) for params in parameters_by_block(module)]
        self._to_reduce = len(self._units) - 1  # the next, from the last block to what is in no block
        self._in_backward = False
        self._reducing: list[_Unit] = []
        for number, block in enumerate(blocks_of(module), start=1):
            surround(block, weakly(self._enter_forward, number), weakly(self._leave_forward, number))

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
            _each(unit, _Flat.gather)
        _each(self._units[0], _Flat.wait)
        args, kwargs = tree_map(self._cast, (args, kwargs))
        output = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            _each(self._units[0], _Flat.free)
        return output

    def finish_gradient_synchronization(self) -> None:
        self._end_backward()
        self._unfinished = False

    def full_state_dict(self) -> dict[str, Tensor]:
        for unit in self._units:
            _each(unit, _Flat.show_whole)
        found = {name: x.detach().clone() for name, x in self.module.state_dict().items()}
        for unit in self._units:
            _each(unit, _Flat.hide_whole)
        return found

    def _cast(self, x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return x.to(self.gathered_dtype) if floating and self.gathered_dtype is not None else x

    def _on_grad(self, index: int, _: Tensor) -> None:
        if not self._in_backward:  # attributes are slow to set, as in Wrapper
            self._in_backward = True
        if self._synchronizing and not self._unfinished:
            self._unfinished = True

    def _end_backward(self) -> None:
        self._reduce_down_to(0)
        for unit in self._units:
            _each(unit, _Flat.finish_reduce)
            _each(unit, _Flat.free)
        self._reducing.clear()
        self._to_reduce, self._in_backward = len(self._units) - 1, False

    def _reduce_down_to(self, number: int) -> None:
        """Sends the gradients of units that are done with their backward, and frees their parameters.

        On every rank at the same point, whichever of its parameters have gradients: collectives keep one order.
        """
        while self._to_reduce >= number:
            unit = self._units[self._to_reduce]
            _each(unit, _Flat.reduce)
            _each(unit, _Flat.free)
            self._reducing.append(unit)
            self._to_reduce -= 1
            if len(self._reducing) > 1:  # gradients that have arrived give back the memory they came in
                _each(self._reducing.pop(0), _Flat.finish_reduce)

    def _enter_forward(self, number: int, *_: Any) -> None:
        for unit in self._units[number : number + 1 if self._in_backward else number + 2]:
            _each(unit, _Flat.gather)
        _each(self._units[number], _Flat.wait)

    def _leave_forward(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        if self._in_backward:  # activation checkpointing runs a forward again, and then the backward of it
            return
        is_last = number == len(self._units) - 1
        if not (is_last and torch.is_grad_enabled()):
            _each(self._units[number], _Flat.free)
        tensors = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
        if tensors:
            begin = weakly(self._enter_backward, number)
            torch.autograd.graph.register_multi_grad_hook(tensors, begin, mode="any")

    def _enter_backward(self, number: int, _: Tensor) -> None:
        self._in_backward = True
        _each(self._units[number], _Flat.gather)
        if number > 1:
            _each(self._units[number - 1], _Flat.gather)
        self._reduce_down_to(number + 1)
        _each(self._units[number], _Flat.wait)


class _Flat:
    """Parameters side by side: `shard` is this rank's part, `whole` the gathered tensor, without memory while freed."""

    @torch.no_grad()
    def __init__(self, wrapper: Fsdp, params: list[nn.Parameter]):
        self.params, self.group, world_size = params, wrapper.group, wrapper.world_size
        self.layout = Layout.of(params)
        length = -(-self.layout.length // world_size)
        everything = params[0].new_zeros(world_size * length)
        for p, view in zip(params, self.layout.views(everything), strict=True):
            view.copy_(p)
        part = everything[wrapper.rank * length : (wrapper.rank + 1) * length].clone()
        self.shard = nn.Parameter(part, requires_grad=params[0].requires_grad)
        narrow = wrapper.gathered_dtype if params[0].is_floating_point() else None
        self.whole = torch.empty(world_size * length, dtype=narrow or part.dtype, device=part.device)
        self._nbytes = self.whole.untyped_storage().nbytes()
        self._gathering: Pending | None = None
        self._is_whole = False
        self._reduced: list[tuple[Pending, Tensor]] = []
        self._views, self._padding = self.layout.views(self.whole), self.layout.gaps(self.whole.numel())
        self._point_to(self._views)
        self.whole.untyped_storage().resize_(0)

    def _point_to(self, views: list[Tensor]) -> None:
        """Makes the module's parameters these, through `.data`: autograd sees no write when they are filled."""
        for p, view in zip(self.params, views, strict=True):
            p.data = view

    @torch.no_grad()
    def gather(self) -> None:
        if self._is_whole or self._gathering is not None:
            return
        self.whole.untyped_storage().resize_(self._nbytes)
        self._gathering = all_gather(self.whole, self.shard.detach().to(self.whole.dtype), self.group)

    def wait(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering, self._is_whole = None, True

    def free(self) -> None:
        self.wait()
        if self._is_whole:
            self.whole.untyped_storage().resize_(0)
            self._is_whole = False

    @torch.no_grad()
    def reduce(self) -> None:
        """Begins the mean of this rank's part of the gradients."""
        if not self.shard.requires_grad:
            return
        self.finish_reduce()
        grads = self.shard.new_empty(self.whole.numel())
        if self._padding:  # it is part of the shards, and of their norm
            torch._foreach_zero_([grads[gap] for gap in self._padding])
        copy_gradients(self.params, self.layout.views(grads))
        for p in self.params:
            p.grad = None
        part = torch.empty_like(self.shard)
        self._reduced.append((reduce_scatter_mean(part, grads, self.group), part))

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Waits for the reductions that have begun, and adds their gradients to the shard's."""
        for pending, part in self._reduced:
            pending.wait()
            if self.shard.grad is None:
                self.shard.grad = part
            else:
                self.shard.grad += part
        self._reduced.clear()

    @torch.no_grad()
    def show_whole(self) -> None:
        self.free()
        whole = self.shard.new_empty(self.whole.numel())
        all_gather(whole, self.shard.detach(), self.group).wait()
        self._point_to(self.layout.views(whole))

    def hide_whole(self) -> None:
        self._point_to(self._views)


_Unit = list[_Flat]  # of parameters that are gathered and freed together


def _flats(wrapper: Fsdp, params: list[nn.Parameter]) -> _Unit:
    """A flat tensor for each dtype, trained or frozen."""
    kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for p in params:
        kinds[p.dtype, p.device, p.requires_grad].append(p)
    return [_Flat(wrapper, group) for group in kinds.values()]


def _each(unit: _Unit, do: Callable[[_Flat], None]) -> None:
    for flat in unit:
        do(flat)
