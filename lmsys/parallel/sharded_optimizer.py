"""Optimizers whose state is divided among ranks: by parameter, or over the flat parts of fsdp.

With a `ShardedOptimizer` each rank steps its own parameters, then all ranks gather all of them. It works with any
strategy that leaves every rank all mean gradients: `lmsys train` makes one for the option `train.sharded_optimizer`.
`zero1.Zero1Optimizer` derives from it, and takes from its strategy which rank owns what. Parameters become views of
flat buffers of world_size equal segments, so that gathering copies nothing. Source: Rajbhandari et al. 2020, "ZeRO"
(arXiv 1910.02054), P_os.

`whole_state` and `flat_share` convert an optimizer's state dict between fsdp's flat parts and whole parameters. So a
state that was saved in one form can be loaded in the other, if the optimizer works element by element. Their argument
`groups` has a list of parameters for each param group, and parameters are numbered in this order. Checkpoints
(`lmsys.training.training_state`) and `Fsdp` call them.

An optimizer that does not work element by element must be named in OF_ALL or OF_WHOLE.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lmsys import values
from lmsys.parallel import buckets, collectives, part, structure

CHUNK = 2**26  # about the number of elements of a rank's segment that one all-gather sends
# Optimizers in which the step of an element depends on other elements, by words in the names of their classes. OF_ALL:
# on elements of all parameters. OF_WHOLE: on elements of its own parameter. Any other optimizer is taken to work
# element by element. A word with a space behind it must end the name: an AdamPlain is no AdamP.
OF_ALL = "LBFGS", "Prodigy", "DAdapt"
OF_WHOLE = (
    *("Adafactor", "Adam_mini", "AdamMini", "AdamP ", "GaLore", "Lamb", "LAMB", "LARS", "SGDP ", "Shampoo", "SOAP"),
    "StableAdam",
)
# The answers of `algorithm_of`, which every step calls. Not functools.cache: torch.compile warns of such functions.
_algorithms: dict[tuple[type, tuple[str, ...]], str] = {}


@dataclass
class FlatBuffer:
    """A flat tensor that parameters are views of: world_size equal segments, one for the parameters of each rank."""

    flat: Tensor
    owners: dict[Any, int]  # {parameter: the rank that owns it, that is, steps it}
    addresses: list[int]  # of the parameters' memory, in the order of `owners`

    def gather(self, group: collectives.Group) -> collectives.Pending:
        """Begins an all-gather of this rank's segment, after whose `wait` the flat tensor has those of all ranks."""
        world_size, rank = collectives.size_and_rank(group)
        length = len(self.flat) // world_size
        return collectives.all_gather(self.flat, self.flat[rank * length : (rank + 1) * length], group)


@torch.no_grad()
def flatten(
    params: Sequence[Tensor], bucket: buckets.Segmented, zeros: Callable[[Tensor, int], Tensor] = Tensor.new_zeros
) -> FlatBuffer:
    """Moves the bucket's parameters into one buffer, each into the segment of the rank that owns it.

    zeros  zeros(like, length) makes the flat tensor
    """
    owners = {params[index]: rank for rank, owned in enumerate(bucket.members) for index in owned}
    layout = layout_of(params, bucket)
    flat = zeros(params[bucket.indices[0]], layout.length)
    for p, view in zip(owners, layout.views(flat), strict=True):
        view.copy_(p)
        p.data = view
    return FlatBuffer(flat, owners, part.addresses(owners))


def owners_in(buffers: Sequence[FlatBuffer]) -> dict[Tensor, int]:
    """The rank that owns each parameter."""
    return {p: rank for buffer in buffers for p, rank in buffer.owners.items()}


def layout_of(params: Sequence[Tensor], bucket: buckets.Segmented) -> buckets.Layout:
    """The layout of the bucket's parameters in its flat buffer."""
    starts = []
    for rank, owned in enumerate(bucket.members):
        within, _ = buckets.offsets([params[index].numel() for index in owned])
        starts += [rank * bucket.length + start for start in within]
    return buckets.Layout.at([params[index] for index in bucket.indices], starts, len(bucket.members) * bucket.length)


