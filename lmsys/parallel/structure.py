"""A module as it was when it was wrapped, groups of its parameters by name, and which optimizer holds which of them."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

Groups = Callable[[str, nn.Parameter], dict[str, Any]]  # what an optimizer is to do otherwise with a parameter


class Structure:
    """Which modules and parameters `module` holds now, and which of them are trained."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._held = [
            (entries, list(entries.items())) for one in module.modules() for entries in (one._parameters, one._modules)
        ]
        self._parameters = _parameters(module)
        self._trained = [(p, p.requires_grad) for p in module.parameters()]

    def is_as_it_was(self) -> bool:
        """Compares identities only, since it runs in every forward: some 25 µs for 200 parameters."""
        for entries, before in self._held:
            if len(entries) != len(before):
                return False
            for name, one in before:
                if entries.get(name) is not one:
                    return False
        return all(p.requires_grad is trained for p, trained in self._trained)

    def change(self) -> str:
        """The first difference in words; empty where there is none."""
        now = _parameters(self.module)
        for name, p in self._parameters.items():
            if name not in now:
                return f"the parameter {name} was removed"
            if now[name] is not p:
                return f"the parameter {name} was replaced"
        if added := sorted(now.keys() - self._parameters.keys()):
            return f"the parameter {added[0]} was added"
        names = {id(p): name for name, p in now.items()}
        other = [p for p, trained in self._trained if p.requires_grad is not trained]
        how = "set to be trained" if other and other[0].requires_grad else "frozen"
        return f"the parameter {names[id(other[0])]} was {how}" if other else ""


def grouped(module: nn.Module, groups: Groups | None) -> list[Any]:
    """The trained parameters as an optimizer takes them, those of equal options in a group; None: all, in no groups."""
    if groups is None:
        return list(module.parameters())
    found: dict[str, dict[str, Any]] = {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            options = groups(name, p)
            found.setdefault(repr(sorted(options.items())), {**options, "params": []})["params"].append(p)
    return list(found.values())


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """By every name: a tied one has several."""
    return dict(module.named_parameters(remove_duplicate=False))


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
