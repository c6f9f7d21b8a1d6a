"""Attention: the questions it is asked, each held to a float64 oracle."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import AttentionCase, adapt
from lmsys.bench.interpreted import interpreted_kernels
from lmsys.check import extremes, places
from lmsys.check.cases import Asked, cases
from lmsys.check.patterns import explain
from lmsys.check.question import Fault, Options, Question
from lmsys.measure.repeats import apart, repeated
from lmsys.registry import Entry
from lmsys.testing import Inputs, Oracle, make_inputs, run

TENSORS = ("o", "dq", "dk", "dv")  # in this order: what comes after a wrong one is wrong with it


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The cases, from the simplest to the rarest."""
    row, device = adapt(implementation := entry.load()), "cuda" if torch.cuda.is_available() else "cpu"
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    for asked in cases(device, capability, options.head_dim):
        if asked.case.dtype not in options.dtypes:
            continue
        reason = entry.why_not(asked.case)
        if asked.case.scale is not None and row is not implementation:
            reason = "it takes no scale"
        judge = partial(failure, row, asked, options.grad, options.seed)
        yield Question(f"{asked.about}, {asked.case.dtype}", judge, f"{asked.about} ({asked})", reason)
    plain = AttentionCase(1, 1, 1, 1, 1, options.head_dim, "", grad=True, device=device, capability=capability)
    for dtype in options.dtypes:
        simple = replace(plain, dtype=dtype)
        cases_of_extremes = {
            "extreme scores": extremes.case_of_kinds(replace(simple, causal=False)),
            "extreme scores, causal": extremes.case_of_kinds(replace(simple, causal=True)),
            "many equal keys": extremes.case_of_many_keys(simple),
        }
        for about, case in cases_of_extremes.items():
            judge = partial(extremes.failure, row, case, options.grad, options.seed)
            shape = f"{about} ({Asked(about, case)})"
            yield Question(f"{about}, {dtype}", judge, shape, entry.why_not(case), extreme=True)


def remark(entry: Entry, options: Options) -> str:
    """Says whether the last case that the row can run has the same bits each time, and one of a batch of 2 alone.

    A kernel may have neither.
    """
    row, device = adapt(entry.load()), "cuda" if torch.cuda.is_available() else "cpu"
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    asked = [one.case for one in cases(device, capability, options.head_dim) if one.case.dtype in options.dtypes]
    able = [case for case in asked if entry.why_not(case) is None]
    case = replace(able[-1], batch=2)
    if reason := entry.why_not(case):
        return f"not asked for the same bits: {reason}"
    call = partial(run, row, causal=case.causal, scale=case.scale, grad=options.grad)
    pair = make_inputs(case, options.seed)
    with interpreted_kernels() as launched:
        call(pair.alone(0))
    if launched:  # the interpreter runs one program after another, in an order that no GPU keeps
        return "not asked for the same bits: Triton's interpreter is not the GPU"
    first, calls, differ = repeated(lambda: call(pair))
    alone = apart(call(pair.alone(0)), {name: x[:1] for name, x in first.items() if name not in differ})
    told = f"the same bits in {calls} calls: {_but_for(differ)}"
    return f"{told}; alone as in a batch of 2: {_but_for(alone)}"


def _but_for(differ: Mapping[str, float]) -> str:
    return f"no ({', '.join(differ)})" if differ else "yes"


def known_mistake(entry: Entry, row: Any, case: AttentionCase, seed: int) -> str | None:
    """The mistake that small cases with the mask and head dimension of `case` name; None where they name none."""
    for asked in cases(case.device, case.capability, case.head_dim):
        alike = asked.case.causal == case.causal and asked.case.dtype in ("float32", case.dtype)
        if alike and asked.case.scale is None and entry.why_not(asked.case) is None:
            fault = failure(row, asked, case.grad, seed)
            if fault is not None:
                return fault.mistake
    return None


def failure(row: Any, asked: Asked, grad: bool, seed: int) -> Fault | None:
    """The fault of the row's results of a case; None where there is none."""
    case: AttentionCase = asked.case
    inputs = make_inputs(case, seed, transposed=asked.transposed)
    before = {name: x.clone() for name, x in inputs.tensors.items()}
    try:
        outputs = run(row, inputs, causal=case.causal, scale=case.scale, grad=grad)
        torch.cuda.synchronize() if case.device == "cuda" else None
    except Exception as error:
        said = str(error).strip().splitlines()
        return Fault(f"  it raises {type(error).__name__}: {said[0] if said else 'no message'}")
    changed = [name for name, x in before.items() if not torch.equal(x, inputs.tensors[name])]
    if changed:
        return Fault(f"  it changes its input {changed[0]}")
    oracle = Oracle(case, inputs, scale=case.scale, grad=grad)
    for name in [one for one in TENSORS if one in outputs]:
        like = {"o": inputs.q, "dq": inputs.q, "dk": inputs.k, "dv": inputs.v}[name]
        found = outputs[name]
        if found.shape != like.shape or found.dtype != like.dtype:
            given = f"{found.dtype} of shape {tuple(found.shape)}"
            return Fault(f"  {name} is {given}; expected {like.dtype} of shape {tuple(like.shape)}")
        ratio = oracle.error_ratios({name: found})[name]
        if ratio > 1:
            return _fault(name, outputs, oracle, case, inputs, ratio)
    return None


def _fault(
    name: str, outputs: Mapping[str, Tensor], oracle: Oracle, case: AttentionCase, inputs: Inputs, ratio: float
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
    mistake = explain(case, inputs, outputs, name, 2 * budget)
    lines.append(f"  pattern: {mistake}" if mistake else "  no known mistake gives this result")
    if name != "o":
        lines.append(f"  right before it: {', '.join(TENSORS[: TENSORS.index(name)])}")
    return Fault("\n".join(lines), mistake, ratio)
