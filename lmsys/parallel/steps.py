"""Strategies look at every optimizer before its step: it may hold parameters that only another one can step."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_watching: "weakref.WeakSet[Any]" = weakref.WeakSet()
_hooks: list[Any] = []


def watch(strategy: nn.Module) -> None:
    """From now on `strategy.before_step(optimizer)` is called before each step of every optimizer of this process."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    _watching.add(strategy)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for strategy in list(_watching):
        strategy.before_step(optimizer)


class Among:
    """Tells whether an optimizer holds any of some parameters; each optimizer is looked through once for its groups."""

    def __init__(self, params: Iterable[nn.Parameter]):
        self._ids = frozenset(map(id, params))
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def held_by(self, optimizer: Optimizer) -> bool:
        count = len(optimizer.param_groups)
        if self._known.get(optimizer, (None, False))[0] != count:
            held = any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])
            self._known[optimizer] = count, held
        return self._known[optimizer][1]
