"""Norms, RMSNorm and LayerNorm: their cases, their formulas in float64, and the known mistakes.

`kinds.py` calls `questions`. A norm is a function, `f(x, weight, eps)` for RMSNorm, and with a bias,
`f(x, weight, bias, eps)`, for LayerNorm. Or it is a module's class, built with the width and eps, whose first parameter
is the weight. Results have the dtype of x. A case's shape is that of x. ROLES and BUILT list the names that parameters
may have; new mistakes go to `rms_norm_mistakes`, `layer_norm_mistakes` and the tables that they use, with an exhibit
(a published norm that makes the mistake) in `tests/museum/`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys import registry, signature
from lmsys.check import formulas, question
from lmsys.extremes.model import ROWS, large_mean

ROLES: signature.Roles = {
    "x": ("x", "input", "hidden", "hidden_states", "inp"),
    "weight": ("weight", "w", "gamma", "scale", "g"),
    "bias": ("bias", "b", "beta"),
    "eps": ("eps", "epsilon", "variance_epsilon", "norm_eps"),
    "shape": ("normalized_shape",),
}
BUILT: signature.Roles = {  # as ROLES, for the parameters of a class's constructor
    "width": ("dim", "d_model", "hidden_size", "width", "n_embd", "features", "d", "normalized_shape", "ndim"),
    "eps": ROLES["eps"],
}
EPS = 2.0**-10  # exact in every dtype, and no eps that an implementation would have built in
ODD = 33, 237  # no multiples of a kernel's tile
CASES: tuple[formulas.Case, ...] = (
    (
        formulas.Case("a few rows", (8, 64)),
        formulas.Case("an odd width", ODD),
        formulas.Case("many rows", (331, 96)),
        formulas.Case("small rows, to which eps counts", (33, 96), more={"size": 2.0**-6}),
        formulas.Case("three dimensions", (5, 7, 64)),
        formulas.Case("wide rows", (5, 4101)),
        formulas.Case("parts of wider rows", ODD, more={"spare columns": 3}),
        formulas.Case("a second backward of a retained graph", ODD, more={"retained": True}),
    )
    + formulas.cases_in(formulas.NARROW, ["an odd width"], ODD)
    + formulas.cases_in(formulas.DTYPES, ROWS, ODD, extreme=True)
)
EXTREME = ROWS | {"rows with a large mean": large_mean}  # by kind of extreme rows: the function that writes them


def questions(entry: registry.Entry, options: question.Options) -> Iterator[question.Question]:
    """A question for each case: those of LayerNorm if the implementation has a bias, else those of RMSNorm."""
    implementation = entry.load()
    with_bias = (
        len(list(signature.built(implementation, BUILT, {"width": 64, "eps": EPS}).parameters())) > 1
        if signature.is_module(implementation)
        else signature.called(implementation, ROLES).has("bias")
    )
    return formulas.questions_of(
        # LayerNorm is asked about one more kind of extreme rows, those with a large mean, in float32.
        CASES + formulas.cases_in(formulas.DTYPES[:1], EXTREME.keys() - ROWS, ODD, extreme=True)
        if with_bias
        else CASES,
        partial(_fault_of, implementation, with_bias, options),
        options,
    )


def _fault_of(
    implementation: Any, with_bias: bool, options: question.Options, case: formulas.Case
) -> question.Fault | None:
    """The fault of the implementation in a case, or None."""
    problem = _problem(case, options, with_bias)
    formula, mistakes = (layer_norm, layer_norm_mistakes) if with_bias else (rms_norm, rms_norm_mistakes)
    call = (
        _of_module(implementation, problem)
        if signature.is_module(implementation)
        else signature.called(implementation, ROLES)
    )
    return formulas.judge(call, formula, mistakes, problem, plain_formula=layer_norm if with_bias else plain_rms_norm)


def _of_module(implementation: Any, problem: formulas.Problem) -> signature.Called:
    """Makes a module of this class, and returns it as a function of x, weight and bias.

    The given weight and bias replace the module's parameters, so that `formulas.judge` gets their gradients.
    """
    x = problem.inputs["x"]
    module = signature.built(implementation, BUILT, {"width": x.shape[-1], "eps": EPS}).to(x.device, x.dtype)

    def call(x: Tensor, **parameters: Tensor) -> Any:
        # By their order, since a module may name them as it likes: first the weight, then the bias if it has one.
        given = zip(dict(module.named_parameters()), parameters.values(), strict=False)
        return torch.func.functional_call(module, dict(given), (x,))

    return signature.Called(call, {name: name for name in problem.inputs})  # eps and shape are not passed on


def _problem(case: formulas.Case, options: question.Options, with_bias: bool) -> formulas.Problem:
    """The inputs of a case. Weights are around 1, but not 1, so that a missing weight shows.

    Rows 1 to 4 are multiplied by 2**-5, 2**-10, 2**-15 and 2**-20. Their mean squares, about 1e-3 to 1e-12, are of the
    sizes of USUAL_EPS, so that each eps gives other results. The rows' grad_output is multiplied by the same factors:
    otherwise their dx, up to 1 / sqrt(EPS) times the grad_output, would raise the error allowed for all rows.
    """
    size, width = case.more.get("size", 1.0), case.shape[-1]
    rows = torch.ones(*case.shape[:-1], 1)
    rows.view(-1)[1:5] = 2.0 ** (-5 * torch.arange(1, 5))
    inputs = {  # the mean of x is not 0 where there is a bias, so that a mistake in it shows
        "x": (formulas.drawn(options, "x", *case.shape) + 0.5 * with_bias) * size * rows,  # + 0 without a bias
        "weight": 1 + formulas.drawn(options, "weight", width) / 4,
    }
    if with_bias:
        inputs["bias"] = formulas.drawn(options, "bias", width)
    if case.extreme:
        EXTREME[case.about](inputs["x"])
    return formulas.Problem.of(
        case,
        options,
        inputs,
        settings={"eps": EPS, "shape": (width,)},
        grad_output=formulas.drawn(options, "upstream", *case.shape) * rows,
    )


BLOCK_ROWS = (128, 64, 32, 16, 8, 4, 2, 1)  # rows that a kernel may take at a time
USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 0.0)  # values that an implementation may have built in
Divisor = Callable[[Tensor, float], Tensor]  # (x, eps) -> what x is divided by. LayerNorm passes x less its mean


def rms_norm(inputs: formulas.Inputs, settings: formulas.Settings) -> Tensor:
    """x / sqrt(mean(x^2) + eps) · weight."""
    return torch.nn.functional.rms_norm(inputs["x"], settings["shape"], inputs["weight"], settings["eps"])


def plain_rms_norm(inputs: formulas.Inputs, settings: formulas.Settings) -> Tensor:
    """`rms_norm` as Llama's code has it: it rounds before it applies the weight.

    Of the usual ways to write it, this one has the largest errors, above all in the weight's gradient.
    """
    x = inputs["x"].to(torch.promote_types(inputs["x"].dtype, torch.float32))
    normalised = x * (x.square().mean(dim=-1, keepdim=True) + settings["eps"]).rsqrt()
    return normalised.to(inputs["x"].dtype) * inputs["weight"]


def layer_norm(inputs: formulas.Inputs, settings: formulas.Settings) -> Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias."""
    return torch.nn.functional.layer_norm(
        inputs["x"], settings["shape"], inputs["weight"], inputs["bias"], settings["eps"]
    )


