"""Mistakes that people make in AdamW, Adam and SGD, each as the formula with it: `optimizer_formula.py`.

The one whose steps are those of the optimizer is named.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmsys.check.optimizer_forms import FORMS
from lmsys.check.optimizer_formula import Adam, Counter, Formula, Keeping, Sgd, State

Mistakes = Iterator[tuple[str, Formula]]


def mistakes(algorithm: str, rule: Adam | Sgd) -> Mistakes:
    """(in words, the formula with it), the plainest first.

    algorithm  "AdamW", "Adam" or "SGD"
    rule       its form, in which the mistakes are made
    """
    if isinstance(rule, Adam):
        yield from _of_decay(rule, algorithm)
        yield from _of_moments(rule)
        yield from _of_counting(rule)
        yield from _of_zeros(rule)
    else:
        yield from _of_sgd(rule)
    yield from _of_keeping(rule, algorithm)
    for form in FORMS[algorithm]:
        if form.rule is not rule:
            yield f"the form is not that of the first steps: here it is {form.words}", Formula(form.rule)


def _of_decay(good: Adam, algorithm: str) -> Mistakes:
    def with_(**changes: Any) -> Formula:
        return Formula(replace(good, **changes))

    none, scaled = (lambda lr, decay: 0.0), (lambda lr, decay: lr * decay)
    yield "weight_decay is ignored", with_(shrink=none, in_gradient=0.0)
    if algorithm == "AdamW":
        coupled = with_(shrink=none, in_gradient=1.0)
        yield "weight decay is coupled: it is added to the gradient, as in Adam, not taken from the weights", coupled
        yield "weight decay is taken from the weights and added to the gradient as well", with_(in_gradient=1.0)
        yield "weights decay twice in a step", with_(shrink=lambda lr, decay: 1 - (1 - lr * decay) ** 2)
        yield "weight decay is not scaled by lr", with_(shrink=lambda lr, decay: decay)
        yield "weight decay is scaled by lr twice", with_(shrink=lambda lr, decay: lr * lr * decay)
        yield "lr weight_decay itself is taken from the weights, not its product with them", with_(constant=True)
        yield "weights grow: weight decay is added to them", with_(shrink=lambda lr, decay: -lr * decay)
    else:
        yield (
            "weight decay is decoupled, as in AdamW: Adam adds it to the gradient",
            with_(shrink=scaled, in_gradient=0.0),
        )
        yield "weight decay is added to the gradient twice", with_(in_gradient=2.0)


def _of_moments(good: Adam) -> Mistakes:
    def with_(**changes: Any) -> Formula:
        return Formula(replace(good, **changes))

    right, none, times = good.correct[0], (lambda beta, t: 1.0), (lambda beta, t: 1 / (1 - beta**t))
    yield "bias correction is forgotten", with_(correct=(none, none))
    yield "bias correction of the first moment is forgotten", with_(correct=(none, right))
    yield "bias correction of the second moment is forgotten", with_(correct=(right, none))
    yield "moments are multiplied by 1 - beta ** t, not divided", with_(correct=(times, times))
    yield "betas are exchanged", with_(betas=lambda beta1, beta2: (beta2, beta1))
    yield "betas are used as 1 - beta", with_(betas=lambda beta1, beta2: (1 - beta1, 1 - beta2))
    yield "the second moment is the mean of the gradient, not of its square", with_(square=lambda g: g)
    yield "the second moment is the mean of |g|, not of its square", with_(square=torch.abs)
    yield (
        "there is no root: the step is divided by the second moment itself",
        with_(update=lambda m, v, c1, c2, eps: (m / c1) / (v / c2 + eps)),
    )
    yield "eps is forgotten", with_(update=lambda m, v, c1, c2, eps: (m / c1) / (v / c2).sqrt())
    yield (
        "eps is added inside of the root",
        with_(update=lambda m, v, c1, c2, eps: (m / c1) / (v / c2 + eps).sqrt()),
    )
    yield (
        "eps is added inside of the root, before bias correction",
        with_(update=lambda m, v, c1, c2, eps: (m / c1) / ((v + eps) / c2).sqrt()),
    )
    yield (
        "eps is added after the division: 1 / √v + eps",
        with_(update=lambda m, v, c1, c2, eps: (m / c1) * ((v / c2).rsqrt() + eps)),
    )
    yield "it steps up the gradient", with_(update=lambda m, v, c1, c2, eps: -good.update(m, v, c1, c2, eps))
    yield (
        "the second moment is not used: the step is lr m",
        with_(update=lambda m, v, c1, c2, eps: m / c1),
    )
    for dtype in (torch.float16, torch.bfloat16):
        yield f"moments are kept in {str(dtype).removeprefix('torch.')}", with_(keep=_rounded(dtype))


def _rounded(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda moment: moment.to(dtype).double()


def _of_counting(good: Adam) -> Mistakes:
    def with_(count: Callable[[int, Counter], float]) -> Formula:
        return Formula(good, Keeping(count=count))

    yield "steps are not counted: bias correction stays that of the first step", with_(lambda own, counter: 1)
    yield "a step is counted twice", with_(lambda own, counter: 2 * own)
    yield "steps are counted from 2: bias correction is that of the next step", with_(lambda own, counter: own + 1)
    yield (
        "a step is counted once for each parameter, in a counter of all",
        with_(lambda own, counter: counter.updates),
    )
    yield (
        "steps are counted together: a parameter without a gradient in some is corrected as if it had had all",
        with_(lambda own, counter: counter.calls),
    )


def _of_zeros(good: Adam) -> Mistakes:
    yield (
        "elements whose gradient is zero are not stepped: their moments do not decay",
        Formula(replace(good, where=lambda g: g != 0)),
    )
    yield (
        "parameters whose gradient is zero everywhere are not stepped",
        Formula(replace(good, where=lambda g: (g != 0).any().expand_as(g))),
    )


def _of_sgd(good: Sgd) -> Mistakes:
    def with_(**changes: Any) -> Formula:
        return Formula(replace(good, **changes))

    yield "weight_decay is ignored", with_(in_gradient=0.0)
    yield "weight decay is ignored where momentum is 0", with_(only_with_momentum=True)
    yield "weight decay is added to the gradient twice", with_(in_gradient=2.0)
    yield (
        "weight decay is decoupled: SGD adds it to the gradient",
        with_(in_gradient=0.0, shrink=lambda lr, decay: lr * decay),
    )
    yield (
        "weight decay is not scaled by lr",
        with_(in_gradient=0.0, shrink=lambda lr, decay: decay),
    )
    yield "the first gradient is damped too: torch begins with the gradient itself", with_(damp_first=True)
    yield "the buffer is a mean: momentum b + (1 - momentum) g", with_(average=True)
    yield "lr is multiplied into the buffer: a change of lr comes late", with_(rate_within=True)
    yield "nesterov is ignored", with_(nesterov=lambda g, b, momentum: b)
    yield "nesterov looks ahead from the old buffer", with_(nesterov=lambda g, b, momentum: b + momentum * (b - g))
    yield "momentum is forgotten", Formula(good, Keeping(forgets=True))


def _of_keeping(good: Adam | Sgd, algorithm: str) -> Mistakes:
    def with_(**changes: Any) -> Formula:
        return Formula(good, Keeping(**changes))

    yield (
        "settings of the first param group are used for all",
        with_(setting=lambda all, step, group: all[step][0]),
    )
    yield (
        "lr of the first param group is used for all",
        with_(setting=lambda all, step, group: {**all[step][group], "lr": all[step][0]["lr"]}),
    )
    yield (
        "lr is read when it is made: changes in param_groups are ignored",
        with_(setting=lambda all, step, group: {**all[step][group], "lr": all[0][group]["lr"]}),
    )
    yield (
        "settings are read when it is made: changes in param_groups are ignored",
        with_(setting=lambda all, step, group: all[0][group]),
    )
    yield (
        "settings but lr are read when it is made: changes in param_groups are ignored",
        with_(setting=lambda all, step, group: {**all[0][group], "lr": all[step][group]["lr"]}),
    )
    if algorithm == "AdamW":
        yield "parameters without a gradient decay", with_(without_gradient="decay")
    yield "parameters without a gradient are stepped, as if it were zero", with_(without_gradient="step")
    yield "state is shared between parameters of a shape", with_(shared=True)
    yield "moments are not kept from step to step", with_(forgets=True)
    yield "state is lost by load_state_dict", with_(loads=lambda state: {})
    if algorithm != "SGD":
        yield "the count of steps is lost by load_state_dict", with_(loads=lambda state: _without(state, "t"))
        yield "moments are lost by load_state_dict", with_(loads=lambda state: _without(state, "m", "v"))
        yield "the second moment is lost by load_state_dict", with_(loads=lambda state: _without(state, "v"))
        yield (
            "after load_state_dict bias correction is that of the constructor's betas",
            with_(restores=lambda loaded, made: {**loaded, "corrected_by": made["betas"]}),
        )
    yield (
        "load_state_dict leaves lr as the constructor set it",
        with_(restores=lambda loaded, made: {**loaded, "lr": made["lr"]}),
    )
    yield "load_state_dict leaves settings as the constructor set them", with_(restores=lambda loaded, made: made)


def of_masters(rule: Adam | Sgd, loads: bool) -> Mistakes:
    """Mistakes of an optimizer that is to keep float32 masters of bfloat16 weights; `loads`: in a run that loads them.

    One that loses them without that has been refused before.
    """
    lost = "float32 masters are lost by load_state_dict" if loads else "float32 masters are lost"
    keeping = Keeping(weights=torch.bfloat16, once_loaded=loads)
    yield f"{lost}: steps smaller than bfloat16 rounds are nothing", Formula(rule, keeping)


def _without(state: State, *names: str) -> State:
    return {name: value for name, value in state.items() if name not in names}
