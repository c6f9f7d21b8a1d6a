"""Random calls of `attention()`, each by every row that supports it and by auto, judged by the float64 oracle.

`tests/attention/test_random_cases.py` runs `judge_all`. A case is drawn by its number and SEED alone. On a GPU 2,000
cases would compile for hours. Three rules avoid most of that:

- Cases under torch.compile have only CLASSES different shapes, options and layouts, and are run by auto and two rows.
- Rows that compile for each shape run one case of RARELY.
- `flash_triton` takes its first tile instead of the fastest. The part of `flash_torch` that is compiled for each shape
  of a tile runs uncompiled, except in one case of RARELY.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmsys.attention import ATTENTION, AttentionCase, Documents, attention, flash_torch
from lmsys.attention.compiled import compile_for
from lmsys.attention.contract import case_of
from lmsys.attention.pattern import Pattern, checked_pattern
from lmsys.check.question import poison
from lmsys.testing import MEMORY, Inputs, Oracle, make_inputs
from lmsys.traits import AttentionTraits
from tests.support.attention_rows import results_of
from tests.support.patterns import document_lengths, drawn_bias, drawn_mask

SEED = int(os.environ.get("LMSYS_RANDOM_SEED", "0"))
CONTEXTS = {"cpu": ("eager", "autocast", "checkpoint"), "cuda": ("eager", "compile", "autocast", "graph", "checkpoint")}
CLASSES = 24  # kinds of cases under torch.compile
RARELY = 100  # one case of so many compiles for its shape
TILE_WEIGHTS_COMPILED = flash_torch._tile_weights_compiled
COMPILING = [row.name for row in ATTENTION.values() if AttentionTraits.of(row).compiles] + ["flash_attn_4"]
NO_OPTIONS = {name: value for name, value in attention.__kwdefaults__.items() if name not in ("scale", "impl")}
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Judged:
    """The outcome of calls: their faults, a line each, and the number of calls by (context, row)."""

    faults: list[str] = field(default_factory=list)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)

    def table(self) -> str:
        """A line for each row: how many calls it had, by context."""
        contexts, rows = (list(dict.fromkeys(key[at] for key in sorted(self.asked))) for at in (0, 1))
        lines = [f"{'row':24}" + "".join(f"{context:>12}" for context in contexts)]
        lines += [f"{row:24}" + "".join(f"{self.asked[context, row]:12}" for context in contexts) for row in rows]
        return "\n".join([*lines, f"{self.asked.total()} calls, {len(self.faults)} faults"])


def context_of(number: int, device: str) -> str:
    """The context, one of CONTEXTS, in which a case is run."""
    return random.Random(f"{SEED} {number} context").choice(CONTEXTS[device])


def tasks(numbers: list[int], device: str) -> list[list[int]]:
    """The numbers, divided into tasks of a process each: cases of a class, which share a compiled call, stay together.

    These come first; every other case is a task of its own.
    """
    alone, classes = [], dict[int, list[int]]()
    for number in numbers:
        if context_of(number, device) == "compile":
            classes.setdefault(number % CLASSES, []).append(number)
        else:
            alone.append([number])
    return [*classes.values(), *alone]


def drawn(number: int, device: str) -> tuple[AttentionCase, dict[str, Any], str]:
    """Draws by a number: (case without options, options of `attention`, layout of its inputs in memory)."""
    kind = f"class {number % CLASSES}" if context_of(number, device) == "compile" else number
    chance = random.Random(f"{SEED} {kind}")
    seed = chance.randrange(2**20)
    longest = 1500 if device == "cuda" else 36  # on a CPU Triton's interpreter is slow
    group, kv_heads = chance.choice([1, 1, 2, 4]), chance.choice([1, 2, 3] if device == "cuda" else [1])
    queries = chance.choice([1, 2, chance.randint(1, longest), chance.randint(1, longest), min(128, longest)])
    keys = queries if chance.random() < 0.6 else chance.randint(1, longest)
    widths = [64, 64, 128, 128, 32, 80, 96, 256, 16, 8, 65, chance.randint(1, 200)] if device == "cuda" else [16, 17]
    dtypes = ["bfloat16", "float16", "float32"]
    # Kernels for one GPU know few options, dtypes and head dimensions: so many cases are such that they can run them.
    for_few = device == "cuda" and chance.random() < 0.4
    if for_few:
        widths, dtypes = [64, 128], dtypes[:2]
    head_dim, dtype = chance.choice(widths), chance.choice(dtypes)
    case = AttentionCase(
        *(chance.randint(1, 3), kv_heads * group, kv_heads, queries, keys, head_dim, dtype),
        grad=chance.random() < 0.7,
        device=device,
        capability=torch.cuda.get_device_capability() if device == "cuda" else None,
    )
    options: dict[str, Any] = {"causal": chance.random() < 0.5}
    rare = [] if for_few else ["sides", "prefix", "key_lengths", "mask", "offset"]
    option = chance.choice(["none", "window", "documents", *rare])
    if option == "window":
        options |= {"causal": True, "window": chance.randint(1, queries + 3)}
    elif option == "sides":
        options["window"] = chance.randint(0, keys), chance.randint(0, keys)
    elif option == "prefix":
        options |= {"causal": True, "prefix": chance.randint(0, keys + 3)}
    elif option == "documents":
        case = replace(case, queries=keys)
        options["documents"] = Documents(document_lengths(keys, seed), device)
    elif option == "key_lengths":
        lengths = torch.tensor([[chance.randint(0, keys), 0] for _ in range(case.batch)], device=device)
        options["key_lengths"] = lengths[:, 0]
    elif option == "mask":
        options["mask"] = drawn_mask(case, seed)
    elif option == "offset":
        entries = [chance.randint(-queries, keys) for _ in range(case.batch)]
        options["offset"] = chance.choice([chance.randint(1, keys + 2), "end", torch.tensor(entries, device=device)])
    others = {"softcap": chance.choice([1.0, 30.0, 1e5]), "alibi": torch.rand(case.heads, device=device)}
    if context_of(number, device) != "compile":  # with these options flash rows break the graph
        others |= {"bias": drawn_bias(case, seed), "sinks": torch.randn(case.heads, device=device), "return_lse": True}
    drawn_others = chance.choice([[], [], [chance.choice([*others])], [name for name in others if name != "bias"]])
    options |= {name: others[name] for name in drawn_others if not for_few}
    return case, options, chance.choice(["", *MEMORY])


def rows_of(number: int, context: str, case: AttentionCase, pattern: Pattern, inputs: Inputs) -> Iterator[str]:
    """The rows that are to run the case: auto, and those that support it, as far as the context allows."""
    can = case_of(inputs.q, inputs.k, inputs.v, pattern, grad=case.grad)
    rows = [name for name, row in ATTENTION.items() if row.why_not(can) is None]
    if context in ("compile", "graph") or case.device == "cpu" or number % RARELY:
        rows = [name for name in rows if name not in COMPILING]
    if context == "compile":
        rows = random.Random(f"{SEED} class {number % CLASSES} rows").sample(rows, 2)
    yield from ("auto", *rows)


def in_context(context: str, impl: str, options: dict[str, Any], case: AttentionCase, number: int) -> Call:
    """A function (q, k, v) -> o that calls `attention` in a context."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, impl=impl, **options)

    if context == "compile":
        return compile_for(call, (SEED, number % CLASSES, impl))
    if context == "checkpoint" and case.grad:
        return partial(checkpoint, call, use_reentrant=False)
    if context == "autocast":  # to the case's own dtype, so that nothing is cast
        kind = getattr(torch, case.dtype if case.dtype != "float32" else "bfloat16")
        return torch.autocast(case.device, dtype=kind, enabled=case.dtype != "float32")(call)
    return call


