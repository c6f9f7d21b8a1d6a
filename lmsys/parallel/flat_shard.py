"""The building blocks of `Fsdp` (fsdp.py): flat tensors of parameters, divided among ranks, and the order of gathers.

Only fsdp.py and assembly.py use this file. It says how parameters are gathered and freed; fsdp.py decides when.

A `FlatShard` holds parameters side by side in a flat tensor. This rank keeps one of world_size equal parts of it, the
*shard*. To gather is to get the parts of all ranks, which together are the *whole*. To free is to give the memory of
the whole back. Then the module's own parameters are `Freed`: they have their shapes, and as gradients this rank's parts
of the whole gradients, but no values. Code that reads one outside of a forward or backward gets an error that says what
to call instead.

A `Unit` is the flat shards of one block (an entry of a ModuleList), which are gathered and freed together. A `Walk` is
one pass, forward or backward, over the units in the order in which they are expected: it gathers the next one ahead,
and releases those whose last use is over. After any change, all ranks must still begin the same collectives in the same
order. So a rank that skips a unit gathers it all the same, since another rank may use it. A unit that was not expected
is gathered when it is used, which is right where all ranks use it.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmsys.parallel import buckets, collectives
from lmsys.parallel.part import Absent, addresses, appear, as_part, leave
from lmsys.values import hold


class Freed(Absent):
    """The class of a parameter while it is not gathered. Its gradient is this rank's part of the gradient, flat."""

    # (its flat shard, the slice of `FlatShard.shard` that belongs to it, its place in `FlatShard.params`)
    home: "tuple[weakref.ref[FlatShard], slice, int]"

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient, flat; None where the shard has no gradient."""
        flat, place = self.home[0](), self.home[1]
        return None if flat is None or flat.shard.grad is None else flat.shard.grad[place]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        hold((value is None, "fsdp holds the gradients: set those of the wrapper's own parameters()"))
        grad, flat = self.grad, self.home[0]()
        if grad is not None and flat is not None:
            grad.zero_()
            flat.used[self.home[2]] = False
            # With this parameter among the idle ones, the next step leaves it out, as if no rank had used it.
            flat.settle(at != self.home[2] and at not in flat.idle for at in range(len(flat.params)))

    @property
    def rounded(self) -> Tensor | None:
        """The rounded copy that modules read under autocast; None: there is none. Reading it gathers the parameter."""
        _read(self)  # after which the parameter has its ordinary class, and not this property
        return vars(self).get("rounded")


class FlatShard:
    """Parameters in a flat tensor, of which this rank keeps a part.

    `shard` is this rank's part, an nn.Parameter that the optimizer steps. `whole` is the gathered tensor, which has no
    memory while the parameters are freed. Gathered parameters may be *hidden*: then a read calls `on_read` all the
    same. From `unshard` to `reshard` the parameters are *shown*: they have whole values, in their own dtype.

    params          of one dtype and device, all trained or all frozen; they become views of `whole`
    gathered_dtype  dtype of `whole`; None: that of the parameters
    rounded         True: the views of `whole` become the parameters' attribute `rounded`, which modules read instead of
                    the parameters. The parameters and their gradients keep their dtype, and the former's values are NaN
    on_read         called when a freed or hidden parameter is read; returns True if it has gathered the parameter
    number          n, the number of this flat shard among all. Ranks agree on collectives by number: 2 n is its gather,
                    2 n + 1 is the reduction of its gradients

    A backward refuses a saved tensor whose version counter has changed. So a freed parameter gets another version. When
    it is gathered again it gets its former version back, unless the shard has changed meanwhile.
    A `Unit` calls `is_due`, `gather`, `wait`, `hide`, `free`, `reduce` and `finish_reduce`; `assembly.py`
    calls `places`, and `Fsdp` the others.
    """

    @torch.no_grad()
    def __init__(
        self,
        params: list[nn.Parameter],
        group: collectives.Group,
        gathered_dtype: torch.dtype | None,
        rounded: bool,
        on_read: Callable[[], Any],
        number: int,
    ):
        self.params, self.group, self.on_read, self.number = params, group, on_read, number
        world_size, self.rank = collectives.size_and_rank(group)
        self.layout = buckets.Layout.of(params)
        length = self.layout.part(world_size)
        everything = params[0].new_zeros(world_size * length)
        for p, view in zip(params, self.layout.views(everything), strict=True):
            view.copy_(p)
        self._own = slice(self.rank * length, (self.rank + 1) * length)
        self.shard = nn.Parameter(everything[self._own].clone(), requires_grad=params[0].requires_grad)
        self._trained = self.shard.requires_grad
        narrow = gathered_dtype if params[0].is_floating_point() else None
        self.whole = torch.empty(world_size * length, dtype=narrow or everything.dtype, device=everything.device)
        self._gathering: collectives.Pending | None = None
        self._is_whole, self._is_hidden, self.is_shown = False, False, False  # whole: gathered, perhaps hidden
        self._version = 0  # the version counter of the shard when it was gathered
        self.written = False  # True once a parameter was written while it was gathered, as in a forward
        # By parameter, True: this rank has made a gradient of it since the shard's gradient was None.
        self.used = [False] * len(params)
        self.idle = set[int]()  # places in `params` of those that no rank has used since then: see `settle`
        self._kept = dict[tuple[str, int], Tensor]()  # during an optimizer's step: copies of what it must not change
        self._reduced: list[tuple[collectives.Pending, Tensor]] = []
        self._views, self._padding = self.layout.views(self.whole), self.layout.gaps(self.whole.numel())
        self._rounded: list[Tensor] = []
        if rounded:  # through `.data`, for the reason that `_point_to` gives
            self._rounded = [view.data for view in self._views]
            # Each is a single NaN, expanded to the parameter's shape.
            self._views = [p.new_full((1,) * p.dim(), torch.nan).expand(p.shape) for p in params]
        self._stamped = self._rounded or self.params  # the tensors that autograd saves: `_stamp` sets their versions
        self._homes = [(weakref.ref(self), place, at) for at, place in enumerate(self.places(self.rank))]
        self._point_to(self._views)
        self._release()

    def places(self, rank: int) -> list[slice]:
        """For each parameter the slice of a rank's shard that holds elements of it; empty where there are none."""
        length = self.shard.numel()
        first = rank * length
        spans = [(start - first, start - first + shape.numel()) for shape, _, start in self.layout.places]
        return [slice(min(max(a, 0), length), min(max(b, 0), length)) for a, b in spans]

    def _point_to(self, views: Sequence[Tensor]) -> None:
        """Makes the parameters use the memory of these views, by `.data`: so autograd sees no write into `whole`."""
        appear(self.params)
        for p, view in zip(self.params, views, strict=True):
            p.data = view

    def hide(self) -> None:
        """From now on a read of a parameter calls `on_read`, though its values are still here."""
        if self._is_whole and not self._is_hidden:
            leave(self.params, _read, Freed, self._homes)
            self._is_hidden = True

    def _release(self) -> None:
        """Frees `whole`, also where it is not gathered; the parameters become `Freed`."""
        if self._is_whole and self._rounded:
            for p in self.params:
                del vars(p)["rounded"]
        if not self._is_hidden:
            leave(self.params, _read, Freed, self._homes)
        self.whole.untyped_storage().resize_(0)
        self._is_whole, self._is_hidden = False, False
        self._stamp(freed=1)

    def _stamp(self, freed: int) -> None:
        """Sets the versions that autograd compares: even numbers if parameters are whole, odd ones if they are freed.

        freed  1 or 0
        """
        torch._C._autograd._unsafe_set_version_counter(self._stamped, [2 * self._version + freed] * len(self._stamped))

    def is_due(self) -> bool:
        """True where `gather` is needed: nothing is gathered or on its way, or the shard has changed since then.

        ValueError where a parameter of the wrapper was frozen, set to be trained or given a hook after the module was
        wrapped.
        """
        hold(
            (
                self.shard.requires_grad is self._trained,
                "one of parameters() was frozen, or set to be trained, after the module was wrapped",
            ),
            (
                not (self.shard._backward_hooks or self.shard._post_accumulate_grad_hooks),
                "one of parameters() has a hook, which no backward would call: register it on one of the module",
            ),
        )
        return self._version != self.shard._version or not (self._is_whole or self._gathering)

    # `gather`, `reduce` and `finish_reduce` write no tensor that needs a gradient: no_grad would only cost host time.
    def gather(self) -> None:
        """Begins the all-gather of `whole`; `wait` ends it."""
        self.free()
        self.reshard()
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self._version = self.shard._version
        self._gathering = collectives.all_gather(self.whole, self.shard.detach().to(self.whole.dtype), self.group)

    def wait(self) -> None:
        """Waits for the gather that has begun, if any; then the parameters have values."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering, self._is_whole, self._is_hidden = None, True, True
            self._stamp(freed=0)
            for p, copy in zip(self.params, self._rounded, strict=False):  # none, unless copies are gathered
                vars(p)["rounded"] = copy
        if self._is_hidden:
            appear(self.params)
            self._is_hidden = False

    def free(self) -> None:
        """Frees the parameters if they are gathered; a gather that has begun is waited for first."""
        if self._gathering is not None:
            self.wait()
        if self._is_whole:
            self.written = self.written or self._is_written()
            self._release()

    def _is_written(self) -> bool:
        """True if a gathered parameter was written, or given another .data: the change would be lost when it is freed.

        A write through `.data` changes no version. It is found on CPUs alone, where comparing values costs little.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return (
                any(x._version != 2 * self._version for x in self._stamped)
                or addresses(self.params) != addresses(self._views)
                or not (
                    self.whole.is_cuda
                    or self._version != self.shard._version
                    or torch.equal(  # as integers, since NaN differs from itself; of 8 bytes, the fastest to compare
                        self.whole[self._own].view(torch.int64),
                        self.shard.detach().to(self.whole.dtype).view(torch.int64),
                    )
                )
            )

    def reduce(self) -> None:
        """Begins the reduce-scatter of the gradients, which leaves this rank the mean of its part of them."""
        self.finish_reduce()
        appear(self.params)  # so that .grad is what this backward has made, not this rank's part of the sum
        self.used = [
            p.grad is not None or (used and self.shard.grad is not None)
            for p, used in zip(self.params, self.used, strict=True)
        ]
        grads = self.shard.new_empty(self.whole.numel())
        if self._padding:  # elements between tensors are in the shards, too, and would count in a gradient norm
            torch._foreach_zero_([grads[gap] for gap in self._padding])
        buckets.copy_gradients(self.params, self.layout.views(grads))
        buckets.clear_gradients(self.params)
        if self._is_hidden or not self._is_whole:
            leave(self.params, _read, Freed, self._homes)
        part = torch.empty_like(self.shard)
        self._reduced.append((collectives.reduce_scatter_mean(part, grads, self.group), part))

    def finish_reduce(self) -> None:
        """Waits for the reductions that have begun, and adds their gradients to the shard's."""
        for pending, part in self._reduced:
            pending.wait()
            if self.shard.grad is None:
                # With one rank the part is the whole.
                self.shard.grad = part if self.whole.numel() == part.numel() else as_part(part, self.group)
            else:
                self.shard.grad += part
        self._reduced.clear()

    def settle(self, shares: Iterable[float]) -> None:
        """Notes which parameters no rank has used. If no rank has used any, the shard's gradient becomes None.

        shares  for each parameter the share of ranks that have made its gradient
        """
        self.idle = {number for number, share in enumerate(shares) if not share}
        if len(self.idle) == len(self.params):
            self.shard.grad = None

    def keep(self, state: Mapping[str, Any], dampens: bool) -> None:
        """Called before a step: copies the values and state of parameters that no rank has used.

        To the optimizer the shard is one parameter, so its step changes these too, and `put_back` restores them.

        state    the optimizer's state of the shard
        dampens  True: the optimizer has a dampening, so that its momentum takes the first gradient whole, and of later
                 ones only a share
        RuntimeError where a parameter is used again that some step has left out, if the optimizer's first steps differ
        from later ones.
        """
        self._kept = {}
        if self.shard.grad is None or not (self.idle or "left_out" in state):
            return
        late = {at for at, steps in enumerate(state.get("left_out", ())) if steps} - self.idle
        # Numbers, and tensors of another shape than the shard's, count steps or depend on them.
        if late and (
            dampens
            or any(
                isinstance(x, int | float | Tensor) and getattr(x, "shape", 0) != self.shard.shape
                for x in state.values()
            )
        ):
            raise RuntimeError(
                f"no rank had used a parameter of shape {tuple(self.params[min(late)].shape)} in a step before this"
                " one, and to the optimizer a flat part of fsdp is one parameter, whose first steps it takes otherwise"
                " than later ones: let every forward use all parameters of a block or none, or take another strategy,"
                " such as zero1"
            )
        # SGD makes its momentum in its first step, and would fill it with the weight decay of unused parameters. So
        # where there is none yet, zeros are kept for it.
        self._kept = {
            key: x.clone()
            for key, x in self._left_out({"momentum_buffer": torch.zeros_like(self.shard), **state}).items()
        }

    @torch.no_grad()
    def put_back(self, state: dict[str, Any]) -> None:
        """Called after a step: undoes its changes to parameters that no rank has used.

        State that the step has made, and of which `keep` had no copy, stays. The entry "left_out" of the state, a list,
        counts for each parameter the steps that have left it out.
        """
        if self._kept:
            for key, x in self._left_out(state).items():
                x.copy_(self._kept.get(key, x))
            before = state.get("left_out", [0] * len(self.params))
            state["left_out"] = [steps + (at in self.idle) for at, steps in enumerate(before)]

    def _left_out(self, state: Mapping[str, Any]) -> dict[tuple[str, int], Tensor]:
        """Views of the unused parameters' parts, in the shard and in each tensor of the state that is laid out like it.

        The key is (name in the state, or "" for the shard; the parameter's place).
        """
        laid_out = {"": self.shard.detach(), **state}
        return {
            (name, at): x[self._homes[at][1]]
            for name, x in laid_out.items()
            if getattr(x, "shape", 0) == self.shard.shape
            for at in self.idle
        }

    @torch.no_grad()
    def gathered(self, x: Tensor) -> list[Tensor]:
        """Gathers x (n,), laid out as the shard, from all ranks; returns whole tensors in the parameters' shapes.

        All ranks call it.
        """
        flat = x.new_empty(self.whole.numel())
        collectives.all_gather(flat, x.detach().contiguous(), self.group).wait()
        return self.layout.views(flat)

    def unshard(self) -> None:
        """Shows the module's parameters whole, in their own dtype, and their gradients. All ranks call it."""
        self.free()
        self.reshard()
        self._point_to(self.gathered(self.shard))
        self.is_shown, self._version = True, self.shard._version
        if self.shard.grad is not None:
            buckets.set_gradients(self.params, self.gathered(self.shard.grad))

    def reshard(self) -> None:
        """Ends `unshard`: what was written into the parameters meanwhile stays, unless the shard has changed."""
        if self.is_shown:
            if self._version == self.shard._version:
                self._write()
            buckets.clear_gradients(self.params)
            self._point_to(self._views)
            leave(self.params, _read, Freed, self._homes)
            self.is_shown = False

    @torch.no_grad()
    def _write(self) -> None:
        """Copies this rank's parts of the shown parameters into the shard, unless the shard has them already."""
        part = self.shard.detach().clone()
        for p, (_, place, _), (_, _, start) in zip(self.params, self._homes, self.layout.places, strict=True):
            first = self._own.start + place.start - start  # the first element of the parameter that is copied
            part[place].copy_(p.reshape(-1)[first : first + place.stop - place.start])
        if not torch.equal(part, self.shard):  # a write would raise the version, so that all is gathered again
            self.shard.copy_(part)


