"""Finds out how to call a function that a user wrote, by the names of its parameters.

A *role* is the purpose of a parameter, such as "targets"; the parameter may have one of several usual names, such as
"y". `lmsys.check`, for losses, norms, SwiGLU and rotary embeddings, and `lmsys.attention.contract`, for attention, have
tables of the names that each role's parameter may have: to accept another name, add it to such a table. These modules
call `called` for a function, and `built` for a class derived from nn.Module.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lmsys.values import hold

Roles = Mapping[str, Sequence[str]]  # by role, the names that its parameter may have: {"targets": ("targets", "y")}


def is_function(implementation: Any) -> bool:
    """True for an autograd Function."""
    return isinstance(implementation, type(torch.autograd.Function))  # the metaclass of every such class


def is_module(implementation: Any) -> bool:
    """True for a class derived from nn.Module."""
    return inspect.isclass(implementation) and issubclass(implementation, torch.nn.Module)


def parameters_of(implementation: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a call of a function, an autograd Function, a module or a module's class, by name.

    For an autograd Function, or a module's class, they are those of its forward without the first one, ctx or self. The
    forward of a Function with a `setup_context` has no ctx, so all of its parameters are taken.
    """
    is_set_up = (
        is_function(implementation) and implementation.setup_context is not torch.autograd.Function.setup_context
    )
    if (is_module(implementation) or is_function(implementation)) and not is_set_up:
        return dict(list(inspect.signature(implementation.forward).parameters.items())[1:])
    call = implementation.forward if isinstance(implementation, torch.nn.Module) or is_set_up else implementation
    return dict(inspect.signature(call).parameters)


def names_of(parameters: Iterable[str]) -> set[str]:
    """The names of parameters as they are compared with names of roles: lower case, no underscores at the ends."""
    return {name.strip("_").lower() for name in parameters}


@dataclass(frozen=True)
class Called:
    """A function that is called with values by role.

    roles   {parameter name: role}, in the order of the signature
    placed  {parameter name: default} of the parameters that get values by position: positional-only ones, and all of an
            autograd Function, whose `apply` takes no keywords
    """

    function: Callable[..., Any]
    roles: Mapping[str, str]
    placed: Mapping[str, Any] = field(default_factory=dict)

    def has(self, role: str) -> bool:
        """True if a parameter of the function has this role."""
        return role in self.roles.values()

    def __call__(self, values: Mapping[str, Any], *first: Any) -> Any:
        """Calls the function.

        values  {role: value}; a value whose role no parameter has is left out
        first   positional arguments that come before them
        """
        given = {name: values[role] for name, role in self.roles.items() if role in values}
        # All positional parameters before the last one with a value must be passed: those without one get defaults.
        last = max((place for place, name in enumerate(self.placed, start=1) if name in given), default=0)
        placed = [given.pop(name, default) for name, default in list(self.placed.items())[:last]]
        return self.function(*first, *placed, **given)


def called(implementation: Any, roles: Roles, parameters: Mapping[str, inspect.Parameter] | None = None) -> Called:
    """The implementation as a `Called`. ValueError for a parameter that has neither a role nor a default.

    parameters  those of its parameters that will get values; None: all
    """
    parameters = parameters_of(implementation) if parameters is None else parameters
    all_placed = is_function(implementation)
    placed = {name: x.default for name, x in parameters.items() if all_placed or x.kind is x.POSITIONAL_ONLY}
    return Called(implementation.apply if all_placed else implementation, roles_of(parameters, roles), placed)


def built(implementation: Any, roles: Roles, values: Mapping[str, Any]) -> torch.nn.Module:
    """A module of the class `implementation`. ValueError as in `called`.

    roles   the names that parameters of the constructor may have
    values  {role: argument}, for every role of `roles`
    """
    return called(implementation, roles, inspect.signature(implementation).parameters)(values)


def roles_of(parameters: Mapping[str, inspect.Parameter], roles: Roles) -> dict[str, str]:
    """{parameter name: role}, for parameters with a role. ValueError if another parameter has no default."""
    known = {name: role for role, names in roles.items() for name in names}
    usual = "; ".join(f"{role}: {', '.join(names)}" for role, names in roles.items())
    of_names = {name: known.get(name.strip("_").lower()) for name in parameters}
    for name, x in parameters.items():
        is_optional = x.default is not x.empty or x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
        hold((of_names[name] or is_optional, f"parameter {name!r} has no default and no known name ({usual})"))
    return {name: role for name, role in of_names.items() if role}
