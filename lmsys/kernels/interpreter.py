"""Triton's interpreter, mended and made about twice as quick: it asks questions that always have the same answer.

Patches hold for an interpreter whose functions have the parameters known here; any other stays as it is.
"""

import inspect
from functools import cache
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from lmsys.kernels.tritons import version

PARAMETERS = {"_get_np_dtype": ["tt_dtype"], "_patch_builtin": ["pkg", "builder", "scope"], "_patch_lang": ["fn"]}
_theirs: dict[str, Any] = {name: getattr(interpreter, name, None) for name in PARAMETERS}
_patch_tensor: Any = getattr(interpreter, "_patch_lang_tensor", None)
_dtypes: dict[str, Any] = {}
# The names of a file of kernels, and the modules of the language among them, by the address of the former: they are
# kept, so that no other file's get that address.
_languages: dict[int, tuple[Any, list[Any]]] = {}


def mend() -> None:
    """Changes the interpreter of this process."""
    if version().startswith("3.6."):  # reads an index in a way that numpy 2.4 refuses; 3.7 does as below
        interpreter._patch_lang_tensor = _patch_index
    if {name: [*inspect.signature(theirs).parameters] for name, theirs in _theirs.items() if theirs} == PARAMETERS:
        interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang
        interpreter._get_np_dtype = _get_np_dtype


def _patch_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


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
        _languages[id(names)] = names, [value for value in names.values() if value is tl or value is core]
    _, languages = _languages[id(names)]
    if languages and not any(core.is_builtin(language.load) for language in languages):
        return interpreter._LangPatchScope()
    return _theirs["_patch_lang"](function)


def _get_np_dtype(kind: Any) -> Any:
    """The interpreter's own makes a table of all dtypes at each call."""
    if kind.name not in _dtypes:
        _dtypes[kind.name] = _theirs["_get_np_dtype"](kind)
    return _dtypes[kind.name]
