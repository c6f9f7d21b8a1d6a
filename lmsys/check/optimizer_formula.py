"""The formulas of AdamW, Adam and SGD in their published forms, with fields for what a mistaken optimizer does.

`optimizer.py` compares each step of an optimizer with `Formula.trace` in float64. It also lists the known mistakes,
each of which changes the values of some fields of a formula. Add a mistake there, and a published form to FORMS here.

A formula has two parts. The *rule* (`Adam` or `Sgd`) is the arithmetic of a step of one parameter. The *keeping*, which
is all other fields of `Formula`, is the bookkeeping around the rule: which parameters are stepped, with which settings,
and how their state is kept, saved and loaded.

    Adam  m = β1 m + (1 - β1) g,  v = β2 v + (1 - β2) g²,  p -= lr (m / (1 - β1ᵗ)) / (√(v / (1 - β2ᵗ)) + eps)
    Sgd   b = momentum b + (1 - dampening) g, in its first step b = g;  p -= lr b, or lr (g + momentum b) with nesterov

Adam, AdamW: arXiv 1412.6980, Algorithm 1, and arXiv 1711.05101, Algorithm 2, as torch.optim has them: AdamW
subtracts lr weight_decay p from p before the step, Adam and SGD add weight_decay p to g.

Adam and AdamW have several forms (FORMS), since authors differ in two choices. Either choice is right, if an optimizer
makes the same one in all steps:

- eps is added to √(v / (1 - β2ᵗ)), after bias correction (arXiv 1412.6980, Algorithm 1; torch), or to √v, before it
  (arXiv 1412.6980, the more efficient order at the end of section 2; the handout of the course CS336).
- AdamW's weights decay before the step (arXiv 1711.05101, Algorithm 2; torch), or after it. Then the decay is computed
  from the weights that the step has moved (CS336's handout; transformers' AdamW).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Settings = Mapping[str, Any]
Schedule = Sequence[Sequence[Settings]]  # by step, by group
State = dict[str, Any]
Trace = list[list[Tensor]]  # by step, by parameter: its values after the step
DEFAULTS: Settings = {  # the settings of an optimizer, unless a case has others
    "lr": 0.1,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
}


@dataclass(frozen=True)
class Run:
    """The inputs of a training that an optimizer is asked for. `optimizer_runs.run_of` makes them.

    parameters  their values before the first step
    groups      for each param group: the indices of its parameters
    settings    lr and the other settings, by step and group
    gradients   by step, by parameter: its gradient, or None
    reloads     the steps before which a new optimizer is constructed, and loads the state dict of the old one
    """

    parameters: Sequence[Tensor]
    groups: Sequence[Sequence[int]]
    settings: Schedule
    gradients: Sequence[Sequence[Tensor | None]]
    reloads: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Adam:
    """The arithmetic of Adam and AdamW for one parameter. The defaults are those of AdamW in torch's form.

    An arrow says what a function gets and returns. `step` calls these functions at the places where optimizers differ.

    taken        (lr, weight_decay, p) -> what decoupled weight decay subtracts from p
    late         True: p decays after the step, not before it
    in_gradient  how many times weight_decay p is added to the gradient
    betas        (β1, β2) -> β1 and β2 as they are used
    square       g -> the tensor whose running mean is the second moment: g²
    corrections  (1 - β1ᵗ, 1 - β2ᵗ) -> (c1, c2), the divisors of the moments m and v
    update       (m, v, c1, c2, eps) -> the step without lr: p changes by -lr times this
    keep         a moment -> its value as it is stored for the next step
    """

    taken: Callable[[float, float, Tensor], Tensor | float] = lambda lr, decay, p: lr * decay * p
    late: bool = False
    in_gradient: float = 0.0
    betas: Callable[[float, float], tuple[float, float]] = lambda beta1, beta2: (beta1, beta2)
    square: Callable[[Tensor], Tensor] = lambda g: g * g
    corrections: Callable[[float, float], tuple[float, float]] = lambda c1, c2: (c1, c2)
    update: Callable[[Tensor, Tensor, float, float, float], Tensor] = lambda m, v, c1, c2, eps: (
        (m / c1) / ((v / c2).sqrt() + eps)
    )
    keep: Callable[[Tensor], Tensor] = lambda moment: moment

    def step(self, p: Tensor, g: Tensor, state: State, settings: Settings, t: float) -> Tensor:
        """Returns p after a step by the gradient g, and writes the new moments into `state`. `Formula.trace` calls it.

        t  the number of the step in bias correction, from 1 on
        """
        beta1, beta2 = self.betas(*settings["betas"])
        g = g + self.in_gradient * settings["weight_decay"] * p
        m = beta1 * state.get("m", torch.zeros_like(p)) + (1 - beta1) * g
        v = beta2 * state.get("v", torch.zeros_like(p)) + (1 - beta2) * self.square(g)
        # Bias correction uses the same betas, unless a mistake in `optimizer.py` sets others as "corrected_by".
        corrected = self.betas(*settings.get("corrected_by", settings["betas"]))
        state |= {"m": self.keep(m), "v": self.keep(v)}
        p = p if self.late else self.decay(p, settings)
        p = p - settings["lr"] * self.update(
            m, v, *self.corrections(*(1 - beta**t for beta in corrected)), settings["eps"]
        )
        return self.decay(p, settings) if self.late else p

    def decay(self, p: Tensor, settings: Settings) -> Tensor:
        return p - self.taken(settings["lr"], settings["weight_decay"], p)


@dataclass(frozen=True)
class Sgd:
    """The arithmetic of SGD for one parameter.

    taken, in_gradient  as in `Adam`
    only_with_momentum  True: there is no weight decay if momentum is 0, which is a mistake
    buffer              (b, g, momentum, dampening) -> the new momentum buffer b; in the first step b is None
    rate_within         True: the buffer adds up lr g, not g, which is a mistake
    nesterov            (g, b, momentum) -> the step without lr, if nesterov is set
    """

    taken: Callable[[float, float, Tensor], Tensor | float] = lambda lr, decay, p: 0.0
    in_gradient: float = 1.0
    only_with_momentum: bool = False
    buffer: Callable[[Tensor | None, Tensor, float, float], Tensor] = lambda b, g, momentum, dampening: (
        g if b is None else momentum * b + (1 - dampening) * g
    )
    rate_within: bool = False
    nesterov: Callable[[Tensor, Tensor, float], Tensor] = lambda g, b, momentum: g + momentum * b

    def step(self, p: Tensor, g: Tensor, state: State, settings: Settings, t: float) -> Tensor:
        """Returns p after a step, as `Adam.step` does. SGD has no bias correction, so t is not used."""
        momentum, lr = settings["momentum"], settings["lr"]
        decay = 0.0 if self.only_with_momentum and momentum == 0 else settings["weight_decay"]
        g, p = g + self.in_gradient * decay * p, p - self.taken(lr, decay, p)
        if momentum == 0:
            return p - lr * g
        added = g * lr if self.rate_within else g
        state["b"] = self.buffer(state.get("b"), added, momentum, settings["dampening"])
        step = self.nesterov(added, state["b"], momentum) if settings["nesterov"] else state["b"]
        return p - (1 if self.rate_within else lr) * step


@dataclass(frozen=True)
class Formula:
    """A rule, and the keeping around it: see the module. The default keeping is right; any other value is a mistake.

    rule              the arithmetic of a step of one parameter
    count             (steps of this parameter, calls of the optimizer's `step`, steps of all parameters together), each
                      so far -> t in the bias correction
    without_gradient  what happens to a parameter that has no gradient: "nothing"; "decay", its weight decay alone, for
                      which `rule` must be an `Adam`; or "step", as by a gradient of zeros
    shared            True: all parameters of one shape share one state
    forgets           True: moments, or the momentum buffer, are lost after each step
    loads             state of a parameter -> its state after it was saved and loaded
    restores          (settings in a state dict, settings of the constructor) -> settings after loading
    setting           (the run's settings, step, group) -> the settings that are used
    weights           the dtype that weights are rounded to after each step; None: they are not rounded
    """

    rule: Adam | Sgd
    count: Callable[[int, int, int], float] = lambda steps, calls, of_all: steps
    without_gradient: str = "nothing"
    shared: bool = False
    forgets: bool = False
    loads: Callable[[State], State] = lambda state: state
    restores: Callable[[Settings, Settings], Settings] = lambda loaded, constructed: loaded
    setting: Callable[[Schedule, int, int], Settings] = lambda schedule, step, group: schedule[step][group]
    weights: torch.dtype | None = None

    def trace(self, run: Run, begins: Trace | None = None, dtype: torch.dtype = torch.float64) -> Trace:
        """Returns the parameters after each step of a run.

        begins  by step, by parameter: the values that the step starts from; None: a step starts from the result of this
                formula's step before
        dtype   of the computation: float64 for the exact result, another for plain PyTorch's result with its roundings
        """
        of_all, values = 0, [p.to(dtype) for p in run.parameters]
        states: dict[Any, State] = defaultdict(dict)
        trace: Trace = []
        for step, gradients in enumerate(run.gradients):
            if step in run.reloads:
                states.update({key: self.loads(state) for key, state in states.items()})
            values = list(values) if begins is None else [p.to(dtype) for p in begins[step]]
            for group, i in [(group, i) for group, members in enumerate(run.groups) for i in members]:
                settings, g = self.setting(run.settings, step, group), gradients[i]
                # After loading, the optimizer is one that was constructed with DEFAULTS: see `optimizer_runs.trace_of`.
                settings = self.restores(settings, DEFAULTS) if step >= min(run.reloads, default=step + 1) else settings
                if g is None and self.without_gradient == "decay" and isinstance(self.rule, Adam):
                    values[i] = self.rule.decay(values[i], settings)
                if g is None and self.without_gradient != "step":
                    continue
                of_all += 1
                state = states[run.parameters[i].shape if self.shared else i]
                state["t"] = state.get("t", 0) + 1
                g = torch.zeros_like(values[i]) if g is None else g.to(dtype)
                g = -g if settings["maximize"] else g
                values[i] = self.rule.step(
                    values[i], g, {} if self.forgets else state, settings, self.count(state["t"], step + 1, of_all)
                )
            if self.weights is not None:
                values = [p.to(self.weights).to(dtype) for p in values]
            trace.append(values)
        return trace


@dataclass(frozen=True)
class Form:
    """A form: one of the published ways to write an algorithm.

    rule     its arithmetic
    words    the name of the form
    differs  how it differs from torch's form, in words; "" for torch's form
    """

    rule: Adam | Sgd
    words: str
    differs: str = ""

    def __str__(self) -> str:
        return f"{self.words}; {self.differs}" if self.differs else self.words


def _before_correction(m: Tensor, v: Tensor, correction1: float, correction2: float, eps: float) -> Tensor:
    """`Adam.update` with eps added before bias correction."""
    return (m * (correction2**0.5 / correction1)) / (v.sqrt() + eps)


# Adam's own form: the base of the forms below, which other optimizers of its family have.
_ADAM = Adam(taken=Sgd.taken, in_gradient=1.0)
_LARGER_EPS = (
    "eps is added to √v before bias correction, and so acts as eps / √(1 - beta2 ** t): 32 eps at t = 1, beta2 = 0.999"
)
_LATE_DECAY = "here the update decays, too: p = (p - update) (1 - lr weight_decay)"
FORMS: Mapping[str, Sequence[Form]] = {  # by algorithm; torch's form is first: it is taken if steps fit several forms
    "AdamW": (
        Form(Adam(), "AdamW in the form of torch.optim.AdamW"),
        Form(
            Adam(update=_before_correction),
            "AdamW with eps before bias correction, as in Kingma & Ba's efficient form (arXiv 1412.6980, section 2)",
            _LARGER_EPS,
        ),
        Form(Adam(late=True), "AdamW with decay after the step, as in CS336's handout", _LATE_DECAY),
        Form(
            Adam(late=True, update=_before_correction),
            "AdamW in the form of CS336's handout: decay after the step, eps before bias correction",
            f"{_LATE_DECAY}; {_LARGER_EPS}",
        ),
    ),
    "Adam": (
        Form(_ADAM, "Adam in the form of torch.optim.Adam"),
        Form(
            replace(_ADAM, update=_before_correction),
            "Adam with eps before bias correction, as in Kingma & Ba's efficient form (arXiv 1412.6980, section 2)",
            _LARGER_EPS,
        ),
    ),
    "SGD": (Form(Sgd(), "SGD in the form of torch.optim.SGD"),),
}
