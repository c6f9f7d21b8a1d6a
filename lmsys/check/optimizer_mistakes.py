"""Mistakes that people make in AdamW, Adam and SGD, each as the formula with it: `optimizer_formula.py`.

The one whose steps are those of the optimizer is named. The tables have a mistake in words, and what it changes in the
rule or in the keeping; the plainest stand first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from lmsys.check.optimizer_forms import FORMS
from lmsys.check.optimizer_formula import Adam, Formula, Keeping, Sgd

Changes = dict[str, dict[str, Any]]
DECOUPLED: dict[str, Any] = {"in_gradient": 0.0, "taken": lambda lr, decay, p: lr * decay * p}
IGNORED: Changes = {"weight_decay is ignored": {"in_gradient": 0.0, "taken": lambda lr, decay, p: 0.0}}

DECAY_OF_ADAMW: Changes = IGNORED | {
    "weight decay is coupled: it is added to the gradient, as in Adam, not taken from the weights": {
        "in_gradient": 1.0,
        "taken": lambda lr, decay, p: 0.0,
    },
    "weight decay is taken from the weights and added to the gradient as well": {"in_gradient": 1.0},
    "weights decay twice in a step": {"taken": lambda lr, decay, p: (1 - (1 - lr * decay) ** 2) * p},
    "weight decay is not scaled by lr": {"taken": lambda lr, decay, p: decay * p},
    "weight decay is scaled by lr twice": {"taken": lambda lr, decay, p: lr * lr * decay * p},
    "lr weight_decay itself is taken from the weights, not its product with them": {
        "taken": lambda lr, decay, p: lr * decay,
    },
    "weights grow: weight decay is added to them": {"taken": lambda lr, decay, p: -lr * decay * p},
}
DECAY_OF_ADAM: Changes = IGNORED | {
    "weight decay is decoupled, as in AdamW: Adam adds it to the gradient": DECOUPLED,
    "weight decay is added to the gradient twice": {"in_gradient": 2.0},
}
MOMENTS: Changes = {
    "bias correction is forgotten": {"corrections": lambda c1, c2: (1.0, 1.0)},
    "bias correction of the first moment is forgotten": {"corrections": lambda c1, c2: (1.0, c2)},
    "bias correction of the second moment is forgotten": {"corrections": lambda c1, c2: (c1, 1.0)},
    "moments are multiplied by 1 - beta ** t, not divided": {"corrections": lambda c1, c2: (1 / c1, 1 / c2)},
    "betas are exchanged": {"betas": lambda beta1, beta2: (beta2, beta1)},
    "betas are used as 1 - beta": {"betas": lambda beta1, beta2: (1 - beta1, 1 - beta2)},
    "the second moment is the mean of the gradient, not of its square": {"square": lambda g: g},
    "the second moment is the mean of |g|, not of its square": {"square": torch.abs},
    "there is no root: the step is divided by the second moment itself": {
        "update": lambda m, v, c1, c2, eps: (m / c1) / (v / c2 + eps),
    },
    "eps is forgotten": {"update": lambda m, v, c1, c2, eps: (m / c1) / (v / c2).sqrt()},
    "eps is added inside of the root": {"update": lambda m, v, c1, c2, eps: (m / c1) / (v / c2 + eps).sqrt()},
    "eps is added inside of the root, before bias correction": {
        "update": lambda m, v, c1, c2, eps: (m / c1) / ((v + eps) / c2).sqrt(),
    },
    "eps is added after the division: 1 / √v + eps": {
        "update": lambda m, v, c1, c2, eps: (m / c1) * ((v / c2).rsqrt() + eps),
    },
    "the second moment is not used: the step is lr m": {"update": lambda m, v, c1, c2, eps: m / c1},
    "moments are kept in float16": {"keep": lambda moment: moment.half().double()},
    "moments are kept in bfloat16": {"keep": lambda moment: moment.bfloat16().double()},
}
OF_SGD: Changes = IGNORED | {
    "weight decay is ignored where momentum is 0": {"only_with_momentum": True},
    "weight decay is added to the gradient twice": {"in_gradient": 2.0},
    "weight decay is decoupled: SGD adds it to the gradient": DECOUPLED,
    "weight decay is not scaled by lr": {"in_gradient": 0.0, "taken": lambda lr, decay, p: decay * p},
    "the first gradient is damped too: torch begins with the gradient itself": {
        "buffer": lambda b, g, momentum, dampening: (0 if b is None else momentum * b) + (1 - dampening) * g,
    },
    "the buffer is a mean: momentum b + (1 - momentum) g": {
        "buffer": lambda b, g, momentum, dampening: (0 if b is None else momentum * b) + (1 - momentum) * g,
    },
    "lr is multiplied into the buffer: a change of lr comes late": {"rate_within": True},
    "nesterov is ignored": {"nesterov": lambda g, b, momentum: b},
    "nesterov looks ahead from the old buffer": {"nesterov": lambda g, b, momentum: b + momentum * (b - g)},
}
RULES: Mapping[str, Changes] = {"AdamW": DECAY_OF_ADAMW | MOMENTS, "Adam": DECAY_OF_ADAM | MOMENTS, "SGD": OF_SGD}

COUNTING: Changes = {
    "steps are not counted: bias correction stays that of the first step": {"count": lambda steps, calls, of_all: 1},
    "a step is counted twice": {"count": lambda steps, calls, of_all: 2 * steps},
    "steps are counted from 2: bias correction is that of the next step": {
        "count": lambda steps, calls, of_all: steps + 1,
    },
    "a step is counted once for each parameter, in a counter of all": {"count": lambda steps, calls, of_all: of_all},
    "steps are counted together: a parameter without a gradient in some is corrected as if it had had all": {
        "count": lambda steps, calls, of_all: calls,
    },
}
KEEPING: Changes = {
    "it steps up the gradient": {
        "setting": lambda all, step, group: all[step][group] | {"lr": -all[step][group]["lr"]}
    },
    "settings of the first param group are used for all": {"setting": lambda all, step, group: all[step][0]},
    "lr of the first param group is used for all": {
        "setting": lambda all, step, group: all[step][group] | {"lr": all[step][0]["lr"]},
    },
    "lr is read when it is made: changes in param_groups are ignored": {
        "setting": lambda all, step, group: all[step][group] | {"lr": all[0][group]["lr"]},
    },
    "settings are read when it is made: changes in param_groups are ignored": {
        "setting": lambda all, step, group: all[0][group],
    },
    "settings but lr are read when it is made: changes in param_groups are ignored": {
        "setting": lambda all, step, group: all[0][group] | {"lr": all[step][group]["lr"]},
    },
    "parameters without a gradient are stepped, as if it were zero": {"without_gradient": "step"},
    "state is shared between parameters of a shape": {"shared": True},
    "moments are not kept from step to step": {"forgets": True},
    "state is lost by load_state_dict": {"loads": lambda state: {}},
    "load_state_dict leaves lr as the constructor set it": {
        "restores": lambda loaded, made: loaded | {"lr": made["lr"]},
    },
    "load_state_dict leaves settings as the constructor set them": {"restores": lambda loaded, made: made},
}
KEEPING_OF_ADAM: Changes = {
    "the count of steps is lost by load_state_dict": {"loads": lambda state: state | {"t": 0}},
    "moments are lost by load_state_dict": {"loads": lambda state: {"t": state["t"]}},
    "the second moment is lost by load_state_dict": {"loads": lambda state: {"t": state["t"], "m": state["m"]}},
    "after load_state_dict bias correction is that of the constructor's betas": {
        "restores": lambda loaded, made: loaded | {"corrected_by": made["betas"]},
    },
}
UNUSED_DECAY: Changes = {"parameters without a gradient decay": {"without_gradient": "decay"}}
KEEPINGS: Mapping[str, Changes] = {
    "AdamW": COUNTING | UNUSED_DECAY | KEEPING | KEEPING_OF_ADAM,
    "Adam": COUNTING | KEEPING | KEEPING_OF_ADAM,
    "SGD": {"momentum is forgotten": {"forgets": True}} | KEEPING,
}


def mistakes(algorithm: str, rule: Adam | Sgd) -> Iterator[tuple[str, Formula]]:
    """(in words, the formula with it), the plainest first.

    algorithm  "AdamW", "Adam" or "SGD"
    rule       its form, in which the mistakes are made
    """
    for words, changes in RULES[algorithm].items():
        yield words, Formula(replace(rule, **changes))
    for words, changes in KEEPINGS[algorithm].items():
        yield words, Formula(rule, Keeping(**changes))
    for form in FORMS[algorithm]:
        if form.rule is not rule:
            yield f"the form is not that of the first steps: here it is {form.words}", Formula(form.rule)


def of_masters(rule: Adam | Sgd, loads: bool) -> tuple[str, Formula]:
    """The mistake of an optimizer that is to keep float32 masters of bfloat16 weights; `loads`: in a run that loads.

    One that loses them without that has been refused before.
    """
    lost = "float32 masters are lost by load_state_dict" if loads else "float32 masters are lost"
    formula = Formula(rule, Keeping(weights=torch.bfloat16))
    return f"{lost}: steps smaller than bfloat16 rounds are nothing", formula
