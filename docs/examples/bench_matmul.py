"""A benchmark of a new kind, in a file of its own: a matrix product in three precisions, checked before it is timed."""

from dataclasses import dataclass

import torch

from lmsys.bench import Axis, Benchmark, Case, Entry, Field, Step, Table, bench, fields, positive

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROWS = Table("matmul", [Entry("matmul", "torch:matmul"), Entry("mine", "bench_matmul:mine")])


def mine(a, b):
    return torch.nn.functional.linear(a, b.T)


@dataclass(frozen=True)
class Product(Case):
    size: int
    dtype: str


class Matmul(Benchmark):
    name = "matmul"
    axes = (Axis("size", positive, (64, 256)), Axis("dtype", default=tuple(DTYPES)))
    fields = (
        *fields.axes("size", "dtype"),
        Field("flops_per_s", "FLOP/s", "rate", shown="GFLOP/s", of=lambda one: 2 * one["size"] ** 3 / one["time_s"]),
    )

    def cases(self, grid, settings):
        for size, dtype in grid.product("size", "dtype"):
            yield from (Product(grid.name, row, settings.device, size, dtype) for row in ROWS.values())

    def setup(self, cases, settings):
        a, b = torch.randn(2, cases[0].size, cases[0].size, device=cases[0].device).to(DTYPES[cases[0].dtype])
        return a, b, a.double() @ b.double()

    def check(self, candidate, setup):
        a, b, exact = setup
        rounding = torch.finfo(a.dtype).eps * len(a) ** 0.5  # of a sum: it grows as the root of the number of terms
        budget = rounding * a.double().abs().matmul(b.double().abs())
        return {"product": ((candidate.call(a, b) - exact).abs() / budget).max().item()}

    def step(self, case, candidate, setup):
        return Step(lambda _: candidate.call(*setup[:2]))


test_matmul = bench(Matmul)
