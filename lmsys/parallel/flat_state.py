"""An optimizer's state over fsdp's flat parts, as its state over whole parameters, and back.

Both number parameters as the optimizer of `make_optimizer` has them, in the same param groups: an element-wise
optimizer goes on with either as if nothing had changed. `groups` are the parameters of each; None: all are in one.
"""

import copy
from collections.abc import Sequence
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor, nn

from lmsys.parallel.packing import Layout
from lmsys.parallel.sharded_optimizer import without
from lmsys.parallel.units import flats_by_block

State = dict[str, Any]


def whole_state(shares: Sequence[State], module: nn.Module, groups: Sequence[Any] | None = None) -> State:
    """The state dicts of all ranks' parts of `module` as that of an optimizer over module.parameters().

    ValueError for those of another number of parts than the module has.
    """
    groups, flats, numbers = _laid_out(module, groups)
    held = sum(len(group["params"]) for group in shares[0]["param_groups"])
    if held != sum(map(len, flats)):
        raise ValueError(
            f"the optimizer's state is of {held} flat parts, and the module has {sum(map(len, flats))}: dtypes,"
            " requires_grad, reads_rounded and reads_own_dtype must be what they were when it was wrapped"
        )
    state: dict[int, State] = {}
    for flat, params in enumerate(chain(*flats)):
        found = [share["state"][flat] for share in shares if flat in share["state"]]
        for name, value in found[0].items() if found else ():
            parts = [copy.deepcopy(value) for _ in params]  # a counter is added to in place
            if _has_elements(name, value):
                joined = torch.cat([one[name] for one in found])
                parts = [x.clone() for x in Layout.of(params).views(joined)]
            for p, part in zip(params, parts, strict=True):
                state.setdefault(numbers[id(p)], {})[name] = part
    return {"state": dict(sorted(state.items())), "param_groups": _groups(shares[0], groups)}


def flat_share(
    state: State, module: nn.Module, rank: int, world_size: int, groups: Sequence[Any] | None = None
) -> State:
    """The state dict of an optimizer over module.parameters() as that over this rank's parts.

    A parameter without state, since it has never had a gradient, has zeros there.
    """
    groups, flats, numbers = _laid_out(module, groups)
    found: dict[int, State] = {}
    for flat, params in enumerate(chain(*flats)):
        held = [state["state"].get(numbers[id(p)]) for p in params]
        some: State = next((one for one in held if one), {})
        if some:
            found[flat] = dict(some)
        for name, value in some.items():
            if _has_elements(name, value):
                layout = Layout.of(params)
                joined = value.new_zeros(world_size * layout.part(world_size))
                for one, view in zip(held, layout.views(joined), strict=True):
                    if one:
                        view.copy_(one[name])
                found[flat][name] = joined.chunk(world_size)[rank].clone()
    own = [{**group, "shard": [rank, world_size]} for group in _groups(state, flats)]
    return {"state": found, "param_groups": own}


def _has_elements(name: str, value: Any) -> bool:
    """True for what there is of each element, such as moments; False for a counter of steps."""
    return isinstance(value, Tensor) and name != "step"


def _laid_out(module: nn.Module, groups: Sequence[Any] | None) -> tuple[Sequence[Any], list[list[Any]], dict[int, int]]:
    """(the parameters by group, the flat parts by group, the number of each parameter by its id)"""
    groups = groups or [list(module.parameters())]
    marks = [{id(p) for p in params} for params in groups]
    flats = [flat for unit in flats_by_block(module, *marks) for flat in unit]
    numbers = {id(p): number for number, p in enumerate(chain(*groups))}
    return groups, [[flat for flat in flats if id(flat[0]) in mark] for mark in marks], numbers


def _groups(state: State, held: Sequence[Sequence[Any]]) -> list[State]:
    """The state's groups, which hold so many. ValueError where there are others."""
    groups, numbers = state["param_groups"], count()
    if len(groups) != len(held):
        raise ValueError(f"the optimizer's state is of {len(groups)} param groups, and here are {len(held)}")
    return [
        {**without(group, "shard"), "params": list(islice(numbers, len(some)))}
        for group, some in zip(groups, held, strict=True)
    ]
