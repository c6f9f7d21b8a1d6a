"""The cases that a kernel is asked, from the simplest to the rarest, so that the first failure says most."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import AttentionCase
from lmsys.attention.documents import Documents
from lmsys.attention.pattern import OPTIONS, Pattern
from lmsys.check.question import Fault
from lmsys.testing import MEMORY, Inputs, run

LONG, ODD = 384, 237  # queries and keys: several tiles of any kernel; no multiple of anything
DTYPES = ("float32", "bfloat16", "float16")
LIKE = {"o": "q", "dq": "q", "dk": "k", "dv": "v"}  # in this order: what comes after a wrong one is wrong with it


@dataclass(frozen=True)
class Asked:
    """A case by what it is about; `memory`, of MEMORY, says how its inputs lie."""

    about: str
    case: AttentionCase
    memory: str = ""

    def __str__(self) -> str:
        one = self.case
        heads = f"{one.heads}" if one.heads == one.kv_heads else f"{one.heads} over {one.kv_heads}"
        told = f"{one.dtype}, batch {one.batch}, heads {heads}, {one.queries} queries, {one.keys} keys, head dimension"
        mask = ", ".join(["causal" if one.causal else "full", *one.options])
        return f"{told} {one.head_dim}, {mask}{'' if one.scale is None else f', scale {one.scale:g}'}"


def cases(device: str, capability: tuple[int, int] | None, head_dim: int = 64) -> Iterator[Asked]:
    """Forwards and backwards of all in float32; of the narrow dtypes those in which other code may run."""
    one = AttentionCase(
        1, 2, 2, 64, 64, head_dim, DTYPES[0], causal=False, grad=True, device=device, capability=capability
    )
    long = replace(one, queries=LONG, keys=LONG)
    odd = replace(one, queries=ODD, keys=ODD)
    simple = [
        Asked("one tile", one),
        Asked("one tile, causal", replace(one, causal=True)),
        Asked("several tiles", long),
        Asked("several tiles, causal", replace(long, causal=True)),
        Asked("several batches and heads", replace(one, batch=3, heads=3, kv_heads=3)),
        Asked("an odd length", odd),
        Asked("an odd length, causal", replace(odd, causal=True)),
    ]
    rare = [
        Asked("more queries than keys", replace(long, keys=ODD - 100)),
        Asked("more keys than queries", replace(long, queries=ODD - 100)),
        Asked("more queries than keys, causal", replace(long, keys=ODD - 100, causal=True)),
        Asked("more keys than queries, causal", replace(long, queries=ODD - 100, causal=True)),
        Asked("one query", replace(long, queries=1)),
        Asked("grouped heads", replace(odd, heads=4, kv_heads=2, causal=True)),
        Asked("a scale of its own", replace(odd, scale=0.3)),
    ]
    memory = [*in_memory(replace(odd, batch=2, causal=True))]
    memory.insert(1, replace(memory[0], about=f"{memory[0].about}, again"))
    yield from [*simple, *rare, *memory]
    for dtype in DTYPES[1:]:
        for asked in (simple[0], simple[3], simple[6], rare[5], *memory[2:]):
            yield replace(asked, case=replace(asked.case, dtype=dtype))


def in_memory(case: AttentionCase) -> Iterator[Asked]:
    """The case with inputs that do not lie as fresh tensors do."""
    return (Asked(about, case, name) for name, (_, _, about) in MEMORY.items())


def cases_of_options(one: AttentionCase) -> Iterator[Asked]:
    """A small causal case for each option of attention beside `causal`."""
    small = replace(one.plain, batch=2, heads=2, kv_heads=1, queries=40, keys=40, causal=True)
    values: dict[str, Any] = {"window": 10, "offset": 9, "softcap": 2.0, "prefix": 30}
    for name in OPTIONS:
        yield Asked(f"with {name}", replace(small, **{name: values.get(name, True)}))


def pattern_of(case: AttentionCase, seed: int) -> Pattern:
    """The pattern of a case, with tensors drawn by `seed`."""
    draw = torch.Generator().manual_seed(seed)
    scores = case.batch, case.heads, case.queries, case.keys
    made: dict[str, Any] = {
        "documents": Documents([case.keys // 3, case.keys - case.keys // 3], case.device),
        "key_lengths": torch.randint(1, case.keys + 1, scores[:1], generator=draw, dtype=torch.int32),
        "mask": torch.rand(scores, generator=draw) < 0.5,
        "bias": torch.randn(scores, generator=draw),
        "alibi": torch.rand(1, case.heads, generator=draw),
        "sinks": torch.randn(1, case.heads, generator=draw),
    }
    given = {name: made.get(name, value) for name, value in case.options.items()}
    return Pattern(
        case.causal, **{name: x.to(case.device) if isinstance(x, Tensor) else x for name, x in given.items()}
    )


def answer(
    row: Callable[..., Tensor], case: AttentionCase, inputs: Inputs, grad: bool, pattern: Pattern | None = None
) -> tuple[dict[str, Tensor], Fault | None]:
    """The results of a row, by name, and the fault that they have before any number is compared."""
    before = {name: x.clone() for name, x in inputs.tensors.items()}
    try:
        outputs = run(row, inputs, causal=case.causal, scale=case.scale, grad=grad, pattern=pattern)
        torch.cuda.synchronize() if case.device == "cuda" else None
    except Exception as error:
        return {}, Fault.raised(error)
    if changed := [name for name, x in before.items() if not torch.equal(x, inputs.tensors[name])]:
        return outputs, Fault(f"  it changes its input {changed[0]}")
    for name, x in outputs.items():
        like = inputs.tensors[LIKE[name]] if name in LIKE else inputs.q[..., 0].float()
        if x.shape != like.shape or x.dtype != like.dtype:
            given = f"{x.dtype} of shape {tuple(x.shape)}"
            return outputs, Fault(f"  {name} is {given}; expected {like.dtype} of shape {tuple(like.shape)}")
    return outputs, None
