"""Times the language model's head and loss, forward and backward, in several implementations.

Ours computes the logits of one chunk of tokens after another; the baselines compute the logits of all tokens at once.
LOSSES has the implementations, called rows; a new one is an `Entry` there. `benchmarks.loss` makes inputs and judges
results, and `benchmarks.layouts` says how the results are shown. The runner calls the methods of `Loss`: they override
hooks of `lmsys.bench.Benchmark`, which says when each is called and what it returns. A new metric is a `Field` of
`Loss.fields`, and its value in `Loss.metrics` or, if it must be measured, in `Loss.inspect`.

The reference is the eager row in float64. The budget, the error that is allowed, is made of the error of plain PyTorch
in the precision that is tested: at each element, the larger error of two usual formulas. References are computed at the
full shape, from one block of tokens after another, so that only the rows need memory for all logits.

Some tokens are *extreme*: their target has by far the lowest logit (`lmsys.extremes.loss`). A row that is not compiled
is also checked with other kinds of extreme tokens, such as equal logits, at a small shape that no block divides, if it
takes this shape. A row that has a parameter for another reduction, for weights, smoothed labels, a z-loss or a soft cap
is checked with these as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks import axes, layouts, models
from benchmarks.loss import (
    ERRORS,
    ODD_TOKENS,
    ODD_VOCABULARY,
    OUTPUTS,
    Inputs,
    LossDraws,
    references,
    repeat,
)
from lmsys.bench import (
    Axis,
    Benchmark,
    Candidate,
    Case,
    Entry,
    Field,
    Grid,
    Kept,
    Record,
    Settings,
    Step,
    Table,
    Traits,
    bench,
    fields,
    positive,
)
from lmsys.check.loss import faults_of_options
from lmsys.measure import memory

UNCHUNKED = "benchmarks.loss:unchunked"
PEERS = "benchmarks.loss_peers:"
_cut = partial(  # makes the entries of Apple's Cut Cross-Entropy
    Entry,
    peer=True,
    supports=f"{PEERS}cut_cross_entropy_supports",
    install="'cut-cross-entropy @ git+https://github.com/apple/ml-cross-entropy.git'",
)
LOSSES = Table(
    "loss",
    [
        Entry("chunked", "lmsys.model.loss:linear_cross_entropy", "in chunks"),
        Entry("eager", UNCHUNKED, "all logits, eager", traits=Traits(baseline=1)),
        Entry("compiled", UNCHUNKED, "all logits, torch.compile", peer=True, traits=Traits(baseline=2, compiles=True)),
        Entry(
            "torch_chunked",
            f"{PEERS}torch_chunked",
            "torch's linear_cross_entropy",
            peer=True,
            supports=f"{PEERS}torch_chunked_supports",
        ),
        Entry("liger", f"{PEERS}liger", "Liger-Kernel", peer=True, supports=f"{PEERS}liger_supports", extra="peers"),
        _cut("cut_cross_entropy", f"{PEERS}cut_cross_entropy", "Cut Cross-Entropy"),
        _cut("cut_cross_entropy_kahan", f"{PEERS}cut_cross_entropy_kahan", "Cut Cross-Entropy, float32 sums"),
        _cut("cut_cross_entropy_exact", f"{PEERS}cut_cross_entropy_exact", "Cut Cross-Entropy, nothing left out"),
        Entry("quack", f"{PEERS}quack", "QuACK", peer=True, supports=f"{PEERS}quack_supports", extra="peers"),
    ],
)


@dataclass(frozen=True)
class LossTest(Case):
    """One row at one shape and precision. Its inputs are hidden (N, M), weight (V, M) and targets (N).

    tokens, d_model, vocab_size  N, M, V
    precision                    a name in `benchmarks.models.DTYPES`
    """

    tokens: int
    d_model: int
    vocab_size: int
    precision: str

    @property
    def comparison(self) -> str:
        return f"{self.section}-N{self.tokens}M{self.d_model}V{self.vocab_size}-{self.precision}"


class Loss(Benchmark):
    """The benchmark of the head and the loss: it compares rows at each shape and precision."""

    name = "loss"
    layout = layouts.LOSS
    num_proofs = Step.num_kept  # the default number of timed calls that are checked
    case_type = LossTest
    tables = {"loss": LOSSES}
    axes: tuple[Axis, ...] = axes.named(
        Axis("tokens", positive, (16384,)),
        Axis("d_model", positive, (1024,)),
        Axis("vocab_size", positive, (10_000,)),
        "--precision",
        Axis("row", default=tuple(LOSSES)),
    )
    fields: tuple[Field, ...] = fields.columns(
        "tokens d_model vocab_size precision",
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
        fields.SUSTAINED_FRACTION.called(role="metric"),
        [
            Field(
                name,
                label=f"Error of {output}",
                about=f"Largest error of {output} against float64, as a share of its largest value",
                shown="%",
            )
            for name, output in zip(ERRORS, OUTPUTS, strict=True)
        ],
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[LossTest]:
        for shape, entry in product(
            grid.product("tokens", "d_model", "vocab_size", "precision"), LOSSES.select(grid["row"])
        ):
            yield LossTest(grid.name, entry, settings.device, *shape)

    def why_not(self, case: LossTest) -> str | None:
        return models.why_no_arithmetic(
            case.precision, case.device, Traits.of(case.entry).compiles
        ) or case.entry.why_not(case)

    def context(self, cases: Sequence[LossTest]) -> AbstractContextManager[None]:
        return models.arithmetic(cases[0].precision)

    def setup(self, cases: Sequence[LossTest], settings: Settings) -> LossDraws:
        case = cases[0]
        return LossDraws(Inputs(case.tokens, case.d_model, case.vocab_size, case.precision, case.device), settings.seed)

    def open(self, candidate: Candidate, setup: LossDraws) -> None:
        call = candidate.entry.load()
        candidate.call = (
            torch.compile(call, dynamic=False, fullgraph=True) if Traits.of(candidate.entry).compiles else call
        )
        setup.inputs.run(candidate.call)

    def check_all(self, candidates: Sequence[Candidate], setup: LossDraws, runner: Any) -> None:
        # References are made here and not in `check`: if they fail, the benchmark fails, and no row is called wrong.
        for x in (setup.inputs, setup.odd):
            x.exact, x.plain = references(x.in_blocks)
        super().check_all(candidates, setup, runner)

    def check(self, candidate: Candidate, setup: LossDraws) -> Mapping[str, float]:
        answer = setup.inputs.run(candidate.call)
        candidate.notes |= setup.inputs.errors(answer)
        ratios = setup.inputs.check(answer)
        odd = replace(candidate.case, tokens=ODD_TOKENS, vocab_size=ODD_VOCABULARY)
        # A compiled row is left out, since it would be compiled again for another shape.
        if not Traits.of(candidate.entry).compiles and candidate.entry.why_not(odd) is None:
            ratios |= {
                f"{name}, of {ODD_VOCABULARY} classes": ratio
                for name, ratio in setup.odd.check(setup.odd.run(candidate.call)).items()
            }
        return ratios | faults_of_options(candidate.entry)

    def redraw(self, setup: LossDraws, draw: int) -> None:
        setup.fill(draw)

    def judge(self, case: LossTest, candidate: Candidate, setup: LossDraws, kept: Kept) -> Mapping[str, float]:
        return setup.inputs.judge(kept)

    def repeat(self, record: Record, call: Record) -> Iterator[str | int]:
        yield from repeat(record, call)

    def step(self, case: LossTest, candidate: Candidate, setup: LossDraws) -> Step:
        return Step(lambda _: setup.inputs.run(candidate.call), redraw=setup.fill, keep=setup.inputs.keep)

    def outputs(self, candidate: Candidate, setup: LossDraws, element: int | None = None) -> Mapping[str, torch.Tensor]:
        return dict(zip(OUTPUTS, setup.inputs.run(candidate.call), strict=True))

    def least_work(self, case: LossTest) -> tuple[float, str, float]:
        """(operations, their dtype, bytes read) that every row needs.

        There are three matmuls of 2 N M V operations each. Hidden states and weight are read at least once.
        """
        return (
            6 * case.tokens * case.d_model * case.vocab_size,
            models.DTYPES[case.precision],
            4 * (case.tokens + case.vocab_size) * case.d_model,  # bytes of float32
        )

    def inspect(self, case: LossTest, candidate: Candidate, setup: LossDraws) -> Record:
        x = setup.inputs
        peak = memory.peak_bytes(lambda: x.run(candidate.call), case.device)
        return {"peak_bytes": peak - x.hidden.nbytes - x.weight.nbytes}

    def tokens(self, case: LossTest) -> int:
        return case.tokens

    def metrics(self, case: LossTest, record: Record, machine: Record) -> Record:
        """The operations of three matmuls; with a time also rates, and their share of what this machine reaches."""
        work: Record = {"flops": 6 * case.tokens * case.d_model * case.vocab_size}
        if time_s := record.get("time_s"):
            work |= {"tokens_per_s": case.tokens / time_s} | models.matmul_rates(
                work["flops"], time_s, case.precision, machine
            )
        return work


test_loss = bench(Loss)
