"""SwiGLU: the questions that it is asked, each held to float64.

`f(gate, up)`, silu(gate) · up; or the whole feed-forward `f(x, w1, w2, w3)`, W2 (silu(W1 x) · W3 x), with weights as
`nn.Linear` has them.

Legend: N rows, M d_model, F d_ff.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys import draws
from lmsys.check.formulas import (
    Formula,
    Mistake,
    Outputs,
    Problem,
    backward,
    forward,
    grad_output_ignored,
    judge,
    narrow,
)
from lmsys.check.question import Fault, Options, Question
from lmsys.check.signature import Called, Roles, called
from lmsys.extremes.model import GATES
from lmsys.registry import Entry

ROLES: Roles = {
    "x": ("x", "input", "hidden", "hidden_states"),
    "gate": ("gate", "a", "e"),
    "up": ("up", "value", "b", "g"),
    "w1": ("w1", "w_gate", "gate_proj"),
    "w2": ("w2", "w_down", "down_proj"),
    "w3": ("w3", "w_up", "up_proj"),
}
WIDTH = 48  # of the whole feed-forward
Inputs = Mapping[str, Tensor]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """A case: gate and up (N, F), or x (N, WIDTH)."""

    about: str
    shape: tuple[int, int]
    dtype: torch.dtype = torch.float32
    extreme: str = ""

    def __str__(self) -> str:
        return f"{self.about} ({str(self.dtype)[6:]}, {self.shape[0]} rows, {self.shape[1]} columns)"


def cases() -> Iterator[Asked]:
    """From the simplest to the rarest."""
    yield Asked("a few rows", (8, 64))
    yield Asked("an odd width", (33, 237))
    for dtype in (torch.bfloat16, torch.float16):
        yield Asked("an odd width", (33, 237), dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for about in GATES:
            yield Asked(about, (33, 237), dtype, about)


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The cases."""
    call = called(entry.load(), ROLES)
    for asked in cases():
        judged = partial(_judged, call, asked, options)
        yield Question(f"{asked.about}, {str(asked.dtype)[6:]}", judged, str(asked), extreme=bool(asked.extreme))


def _judged(call: Called, asked: Asked, options: Options) -> Fault | None:
    return judge(call, right, mistakes, problem_of(call, asked, options))


def problem_of(call: Called, asked: Asked, options: Options) -> Problem:
    """The inputs of a case. Gates of the whole feed-forward are made extreme by x, of one feature, and by w1."""
    device, (rows, columns) = "cuda" if torch.cuda.is_available() else "cpu", asked.shape

    def drawn(name: str, *shape: int) -> Tensor:
        return draws.values(draws.key(options.seed, name), 0, math.prod(shape)).view(shape)

    if call.has("gate"):
        inputs = {"gate": drawn("gate", rows, columns), "up": drawn("up", rows, columns)}
        if asked.extreme:
            GATES[asked.extreme](inputs["gate"])
        shape = rows, columns
    else:
        inputs = {"x": drawn("x", rows, WIDTH), "w1": drawn("w1", columns, WIDTH) * WIDTH**-0.5}
        inputs["w2"] = drawn("w2", WIDTH, columns) * columns**-0.5
        inputs["w3"] = drawn("w3", columns, WIDTH) * WIDTH**-0.5
        if asked.extreme:
            inputs["x"][:, 0] = 1.0
            inputs["w1"].zero_()
            GATES[asked.extreme](inputs["w1"][:, :1].mT)
        shape = rows, WIDTH
    upstream = drawn("upstream", *shape).to(device, asked.dtype) if options.grad else None
    placed = {name: x.to(device, asked.dtype) for name, x in inputs.items()}
    return Problem(placed, {}, upstream, bool(asked.extreme))


def of_halves(activate: Callable[[Tensor, Tensor], Tensor]) -> Formula:
    """SwiGLU, or the whole feed-forward, with `activate(gate, up)` in the place of silu(gate) · up."""

    def formula(inputs: Inputs, settings: Settings) -> Tensor:
        if "gate" in inputs:
            return activate(inputs["gate"], inputs["up"])
        gate, up = (F.linear(inputs["x"], inputs[name]) for name in ("w1", "w3"))
        return F.linear(activate(gate, up), inputs["w2"])

    return formula