class ShardedOptimizer(Optimizer):
    """Runs `optimizer_cls` on the parameters that this rank owns. `param_groups` has the parameters of all ranks.

    params        tensors or param groups, equal on every rank
    flat_buffers  those that a strategy has made; None: this class makes them, and balances ranks by the parameters'
                  sizes, or by `optimizer_cls.cost(parameter, **options of its group)` where the class has it, as
                  `lmsys.training.muon.Muon` does
    kwargs        options of `optimizer_cls`
    `state_dict` is this rank's share. `full_state_dict` is whole, and can be loaded at any world size, also into an
    `optimizer_cls` without shards; `load_state_dict` takes either. All ranks call the constructor, `step` and
    `full_state_dict`.

    torch's constructor, which runs within this one, calls `add_param_group` for each group. A subclass overrides
    `_flatten`, which `add_param_group` calls for parameters that no flat buffer has, and `_gather`, which `step` calls.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Any,
        process_group: collectives.Group = None,
        flat_buffers: Sequence[FlatBuffer] | None = None,
        **kwargs: Any,
    ):
        self.group = process_group
        self.world_size, self.rank = collectives.size_and_rank(process_group)
        self.flat_buffers = values.several("flat_buffers", [] if flat_buffers is None else flat_buffers, FlatBuffer)
        self.owners = owners_in(self.flat_buffers)
        self._cost = getattr(values.instance("optimizer_cls", optimizer_cls, Callable), "cost", None)
        self._loads = [0] * self.world_size  # the cost that each rank bears so far: `plan_segments` updates it
        self._local: Any = None  # this rank's `optimizer_cls`; torch's constructor calls `add_param_group` before that
        super().__init__(values.instance("params", params, Iterable), kwargs)
        self._local = optimizer_cls([self._own(group) for group in self.param_groups], **kwargs)
        self.defaults = self._local.defaults
        structure.set_options(self.param_groups, self._local.param_groups)
        self.state = self._local.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if strangers := [p for p in group["params"] if p not in self.owners]:  # in no buffer yet
            self._flatten(strangers, without(group, "params"))
        if self._local is not None:
            self._local.add_param_group(self._own(group))
            group.update(without(self._local.param_groups[-1], "params"))

    def _flatten(self, params: list[Tensor], options: dict[str, Any]) -> None:
        """Divides parameters among ranks, and moves them into flat buffers. options: those of their param group."""
        planned = buckets.plan_segments(
            numels=[p.numel() for p in params], order=range(len(params)), limit=CHUNK, world_size=self.world_size,
            kinds=[(p.device, p.dtype) for p in params], loads=self._loads,
            costs=None if self._cost is None else [self._cost(p, **options) for p in params],
        )  # fmt: skip
        self.flat_buffers += [flatten(params, bucket) for bucket in planned]
        self.owners = owners_in(self.flat_buffers)

    def _own(self, group: dict[str, Any]) -> dict[str, Any]:
        """The param group with this rank's parameters alone."""
        return {**group, "params": [p for p in group["params"] if self.owners[p] == self.rank]}

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps this rank's parameters, then gathers all ranks'. Takes the arguments of `optimizer_cls.step`.

        ValueError where a parameter has left its flat buffer: what is gathered would not reach it.
        """
        values.hold(
            (
                all(part.addresses(buffer.owners) == buffer.addresses for buffer in self.flat_buffers),
                "a parameter was moved, cast or given another .data after its optimizer or strategy was made: do that"
                " first, or write into the parameter by copy_()",
            ),
            (
                self.world_size == 1 or not algorithm_of(self._local.__class__, OF_ALL),
                f"{type(self._local).__name__} looks at all gradients at once, and here each rank steps its own"
                " parameters",
            ),
        )
        structure.set_options(self._local.param_groups, self.param_groups)  # of which a schedule sets the rate
        self._local.state = self.state
        loss = self._local.step(*args, **kwargs)
        structure.set_options(self.param_groups, self._local.param_groups)  # an optimizer may keep counters there
        self._gather()
        return loss

    def _gather(self) -> None:
        """Called when this rank's parameters have been stepped: gathers those of all ranks."""
        for pending in [buffer.gather(self.group) for buffer in self.flat_buffers]:
            pending.wait()
        torch.autograd.graph.increment_version(list(self.owners))  # the gather wrote them through their flat buffers

    def state_dict(self) -> dict[str, Any]:
        """This rank's share: the state of its own parameters, by their numbers over all groups.

        The entry `shard` of each group says whose share it is: [rank, world_size].
        """
        numbers = {p: number for number, p in enumerate(chain(*(group["params"] for group in self.param_groups)))}
        groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in self.param_groups]
        state = {numbers.get(p, p): copy.copy(x) for p, x in self.state.items()}  # an optimizer may have other keys
        check_share(groups, self.rank, self.world_size)
        return {"state": state, "param_groups": groups}

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of `optimizer_cls` without shards, on every rank, its tensors on the CPU."""
        return merge_shares(collectives.gather_objects(tree_map(on_cpu, self.state_dict()), self.group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part of a full state dict, or its own share. ValueError for another rank's share."""
        groups = list(map(dict, state_dict["param_groups"]))
        check_share(groups, self.rank, self.world_size)
        given_counts, here = _lengths(groups), _lengths(self.param_groups)
        values.hold(
            (
                given_counts == here,
                f"the state dict has param groups of {given_counts} parameters, this optimizer of {here}",
            )
        )
        kept, local_groups = set[int](), []
        for saved, group in zip(groups, self.param_groups, strict=True):
            group.update(without(saved, "params"))
            numbers = dict(zip(group["params"], saved["params"], strict=True))
            kept.update(numbers[p] for p in group["params"] if self.owners[p] == self.rank)
            local_groups.append({**saved, "params": [number for number in saved["params"] if number in kept]})
        state = {key: x for key, x in state_dict["state"].items() if key in kept or not isinstance(key, int)}
        self._local.load_state_dict({"state": state, "param_groups": local_groups})
        self.state = self._local.state


