"""Random calls of `attention()`: shapes, dtypes, memory, options and contexts, by every row that can and by auto.

Each is held to the float64 oracle. LMSYS_RANDOM cases, by default 300 on a GPU and ten on a CPU, from the seed
LMSYS_RANDOM_SEED, by default 0: a case is its number, so that one is run again by `LMSYS_RANDOM_ONLY=17`.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmsys.attention import ATTENTION, AttentionCase, Documents, attention
from lmsys.attention.pattern import checked_pattern
from lmsys.testing import MEMORY, Inputs, Oracle, make_inputs
from tests.support.patterns import document_lengths, drawn_bias, drawn_mask

SEED = int(os.environ.get("LMSYS_RANDOM_SEED", "0"))
ONLY = os.environ.get("LMSYS_RANDOM_ONLY")
COUNT = {device: int(os.environ.get("LMSYS_RANDOM", few)) for device, few in (("cpu", 10), ("cuda", 300))}
COMPILED_ALREADY = ("naive_compiled", "flex")  # each case compiles them for seconds: one in ten is asked of them
CONTEXTS = {"cpu": ("eager", "autocast", "checkpoint"), "cuda": ("eager", "compile", "autocast", "graph", "checkpoint")}
NO_OPTIONS = attention.__kwdefaults__.copy()
for name in ("scale", "impl"):
    NO_OPTIONS.pop(name)
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def numbers(device: str) -> list[int]:
    if ONLY is not None:
        return [int(ONLY)]
    return list(range(COUNT[device]))


def drawn(number: int, device: str) -> tuple[AttentionCase, dict[str, Any], str, str]:
    """A case without its options, the options, how its inputs lie, and the context."""
    chance = random.Random(f"{SEED} {number}")
    longest = 1500 if device == "cuda" else 36  # an interpreter is slow
    group, kv_heads = chance.choice([1, 1, 2, 4]), chance.choice([1, 2, 3] if device == "cuda" else [1])
    queries = chance.choice([1, 2, chance.randint(1, longest), chance.randint(1, longest), min(128, longest)])
    keys = queries if chance.random() < 0.6 else chance.randint(1, longest)
    widths = [64, 64, 128, 128, 32, 80, 96, 256, 16, 8, 65, chance.randint(1, 200)] if device == "cuda" else [16, 17]
    dtype = chance.choice(["bfloat16", "float16", "float32"])
    case = AttentionCase(
        *(chance.randint(1, 3), kv_heads * group, kv_heads, queries, keys, chance.choice(widths), dtype),
        grad=chance.random() < 0.7,
        device=device,
        capability=torch.cuda.get_device_capability() if device == "cuda" else None,
    )
    options: dict[str, Any] = {"causal": chance.random() < 0.5}
    kind = chance.choice(["none", "none", "window", "sides", "prefix", "documents", "key_lengths", "mask", "offset"])
    if kind == "window":
        options |= {"causal": True, "window": chance.randint(1, queries + 3)}
    elif kind == "sides":
        options["window"] = chance.randint(0, keys), chance.randint(0, keys)
    elif kind == "prefix":
        options |= {"causal": True, "prefix": chance.randint(0, keys + 3)}
    elif kind == "documents":
        case = replace(case, queries=keys)
        options["documents"] = Documents(document_lengths(keys, number), device)
    elif kind == "key_lengths":
        lengths = torch.tensor([[chance.randint(0, keys), 0] for _ in range(case.batch)], device=device)
        options["key_lengths"] = lengths[:, 0]
    elif kind == "mask":
        options["mask"] = drawn_mask(case, number)
    elif kind == "offset":
        entries = [chance.randint(-queries, keys) for _ in range(case.batch)]
        options["offset"] = chance.choice([chance.randint(1, keys + 2), "end", torch.tensor(entries, device=device)])
    others = {
        "softcap": chance.choice([1.0, 30.0, 1e5]),
        "bias": drawn_bias(case, number),
        "alibi": torch.rand(case.heads, device=device),
        "sinks": torch.randn(case.heads, device=device),
        "return_lse": True,
    }
    options |= {
        name: others[name] for name in chance.choice([[], [], [chance.choice([*others])], ["sinks", "return_lse"]])
    }
    return case, options, chance.choice(["", *MEMORY]), chance.choice(CONTEXTS[device])


def in_context(context: str, call: Call, case: AttentionCase) -> Call:
    if context == "compile":
        torch._dynamo.reset()
        return torch.compile(call)
    if context == "checkpoint" and case.grad:
        return partial(checkpoint, call, use_reentrant=False)
    if context == "autocast":  # of its own dtype: then nothing is cast
        kind = getattr(torch, case.dtype if case.dtype != "float32" else "bfloat16")
        return torch.autocast(case.device, dtype=kind, enabled=case.dtype != "float32")(call)
    return call


def outputs(call: Call, case: AttentionCase, inputs: Inputs, context: str) -> dict[str, Tensor]:
    q, k, v = inputs.leaves(case.grad)

    def step() -> dict[str, Tensor]:
        with torch.set_grad_enabled(case.grad):
            found = call(q, k, v)
        results = found if isinstance(found, tuple) else (found,)
        kept = dict(zip(("o", "lse"), (x.detach() for x in results), strict=False))
        if case.grad:
            upstream = (inputs.do, inputs.do[..., 0].to(results[-1].dtype))[: len(results)]
            kept |= zip(("dq", "dk", "dv"), torch.autograd.grad(results, (q, k, v), upstream), strict=True)
        return kept

    if context == "graph":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for x in found.values():
            x.fill_(float("nan"))
        graph.replay()
    else:
        found = step()
    return {name: x.clone() for name, x in found.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_calls_are_right_by_every_row(device: str) -> None:
    faults, asked = [], 0
    for number in numbers(device):
        case, options, memory, context = drawn(number, device)
        inputs = make_inputs(case, number, memory=memory)
        pattern = checked_pattern(inputs.q, inputs.k, **(NO_OPTIONS | options))
        oracle = Oracle(case, inputs, pattern=pattern)
        rows = [row for row in ATTENTION if row not in COMPILED_ALREADY or (device == "cuda" and number % 10 == 0)]
        for impl in ["auto", *rows]:
            call = partial(attention, impl=impl, **options)
            if impl in COMPILED_ALREADY and context in ("compile", "graph"):
                continue
            try:
                found = outputs(in_context(context, call, case), case, inputs, context)
            except ValueError as refusal:
                if "cannot run" in str(refusal) and impl != "auto":
                    continue
                found, error = {}, refusal
            except Exception as crash:
                found, error = {}, crash
            asked += 1
            told = f"case {number}, {impl}, {context}, {memory or 'plain'}: {case}, {options}"
            if not found:
                faults.append(f"{told}: {type(error).__name__}: {str(error)[:300]}")
                continue
            ratios = oracle.error_ratios(found)
            if max(ratios.values()) > 1 or found["o"].dtype != inputs.q.dtype:
                faults.append(f"{told}: {ratios} {found['o'].dtype}")
        if device == "cuda":
            torch.cuda.synchronize()
    assert not faults, f"{len(faults)} of {asked} calls:\n" + "\n".join(faults[:40])
    assert asked >= 3 * len(numbers(device))