right = of_halves(lambda gate, up: F.silu(gate) * up)


def mistakes(problem: Problem) -> Iterator[Mistake]:
    """The plainest first."""
    activations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "gate and up are exchanged: silu(up) · gate": lambda a, b: F.silu(b) * a,
        "silu is taken of the product": lambda a, b: F.silu(a * b),
        "silu is taken of both": lambda a, b: F.silu(a) * F.silu(b),
        "the gate is sigmoid(gate), not silu(gate)": lambda a, b: a.sigmoid() * b,
        "the gate is gelu(gate), not silu(gate)": lambda a, b: F.gelu(a) * b,
        "the gate is gelu(gate) by its tanh form, not silu(gate)": lambda a, b: F.gelu(a, approximate="tanh") * b,
        "the gate is relu(gate), not silu(gate)": lambda a, b: F.relu(a) * b,
        "the gate is gate · sigmoid(1.702 gate), not silu(gate)": lambda a, b: a * (1.702 * a).sigmoid() * b,
        "the gate is not activated": lambda a, b: a * b,
        "there is no product: silu(gate) + up": lambda a, b: F.silu(a) + b,
        "up is left out": lambda a, b: F.silu(a) + 0 * b,
        "gate and up are interleaved, not side by side": _interleaved,
    }
    for told, activate in activations.items():
        yield forward(told, of_halves(activate))
    overflows: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sigmoid is exp(x) / (1 + exp(x)), which overflows": lambda a, b: a * (a.exp() / (1 + a.exp())) * b,
        "the derivative of 1 / (1 + exp(-x)) overflows": lambda a, b: a / (1 + (-a).exp()) * b,
    }
    for told, activate in overflows.items():
        yield narrow(told, of_halves(activate), torch.float32)
        yield narrow(told, of_halves(activate))
    yield grad_output_ignored(right)
    yield from _of_backwards(problem)


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    both = torch.cat([gate, up], dim=-1)
    return F.silu(both[..., ::2]) * both[..., 1::2]


def _of_backwards(problem: Problem) -> Iterator[Mistake]:
    """Right are d_gate = g up s (1 + gate (1 - s)) and d_up = g silu(gate), with s = sigmoid(gate)."""
    wrong: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        "the derivative of silu is taken for sigmoid": lambda g, a, b, s: (g * b * s, g * a * s),
        "the derivative of silu is taken for that of sigmoid": lambda g, a, b, s: (g * b * s * (1 - s), g * a * s),
        "the derivative of silu is taken for silu": lambda g, a, b, s: (g * b * a * s, g * a * s),
        "in the derivative of silu the sign of 1 - sigmoid is wrong": (
            lambda g, a, b, s: (g * b * s * (1 - a * (1 - s)), g * a * s)
        ),
        "up is missing in the gradient of gate": lambda g, a, b, s: (g * s * (1 + a * (1 - s)), g * a * s),
        "the gradients of gate and up are exchanged": lambda g, a, b, s: (g * a * s, g * b * s * (1 + a * (1 - s))),
        "the gate is not activated in the gradient of up": lambda g, a, b, s: (g * b * s * (1 + a * (1 - s)), g * a),
    }

    def of(
        made: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Callable[[Problem, Outputs], Outputs]:
        def gradients(exact: Problem, _: Outputs) -> Outputs:
            assert exact.grad_output is not None
            x = exact.inputs
            if "gate" in x:
                gate, up = made(exact.grad_output, x["gate"], x["up"], x["gate"].sigmoid())
                return {"gate": gate, "up": up}
            a, b, g = F.linear(x["x"], x["w1"]), F.linear(x["x"], x["w3"]), exact.grad_output @ x["w2"]
            gate, up = made(g, a, b, a.sigmoid())
            return {"x": gate @ x["w1"] + up @ x["w3"], "w1": gate.mT @ x["x"], "w3": up.mT @ x["x"]}

        return gradients

    for told, made in wrong.items():
        yield backward(told, right, of(made))