def algorithm_of(optimizer_cls: type, algorithms: tuple[str, ...]) -> str:
    """The first of these words in the name of the class or of a class that it derives from; "" where there is none."""
    key = optimizer_cls, algorithms
    if key not in _algorithms:
        names = " ".join(cls.__name__ for cls in optimizer_cls.__mro__)
        _algorithms[key] = next((word for word in algorithms if word in names), "")
    return _algorithms[key]


def merge_shares(shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins the shares of all ranks, given by rank, into the state dict that `optimizer_cls` itself would give."""
    entries = chain.from_iterable(share["state"].items() for share in shares)
    return {
        "state": dict(sorted(entries, key=lambda item: (isinstance(item[0], str), item[0]))),
        "param_groups": [without(group, "shard") for group in shares[0]["param_groups"]],
    }


def check_share(groups: Iterable[dict[str, Any]], rank: int, world_size: int) -> None:
    """Marks param groups with `shard`, [rank, world_size]. ValueError where they are marked as another rank's."""
    for group in groups:
        share = list(group.setdefault("shard", [rank, world_size]))
        values.hold(
            (
                share == [rank, world_size],
                f"the optimizer's state is the share of rank {share[0]} of {share[1]}, this is rank {rank} of"
                f" {world_size}: load each rank's own, or a whole one, by the wrapper's full_optimizer_state_dict() and"
                " load_optimizer_state_dict()",
            )
        )


def _lengths(groups: Iterable[dict[str, Any]]) -> list[int]:
    """The number of parameters in each param group."""
    return [len(group["params"]) for group in groups]


def without(group: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of the param group without this key."""
    return {key: value for key, value in group.items() if key != name}


def on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


State = dict[str, Any]  # an optimizer's state dict, or the state of one parameter in it


def whole_state(shares: Sequence[State], module: nn.Module, groups: Sequence[Any]) -> State:
    """The state dict of an optimizer over whole parameters, from `shares`, the state dicts over each rank's flat parts.

    The entry "left_out" of a flat part's state has for each of its parameters the number of steps that left it out. The
    parameter's "step" is the flat part's minus this number. A parameter that took part in no step gets no state, except
    under Adagrad (see `is_unused`).

    ValueError where the shares have another number of flat parts, or of param groups, than there are here, or where an
    entry has tensors inside. ValueError, too, where NAdam or ASGD has left a parameter out of some steps but not of
    all: the flat part's "mu_product" or "eta" is not that parameter's.
    """
    for share in shares:
        _check_states(share)
    flats, numbers = _laid_out(module, groups)
    held = sum(_lengths(shares[0]["param_groups"]))
    values.hold(
        (
            held == sum(map(len, flats)),
            f"the optimizer's state is of {held} flat parts, and the module has {sum(map(len, flats))}: dtypes,"
            " requires_grad, reads_rounded and reads_own_dtype must be what they were when it was wrapped",
        ),
        (
            all(
                not some.keys() & {"mu_product", "eta"} or {*some.get("left_out", ())} <= {0, int(some["step"])}
                for some in shares[0]["state"].values()
            ),
            "a parameter was left out of some steps, as no rank used it, and NAdam and ASGD keep of a whole flat part"
            " what differs for it then: let every forward use all parameters of a block or none",
        ),
    )
    state: dict[int, State] = {}
    for flat, params in enumerate(chain(*flats)):
        held_parts = [dict(share["state"][flat]) for share in shares if flat in share["state"]]
        left_out = held_parts[0].pop("left_out", [0] * len(params)) if held_parts else []
        states = [State() for _ in left_out]
        for name, value in held_parts[0].items() if held_parts else ():
            parts = [copy.deepcopy(value) for _ in params]  # copies, since optimizers add to a counter in place
            if isinstance(value, Tensor) and value.dim() and name != "step":  # flat, as the parts are
                joined = torch.cat([held_part[name] for held_part in held_parts])
                parts = [x.clone() for x in buckets.Layout.of(params).views(joined)]
            for state_of_p, piece, steps in zip(states, parts, left_out, strict=True):
                state_of_p[name] = piece - steps if name == "step" else piece
        state |= {
            numbers[p]: some
            for p, some, steps in zip(params, states, left_out, strict=False)
            if some and not (steps and is_unused(some))
        }
    return {"state": dict(sorted(state.items())), "param_groups": _groups(shares[0], groups)}


def flat_share(state: State, module: nn.Module, rank: int, world_size: int, groups: Sequence[Any]) -> State:
    """The state dict of an optimizer over this rank's flat parts, from `state`, the one over whole parameters.

    Entries that are not tensors of all elements, such as "step", are those of the flat part's parameter with the most
    steps. "left_out" says by how many steps each parameter is behind that one. A parameter that has no state, as it
    never had a gradient, gets zeros. ValueError where an entry has tensors inside of a dict or list, or for another
    number of param groups.
    """
    _check_states(state)
    flats, numbers = _laid_out(module, groups)
    scalars = {"step"} | {  # names of entries with one number for a whole parameter, such as NAdam's mu_product
        name
        for p, number in numbers.items()
        for name, value in state["state"].get(number, {}).items()
        if p.dim() and not getattr(value, "shape", ())
    }
    share: dict[int, State] = {}
    for flat, params in enumerate(chain(*flats)):
        held = [state["state"].get(numbers[p]) for p in params]
        steps = [int(some.get("step", 1)) if some else 0 for some in held]
        some = held[steps.index(max(steps))] or {}
        share[flat] = some | ({"left_out": [max(steps) - taken for taken in steps]} if min(steps) < max(steps) else {})
        for name, value in some.items():
            if isinstance(value, Tensor) and name not in scalars:
                layout = buckets.Layout.of(params)
                joined = value.new_zeros(world_size * layout.part(world_size))
                for state_of_p, view in zip(held, layout.views(joined), strict=True):
                    if state_of_p:
                        view.copy_(state_of_p[name])
                share[flat][name] = joined.chunk(world_size)[rank].clone()
    return {
        "state": {flat: some for flat, some in share.items() if some},
        "param_groups": [{**group, "shard": [rank, world_size]} for group in _groups(state, flats)],
    }


def _check_states(state: State) -> None:
    """ValueError for an entry with tensors inside of dicts or lists: nobody knows how they lie in a flat part."""
    entries = chain.from_iterable(some.items() for key, some in state["state"].items() if not isinstance(key, str))
    for name, x in entries:
        values.hold(
            (
                isinstance(x, Tensor) or not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(x)),
                f"the optimizer's state has tensors inside {name!r}, which fsdp cannot divide: let it keep each as an"
                " entry of its own",
            )
        )


def is_unused(state: State) -> bool:
    """True for the state of a parameter that no step has used: "step" is 0, or without a "step" all tensors are 0.

    It is never True for Adagrad's state. Only Adagrad has an entry "sum": it exists before any step, and begins with a
    value of the user's choice.
    """
    return "sum" not in state and not (
        state["step"] if "step" in state else any(isinstance(x, Tensor) and x.any() for x in state.values())
    )


def _laid_out(module: nn.Module, groups: Sequence[Any]) -> tuple[list[list[Any]], dict[Any, int]]:
    """(for each group its flat parts, each a list of its parameters; {parameter: its number})."""
    marks = list(map(set, groups))
    flats = list(chain.from_iterable(structure.flats_by_block(module, marks)))
    numbers = dict(zip(chain(*groups), count(), strict=False))
    return [[flat for flat in flats if flat[0] in mark] for mark in marks], numbers


def _groups(state: State, held: Sequence[Sequence[Any]]) -> list[State]:
    """The state's param groups, whose "params" are numbered anew, so that each group has as many as in `held`.

    ValueError for another number of groups than in `held`.
    """
    groups, numbers = state["param_groups"], count()
    values.hold(
        (len(groups) == len(held), f"the optimizer's state is of {len(groups)} param groups, and here are {len(held)}")
    )
    return [
        {**without(group, "shard"), "params": list(islice(numbers, len(some)))}
        for group, some in zip(groups, held, strict=True)
    ]
