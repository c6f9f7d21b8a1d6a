"""Functions of tensors: `judge` compares results and gradients with float64, and names the mistake behind a wrong one.

A *kind* is a type of implementation. The kinds that are functions of tensors, `loss.py`, `norm.py`, `rotary.py` and
`swiglu.py`, are built on this module. Each of them has a table of cases (`Case`), the inputs of a case (`Problem`), a
formula, and tables of mistakes in words, the plainest first: add cases and mistakes there, and here what all kinds
share. A *question* (question.py) asks an implementation about one case, and judges its answer.

A formula is the function as it is written on paper, in PyTorch. In float64 it gives the right result. Computed in the
dtype of the inputs it is called plain PyTorch. The *budget* is the error that an implementation may have: twice the
error of plain PyTorch, and a few roundings (`lmsys.testing`). A known mistake is a function that returns the outputs to
which it leads. Most mistakes are computed in float64; those that only a narrow dtype shows, such as overflows, are
computed in that dtype.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lmsys import draws, signature, testing
from lmsys.check import question

Inputs = Mapping[str, torch.Tensor]  # by name, as in `Problem`
Settings = Mapping[str, Any]  # other arguments, by role
Outputs = dict[str, torch.Tensor]  # "result", and the gradient of each input by its name
Formula = Callable[[Inputs, Settings], torch.Tensor]
RESULT = "result"
BLOCKS = (32, 64, 128, 256, 512, 1024)  # columns that a kernel may take at a time
NARROW = torch.bfloat16, torch.float16
DTYPES = (torch.float32,) + NARROW  # the dtypes of cases; kinds that need fewer take the first ones, such as DTYPES[:2]


@dataclass(frozen=True)
class Case:
    """A case of a function.

    about    the case in words; with `extreme` the kind of extreme inputs, a key of a table in `lmsys.extremes`
    shape    the sizes of the case; the docstring of each kind's module says of which tensor
    extreme  True: the inputs are extreme
    more     other settings of the case by name, which the kind's module reads. Two are read here. "spare columns": each
             input is a view of a tensor whose rows have so many columns more. "retained": see `Problem`
    """

    about: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    extreme: bool = False
    more: Settings = field(default_factory=dict)

    def __str__(self) -> str:
        more = "".join(f", {name} {value}" for name, value in self.more.items())
        return f"{self.about} ({str(self.dtype)[6:]}, shape {self.shape}{more})"  # [6:] drops "torch."


def cases_in(
    dtypes: Sequence[torch.dtype],
    abouts: Iterable[str],
    shape: tuple[int, ...],
    more: Settings | None = None,
    extreme: bool = False,
) -> tuple[Case, ...]:
    """Cases in each of these dtypes: one for each text in `abouts`, its `Case.about`. The rest is as in `Case`."""
    return tuple(Case(about, shape, dtype, extreme, more or {}) for dtype in dtypes for about in abouts)


def questions_of(
    cases: Iterable[Case],
    judged: Callable[[Case], question.Fault | None],
    options: question.Options,
    lacking: Collection[str] = (),
) -> Iterator[question.Question]:
    """Yields a question for each case in the dtypes of `options`.

    Without gradients (`options.grad` is False), "retained" cases, which need a second backward, are left out.

    judged   asks the implementation about a case, and returns its fault, or None
    lacking  settings that the implementation has no parameter for: it is not asked about cases that have them
    """
    for case in (x for x in cases if str(x.dtype)[6:] in options.dtypes and (options.grad or "retained" not in x.more)):
        yield question.Question(
            about=f"{case.about}, {str(case.dtype)[6:]}",
            judge=partial(judged, case),
            shape=str(case),
            reason=next((f"it takes no {name}" for name in case.more if name in lacking), None),
            extreme=case.extreme,
        )


@dataclass(frozen=True)
class Problem:
    """Inputs of a function, and the gradient of its result.

    inputs       the tensors whose gradients are checked, by name, in the dtype that is tested
    settings     the other arguments, by role
    grad_output  the gradient of the result
    grad         False: gradients are not checked
    extreme      True: the inputs are extreme. Plain PyTorch may be exact on them. Then its error leaves next to no
                 budget in root mean square, so the largest error alone is judged
    retained     the gradients are those of a second backward through a retained graph. Those of the first backward, on
                 equal inputs, are judged in an earlier case
    """

    inputs: Inputs
    settings: Settings
    grad_output: torch.Tensor
    grad: bool = True
    extreme: bool = False
    retained: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.inputs.values())).dtype

    @classmethod
    def of(
        cls, case: Case, options: question.Options, inputs: Inputs, settings: Settings, grad_output: torch.Tensor
    ) -> "Problem":
        """The problem of a case: all tensors on the device, and all but the settings in the dtype of the case."""
        device, spare = question.device(), case.more.get("spare columns", 0)
        return cls(
            {
                name: torch.nn.functional.pad(x.to(device, case.dtype), (0, spare))[..., : x.shape[-1]]
                for name, x in inputs.items()
            },
            {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in settings.items()},
            grad_output.to(device, case.dtype),
            grad=options.grad,
            extreme=case.extreme,
            retained=case.more.get("retained", False),
        )


def drawn(options: question.Options, name: str, *shape: int) -> torch.Tensor:
    """Standard normal values of this shape. They depend on the seed and on `name` alone."""
    return draws.values(draws.key(options.seed, name), first=0, count=math.prod(shape)).view(shape)


# {mistake in words: function that returns the outputs it leads to}. For a mistake of the backward these are gradients.
Mistakes = dict[str, Callable[[Problem], Outputs]]
Gradients = Callable[[Problem, Outputs], Outputs]  # (problem in float64, its right outputs) -> mistaken gradients


def outputs_of(formula: Formula, problem: Problem, dtype: torch.dtype = torch.float64) -> Outputs:
    """The result of a formula computed in `dtype`, and, if the problem asks for them, its gradients by input."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in problem.inputs.items()}
    result = formula(leaves, problem.settings)
    if not problem.grad:
        return {RESULT: result.detach()}
    gradients = torch.autograd.grad(
        result,
        list(leaves.values()),
        problem.grad_output.to(result.dtype),
        allow_unused=True,
        materialize_grads=True,
    )
    return {RESULT: result.detach()} | dict(zip(leaves, gradients, strict=True))


