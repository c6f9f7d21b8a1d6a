"""Optimizers: each step is held to the formula in float64, made from the weights that the step began with.

The budget is what the same optimizer of torch loses in the dtype: `lmsys.testing.error_ratio`, for each row of a
parameter alone, so that a row of huge steps hides none beside it. An optimizer that claims float32 masters of bfloat16
weights is held to the whole path in float64 instead.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lmsys.check.optimizer_claims import Claim, claim_of
from lmsys.check.optimizer_formula import Formula, Run, Trace
from lmsys.check.optimizer_mistakes import RULES, mistakes, of_masters
from lmsys.check.optimizer_runs import Asked, asked_of, run_of, trace_of
from lmsys.check.question import Fault, Options, Question
from lmsys.registry import Entry
from lmsys.testing import error_ratio


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The runs, from the first step to the rarest inputs. ValueError for what claims to be no known algorithm."""
    optimizer = entry.load()
    claim = claim_of(optimizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for asked in asked_of(claim):
        about = f"{asked.about}, {str(asked.dtype).removeprefix('torch.')}"
        judge = partial(failure, optimizer, claim, asked, options.seed, device)
        yield Question(about, judge, f"{about}\n  {claim}", asked.why_not(claim), extreme=bool(asked.sizes))


def failure(optimizer: Any, claim: Claim, asked: Asked, seed: int, device: str) -> Fault | None:
    """The fault of an optimizer's steps in a run; None where there is none."""
    run = run_of(asked, seed, device)
    changed: list[tuple[int, int]] = []
    try:
        made = trace_of(optimizer, claim, run, changed=lambda step, i: changed.append((step, i)))
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Fault(f"  it raises {type(error).__name__}: {lines[0] if lines else 'no message'}")
    if changed and not asked.in_place:
        step, i = changed[0]
        mistake = f"step {step + 1} of {asked.steps} changes the gradient of parameter {i} in place"
        return Fault(f"  {mistake}: what reads it afterwards, such as accumulation, reads another", mistake)
    begins = None if asked.masters else [list(run.parameters), *made[:-1]]
    exact = Formula(RULES[claim.algorithm]).trace(run, begins)
    plain = _plain(claim, run, begins)
    for step, parameters in enumerate(made):
        for i, p in enumerate(parameters):
            if p.dtype != run.parameters[i].dtype or p.shape != run.parameters[i].shape:
                return Fault(f"  step {step + 1} makes parameter {i} {p.dtype} of shape {tuple(p.shape)}")
            ratios = _ratios(p, exact[step][i], plain[step][i])
            if max(ratios) > 1:
                return _fault(claim, asked, run, (made, exact, plain), begins, (step, i, ratios))
    return None


def _plain(claim: Claim, run: Run, begins: Trace | None) -> Trace:
    """The run by torch's own in its dtype; one with masters in float32, rounded when it is read."""
    without_masters = replace(claim, masters=None)
    if begins is not None:
        return trace_of(claim.plain, without_masters, replace(run, reloads=frozenset()), begins)
    dtype = run.parameters[0].dtype
    gradients = [[None if g is None else g.float() for g in of_step] for of_step in run.gradients]
    wide = replace(run, parameters=[p.float() for p in run.parameters], gradients=gradients, reloads=frozenset())
    return [[p.to(dtype) for p in parameters] for parameters in trace_of(claim.plain, without_masters, wide)]


def _ratios(made: Tensor, exact: Tensor, plain: Tensor) -> list[float]:
    """The error of each row, of a vector as a whole, over its budget."""
    rows = zip(*(x.reshape(-1, x.shape[-1]) for x in (made, exact, plain)), strict=True)
    return [error_ratio(*row) for row in rows]


def _fault(
    claim: Claim,
    asked: Asked,
    run: Run,
    traces: tuple[Trace, Trace, Trace],
    begins: Trace | None,
    place: tuple[int, int, list[float]],
) -> Fault:
    step, i, ratios = place
    made, exact = (x[step][i].reshape(len(ratios), -1).double() for x in traces[:2])
    row = ratios.index(max(ratios))
    column = int((made[row] - exact[row]).abs().nan_to_num(nan=torch.inf).argmax())
    size = asked.sizes.get(step)
    wrong = sum(ratio > 1 for ratio in ratios)
    lines = [
        f"  step {step + 1} of {asked.steps}, parameter {i}, row {row}, column {column}: expected"
        f" {exact[row, column].item():.6g}, got {made[row, column].item():.6g}; the largest error is"
        f" {ratios[row]:.3g} times what is allowed",
        f"  wrong in {wrong} of {len(ratios)} rows" + (f", of a step whose gradients are {size}" if size else ""),
    ]
    mistake = explain(claim, asked, run, traces, begins)
    lines.append(f"  pattern: {mistake}" if mistake else "  no known mistake gives these steps")
    return Fault("\n".join(lines), mistake, ratios[row])


def explain(
    claim: Claim, asked: Asked, run: Run, traces: tuple[Trace, Trace, Trace], begins: Trace | None
) -> str | None:
    """The mistake whose steps are those that were made, in words; None where no known one's are."""
    known = mistakes(claim.algorithm)
    for mistake, formula in chain(of_masters(claim.algorithm, bool(asked.reloads)), known) if asked.masters else known:
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
        if not torch.equal(made.isfinite(), wrong.isfinite()):
            return False
        finite = made.isfinite()
        wrong = torch.where(finite, wrong, exact)
        if max(_ratios(torch.where(finite, made, exact), wrong, (wrong + (plain - exact)).to(plain.dtype))) > 1:
            return False
        differs |= not bool(finite.all()) or max(_ratios(wrong, exact, plain)) > 1
    return differs
