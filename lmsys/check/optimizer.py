"""Optimizers: each step is held to the formula in float64, made from the weights that the step began with.

The formula is that of the form that its first steps follow: torch's, or another published one (`optimizer_forms.py`).
The budget is what the same optimizer of torch loses in the dtype, in other forms the formula in plain PyTorch:
`lmsys.testing.error_ratio`, for each row of a parameter alone, so that a row of huge steps hides none beside it. An
optimizer that claims float32 masters of bfloat16 weights is held to the whole path in float64 instead.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from lmsys.check import places
from lmsys.check.optimizer_claims import Claim, claim_of
from lmsys.check.optimizer_forms import FORMS, Form, form_of
from lmsys.check.optimizer_formula import Formula, Run, Trace
from lmsys.check.optimizer_mistakes import mistakes, of_masters
from lmsys.check.optimizer_runs import Asked, asked_of, run_of, trace_of
from lmsys.check.question import Fault, Options, Question
from lmsys.registry import Entry
from lmsys.testing import error_ratio


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The runs, from the first step to the rarest inputs. ValueError for what claims to be no known algorithm."""
    optimizer = entry.load()
    claim, device = claim_of(optimizer), _device()
    form = form_of(optimizer, claim, options.seed, device)
    held_to = f"{claim}\n  its first steps are those of {form}" if form and form.differs else str(claim)
    for asked in asked_of(claim):
        about = f"{asked.about}, {str(asked.dtype).removeprefix('torch.')}"
        judge = partial(failure, optimizer, claim, form, asked, options.seed, device)
        yield Question(about, judge, f"{about}\n  {held_to}", asked.why_not(claim), extreme=bool(asked.sizes))


def remark(entry: Entry, options: Options) -> str:
    """The form that the optimizer follows, in words."""
    optimizer = entry.load()
    claim = claim_of(optimizer)
    return str(form_of(optimizer, claim, options.seed, _device()) or FORMS[claim.algorithm][0])


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def failure(optimizer: Any, claim: Claim, form: Form | None, asked: Asked, seed: int, device: str) -> Fault | None:
    """The fault of an optimizer's steps in a run; None where there is none. form: None is held to torch's."""
    run = run_of(asked, seed, device)
    changed: list[tuple[int, int]] = []
    try:
        made = trace_of(optimizer, claim, run, changed=lambda step, i: changed.append((step, i)))
    except Exception as error:
        return Fault.raised(error)
    if changed and not asked.in_place:
        step, i = changed[0]
        changes = f"step {step + 1} of {asked.steps} changes the gradient of parameter {i} in place"
        return Fault(f"  {changes}: what reads it afterwards, such as accumulation, reads another", changes)
    begins = None if asked.masters else [list(run.parameters), *made[:-1]]
    exact = Formula((form or FORMS[claim.algorithm][0]).rule).trace(run, begins)
    plain = _plain(claim, form, run, begins)
    for step, i in product(range(asked.steps), range(len(run.parameters))):
        p, before = made[step][i], run.parameters[i]
        if p.dtype != before.dtype or p.shape != before.shape:
            return Fault(f"  step {step + 1} makes parameter {i} {p.dtype} of shape {tuple(p.shape)}")
        ratios = _ratios(p, exact[step][i], plain[step][i])
        if max(ratios) > 1:
            place = _place(asked, step, i, ratios, p, exact[step][i])
            mistake = explain(claim, form, asked, run, (made, exact, plain), begins)
            pattern = f"  pattern: {mistake}" if mistake else "  no known mistake gives these steps"
            return Fault(f"{place}\n{pattern}", mistake, max(ratios))
    return None


def _plain(claim: Claim, form: Form | None, run: Run, begins: Trace | None) -> Trace:
    """The run in its dtype; one with masters in float32, rounded when it is read."""
    dtype = run.parameters[0].dtype
    if begins is None:
        gradients = [[None if g is None else g.float() for g in of_step] for of_step in run.gradients]
        run = replace(run, parameters=[p.float() for p in run.parameters], gradients=gradients)
    if form and form.differs:  # torch has no optimizer of it
        made = Formula(form.rule).trace(run, begins, run.parameters[0].dtype)
    else:
        made = trace_of(claim.plain, replace(claim, masters=None), replace(run, reloads=frozenset()), begins)
    return [[p.to(dtype) for p in parameters] for parameters in made]


def _ratios(made: Tensor, exact: Tensor, plain: Tensor) -> list[float]:
    """The error of each row, of a vector as a whole, over its budget."""
    rows = zip(*(x.reshape(-1, x.shape[-1]) for x in (made, exact, plain)), strict=True)
    return [error_ratio(*row) for row in rows]


def _place(asked: Asked, step: int, i: int, ratios: list[float], made: Tensor, exact: Tensor) -> str:
    row, wrong, size = ratios.index(max(ratios)), sum(ratio > 1 for ratio in ratios), asked.sizes.get(step)
    made, exact = (x.reshape(len(ratios), -1)[row] for x in (made, exact))
    (column,) = places.worst(made, exact)
    return (
        f"  step {step + 1} of {asked.steps}, parameter {i}, row {row}, column {column}: expected"
        f" {exact[column].item():.6g}, got {made[column].item():.6g}; the largest error is"
        f" {ratios[row]:.3g} times what is allowed\n"
        f"  wrong in {wrong} of {len(ratios)} rows" + (f", of a step whose gradients are {size}" if size else "")
    )


def explain(
    claim: Claim, form: Form | None, asked: Asked, run: Run, traces: tuple[Trace, Trace, Trace], begins: Trace | None
) -> str | None:
    """The mistake whose steps are those that were made, in words; None where no known one's are.

    A mistake may hide the form: where the first steps follow none, it is sought in all.
    """
    for rule in [of.rule for of in ([form] if form else FORMS[claim.algorithm])]:
        masters = [of_masters(rule, bool(asked.reloads))] if asked.masters else []
        for mistake, formula in chain(masters, mistakes(claim.algorithm, rule)):
            if _gives(formula.trace(run, begins), traces):
                return mistake
    return None


def _gives(mistaken: Trace, traces: tuple[Trace, Trace, Trace]) -> bool:
    """True where a mistake makes what was made in all steps, and not what is right.

    Its budget is that of what is right: plain PyTorch's error, moved to where the mistake leads.
    """
    differs = False
    flat = [list(chain.from_iterable(trace)) for trace in (*traces, mistaken)]
    for made, exact, plain, wrong in zip(*flat, strict=True):
        finite = made.isfinite()
        if not torch.equal(finite, wrong.isfinite()):
            return False
        wrong = torch.where(finite, wrong, exact)
        if max(_ratios(torch.where(finite, made, exact), wrong, (wrong + (plain - exact)).to(plain.dtype))) > 1:
            return False
        differs |= not bool(finite.all()) or max(_ratios(wrong, exact, plain)) > 1
    return differs
