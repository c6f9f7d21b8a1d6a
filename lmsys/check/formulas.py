"""Functions of tensors: their results and gradients held to float64, and the mistake named that gives what they give.

A formula is the function as it is written on paper, in PyTorch and in any dtype. In float64 it is what is right, in the
dtype of the inputs it says what plain PyTorch loses, which is the budget. A mistake is the formula with the mistake in
it. Most are made in float64; those that only a narrow dtype shows, as overflows, in that dtype.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmsys.check import places
from lmsys.check.question import Fault
from lmsys.check.signature import Called
from lmsys.testing import error_ratio, norm_rms, rms_budget

Outputs = dict[str, Tensor]  # "result", and the gradient of each input by its name
RESULT = "result"


@dataclass(frozen=True)
class Problem:
    """Inputs of a function, and the gradient of its result.

    inputs       by name, those whose gradients are asked for, in the dtype that is tested
    settings     what else it takes, by role
    grad_output  None: no gradients
    extreme      plain PyTorch may be exact here, so that there is no mean error that others may have
    """

    inputs: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    grad_output: Tensor | None
    extreme: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.inputs.values())).dtype


Formula = Callable[[Mapping[str, Tensor], Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class Mistake:
    """A mistake in words, and the outputs of an implementation that makes it."""

    text: str
    outputs: Callable[[Problem], Outputs] = field(repr=False)


def outputs_of(formula: Formula, problem: Problem, dtype: torch.dtype = torch.float64) -> Outputs:
    """The result of a formula in this dtype, and the gradients."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in problem.inputs.items()}
    result = formula(leaves, problem.settings)
    found = {RESULT: result.detach()}
    if problem.grad_output is not None:
        gradients = torch.autograd.grad(
            result, list(leaves.values()), problem.grad_output.to(result.dtype), allow_unused=True
        )
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            found[name] = torch.zeros_like(leaf) if gradient is None else gradient
    return found


def forward(text: str, formula: Formula) -> Mistake:
    """A mistake in the formula, which its gradient makes too."""
    return Mistake(text, lambda problem: outputs_of(formula, problem))


def narrow(text: str, formula: Formula, dtype: torch.dtype | None = None) -> Mistake:
    """A mistake that only shows in the dtype of the inputs, or in this one."""
    return Mistake(text, lambda problem: outputs_of(formula, problem, dtype or problem.dtype))


def backward(text: str, formula: Formula, gradients: Callable[[Problem, Outputs], Outputs]) -> Mistake:
    """A mistake of a backward alone: `gradients` makes some of the gradients from the problem in float64."""

    def outputs(problem: Problem) -> Outputs:
        if problem.grad_output is None:
            return {}
        exact = Problem(
            {name: x.detach().double() for name, x in problem.inputs.items()},
            problem.settings,
            problem.grad_output.double(),
        )
        return gradients(exact, outputs_of(formula, exact))

    return Mistake(text, outputs)


def grad_output_ignored(formula: Formula) -> Mistake:
    """The gradients that ones would give."""

    def gradients(problem: Problem, right: Outputs) -> Outputs:
        assert problem.grad_output is not None
        ones = Problem(problem.inputs, problem.settings, torch.ones_like(problem.grad_output))
        return {name: x for name, x in outputs_of(formula, ones).items() if name != RESULT}

    return backward("the gradient of the result is ignored: ones stand for it", formula, gradients)


def judge(
    call: Called,
    formula: Formula,
    mistakes: Callable[[Problem], Iterable[Mistake]],
    problem: Problem,
    widened: bool = False,
    plain_formula: Formula | None = None,
) -> Fault | None:
    """The fault of what a function gives; None where it is right.

    widened        the result may be float32 where the inputs are narrower
    plain_formula  of the ways in which the formula is usually written, the one that loses most; default: the formula
    """
    before = {name: x.clone() for name, x in problem.inputs.items()}
    try:
        found = run(call, problem)
    except Exception as error:
        said = str(error).strip().splitlines()
        return Fault(f"  it raises {type(error).__name__}: {said[0] if said else 'no message'}")
    for name, x in problem.inputs.items():
        if not torch.equal(x, before[name]):
            return Fault(f"  it changes its input {name}", f"it changes its input {name}")
    reference = outputs_of(formula, problem)
    plain = outputs_of(plain_formula or formula, problem, problem.dtype)
    for name, right in reference.items():
        if name not in found:
            detached = "the result is detached, or the backward gives none"
            return Fault(f"  no gradient reaches {name}\n  pattern: {detached}", detached)
        dtypes = {problem.dtype} | ({torch.float32} if widened and name == RESULT else set())
        if found[name].shape != right.shape or found[name].dtype not in dtypes:
            given = f"{found[name].dtype} of shape {tuple(found[name].shape)}"
            return Fault(f"  {_called(name)} is {given}; expected {problem.dtype} of shape {tuple(right.shape)}")
        ratio = ratio_of(found[name], right, plain[name], mean=not problem.extreme)
        if ratio > 1:
            mistake = explain(found, name, reference, plain, problem, mistakes(problem))
            return _fault(name, list(reference), found[name], right, ratio, mistake)
    return None


