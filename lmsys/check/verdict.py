"""The verdict on a kernel, case by case."""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import AttentionCase, adapt
from lmsys.bench.interpreted import interpreted_kernels
from lmsys.check import places
from lmsys.check.cases import Asked, cases
from lmsys.check.patterns import explain
from lmsys.check.poison import poison
from lmsys.measure.repeats import apart, repeated
from lmsys.registry import Entry
from lmsys.testing import Inputs, Oracle, make_inputs, run

RIGHT, WRONG = 0, 1
TENSORS = ("o", "dq", "dk", "dv")  # in this order: what comes after a wrong one is wrong with it


def check(entry: Entry, head_dim: int, grad: bool, seed: int) -> int:
    """Prints a line for each case; RIGHT or WRONG."""
    poison(setattr)
    row, device = adapt(implementation := entry.load()), "cuda" if torch.cuda.is_available() else "cpu"
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    takes_scale, start, right, refused = row is implementation, time.perf_counter(), [], dict[str, None]()
    for asked in cases(device, capability, head_dim):
        case = asked.case
        reason = entry.why_not(case)
        if case.scale is not None and not takes_scale:
            reason = "it takes no scale"
        if reason is not None:
            refused[reason] = None
            continue
        print(f"  {asked.about}, {case.dtype}: ", end="", flush=True)  # should it die, the case is known
        if fault := failure(row, asked, grad, seed):
            print(f"wrong\n\n{asked.about} ({asked})\n{fault}", flush=True)
            return WRONG
        print("right", flush=True)
        right.append(case)
    if right:
        print(f"  {_same_bits(entry, row, right[-1], grad, seed)}", flush=True)
    for reason in refused:
        print(f"  not asked: {reason}")
    print(
        f"\n{entry.name}: {len(right)} cases right on this {device}, in {time.perf_counter() - start:.0f} s", flush=True
    )
    return RIGHT if right else WRONG


def _same_bits(entry: Entry, row: Any, case: AttentionCase, grad: bool, seed: int) -> str:
    """Says whether the case has the same bits each time, and one of a batch of 2 alone. A kernel may have neither."""
    case = replace(case, batch=2)
    if reason := entry.why_not(case):
        return f"not asked for the same bits: {reason}"
    call = partial(run, row, causal=case.causal, scale=case.scale, grad=grad)
    pair = make_inputs(case, seed)
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


def failure(row: Any, asked: Asked, grad: bool, seed: int) -> str | None:
    """Says in sentences what is wrong with the row's results of a case; None where nothing is."""
    case: AttentionCase = asked.case
    inputs = make_inputs(case, seed, transposed=asked.transposed)
    before = {name: x.clone() for name, x in inputs.tensors.items()}
    try:
        outputs = run(row, inputs, causal=case.causal, scale=case.scale, grad=grad)
        torch.cuda.synchronize() if case.device == "cuda" else None
    except Exception as error:
        said = str(error).strip().splitlines()
        return f"  it raises {type(error).__name__}: {said[0] if said else 'no message'}"
    changed = [name for name, x in before.items() if not torch.equal(x, inputs.tensors[name])]
    if changed:
        return f"  it changes its input {changed[0]}"
    oracle = Oracle(case, inputs, scale=case.scale, grad=grad)
    for name in [one for one in TENSORS if one in outputs]:
        like = {"o": inputs.q, "dq": inputs.q, "dk": inputs.k, "dv": inputs.v}[name]
        found = outputs[name]
        if found.shape != like.shape or found.dtype != like.dtype:
            given = f"{found.dtype} of shape {tuple(found.shape)}"
            return f"  {name} is {given}; expected {like.dtype} of shape {tuple(like.shape)}"
        ratio = oracle.error_ratios({name: found})[name]
        if ratio > 1:
            return _told(name, outputs, oracle, case, inputs, ratio)
    return None


def _told(
    name: str, outputs: Mapping[str, Tensor], oracle: Oracle, case: AttentionCase, inputs: Inputs, ratio: float
) -> str:
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
    pattern = explain(case, inputs, outputs, name, 2 * budget)
    lines.append(f"  pattern: {pattern}" if pattern else "  no known mistake gives this result")
    if name != "o":
        lines.append(f"  right before it: {', '.join(TENSORS[: TENSORS.index(name)])}")
    return "\n".join(lines)
