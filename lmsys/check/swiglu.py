"""SwiGLU: its cases, its formula in float64, and the known mistakes.

`kinds.py` calls `questions`. The implementation is `f(gate, up)`, silu(gate) · up. Or it is the whole feed-forward
`f(x, w1, w2, w3)`, W2 (silu(W1 x) · W3 x), with weights as `nn.Linear` has them. A case's shape is that of gate and up,
(N, F). ROLES lists the names that parameters may have. A new mistake goes to ACTIVATIONS, OVERFLOWS or BACKWARDS. Code
that somebody published with this mistake goes to `tests/museum/swiglu.py`, as an exhibit that the check must refuse.

Legend: N rows, M d_model, F d_ff.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys import registry, signature
from lmsys.check import formulas, question
from lmsys.extremes.model import GATES

ROLES: signature.Roles = {
    "x": ("x", "input", "hidden", "hidden_states"),
    "gate": ("gate", "a", "e"),
    "up": ("up", "value", "b", "g"),
    "w1": ("w1", "w_gate", "gate_proj"),
    "w2": ("w2", "w_down", "down_proj"),
    "w3": ("w3", "w_up", "up_proj"),
}
WIDTH = 48  # d_model of the whole feed-forward
ODD = 33, 237  # rows and columns of gate and up: no multiples of a kernel's tile
CASES: tuple[formulas.Case, ...] = (
    (
        formulas.Case("a few rows", (8, 64)),
        formulas.Case("an odd width", ODD),
        formulas.Case("wide rows", (5, 4101)),
        formulas.Case("parts of wider rows", ODD, more={"spare columns": 3}),
        formulas.Case("a second backward of a retained graph", ODD, more={"retained": True}),
    )
    + formulas.cases_in(formulas.NARROW, ["an odd width"], ODD)
    + formulas.cases_in(formulas.DTYPES, GATES, ODD, extreme=True)
)


def questions(entry: registry.Entry, options: question.Options) -> Iterator[question.Question]:
    """A question for each case: it asks the implementation about the case, and judges its answer."""
    return formulas.questions_of(CASES, partial(_fault_of, signature.called(entry.load(), ROLES), options), options)


def _fault_of(call: signature.Called, options: question.Options, case: formulas.Case) -> question.Fault | None:
    """The fault of the implementation in a case, or None."""
    return formulas.judge(call, right, mistakes, _problem(call, case, options))


def _problem(call: signature.Called, case: formulas.Case, options: question.Options) -> formulas.Problem:
    """The inputs of a case.

    For extreme gates of the whole feed-forward, one feature of x is 1, its column of w1 holds the gates, and all else
    of w1 is 0: so W1 x is exactly the gates.
    """
    rows, columns = case.shape
    if call.has("gate"):
        inputs = {name: formulas.drawn(options, name, rows, columns) for name in ("gate", "up")}
        gates = inputs["gate"]
    else:
        inputs = {
            "x": formulas.drawn(options, "x", rows, WIDTH),
            "w1": formulas.drawn(options, "w1", columns, WIDTH) * WIDTH**-0.5,
            "w2": formulas.drawn(options, "w2", WIDTH, columns) * columns**-0.5,
            "w3": formulas.drawn(options, "w3", columns, WIDTH) * WIDTH**-0.5,
        }
        gates, columns = inputs["w1"][:, :1].mT, WIDTH  # `columns` are from here on those of the result
        if case.extreme:
            inputs["x"][:, 0] = 1.0
            inputs["w1"].zero_()
    if case.extreme:
        GATES[case.about](gates)
    return formulas.Problem.of(
        case, options, inputs, settings={}, grad_output=formulas.drawn(options, "upstream", rows, columns)
    )


def of_halves(
    inputs: formulas.Inputs, settings: formulas.Settings, activate: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """SwiGLU, or the whole feed-forward, with `activate(gate, up)` in place of silu(gate) · up."""
    if "gate" in inputs:
        return activate(inputs["gate"], inputs["up"])
    gate, up = (F.linear(inputs["x"], inputs[name]) for name in ("w1", "w3"))
    return F.linear(activate(gate, up), inputs["w2"])


right = partial(of_halves, activate=lambda gate, up: F.silu(gate) * up)


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU of alternate columns of [gate, up] in place of its halves."""
    both = torch.cat([gate, up], dim=-1)
    return F.silu(both[..., ::2]) * both[..., 1::2]


