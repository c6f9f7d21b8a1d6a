"""Holds fast what judges and measures: no row may replace it.

A row runs in the process that judges it, so Python lets it replace any function. What stood in the judges' places
before the first row's file was imported is remembered, compared after each row has run, and put back. What this cannot
see is in docs/threats.md.
"""

import builtins
import json
import math
import operator
import random
import statistics
import sys
import time
import types
from typing import Any

import torch
import torch.cuda

PACKAGES = "lmsys", "benchmarks", "dev"
OWNERS = (
    *(builtins, json, math, operator, random, statistics, time, sys, random.Random),
    *(torch, torch.Tensor, torch.cuda, torch.cuda.Event, torch.cuda.Stream, torch.autograd, torch.linalg),
    *(torch.nn.functional, torch.profiler),
)
IGNORED = {"__dict__", "__weakref__", "__builtins__", "__cached__", "displayhook", "excepthook", "manual_seed"}
COMPILED = "__compiled_fn_", "__resume_at_"  # what torch.compile puts into the modules of what it compiles, and removes
KINDS: Any = types.FunctionType | types.BuiltinFunctionType | type | property | staticmethod | classmethod
INHERITED = torch.cuda.Event, torch.cuda.Stream, torch.Tensor  # what these inherit must not be hidden, either
_ABSENT = object()


class Guard:
    """Remembers, when made, the functions and classes that each owner holds, and the code of our own functions."""

    def __init__(self) -> None:
        _settle()
        self._known = [(owner, dict(_names(owner))) for owner in _owners()]
        functions = {id(f): f for _, names in self._known for f in map(_function, names.values()) if f is not None}
        self._code = [(f, f.__code__, f.__defaults__) for f in functions.values()]

    def mend(self) -> list[str]:
        """The names that stand for something else by now, which are put back."""
        changed = []
        for owner, names in self._known:
            now = vars(owner)
            for name, value in names.items():
                if now.get(name, _ABSENT) is not value:
                    changed.append(f"{owner.__name__}.{name}")
                    setattr(owner, name, value)
            if owner in INHERITED:
                for name in [one for one in now if one not in names and one not in IGNORED]:
                    if isinstance(now[name], KINDS):
                        changed.append(f"{owner.__name__}.{name}")
                        delattr(owner, name)
        for function, code, defaults in self._code:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                changed.append(f"the code of {function.__qualname__}")
                function.__code__, function.__defaults__ = code, defaults
        return changed


def _settle() -> None:
    """torch replaces `step` of an optimizer's class when it makes the first one: here that is done before."""
    for one in _classes(_modules()):
        if issubclass(one, torch.optim.Optimizer):
            one._patch_step_function(one.__new__(one))


def _owners() -> list[Any]:
    ours = _modules()
    return [*OWNERS, *ours, *_classes(ours)]


def _modules() -> list[types.ModuleType]:
    return [module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]


def _classes(ours: list[types.ModuleType]) -> list[Any]:
    found = [one for module in ours for one in vars(module).values() if isinstance(one, type)]
    return [one for one in dict.fromkeys(found) if one.__module__.partition(".")[0] in PACKAGES]


def _names(owner: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in IGNORED and not name.startswith(COMPILED) and isinstance(value, KINDS)
    }


def _function(value: Any) -> types.FunctionType | None:
    """The function of ours that it is or holds."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    is_ours = isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] in PACKAGES
    return value if is_ours else None