def of_parts(
    inputs: formulas.Inputs,
    settings: formulas.Settings,
    divisor: Divisor,
    centred: bool,
    weighted: Callable[[Tensor, Tensor], Tensor] = torch.mul,
    bias: float = 1.0,
) -> Tensor:
    """A norm: weighted(x / divisor(x, eps), weight) + `bias` times the bias. Mistakes change one of its parts.

    centred  True: the mean of x is subtracted first, as in LayerNorm
    bias     what the bias is multiplied by
    """
    x = less_mean(inputs["x"], centred)
    y = weighted(x / divisor(x, settings["eps"]), inputs["weight"])
    return y + bias * inputs["bias"] if "bias" in inputs else y


def mean_of(x: Tensor) -> Tensor:
    return x.mean(dim=-1, keepdim=True)


def less_mean(x: Tensor, centred: bool) -> Tensor:
    return x - mean_of(x) if centred else x


def rms(x: Tensor, eps: float) -> Tensor:
    """The root of the mean square, the divisor of RMSNorm."""
    return (mean_of(x * x) + eps).sqrt()


OVERFLOWS = "squares overflow in the dtype of x: x must be squared in float32"


def rms_norm_mistakes(problem: formulas.Problem) -> formulas.Mistakes:
    """Mistakes in RMSNorm, the plainest first."""
    x = problem.inputs["x"]
    return {
        **formulas.forwards(
            {
                "the mean is subtracted, as in LayerNorm; RMSNorm subtracts none": (
                    partial(of_parts, divisor=rms, centred=True)
                )
            }
        ),
        # The formula is right. The mistake is to compute it in the dtype of x, which `forwards` does here.
        **formulas.forwards({OVERFLOWS: partial(of_parts, divisor=rms, centred=False)}, x.dtype),
        **formulas.forwards(_forward_mistakes(x.shape[-1], centred=False)),
        **formulas.backwards(rms_norm, _dx_mistakes(centred=False) | _weight_gradient_mistakes(x, centred=False)),
    }