# Mistakes in silu(gate) · up: (gate, up) -> the mistaken product.
ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gate and up are exchanged: silu(up) · gate": lambda a, b: F.silu(b) * a,
    "silu is taken of the product: silu(gate · up)": lambda a, b: F.silu(a * b),
    "silu is taken of both: silu(gate) · silu(up)": lambda a, b: F.silu(a) * F.silu(b),
    "the gate is sigmoid(gate), not silu(gate)": lambda a, b: a.sigmoid() * b,
    "the gate is gelu(gate), not silu(gate)": lambda a, b: F.gelu(a) * b,
    "the gate is gelu(gate) by its tanh form, not silu(gate)": lambda a, b: F.gelu(a, approximate="tanh") * b,
    "the gate is relu(gate), not silu(gate)": lambda a, b: F.relu(a) * b,
    "the gate is gate · sigmoid(1.702 gate), not silu(gate)": lambda a, b: a * (1.702 * a).sigmoid() * b,
    "the gate is not activated: gate · up": lambda a, b: a * b,
    "there is no product: silu(gate) + up": lambda a, b: F.silu(a) + b,
    "up is left out: silu(gate)": lambda a, b: F.silu(a) + 0 * b,
    "gate and up are read from alternate columns of [gate, up]; gate is the first half, up the second": _interleaved,
}
# Formulas that are right on paper, but overflow in the dtype that they are computed in, whose name replaces {}.
OVERFLOWS: dict[str, formulas.Formula] = {
    "sigmoid is exp(x) / (1 + exp(x)), which overflows {}": (
        partial(of_halves, activate=lambda a, b: a * (a.exp() / (1 + a.exp())) * b)
    ),
    "sigmoid is written 1 / (1 + exp(-x)), whose backward gives inf · 0 = NaN in {}; use torch.sigmoid": (
        partial(of_halves, activate=lambda a, b: a / (1 + (-a).exp()) * b)
    ),
}


def mistakes(problem: formulas.Problem) -> formulas.Mistakes:
    """The mistakes for a problem, the plainest first."""
    return {
        **formulas.forwards({text: partial(of_halves, activate=product) for text, product in ACTIVATIONS.items()}),
        **{
            text.format(str(dtype)[6:]): outputs_with  # [6:] drops "torch."
            for dtype in (torch.float32, problem.dtype)
            for text, outputs_with in formulas.forwards(OVERFLOWS, dtype).items()
        },
        **formulas.backwards(
            right, {text: partial(_gradients, backward=backward) for text, backward in BACKWARDS.items()}
        ),
    }


# Mistakes in d_gate = g up s (1 + gate (1 - s)) and d_up = g silu(gate), where g is the gradient of the result and
# s = sigmoid(gate): from (g, gate, up, s) to (d_gate, d_up).
BACKWARDS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {  # a is gate, b is up
    "the backward uses sigmoid as the derivative of silu": lambda g, a, b, s: (g * b * s, g * a * s),
    "the backward uses the derivative of sigmoid as that of silu": lambda g, a, b, s: (g * b * s * (1 - s), g * a * s),
    "the backward uses silu itself as its derivative": lambda g, a, b, s: (g * b * a * s, g * a * s),
    "silu' is s (1 - gate (1 - s)); it must be s (1 + gate (1 - s)), s = sigmoid(gate)": (
        lambda g, a, b, s: (g * b * s * (1 - a * (1 - s)), g * a * s)
    ),
    "up is missing in the gradient of gate": lambda g, a, b, s: (g * s * (1 + a * (1 - s)), g * a * s),
    "the gradients of gate and up are exchanged": lambda g, a, b, s: (g * a * s, g * b * s * (1 + a * (1 - s))),
    "the gradient of up is grad_output · gate, not grad_output · silu(gate)": (
        lambda g, a, b, s: (g * b * s * (1 + a * (1 - s)), g * a)
    ),
}


def _gradients(
    exact: formulas.Problem,
    _: formulas.Outputs,
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> formulas.Outputs:
    """The gradients that follow from `backward`, a function in BACKWARDS: those of gate and up, or of x, w1 and w3.

    exact  the problem, in float64
    """
    x, g = exact.inputs, exact.grad_output
    if "gate" in x:
        return dict(zip(("gate", "up"), backward(g, x["gate"], x["up"], x["gate"].sigmoid()), strict=True))
    a, b = F.linear(x["x"], x["w1"]), F.linear(x["x"], x["w3"])
    d_gate, d_up = backward(g @ x["w2"], a, b, a.sigmoid())
    return {"x": d_gate @ x["w1"] + d_up @ x["w3"], "w1": d_gate.mT @ x["x"], "w3": d_up.mT @ x["x"]}
