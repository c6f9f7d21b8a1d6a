"""Which algorithm an optimizer claims to be, by its class name and the parameters of its constructor."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

OTHERS = "AdaBelief", "Adafactor", "Adamax", "Adan", "Lamb", "LAMB", "Lion", "NAdam", "RAdam", "SparseAdam"
DEFAULTS: Mapping[str, Any] = {
    "lr": 0.1,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "nesterov": False,
}


@dataclass(frozen=True)
class Claim:
    """The algorithm that an optimizer is held to, and what its constructor takes.

    algorithm  "AdamW", "Adam" or "SGD", as torch.optim has them
    why        how this is known
    settings   those of DEFAULTS that its constructor takes
    masters    settings that make it keep float32 masters; None where it claims none
    """

    algorithm: str
    why: str
    settings: frozenset[str]
    masters: Mapping[str, Any] | None = field(default=None, hash=False)

    def __str__(self) -> str:
        return f"held to {self.algorithm}, as torch.optim.{self.algorithm}: {self.why}"

    @property
    def plain(self) -> Callable[..., Optimizer]:
        """The optimizer of torch that says what a dtype loses."""
        return getattr(torch.optim, self.algorithm)

    def taken(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the settings that the constructor takes."""
        return {name: x for name, x in settings.items() if name in self.settings}


def claim_of(optimizer: Any) -> Claim:
    """ValueError for one that is neither AdamW, Adam nor SGD, with what it takes.

    AdamW: takes betas, and has "AdamW" in its name. Adam: takes betas. SGD: takes momentum, or "SGD" is in its name.
    """
    parameters, name = _parameters(optimizer), optimizer.__name__
    if other := next((algorithm for algorithm in OTHERS if algorithm in name), None):
        raise ValueError(f"{name} looks like {other}: AdamW, Adam and SGD can be checked")
    if "betas" in parameters and "adamw" in name.lower():
        algorithm, why = "AdamW", "it takes betas, and AdamW is in its name"
    elif "betas" in parameters:
        algorithm = "Adam"
        why = "it takes betas; with AdamW in its name it would be held to decoupled weight decay"
    elif "momentum" in parameters or "sgd" in name.lower():
        algorithm, why = "SGD", f"it takes {'momentum' if 'momentum' in parameters else 'no betas'}"
    else:
        takes = ", ".join(parameters) or "no settings"
        raise ValueError(f"{name} takes {takes}: neither betas (AdamW, Adam) nor momentum (SGD)")
    return Claim(algorithm, why, frozenset(parameters) & frozenset(DEFAULTS), _masters(name, parameters))


def _parameters(optimizer: Any) -> dict[str, inspect.Parameter]:
    """Those of the constructor behind `self` and the parameters; behind **kwargs those of the class it derives from."""
    settings: dict[str, inspect.Parameter] = {}
    for cls in [cls for cls in optimizer.__mro__ if "__init__" in vars(cls)]:
        parameters = list(inspect.signature(cls.__init__).parameters.values())
        named = [x for x in parameters[2:] if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]
        settings = {x.name: x for x in named} | settings
        if all(x.kind != x.VAR_KEYWORD for x in parameters):
            break
    return settings


def _masters(name: str, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any] | None:
    """An empty dict where the class keeps them unasked: its name says so."""
    for setting, parameter in parameters.items():
        if "master" in setting.lower():
            return {setting: True} if isinstance(parameter.default, bool) else {}
    return {} if "master" in name.lower() else None