def layer_norm_mistakes(problem: formulas.Problem) -> formulas.Mistakes:
    """Mistakes in LayerNorm, the plainest first."""
    x, width = problem.inputs["x"], problem.inputs["x"].shape[-1]
    plainest: dict[str, formulas.Formula] = {
        "the mean is not subtracted: the result is that of RMSNorm": partial(of_parts, divisor=rms, centred=False),
        "the mean is subtracted, but the variance is mean(x^2), not mean((x - mean)^2)": (
            partial(_with_squares_of_mean, times=1.0)
        ),
        "the variance is the sum of squares over width - 1, not over the width": (
            partial(of_parts, divisor=_over(width, width - 1), centred=True)
        ),
    }
    padded = {
        f"{more} padded columns count in the variance, as (0 - mean)^2; they must not count": (
            partial(_with_squares_of_mean, times=more / width)
        )
        for more in formulas.padding(width)
    }
    return {
        **formulas.forwards(plainest | _forward_mistakes(width, centred=True) | padded),
        # The formula is right. The mistake is to compute it in the dtype of x, which `forwards` does here.
        **formulas.forwards({OVERFLOWS: partial(of_parts, divisor=rms, centred=True)}, x.dtype),
        # x in its own dtype, not in float64: `_one_pass` itself computes in float32, where the subtraction cancels.
        **formulas.forwards(
            {"the variance is mean(x^2) - mean(x)^2, which cancels; use mean((x - mean)^2)": _one_pass}, x.dtype
        ),
        **formulas.forwards({"the bias is not added": partial(of_parts, divisor=rms, centred=True, bias=0.0)}),
        **formulas.backwards(
            layer_norm,
            _dx_mistakes(centred=True)
            | _weight_gradient_mistakes(x, centred=True)
            | {
                "the gradients of weight and bias are exchanged": (
                    lambda exact, right: {"weight": right["bias"], "bias": right["weight"]}
                )
            },
        ),
    }


def _with_squares_of_mean(inputs: formulas.Inputs, settings: formulas.Settings, times: float) -> Tensor:
    """LayerNorm whose variance is too large by `times` the square of the mean."""
    more = times * mean_of(inputs["x"]).square()
    return of_parts(inputs, settings, lambda x, eps: (mean_of(x * x) + more + eps).sqrt(), centred=True)


def _one_pass(inputs: formulas.Inputs, settings: formulas.Settings) -> Tensor:
    """LayerNorm in float32 with the variance mean(x^2) - mean(x)^2."""
    x = inputs["x"].float()
    mean = mean_of(x)
    variance = mean_of(x * x) - mean * mean
    return ((x - mean) * (variance + settings["eps"]).rsqrt() * inputs["weight"].float() + inputs["bias"].float()).to(
        inputs["x"].dtype
    )


def _over(width: int, columns: int) -> Divisor:
    """The divisor of RMSNorm whose sum of squares, of `width` columns, is divided by `columns`."""
    return lambda x, eps: (mean_of(x * x) * width / columns + eps).sqrt()


def _root(columns: int | None = None, eps: float | None = None) -> Divisor:
    """The divisor of RMSNorm with a mistake: over the first `columns` alone, or with this `eps`, not the given one."""
    return lambda x, given: rms(x[..., :columns], given if eps is None else eps)


def _forward_mistakes(width: int, centred: bool) -> dict[str, formulas.Formula]:
    """Mistakes in the divisor, and in how the weight is applied, of a norm over `width` columns.

    centred  True: those of LayerNorm; False: those of RMSNorm
    """
    squares = "var" if centred else "mean(x^2)"
    divisors: dict[str, Divisor] = {
        f"eps is added to the root, not under it: sqrt({squares}) + eps": lambda x, eps: rms(x, 0.0) + eps,
        **{
            f"eps is always {eps:g}, whatever is given" if eps else "eps is missing": _root(eps=eps)
            for eps in USUAL_EPS
        },
        "eps is squared": lambda x, eps: rms(x, eps * eps),
        "eps is added to the sum of squares, not to their mean": lambda x, eps: rms(x, eps / width),
        f"no root is taken: the divisor is {squares} + eps": lambda x, eps: rms(x, eps).square(),
        "squares are summed, not averaged": _over(width, 1),
        f"the divisor is mean(|x{' - mean' * centred}|) + eps, not sqrt({squares} + eps)": lambda x, eps: (
            mean_of(x.abs()) + eps
        ),
        f"the divisor is sqrt(mean(x)^2 + eps), not sqrt({squares} + eps)": lambda x, eps: (
            mean_of(x).square() + eps
        ).sqrt(),
        "the mean of squares is over axis 0, across rows; it must be over the last axis, within each row": (
            lambda x, eps: ((x * x).mean(0) + eps).sqrt()
        ),
        "the mean of squares is taken over the whole tensor, not over each row": lambda x, eps: (
            (x * x).mean() + eps
        ).sqrt(),
        **{
            f"the sum of squares is divided by {width + more} columns, not by {width}": _over(width, width + more)
            for more in formulas.padding(width)
        },
        **{
            f"columns from {kept} on do not count in the mean of squares": (_root(kept)) for kept in formulas.cut(width)
        },
    }
    weights: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "the weight is applied as 1 + weight": lambda y, w: y * (1 + w),
        "the weight is ignored": lambda y, w: y + 0 * w,
        "the weight is added, not multiplied": torch.add,
        "the weight is applied twice": lambda y, w: y * w * w,
        "the result is divided by the weight, not multiplied": torch.div,
    }
    return {
        **{text: partial(of_parts, divisor=divisor, centred=centred) for text, divisor in divisors.items()},
        **{text: partial(of_parts, divisor=rms, centred=centred, weighted=by) for text, by in weights.items()},
    }


