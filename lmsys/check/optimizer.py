"""Optimizers: each step is compared with the formula in float64, from the weights that the step began with.

`kinds.py` calls `questions`, and `remark` at the end of the report. The formula is one of the published *forms* of the
algorithm (`optimizer_formula.py`): the one that the optimizer's first steps follow. The budget, the error that a step
may have (`lmsys.testing.error_ratio`), comes from the error of torch's optimizer in the dtype of the weights; for forms
that torch lacks, from that of the formula in plain PyTorch. Each row of a parameter is judged alone, so that a row of
huge steps hides no error in others. An optimizer that claims to keep float32 master weights for bfloat16 weights is
compared in another way: with a run in float64 from the first weights on, since its master weights cannot be read.

The tables from IGNORED to KEEPING_MISTAKES hold the known mistakes. Each changes one of the two parts of a `Formula`:
the rule, which is the arithmetic, or the keeping, which decides what settings and state a step gets. Add new mistakes
there, and an exhibit (a published optimizer that makes the mistake) to `tests/museum/`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch

from lmsys import registry, testing
from lmsys.check import optimizer_formula, optimizer_runs, question


def questions(entry: registry.Entry, options: question.Options) -> Iterator[question.Question]:
    """A question for each run, from the first step to the rarest inputs.

    ValueError for an optimizer that looks like none of AdamW, Adam and SGD.
    """
    optimizer = entry.load()
    claim = optimizer_runs.claim_of(optimizer)
    form = form_of(optimizer, claim, options.seed)
    held_to = f"{claim}\n  its first steps are those of {form}" if form and form.differs else str(claim)
    for case in optimizer_runs.cases_of(claim):
        about = f"{case.about}, {str(case.dtype).removeprefix('torch.')}"
        yield question.Question(
            about=about,
            judge=partial(failure, optimizer, claim, form, case, options.seed),
            shape=f"{about}\n  {held_to}",
            reason=case.why_not(claim),
            extreme=bool(case.sizes),
        )


def remark(entry: registry.Entry, options: question.Options) -> str:
    """The form that the optimizer follows, in words: the last line of the report."""
    optimizer = entry.load()
    claim = optimizer_runs.claim_of(optimizer)
    return str(form_of(optimizer, claim, options.seed) or optimizer_formula.FORMS[claim.algorithm][0])


NEAR_EPS = 2.0**-27  # scales gradients to about 7.5e-9, so that an eps of 1e-8 shows


def form_of(optimizer: Any, claim: optimizer_runs.Claim, seed: int) -> optimizer_formula.Form | None:
    """The form that an optimizer's first four steps follow the longest.

    None if no form agrees with its first step, or if a step raises an exception or makes a weight that is not finite.
    """
    # AdamW is asked with decay, in which its forms may differ, if it takes one.
    decay = claim.taken({"weight_decay": 0.5}) if claim.algorithm == "AdamW" else {}
    run = optimizer_runs.run_of(optimizer_runs.Case("the first steps", steps=4, given=(decay,)), seed)
    run = replace(run, gradients=[[g * NEAR_EPS for g in of_step if g is not None] for of_step in run.gradients])
    try:
        made = optimizer_runs.trace_of(optimizer, claim, run)
    except Exception:
        return None  # the questions report the exception
    if not all(bool(p.isfinite().all()) for of_step in made for p in of_step):
        return None
    counts = [_followed(form, run, made) for form in optimizer_formula.FORMS[claim.algorithm]]
    return optimizer_formula.FORMS[claim.algorithm][counts.index(max(counts))] if max(counts) else None


def _followed(form: optimizer_formula.Form, run: optimizer_formula.Run, made: optimizer_formula.Trace) -> int:
    """The number of steps, from the first on, that agree with the form.

    made  the weights that the optimizer made in the run, by step
    """
    exact, plain = (
        optimizer_formula.Formula(form.rule).trace(run, [list(run.parameters)] + made[:-1], dtype)
        for dtype in (torch.float64, torch.float32)
    )
    for number, of_step in enumerate(zip(made, exact, plain, strict=True)):
        if not all(testing.error_ratio(*triple) <= 1 for triple in zip(*of_step, strict=True)):
            return number
    return len(made)


# By the memory of a case: the mistake that is named if no other explains the fault. Earlier cases have shown that such
# steps are right in contiguous memory.
ASTRAY = dict.fromkeys(
    optimizer_runs.MEMORY.keys() - {"contiguous"},
    "steps are lost, or change memory beside a weight that is not contiguous",
)


def failure(
    optimizer: Any,
    claim: optimizer_runs.Claim,
    form: optimizer_formula.Form | None,
    case: optimizer_runs.Case,
    seed: int,
) -> question.Fault | None:
    """The fault of an optimizer's steps in the run of a case; None if all are right. The questions call this.

    form  the steps are compared with this form; None: with torch's
    """
    run = optimizer_runs.run_of(case, seed)
    changed: list[tuple[int, int]] = []
    try:
        made = optimizer_runs.trace_of(optimizer, claim, run, changed=lambda step, i: changed.append((step, i)))
    except Exception as error:
        # An optimizer may refuse weights that are not contiguous.
        return None if case.memory != "contiguous" else question.Fault.raised(error)
    if changed and not case.in_place:
        step, i = changed[0]
        return question.Fault.explained(
            f"  step {step + 1} of {case.steps}, parameter {i}: the gradient differs after the step",
            "step() changes the gradient in place; gradients must stay as they are",
            error_ratio=None,
        )
    # The formula begins each step from the weights that the optimizer itself has made. Master weights cannot be read:
    # with them (`begins` is None) it begins only the first step so, and goes on from its own weights.
    begins = None if case.masters else [list(run.parameters)] + made[:-1]
    exact = optimizer_formula.Formula((form or optimizer_formula.FORMS[claim.algorithm][0]).rule).trace(run, begins)
    plain = _plain(claim, form, run, begins)
    for step, i in product(range(case.steps), range(len(run.parameters))):
        p, before = made[step][i], run.parameters[i]
        if p.dtype != before.dtype or p.shape != before.shape:
            return question.Fault(f"  step {step + 1} makes parameter {i} {p.dtype} of shape {tuple(p.shape)}")
        ratios = _ratios(p, exact[step][i], plain[step][i])
        if max(ratios) > 1:
            return question.Fault.explained(
                _place(case, step, i, ratios, p, exact[step][i]),
                explain(claim, form, case, run, (made, exact, plain), begins) or ASTRAY.get(case.memory),
                max(ratios),
            )
    return None


def _plain(
    claim: optimizer_runs.Claim,
    form: optimizer_formula.Form | None,
    run: optimizer_formula.Run,
    begins: optimizer_formula.Trace | None,
) -> optimizer_formula.Trace:
    """The run as plain PyTorch makes it, in the dtype of the parameters.

    With master weights it is computed in float32, and then rounded to that dtype. From its error against the exact run
    follows how large an optimizer's error may be.
    """
    dtype = run.parameters[0].dtype
    if begins is None:
        run = replace(
            run,
            parameters=[p.float() for p in run.parameters],
            gradients=[[None if g is None else g.float() for g in of_step] for of_step in run.gradients],
        )
    made = (
        optimizer_formula.Formula(form.rule).trace(run, begins, run.parameters[0].dtype)
        if form and form.differs  # torch has no optimizer of this form
        else optimizer_runs.trace_of(
            claim.plain, replace(claim, masters=None), replace(run, reloads=frozenset()), begins
        )
    )
    return [[p.to(dtype) for p in parameters] for parameters in made]


def _ratios(made: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> list[float]:
    """The error of each row of a parameter over the budget of that row. A parameter with one dimension is one row."""
    rows = zip(*(x.reshape(-1, x.shape[-1]) for x in (made, exact, plain)), strict=True)
    return [testing.error_ratio(*row) for row in rows]


def _place(
    case: optimizer_runs.Case, step: int, i: int, ratios: list[float], made: torch.Tensor, exact: torch.Tensor
) -> str:
    """The place, in words, where parameter i is most wrong after a step.

    ratios  each row's error over its budget
    made    the parameter as the optimizer made it
    exact   the parameter as it should be
    """
    row, wrong, size = ratios.index(max(ratios)), sum(ratio > 1 for ratio in ratios), case.sizes.get(step)
    made, exact = (x.reshape(len(ratios), -1)[row] for x in (made, exact))
    (column,) = question.worst(made, exact)
    return (
        f"  step {step + 1} of {case.steps}, parameter {i}, row {row}, column {column}: expected"
        f" {exact[column].item():.6g}, got {made[column].item():.6g}; the largest error is"
        f" {question.times_allowed(ratios[row])}\n"
        f"  wrong in {wrong} of {len(ratios)} rows" + (f", of a step whose gradients are {size}" if size else "")
    )


def explain(
    claim: optimizer_runs.Claim,
    form: optimizer_formula.Form | None,
    case: optimizer_runs.Case,
    run: optimizer_formula.Run,
    traces: tuple[optimizer_formula.Trace, optimizer_formula.Trace, optimizer_formula.Trace],
    begins: optimizer_formula.Trace | None,
) -> str | None:
    """The known mistake that leads to the steps that were made, in words; None if there is none.

    form    mistakes are tried in this form; None: in all forms, since a mistake may hide which form it is
    traces  the weights by step: as the optimizer made them, as they should be, and as plain PyTorch makes them
    begins  the weights that each step begins from, as in `Formula.trace`
    """
    forms = optimizer_formula.FORMS[claim.algorithm]
    others = {
        f"the formula changes between runs: the first steps are those of {form.words}, these are those of {x.words}": (
            optimizer_formula.Formula(x.rule)
        )
        for x in forms
        if form and x is not form
    }
    for rule in [x.rule for x in ([form] if form else forms)]:
        # A case without reloads comes first: if it passes, only load_state_dict can have lost the master weights.
        lost = "load_state_dict loses the float32 masters" if case.reloads else "no float32 masters are kept"
        unkept = (
            f"{lost}: updates below bfloat16 precision vanish",
            optimizer_formula.Formula(rule, weights=torch.bfloat16),
        )
        for mistake, formula in chain(
            [unkept] if case.masters else [], mistakes(claim.algorithm, rule).items(), others.items()
        ):
            if _gives(formula.trace(run, begins), traces):
                return mistake
    return None


def _gives(
    mistaken: optimizer_formula.Trace,
    traces: tuple[optimizer_formula.Trace, optimizer_formula.Trace, optimizer_formula.Trace],
) -> bool:
    """True if a mistake gives the weights that were made, in all steps, and if these are not the right ones.

    The weights of the mistake and those that were made may differ by as much as right ones.

    mistaken  the weights that the mistake gives, by step
    traces    as in `explain`
    """
    differs = False
    flat = [list(chain.from_iterable(trace)) for trace in traces + (mistaken,)]
    for made, exact, plain, wrong in zip(*flat, strict=True):
        finite = made.isfinite()
        if not torch.equal(finite, wrong.isfinite()):
            return False
        wrong = torch.where(finite, wrong, exact)
        # `wrong` takes the place of the exact steps. Plain PyTorch's error is added to it, so the budget stays.
        if max(_ratios(torch.where(finite, made, exact), wrong, (wrong + (plain - exact)).to(plain.dtype))) > 1:
            return False
        differs |= not bool(finite.all()) or max(_ratios(wrong, exact, plain)) > 1
    return differs


# {mistake in words: {field: value that makes the mistake}}. The fields are those of a rule (`Adam`, `Sgd`) or of a
# `Formula`. The docstrings of these classes say what each field is, and which arguments it gets if it is a function.
Changes = dict[str, dict[str, Any]]
# Rules differ in how weights decay. `in_gradient` times weight_decay p is added to the gradient of a weight p; what
# `taken` returns is subtracted from p: `Adam.taken` returns lr weight_decay p, and `Sgd.taken` returns 0.
DECOUPLED: dict[str, Any] = {"in_gradient": 0.0, "taken": optimizer_formula.Adam.taken}
IGNORED: Changes = {"weight_decay is ignored": {"in_gradient": 0.0, "taken": optimizer_formula.Sgd.taken}}

MOMENTS: Changes = {  # mistakes of AdamW and Adam, as changes of the rule
    "bias correction is forgotten: m / (1 - beta1 ** t), v / (1 - beta2 ** t)": {
        "corrections": lambda c1, c2: (1.0, 1.0)
    },
    "bias correction of the first moment is forgotten: m / (1 - beta1 ** t)": {"corrections": lambda c1, c2: (1.0, c2)},
    "bias correction of the second moment is forgotten: v / (1 - beta2 ** t)": {
        "corrections": lambda c1, c2: (c1, 1.0)
    },
    "moments are multiplied by 1 - beta ** t, not divided": {"corrections": lambda c1, c2: (1 / c1, 1 / c2)},
    "betas are exchanged": {"betas": lambda beta1, beta2: (beta2, beta1)},
    "beta and 1 - beta are exchanged: m = (1 - beta1) m + beta1 g, not beta1 m + (1 - beta1) g": {
        "betas": lambda beta1, beta2: (1 - beta1, 1 - beta2)
    },
    "the second moment is the mean of g, not of g²": {"square": lambda g: g},
    "the second moment is the mean of |g|, not of g²": {"square": torch.abs},
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
RULE_MISTAKES: Mapping[str, Changes] = {  # by algorithm, as changes of the rule
    "AdamW": IGNORED
    | {
        "weight decay is coupled: it is added to the gradient, as in Adam, not taken from the weights": {
            "in_gradient": 1.0,
            "taken": optimizer_formula.Sgd.taken,
        },
        "weight decay is taken from the weights and added to the gradient as well": {"in_gradient": 1.0},
        "weights decay twice in a step": {"taken": lambda lr, decay, p: (1 - (1 - lr * decay) ** 2) * p},
        "weight decay is not scaled by lr": {"taken": lambda lr, decay, p: decay * p},
        "weight decay is scaled by lr twice": {"taken": lambda lr, decay, p: lr * lr * decay * p},
        "lr * weight_decay is subtracted, not lr * weight_decay * weight": {"taken": lambda lr, decay, p: lr * decay},
        "weights grow: weight decay is added to them, not subtracted": {"taken": lambda lr, decay, p: -lr * decay * p},
    }
    | MOMENTS,
    "Adam": IGNORED
    | {
        "weight decay is decoupled, as in AdamW: Adam adds it to the gradient": DECOUPLED,
        "weight decay is added to the gradient twice": {"in_gradient": 2.0},
    }
    | MOMENTS,
    "SGD": IGNORED
    | {
        "weight decay is ignored where momentum is 0": {"only_with_momentum": True},
        "weight decay is added to the gradient twice": {"in_gradient": 2.0},
        "weight decay is decoupled: SGD adds it to the gradient": DECOUPLED,
        "weight decay is not scaled by lr": {"in_gradient": 0.0, "taken": lambda lr, decay, p: decay * p},
        "dampening is applied to the first gradient too; torch starts the buffer at g": {
            "buffer": lambda b, g, momentum, dampening: (0 if b is None else momentum * b) + (1 - dampening) * g,
        },
        "the buffer is a mean: momentum b + (1 - momentum) g, not momentum b + (1 - dampening) g": {
            "buffer": lambda b, g, momentum, dampening: (0 if b is None else momentum * b) + (1 - momentum) * g,
        },
        "the momentum buffer adds up lr g, not g: older gradients keep the lr of their step": {"rate_within": True},
        "nesterov is ignored": {"nesterov": lambda g, b, momentum: b},
        "nesterov steps by b + momentum (b - g), not by g + momentum b": {
            "nesterov": lambda g, b, momentum: b + momentum * (b - g)
        },
    },
}

COUNTING: Changes = {  # mistakes in the number of steps, t
    "steps are not counted: bias correction stays at t = 1": {"count": lambda steps, calls, of_all: 1},
    "each step is counted twice: t grows by 2": {"count": lambda steps, calls, of_all: 2 * steps},
    "steps are counted from 2: bias correction uses t + 1": {"count": lambda steps, calls, of_all: steps + 1},
    "one counter is raised once for each parameter: t grows too fast": {"count": lambda steps, calls, of_all: of_all},
    "one step counter serves all: a parameter that skipped steps has the bias correction of one that did not": {
        "count": lambda steps, calls, of_all: calls,
    },
}
KEEPING: Changes = {  # mistakes in keeping settings and state, of every algorithm
    "the sign is wrong: weights move along the gradient, not against it": {
        "setting": lambda schedule, step, group: schedule[step][group] | {"lr": -schedule[step][group]["lr"]}
    },
    "maximize is ignored: weights move against the gradient": {
        "setting": lambda schedule, step, group: schedule[step][group] | {"maximize": False}
    },
    "settings of the first param group are used for all": {"setting": lambda schedule, step, group: schedule[step][0]},
    "lr of the first param group is used for all": {
        "setting": lambda schedule, step, group: schedule[step][group] | {"lr": schedule[step][0]["lr"]},
    },
    "lr is read once, in the constructor: changes in param_groups are ignored": {
        "setting": lambda schedule, step, group: schedule[step][group] | {"lr": schedule[0][group]["lr"]},
    },
    "settings are read once, in the constructor: changes in param_groups are ignored": {
        "setting": lambda schedule, step, group: schedule[0][group],
    },
    "settings other than lr are read once, in the constructor: changes in param_groups are ignored": {
        "setting": lambda schedule, step, group: schedule[0][group] | {"lr": schedule[step][group]["lr"]},
    },
    "parameters without a gradient are stepped, as if the gradient were zero": {"without_gradient": "step"},
    "parameters of one shape share one state": {"shared": True},
    "moments are not kept from step to step": {"forgets": True},
    "state is lost by load_state_dict": {"loads": lambda state: {}},
    "load_state_dict leaves lr as the constructor set it": {
        "restores": lambda loaded, made: loaded | {"lr": made["lr"]},
    },
    "load_state_dict leaves settings as the constructor set them": {"restores": lambda loaded, made: made},
}
KEEPING_OF_ADAM: Changes = {  # more mistakes in keeping settings and state, of AdamW and Adam
    "eps of the first param group is used for all": {
        "setting": lambda schedule, step, group: schedule[step][group] | {"eps": schedule[step][0]["eps"]},
    },
    "the count of steps is lost by load_state_dict": {"loads": lambda state: state | {"t": 0}},
    "moments are lost by load_state_dict": {"loads": lambda state: {"t": state["t"]}},
    "the second moment is lost by load_state_dict": {"loads": lambda state: {"t": state["t"], "m": state["m"]}},
    "after load_state_dict bias correction uses the constructor's betas, not the loaded ones": {
        "restores": lambda loaded, made: loaded | {"corrected_by": made["betas"]},
    },
}
KEEPING_MISTAKES: Mapping[str, Changes] = {  # by algorithm, as changes of the keeping
    "AdamW": COUNTING
    | {"weight decay is applied to parameters whose grad is None; they must be skipped": {"without_gradient": "decay"}}
    | KEEPING
    | KEEPING_OF_ADAM,
    "Adam": COUNTING | KEEPING | KEEPING_OF_ADAM,
    "SGD": {"momentum is forgotten": {"forgets": True}} | KEEPING,
}


def mistakes(
    algorithm: str, rule: optimizer_formula.Adam | optimizer_formula.Sgd
) -> dict[str, optimizer_formula.Formula]:
    """The formula with each known mistake, by the mistake in words, the plainest first.

    algorithm  "AdamW", "Adam" or "SGD"
    rule       the arithmetic of the form in which the mistakes are made
    """
    return {
        mistake: optimizer_formula.Formula(replace(rule, **changes))
        for mistake, changes in RULE_MISTAKES[algorithm].items()
    } | {
        mistake: optimizer_formula.Formula(rule, **changes) for mistake, changes in KEEPING_MISTAKES[algorithm].items()
    }
