"""Finds out how to call a function that somebody wrote: its parameters are known by usual names.

The modules of the kinds list the names of each role, and call `called` and `built`. `kinds.py` tells the kind of an
implementation by `kind_of`, from the names in MARKS.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lmsys.attention.contract import is_function

Roles = Mapping[str, Sequence[str]]  # by role, such as "targets", the names that its parameter may have


def is_module(implementation: Any) -> bool:
    """True for a class derived from nn.Module."""
    return inspect.isclass(implementation) and issubclass(implementation, nn.Module)


def parameters_of(implementation: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a call, by name.

    For an autograd Function, or a module's class, they are those of its forward without ctx or self.
    """
    if is_module(implementation) or is_function(implementation):
        return dict(list(inspect.signature(implementation.forward).parameters.items())[1:])
    call = implementation.forward if isinstance(implementation, nn.Module) else implementation
    return dict(inspect.signature(call).parameters)


# By kind: a parameter of the call, or of the class's constructor, has one of these names. The first kind that fits
# wins.
MARKS = {
    "loss": {"target", "targets", "label", "labels"},
    "rotary": {"positions", "token_positions", "position_ids", "cos"},
    "swiglu": {"gate", "w1", "w_gate"},
    "norm": {"eps", "epsilon", "variance_epsilon"},
}


def kind_of(implementation: Any) -> str | None:
    """The kind in MARKS that an implementation is, by the names of its parameters; None if it is none of them."""
    if not callable(implementation):
        return None
    names = names_of(parameters_of(implementation))
    if is_module(implementation):
        names |= names_of(inspect.signature(implementation).parameters)
    others = names & {"params", "module"} or {"q", "k", "v"} <= names  # optimizers, strategies, attention
    return None if others else next((kind for kind, marks in MARKS.items() if names & marks), None)


def names_of(parameters: Iterable[str]) -> set[str]:
    return {name.strip("_").lower() for name in parameters}


@dataclass(frozen=True)
class Called:
    """A function that is called by roles.

    roles     {parameter name: role}, in the order of the signature. Parameters without a role keep their defaults
    by_place  names of the parameters that are given by place, not by keyword: all of an autograd Function
    """

    function: Callable[..., Any]
    roles: Mapping[str, str]
    by_place: Collection[str]

    def has(self, role: str) -> bool:
        return role in self.roles.values()

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Calls the function with values by role. If it returns a tuple, the first result."""
        given = {name: values[role] for name, role in self.roles.items() if role in values}
        placed = [given.pop(name) for name in list(given) if name in self.by_place]
        result = self.function(*placed, **given)
        return result[0] if isinstance(result, tuple) else result


def called(implementation: Any, roles: Roles) -> Called:
    """The implementation, to be called by roles. ValueError for a parameter that has neither a role nor a default."""
    parameters, positional = parameters_of(implementation), is_function(implementation)
    by_place = [name for name, x in parameters.items() if positional or x.kind is x.POSITIONAL_ONLY]
    return Called(
        implementation.apply if positional else implementation, _roles(parameters, roles, positional), by_place
    )


def built(implementation: Any, roles: Roles, values: Mapping[str, Any]) -> nn.Module:
    """A module of the class `implementation`, constructed with values by role. ValueError as in `called`."""
    return implementation(
        **{name: values[role] for name, role in _roles(inspect.signature(implementation).parameters, roles).items()}
    )


def _roles(parameters: Mapping[str, inspect.Parameter], roles: Roles, positional: bool = False) -> dict[str, str]:
    known, given = {name: role for role, names in roles.items() for name in names}, {}
    for name, parameter in parameters.items():
        usual = name.strip("_").lower()
        if usual in known:
            given[name] = known[usual]
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            names = "; ".join(f"{role}: {', '.join(some)}" for role, some in roles.items())
            raise ValueError(f"parameter {name!r} has no default and no known name ({names})")
        elif positional or parameter.kind is parameter.POSITIONAL_ONLY:
            break  # this parameter and those after it keep their defaults
    return given
