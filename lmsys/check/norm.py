"""Norms: the questions that they are asked, each held to float64.

RMSNorm `f(x, weight, eps)`, and LayerNorm where there is a bias, `f(x, weight, bias, eps)`; or a module's class, built
with the width and eps, whose first parameter is the weight. Results have the dtype of x.

Legend: N rows, M width.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lmsys import draws
from lmsys.check.formulas import Problem, judge
from lmsys.check.norm_mistakes import layer_norm, layer_norm_mistakes, plain_rms_norm, rms_norm, rms_norm_mistakes
from lmsys.check.question import Fault, Options, Question
from lmsys.check.signature import Builder, Called, Roles, called, is_module_class
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
ODD = 237


@dataclass(frozen=True)
class Asked:
    """A case: x (shape), whose values are `size` times as large as standard normal; `extreme` writes over it."""

    about: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    size: float = 1.0
    extreme: str = ""

    def __str__(self) -> str:
        return f"{self.about} ({str(self.dtype)[6:]}, x {self.shape}, eps {EPS:g})"


def cases(with_mean: bool) -> Iterator[Asked]:
    """From the simplest to the rarest; `with_mean`: of a norm that subtracts one."""
    yield Asked("a few rows", (8, 64))
    yield Asked("an odd width", (33, ODD))
    yield Asked("many rows", (331, 96))
    yield Asked("small rows, to which eps counts", (33, 96), size=2.0**-6)
    yield Asked("three dimensions", (5, 7, 64))
    for dtype in (torch.bfloat16, torch.float16):
        yield Asked("an odd width", (33, ODD), dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for about in ROWS:
            yield Asked(about, (33, ODD), dtype, extreme=about)
    if with_mean:
        yield Asked("rows with a large mean", (33, ODD), extreme="mean")


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The cases, of a LayerNorm where there is a bias."""
    implementation = entry.load()
    with_bias = (
        called(implementation, ROLES).has("bias") if not is_module_class(implementation) else _has_bias(implementation)
    )
    for asked in cases(with_bias):
        judged = partial(_judged, implementation, asked, options, with_bias)
        yield Question(f"{asked.about}, {str(asked.dtype)[6:]}", judged, str(asked), extreme=bool(asked.extreme))


def _has_bias(implementation: Any) -> bool:
    return len(list(_built(implementation, 64).parameters())) > 1


def _built(implementation: Any, width: int) -> nn.Module:
    """A module of the width with EPS. ValueError where it takes no such."""
    build = called(Builder(implementation), BUILT)
    module: nn.Module = build({"width": width, "eps": EPS})
    return module


def _judged(implementation: Any, asked: Asked, options: Options, with_bias: bool) -> Fault | None:
    problem = problem_of(asked, options, with_bias)
    formula, mistakes = (layer_norm, layer_norm_mistakes) if with_bias else (rms_norm, rms_norm_mistakes)
    call = _of_class(implementation, problem) if is_module_class(implementation) else called(implementation, ROLES)
    return judge(call, formula, mistakes, problem, plain_formula=layer_norm if with_bias else plain_rms_norm)


def _of_class(implementation: Any, problem: Problem) -> Called:
    """The module as a function: its parameters take the place of weight and bias."""
    x = problem.inputs["x"]
    module = _built(implementation, x.shape[-1]).to(x.device, x.dtype)
    names = [name for name, _ in module.named_parameters()]

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Any:
        parameters = dict(zip(names, (weight, bias), strict=False))
        return torch.func.functional_call(module, parameters, (x,))

    roles = {"x": "x", "weight": "weight"} | ({"bias": "bias"} if "bias" in problem.inputs else {})
    return Called(call, roles, by_place=False)


def problem_of(asked: Asked, options: Options, with_bias: bool) -> Problem:
    """The inputs of a case; weights are around 1, and none is 1."""
    device, width = "cuda" if torch.cuda.is_available() else "cpu", asked.shape[-1]

    def drawn(name: str, *shape: int) -> Tensor:
        return draws.values(draws.key(options.seed, name), 0, math.prod(shape)).view(shape)

    inputs = {"x": drawn("x", *asked.shape) * asked.size, "weight": 1 + drawn("weight", width) / 4}
    if with_bias:
        inputs["x"] += asked.size / 2  # a mean, that counts
        inputs["bias"] = drawn("bias", width)
    if asked.extreme:
        (ROWS | {"mean": large_mean})[asked.extreme](inputs["x"])
    upstream = drawn("upstream", *asked.shape).to(device, asked.dtype) if options.grad else None
    settings: Mapping[str, Any] = {"eps": EPS, "shape": (width,)}
    placed = {name: x.to(device, asked.dtype) for name, x in inputs.items()}
    return Problem(placed, settings, upstream, bool(asked.extreme))
