"""Attention: the questions it is asked, each held to a float64 oracle."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import AttentionCase, adapt, why_not_told
from lmsys.bench.findings import interpreted_kernels
from lmsys.check import extremes, places
from lmsys.check.cases import LIKE, Asked, answer, cases, cases_of_options, pattern_of
from lmsys.check.patterns import explain
from lmsys.check.question import Fault, Options, Question
from lmsys.measure.repeats import apart, repeated
from lmsys.registry import Entry
from lmsys.testing import MEMORY, Oracle, make_inputs, run


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The cases, from the simplest to the rarest."""
    row = adapt(implementation := entry.load())
    all_asked = _cases(options)
    simplest = replace(all_asked[0].case, causal=False)
    with_options = [one for one in cases_of_options(simplest) if why_not_told(row, one.case.options) is None]
    for asked in (*all_asked, *with_options):
        takes_it = asked.case.scale is None or row is implementation
        reason = entry.why_not(asked.case) if takes_it else "it takes no scale"
        judge = partial(failure, row, asked, options.grad, options.seed)
        yield Question(f"{asked.about}, {asked.case.dtype}", judge, f"{asked.about} ({asked})", reason)
    for dtype in options.dtypes:
        simple = replace(simplest, heads=1, kv_heads=1, dtype=dtype)
        cases_of_extremes = {
            "extreme scores": extremes.case_of_kinds(simple),
            "extreme scores, causal": extremes.case_of_kinds(replace(simple, causal=True)),
            "many equal keys": extremes.case_of_many_keys(simple),
            "extreme scores, whole tiles": extremes.case_of_kinds(simple, extremes.WHOLE),
        }
        rms = entry.why_not(replace(simple, dtype="float32")) is not None  # the stricter rule
        for about, case in cases_of_extremes.items():
            judge = partial(extremes.failure, row, case, options.grad, options.seed, rms)
            yield Question(
                f"{about}, {dtype}", judge, f"{about} ({Asked(about, case)})", entry.why_not(case), extreme=True
            )


def _cases(options: Options) -> list[Asked]:
    """Those in the dtypes that are asked for, on a GPU where there is one."""
    cuda = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if cuda else None
    all_asked = cases("cuda" if cuda else "cpu", capability, options.head_dim)
    return [asked for asked in all_asked if asked.case.dtype in options.dtypes]


def remark(entry: Entry, options: Options) -> str:
    """Says whether the last case that the row can run has the same bits each time, and one of a batch of 2 alone.

    A kernel may have neither.
    """
    able = [asked.case for asked in _cases(options) if entry.why_not(asked.case) is None]
    case = replace(able[-1], batch=2)
    if reason := entry.why_not(case):
        return f"not asked for the same bits: {reason}"
    call = partial(run, adapt(entry.load()), causal=case.causal, scale=case.scale, grad=options.grad)
    pair = make_inputs(case, options.seed)
    with interpreted_kernels() as launched:
        call(pair.alone(0))
    if launched:  # the interpreter runs one program after another, in an order that no GPU keeps
        return "not asked for the same bits: Triton's interpreter is not the GPU"
    first, calls, differ = repeated(lambda: call(pair))
    alone = apart(call(pair.alone(0)), {name: x[:1] for name, x in first.items() if name not in differ})
    return f"the same bits in {calls} calls: {_but_for(differ)}; alone as in a batch of 2: {_but_for(alone)}"


def _but_for(differ: Mapping[str, float]) -> str:
    return f"no ({', '.join(differ)})" if differ else "yes"


def failure(row: Any, asked: Asked, grad: bool, seed: int) -> Fault | None:
    """The fault of the row's results of a case; None where there is none."""
    case = asked.case
    inputs = make_inputs(case, seed, memory=asked.memory)
    pattern = pattern_of(case, seed) if case.options else None
    outputs, fault = answer(row, case, inputs, grad, pattern)
    if fault is not None:
        return fault
    oracle = Oracle(case, inputs, scale=case.scale, grad=grad, pattern=pattern)
    for name in [name for name in (*LIKE, "lse") if name in outputs]:
        ratio = oracle.error_ratios({name: outputs[name]})[name]
        if ratio > 1:
            if case.options:
                mistake = None
            elif not asked.memory or asked.memory == "transposed":
                mistake = explain(case, inputs, outputs, name, 2 * oracle.budget[name])
            else:
                mistake = (
                    f"it is wrong for {MEMORY[asked.memory][2]}"
                    if failure(row, replace(asked, memory=""), grad, seed) is None
                    else None
                )
            return _fault(name, outputs, oracle, case, ratio, mistake)
    return None


def _fault(
    name: str, outputs: Mapping[str, Tensor], oracle: Oracle, case: AttentionCase, ratio: float, mistake: str | None
) -> Fault:
    found, budget = outputs[name], oracle.budget[name]
    expected = oracle.reference[name].unflatten(0, (case.batch, case.kv_heads)).flatten(1, 2)  # (B, H, S, D)
    at = places.worst(found, expected)
    wrong = ~((found.double() - expected).abs() <= budget)
    place = ", ".join(map(str, at))
    lines = [
        f"  {name}[{place}]: expected {expected[at].item():.6g}, got {found[at].item():.6g}; the largest error is"
        f" {ratio:.3g} times what is allowed",
        f"  wrong at: {places.where(wrong)}",
    ]
    right = [*LIKE][: [*LIKE].index(name)] if name in LIKE else []
    return Fault.explained("\n".join(lines), mistake, ratio, right)
