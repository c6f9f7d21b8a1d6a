"""The language model's head and loss, forward and backward: ours in chunks, and the logits of all tokens at once.

The reference is the eager row in float64, and the budget is what that row loses in the precision that is tested. Both
are made at the full shape, in blocks of tokens: only the rows themselves need room for all logits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import axes
from benchmarks.arithmetic import LOSS_SCALE, ROUNDING, arithmetic, autocast, matmul_rates, ratio_of, why_no_arithmetic
from lmsys.bench import (
    Axis,
    Benchmark,
    Candidate,
    Case,
    Entry,
    Field,
    Grid,
    Record,
    Settings,
    Step,
    Table,
    bench,
    fields,
    positive,
)
from lmsys.measure import memory

BLOCK_LOGITS = {"cuda": 2**26, "cpu": 2**22}  # of the reference, held at once
OUTPUTS = ("loss", "gradient of hidden", "gradient of weight")
UNCHUNKED = "benchmarks.bench_loss:unchunked"
LOSSES = Table(
    "loss",
    [
        Entry("chunked", "lmsys.model.loss:linear_cross_entropy", "in chunks"),
        Entry("eager", UNCHUNKED, "all logits, eager", traits={"baseline": 1}),
        Entry("compiled", UNCHUNKED, "all logits, torch.compile", peer=True, traits={"baseline": 2, "compiles": True}),
    ],
)
Answer = tuple[Tensor, Tensor, Tensor]  # the loss, and the gradients of hidden and weight


@dataclass(frozen=True)
class LossTest(Case):
    """A shape, a precision, a row. hidden (N, M), weight (V, M), targets (N)."""

    tokens: int
    d_model: int
    vocab_size: int
    precision: str

    @property
    def comparison(self) -> str:
        return f"{self.section}-N{self.tokens}M{self.d_model}V{self.vocab_size}-{self.precision}"


def unchunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The head and the loss as they are usually written: the logits of all tokens, in float32 or wider."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


@dataclass
class Inputs:
    """hidden (N, M) and weight (V, M), both leaves, and targets (N); gradients are those of the loss times `scale`.

    exact, plain  the eager row's answer in float64 and in the precision itself; on the host, where no row is measured
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    precision: str
    scale: float
    exact: Sequence[Tensor] = ()
    plain: Sequence[Tensor] = ()

    @classmethod
    def draw(cls, case: LossTest, seed: int) -> "Inputs":
        shapes = (case.tokens, case.d_model), (case.vocab_size, case.d_model)
        hidden, weight = (torch.empty(shape, device=case.device, requires_grad=True) for shape in shapes)
        targets = torch.empty(case.tokens, dtype=torch.int64, device=case.device)
        scale = LOSS_SCALE if case.precision == "fp16" else 1.0
        return cls(hidden, weight, targets, case.precision, scale).redraw_(seed)

    def redraw_(self, seed: int) -> "Inputs":
        """New values in the same memory; the logits are about standard normal."""
        generator = torch.Generator(self.hidden.device).manual_seed(seed)
        self.hidden.data.normal_(generator=generator)
        self.weight.data.normal_(std=self.weight.shape[1] ** -0.5, generator=generator)
        self.targets.random_(len(self.weight), generator=generator)
        return self

    def run(self, call: Callable[..., Tensor]) -> Answer:
        with autocast(self.precision, self.hidden.device.type):
            loss = call(self.hidden, self.weight, self.targets)
        d_hidden, d_weight = torch.autograd.grad(loss * self.scale, (self.hidden, self.weight))
        return loss.detach(), d_hidden, d_weight

    def in_blocks(self, exact: bool) -> Answer:
        """The eager row's answer, made from one block of tokens after another; in float64 where `exact`."""
        dtype, precision = (torch.float64, "fp32") if exact else (torch.float32, self.precision)
        weight = self.weight.detach().to(dtype).requires_grad_()
        total, d_hidden, d_weight = weight.new_zeros(()), [], torch.zeros_like(weight)
        size = max(1, BLOCK_LOGITS[self.hidden.device.type] // len(self.weight))
        for hidden, targets in zip(self.hidden.detach().split(size), self.targets.split(size), strict=True):
            share = len(targets) / len(self.targets)
            leaf = hidden.to(dtype).requires_grad_()
            loss, *gradients = Inputs(leaf, weight, targets, precision, self.scale * share).run(unchunked)
            total += loss * share
            d_hidden.append(gradients[0])
            d_weight += gradients[1]
        return total, torch.cat(d_hidden), d_weight


class Loss(Benchmark):
    """The head and the loss by row, at one shape and precision."""

    name = "loss"
    case_type = LossTest
    tables = {"loss": LOSSES}
    axes: tuple[Axis, ...] = (
        Axis("tokens", positive, (16384,)),
        Axis("d_model", positive, (1024,)),
        Axis("vocab_size", positive, (10_000,)),
        *axes.named("--precision"),
        Axis("row", default=tuple(LOSSES)),
    )
    fields: tuple[Field, ...] = (
        *fields.axes("tokens", "d_model", "vocab_size", "precision"),
        fields.TIME.called(about="Median time of forward and backward"),
        fields.PEAK.called(
            about="Peak memory of forward and backward above what was live before, less the gradients of hidden states "
            "and weight, which every row has to make",
            shown="GiB",
        ),
        fields.RATE,
        Field("tokens_per_s", "tokens/s", "Tokens", about="Tokens over median time"),
        fields.MATMUL_FRACTION.called(
            about="6 operations for each token, feature and class over median time, as a share of the large matmul "
            "measured in this run"
        ),
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[LossTest]:
        shapes = grid.product("tokens", "d_model", "vocab_size", "precision")
        for shape, entry in product(shapes, LOSSES.select(grid["row"])):
            yield LossTest(grid.name, entry, settings.device, *shape)

    def why_not(self, case: LossTest) -> str | None:
        compiles = case.entry.trait("compiles", False)
        return why_no_arithmetic(case.precision, case.device, compiles) or case.entry.why_not(case)

    def context(self, cases: Sequence[LossTest]) -> AbstractContextManager[None]:
        return arithmetic(cases[0].precision)

    def setup(self, cases: Sequence[LossTest], settings: Settings) -> Inputs:
        return Inputs.draw(cases[0], settings.seed)

    def open(self, candidate: Candidate, setup: Inputs) -> None:
        call = candidate.entry.load()
        compiles = candidate.entry.trait("compiles", False)
        candidate.call = torch.compile(call, dynamic=False, fullgraph=True) if compiles else call
        setup.run(candidate.call)

    def check_all(self, candidates: Sequence[Candidate], setup: Inputs, runner: Any) -> None:
        # Apart from the rows' own calls: where this fails, they have not.
        setup.exact, setup.plain = ([x.cpu() for x in setup.in_blocks(exact)] for exact in (True, False))
        super().check_all(candidates, setup, runner)

    def check(self, candidate: Candidate, setup: Inputs) -> Mapping[str, float]:
        """Only the row's own answer is on the device while it runs."""
        device, dtype = setup.hidden.device, ROUNDING[setup.precision]
        answer = [x.cpu() for x in setup.run(candidate.call)]
        rows = zip(OUTPUTS, answer, setup.exact, setup.plain, strict=True)
        return {name: ratio_of(x.to(device), y.to(device), z.to(device), dtype) for name, x, y, z in rows}

    def redraw(self, setup: Inputs, seed: int) -> None:
        setup.redraw_(seed)

    def step(self, case: LossTest, candidate: Candidate, setup: Inputs) -> Step:
        return Step(lambda _: setup.run(candidate.call))

    def inspect(self, case: LossTest, candidate: Candidate, setup: Inputs) -> Record:
        peak = memory.peak_bytes(lambda: setup.run(candidate.call), case.device)
        return {"peak_bytes": peak - setup.hidden.nbytes - setup.weight.nbytes}

    def metrics(self, case: LossTest, record: Record, machine: Record) -> Record:
        """The operations of three matmuls, and with a time the rates and their share of what this machine reaches."""
        found: Record = {"flops": 6 * case.tokens * case.d_model * case.vocab_size}
        if time_s := record.get("time_s"):
            rates = matmul_rates(found["flops"], time_s, case.precision, machine)
            found |= {"tokens_per_s": case.tokens / time_s} | rates
        return found


test_loss = bench(Loss)
