"""The formulas of AdamW, Adam and SGD, with what an optimizer may do otherwise.

A formula has two parts. The rule is the arithmetic of one parameter (`Adam`, `Sgd`). The keeping is what surrounds it:
which parameters are stepped, by which settings, and what becomes of their state. `optimizer_mistakes.py` lists mistakes
in both.

    Adam  m = β1 m + (1 - β1) g,  v = β2 v + (1 - β2) g²,  p -= lr (m / (1 - β1ᵗ)) / (√(v / (1 - β2ᵗ)) + eps)
    Sgd   b = momentum b + (1 - dampening) g, in its first step b = g;  p -= lr b, or lr (g + momentum b) with nesterov

Adam, AdamW: arXiv 1412.6980, Algorithm 1, and arXiv 1711.05101, Algorithm 2, as torch.optim has them: AdamW takes
lr weight_decay p from p before the step, Adam and SGD add weight_decay p to g. `optimizer_forms.py` has the other
published forms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Settings = Mapping[str, Any]
State = dict[str, Any]
Trace = list[list[Tensor]]  # by step, by parameter: its values after the step


@dataclass(frozen=True)
class Run:
    """A training that an optimizer is asked for.

    parameters  their values before the first step
    groups      by group: the indices of its parameters
    settings    by step, by group: lr and the rest
    gradients   by step, by parameter: None where it has none
    reloads     the steps before which the optimizer is made anew, and its state dict is saved and loaded
    constructed the settings that it is made anew with
    """

    parameters: Sequence[Tensor]
    groups: Sequence[Sequence[int]]
    settings: Sequence[Sequence[Settings]]
    gradients: Sequence[Sequence[Tensor | None]]
    reloads: frozenset[int] = frozenset()
    constructed: Settings = field(default_factory=dict)

    def group_of(self, parameter: int) -> int:
        return next(i for i, members in enumerate(self.groups) if parameter in members)


def _adam_update(m: Tensor, v: Tensor, correction1: float, correction2: float, eps: float) -> Tensor:
    return (m / correction1) / ((v / correction2).sqrt() + eps)


@dataclass(frozen=True)
class Adam:
    """One step of one parameter.

    shrink       from lr and weight_decay: the share of p that is taken from it
    late         p is shrunk after the step, not before it
    constant     what is taken from p is lr weight_decay itself, not its product with p
    in_gradient  how many times weight_decay p is added to the gradient
    betas        β1 and β2 as they are used
    square       what the second moment is the mean of
    correct      from β and t: what a moment is divided by, for the first moment and for the second
    update       p changes by lr times this
    keep         the moments as they are kept between steps
    where        the elements that are stepped, from their gradients; None: all
    """

    shrink: Callable[[float, float], float] = lambda lr, decay: lr * decay
    late: bool = False
    constant: bool = False
    in_gradient: float = 0.0
    betas: Callable[[float, float], tuple[float, float]] = lambda beta1, beta2: (beta1, beta2)
    square: Callable[[Tensor], Tensor] = lambda g: g * g
    correct: tuple[Callable[[float, float], float], ...] = (lambda beta, t: 1 - beta**t, lambda beta, t: 1 - beta**t)
    update: Callable[[Tensor, Tensor, float, float, float], Tensor] = _adam_update
    keep: Callable[[Tensor], Tensor] = lambda moment: moment
    where: Callable[[Tensor], Tensor] | None = None

    def step(self, p: Tensor, g: Tensor, state: State, settings: Settings, t: float) -> Tensor:
        """The new values of p; changes `state`."""
        before, (beta1, beta2) = p, self.betas(*settings["betas"])
        corrected = self.betas(*settings.get("corrected_by", settings["betas"]))
        zeros = torch.zeros_like(p)
        g_decayed = g + self.in_gradient * settings["weight_decay"] * p
        m = beta1 * state.get("m", zeros) + (1 - beta1) * g_decayed
        v = beta2 * state.get("v", zeros) + (1 - beta2) * self.square(g_decayed)
        corrections = self.correct[0](corrected[0], t), self.correct[1](corrected[1], t)
        p = p if self.late else self.decay(p, settings)
        p = p - settings["lr"] * self.update(m, v, *corrections, settings["eps"])
        p = self.decay(p, settings) if self.late else p
        if self.where is not None:
            stepped = self.where(g)
            m, v = (torch.where(stepped, x, state.get(name, zeros)) for name, x in (("m", m), ("v", v)))
            p = torch.where(stepped, p, before)
        state |= {"m": self.keep(m), "v": self.keep(v)}
        return p

    def decay(self, p: Tensor, settings: Settings) -> Tensor:
        return p - self.shrink(settings["lr"], settings["weight_decay"]) * (1 if self.constant else p)


@dataclass(frozen=True)
class Sgd:
    """One step of one parameter.

    in_gradient, shrink  as in Adam
    only_with_momentum   weight decay is left out where momentum is 0
    damp_first           the first gradient is multiplied by 1 - dampening too
    average              the buffer is momentum b + (1 - momentum) g
    rate_within          lr is multiplied into what the buffer adds up
    nesterov             from (g, b, momentum): the step with nesterov
    """

    in_gradient: float = 1.0
    shrink: Callable[[float, float], float] = lambda lr, decay: 0.0
    only_with_momentum: bool = False
    damp_first: bool = False
    average: bool = False
    rate_within: bool = False
    nesterov: Callable[[Tensor, Tensor, float], Tensor] = lambda g, b, momentum: g + momentum * b

    def step(self, p: Tensor, g: Tensor, state: State, settings: Settings, t: float) -> Tensor:
        """The new values of p; changes `state`."""
        momentum, lr, decay = settings["momentum"], settings["lr"], settings["weight_decay"]
        if not (self.only_with_momentum and momentum == 0):
            g, p = g + self.in_gradient * decay * p, self.decay(p, settings)
        if momentum == 0:
            return p - lr * g
        b, added = state.get("b"), g * lr if self.rate_within else g
        damped = (1 - momentum if self.average else 1 - settings["dampening"]) * added
        if b is None:
            b = damped if self.damp_first or self.average else added
        else:
            b = momentum * b + damped
        state["b"] = b
        step = self.nesterov(added, b, momentum) if settings["nesterov"] else b
        return p - (1 if self.rate_within else lr) * step

    def decay(self, p: Tensor, settings: Settings) -> Tensor:
        return p - self.shrink(settings["lr"], settings["weight_decay"]) * p


@dataclass
class Counter:
    """Calls of `step`, and updates of any parameter, so far."""

    calls: int = 0
    updates: int = 0


@dataclass(frozen=True)
class Keeping:
    """The bookkeeping that surrounds a rule.

    count             from a parameter's own number of steps, this one included, and the Counter: t
    without_gradient  what happens to a parameter that has no gradient: "nothing", "decay" or "step"
    shared            all parameters of a shape have one state
    forgets           the moments are zeros again in each step
    loads             from a parameter's state: what is left of it when it has been loaded
    restores          from the settings that a state dict holds, and those of the constructor: those after loading
    weights           the dtype that weights are rounded to after each step; None: they are not
    once_loaded       they are not before the first load
    setting           from the settings by step and group, the step and the group: those that are used
    """

    count: Callable[[int, Counter], float] = lambda own, counter: own
    without_gradient: str = "nothing"
    shared: bool = False
    forgets: bool = False
    loads: Callable[[State], State] = lambda state: state
    restores: Callable[[Settings, Settings], Settings] = lambda loaded, constructed: loaded
    weights: torch.dtype | None = None
    once_loaded: bool = False
    setting: Callable[[Sequence[Sequence[Settings]], int, int], Settings] = lambda all, step, group: all[step][group]


@dataclass(frozen=True)
class Formula:
    rule: Adam | Sgd
    keeping: Keeping = field(default_factory=Keeping)

    def trace(self, run: Run, begins: Trace | None = None, dtype: torch.dtype = torch.float64) -> Trace:
        """The parameters after each step, computed in a dtype: float64 is the measure, others are plain PyTorch.

        begins  by step, by parameter: the values that the step begins from; None: those that it has left itself
        """
        keeping, counter = self.keeping, Counter()
        values = [p.to(dtype) for p in run.parameters]
        keys: list[Any] = [p.shape if keeping.shared else i for i, p in enumerate(values)]
        states: dict[Any, State] = {key: {} for key in keys}
        made: Trace = []
        loaded = False
        for step, gradients in enumerate(run.gradients):
            if step in run.reloads:
                states, loaded = {key: keeping.loads(state) for key, state in states.items()}, True
            counter.calls += 1
            values = values if begins is None else [p.to(dtype) for p in begins[step]]
            for i in [i for members in run.groups for i in members]:
                settings = self._settings(run, step, run.group_of(i), loaded)
                values[i] = self._step(values[i], gradients[i], states[keys[i]], settings, counter)
            if keeping.weights is not None and (loaded or not keeping.once_loaded):
                values = [p.to(keeping.weights).to(dtype) for p in values]
            made.append(list(values))
        return made

    def _settings(self, run: Run, step: int, group: int, loaded: bool) -> Settings:
        settings = self.keeping.setting(run.settings, step, group)
        return self.keeping.restores(settings, run.constructed) if loaded else settings

    def _step(self, p: Tensor, g: Tensor | None, state: State, settings: Settings, counter: Counter) -> Tensor:
        if g is None and self.keeping.without_gradient == "nothing":
            return p
        if g is None and self.keeping.without_gradient == "decay":
            return self.rule.decay(p, settings)
        counter.updates += 1
        state["t"] = state.get("t", 0) + 1
        if self.keeping.forgets:
            for name in state.keys() & {"m", "v", "b"}:
                del state[name]
        g = torch.zeros_like(p) if g is None else g.to(p.dtype)
        return self.rule.step(p, g, state, settings, self.keeping.count(state["t"], counter))