def _read(p: Any) -> None:
    """Called when a freed or hidden parameter is read: gathers it, or raises RuntimeError."""
    flat = p.home[0]()
    if flat is not None and flat.on_read():
        return
    raise RuntimeError(
        f"a parameter of shape {tuple(p.shape)} was read that fsdp has divided among ranks: full_state_dict() gives all"
        " values, unshard() shows them until the next forward, parameters() of the wrapper are this rank's parts"
    )


class Unit:
    """The flat shards of one block, or of all that is in no block: they are gathered and freed together.

    number   0 for what is in no block, then 1, 2, ... by block
    note     called before each collective with its number, see `FlatShard`
    running  the units whose blocks are in a forward, each once for every forward that has not ended; `Fsdp` fills it

    Attributes:
    flats    the flat shards; `Fsdp` sets them
    pinned   True: it stays gathered until the optimizer's step, since it is not known when its last use will be over
    """

    def __init__(self, number: int, note: Callable[[int], Any], running: Sequence["Unit"]):
        self.number, self._note, self._running = number, note, running
        self.flats, self.pinned = list[FlatShard](), False

    def gather(self) -> None:
        for flat in list(filter(FlatShard.is_due, self.flats)):  # the list is complete first, as `is_due` may raise
            self._note(2 * flat.number)
            flat.gather()

    def wait(self) -> None:
        for flat in self.flats:
            flat.wait()

    def free(self, again: bool = False) -> None:
        """Frees its flat shards, unless it is pinned or in a forward. again: only hides them, for it is used again."""
        for flat in () if self.pinned or self in self._running else self.flats:
            flat.hide() if again else flat.free()

    def reduce(self) -> None:
        for flat in [flat for flat in self.flats if flat.shard.requires_grad]:
            self._note(2 * flat.number + 1)
            flat.reduce()

    def finish_reduce(self) -> None:
        for flat in self.flats:
            flat.finish_reduce()