def _dx_mistakes(centred: bool) -> dict[str, formulas.Gradients]:
    """Mistakes in dx = r (g - mean(g) - n mean(g n)), where g = dy w. RMSNorm lacks the term mean(g).

    dy is grad_output, w the weight, n the normalised x, and r = 1 / sqrt(var + eps), in RMSNorm 1 / rms.
    """
    less, squares = partial(less_mean, centred=centred), "var" if centred else "mean(x^2)"
    n_is, root = ("n = (x - mean) / sqrt(var + eps)", "root") if centred else ("n = x / rms", "rms")

    def with_dx(
        exact: formulas.Problem, _: formulas.Outputs, dx_of: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    ) -> formulas.Outputs:
        """The gradient of x that a function of the table `dx`, below, gives."""
        dy, x = exact.grad_output, less(exact.inputs["x"])
        r = 1 / rms(x, exact.settings["eps"])
        return {"x": dx_of(dy * exact.inputs["weight"], x * r, r, dy)}

    dx: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {  # (g, n, r, dy) -> dx
        f"dx lacks the term n mean(dy w n), {n_is}: the {root} is treated as a constant": (
            lambda g, n, r, _: r * less(g)
        ),
        f"dx adds the term n mean(dy w n), {n_is}; it must be subtracted": (
            lambda g, n, r, _: r * (less(g) + n * mean_of(g * n))
        ),
        f"dx has the term n sum(dy w n), not n mean(dy w n), {n_is}": (
            lambda g, n, r, _: r * (less(g) - n * (g * n).sum(-1, keepdim=True))
        ),
        "dx is not multiplied by the weight": lambda g, n, r, dy: r * (less(dy) - n * mean_of(dy * n)),
        f"dx lacks the factor 1 / sqrt({squares} + eps)": lambda g, n, r, _: less(g) - n * mean_of(g * n),
        f"dx is multiplied by {squares} + eps, not by 1 / sqrt({squares} + eps)": (
            lambda g, n, r, _: r**-2 * (less(g) - n * mean_of(g * n))
        ),
        "dx lacks the term of the mean, mean(dy w)": lambda g, n, r, _: r * (g - n * mean_of(g * n)),
        "dx has the term of the mean, mean(dy w), subtracted twice": (
            lambda g, n, r, _: r * (g - 2 * mean_of(g) - n * mean_of(g * n))
        ),
    }
    # The words "term of the mean" mark the mistakes that only LayerNorm can have.
    return {
        text: partial(with_dx, dx_of=dx_of) for text, dx_of in dx.items() if centred or "term of the mean" not in text
    }


def _weight_gradient_mistakes(x: Tensor, centred: bool) -> dict[str, formulas.Gradients]:
    """Mistakes in the gradients of weight and bias, which are sums over the rows of x."""

    def summed(
        exact: formulas.Problem,
        _: formulas.Outputs,
        rows: slice = slice(None),
        normalised: bool = True,
        times: float = 1.0,
    ) -> formulas.Outputs:
        """The gradients of weight and bias: `times` their sum over `rows`.

        normalised  False: the weight's gradient is made of x, not of the normalised x
        """
        x = less_mean(exact.inputs["x"], centred)
        n = x / rms(x, exact.settings["eps"]) if normalised else x
        each = {"weight": exact.grad_output * n, "bias": exact.grad_output}
        return {name: times * each[name].flatten(0, -2)[rows].sum(0) for name in each.keys() & exact.inputs.keys()}

    count = x.numel() // x.shape[-1]
    return {
        "the weight's gradient is made of x, not of the normalised x": partial(summed, normalised=False),
        "the weight's gradient is averaged over rows, not summed": partial(summed, times=1 / count),
        **{
            text: partial(summed, rows=rows)
            for text, rows in formulas.parts_of_sum("rows", count, (x.shape[0], *BLOCK_ROWS)).items()
        },
    }
