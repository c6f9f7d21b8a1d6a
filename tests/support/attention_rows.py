"""Rows of the attention table on devices, and the cases that hypothesis draws for them.

A row is an implementation of attention; a case is the shapes, dtype and device of a call (`AttentionCase`).
By the decorator `law`, a function check(row, case, seed) becomes a test of every row on every device. The cases that a
row can run follow from its `supports`; the properties of `Row` limit how many and how large cases are drawn for it.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmsys.attention import ATTENTION, AttentionCase
from lmsys.attention.contract import adapt
from lmsys.testing import Inputs, Oracle, make_inputs, run

COMPILED = ("naive_compiled", "flex")  # rows that compile for each shape, which takes seconds
# Rows that keep the log-sum-exp of their scores for the backward, so that tests can compare it. New ones are added.
KEEPS_LSE = ("flash_torch", "flash_triton", "flash_triton_torch_bwd", "flash_cuda", "flash_gluon")
HEADS = [(1, 1), (2, 1), (2, 2), (4, 2)]  # (heads, key heads)
POOL = [  # cases of COMPILED rows on a CPU: batch, heads, key heads, queries, keys, head dim, dtype, causal
    (2, 4, 2, 33, 70, 32, "float32", True),
    (1, 2, 1, 128, 100, 16, "bfloat16", True),
    (2, 1, 1, 65, 65, 64, "float16", False),
]


def growing(growth: list[float], causal: bool, seed: int, device: str) -> tuple[AttentionCase, Inputs]:
    """(case, inputs) whose scores grow from each 128 keys to the 128 keys on their left.

    growth  by which power of 2 the weight of a key grows, for each step to the left

    Scores of some queries grow by that, of others by half of it or by nothing, and of others they fall by it. Queries
    of a kind come in groups of 16, 4 or 1, by the seed.
    """
    keys = 128 * (len(growth) + 1)
    head_dim = 64 << seed % 2
    queries = keys if causal else 100
    case = AttentionCase(1, 2, 2, queries, keys, head_dim, "bfloat16", causal, device=device)
    inputs = make_inputs(case, seed)
    sums = torch.tensor([0.0, *growth], device=device).cumsum(0).flip(0).repeat_interleave(128)
    kinds = torch.tensor([1.0, 1.0, 0.5, -1.0, 0.0], device=device).repeat_interleave(16 >> seed % 3 * 2)
    inputs.k[..., 0] = sums * math.log(2) * head_dim**0.5
    inputs.q[..., 0] = kinds.repeat(keys)[:queries]
    return case, inputs


@dataclass(frozen=True)
class Row:
    """A row of the attention table on a device, "cpu" or "cuda", and what tests ask of it."""

    name: str
    device: str

    @cached_property
    def call(self) -> Callable[..., Tensor]:
        """The row's function, with the signature that all rows share."""
        return adapt(ATTENTION[self.name].load())

    @property
    def interpreted(self) -> bool:
        """True if Triton's interpreter runs the row, which is slow."""
        return self.device == "cpu" and "triton" in self.name

    @property
    def examples(self) -> int:
        """How many cases hypothesis draws for a law."""
        if self.name in COMPILED:
            return 3 if self.device == "cuda" else 2
        return 20 if self.device == "cuda" else 2 if self.interpreted else 6

    @property
    def phases(self) -> list[Phase]:
        """Hypothesis's phases. Rows that compile are not shrunk, since each step of shrinking would compile again.

        The phase that explains failures is left out for all rows, since its tracing crashes torch.compile.
        """
        shrink = [] if self.name in COMPILED else [Phase.shrink]
        return [Phase.explicit, Phase.reuse, Phase.generate, *shrink]

    @property
    def dtypes(self) -> list[str]:
        """The dtypes that are drawn. Triton's interpreter computes bfloat16 wrongly, and raises nothing."""
        return ["float32", "float16"] if self.interpreted else ["float32", "float16", "bfloat16"]

    def scale(self, case: AttentionCase, seed: int) -> float | None:
        """A scale by the seed: None, 1.5 times the default, or for our own rows also a negative one."""
        if self.name in COMPILED and self.device == "cpu":
            return None
        factor = [None, 1.5, 1.5 if ATTENTION[self.name].peer else -0.5][seed % 3]
        return factor and factor * case.head_dim**-0.5

    @property
    def lengths(self) -> st.SearchStrategy[int]:
        """Numbers of queries or keys: any, and often one at the edge of a kernel's blocks."""
        longest = 2048 if self.device == "cuda" else 80 if self.interpreted else 200
        edges = [n for n in (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 512, 1024, 1025) if n <= longest]
        return st.one_of(st.sampled_from(edges), st.integers(1, longest))

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(heads, key heads) that are drawn. Four heads take twice the time of two, so the interpreter gets none."""
        return HEADS[:-1] if self.interpreted else HEADS

    @property
    def head_dims(self) -> list[int]:
        """Head dimensions that are drawn: few if a row supports few, is slow, or compiles for each."""
        if self.name == "flash_gluon":
            return [64, 128]
        if self.device == "cpu":
            return [16, 32] if self.interpreted else [16, 32, 96]
        return [16, 64, 128] if self.name in COMPILED else [16, 32, 64, 96, 128, 256]

    def why_not(self, case: AttentionCase) -> str | None:
        """Why the row cannot run the case; None if it can."""
        return ATTENTION[self.name].why_not(case)

    def case(self, **changes: Any) -> AttentionCase:
        """A small case on this device. `changes` are fields of `AttentionCase`."""
        capability = torch.cuda.get_device_capability() if self.device == "cuda" else None
        head_dim = min(self.head_dims, key=lambda d: abs(d - 32))
        base = AttentionCase(1, 2, 2, 64, 64, head_dim, "float16", device=self.device, capability=capability)
        return replace(base, **changes)

    @property
    def has_float32(self) -> bool:
        """True if the row runs in float32."""
        return self.why_not(self.case(dtype="float32")) is None

    def run(self, case: AttentionCase, inputs: Inputs, **options: Any) -> dict[str, Tensor]:
        """The results of a call by name: o, with gradients dq, dk and dv, and lse if the row keeps it."""
        keeps_lse = self.name in KEEPS_LSE
        return run(self.call, inputs, causal=case.causal, grad=case.grad, lse=keeps_lse and case.grad, **options)


def skip_unless_it_runs(row: Row, case: AttentionCase) -> None:
    """Skips the test, with the row's reason, where it cannot run the case."""
    if reason := row.why_not(case):
        pytest.skip(reason)


