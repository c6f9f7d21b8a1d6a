"""Attention: every selected row of the table, by shape, dtype, mask and direction."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks import axes
from benchmarks.arithmetic import capability_of, matmul_rates
from benchmarks.attention.check import Gate, check_float32, check_scale
from benchmarks.attention.spots import NUM_KEPT, Spots, repeat
from lmsys.attention import ATTENTION, AttentionCase
from lmsys.attention.contract import DTYPES, adapt
from lmsys.bench import Axis, Benchmark, Candidate, Case, Entry, Field, Grid, Record, Settings, Step, bench, fields
from lmsys.cost import operations
from lmsys.draws import Draws
from lmsys.measure import memory
from lmsys.measure.compare import Kept, attempt, release_memory
from lmsys.testing import Inputs, make_inputs, run


@dataclass(frozen=True)
class AttentionTest(Case):
    """A shape, a mask, a direction, a row. q (B, H, Q, D), k and v (B, Hkv, K, D)."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str
    causal: bool
    direction: str

    @property
    def group(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}kv{self.kv_heads}"
        mask = "causal" if self.causal else "full"
        shape = f"B{self.batch}{heads}Q{self.queries}K{self.keys}D{self.head_dim}"
        return f"{self.section}-{shape}-{self.dtype}-{mask}"

    @property
    def comparison(self) -> str:
        """All rows of a shape in one direction."""
        return f"{self.group}-{self.direction}"

    @property
    def shape(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")}

    @property
    def asked(self) -> AttentionCase:
        """The case that the row is asked for."""
        return AttentionCase(
            **self.shape,
            dtype=self.dtype,
            causal=self.causal,
            grad=self.direction != "fwd",
            device=self.device,
            capability=capability_of(self.device),
        )


@dataclass
class Setup:
    """Inputs that all rows of a shape share; `case` needs gradients where any of them does."""

    case: AttentionCase
    inputs: Inputs
    draws: Draws
    spots: Spots


class Attention(Benchmark):
    """Each row is held to one float64 oracle, in float32 where it has such a form, and in the case's own dtype."""

    name = "attention"
    case_type = AttentionTest
    tables = {"attention": ATTENTION}
    axes: tuple[Axis, ...] = (
        *axes.named("--attention", "--length", "--tiers", "--head-dim", "--batch", "--heads"),
        *axes.named("--dtype", "--causal", "--direction"),
        # batch is tokens / queries and heads is width / head_dim, where these are given; `without`: rows left out
        *(Axis("tokens", int, 0, single=True), Axis("width", int, 0, single=True), Axis("without")),
    )
    fields: tuple[Field, ...] = (
        *fields.axes("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "dtype", "causal", "direction"),
        fields.TIME,
        fields.RATE,
        fields.PEAK.called(about="Peak memory of {direction} above what was live before it"),
        Field(
            "saved_bytes",
            "B",
            "Saved for backward",
            about="Memory saved by the forward for the backward (q, k and v included)",
            shown="MiB",
        ),
        fields.ERROR.called(
            about="Worst error as a share of its budget (right: at most 1): the largest of the check in this dtype, "
            "the check in float32 where the row has a float32 form, and the root-mean-square rule where it has none"
        ),
        fields.COMPILE.called(
            about="First call of {direction} (compiles and tunes; tuned choices already on disk are not timed again)"
        ),
        Field("bytes", "B", "ideal traffic", "detail"),
        *(Field("bytes_per_s", "B/s", "traffic", "detail", shown="GB/s"),),
        fields.MATMUL_FRACTION.called(role="detail"),
        fields.COPY_FRACTION.called(role="detail"),
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[AttentionTest]:
        asked = grid.product("dtype", "causal", "direction")
        for shape, what, entry in product(shapes(grid), asked, rows_of(grid)):
            yield AttentionTest(grid.name, entry, settings.device, *shape, *what)

    def key(self, case: AttentionTest) -> tuple[str, bool]:
        return case.entry.name, case.asked.grad

    def why_not(self, case: AttentionTest) -> str | None:
        return case.entry.why_not(case.asked)

    def setup(self, cases: Sequence[AttentionTest], settings: Settings) -> Setup:
        case = replace(cases[0].asked, grad=any(one.asked.grad for one in cases))
        inputs = make_inputs(case, settings.seed)
        return Setup(case, inputs, Draws(inputs.tensors, settings.seed), Spots(case, inputs))

    def open(self, candidate: Candidate, setup: Setup) -> None:
        candidate.call = adapt(candidate.entry.load())
        run(candidate.call, setup.inputs, causal=setup.case.causal, grad=candidate.case.asked.grad)

    def check_all(self, candidates: Sequence[Candidate], setup: Setup, runner: Any) -> None:
        """float32 first, once: there an error of 1 % shows. A row that cannot run it, or not in this memory, is held
        to the stricter root-mean-square rule in its own dtype. Small cases also with a scale of their own."""
        seed = runner.settings.seed
        if setup.inputs.seed == seed:  # as they were drawn
            setup.inputs.redraw_(seed + 1)
            if setup.case.dtype != "float32":
                check_float32(candidates, replace(setup.case, dtype="float32"), seed + 1)
                release_memory()
        in_own_dtype = Gate(setup.inputs, setup.case)
        for candidate in candidates:
            if candidate.outcome == "ok" and (failure := in_own_dtype.check(candidate)):
                candidate.failed(*failure)
        check_scale(candidates, setup.inputs, setup.case)

    def redraw(self, setup: Setup, draw: int) -> None:
        setup.draws.fill(draw)

    def judge(self, case: AttentionTest, candidate: Candidate, setup: Setup, kept: Kept) -> Mapping[str, float]:
        return setup.spots.judge(case.direction != "fwd", kept, rms=candidate.state != "has float32")

    def repeat(self, record: Record, call: Record) -> Iterator[str]:
        asked = {name: record[name] for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")}
        case = AttentionCase(**asked, dtype=record["dtype"], causal=record["causal"], grad=False, device="cpu")
        yield from repeat(case, record["proof"]["seed"], call)

    def step(self, case: AttentionTest, candidate: Candidate, setup: Setup) -> Step:
        """fwd: without gradients, as in inference. bwd: the gradients alone, of a forward run untimed just before."""
        call, do = candidate.call, setup.inputs.do
        q, k, v = setup.inputs.leaves(candidate.case.asked.grad)

        def forward(_: Any = None) -> Tensor:
            return call(q, k, v, causal=case.causal, scale=None)

        def backward(o: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(o, (q, k, v), do)

        def redraw(draw: int) -> None:
            setup.draws.fill(draw, ("q", "k", "v"))

        def redraw_late(draw: int) -> None:
            setup.draws.fill(draw, ("do",))

        inference = torch.no_grad()(forward)
        parts = {
            "fwd": {"run": inference},
            "bwd": {"run": backward, "prepare": forward, "like": inference},
            "fwdbwd": {"run": lambda _: backward(forward())},
        }[case.direction]
        keep = partial(setup.spots.keep, case.direction != "fwd")
        return Step(**parts, redraw=redraw, redraw_late=redraw_late, keep=keep, num_kept=NUM_KEPT)

    def least_work(self, case: AttentionTest) -> tuple[float, str, float]:
        """A forward's two products; of a backward's five one may be kept from the forward. Inputs are read once."""
        shape = case.shape
        del shape["kv_heads"]
        products = {"fwd": 1, "bwd": 2, "fwdbwd": 3}[case.direction]  # in units of two
        forward = operations.attention_flops(**shape, causal=case.causal, direction="fwd")
        seen = min(case.queries, case.keys) if case.causal else case.keys
        rows = (1 if case.direction == "fwd" else 2) * case.heads * case.queries + 2 * case.kv_heads * seen
        return products * forward, case.dtype, rows * case.batch * case.head_dim * DTYPES[case.dtype].itemsize

    def inspect(self, case: AttentionTest, candidate: Candidate, setup: Setup) -> Record:
        """Peak bytes of what is timed, above what was live before it, and the bytes saved from forward to backward."""
        step = self.step(case, candidate, setup)
        peak, _ = attempt(lambda: memory.peak_bytes(partial(step.run, step.prepare()), case.device))
        found: Record = {"peak_bytes": peak, "saved_bytes": None}
        if case.direction != "fwd":
            backward = self.step(replace(case, direction="bwd"), candidate, setup)
            found["saved_bytes"] = attempt(lambda: memory.saved_bytes(backward.prepare))[0]
        return found

    def tokens(self, case: AttentionTest) -> int:
        """Queries."""
        return case.batch * case.queries

    def metrics(self, case: AttentionTest, record: Record, machine: Record) -> Record:
        """Work, ideal traffic, and with a time the rates and their share of what this machine reaches."""
        shape = case.shape
        moved = operations.attention_bytes(**shape, dtype=case.dtype, direction=case.direction)
        del shape["kv_heads"]
        flops = operations.attention_flops(**shape, causal=case.causal, direction=case.direction)
        found: Record = {"flops": flops, "bytes": moved}
        if time_s := record.get("time_s"):
            share = moved / time_s / machine["ceilings"]["copy_bytes_per_s"]
            found |= {"bytes_per_s": moved / time_s, "copy_ceiling_fraction": share}
            found |= matmul_rates(flops, time_s, case.dtype, machine)
        return found


def shapes(grid: Grid) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(B, H, Hkv, Q, K, D) of a grid. Batch or heads of the command line go before tokens and width."""
    for head_dim, (queries, keys) in grid.product("head_dim", "length"):
        by_tokens, by_width = max(1, grid["tokens"] // queries), max(1, grid["width"] // head_dim)
        batches = (by_tokens,) if grid["tokens"] and "batch" not in grid.given else grid["batch"]
        heads = ((by_width, by_width),) if grid["width"] and "heads" not in grid.given else grid["heads"]
        for batch, pair in product(batches, heads):
            yield batch, *pair, queries, keys, head_dim


def rows_of(grid: Grid) -> list[Entry]:
    """Exactly the rows that the command line names, in its order; else the grid's, or all but those left out."""
    if "attention" in grid.given:
        return ATTENTION.select(name for name in grid["attention"] if name not in axes.MODELS_ONLY)
    names = grid["attention"] or list(ATTENTION)
    return [entry for name, entry in ATTENTION.items() if name in names and name not in grid["without"]]


test_attention = bench(Attention)
