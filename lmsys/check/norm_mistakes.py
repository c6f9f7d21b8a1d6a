"""Mistakes that people make in norms, tried one after another to explain a wrong result: see `formulas`.

Legend: N rows, M width.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.check.formulas import Formula, Mistake, Outputs, Problem, backward, forward, grad_output_ignored, narrow

BLOCKS = (32, 64, 128, 256, 512, 1024)
ROWS = (128, 64, 32, 16, 8, 4, 2, 1)
USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 0.0)
Inputs = Mapping[str, Tensor]
Settings = Mapping[str, Any]


def rms_norm(inputs: Inputs, settings: Settings) -> Tensor:
    """x / sqrt(mean(x^2) + eps) · weight."""
    return F.rms_norm(inputs["x"], settings["shape"], inputs["weight"], settings["eps"])


def plain_rms_norm(inputs: Inputs, settings: Settings) -> Tensor:
    """`rms_norm` as Llama's code has it, which rounds before the weight is applied: of the usual ways that which loses
    most, above all in the weight's gradient."""
    x = inputs["x"].float() if inputs["x"].dtype != torch.float64 else inputs["x"]
    normalised = x * (mean_of(x * x) + settings["eps"]).rsqrt()
    return normalised.to(inputs["x"].dtype) * inputs["weight"]


