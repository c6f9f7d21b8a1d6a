"""Norms: the questions that they are asked, each held to float64.

RMSNorm `f(x, weight, eps)`, and LayerNorm where there is a bias, `f(x, weight, bias, eps)`; or a module's class, built
with the width and eps, whose first parameter is the weight. Results have the dtype of x. A case's shape is that of x.

Legend: N rows, M width.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.check.formulas import DTYPES, NARROW, Asked, Problem, drawn, judge, questions_of
from lmsys.check.norm_mistakes import layer_norm, layer_norm_mistakes, plain_rms_norm, rms_norm, rms_norm_mistakes
from lmsys.check.question import Fault, Options, Question
from lmsys.check.signature import Called, Roles, built, called, is_module
from lmsys.extremes.model import ROWS, large_mean
from lmsys.registry import Entry

ROLES: Roles = {
    "x": ("x", "input", "hidden", "hidden_states", "inp"),
    "weight": ("weight", "w", "gamma", "scale", "g"),
    "bias": ("bias", "b", "beta"),
    "eps": ("eps", "epsilon", "variance_epsilon", "norm_eps"),
    "shape": ("normalized_shape",),
}
BUILT: Roles = {
    "width": ("dim", "d_model", "hidden_size", "width", "n_embd", "features", "d", "normalized_shape", "ndim"),
    "eps": ROLES["eps"],
}
EPS = 2.0**-10  # exact, and none that anybody would write
ODD = 33, 237
CASES = (
    Asked("a few rows", (8, 64)),
    Asked("an odd width", ODD),
    Asked("many rows", (331, 96)),
    Asked("small rows, to which eps counts", (33, 96), more={"size": 2.0**-6}),
    Asked("three dimensions", (5, 7, 64)),
    *(Asked("an odd width", ODD, dtype) for dtype in NARROW),
    *(Asked(about, ODD, dtype, about) for dtype in DTYPES for about in ROWS),
)
EXTREME = ROWS | {"rows with a large mean": large_mean}
LARGE_MEAN = Asked("rows with a large mean", ODD, extreme="rows with a large mean")


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The cases, of a LayerNorm where there is a bias."""
    implementation = entry.load()
    if is_module(implementation):
        with_bias = len(list(built(implementation, BUILT, {"width": 64, "eps": EPS}).parameters())) > 1
    else:
        with_bias = called(implementation, ROLES).has("bias")
    cases = (*CASES, LARGE_MEAN) if with_bias else CASES
    return questions_of(cases, partial(_judged, implementation, with_bias, options), options)


def _judged(implementation: Any, with_bias: bool, options: Options, asked: Asked) -> Fault | None:
    problem = _problem(asked, options, with_bias)
    formula, mistakes = (layer_norm, layer_norm_mistakes) if with_bias else (rms_norm, rms_norm_mistakes)
    call = _of_module(implementation, problem) if is_module(implementation) else called(implementation, ROLES)
    return judge(call, formula, mistakes, problem, plain_formula=layer_norm if with_bias else plain_rms_norm)


def _of_module(implementation: Any, problem: Problem) -> Called:
    """The module as a function: its parameters take the place of weight and bias."""
    x = problem.inputs["x"]
    module = built(implementation, BUILT, {"width": x.shape[-1], "eps": EPS}).to(x.device, x.dtype)
    names = [name for name, _ in module.named_parameters()]

    def call(x: Tensor, **parameters: Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, parameters.values(), strict=False)), (x,))

    return Called(call, {name: name for name in problem.inputs}, by_place=False)


def _problem(asked: Asked, options: Options, with_bias: bool) -> Problem:
    """The inputs of a case; weights are around 1, and none is 1."""
    size, width = asked.more.get("size", 1.0), asked.shape[-1]
    inputs = {"x": drawn(options, "x", *asked.shape) * size, "weight": 1 + drawn(options, "weight", width) / 4}
    if with_bias:
        inputs["x"] += size / 2  # a mean, that counts
        inputs["bias"] = drawn(options, "bias", width)
    if asked.extreme:
        EXTREME[asked.extreme](inputs["x"])
    settings = {"eps": EPS, "shape": (width,)}
    return Problem.of(asked, options, inputs, settings, drawn(options, "upstream", *asked.shape))
