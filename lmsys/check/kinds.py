"""The kinds of implementation that can be checked, and which kind a function or class is."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from lmsys.attention import ATTENTION
from lmsys.check import signature
from lmsys.check.question import Options, Question
from lmsys.parallel import STRATEGIES
from lmsys.registry import Entry, Table

LIMIT_S = 600.0


@dataclass(frozen=True)
class Kind:
    """A kind of implementation.

    module  its questions: `questions(entry, options)`, and perhaps a last `remark(entry, options)`
    table   the rows that a name can mean
    """

    name: str
    module: str
    table: Table

    def questions(self, entry: Entry, options: Options) -> Iterator[Question]:
        yield from importlib.import_module(self.module).questions(entry, options)

    def remark(self, entry: Entry, options: Options) -> str | None:
        said: Callable[..., str] | None = getattr(importlib.import_module(self.module), "remark", None)
        return said(entry, options) if said else None


def _kind(name: str, table: Table | None = None) -> Kind:
    return Kind(name, f"lmsys.check.{name}", table or Table(name, []))


KINDS = {
    kind.name: kind
    for kind in (
        _kind("attention", ATTENTION),
        _kind("strategy", STRATEGIES),
        *map(_kind, ("sharded_optimizer", "optimizer", "loss", "norm", "rotary", "swiglu")),
    )
}
OF_SHARDED_OPTIMIZERS = {"optimizer_cls", "optimizer_class"}  # the parameter by which they are given torch's


def find(target: str, kind: str | None) -> tuple[Kind, Entry]:
    """The kind and the row of a name or of path.py:attribute. ValueError, with the kinds there are, for others."""
    if kind is None and ".py" not in target:
        kind = next((one.name for one in KINDS.values() if target in list(one.table)), "attention")
    if kind is not None:
        found = KINDS[kind]
        (entry,) = found.table.select([target])
        return found, entry
    (entry,) = Table("implementation", []).select([target])
    return find(target, kind_of(entry.load()))


def kind_of(implementation: Any) -> str:
    """The kind that an implementation looks like, by its class or the names of its parameters."""
    with suppress(TypeError, ValueError):
        if OF_SHARDED_OPTIMIZERS & inspect.signature(implementation).parameters.keys():
            return "sharded_optimizer"
    if inspect.isclass(implementation) and issubclass(implementation, torch.optim.Optimizer):
        return "optimizer"
    if kind := signature.kind_of(implementation):
        return kind
    if signature.is_function(implementation):
        return "attention"
    names = list(inspect.signature(implementation).parameters)
    if hasattr(implementation, "finish_gradient_synchronization") or names[:1] == ["module"]:
        return "strategy"
    if len(names) >= 3 and not inspect.isclass(implementation):  # q, k, v by any names
        return "attention"
    raise ValueError(f"it cannot be told what {getattr(implementation, '__name__', implementation)!r} is: use --kind")