@st.composite
def cases(draw: st.DrawFn, row: Row, **fixed: Any) -> AttentionCase:
    """A case that the row can run, with gradients if it has them. The fields in `fixed` are not drawn."""
    if row.name in COMPILED and row.device == "cpu":
        batch, heads, kv_heads, queries, keys, head_dim, dtype, causal = draw(st.sampled_from(POOL))
    else:
        batch, (heads, kv_heads) = draw(st.integers(1, 2)), draw(st.sampled_from(row.heads))
        queries = draw(row.lengths)
        keys = queries if draw(st.booleans()) else draw(row.lengths)
        head_dim, dtype = draw(st.sampled_from(row.head_dims)), draw(st.sampled_from(row.dtypes))
        causal = draw(st.booleans())
    case = row.case(batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys, head_dim=head_dim)
    case = replace(case, **{"dtype": dtype, "causal": causal, **fixed})
    return replace(case, grad=row.why_not(replace(case, grad=True)) is None)


def on_devices(names: tuple[str, ...], compiled_on_cpu: bool, **fixed: Any) -> list[Any]:
    """For `parametrize`: (name, device) of each row on "cuda", and on "cpu" if it runs there.

    compiled_on_cpu  includes rows that compile for each shape, on a CPU: they are marked `long`
    fixed            fields of a case; a row that runs on a CPU, but does not support them, is left out there
    """
    pairs = []
    for name in names:
        row = Row(name, "cpu")
        reason = row.why_not(row.case()) or ""
        supports_fixed = bool(reason) or row.why_not(row.case(**fixed)) is None
        cuda_alone = re.search("runs on CUDA( only)?$", reason)
        if supports_fixed and not cuda_alone and (compiled_on_cpu or name not in COMPILED):
            pairs.append(pytest.param(name, "cpu", marks=[pytest.mark.long] * (name in COMPILED)))
        pairs.append(pytest.param(name, "cuda", marks=pytest.mark.gpu))
    return pairs


