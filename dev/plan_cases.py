"""The cases of `bench_plans.py`: their shapes, the names of plans, and which plans are worth timing.

A plan is one setting of `flash_gluon`'s forward or backward kernel; its fields are explained in
`lmsys/attention/flash_gluon/plans.py`. To have another plan timed, add it to `candidates`. To add a form of cases, name
it in FORMS. If it changes the shape, do this in `PlanCase.asked`; if it changes how the inputs lie in memory or how the
kernel is called, in `inputs_of` or `call_of` of `bench_plans.py`. `dev/figures/notebooks.py` uses the names of plans,
and tests of the kernels use `candidates`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from string import digits
from typing import Any

import torch

from lmsys.attention import AttentionCase
from lmsys.attention.flash_gluon import plans
from lmsys.attention.flash_gluon.plans import REORDERED, BackwardPlan, ForwardPlan
from lmsys.bench import Case, Record

WIDTH = 2048  # heads x head_dim
PLANNED, CANDIDATES = "planned", "candidates"  # values of the axis `plan`, besides the names of plans
# Forms of a case: deterministic adds in a fixed order, ragged has a length that is one less, transposed has its inputs
# transposed in memory, grouped has 8 query heads for each key head.
PLAIN, DETERMINISTIC, RAGGED, TRANSPOSED, GROUPED = FORMS = "plain", "deterministic", "ragged", "transposed", "grouped"
# {direction: (class of its plans, function from (head_dim, causal, keys) to the plan that the row takes by itself)}
PLANS: Mapping[str, Any] = {"fwd": (ForwardPlan, plans.forward_plan), "bwd": (BackwardPlan, plans.backward_plan)}
Plan = ForwardPlan | BackwardPlan
SHORT = 512  # with at most this many keys, a tile of queries has few key tiles, and its start and end take much time
SMALL_TILES = 1024  # with at most this many keys, tiles of 64 keys may be the fastest


def candidates(direction: str, head_dim: int, causal: bool, keys: int) -> list[ForwardPlan] | list[BackwardPlan]:
    """The plans worth timing for a shape: settings that were once the fastest in such a shape, and settings near them.

    direction  "fwd" or "bwd"
    """
    if direction == "bwd":
        steps = [{}, REORDERED, REORDERED | {"fma_exp": True}]  # fields that change the work of a step
        steps += [step | {"peeled": True} for step in steps[1:]] if causal else []
        settings = product((False, True), (5, 11, 22) if causal else (0,), steps)
        # Each setting is (prefetch, l2_mib, fields of a step). l2_mib: the causal plans in `plans.BACKWARD` have 5, 11
        # or 22, those of full attention 0. REORDERED: the operations of a step come in another order. With it,
        # `prefetch` (the log-sum-exp is loaded a step ahead) spills registers at head_dim 64, and gains at 128. So
        # plans with REORDERED always have `prefetch` at 128, and never at 64.
        prefetches = head_dim == 128
        return [BackwardPlan(p, l2_mib, **step) for p, l2_mib, step in settings if not step or p == prefetches]
    # In `plans.FORWARD` causal plans have 32, but up to SHORT keys some have 0; plans of full attention have 0.
    sizes = (0, 32) if causal and keys <= SHORT else (32,) if causal else (0,)  # values of l2_mib
    # two: plans with two consumers (warp groups that compute); three: with three; small: with tiles of 64 keys
    two = [
        ForwardPlan(2, stages, ping_pong, named, dynamic, l2_mib, chained=keys <= SHORT)
        for ping_pong, named, dynamic in product((False, True), repeat=3)
        for stages in ((2, 3) if head_dim == 64 else (2,))
        for l2_mib in sizes
    ]
    three = [
        ForwardPlan(3, stages, ping_pong, named, dynamic, sizes[0])
        for stages in (2, 3)
        for ping_pong, named, dynamic in product((False, True), repeat=3)
        if not (stages == 3 and ping_pong and named)  # these would need more named barriers than a CTA has
    ]
    small = [replace(plan, stages=3, tile_k=64, ctas=2 if head_dim == 64 else 1, chained=True) for plan in two]
    takes_three = head_dim == 64 and keys > SHORT  # at 128 three consumers would need more registers than an SM has
    return list(dict.fromkeys([*two, *(three if takes_three else []), *(small if keys <= SMALL_TILES else [])]))


def name_of(plan: Plan) -> str:
    """The plan's name, such as "consumers2+stages3+named": the fields that are neither False nor at their default.

    `plan_called` reads such names.
    """
    values = [(field, getattr(plan, field.name)) for field in dataclasses.fields(plan)]
    changes = [(field.name, value) for field, value in values if value is not False and value != field.default]
    return "+".join(name if value is True else f"{name}{value}" for name, value in changes)


def plan_called(text: str) -> str | Plan:
    """The plan that the text names, or the text itself if it is PLANNED or CANDIDATES. ValueError for other texts.

    A field that the text leaves out is False, or has its default.
    """
    if text in (PLANNED, CANDIDATES):
        return text
    names = {part: part.rstrip(digits) for part in text.split("+")}
    given = {name: int(part[len(name) :]) if part != name else True for part, name in names.items()}
    for cls, _ in PLANS.values():
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        values = {name: False for name, kind in kinds.items() if kind is bool} | given
        needed = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
        if needed <= values.keys() and all(type(value) is kinds.get(name) for name, value in values.items()):
            return cls(**values)
    examples = " or ".join(name_of(default_plan(128, True, 512)) for _, default_plan in PLANS.values())
    raise ValueError(f"must be {PLANNED}, {CANDIDATES}, or a plan by its fields, such as {examples}")


@dataclasses.dataclass(frozen=True)
class PlanCase(Case):
    """A shape of attention, and the plan that runs it.

    length   tokens of a sequence, before `form` changes it; there are as many queries as keys
    batch    sequences
    form     one of FORMS
    plan     None: the case's row is the peer, SDPA with cuDNN, which has no plans
    planned  True: the row takes this plan by itself
    calls    how many calls, one after another, are one sample
    graphed  True: the calls of a sample are replayed as one CUDA graph
    """

    head_dim: int
    length: int
    causal: bool
    direction: str
    batch: int
    form: str = PLAIN
    plan: Plan | None = None
    planned: bool = False
    calls: int = 1
    graphed: bool = False

    @property
    def axes(self) -> Record:
        return super().axes | {"plan": name_of(self.plan) if self.plan else None}

    @property
    def options(self) -> list[str]:
        """The plan and the form in words, which tell this row from others of the same shape.

        The plan that the row takes by itself, the form `plain` and the peer have no words.
        """
        plan = [] if self.planned or self.plan is None else [name_of(self.plan)]
        return plan if self.form == PLAIN else [*plan, self.form]

    @property
    def impl(self) -> str:
        return "-".join([self.entry.name, *self.options])

    @property
    def label(self) -> str:
        return ", ".join([self.entry.label, *self.options])

    @property
    def comparison(self) -> str:
        mask = "causal" if self.causal else "full"
        chain = [] if self.calls == 1 else ["graphed" if self.graphed else "eager"]
        return "-".join([self.section, f"B{self.batch}D{self.head_dim}S{self.length}", mask, self.direction, *chain])

    @property
    def asked(self) -> AttentionCase:
        """The attention problem that the plan runs, as the `AttentionCase` by which rows say if they can run it."""
        heads, length = max(1, WIDTH // self.head_dim), self.length - (self.form == RAGGED)
        kv_heads = max(1, heads // 8) if self.form == GROUPED else heads
        shape = self.batch, heads, kv_heads, length, length, self.head_dim
        grad, capability = (
            self.direction == "bwd",
            torch.cuda.get_device_capability() if self.device == "cuda" else None,
        )
        return AttentionCase(*shape, "bfloat16", self.causal, grad, self.device, capability)

    @property
    def small(self) -> "PlanCase":
        """A small case that needs the same compiled kernels, so that they can be compiled by a quick call."""
        return dataclasses.replace(self, section="", length=128, batch=1, planned=False, calls=1, graphed=False)


def plans_of(case: PlanCase, values: Sequence[str | Plan]) -> list[tuple[Plan, bool]]:
    """(plan, True if it was asked for as PLANNED) for each plan in `values` that fits the case's direction and shape.

    values  values of the axis `plan`, as `plan_called` returns them

    The direction "fwdbwd" has no plans, since a plan is for one kernel.
    """
    if case.direction not in PLANS:
        return []
    (cls, plan_for), shape = PLANS[case.direction], (case.head_dim, case.causal, case.length)
    chosen: list[tuple[Plan, bool]] = []
    for value in values:
        if value == CANDIDATES:
            chosen += [(plan, False) for plan in candidates(case.direction, *shape)]
        elif value == PLANNED and shape[:2] in plans.FORWARD:  # plans.BACKWARD has the same keys (head_dim, causal)
            chosen.append((plan_for(*shape), True))
        elif isinstance(value, cls):
            chosen.append((value, False))
    return list(dict.fromkeys(chosen))