def forwards(formulas: Mapping[str, Formula], dtype: torch.dtype = torch.float64) -> Mistakes:
    """Mistakes made in the forward, from {mistake in words: mistaken formula}. autograd gives their gradients.

    dtype  that of the computation, forward and backward
    """
    return {text: partial(outputs_of, formula, dtype=dtype) for text, formula in formulas.items()}


def backwards(formula: Formula, gradients: Mapping[str, Gradients]) -> Mistakes:
    """Mistakes made in the backward alone, each of which gives some of the gradients.

    formula    the right formula
    gradients  {mistake in words: function that makes its gradients}. One mistake that every backward can make, to
               ignore grad_output, is put before these
    """
    mistaken: dict[str, Gradients] = {
        "grad_output is ignored: the backward uses ones in its place": lambda exact, _: outputs_of(
            formula, replace(exact, grad_output=torch.ones_like(exact.grad_output))
        ),
        **gradients,
    }
    return {text: partial(_backward, formula, gradients_of) for text, gradients_of in mistaken.items()}


def _backward(formula: Formula, gradients_of: Gradients, problem: Problem) -> Outputs:
    """The mistaken gradients for a problem, which is given to `gradients_of` in float64; {} if none are checked."""
    if not problem.grad:
        return {}
    exact = replace(
        problem,
        inputs={name: x.detach().double() for name, x in problem.inputs.items()},
        grad_output=problem.grad_output.double(),
    )
    return gradients_of(exact, outputs_of(formula, exact))


def padding(width: int) -> list[int]:
    """The numbers of columns by which blocks of the sizes in BLOCKS pad a row of `width`, in increasing order; no 0."""
    return sorted({-width % block for block in BLOCKS} - {0})


