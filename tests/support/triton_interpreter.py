"""Triton's interpreter, made quicker: half of its time goes into questions with always the same answer."""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_dtypes: dict[str, Any] = {}
_languages: dict[int, list[Any]] = {}  # the modules of the language that a file of kernels sees, by its names
PARAMETERS = {"_get_np_dtype": ["tt_dtype"], "_patch_builtin": ["pkg", "builder", "scope"], "_patch_lang": ["fn"]}
_theirs = {name: getattr(interpreter, name, None) for name in PARAMETERS}


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """The interpreter's own looks through all names of the language, sorted, at each call of a function."""
    for name in _builtins(package):
        member = getattr(package, name)
        if core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def _patch_lang(function: Any) -> Any:
    """The interpreter's own patches the language again for each function that a kernel calls."""
    names = function.__globals__
    if id(names) not in _languages:
        _languages[id(names)] = [value for value in names.values() if value is tl or value is core]
    languages = _languages[id(names)]
    if languages and not any(core.is_builtin(language.load) for language in languages):
        return interpreter._LangPatchScope()
    return _theirs["_patch_lang"](function)


def _get_np_dtype(kind: Any) -> Any:
    """The interpreter's own makes a table of all dtypes at each call."""
    if kind.name not in _dtypes:
        _dtypes[kind.name] = _theirs["_get_np_dtype"](kind)
    return _dtypes[kind.name]


def quicken() -> None:
    """Does nothing to an interpreter of a Triton that has no such functions."""
    known = {name: [*inspect.signature(theirs).parameters] for name, theirs in _theirs.items() if theirs}
    if known != PARAMETERS:
        return
    interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang
    interpreter._get_np_dtype = _get_np_dtype
    # Sums and products of indices are not made again in 64 bits: memory of tests is small.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