def law(
    compiled_on_cpu: bool = False,
    only: tuple[str, ...] = (),
    square: bool = False,
    of: Callable[..., st.SearchStrategy[AttentionCase]] = cases,
    **fixed: Any,
) -> Callable:
    """A decorator that makes check(row, case, seed) a test of every row, or of those in `only`, on every device.

    square           as many keys as queries
    of               the strategy of hypothesis that draws cases of a row
    fixed            fields of the case that are not drawn
    compiled_on_cpu  rows that compile for each shape are tested on a CPU too; most laws leave them out there
    """

    def decorate(check: Callable[[Row, AttentionCase, int], None]) -> Callable:
        @pytest.mark.parametrize(("name", "device"), on_devices(only or tuple(ATTENTION), compiled_on_cpu, **fixed))
        def test(name: str, device: str) -> None:
            row = Row(name, device)
            skip_unless_it_runs(row, row.case(**fixed))
            drawn = of(row, **fixed)
            if square:
                drawn = drawn.map(lambda case: replace(case, queries=case.keys))
            drawn = drawn.filter(lambda case: row.why_not(case) is None)

            @settings(max_examples=row.examples, phases=row.phases, suppress_health_check=list(HealthCheck))
            @given(case=drawn, seed=st.integers(0, 2**31))
            def holds(case: AttentionCase, seed: int) -> None:
                check(row, case, seed)

            holds()

        test.__doc__ = check.__doc__
        test.__name__ = check.__name__
        return test

    return decorate


def results_of(call: Callable[..., Any], inputs: Inputs, grad: bool) -> dict[str, Tensor]:
    """The results of call(q, k, v) by name: o, lse if it returns one, and with `grad` dq, dk and dv."""
    q, k, v = inputs.leaves(grad)
    with torch.set_grad_enabled(grad):
        results = call(q, k, v)
    results = results if isinstance(results, tuple) else (results,)
    found = dict(zip(("o", "lse"), (x.detach() for x in results), strict=False))
    if grad:
        upstream = (inputs.do, inputs.do[..., 0].to(results[-1].dtype))[: len(results)]
        found |= zip(("dq", "dk", "dv"), torch.autograd.grad(results, (q, k, v), upstream), strict=True)
    return found


def quantised_inputs(case: AttentionCase, seed: int) -> Inputs:
    """Inputs whose keys are multiples of 1/8 within 4, so that adding such a number is exact in every dtype."""
    inputs = make_inputs(case, seed)
    inputs.k.mul_(8).round_().div_(8).clamp_(-4, 4)
    return inputs


def assert_within_budget(ratios: dict[str, float]) -> None:
    """AssertionError if an error exceeds its budget. `ratios`: {result: error / budget}."""
    assert max(ratios.values()) <= 1, ratios


def assert_agree(first: dict[str, Tensor], second: dict[str, Tensor], *oracles: Oracle) -> None:
    """AssertionError if two results differ by more than the sum of the budgets that `oracles` give to both."""
    assert first.keys() == second.keys()
    for name in first:
        x, y = first[name].double(), second[name].double()
        difference = (x - y).masked_fill(x == y, 0).abs().max().item()  # -inf equals -inf
        allowed = sum(oracle.budget[name] for oracle in oracles)
        assert difference <= allowed, f"{name}: {difference:.3g} apart, {allowed:.3g} allowed"