def run(call: Called, problem: Problem) -> Outputs:
    """The result of a function, and the gradients that reach its inputs."""
    grad = problem.grad_output is not None
    leaves = {name: x.detach().requires_grad_(grad) for name, x in problem.inputs.items()}
    with torch.set_grad_enabled(grad):
        result = call({**leaves, **problem.settings})
    found = {RESULT: result.detach()}
    if grad and result.requires_grad:
        assert problem.grad_output is not None
        upstream = problem.grad_output.to(result.dtype).expand(result.shape)
        gradients = torch.autograd.grad(result, list(leaves.values()), upstream, allow_unused=True)
        found |= {name: x for name, x in zip(leaves, gradients, strict=True) if x is not None}
    torch.cuda.synchronize() if result.is_cuda else None
    return found


def ratio_of(found: Tensor, reference: Tensor, plain: Tensor, mean: bool = False) -> float:
    """`lmsys.testing.error_ratio` in units of the reference's largest value: gradients may be small.

    mean  tensors of a narrow dtype are held in root mean square as well
    """
    _, exponent = math.frexp(reference.abs().max().item())
    found, reference, losing = (x.double() / 2.0**exponent for x in (found, reference, plain))
    ratio = error_ratio(found, reference, losing.to(plain.dtype))
    if not mean or plain.dtype == torch.float32 or not found.dim():
        return ratio
    return max(ratio, norm_rms(found - reference) / rms_budget(reference, losing))


def explain(
    found: Outputs, name: str, reference: Outputs, plain: Outputs, problem: Problem, mistakes: Iterable[Mistake]
) -> str | None:
    """The mistake that gives `found[name]`, and not what is right, in words; None where no known one does.

    It must give what was found of the outputs before it too: a right result has no mistake of a forward.
    """
    output, right, losing = found[name], reference[name], plain[name]
    names = list(reference)[: list(reference).index(name) + 1]
    for mistake in mistakes:
        made = mistake.outputs(problem)
        if name not in made or not all(
            _alike(found[one], made[one], reference[one], plain[one]) for one in names if one in made
        ):
            continue
        if not (made[name].isfinite().all() and ratio_of(made[name], right, losing) <= 1):  # else it does not show here
            return mistake.text
    known = right.abs().max() > 0 and output.isfinite().all()
    factor = float((output.double() * right).sum() / right.square().sum()) if known else math.nan
    shows = math.isfinite(factor) and ratio_of(factor * right, right, losing) > 1
    if shows and _alike(output, factor * right, right, losing):
        return f"it is {factor:.4g} times what is right"
    return None


def _alike(found: Tensor, made: Tensor, right: Tensor, plain: Tensor) -> bool:
    """True where both are finite at the same places, and there equal within the budget of what is right."""
    made, finite = made.double(), made.isfinite()
    if not bool((finite == found.isfinite()).all()):
        return False
    made, found = made.where(finite, 0), found.double().where(finite, 0)
    lost = (plain.double() - right).where(finite, 0)
    return not bool(finite.any()) or ratio_of(found, made, (made + lost).to(plain.dtype)) <= 1


def _called(name: str) -> str:
    return "the result" if name == RESULT else f"the gradient of {name}"


def _fault(name: str, names: Sequence[str], found: Tensor, right: Tensor, ratio: float, mistake: str | None) -> Fault:
    at = places.worst(found, right)
    place = f"[{', '.join(map(str, at))}]" if at else ""
    lines = [
        f"  {_called(name)}{place}: expected {right[at].item():.6g}, got {found[at].item():.6g}; the largest error is"
        f" {ratio:.3g} times what is allowed"
    ]
    if at:
        axes = ("batch", "row", "column")[-right.dim() :] if right.dim() <= 3 else ("batch", "head", "row", "column")
        error = (found.double() - right).abs()
        wrong = error > error.max() / ratio if math.isfinite(ratio) else ~found.isfinite()
        kind = "wrong" if math.isfinite(ratio) else "NaN or inf"
        lines.append(f"  {kind} at: {places.where(wrong, axes)}")
    lines.append(f"  pattern: {mistake}" if mistake else "  no known mistake gives this result")
    if names.index(name):
        lines.append(f"  right before it: {', '.join(map(_called, names[: names.index(name)]))}")
    return Fault("\n".join(lines), mistake, ratio)
