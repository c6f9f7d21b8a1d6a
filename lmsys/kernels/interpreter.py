"""Patches for Triton's interpreter (TRITON_INTERPRET=1): a fix for numpy 2.4, and caches that make it twice as fast.

When `lmsys/kernels/launch.py` is imported with TRITON_INTERPRET=1, it calls `mend`. The fix is applied with Triton 3.6
alone. The caches replace functions of the interpreter, all or none: only if each has the parameters in PARAMETERS. To
cache another function of the interpreter, add a replacement here, its parameters to PARAMETERS, and an assignment to
`mend`.
"""

import inspect
from functools import cache
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from lmsys.kernels.tritons import version

# By the name of a function of the interpreter that a cache replaces: the parameters that the function must have.
PARAMETERS = {"_get_np_dtype": ["tt_dtype"], "_patch_builtin": ["pkg", "builder", "scope"], "_patch_lang": ["fn"]}
# The interpreter's own functions, which are called by those that replace them.
_theirs: dict[str, Any] = {name: getattr(interpreter, name, None) for name in PARAMETERS}
_patch_tensor: Any = getattr(interpreter, "_patch_lang_tensor", None)
_dtypes: dict[str, Any] = {}  # numpy's dtypes by the names of Triton's
# By the id of a kernel file's dict of global names: (this dict, the modules of Triton's language in it). The dict is
# kept alive, so that the dict of another file cannot get the same id.
_languages: dict[int, tuple[Any, list[Any]]] = {}


def mend() -> None:
    """Patches the interpreter of this process."""
    # numpy 2.4 refuses how Triton 3.6 reads an index; Triton 3.7 reads it as `_patch_index` does.
    if version().startswith("3.6."):
        interpreter._patch_lang_tensor = _patch_index
    if {name: [*inspect.signature(theirs).parameters] for name, theirs in _theirs.items() if theirs} == PARAMETERS:
        interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang
        interpreter._get_np_dtype = _get_np_dtype


def _patch_index(tensor: Any, scope: Any) -> None:
    """Replaces the interpreter's `_patch_lang_tensor`, whose way to read a tensor of one element as an index fails."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


@cache
def _builtins(package: Any) -> list[str]:
    """The names of a module's functions that belong to Triton's language."""
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Replaces the interpreter's `_patch_builtin`, which lists and sorts all names of the language at each call."""
    for name in _builtins(package):
        member = getattr(package, name)
        if core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def _patch_lang(function: Any) -> Any:
    """Replaces the interpreter's `_patch_lang`, which patches the language again for each function that is called.

    If the language is patched already, there is nothing to do, and nothing to undo later: the scope that it returns,
    which lists what is to be undone, is empty.
    """
    names = function.__globals__
    if id(names) not in _languages:
        _languages[id(names)] = names, [value for value in names.values() if value is tl or value is core]
    _, languages = _languages[id(names)]
    # Where the language is patched already, its `load` is no builtin any more.
    if languages and not any(core.is_builtin(language.load) for language in languages):
        return interpreter._LangPatchScope()
    return _theirs["_patch_lang"](function)


def _get_np_dtype(kind: Any) -> Any:
    """Replaces the interpreter's `_get_np_dtype`, which builds a table of all dtypes at each call."""
    if kind.name not in _dtypes:
        _dtypes[kind.name] = _theirs["_get_np_dtype"](kind)
    return _dtypes[kind.name]
