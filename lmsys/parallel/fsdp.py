"""Fully sharded data parallelism (`Fsdp`): a rank keeps a part of every parameter, gradient and optimizer state.

The parameters of a block (an entry of a ModuleList) lie side by side in flat tensors, and so do those that are in no
block. A rank keeps one of world_size equal parts of each flat tensor, in full precision; the optimizer steps this part.
A block is gathered (each rank gets all parts of its flat tensors) when it is called. Blocks may be called in any order
and any number of times. While a block computes, the one that is expected next is gathered. Blocks are expected in the
order of their list. If a step has another order, the order of rank 0 in that step is expected from then on. A block is
freed when its last use is over. A backward comes back to blocks in the reverse order of their calls: it gathers them
again, and reduce-scatters their gradients while it goes on.

`Fsdp` is the row `fsdp` of the table in `__init__.py`. It decides when to gather parameters and to reduce gradients;
the classes of flat_shard.py do both:

- A `FlatShard` is one flat tensor. Its collectives have numbers: 2 n gathers flat shard n, and 2 n + 1 reduces its
  gradients. Except under NCCL, ranks compare the number of what they are about to begin (`collectives.Agreement`), so
  that no rank waits in a collective that another does not begin. They also compare at three points where no numbered
  collective follows. The numbers of these points are below 0: -1 (`collectives.END`) is the end of a step, -2 the end
  of a forward that records no graph, and -3 comes before a collective without a number.
- A `Unit` is the flat shards of one block, or of all that is in no block. A unit that is `pinned` stays gathered until
  the optimizer's step.
- A `Walk` is one pass over units, a forward or a backward, in the order in which they are expected. `enter` begins a
  use of a unit, and gathers the next one ahead; `leave` ends a use in a forward, and `end` the pass. A unit whose last
  use is over is released. In a forward a release frees the unit, before the next one is gathered (`release_first`). In
  a backward it also begins the reduction of the unit's gradients, after the gather of the next unit has begun. A walk
  notes the units that were used (`seen`) and whether one of them was not expected (`strayed`): if so, `_learn` makes
  rank 0's `seen` the expected order.
- A backward has a single walk, `_back`, though it may come to several forwards, the last one first. The order of this
  walk is empty when the backward begins. When the backward comes to a forward, the units that it will come back to
  there (`visits` of the forward's walk) are appended in reverse. `forwards` has the walks of these forwards.

After any change, all ranks must still begin the same collectives in the same order, whichever blocks a rank skips and
whichever gradients it has made. So call `_before_collective` before a new collective within a step, if it has a number,
and `_agree` before one without a number. CONTRIBUTING.md says how to test such a change.

wrapper.py says when the methods that `Fsdp` overrides are called. Hooks around blocks call `_enter_forward` and
`_leave_forward`; a backward that comes to the output of a block calls `_return_to`. `structure.weakly` turns a method
into a hook that does not keep the wrapper alive.

Source: Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277), sections 3.2 and 3.3; Rajbhandari et al. 2020, "ZeRO"
(1910.02054), P_os+g+p.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import count, islice
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map

from lmsys.parallel import collectives, flat_shard, part, sharded_optimizer, structure, traits, wrapper
from lmsys.values import hold, instance

KEEP = bool  # the `release` of a `Walk` whose units stay gathered: calling it has no effect


class Fsdp(wrapper.Wrapper):
    """Shards parameters, gradients and optimizer state over ranks; gathers the parameters of a block for its use.

    compute_dtype  dtype of the gathered parameters and of inputs, and so of the computation; None: they keep their own

    Modules whose attribute `reads_rounded` is True, such as the linear layers of `TransformerLM`, read rounded copies
    of their parameters under autocast. In a model with such modules only these copies are gathered in compute_dtype;
    other parameters keep their dtype, and the forward runs under autocast. Gradients then equal the unsharded ones and
    are not rounded. In a model without such modules all parameters are gathered in compute_dtype. A module whose
    attribute `reads_own_dtype` is True when it is wrapped, such as a norm that computes in float32, reads its own
    parameters (not those of its children) as they are; its inputs are cast all the same.

    `parameters()` are the flat parts that this rank keeps: an optimizer that works element by element steps them as it
    would the whole. The module's own parameters keep their names and shapes. Their gradients are this rank's parts of
    the whole gradients. The parameters have no values and refuse to be read until `unshard` shows them whole. Where a
    forward reads them other than by calling their block, they are gathered and stay until the step. Gradients are
    reduced in the parameters' precision after every backward: under no_sync() too, as no rank could keep them whole.

    A flat part has no gradient if no rank has used any of its parameters. If ranks have used only some of them, the
    gradients of the others in it are zeros, and the step leaves those parameters and their state as they were. Once
    such a parameter is used after all, RuntimeError refuses the step of an optimizer that counts steps, such as AdamW,
    or dampens its momentum: it would treat the first gradient of this parameter as a later one.

    A rank may skip blocks that others call in the expected order, under NCCL too: it takes part in the gathers and
    reductions of these blocks all the same. Apart from that ranks must call blocks in the same order. If they do not,
    all of them raise RuntimeError before a collective that would wait in vain, and again in every later forward. Under
    NCCL ranks compare only once a step, in `finish_gradient_synchronization`. Before that a collective may wait in vain
    for a rank that begins another one. torch.compile of the wrapper has no effect; compile its blocks.
    """

    # Traits of the row, that is, facts that other code reads: `lmsys.traits` explains each.
    zero_stage = 3
    halves_sums = True
    sums_each_backward = True
    compute_dtype = True
    why_not_graphed = traits.RESIZES_PARAMETERS
    why_not_fused = traits.SURROUNDS_BLOCKS
    rivals = ("torch_fsdp2",)
    _stepping: Any = None  # no trait: the optimizer that is in its step

    def __init__(
        self, module: nn.Module, process_group: collectives.Group = None, compute_dtype: torch.dtype | None = None
    ):
        wrapper.check_floating("compute_dtype", compute_dtype)
        super().__init__(module, process_group)
        # Under NCCL ranks do not compare before each collective: `Wrapper` checks a step as a whole.
        compares = self.world_size > 1 and self.trainable and not collectives.is_nccl(process_group, self.trainable[0])
        self._agreement = collectives.Agreement(process_group, structure.weakly(self._blank)) if compares else None
        self._dtype = compute_dtype
        self._running: list[flat_shard.Unit] = []  # units whose forwards have begun and not ended, the innermost last
        self._units = [
            flat_shard.Unit(number, structure.weakly(self._before_collective), self._running)
            for number in range(1 + len(structure.blocks_of(module)))
        ]
        self._optimizers = WeakSet[Any]()
        self._lay_out()
        unit_of = {p: unit for unit in self._units for flat in unit.flats for p in flat.params}
        self._unit_of = [unit_of[p] for p in self.trainable]  # by index of the trained parameter
        self._order = self._units[1:]  # the order in which forwards are expected to use blocks
        self._other_order: list[flat_shard.Unit] = []  # another order, in which a forward has used them
        self._to_come = WeakSet[flat_shard.Walk]()  # forwards that no backward has come to
        self._back = flat_shard.Walk((), KEEP)  # the backward's; that of a forward is `_walk`, a field of `Wrapper`
        # Units whose gradients this backward has yet to reduce; those whose reduction has begun, the earliest first.
        self._to_reduce, self._reducing = set[flat_shard.Unit](), list[flat_shard.Unit]()
        for block, unit in zip(structure.blocks_of(module), self._order, strict=True):
            structure.surround(
                block, structure.weakly(self._enter_forward, unit), structure.weakly(self._leave_forward, unit)
            )

    def _lay_out(self, groups: structure.Sets = ()) -> None:
        """Lays the parameters of each unit side by side in flat tensors; none has parameters of two `groups`."""
        self.unshard()
        is_narrow = self._dtype in (torch.bfloat16, torch.float16)
        rounded = structure.read_rounded(self.module) if is_narrow else set[nn.Parameter]()
        own_dtype = set(self.module.parameters()) - rounded if rounded else structure.read_as_kept(self.module)
        self._autocasts, numbers = bool(rounded), count()
        for unit, flats in zip(self._units, structure.flats_by_block(self.module, groups), strict=True):
            unit.flats, read = [], structure.weakly(self._read, unit.number)
            for params in flats:
                p = params[0]  # `flats_by_block` sees to it that the others are in the same sets as p
                dtype = None if p in own_dtype else self._dtype
                unit.flats.append(flat_shard.FlatShard(params, self.group, dtype, p in rounded, read, next(numbers)))
        self._parts = frozenset(map(id, self.parameters()))

    def make_optimizer(
        self, optimizer_cls: Any, groups: structure.Groups | None = None, **kwargs: Any
    ) -> torch.optim.Optimizer:
        """As `Wrapper.make_optimizer`. With `groups` it lays out parameters anew: no flat part is in two groups.

        ValueError for `groups` once there is an optimizer, or a gradient.
        A class with the attribute `takes_whole_matrices` gets the keyword `flats`: {flat part: its `FlatShard`}.
        """
        chosen: list[Any] = list(self.parameters())
        if groups is not None:
            hold(
                (
                    not self._optimizers and all(p.grad is None for p in chosen),
                    "fsdp lays groups apart: make the optimizer of groups before any other, and one alone",
                )
            )
            chosen = structure.grouped(self.module, groups)
            members = [set(group["params"]) for group in chosen]
            self._lay_out(members)
            for group, params in zip(chosen, members, strict=True):
                group["params"] = [flat.shard for flat in self._flats() if flat.params[0] in params]
        if getattr(optimizer_cls, "takes_whole_matrices", False):
            kwargs["flats"] = {flat.shard: flat for flat in self._flats()}
        optimizer = instance("optimizer_cls", optimizer_cls, Callable)(chosen, **kwargs)
        self._optimizers.add(optimizer)
        return optimizer

    def parameters_in(self, optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
        shards = {p: flat.shard for flat in self._flats() for p in flat.params}
        groups = [set(group["params"]) for group in optimizer.param_groups]
        return [[p for p in self.module.parameters() if shards[p] in group] for group in groups]

    def _whole_state(self, optimizer: Any) -> dict[str, Any]:
        shares = collectives.gather_objects(tree_map(sharded_optimizer.on_cpu, optimizer.state_dict()), self.group)
        return sharded_optimizer.whole_state(shares, self.module, self.parameters_in(optimizer))

    def _own_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        return sharded_optimizer.flat_share(
            state, self.module, self.rank, self.world_size, self.parameters_in(optimizer)
        )

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """The flat parts that this rank keeps, by names of their own; `recurse` and `remove_duplicate` are ignored."""
        for unit in self._units:
            for place, flat in enumerate(unit.flats):
                yield f"{prefix}{'.' if prefix else ''}unit{unit.number}.part{place}", flat.shard

    @_disable_dynamo  # torch.compile of the wrapper would trace the gathering; compiled blocks stay compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._prepare()
        # True where checkpointing runs the whole module again in a backward: units stay gathered for this backward.
        again = structure.is_in_backward()
        if again:
            self._enter_backward(None)
        self._begin_forward(KEEP if again else flat_shard.Unit.free)
        if self._dtype is not None and not self._autocasts:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        with torch.autocast(next(self._flats()).whole.device.type, self._dtype) if self._autocasts else nullcontext():
            try:
                output = super().forward(*args, **kwargs)
            finally:
                walk, self._walk = self._walk, None
                walk.end()
        if torch.is_grad_enabled():
            self._to_come.add(walk)
            self._other_order = walk.seen if walk.strayed else self._other_order
        elif not again:
            # A rank may make this forward alone, and perhaps no collective follows in which ranks would compare. The
            # module's docstring lists the numbers below 0.
            self._before_collective(-2)
            self._free()
        return output

    def finish_gradient_synchronization(self) -> None:
        self._leave_backward(late=True)
        self._unfinished = False
        self._unpin()
        flats = [flat for flat in self._flats() if flat.shard.requires_grad]
        if not flats:
            return
        if self._agreement is not None:
            self._agreement.end()
        # One all-reduce makes means over ranks. `use` has a number for each trained parameter: 1.0 where this rank has
        # made its gradient, so that the mean is the share of ranks that have. Then come the three numbers of
        # `Wrapper._flags`, whose means show if a module has changed or forwards differ. The last numbers are 1.0 where
        # this rank has written gathered parameters, and where it used units in another order. If this rank has made all
        # gradients, no share is 0, and the host need not wait for the means.
        use = [float(used) for flat in flats for used in flat.used]
        values = torch.tensor(
            [*use, *self._flags(), any(flat.written for flat in self._flats()), bool(self._other_order)],
            dtype=torch.float64,
        )
        means = values.to(flats[0].shard.device, non_blocking=True)
        collectives.all_reduce_mean(means, self.group, async_op=False).wait()
        shares = iter(use if all(use) else means.tolist())
        for flat in flats:
            flat.settle(islice(shares, len(flat.params)))
        # `_heed` raises the errors where ranks differ. It returns None where the means are not known yet, on a GPU. The
        # last mean is the share of ranks that used units in another order.
        if (heeded := self._heed(means[len(use) :])) is not None:
            hold(
                (
                    heeded[-2] == 0,
                    "a parameter was written while fsdp had gathered it, as in a forward, and what is gathered is"
                    " dropped again, so this wrapper trains no further: write parameters between unshard() and"
                    " reshard(), on all ranks",
                )
            )
            if heeded[-1] > 0:
                self._learn()
        if self._stepping is not None:  # a closure has called this, and made the gradients that the step takes
            self.before_step(self._stepping)

    def unshard(self) -> None:
        """Shows the module's parameters and their gradients whole, in their own dtype. All ranks call it.

        They stay so until `reshard`, the optimizer's step or the next forward.
        """
        self._check_finished()
        for flat in self._flats():
            flat.unshard()

    def _check_finished(self) -> None:
        """RuntimeError while gradients are on their way, when parameters cannot be shown; compares the ranks."""
        hold(
            (
                not self._unfinished,
                "gradients are still on their way: finish_gradient_synchronization() comes before parameters are"
                " shown whole or loaded",
            ),
            error=RuntimeError,
        )
        self._agree()

    def reshard(self) -> None:
        """Ends `unshard`: the module's parameters have no values again, and what was written into them stays."""
        for flat in self._flats():
            flat.reshard()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "fsdp has no state dict of one rank alone: on all ranks, full_state_dict() gives all values, and"
            " sharded_state_dict() what torch.distributed.checkpoint saves"
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        return self._state(lambda x: x.clone())

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Parameters as DTensors, divided by their first dimension as FSDP2 has them, in memory of their own."""
        return self._state(lambda x: part.divided(x, self.group))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """ValueError for an optimizer that `Fsdp` cannot serve; else frees what is gathered, as the step changes it."""
        hold(
            (
                not structure.holds_any(optimizer, self._whole),
                "this optimizer holds the module's parameters, which fsdp has divided among ranks: make it by"
                " make_optimizer(), or over parameters() of the wrapper",
            )
        )
        if structure.holds_any(optimizer, self._parts):
            self._refuse_unfinished()
            hold(
                (
                    optimizer in self._optimizers or len(optimizer.param_groups) == 1,
                    "this optimizer has several param groups, and the flat parts of fsdp are neither of one name nor of"
                    " one shape: make it by make_optimizer(cls, groups=lambda name, p: options, ...)",
                ),
                (
                    self.world_size == 1
                    or not sharded_optimizer.algorithm_of(optimizer.__class__, sharded_optimizer.OF_ALL),
                    f"{type(optimizer).__name__} looks at all gradients at once, and here each rank steps its own"
                    " parts",
                ),
                (
                    not sharded_optimizer.algorithm_of(optimizer.__class__, sharded_optimizer.OF_WHOLE),
                    f"{type(optimizer).__name__} looks at whole parameters, of which fsdp has flat parts: take"
                    " ShardedOptimizer with another strategy, such as bucketed",
                ),
            )
            sharded_optimizer.check_share(optimizer.param_groups, self.rank, self.world_size)
            self.reshard()
            self._unpin()
            for flat in self._flats():
                flat.keep(
                    optimizer.state.get(flat.shard, {}),
                    dampens=any(options.get("dampening") for options in optimizer.param_groups),
                )
            self._stepping = optimizer  # not before: a step that is refused does not begin

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is self._stepping:
            self._stepping = None
            for flat in self._flats():
                flat.put_back(optimizer.state.get(flat.shard, {}))

    def _state(self, of: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The state dict, with of(p) for each whole parameter p, gathered one flat shard at a time; copies buffers."""
        self._agree()
        made = dict[int, Tensor]()
        for flat in self._flats():
            made.update(zip(map(id, flat.params), map(of, flat.gathered(flat.shard)), strict=True))
        held = self.module.state_dict(keep_vars=True)
        return {name: made[id(x)] if id(x) in made else copy.deepcopy(x) for name, x in held.items()}

    def _load(self, state: dict[str, Any], strict: bool) -> Any:
        """As `Wrapper._load`. To save memory it shows each submodule whole only while torch loads that submodule."""

        def load(module: nn.Module, load_own: Callable[..., None], *args: Any) -> None:
            own = set(map(id, module._parameters.values()))
            for flat in self._flats() if own else ():
                if own.isdisjoint(map(id, flat.params)):
                    flat.reshard()
                elif not flat.is_shown:
                    flat.unshard()
            load_own(*args)

        self._check_finished()
        with ExitStack() as ending:
            ending.callback(self.reshard)
            for module in self.module.modules():  # no hooks of torch's: they would come after those of the user
                vars(module)["_load_from_state_dict"] = partial(load, module, module._load_from_state_dict)
                ending.callback(vars(module).pop, "_load_from_state_dict")
            return super()._load(state, strict)

    def _flats(self) -> Iterator[flat_shard.FlatShard]:
        """All flat shards, in the order of their numbers."""
        for unit in self._units:
            yield from unit.flats

    def _before_collective(self, number: int) -> None:
        """Notes this number in the history of this step (`Wrapper._note`), and lets ranks compare it, if they do.

        Called before the collective of this number; with a number below 0 where no numbered one follows.
        """
        self._note(number)
        if self._agreement is not None:
            self._agreement.on(number)

    def _agree(self) -> None:
        """Lets ranks compare the forwards of a step that has begun. Called before collectives that have no number."""
        if self._agreement is not None and self._agreement.since:
            self._before_collective(-3)  # the number of this point: see the module's docstring

    def _blank(self, number: int) -> None:
        """Takes part in the collective of this number for the sake of other ranks, and drops the result.

        `Agreement` calls it on a rank that departs from the order of the last steps: other ranks may still follow it.
        """
        flat = [*self._flats()][number // 2]
        if number % 2:
            collectives.reduce_scatter_mean(
                torch.empty_like(flat.shard), flat.shard.new_empty(flat.whole.numel()), self.group
            ).wait()
        else:
            flat.gathered(flat.shard.detach().to(flat.whole.dtype))

    def _cast(self, x: Any) -> Any:
        """A floating-point tensor in compute_dtype; anything else as it is."""
        return x.to(self._dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    def _free(self) -> None:
        """Frees all units but those that are pinned."""
        for unit in self._units:
            unit.free()

    def _unpin(self) -> None:
        """Frees all units, pinned ones too."""
        for unit in self._units:
            unit.pinned = False
        self._free()

    def _pin(self, unit: flat_shard.Unit) -> None:
        """Gathers a unit and pins it until the step, since it is not known when its last use will be over.

        Where no graph is recorded, as under no_grad() or in a backward, it is not pinned: no later backward reads it.
        """
        unit.pinned = unit.pinned or torch.is_grad_enabled()
        unit.gather()
        unit.wait()

    def _read(self, number: int) -> bool:
        """Called when a parameter of unit `number` is read outside of its block. True: the unit was gathered.

        False outside of a forward or backward: there the read is refused.
        """
        if self._walk is None and not structure.is_in_backward():
            return False
        self._pin(self._units[number])
        return True

    def _begin_forward(self, release: Callable[[flat_shard.Unit], Any]) -> None:
        """Begins a walk over the expected order; the walk calls `release` with a unit whose last use is over."""
        while self._running:  # units are left over from a forward that an exception has ended
            self._running.pop().free(again=True)  # so that a read of their parameters is noticed again
        self._walk = flat_shard.Walk(self._order, release, release_first=True)
        for unit in (self._units[0], *self._order[:1]):  # first what is in no block
            unit.gather()
        self._units[0].wait()

    def _enter_forward(self, unit: flat_shard.Unit, *_: Any) -> None:
        """Called before the forward of a block: gathers its unit and waits for it."""
        if structure.is_in_backward():  # checkpointing repeats this forward: perhaps the first sign of the backward
            self._enter_backward(None)
        else:
            for other in self._running:  # a block around this one reads its parameters again after this call
                other.pinned = other.pinned or (torch.is_grad_enabled() and other is not unit)
            self._running.append(unit)
        unit.gather() if self._walk is None else self._walk.enter(unit)
        unit.wait()

    def _leave_forward(self, unit: flat_shard.Unit, _: nn.Module, __: Any, output: Any) -> None:
        """Called after the forward of a block: sets a hook that calls `_return_to` in the backward; frees the unit."""
        # hidden: the output may hold tensors that are not among `tensors`, so a backward may come back unnoticed.
        tensors, hidden = structure.tensors_in(output) if torch.is_grad_enabled() else ([], False)
        structure.before_backward(tensors, structure.weakly(self._return_to, unit, self._walk))
        if structure.is_in_backward():
            return
        unit.pinned = unit.pinned or hidden
        self._running.remove(unit)
        unit.free() if self._walk is None else self._walk.leave(unit, returns=bool(tensors))

    def _return_to(self, unit: flat_shard.Unit, walk: flat_shard.Walk | None, _: Tensor) -> None:
        """Called when a backward is about to come to a unit's use in the forward whose walk is `walk`."""
        self._enter_backward(walk)
        self._back.enter(unit)
        self._pin(unit)

    def _enter_backward(self, walk: flat_shard.Walk | None, *_: Any) -> None:
        super()._enter_backward(walk)
        if walk is not None and walk not in self._back.forwards:
            self._back.forwards.append(walk)
            self._back.end()  # a backward comes to the last forward first, and is done with it when it comes to another
            self._to_come.discard(walk)
            self._back.order += walk.visits[::-1]
            for unit in walk.visits:
                unit.pinned = unit.pinned or torch.is_grad_enabled()  # a later backward reads parameters too

    def _begin_backward(self) -> None:
        self._back = flat_shard.Walk((), structure.weakly(self._is_over))
        self._to_reduce = set(self._unit_of)  # all: ranks reduce the same units, whichever gradients each has made
        self._pin(self._units[0])

    def _leave_backward(self, late: bool = False) -> None:
        if not self._in_backward:
            return
        super()._leave_backward(late)
        self._back.end()
        for unit in reversed(self._units):
            if unit in self._to_reduce:
                self._reduce(unit)
        for unit in self._reducing:
            unit.finish_reduce()
        self._reducing.clear()
        self._free()

    def _on_grad(self, index: int, p: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) makes gradients that are no part of a graph once fsdp has divided them:"
                " take torch.autograd.grad(..., create_graph=True) for the term of the loss, then backward()"
            )
        super()._on_grad(index, p)
        if not self._in_backward:
            self._enter_backward(None)
        self._to_reduce.add(self._unit_of[index])

    def _is_over(self, unit: flat_shard.Unit) -> None:
        """Called when a backward has come to all uses of a unit that are known so far.

        It may still come to an earlier forward that used the unit: then `_leave_backward` reduces the gradients.
        """
        if unit in self._to_reduce and not (self._to_come and any(unit in walk.visits for walk in self._to_come)):
            self._reduce(unit)
        unit.free()

    def _reduce(self, unit: flat_shard.Unit) -> None:
        """Reduce-scatters a unit's gradients, at the same point on every rank, whichever gradients this rank has."""
        self._to_reduce.discard(unit)
        unit.reduce()
        self._reducing.append(unit)
        if len(self._reducing) > 1:  # waiting for an earlier reduction frees the memory that it sent from
            self._reducing.pop(0).finish_reduce()

    def _learn(self) -> None:
        """From now on expects units in the order in which rank 0 has used them; unused ones come last."""
        order = collectives.gather_objects([unit.number for unit in self._other_order], self.group)[0]
        self._order = [self._units[number] for number in order] + [x for x in self._order if x.number not in order]
        self._other_order = []
