"""Which algorithm an optimizer claims to be, the runs that it is asked for, and running them."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from lmsys import draws, values
from lmsys.check.optimizer_formula import DEFAULTS, Run, Settings, Trace
from lmsys.extremes.model import SIZES, extreme

OTHERS = "AdaBelief", "Adafactor", "Adamax", "Adan", "Lamb", "LAMB", "Lion", "NAdam", "RAdam", "SparseAdam"


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
    values.hold(
        (
            not (other := next((algorithm for algorithm in OTHERS if algorithm in name), None)),
            f"{name} looks like {other}: AdamW, Adam and SGD can be checked",
        )
    )
    if "betas" in parameters and "adamw" in name.lower():
        algorithm, why = "AdamW", "it takes betas, and AdamW is in its name"
    elif "betas" in parameters:
        algorithm, why = "Adam", "it takes betas; with AdamW in its name it would be held to decoupled weight decay"
    elif "momentum" in parameters or "sgd" in name.lower():
        algorithm, why = "SGD", f"it takes {'momentum' if 'momentum' in parameters else 'no betas'}"
    else:
        raise ValueError(
            f"{name} takes {', '.join(parameters) or 'no settings'}: neither betas (AdamW, Adam) nor momentum (SGD)"
        )
    return Claim(algorithm, why, frozenset(parameters) & frozenset(DEFAULTS), _masters(name, parameters))


def _parameters(optimizer: Any) -> dict[str, inspect.Parameter]:
    """Those of the constructor behind `self` and the parameters; behind **kwargs those of the class it derives from."""
    settings: dict[str, inspect.Parameter] = {}
    for cls in [cls for cls in optimizer.__mro__ if "__init__" in vars(cls)]:
        parameters = list(inspect.signature(cls.__init__).parameters.values())
        settings = {x.name: x for x in parameters[2:] if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)} | settings
        if all(x.kind != x.VAR_KEYWORD for x in parameters):
            break
    return settings


def _masters(name: str, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any] | None:
    """An empty dict where the class keeps them unasked: its name says so."""
    if setting := next((setting for setting in parameters if "master" in setting.lower()), None):
        return {setting: True} if isinstance(parameters[setting].default, bool) else {}
    return {} if "master" in name.lower() else None


SHAPES = (8, 16), (8, 16), (24,)
MASTER_STEPS, MASTER_LR = 96, 0.75 * 2.0**-8  # bfloat16 rounds such a step of weights of 1 to 2 away; all make 0.28


@dataclass(frozen=True)
class Asked:
    """A run by what it is about.

    groups   by group: its parameters
    given    by group, settings in place of DEFAULTS
    changes  by step: settings that all groups have from then on
    missing  by step: the parameters without a gradient
    reloads  the steps before which the state is saved and loaded
    sizes    by step: the size of its gradients, as `lmsys.extremes.model` has it; others are drawn near-normal
    masters  asks for float32 masters
    in_place  a step may change gradients
    """

    about: str
    steps: int
    given: tuple[Mapping[str, Any], ...] = ({},)
    groups: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
    changes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    missing: Mapping[int, frozenset[int]] = field(default_factory=dict)
    reloads: frozenset[int] = frozenset()
    sizes: Mapping[int, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    masters: bool = False
    in_place: bool = False

    def why_not(self, claim: Claim) -> str | None:
        """None, or why an optimizer with this claim is not asked."""
        if lacking := sorted(set().union(*self.given, *self.changes.values()) - claim.settings):
            return f"it takes no {', '.join(lacking)}"
        claims_none = "it claims no float32 masters: its bfloat16 weights round as torch's do"
        return claims_none if self.masters and claim.masters is None else None


def asked_of(claim: Claim) -> list[Asked]:
    """From the first step to the rarest inputs."""
    sgd = claim.algorithm == "SGD"
    momentum, half, decay = {"momentum": 0.9}, {"weight_decay": 0.5}, claim.taken({"weight_decay": 0.5})
    kept = decay | claim.taken(momentum if sgd else {"betas": (0.8, 0.95)})  # with these, state counts
    of_sgd = [
        Asked("weight decay, without and with momentum", 4, (half, kept | half), ((0,), (1, 2))),
        Asked("momentum", 6, (momentum,)),
        Asked("momentum and dampening", 6, (momentum | {"dampening": 0.5},)),
        # torch's own foreach SGD adds the momentum to the gradients themselves here (torch 2.13).
        Asked("nesterov", 6, (momentum | {"nesterov": True},), in_place=True),
    ]
    of_adam = [
        Asked("weight decay", 4, (half,)),
        Asked("a large eps", 4, ({"eps": 0.5},)),
        Asked("other betas", 4, ({"betas": (0.5, 0.8)},)),
    ]
    apart = kept | {"lr": 0.1}, claim.taken({"lr": 0.025, "weight_decay": 0.0})
    missing = {0: frozenset({1, 2}), 1: frozenset({2}), 3: frozenset({0})}
    of_all = [
        Asked("two param groups, of different settings", 4, apart, ((0,), (1, 2))),
        Asked("parameters without a gradient in some steps", 6, (kept,), missing=missing),
        Asked("lr changed between steps", 6, (kept,), changes={2: {"lr": 0.05}, 4: {"lr": 0.2}}),
        Asked(
            "lr and weight decay changed between steps", 4, (kept,), changes={2: {"lr": 0.05, "weight_decay": 0.125}}
        ),
        Asked("saved and loaded between steps", 6, (kept,), changes={1: {"lr": 0.05}}, reloads=frozenset({3, 4})),
        Asked("several steps", 6, (kept,), dtype=torch.bfloat16),
        Asked("saved and loaded between steps", 6, (kept,), reloads=frozenset({3}), dtype=torch.bfloat16),
    ]
    words = "gradients of zero", "tiny gradients", "huge gradients", "rows of zero, tiny, huge and ordinary gradients"
    of_extremes = [
        asked
        for size, about in zip(SIZES, words, strict=True)
        for asked in (
            Asked(f"{about}, the first step", 1, sizes={0: size}),
            Asked(f"{about}, after others", 6, (decay,), sizes={2: size, 3: size}),
        )
    ]
    about, before_each = "float32 masters, saved and loaded before each of many tiny steps", range(1, MASTER_STEPS)
    given, dtype = ({"lr": MASTER_LR},), torch.bfloat16
    tiny = Asked("float32 masters, many tiny steps", MASTER_STEPS, given, dtype=dtype, masters=True)
    of_masters = tiny, replace(tiny, about=about, reloads=frozenset(before_each))
    return [Asked("several steps", 6), *(of_sgd if sgd else of_adam), *of_all, *of_extremes, *of_masters]


def run_of(asked: Asked, seed: int, device: str) -> Run:
    """Its parameters, settings and gradients: the same bits on any machine."""

    def drawn(name: str) -> list[torch.Tensor]:
        return [
            draws.values(draws.key(seed, f"{name} {i}"), 0, shape.numel()).view(shape).to(device)
            for i, shape in enumerate(map(torch.Size, SHAPES))
        ]

    parameters = drawn("parameter")
    if asked.masters:  # 1.4 to 1.6: bfloat16 rounds a step away from the first to the last
        parameters = [1.5 + p / 32 for p in parameters]
    now: list[Settings] = [{**DEFAULTS, **given} for given in asked.given]
    settings, gradients = [], []
    for step in range(asked.steps):
        now = [{**before, **asked.changes.get(step, {})} for before in now]
        settings.append(now)
        # Those of masters do not change, so that tiny steps add up.
        of_step = [g.to(asked.dtype) for g in drawn("gradient" if asked.masters else f"gradient of step {step}")]
        if step in asked.sizes:
            of_step = [extreme(g, asked.sizes[step], held_by_torch=True) for g in of_step]
        gradients.append([None if i in asked.missing.get(step, ()) else g for i, g in enumerate(of_step)])
    return Run([p.to(asked.dtype) for p in parameters], asked.groups, settings, gradients, asked.reloads)


def trace_of(
    make: Callable[..., Optimizer],
    claim: Claim,
    run: Run,
    begins: Trace | None = None,
    changed: Callable[[int, int], object] = lambda step, i: None,
) -> Trace:
    """The parameters after each step of an optimizer.

    changed  is called with the step and the parameter where a step has changed a gradient
    begins  by step, by parameter: the values that the step begins from; None: those that it has left itself
    """
    parameters = [torch.nn.Parameter(p.clone()) for p in run.parameters]
    optimizer = _made(make, claim, run, parameters, run.settings[0])
    traced: Trace = []
    for step, gradients in enumerate(run.gradients):
        if step in run.reloads:
            state = copy.deepcopy(optimizer.state_dict())
            parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
            optimizer = _made(make, claim, run, parameters, [DEFAULTS] * len(run.groups))
            optimizer.load_state_dict(state)
        if step > 0 and run.settings[step] != run.settings[step - 1]:
            for group, settings in zip(optimizer.param_groups, run.settings[step], strict=True):
                group.update(claim.taken(settings))
        for i, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            p.grad = None if gradient is None else gradient.clone()
            if begins is not None:
                p.data.copy_(begins[step][i])
        optimizer.step()
        for i, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if gradient is not None and (p.grad is None or not torch.equal(p.grad, gradient)):
                changed(step, i)
        traced.append([p.detach().clone() for p in parameters])
    return traced


def _made(
    make: Any, claim: Claim, run: Run, parameters: list[torch.nn.Parameter], settings: Sequence[Settings]
) -> Optimizer:
    groups = [
        {"params": [parameters[i] for i in members], **claim.taken(given)}
        for members, given in zip(run.groups, settings, strict=True)
    ]
    masters = (claim.masters or {}) if parameters[0].dtype == torch.bfloat16 else {}
    return make(groups, **claim.taken(settings[0]), **masters)
