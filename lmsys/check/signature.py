"""How to call what people write: which of its parameters is which."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lmsys.attention.contract import is_function

Roles = Mapping[str, Sequence[str]]  # by role the names that parameters of it have


def is_module(implementation: Any) -> bool:
    """True for a module's class."""
    return inspect.isclass(implementation) and issubclass(implementation, nn.Module)


def parameters_of(implementation: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a call by name: an autograd Function's without ctx, for a module's class its forward's."""
    if is_module(implementation) or is_function(implementation):
        return dict(list(inspect.signature(implementation.forward).parameters.items())[1:])
    call = implementation.forward if isinstance(implementation, nn.Module) else implementation
    return dict(inspect.signature(call).parameters)


MARKS = {  # by kind: names of which a parameter has one; in a class also those that it is built with
    "loss": {"target", "targets", "label", "labels"},
    "rotary": {"positions", "token_positions", "position_ids", "cos"},
    "swiglu": {"gate", "w1", "w_gate"},
    "norm": {"eps", "epsilon", "variance_epsilon"},
}


def kind_of(implementation: Any) -> str | None:
    """The kind of function of tensors that an implementation is, by the names of its parameters; None for others."""
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
    """A function, and the role of each parameter that has one, in their order."""

    function: Callable[..., Any]
    roles: Mapping[str, str]
    by_place: bool  # it takes no keywords: an autograd Function

    def has(self, role: str) -> bool:
        return role in self.roles.values()

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Calls it with the values of its roles. The first result, where it returns several."""
        given = {name: values[role] for name, role in self.roles.items() if role in values}
        result = self.function(*given.values()) if self.by_place else self.function(**given)
        return result[0] if isinstance(result, tuple) else result


def called(implementation: Any, roles: Roles) -> Called:
    """The implementation as a function of its roles. ValueError for a parameter without a default that has no role."""
    parameters, positional = parameters_of(implementation), is_function(implementation)
    by_place = positional or any(x.kind is x.POSITIONAL_ONLY for x in parameters.values())
    return Called(
        implementation.apply if positional else implementation, _roles(parameters, roles, positional), by_place
    )


def built(implementation: Any, roles: Roles, values: Mapping[str, Any]) -> nn.Module:
    """A module of its class, built with the values of its roles. ValueError as `called` has it."""
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
        elif positional:
            break  # what comes behind it keeps its default
    return given