def cut(width: int) -> list[int]:
    """The numbers of columns that a kernel may read of `width` if it mistakenly drops some, in increasing order.

    It may drop the last column, a last block that is not full, or all blocks but the first.
    """
    whole_blocks = {width // block * block for block in BLOCKS}
    return sorted(x for x in whole_blocks.union(BLOCKS, [width - 1]) if 0 < x < width)


def parts_of_sum(rows: str, count: int, sizes: Iterable[int]) -> dict[str, slice]:
    """{mistake in words: the rows over which a weight's gradient is summed, instead of over all `count` rows}.

    rows   the word for rows in messages, such as "tokens"
    sizes  the possible sizes of a block of rows
    """
    parts = {}
    for size in (size for size in sizes if size < count):
        last = (count - 1) // size * size
        parts[f"only the last block of {size} {rows} adds to the weight's gradient"] = slice(last, None)
        parts[f"only the first {size} {rows} add to the weight's gradient"] = slice(size)
        if count % size:
            left = f"{count - last} {rows}: they fill" if last < count - 1 else f"of {count} {rows}: it fills"
            parts[f"the weight's gradient lacks the last {left} only part of a block of {size}"] = slice(last)
    return parts


def judge(
    call: signature.Called,
    formula: Formula,
    mistakes: Callable[[Problem], Mistakes],
    problem: Problem,
    widened: bool = False,
    plain_formula: Formula | None = None,
) -> question.Fault | None:
    """The fault of a function's result and gradients; None if they are right. The kinds call this for their cases.

    call           the function, which takes its arguments by their roles (`lmsys.signature`)
    mistakes       returns the known mistakes for a problem
    widened        True: the result may be float32 although the inputs are narrower
    plain_formula  another usual way to write the formula: the larger error of the two makes the budget
    """
    given = {**problem.inputs, **problem.settings, "grad_output": problem.grad_output}
    before = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
    try:
        outputs = run(call, problem)
    except Exception as error:
        # An implementation may refuse inputs that are not contiguous, and a second backward.
        may_refuse = problem.retained or not all(x.is_contiguous() for x in problem.inputs.values())
        return None if may_refuse else question.Fault.raised(error)
    if changed := [name for name, x in before.items() if not torch.equal(x, given[name])]:
        return question.Fault.explained(
            f"  {changed[0]} differs after the call and its backward",
            f"the function, or its backward, changes its input {changed[0]}",
            error_ratio=None,
        )
    reference = outputs_of(formula, problem)
    # plain: what PyTorch computes in the dtype of the inputs; its error makes the budget.
    plain, other = (outputs_of(x, problem, problem.dtype) for x in (formula, plain_formula or formula))
    plain = {name: testing.larger_error(reference[name], x, other[name]) for name, x in plain.items()}
    for name, right in reference.items():
        if name not in outputs:
            return question.Fault.explained(
                f"  no gradient reaches {name}",
                "the result is detached, or the backward returns no gradient",
                error_ratio=None,
            )
        if outputs[name].shape != right.shape or outputs[name].dtype not in {
            problem.dtype,
            torch.float32 if widened and name == RESULT else problem.dtype,
        }:
            return question.Fault(
                f"  {_name_of(name)} is {outputs[name].dtype} of shape {tuple(outputs[name].shape)};"
                f" expected {problem.dtype} of shape {tuple(right.shape)}"
            )
        ratio = _ratio(outputs[name], right, plain[name], mean=not problem.extreme)
        if ratio > 1:
            return _fault(
                name,
                list(reference),
                outputs[name],
                right,
                ratio,
                explain(
                    outputs,
                    name,
                    reference,
                    plain,
                    problem,
                    _mistakes_of_order(call, outputs, name, right, plain[name]) | mistakes(problem),
                ),
            )
    # Once more without gradients, since an implementation may then run other code.
    return (
        judge(call, formula, mistakes, replace(problem, grad=False), widened, plain_formula) if problem.grad else None
    )


def _mistakes_of_order(
    call: signature.Called, outputs: Outputs, name: str, right: torch.Tensor, plain: torch.Tensor
) -> Mistakes:
    """The known mistakes that show only where a call, or a backward, follows another.

    outputs       what the function gave. A mistake of these leads to the same, or is none: then its function gives {}
    right, plain  `outputs[name]`, which is wrong, as float64 and as plain PyTorch gives it
    """
    return {
        "the first backward changes what a second one of the same graph needs": (
            lambda problem: outputs if problem.retained else {}
        ),
        "a later call changes what this call returned, or what it saved for its backward": (
            lambda problem: (
                outputs if _ratio(run(call, problem, alone=True)[name], right, plain, not problem.extreme) <= 1 else {}
            )
        ),
    }


def run(call: signature.Called, problem: Problem, alone: bool = False) -> Outputs:
    """The result of a function (if that is a tuple, its first item), and the gradients of the inputs that have one.

    alone  False: the function is called a second time, on other inputs, before the first result is read: this shows if
           the second call overwrites what the first has returned or saved
    """
    leaves = {name: x.detach().requires_grad_(problem.grad) for name, x in problem.inputs.items()}
    with (
        torch.set_grad_enabled(problem.grad),
        # Compiled functions are compiled again for most cases, and torch stops that at 8 by default.
        torch._dynamo.config.patch(recompile_limit=256) if "torch._dynamo" in sys.modules else nullcontext(),
    ):
        result = call({**leaves, **problem.settings})
        if not alone:
            call({**{name: x.flip(-1) / 2 for name, x in leaves.items()}, **problem.settings})
    result = result[0] if isinstance(result, tuple) else result
    outputs = {RESULT: result.detach()}
    if problem.grad and result.requires_grad:
        for _ in range(1 + problem.retained):
            gradients = torch.autograd.grad(
                result,
                list(leaves.values()),
                problem.grad_output.to(result.dtype).expand(result.shape),
                retain_graph=problem.retained,
                allow_unused=True,
            )
        outputs |= {name: x for name, x in zip(leaves, gradients, strict=True) if x is not None}
    torch.cuda.synchronize() if result.is_cuda else None  # errors of its kernels are raised here
    return outputs


def _ratio(output: torch.Tensor, reference: torch.Tensor, plain: torch.Tensor, mean: bool = False) -> float:
    """The error over its budget in the dtype of `plain`; with `mean`, for narrow dtypes, also in root mean square."""
    return testing.ratio_of(output, reference, plain, plain.dtype, mean=mean and plain.dtype != torch.float32)


def explain(
    outputs: Outputs, name: str, reference: Outputs, plain: Outputs, problem: Problem, mistakes: Mistakes
) -> str | None:
    """The known mistake that gives the wrong `outputs[name]`, in words; else a factor by which it is wrong; else None.

    outputs    what the function gave
    name       the first output that is wrong
    reference  what is right
    plain      what plain PyTorch gives in the dtype of the inputs

    The outputs before `name` are right, and the mistake must give these, too. So a mistake of the forward, which makes
    the result wrong, does not explain a wrong gradient beside a right result.
    """
    output, right, plain_output = outputs[name], reference[name], plain[name]
    names, mean = list(reference)[: list(reference).index(name) + 1], not problem.extreme
    for text, outputs_with in mistakes.items():
        mistaken = outputs_with(problem)
        alike = (_alike(outputs[x], mistaken[x], reference[x], plain[x], mean) for x in names if x in mistaken)
        # A mistake that gives the right result, as it may for some inputs, explains nothing.
        if (
            name in mistaken
            and all(alike)
            and not (mistaken[name].isfinite().all() and _ratio(mistaken[name], right, plain_output, mean) <= 1)
        ):
            return text
    # A scalar is a multiple of any other scalar, so a factor would say nothing about it.
    has_factor = right.dim() > 0 and bool(right.abs().max() > 0 and output.isfinite().all())
    factor = float((output.double() * right).sum() / right.square().sum()) if has_factor else math.nan
    is_wrong = math.isfinite(factor) and _ratio(factor * right, right, plain_output) > 1
    return (
        f"{_name_of(name)} is {factor:.4g} times what is right"
        if is_wrong and _alike(output, factor * right, right, plain_output)
        else None
    )


def _alike(
    output: torch.Tensor, mistaken: torch.Tensor, right: torch.Tensor, plain: torch.Tensor, mean: bool = False
) -> bool:
    """True if `output` and `mistaken` are finite at the same places, and equal there within the budget.

    right  the output in float64
    plain  what plain PyTorch gives in place of `right`; its error makes the budget
    mean   as in `_ratio`
    """
    mistaken, finite = mistaken.double(), mistaken.isfinite()
    if not bool((finite == output.isfinite()).all()):
        return False
    mistaken, output = mistaken.where(finite, 0), output.double().where(finite, 0)
    # `_ratio` makes the budget from the difference between `plain` and its reference, which is `mistaken` here. So
    # `plain` becomes `mistaken` plus the error of plain PyTorch: that leaves the difference as it was.
    # It is infinite where the dtype cannot hold the mistake's values.
    plain = (mistaken + (plain.double() - right).where(finite, 0)).to(plain.dtype)
    return not bool(finite.any()) or (bool(plain.isfinite().all()) and _ratio(output, mistaken, plain, mean) <= 1)


def _name_of(name: str) -> str:
    """The name of an output in sentences."""
    return "the result" if name == RESULT else f"the gradient of {name}"


def _fault(
    name: str, names: Sequence[str], output: torch.Tensor, right: torch.Tensor, ratio: float, mistake: str | None
) -> question.Fault:
    """The fault of the output `name`. The outputs before it in `names` are right.

    ratio  its error over the budget
    """
    at = question.worst(output, right)
    lines = [
        f"  {_name_of(name)}{str(list(at)) * bool(at)}{' without gradients' * (names == [RESULT])}: expected"
        f" {right[at].item():.6g}, got {output[at].item():.6g}; the largest error is {question.times_allowed(ratio)}"
    ]
    if at:
        error = (output.double() - right).abs()
        # `error.max() / ratio` is the error that an element may have.
        wrong = error > error.max() / ratio if math.isfinite(ratio) else ~output.isfinite()
        where = question.where(
            wrong,
            ("batch", "row", "column")[-right.dim() :] if right.dim() <= 3 else ("batch", "head", "row", "column"),
        )
        lines.append(f"  {'wrong' if math.isfinite(ratio) else 'NaN or inf'} in {where}")
    return question.Fault.explained("\n".join(lines), mistake, ratio, list(map(_name_of, names[: names.index(name)])))