def layer_norm(inputs: Inputs, settings: Settings) -> Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias."""
    return F.layer_norm(inputs["x"], settings["shape"], inputs["weight"], inputs["bias"], settings["eps"])


def of_parts(
    divisor: Callable[[Tensor, float], Tensor],
    mean: Callable[[Tensor], Tensor] | None = None,
    weight: Callable[[Tensor, Tensor], Tensor] = lambda normalised, weight: normalised * weight,
) -> Formula:
    """A norm in which x less its mean, where there is one, is divided by `divisor(x, eps)`, and `weight` applied."""

    def formula(inputs: Inputs, settings: Settings) -> Tensor:
        x = inputs["x"] if mean is None else inputs["x"] - mean(inputs["x"])
        y = weight(x / divisor(x, settings["eps"]), inputs["weight"])
        return y + inputs["bias"] if "bias" in inputs else y

    return formula


def mean_of(x: Tensor) -> Tensor:
    return x.mean(dim=-1, keepdim=True)


def rms(x: Tensor, eps: float) -> Tensor:
    return (mean_of(x * x) + eps).sqrt()


def rms_norm_mistakes(problem: Problem) -> Iterator[Mistake]:
    """The plainest first."""
    yield forward("the mean is subtracted, as LayerNorm does", of_parts(rms, mean_of))
    yield narrow(
        "squares overflow in the dtype of x: they belong in float32",
        lambda x, s: x["x"] * ((x["x"] * x["x"]).mean(dim=-1, keepdim=True) + s["eps"]).rsqrt() * x["weight"],
    )
    yield from _of_divisors(problem, None)
    yield from _of_backwards(problem, rms_norm, None)


def layer_norm_mistakes(problem: Problem) -> Iterator[Mistake]:
    """The plainest first."""
    width = problem.inputs["x"].shape[-1]
    yield forward("the mean is not subtracted, as RMSNorm has it", of_parts(rms))
    yield forward(
        "the mean is subtracted, and the variance is that around 0",
        lambda x, s: of_parts(lambda _, eps: rms(x["x"], eps), mean_of)(x, s),
    )
    yield forward(
        "the variance is divided by the width less one",
        of_parts(lambda x, eps: (mean_of(x * x) * width / (width - 1) + eps).sqrt(), mean_of),
    )
    yield from _of_divisors(problem, mean_of)

    def padded(more: int) -> Formula:
        def formula(inputs: Inputs, settings: Settings) -> Tensor:
            mean = mean_of(inputs["x"])
            extra = more * mean * mean / width
            return of_parts(lambda x, eps: (mean_of(x * x) + extra + eps).sqrt(), mean_of)(inputs, settings)

        return formula

    for more in sorted({-width % block for block in BLOCKS} - {0}):
        yield forward(f"{more} columns behind the last one count in the variance, as zeros less the mean", padded(more))
    yield narrow(
        "the variance is mean(x^2) - mean(x)^2: the difference of large numbers",
        lambda x, s: _one_pass(x, s),
    )
    yield forward("the bias is not added", lambda x, s: layer_norm({**x, "bias": torch.zeros_like(x["bias"])}, s))
    yield from _of_backwards(problem, layer_norm, mean_of)
    yield backward(
        "the gradients of weight and bias are exchanged",
        layer_norm,
        lambda problem, right: {"weight": right["bias"], "bias": right["weight"]},
    )


def _one_pass(inputs: Inputs, settings: Settings) -> Tensor:
    x = inputs["x"].float()
    mean = mean_of(x)
    variance = mean_of(x * x) - mean * mean
    y = (x - mean) * (variance + settings["eps"]).rsqrt() * inputs["weight"].float() + inputs["bias"].float()
    return y.to(inputs["x"].dtype)


def _of_divisors(problem: Problem, mean: Callable[[Tensor], Tensor] | None) -> Iterator[Mistake]:
    width = problem.inputs["x"].shape[-1]

    def by(divisor: Callable[[Tensor, float], Tensor]) -> Formula:
        return of_parts(divisor, mean)

    def always(eps: float) -> Callable[[Tensor, float], Tensor]:
        return lambda x, _: rms(x, eps)

    yield forward("eps is added to the root, not inside of it", by(lambda x, eps: rms(x, 0.0) + eps))
    for eps in USUAL_EPS:
        told = f"eps is always {eps:g}, whatever is given" if eps else "eps is missing"
        yield forward(told, by(always(eps)))
    yield forward("eps is squared", by(lambda x, eps: rms(x, eps * eps)))
    yield forward("eps is added to the sum of squares, not to their mean", by(lambda x, eps: rms(x, eps / width)))
    yield forward("no root is taken", by(lambda x, eps: rms(x, eps).square()))
    yield forward("squares are summed, not averaged", by(lambda x, eps: ((x * x).sum(-1, keepdim=True) + eps).sqrt()))
    yield forward("the mean of sizes stands for that of squares", by(lambda x, eps: mean_of(x.abs()) + eps))
    yield forward("the mean itself stands for that of squares", by(lambda x, eps: (mean_of(x).square() + eps).sqrt()))
    if problem.inputs["x"].dim() == 2:
        yield forward("the mean is over rows, not over columns", by(lambda x, eps: ((x * x).mean(0) + eps).sqrt()))
    yield forward(
        "the mean is over the whole tensor, not over each row", by(lambda x, eps: ((x * x).mean() + eps).sqrt())
    )
    yield from _of_columns(width, mean)
    yield from _of_applied_weights(mean)


def _of_columns(width: int, mean: Callable[[Tensor], Tensor] | None) -> Iterator[Mistake]:
    def over(columns: int) -> Callable[[Tensor, float], Tensor]:
        return lambda x, eps: (mean_of(x * x) * width / columns + eps).sqrt()

    def of_columns(columns: int) -> Callable[[Tensor, float], Tensor]:
        return lambda x, eps: (mean_of(x[..., :columns].square()) + eps).sqrt()

    for padded in sorted({-(-width // block) * block for block in BLOCKS} - {width}):
        yield forward(
            f"the sum of squares is divided by {padded} columns, not by {width}",
            of_parts(over(padded), mean),
        )
    for kept in sorted({*(width // block * block for block in BLOCKS), width - 1} - {0, width}):
        yield forward(
            f"columns from {kept} on do not count in the mean of squares",
            of_parts(of_columns(kept), mean),
        )


def _of_applied_weights(mean: Callable[[Tensor], Tensor] | None) -> Iterator[Mistake]:
    def weighted(weight: Callable[[Tensor, Tensor], Tensor]) -> Formula:
        return of_parts(rms, mean, weight)

    yield forward("the weight is applied as 1 + weight", weighted(lambda y, w: y * (1 + w)))
    yield forward("the weight is ignored", weighted(lambda y, w: y + 0 * w))
    yield forward("the weight is added, not multiplied", weighted(lambda y, w: y + w))
    yield forward("the weight is applied twice", weighted(lambda y, w: y * w * w))
    yield forward("it is divided by the weight", weighted(lambda y, w: y / w))


def _of_backwards(problem: Problem, formula: Formula, mean: Callable[[Tensor], Tensor] | None) -> Iterator[Mistake]:
    """Right is dx = rstd (g - mean(g) - y mean(g y)), g = upstream · weight; mean(g) is a term of LayerNorm alone."""
    yield grad_output_ignored(formula)

    def of(made: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[[Problem, Outputs], Outputs]:
        def gradients(exact: Problem, _: Outputs) -> Outputs:
            assert exact.grad_output is not None
            x = exact.inputs["x"] if mean is None else exact.inputs["x"] - mean(exact.inputs["x"])
            rstd = 1 / rms(x, exact.settings["eps"])
            return {"x": made(exact.grad_output * exact.inputs["weight"], x * rstd, rstd, exact.grad_output)}

        return gradients

    def less_mean(g: Tensor) -> Tensor:
        return g - mean_of(g) if mean is not None else g

    in_x: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
        "the term of the root is missing in dx: rstd is taken for a constant": lambda g, y, r, _: r * less_mean(g),
        "the term of the root is added in dx, not subtracted": lambda g, y, r, _: (
            r * (less_mean(g) + y * mean_of(g * y))
        ),
        "the term of the root is summed in dx, not averaged": (
            lambda g, y, r, _: r * (less_mean(g) - y * (g * y).sum(-1, keepdim=True))
        ),
        "dx is not multiplied by the weight": lambda g, y, r, do: r * (less_mean(do) - y * mean_of(do * y)),
        "dx is not divided by the root": lambda g, y, r, _: less_mean(g) - y * mean_of(g * y),
        "dx is multiplied by the variance, not by its inverse root": (
            lambda g, y, r, _: r**-2 * (less_mean(g) - y * mean_of(g * y))
        ),
    }
    if mean is not None:
        in_x["the term of the mean is missing in dx"] = lambda g, y, r, _: r * (g - y * mean_of(g * y))
        in_x["the term of the mean is subtracted twice in dx"] = lambda g, y, r, _: (
            r * (g - 2 * mean_of(g) - y * mean_of(g * y))
        )
    for told, made in in_x.items():
        yield backward(told, formula, of(made))
    yield from _of_weights(problem, formula, mean)


def _of_weights(problem: Problem, formula: Formula, mean: Callable[[Tensor], Tensor] | None) -> Iterator[Mistake]:
    x = problem.inputs["x"]
    num_rows = x.numel() // x.shape[-1]

    def of(combine: Callable[[Tensor], Tensor], normalised: bool = True) -> Callable[[Problem, Outputs], Outputs]:
        """The gradients of weight and bias, combined from those (N, M) of each row."""

        def gradients(exact: Problem, _: Outputs) -> Outputs:
            assert exact.grad_output is not None
            x = exact.inputs["x"] if mean is None else exact.inputs["x"] - mean(exact.inputs["x"])
            y = x / rms(x, exact.settings["eps"]) if normalised else x
            found = {"weight": combine((exact.grad_output * y).flatten(0, -2))}
            return found | ({"bias": combine(exact.grad_output.flatten(0, -2))} if mean is not None else {})

        return gradients

    yield backward(
        "the weight's gradient is made of x, which is not normalised", formula, of(lambda d: d.sum(0), False)
    )

    def of_rows(rows: slice) -> Callable[[Problem, Outputs], Outputs]:
        return of(lambda d: d[rows].sum(0))

    yield backward("the weight's gradient is averaged over rows, not summed", formula, of(lambda d: d.mean(0)))
    sizes = [x.shape[0], *ROWS] if x.shape[0] < num_rows else ROWS
    for size in (size for size in sizes if size < num_rows):
        last = (num_rows - 1) // size * size
        yield backward(
            f"only the last block of {size} rows adds to the weight's gradient",
            formula,
            of_rows(slice(last, None)),
        )
        yield backward(f"only the first {size} rows add to the weight's gradient", formula, of_rows(slice(size)))
        if num_rows % size:
            kept = num_rows // size * size
            yield backward(
                f"the last {num_rows - kept} rows, no whole block of {size}, do not add to the weight's gradient",
                formula,
                of_rows(slice(kept)),
            )
