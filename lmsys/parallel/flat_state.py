"""An optimizer's state over fsdp's flat parts, as its state over whole parameters, and back.

Both number parameters as the optimizer of `make_optimizer` has them, in one param group: an element-wise optimizer goes
on with either as if nothing had changed.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmsys.parallel.packing import Layout
from lmsys.parallel.units import flats_by_block

State = dict[str, Any]


def whole_state(shares: Sequence[State], module: nn.Module) -> State:
    """The state dicts of all ranks' parts of `module` as that of an optimizer over module.parameters().

    ValueError for those of another number of parts than the module has.
    """
    numbers, flats = _numbers(module), _flats(module)
    held = sum(len(group["params"]) for group in shares[0]["param_groups"])
    if held != len(flats):
        raise ValueError(
            f"the optimizer's state is of {held} flat parts, and the module has {len(flats)}: dtypes, requires_grad,"
            " reads_rounded and reads_own_dtype must be what they were when it was wrapped"
        )
    state: dict[int, State] = {}
    for flat, params in enumerate(flats):
        found = [share["state"][flat] for share in shares if flat in share["state"]]
        for name, value in found[0].items() if found else ():
            parts = [copy.deepcopy(value) for _ in params]  # a counter is added to in place
            if _has_elements(name, value):
                joined = torch.cat([one[name] for one in found])
                parts = [x.clone() for x in Layout.of(params).views(joined)]
            for p, part in zip(params, parts, strict=True):
                state.setdefault(numbers[id(p)], {})[name] = part
    return {"state": dict(sorted(state.items())), "param_groups": _groups(shares[0], len(numbers))}


def flat_share(state: State, module: nn.Module, rank: int, world_size: int) -> State:
    """The state dict of an optimizer over module.parameters() as that over this rank's parts.

    A parameter without state, since it has never had a gradient, has zeros there.
    """
    numbers, flats = _numbers(module), _flats(module)
    found: dict[int, State] = {}
    for flat, params in enumerate(flats):
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
    return {"state": found, "param_groups": _groups(state, len(flats))}


def _has_elements(name: str, value: Any) -> bool:
    """True for what there is of each element, such as moments; False for a counter of steps."""
    return isinstance(value, Tensor) and name != "step"


def _flats(module: nn.Module) -> list[list[nn.Parameter]]:
    return [params for unit in flats_by_block(module) for params in unit]


def _numbers(module: nn.Module) -> dict[int, int]:
    return {id(p): number for number, p in enumerate(module.parameters())}


def _groups(state: State, count: int) -> list[State]:
    """ValueError where parameters are in several groups: a flat part holds those of all."""
    groups = state["param_groups"]
    if len(groups) != 1:
        raise ValueError(
            f"the optimizer has {len(groups)} param groups; between flat parts and whole parameters one goes"
        )
    return [{**groups[0], "params": list(range(count))}]
