"""The cases that a kernel is asked, from the simplest to the rarest, so that the first failure says most."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention import AttentionCase, Documents, Pattern
from lmsys.attention.pattern import OPTIONS
from lmsys.check.question import Fault
from lmsys.testing import MEMORY, Inputs, run

LONG, ODD, WHOLE = 384, 237, 256  # queries and keys: several tiles; no multiple of anything; a power of two
DTYPES = ("float32", "bfloat16", "float16")
HEADS, LONGER = "batches and heads", "lengths of models"  # aspects
LIKE = {"o": "q", "dq": "q", "dk": "k", "dv": "v"}  # in this order: what comes after a wrong one is wrong with it
Row = Callable[..., Tensor]
Use = Callable[
    [Row, Inputs, bool], dict[str, Tensor]
]  # from a call of q, k and v, its inputs, and whether there are gradients


@dataclass(frozen=True)
class Asked:
    """A case by what it is about.

    memory  of MEMORY: how its inputs lie
    aspect  what it is a question of
    room    that an error has beside the usual budget
    use     more than a call: what models do
    """

    about: str
    case: AttentionCase
    memory: str = ""
    aspect: str = "extreme scores"
    room: float = 0.0
    use: "Use | None" = None

    def __str__(self) -> str:
        case = self.case
        heads = f"{case.heads}" if case.heads == case.kv_heads else f"{case.heads} over {case.kv_heads}"
        mask = ", ".join(["causal" if case.causal else "full", *case.options])
        return (
            f"{case.dtype}, batch {case.batch}, heads {heads}, {case.queries} queries, {case.keys} keys, head dimension"
            f" {case.head_dim}, {mask}{'' if case.scale is None else f', scale {case.scale:g}'}"
        )


def cases(
    device: str,
    capability: tuple[int, int] | None,
    head_dim: int = 64,
    bears: Callable[[Asked], bool] = lambda asked: True,
) -> Iterator[Asked]:
    """Forwards and backwards of all in float32; of the narrow dtypes those in which other code may run.

    Rarer questions have odd lengths, and are causal. Of a row that `bears` no odd lengths, or no causal mask, they are
    asked without, so that each says something of its own.
    """
    case = AttentionCase(
        1, 2, 2, 64, 64, head_dim, DTYPES[0], causal=False, grad=True, device=device, capability=capability
    )
    long = replace(case, queries=LONG, keys=LONG)
    odd = replace(case, queries=ODD, keys=ODD)
    simple = [
        Asked("one tile", case, aspect="full mask"),
        Asked("one tile, causal", replace(case, causal=True), aspect="causal mask"),
        Asked("several tiles", long, aspect="full mask"),
        Asked("several tiles, causal", replace(long, causal=True), aspect="causal mask"),
        Asked("several batches and heads", replace(case, batch=3, heads=3, kv_heads=3), aspect=HEADS),
        Asked("an odd length", odd, aspect="odd lengths"),
        Asked("an odd length, causal", replace(odd, causal=True), aspect="odd lengths"),
    ]
    yield from simple  # before the row is asked what it bears: should the process die, the case is known
    length, masked = ODD if bears(simple[5]) else WHOLE, bears(simple[1])
    shorter = ODD - 100 if length == ODD else WHOLE // 2
    usual = replace(case, queries=length, keys=length)
    causal = replace(usual, causal=masked)
    differ = "queries and keys of different number"
    rare = [
        Asked("more queries than keys", replace(long, keys=shorter), aspect=differ),
        Asked("more keys than queries", replace(long, queries=shorter), aspect=differ),
        *[
            Asked("more queries than keys, causal", replace(long, keys=shorter, causal=True), aspect=differ),
            Asked("more keys than queries, causal", replace(long, queries=shorter, causal=True), aspect=differ),
        ]
        * masked,
        Asked("one query", replace(long, queries=1), aspect=differ),
        Asked("grouped heads", replace(causal, heads=4, kv_heads=2), aspect="grouped heads"),
        Asked("a scale of its own", replace(usual, scale=0.3), aspect="scale"),
    ]
    memory = [Asked(about, replace(causal, batch=2), name, "strides") for name, (_, _, about) in MEMORY.items()]
    memory.insert(1, replace(memory[0], about=f"{memory[0].about}, again"))
    yield from [*rare, *memory]
    for dtype in DTYPES[1:]:
        for asked in (simple[0], simple[3 if masked else 2], *simple[6:][: length == ODD], rare[-2], *memory[2:]):
            # What is refused for its heads says nothing of dtypes.
            aspect = asked.aspect if asked is rare[-2] else dtype
            yield replace(asked, case=replace(asked.case, dtype=dtype), aspect=aspect)


def larger(case: AttentionCase) -> Iterator[Asked]:
    """Variants of a small case with what real models have: more heads and keys, other head dimensions."""
    yield Asked("a negative scale", replace(case, scale=-0.3), aspect="scale")
    yield Asked("six heads", replace(case, heads=6, kv_heads=6), aspect=HEADS)
    yield Asked("30 pairs of batch and head", replace(case, batch=5, heads=6, kv_heads=6), aspect=HEADS)
    yield Asked("more than 1,024 keys", replace(case, keys=1100, queries=32, causal=False), aspect=LONGER)
    yield Asked("a last tile of one key", replace(case, keys=65, queries=65), aspect=LONGER)
    yield from (
        Asked(f"head dimension {width}", replace(case, head_dim=width), aspect="head dimensions")
        for width in (40, 80, 96)
    )
    yield from (Asked(about, case, aspect="calls of models", use=use) for about, use in USES.items())


def cases_of_options(case: AttentionCase) -> Iterator[Asked]:
    """A small causal case for each option of attention beside `causal`."""
    small = replace(case.plain, batch=2, heads=2, kv_heads=1, queries=40, keys=40, causal=True)
    values: dict[str, Any] = {"window": 10, "offset": 9, "softcap": 2.0, "prefix": 30}
    yield from (
        Asked(f"with {name}", replace(small, **{name: values.get(name, True)}), aspect="options") for name in OPTIONS
    )


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
    row: Row, asked: Asked, inputs: Inputs, grad: bool, pattern: Pattern | None = None
) -> tuple[dict[str, Tensor], Fault | None]:
    """The results of a row, by name, and the fault that they have before any number is compared.

    Where the fault is in the backward, the results before it are there as well.
    """
    given: dict[str, Any] = {"causal": asked.case.causal, "scale": asked.case.scale}
    before = {name: x.clone() for name, x in inputs.tensors.items()}
    try:
        if asked.use is None:
            outputs = run(row, inputs, grad=grad, pattern=pattern, **given)
        else:
            outputs = asked.use(partial(row, **given), inputs, grad)
        torch.cuda.synchronize() if asked.case.device == "cuda" else None
    except Exception as error:
        outputs, fault = answer(row, asked, inputs, False, pattern) if grad else ({}, Fault.raised(error))
        return outputs, fault or Fault.raised(error, backward=True)
    if not asked.use and (changed := [x for x, kept in before.items() if not torch.equal(kept, inputs.tensors[x])]):
        return {}, Fault(f"  the function changes its input {changed[0]}")
    for name, x in outputs.items():
        like = inputs.tensors[LIKE[name]] if name in LIKE else inputs.q[..., 0].float()
        if x.shape != like.shape or x.dtype != like.dtype:
            right = {before: outputs[before] for before in list(outputs)[: list(outputs).index(name)]}
            return right, Fault(
                f"  {name} is {x.dtype} of shape {tuple(x.shape)}; expected {like.dtype} of shape {tuple(like.shape)}",
                backward=name not in ("o", "lse"),
            )
    return outputs, None


def _forward(call: Row, inputs: Inputs, grad: bool) -> Tensor:
    with torch.set_grad_enabled(grad):
        return call(*inputs.leaves(grad))


def _results(o: Tensor, inputs: Inputs, grad: bool, retain: bool = False) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(o, inputs.leaves(grad), inputs.do, retain_graph=retain) if grad else ()
    return {"o": o.detach().clone(), **dict(zip(("dq", "dk", "dv"), gradients, strict=False))}


def _once(call: Row, inputs: Inputs, grad: bool) -> dict[str, Tensor]:
    return _results(_forward(call, inputs, grad), inputs, grad)


def two_forwards(call: Row, inputs: Inputs, grad: bool) -> dict[str, Tensor]:
    """The first of two results is read after the second is made, and so is its backward."""
    o = _forward(call, inputs, grad)
    _forward(call, inputs.others(), grad)
    return _results(o, inputs, grad)


def second_backward(call: Row, inputs: Inputs, grad: bool) -> dict[str, Tensor]:
    """A graph that is retained has the same gradients again."""
    o = _forward(call, inputs, grad)
    _results(o, inputs, grad, retain=True)
    return _results(o, inputs, grad)


def changed_inputs(call: Row, inputs: Inputs, grad: bool) -> dict[str, Tensor]:
    """Keys and values are written to between calls, in place, as a cache of them is."""
    _once(call, inputs, grad)
    return _once(call, inputs.redraw_(inputs.seed + 1), grad)


def two_threads(call: Row, inputs: Inputs, grad: bool) -> dict[str, Tensor]:
    """The first thread's result of calls in two threads: one that differs from a call alone, where there is one."""
    alone, both = _once(call, inputs, grad), [inputs, inputs.others()]
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda of: _once(call, of, grad), both * 4))[::2]
    return next((outputs for outputs in made if not torch.equal(outputs["o"], alone["o"])), made[0])


USES: dict[str, Use] = {
    "two forwards before a backward": two_forwards,
    "a second backward": second_backward,
    "inputs that change between calls": changed_inputs,
    "calls from two threads": two_threads,
}
