"""A benchmark that tunes `flash_gluon`: it times its plans beside one another and beside SDPA with cuDNN.

A plan is one setting of a kernel of the attention row `flash_gluon`. A maintainer runs this after a change of a kernel,
and writes the plan that wins into `lmsys/attention/flash_gluon/plans.py`, which also says why each won. No sweep runs
it.

    python -m pytest dev/bench_plans.py --benchmark-only --axis plan=candidates

    --axis plan=...  candidates: all plans that are worth timing; planned: the plan that the row takes by itself; or a
                     plan by its fields: consumers2+stages3+named+dynamic+l2_mib32 (a forward), prefetch+l2_mib5 (a
                     backward)
    --axis form=...  plain (the default); deterministic (additions in a fixed order); ragged (sequences shorter by one
                     token); transposed (inputs transposed in memory); grouped (8 query heads to a key head)

Cases are in bfloat16, with batch x length = 16,384 tokens and heads x head_dim = 2048. A case is a `PlanCase`, a shape
with its plan; `case.asked` is the attention problem of that shape. `plan_cases.py` defines it, and says how to add a
candidate or a form. The methods of `Plans` override hooks of `lmsys.bench.Benchmark`, whose docstrings say when the
runner calls each.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import axes
from benchmarks.attention.check import Spots, repeat
from benchmarks.models import matmul_rates
from dev.plan_cases import DETERMINISTIC, FORMS, PLAIN, TRANSPOSED, PlanCase, plan_called, plans_of
from lmsys.attention import ATTENTION
from lmsys.bench import (
    Axis,
    Benchmark,
    Candidate,
    Field,
    Grid,
    Record,
    Settings,
    Step,
    bench,
    fields,
    one_of,
    yes_no,
)
from lmsys.cost.operations import attention_flops
from lmsys.extremes.attention import AttentionDraws
from lmsys.measure.step import Kept, nothing
from lmsys.processes import futures
from lmsys.testing import Inputs, Oracle, make_inputs

TOKENS = 16384  # batch x length
CALLS = 100  # calls of a short sequence that are timed as one sample
SHORT = {"length": ((128, 128), (256, 256), (512, 512)), "direction": ("fwd",)}  # default axes of `ShortPlans`
COMPILERS, COMPILE_LIMIT_S = 12, 300.0  # the most processes that compile at once, and the time limit of each plan
OURS, PEER = ATTENTION["flash_gluon"], ATTENTION["sdpa_cudnn"]


@dataclass
class Form:
    """The setup that all candidates of one form (`plan_cases.FORMS`) share.

    inputs  q, k, v and do, the gradient of the output
    draws   draws new inputs before each call
    spots   copies and judges parts of the results of timed calls
    oracle  judges whole results before timing; it is made when it is needed, and again after a redraw
    """

    inputs: Inputs
    draws: AttentionDraws
    spots: Spots
    oracle: Oracle | None = None

    @classmethod
    def of(cls, case: PlanCase, seed: int) -> "Form":
        inputs = inputs_of(case, seed)
        draws = AttentionDraws(inputs.tensors, seed, case.causal)
        return cls(inputs, draws, Spots(case.asked, draws, inputs))


Setup = Mapping[str, Form]  # by the form's name


@dataclass(frozen=True)
class Call:
    """A timed call, `run(prepare())`, of which only `run` is timed.

    run      returns (o,) or (o, lse) of a forward, and (dq, dk, dv) of a backward
    prepare  of a backward: its forward, which returns what `run` takes
    forward  of a backward: the forward alone, which the runner times for comparison (`Step.like`). If `prepare` takes
             far longer than this, the runner calls the row wrong: it may have done the backward's work untimed
    """

    run: Callable[[Any], Sequence[Tensor]]
    prepare: Callable[[], Any] = nothing
    forward: Callable[[], Any] | None = None

    def __call__(self) -> Sequence[Tensor]:
        return self.run(self.prepare())


class Plans(Benchmark):
    """The benchmark: each plan is compiled in another process, then checked against a float64 oracle, then timed."""

    name = "plans"
    num_proofs = Step.num_kept
    tables = {"attention": ATTENTION}
    axes: tuple[Axis, ...] = axes.named(
        Axis("plan", plan_called),  # without a default: no cases unless plans are named
        Axis("form", one_of(*FORMS), (PLAIN,)),
        "--head-dim --length --causal --direction",
        head_dim=(64, 128),
        length=((1024, 1024), (4096, 4096), (16384, 16384)),
        causal=(True, False),
        direction=("fwd", "bwd"),
    )
    fields: tuple[Field, ...] = fields.columns(
        "head_dim length causal direction batch graphed",
        fields.details("form", "plan", "planned", "calls"),  # the first two are also in the row's name
        fields.TIME,
        Field("call_s", "s", "Time of a call", about="Median time over the calls in it", shown="µs"),
        fields.RATE,
        fields.MATMUL_FRACTION.called(role="detail"),
        fields.COMPILE.called(about="First call in this process; plans were compiled before, by others", role="detail"),
    )

    def __init__(self) -> None:
        self.compiled: dict[PlanCase, BaseException | None] = {}  # by `PlanCase.small`: the compiler's error, or None

    def cases(self, grid: Grid, settings: Settings) -> Iterator[PlanCase]:
        for head_dim, (length, _), causal, direction in grid.product("head_dim", "length", "causal", "direction"):
            batch = max(1, TOKENS // length)
            base = PlanCase(grid.name, OURS, settings.device, head_dim, length, causal, direction, batch)
            forms = [form for form in grid["form"] if form != DETERMINISTIC or direction == "bwd"]
            chosen = [(form, *pair) for form in forms for pair in plans_of(replace(base, form=form), grid["plan"])]
            for shape in self.shapes(base, grid) if chosen else ():
                yield replace(shape, entry=PEER)
                for form, plan, planned in chosen:
                    yield replace(shape, form=form, plan=plan, planned=planned)

    def shapes(self, base: PlanCase, grid: Grid) -> Iterator[PlanCase]:
        yield base

    def why_not(self, case: PlanCase) -> str | None:
        return case.entry.why_not(case.asked)

    def context(self, cases: Sequence[PlanCase]) -> AbstractContextManager[Any]:
        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)

    def setup(self, cases: Sequence[PlanCase], settings: Settings) -> Setup:
        able = [case.small for case in cases if case.plan and self.why_not(case) is None]
        new = [case for case in dict.fromkeys(able) if case not in self.compiled]
        count = min(COMPILERS, len(new), os.cpu_count() or 1)
        times = futures(first_call, new, count, timeout_s=COMPILE_LIMIT_S) if new else ()
        self.compiled |= {case: future.exception() for case, future in zip(new, times, strict=True)}
        return {form: Form.of(case, settings.seed) for form, case in {case.form: case for case in cases}.items()}

    def open(self, candidate: Candidate, setup: Setup) -> None:
        if (error := self.compiled.get(candidate.case.small)) is not None:
            raise error
        call_of(candidate.case, setup[candidate.case.form].inputs)()

    def check(self, candidate: Candidate, setup: Setup) -> Mapping[str, float]:
        case, form = candidate.case, setup[candidate.case.form]
        if form.oracle is None and form.draws.extreme is not None:
            # The draw has an extreme unit, a (batch, head) pair with unusual values (`lmsys.extremes.attention`). This
            # oracle judges all units by one budget, and none alone: so the inputs are drawn again without such a unit.
            form.inputs.redraw_(form.inputs.seed)
        names = ("o", "lse") if case.direction == "fwd" else ("dq", "dk", "dv")
        outputs = dict(zip(names, call_of(case, form.inputs)(), strict=False))  # some calls return no lse
        form.oracle = form.oracle or Oracle(case.asked, form.inputs)
        return form.oracle.error_ratios(outputs, rms=True)

    def redraw(self, setup: Setup, draw: int) -> None:
        for form in setup.values():
            form.draws.fill(draw)
            form.oracle = None

    def step(self, case: PlanCase, candidate: Candidate, setup: Setup) -> Step:
        """The step that the runner times. The forward of a backward runs just before it, untimed, on the same inputs.

        If a sample has many calls, the result of the last call is judged.
        """
        form, backward = setup[case.form], case.direction == "bwd"
        call = call_of(case, form.inputs)

        def calls() -> Sequence[Tensor]:
            return [call() for _ in range(case.calls)][-1]

        many = graph_of(calls) if case.graphed else calls

        def keep(outputs: Sequence[Tensor], key: int | None) -> Any:
            return form.spots.keep(backward, outputs if backward else outputs[0], key)

        return Step(
            run=call.run if case.calls == 1 else lambda _: many(),
            prepare=call.prepare,
            before=call,
            redraw=lambda draw: form.draws.fill(draw, ("q", "k", "v")),
            redraw_late=lambda draw: form.draws.fill(draw, ("do",)),
            keep=keep,
            like=call.forward,
        )

    def judge(self, case: PlanCase, candidate: Candidate, setup: Setup, kept: Kept) -> Mapping[str, float]:
        return setup[case.form].spots.judge(case.direction == "bwd", kept, rms=True)

    def repeat(self, record: Record, call: Record) -> Iterator[str | int]:
        asked = {name: record[name] for name in ("head_dim", "length", "causal", "direction", "batch", "form")}
        backward = record["direction"] == "bwd"
        yield from repeat(PlanCase("", OURS, "cpu", **asked).asked, backward, record["proof"], call, lambda: None)

    def metrics(self, case: PlanCase, record: Record, machine: Record) -> Record:
        asked = case.asked
        shape = asked.batch, asked.heads, asked.queries, asked.keys, asked.head_dim
        flops = case.calls * attention_flops(*shape, causal=case.causal, direction=case.direction)
        if (time_s := record.get("time_s")) is None:
            return {"flops": flops}
        return {"flops": flops, "call_s": time_s / case.calls} | matmul_rates(flops, time_s, "bfloat16", machine)


class ShortPlans(Plans):
    """Forwards of short sequences: a sample is CALLS calls, launched one by one or, with a batch of 1, as a CUDA graph.

    One such call takes microseconds, so the time to launch it counts. The plan that the row takes by itself is called
    as users call the row; other plans are called through the row's internal launcher, without autograd.
    """

    name = "short_plans"
    clock = "loop"
    axes: tuple[Axis, ...] = (
        *(replace(axis, default=SHORT.get(axis.name, axis.default)) for axis in Plans.axes),
        Axis("graphed", yes_no, (False, True)),
    )

    def shapes(self, base: PlanCase, grid: Grid) -> Iterator[PlanCase]:
        for graphed in grid["graphed"] if base.direction == "fwd" else ():
            yield replace(base, calls=CALLS, graphed=graphed, batch=1 if graphed else base.batch)


def inputs_of(case: PlanCase, seed: int) -> Inputs:
    """The inputs of a case, laid out in memory as its form says."""
    return make_inputs(case.asked, seed, memory="transposed" if case.form == TRANSPOSED else "")


def call_of(case: PlanCase, inputs: Inputs) -> Call:
    """The call of the case's plan, or of the peer if the case has none."""
    causal, scale = case.causal, case.head_dim**-0.5
    plan: Any = case.plan
    q, k, v = inputs.leaves(grad=plan is None and case.direction == "bwd")
    if plan is None:
        return peer_call(case, inputs)
    from lmsys.attention.flash_gluon import launch

    if case.direction == "bwd":
        deterministic = case.form == DETERMINISTIC

        def forward() -> Any:
            return launch._forward(q, k, v, causal, scale)

        def backward(results: Any) -> Sequence[Tensor]:
            o, lse = results
            return launch._backward(q, k, v, o, lse, inputs.do, causal, scale, deterministic, plan)

        return Call(backward, forward, forward)
    if case.planned and case.calls > 1:
        return Call(lambda _: (launch.flash_gluon(q, k, v, causal=causal),))
    return Call(lambda _: launch._forward(q, k, v, causal, scale, plan))


def peer_call(case: PlanCase, inputs: Inputs) -> Call:
    """The call of the peer, torch's SDPA, for which `Plans.context` selects cuDNN."""
    backward = case.direction == "bwd"
    leaves = inputs.leaves(backward)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=case.causal)

    if backward:
        return Call(lambda o: torch.autograd.grad(o, leaves, inputs.do), forward, torch.no_grad()(forward))
    return Call(lambda _: (forward(),))


def first_call(case: PlanCase) -> None:
    """Calls the case once, so that Triton compiles its kernels into the cache on disk.

    `Plans.setup` runs it in another process: a hang or a crash there fails only this plan.
    """
    call_of(case, inputs_of(case, 0))()
    torch.cuda.synchronize()


def graph_of(calls: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    """A function that replays the calls as a CUDA graph. It always returns the same tensors, which the graph owns."""
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = calls()

    def replay() -> Sequence[Tensor]:
        graph.replay()
        return outputs

    return replay


test_plans, test_short_plans = bench(Plans), bench(ShortPlans)
