"""The benchmark of attention rows (implementations in the table), by shape, dtype, mask and direction.

The sizes are in `benchmarks/sweeps.py`, the rows in `lmsys.attention.ATTENTION`, the checks in
`benchmarks.attention.check`, and the report in `benchmarks.attention.layout`. The runner calls the methods of
`Attention`: they override hooks of `lmsys.bench.Benchmark`, which says when each is called and what it returns.

To add an axis, make it a field of `AttentionTest` and an `Axis` of `Attention.axes`. Then name it in three places: in
`Attention.fields`; in `Attention.cases`, where names are in the order of the fields of `AttentionTest`; and in
`AttentionTest.group`, if its values need inputs of their own. An option of the pattern is named in `patterns.OPTIONS`
in place of these three.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks import axes, models
from benchmarks.attention import check, patterns
from benchmarks.attention.layout import ATTENTION as LAYOUT
from lmsys import deterministic, testing
from lmsys.attention import ATTENTION, AttentionCase, Pattern, contract
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
    Traits,
    bench,
    fields,
    foreign,
)
from lmsys.cost import operations
from lmsys.extremes.attention import AttentionDraws
from lmsys.measure import compare, memory


@dataclass(frozen=True)
class AttentionTest(Case):
    """A row at one shape, mask and direction: q (B, H, Q, D), k and v (B, Hkv, K, D).

    direction      "fwd", "bwd" (the backward alone) or "fwdbwd"
    window, ...    options of the pattern, as `patterns.make` takes them; None: left out
    deterministic  True: in torch's deterministic mode
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str
    causal: bool
    direction: str
    window: int | None = None
    offset: int | None = None
    documents: str | None = None
    key_lengths: bool | None = None
    softcap: float | None = None
    deterministic: bool | None = None

    @property
    def group(self) -> str:
        """The name of the cases that share inputs: they differ in rows and directions alone."""
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}kv{self.kv_heads}"
        mask = "causal" if self.causal else "full"
        shape = f"B{self.batch}{heads}Q{self.queries}K{self.keys}D{self.head_dim}"
        mode = "deterministic" if self.deterministic else ""
        return "-".join(filter(None, (self.section, shape, self.dtype, mask, patterns.name_of(self.options), mode)))

    @property
    def comparison(self) -> str:
        """The name of the cases that are sampled in turns: all rows of a group in one direction."""
        return f"{self.group}-{self.direction}"

    @property
    def shape(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")}

    @property
    def options(self) -> dict[str, Any]:
        """{name: value} of the options in `patterns.OPTIONS` that the case has; `causal` is none of them."""
        return {name: value for name in patterns.OPTIONS if (value := getattr(self, name))}

    @property
    def pattern(self) -> Pattern:
        return patterns.make(self.batch, self.queries, self.keys, self.device, causal=self.causal, **self.options)

    @property
    def asked(self) -> AttentionCase:
        """The case in the form that a row's `supports` takes."""
        return AttentionCase(
            **self.shape,
            dtype=self.dtype,
            causal=self.pattern.causal,
            grad=self.direction != "fwd",
            device=self.device,
            capability=torch.cuda.get_device_capability() if self.device == "cuda" else None,
            **contract.options_of(self.pattern),
        )

    def flops(self, direction: str) -> float:
        """Operations of the matmuls in this direction, "fwd", "bwd" or "fwdbwd"."""
        shape = {name: size for name, size in self.shape.items() if name != "kv_heads"}
        return operations.attention_flops(**shape, causal=self.causal, direction=direction, pairs=self.visible[0])

    @property
    def visible(self) -> tuple[float | None, float]:
        """(visible pairs, keys that some query sees), both of one head.

        A visible pair is a query and a key that it sees. The number of pairs is None for a case without options, where
        `causal` and the lengths decide.
        """
        if not self.options:
            return None, min(self.queries, self.keys) if self.causal else self.keys
        return patterns.visible(self.batch, self.queries, self.keys, causal=self.causal, **self.options)


class Attention(Benchmark):
    """Checks each row against an oracle in float64, in the case's dtype and if possible in float32, and times it."""

    name = "attention"
    layout = LAYOUT
    num_proofs = check.NUM_KEPT
    case_type = AttentionTest
    tables = {"attention": ATTENTION}
    axes: tuple[Axis, ...] = axes.named(
        "--attention --length --tiers --head-dim --batch --heads",
        "--dtype --causal --direction --window --documents --softcap --deterministic",
        Axis("offset", axes.offset, (None,)),
        Axis("key_lengths", fields.yes_no, (None,)),
        # If given, tokens / queries is the batch, and width / head_dim the number of heads; 0: not given. `without` has
        # names of rows to leave out.
        Axis("tokens", int, 0, single=True),
        Axis("width", int, 0, single=True),
        Axis("without"),
    )
    fields: tuple[Field, ...] = fields.columns(
        "batch heads kv_heads queries keys head_dim dtype causal direction",
        " ".join(patterns.OPTIONS),
        "deterministic",
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
        Field(
            "mask_s",
            "s",
            "Mask",
            about="Time to make, before any call, what the row reads of windows and documents: a mask, a block mask "
            "or the interval of keys of each query",
            shown="ms",
        ),
        Field("documents_s", "s", "making of documents", "detail", "Time to make `Documents`, before any call", "ms"),
        fields.ERROR.called(
            about="Worst error as a share of its budget (right: at most 1): the largest of the check in this dtype, "
            "the check in float32 where the row has a float32 form, and the root-mean-square rule where it has none"
        ),
        fields.COMPILE.called(
            about="First call of {direction} (compiles and tunes; tuned choices already on disk are not timed again)"
        ),
        Field("visible_share", role="detail", about="Share of the pairs of a query and a key where it sees the key"),
        Field("bytes", "B", "ideal traffic", "detail"),
        Field("bytes_per_s", "B/s", "traffic", "detail", shown="GB/s"),
        fields.MATMUL_FRACTION.called(role="detail"),
        fields.COPY_FRACTION.called(role="detail"),
    )

    def cases(self, grid: Grid, settings: Settings) -> Iterator[AttentionTest]:
        for shape, options, entry in product(
            shapes(grid),
            grid.product("dtype", "causal", "direction", *patterns.OPTIONS, "deterministic"),
            rows_of(grid, partial(foreign.Foreign.of, settings) if settings.apart else None),
        ):
            case = AttentionTest(grid.name, entry, settings.device, *shape, *options)  # in the order of its fields
            yield replace(case, offset=max(0, case.keys - case.queries)) if case.offset == axes.END else case

    def key(self, case: AttentionTest) -> tuple[str, bool]:
        return case.entry.name, case.asked.grad

    def why_not(self, case: AttentionTest) -> str | None:
        return case.entry.why_not(case.asked) or (
            contract.why_not_given(contract.adapt(case.entry.load()), case.asked.options) if case.options else None
        )

    def context(self, cases: Sequence[AttentionTest]) -> AbstractContextManager[None]:
        return deterministic.deterministic_mode() if cases[0].deterministic else nullcontext()

    def setup(self, cases: Sequence[AttentionTest], settings: Settings) -> check.Spots:
        """Inputs that all rows of a shape share; with gradients if any of the cases needs them.

        Returns a `check.Spots`, which holds them, and judges parts of timed calls on them.
        """
        case = replace(cases[0].asked, grad=any(test.asked.grad for test in cases))
        inputs, pattern = testing.make_inputs(case, settings.seed), cases[0].pattern
        return check.Spots(case, AttentionDraws(inputs.tensors, settings.seed, pattern.causal), inputs, pattern)

    def open(self, candidate: Candidate, setup: check.Spots) -> None:
        candidate.call = contract.adapt(candidate.entry.load())
        testing.run(candidate.call, setup.inputs, pattern=setup.pattern, grad=candidate.case.asked.grad)

    def check_all(self, candidates: Sequence[Candidate], setup: check.Spots, runner: Any) -> None:
        """Checks rows in float32 first, then in the dtype of the cases, and then in small cases (`check.check_small`).

        In float32 an error of 1 % shows, and in bfloat16 it does not. A row that cannot run in float32, or not in this
        memory, must meet a stricter rule in the dtype of the cases: a bound of the error in root mean square.
        """
        seed = runner.settings.seed
        # `redraw_` changes the inputs' seed, so only the first check of a setup takes this branch.
        if setup.inputs.seed == seed:
            setup.inputs.redraw_(seed + 1)
            if setup.case.dtype != "float32":
                check.check_float32(candidates, replace(setup.case, dtype="float32"), setup.pattern, seed + 1)
                compare.release_memory()
        elif setup.draws.extreme is not None:
            # The last timed draw has left a unit (a batch entry and key head) with extreme values in the inputs
            # (`lmsys.extremes.attention`). It would widen the gate's budget, which is one for all units. Inputs that
            # `redraw_` draws have no such unit.
            setup.inputs.redraw_(seed + 2)
        in_own_dtype = check.Gate(setup.inputs, setup.case, setup.pattern)
        for candidate in candidates:
            if candidate.outcome == "ok" and (failure := in_own_dtype.check(candidate)):
                candidate.failed(*failure)
        check.check_small([row for row in candidates if runner.settings.checks_files or ".py:" not in row.entry.target])

    def redraw(self, setup: check.Spots, draw: int) -> None:
        setup.draws.fill(draw)

    def judge(self, case: AttentionTest, candidate: Candidate, setup: check.Spots, kept: Kept) -> Mapping[str, float]:
        return setup.judge(case.direction != "fwd", kept, rms=candidate.state != check.HAS_FLOAT32)

    def repeat(self, record: Record, call: Record) -> Iterator[str | int]:
        shape = {name: record[name] for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")}
        case = AttentionCase(**shape, dtype=record["dtype"], causal=record["causal"], grad=False, device="cpu")
        options = {name: record[name] for name in patterns.OPTIONS if record.get(name)}
        make = partial(patterns.make, case.batch, case.queries, case.keys, "cpu", causal=case.causal, **options)
        yield from check.repeat(case, record["direction"] != "fwd", record["proof"], call, make)

    def step(self, case: AttentionTest, candidate: Candidate, setup: check.Spots) -> Step:
        """Times "fwd" without gradients, as in inference, and in "bwd" the backward alone, after an untimed forward.

        In "bwd" `prepare` makes the o that `run` gets. `do` is drawn after that forward, which therefore cannot use it.
        """
        call, do = candidate.call, setup.inputs.do
        q, k, v = setup.inputs.leaves(candidate.case.asked.grad)
        options = contract.keywords_of(call, setup.pattern)

        def forward(_: Any = None) -> torch.Tensor:
            return call(q, k, v, scale=None, **options)

        def backward(o: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(o, (q, k, v), do)

        inference = torch.no_grad()(forward)
        parts = {
            "fwd": {"run": inference},
            # `like`: the forward may not take much longer than an inference, or it did work of the backward.
            "bwd": {"run": backward, "prepare": forward, "like": inference},
            "fwdbwd": {"run": lambda _: backward(forward())},
        }[case.direction]
        step = Step(
            **parts,
            redraw=partial(setup.draws.fill, names=("q", "k", "v")),
            redraw_late=partial(setup.draws.fill, names=("do",)),
            keep=partial(setup.keep, case.direction != "fwd"),
            num_kept=check.NUM_KEPT,
        )
        return (
            call.step(case.direction, setup.inputs.tensors, {"scale": None} | options, step)
            if isinstance(call, foreign.Process)
            else step
        )

    def outputs(
        self, candidate: Candidate, setup: check.Spots, element: int | None = None
    ) -> Mapping[str, torch.Tensor]:
        inputs, pattern = setup.inputs, setup.pattern
        if element is not None:  # this element of the batch alone
            inputs, pattern = inputs.alone(element), pattern.of_entries([element])
        return testing.run(candidate.call, inputs, pattern=pattern, grad=candidate.case.asked.grad)

    def batch_of(self, candidate: Candidate) -> int:
        """The batch; 1 for rows that would compile for a batch of 1, or cannot run it."""
        entry, alone = candidate.entry, replace(candidate.case.asked, batch=1)
        return 1 if Traits.of(entry).compiles or entry.why_not(alone) else candidate.case.batch

    def least_work(self, case: AttentionTest) -> tuple[float, str, float]:
        """(operations, dtype, bytes read) of the least work that a right row does.

        A forward has two products, and a backward four, as the forward may keep its scores. Inputs are read once.
        """
        products = {"fwd": 1, "bwd": 2, "fwdbwd": 3}[case.direction]  # in units of the two of a forward
        rows = (1 if case.direction == "fwd" else 2) * case.heads * case.queries + 2 * case.kv_heads * case.visible[1]
        return (
            products * case.flops("fwd"),
            case.dtype,
            rows * case.batch * case.head_dim * contract.DTYPES[case.dtype].itemsize,
        )

    def inspect(self, case: AttentionTest, candidate: Candidate, setup: check.Spots) -> Record:
        """Memory of a call, and the time to make masks and the like before any call (`patterns.made_before_calls`).

        peak_bytes   peak of the timed call above what was live before
        saved_bytes  bytes that a forward saves for its backward; None for "fwd"
        """
        if isinstance(candidate.call, foreign.Process):
            return candidate.call.bytes(case.direction)
        step = self.step(case, candidate, setup)
        peak, _ = compare.attempt(lambda: memory.peak_bytes(partial(step.run, step.prepare()), case.device))
        bytes_of_call: Record = {"peak_bytes": peak, "saved_bytes": None}
        if case.direction != "fwd":
            backward = self.step(replace(case, direction="bwd"), candidate, setup)
            bytes_of_call["saved_bytes"], _ = compare.attempt(memory.saved_bytes, backward.prepare)
        return bytes_of_call | patterns.made_before_calls(
            candidate.entry, setup.pattern, case.queries, case.keys, case.device
        )

    def tokens(self, case: AttentionTest) -> int:
        """The number of queries."""
        return case.batch * case.queries

    def metrics(self, case: AttentionTest, record: Record, machine: Record) -> Record:
        """Work, ideal traffic, and with a time the rates and their share of what this machine reaches."""
        pairs, keys_seen = case.visible
        # A forward reads only keys that a query sees. A backward also writes the gradients of the others, which are 0.
        read = case.shape | ({"keys": keys_seen} if case.direction == "fwd" else {})
        moved = operations.attention_bytes(**read, dtype=case.dtype, direction=case.direction)
        flops = case.flops(case.direction)
        work: Record = {"flops": flops, "bytes": round(moved)}
        if pairs is not None:
            work["visible_share"] = pairs / (case.queries * case.keys)
        if time_s := record.get("time_s"):
            work |= {
                "bytes_per_s": moved / time_s,
                "copy_ceiling_fraction": moved / time_s / machine["ceilings"]["copy_bytes_per_s"],
                **models.matmul_rates(flops, time_s, case.dtype, machine),
            }
        return work


def shapes(grid: Grid) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yields (B, H, Hkv, Q, K, D) of a grid. Batch and heads of the command line replace tokens and width."""
    for head_dim, (queries, keys) in grid.product("head_dim", "length"):
        by_tokens, by_width = max(1, grid["tokens"] // queries), max(1, grid["width"] // head_dim)
        batches = (by_tokens,) if grid["tokens"] and "batch" not in grid.given else grid["batch"]
        heads = ((by_width, by_width),) if grid["width"] and "heads" not in grid.given else grid["heads"]
        for batch, pair in product(batches, heads):
            yield batch, *pair, queries, keys, head_dim


def rows_of(grid: Grid, apart: Callable[[Entry], Entry] | None = None) -> list[Entry]:
    """The rows that the command line names, in its order; else those of the grid, by default all, except `without`.

    apart  None, or a function that turns a row into one that runs in a process of its own (`lmsys.bench.foreign`)
    """
    if "attention" in grid.given:
        return ATTENTION.select((name for name in grid["attention"] if name not in axes.MODELS_ONLY), apart)
    names = grid["attention"] or list(ATTENTION)
    return ATTENTION.select((name for name in ATTENTION if name in names and name not in grid["without"]), apart)


test_attention = bench(Attention)
