"""Times norms beside torch's: forward, backward alone, and both. Results are checked before and during the timing.

`fwd`, `bwd` and `fwdbwd` are the directions. To time a norm of yours, name it by --axis row, or add it to ROWS:

cp docs/examples/bench_norm.py docs/examples/mine.py .
python -m pytest bench_norm.py --axis row=torch,mine.py:my_norm --axis direction=bwd --benchmark-json norm.json
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lmsys.bench import Axis, Benchmark, Case, Entry, Step, Table, bench, fields, positive
from lmsys.draws import Draws
from lmsys.testing import error_ratio

EPS = 1e-6


def by_torch(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


def formula(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


ROWS = Table(
    "norm",
    [
        Entry("torch", "bench_norm:by_torch", peer=True, traits={"baseline": 1}),
        Entry("formula", "bench_norm:formula"),
    ],
)


def run(norm, inputs, direction):
    """y in the direction fwd, else the gradients (dx, dweight); inputs: x (N, M), weight (M,), dy (N, M)."""
    *leaves, dy = inputs
    if direction == "fwd":
        return norm(*leaves, EPS)
    leaves = [x.detach().requires_grad_() for x in leaves]
    return torch.autograd.grad(norm(*leaves, EPS), leaves, dy)


@dataclass(frozen=True)
class NormCase(Case):
    tokens: int
    width: int
    dtype: str
    direction: str


class Norm(Benchmark):
    name, case_type, tables = "norm", NormCase, {"norm": ROWS}
    axes = (
        Axis("row", default=tuple(ROWS)),
        Axis("tokens", positive, (4096,)),
        Axis("width", positive, (1024,)),
        Axis("dtype", default=("float32", "bfloat16")),
        Axis("direction", default=("fwd", "bwd", "fwdbwd")),
    )
    fields = fields.columns("tokens width dtype direction")

    def cases(self, grid, settings):
        for shape in grid.product("tokens", "width", "dtype", "direction"):
            for row in ROWS.select(grid["row"]):
                yield NormCase(grid.name, row, settings.device, *shape)

    def setup(self, cases, settings):
        case = cases[0]
        shapes = {"x": (case.tokens, case.width), "weight": (case.width,), "dy": (case.tokens, case.width)}
        dtype = getattr(torch, case.dtype)
        return Draws(
            {name: torch.empty(s, dtype=dtype, device=case.device) for name, s in shapes.items()}, settings.seed
        )

    def redraw(self, setup, draw):
        setup.fill(draw)  # before every timed call

    def step(self, case, candidate, setup):
        inputs = list(setup.tensors.values())
        if case.direction != "bwd":
            return Step(lambda _: run(candidate.call, inputs, case.direction))

        def forward():  # runs before each call, and is not timed
            leaves = [x.detach().requires_grad_() for x in inputs[:2]]
            return candidate.call(*leaves, EPS), leaves

        def backward(made):
            y, leaves = made
            return torch.autograd.grad(y, leaves, inputs[2])

        return Step(backward, prepare=forward)

    def errors(self, setup, result):
        """The error of each result against float64, over what is allowed: about twice torch's own in this dtype."""
        inputs = list(setup.tensors.values())
        names, direction = (("y",), "fwd") if torch.is_tensor(result) else (("dx", "dweight"), "bwd")
        exact = run(formula, [x.double() for x in inputs], direction)
        plain = run(by_torch, inputs, direction)
        if direction == "fwd":
            result, exact, plain = [result], [exact], [plain]
        return {name: error_ratio(*three) for name, *three in zip(names, result, exact, plain, strict=True)}


test_norm = bench(Norm)