class Walk:
    """One pass over units, forward or backward. `Fsdp` makes it, and calls `enter`, `leave` and `end`.

    order          the units in the order in which they are expected to be used, each as often as it will be used;
                   `Fsdp` may append to it
    release        called with a unit whose last expected use is over
    release_first  True: the unit that was used last is released before the next one is gathered; False: after that

    Attributes:
    seen           the units in the order in which they were used
    visits         the units that a backward will come back to, in the order of the forward
    forwards       for a backward, the walks of the forwards that it has come to
    strayed        True once a unit was used that was not expected
    """

    def __init__(self, order: Iterable[Unit], release: Callable[[Unit], Any], release_first: bool = False):
        self.order, self._release, self._release_first = list(order), release, release_first
        self._at = -1  # the place in `order` of the present use; -1 before the first
        self.seen, self.visits, self.forwards, self.strayed = list[Unit](), list[Unit](), list[Walk](), False

    def enter(self, unit: Unit) -> None:
        """Called when a use of a unit begins: begins to gather it, and the unit that is expected next."""
        _append(self.seen, unit)
        try:
            to = self.order.index(unit, max(self._at, 0))
        except ValueError:
            self.strayed = True
            unit.gather()
        else:
            self._advance(to)

    def leave(self, unit: Unit, returns: bool) -> None:
        """Called when a forward of a unit has ended. returns: a backward will come back to it."""
        if returns:
            _append(self.visits, unit)
        unit.free(again=unit in self.order[max(self._at, 0) :])

    def end(self) -> None:
        """Called at the end of the pass: gathers and releases the units that were expected and not used."""
        self._advance(len(self.order))

    def _advance(self, to: int) -> None:
        """Goes on to the place `to` in the order; gathers and releases units in between, which other ranks may use."""
        while self._at < min(to, len(self.order) - 1):
            before = self.order[self._at] if self._at >= 0 else None
            self._at += 1
            self.order[self._at].gather()
            if self._release_first:
                self._pass(before)
            for unit in self.order[self._at + 1 : self._at + 2]:  # the next one, if there is one
                unit.gather()
            if not self._release_first:
                self._pass(before)
            if self._at < to:
                _append(self.visits, self.order[self._at])

    def _pass(self, unit: Unit | None) -> None:
        """Releases `unit`, the one before the present one, unless it is expected again."""
        if unit is not None and unit not in self.order[self._at :]:
            self._release(unit)


def _append(units: list[Unit], unit: Unit) -> None:
    """Appends a unit, unless it is the last already: several uses in a row count as one."""
    if not units or units[-1] is not unit:
        units.append(unit)
