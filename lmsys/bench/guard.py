"""What judges and measures, held fast: no row's file may replace it.

A row runs in the process that judges it, so Python lets it replace any function. What stood in the judges' places
before the first row's file was imported is remembered, compared after each row has run, and put back. What this cannot
see is said in the README, "What a hostile row can still do".
"""

import builtins
import inspect
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.cuda

PACKAGES = "lmsys", "benchmarks"
OWNERS = (
    *(builtins, math, random, statistics, time, sys),
    *(torch, torch.Tensor, torch.cuda, torch.cuda.Event, torch.cuda.Stream, torch.autograd, torch.linalg),
)
IGNORED = {"manual_seed", "__dict__", "__weakref__", "displayhook", "excepthook"}  # the first, torch.compile replaces


class Guard:
    """Remembers, when made, what every name of the owners stands for: callables and classes."""

    def __init__(self) -> None:
        self._known = {(id(owner), name): (owner, value) for owner, name, value in _names()}

    def mend(self) -> list[str]:
        """The names that stand for something else by now, which are put back."""
        changed = []
        for (_, name), (owner, value) in self._known.items():
            if inspect.getattr_static(owner, name, None) is value:
                continue
            changed.append(f"{owner.__name__}.{name}")
            if name in vars(owner):
                delattr(owner, name)  # where it is inherited, that is all
            if inspect.getattr_static(owner, name, None) is not value:
                setattr(owner, name, value)
        return changed


def _names() -> Iterator[tuple[Any, str, Any]]:
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]
    classes = [
        one for module in ours for one in vars(module).values() if isinstance(one, type) and _is_from(one, PACKAGES)
    ]
    for owner in (*OWNERS, *ours, *dict.fromkeys(classes)):
        for name in dir(owner):
            value = inspect.getattr_static(owner, name, None)
            if name not in IGNORED and (callable(value) or isinstance(value, property | staticmethod | classmethod)):
                yield owner, name, value


def _is_from(one: type, packages: tuple[str, ...]) -> bool:
    return one.__module__.partition(".")[0] in packages