def outputs(call: Call, case: AttentionCase, inputs: Inputs, context: str) -> dict[str, Tensor]:
    """{"o", and if there are any "lse", "dq", "dk", "dv"}: results of a call; in "graph" those of a replayed graph."""
    step = partial(results_of, call, inputs, case.grad)
    if context == "graph":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
        for x in result.values():
            x.fill_(float("nan"))
        graph.replay()
    else:
        result = step()
    return {name: x.clone() for name, x in result.items()}


def judge_all(device: str, numbers: list[int]) -> Judged:
    """The outcome of these cases. For a GPU it is called in a process of its own, whose state it changes."""
    outcome = Judged()
    if device == "cuda":
        poison(setattr)  # as in the process of the tests
    for number in numbers:
        if device == "cuda":
            _compile_little(number)
        judge(number, device, outcome)
    return outcome


def judge(number: int, device: str, outcome: Judged) -> None:
    """Runs a case by its rows, and adds the calls and faults to `outcome`."""
    (case, options, memory), context = drawn(number, device), context_of(number, device)
    inputs = make_inputs(case, number, memory=memory)
    pattern = checked_pattern(inputs.q, inputs.k, **(NO_OPTIONS | options))
    oracle = Oracle(case, inputs, pattern=pattern)
    shown = {name: value.shape if isinstance(value, Tensor) else value for name, value in options.items()}
    for impl in rows_of(number, context, case, pattern, inputs):
        outcome.asked[context, impl] += 1
        described = f"case {number}, {impl}, {context}, {memory or 'plain'}: {case}, {shown}"
        try:
            result = outputs(in_context(context, impl, options, case, number), case, inputs, context)
            ratios = oracle.error_ratios(result)
        except Exception as crash:
            outcome.faults.append(f"{described}: {type(crash).__name__}: {str(crash)[:300]}")
            continue
        if max(ratios.values()) > 1 or result["o"].dtype != inputs.q.dtype:
            allowed = {name: f"{oracle.budget[name]:.3g}" for name in ratios}
            outcome.faults.append(f"{described}: {ratios} of {allowed}, {result['o'].dtype}")


def _compile_little(number: int) -> None:
    """Follows the rules of the module's docstring for `flash_triton` and `flash_torch`, in this process for good."""
    from lmsys.attention import flash_triton

    flash_triton.tune = lambda case, tiles, launch, device: tiles[0]
    weights = TILE_WEIGHTS_COMPILED if number % RARELY == 0 else flash_torch._tile_weights
    flash_torch._tile_weights_compiled = weights
