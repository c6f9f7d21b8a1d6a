"""A benchmark of a new kind, in a file of its own: a matrix product, checked before it is timed and while it is."""

from dataclasses import dataclass

import torch

from lmsys.bench import Axis, Benchmark, Case, Entry, Step, Table, bench, fields, positive
from lmsys.draws import Draws

DTYPES = ("float32", "float16", "bfloat16")
ROWS = Table("matmul", [Entry("matmul", "torch:matmul"), Entry("mine", "bench_matmul:mine")])


def mine(a, b):
    return torch.nn.functional.linear(a, b.T)


@dataclass(frozen=True)
class Product(Case):
    size: int
    dtype: str


class Matmul(Benchmark):
    name, case_type = "matmul", Product
    axes = (Axis("size", positive, (64, 256)), Axis("dtype", default=DTYPES))
    fields = fields.columns("size dtype", fields.RATE.called(of=lambda case: 2 * case["size"] ** 3 / case["time_s"]))

    def cases(self, grid, settings):
        for size, dtype in grid.product("size", "dtype"):
            yield from (Product(grid.name, row, settings.device, size, dtype) for row in ROWS.values())

    def setup(self, cases, settings):
        a, b = torch.empty(2, cases[0].size, cases[0].size, device=cases[0].device).to(getattr(torch, cases[0].dtype))
        return Draws({"a": a, "b": b}, settings.seed)

    def redraw(self, setup, draw):
        setup.fill(draw)  # before every timed call

    def step(self, case, candidate, setup):
        return Step(lambda _: candidate.call(*setup.tensors.values()))

    def errors(self, setup, product):
        a, b = (x.double() for x in setup.tensors.values())
        rounding = torch.finfo(product.dtype).eps * len(a) ** 0.5  # a sum's error grows as the root of its terms
        return {"product": ((product - a @ b).abs() / (rounding * a.abs() @ b.abs())).max().item()}


test_matmul = bench(Matmul)
