"""Triton's interpreter, made quicker: two thirds of its time go into questions with always the same answer."""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

from triton.language import core
from triton.runtime import interpreter


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """The interpreter's own looks through all names of the language, sorted, at each call of a function.

    Within another function they are patched already.
    """
    names = _builtins(package)
    if names and core.is_builtin(getattr(package, names[0])):
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


_theirs, _dtypes = interpreter._get_np_dtype, {}


def _get_np_dtype(kind: Any) -> Any:
    """The interpreter's own makes a table of all dtypes at each call."""
    if kind.name not in _dtypes:
        _dtypes[kind.name] = _theirs(kind)
    return _dtypes[kind.name]


def quicken() -> None:
    """Does nothing to an interpreter of a Triton that has no such function."""
    theirs = getattr(interpreter, "_patch_builtin", None)
    if theirs and list(inspect.signature(theirs).parameters)[:3] == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = _patch_builtin
        interpreter._get_np_dtype = _get_np_dtype
        # Sums and products of indices are not made again in 64 bits: memory of tests is small.
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
