"""Triton's interpreter, made quicker: a third of its time goes into questions with always the same answer."""

import inspect
from functools import cache
from typing import Any

from triton.language import core
from triton.runtime import interpreter


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """The interpreter's own looks through all names of the language, sorted, at each call of a function."""
    for name in _builtins(package):
        member = getattr(package, name)
        if core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def quicken() -> None:
    """Does nothing to an interpreter of a Triton that has no such function."""
    theirs = getattr(interpreter, "_patch_builtin", None)
    if theirs and list(inspect.signature(theirs).parameters)[:3] == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = _patch_builtin
