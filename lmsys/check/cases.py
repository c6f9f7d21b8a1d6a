"""The tasks that an attention kernel is given, from the simplest to the rarest, so that the first failure says most.

A *row* is the implementation of attention that is checked, and a task is one call of it. `check/attention.py` makes a
question of each task, and calls `answer` to have the row run it. Add a task to `tasks`, or to `larger` if its shape is
that of a model; a new way of calling goes to USES. A new option of `lmsys.attention` gets a task from
`tasks_of_options`, and needs a value there or in `pattern_of` unless the value is True. The `aspect` of a task is the
line of the table printed by `lmsys check` in which its answer is counted.

Legend: B batch, H query heads, Hkv key/value heads, Q queries, K keys, D head dimension.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lmsys.attention import AttentionCase, Documents, Pattern
from lmsys.attention.pattern import OPTIONS
from lmsys.check.question import Fault
from lmsys.testing import MEMORY, Inputs, run

LONG, ODD, WHOLE = 384, 237, 256  # lengths: of several tiles; no multiple of a tile; a power of two
DTYPES = ("float32", "bfloat16", "float16")
HEADS, LONGER = "batches and heads", "lengths of models"  # aspects that several tasks share
# {result: the input that has its shape}. Results are judged in this order, since a wrong one makes later ones wrong.
LIKE = {"o": "q", "dq": "q", "dk": "k", "dv": "v"}
Row = Callable[..., torch.Tensor]
# (call of q, k and v; its inputs; True if gradients are needed) -> results by name
Use = Callable[[Row, Inputs, bool], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Task:
    """A call of attention, perhaps with its backward, that a kernel is asked to run.

    about   the task in words
    memory  the layout of the inputs in memory, a name in MEMORY; "": contiguous
    aspect  the line of the table in which the answer is counted; the default is for tasks with inputs of `extremes.py`
    room    an absolute error that is allowed beside the usual budget
    use     what is done in place of a single call, as models do it: a `Use`, such as those of USES; None: a single call
    """

    about: str
    case: AttentionCase
    memory: str = ""
    aspect: str = "extreme scores"
    room: float = 0.0
    use: Use | None = None

    def __str__(self) -> str:
        case = self.case
        heads = f"{case.heads}" if case.heads == case.kv_heads else f"{case.heads} over {case.kv_heads}"
        mask = ", ".join(["causal" if case.causal else "full", *case.options])
        return (
            f"{case.dtype}, batch {case.batch}, heads {heads}, {case.queries} queries, {case.keys} keys, head dimension"
            f" {case.head_dim}, {mask}{'' if case.scale is None else f', scale {case.scale:g}'}"
        )


def tasks(
    device: str,
    capability: tuple[int, int] | None,
    head_dim: int = 64,
    passes: Callable[[Task], bool] = lambda task: True,
    dtype: str = DTYPES[0],
) -> Iterator[Task]:
    """Yields all tasks in one dtype; then, in the others, those for which a kernel may run other code.

    Most rare tasks have an odd length and a causal mask. But if the row fails the simple task with an odd length, they
    have a length of whole tiles instead; if it fails the simple task with a causal mask, they have no mask. So a
    mistake that is known already does not make all rare tasks fail.

    device, capability  as in `AttentionCase`
    passes              runs a task: True if the row's results are right
    dtype               the dtype in which all tasks are yielded
    """
    case = AttentionCase(
        batch=1,
        heads=2,
        kv_heads=2,
        queries=64,
        keys=64,
        head_dim=head_dim,
        dtype=dtype,
        causal=False,
        grad=True,
        device=device,
        capability=capability,
    )
    long = replace(case, queries=LONG, keys=LONG)
    odd = replace(case, queries=ODD, keys=ODD)
    simple = [
        Task("one tile", case, aspect="full mask"),
        Task("one tile, causal", replace(case, causal=True), aspect="causal mask"),
        Task("several tiles", long, aspect="full mask"),
        Task("several tiles, causal", replace(long, causal=True), aspect="causal mask"),
        Task("several batches and heads", replace(case, batch=3, heads=3, kv_heads=3), aspect=HEADS),
        Task("an odd length", odd, aspect="odd lengths"),
        Task("an odd length, causal", replace(odd, causal=True), aspect="odd lengths"),
    ]
    yield from simple  # first: a row that ends the process then does so in a task that was announced, not in `passes`
    # simple[5] has the odd length, simple[1] the causal mask.
    length, masked = ODD if passes(simple[5]) else WHOLE, passes(simple[1])
    shorter = ODD - 100 if length == ODD else WHOLE // 2  # odd, or a power of two, as `length` is
    usual = replace(case, queries=length, keys=length)
    causal = replace(usual, causal=masked)
    # Two batches: with one, a row may step through the batches of keys by the strides of the queries.
    fewer, differ = replace(long, batch=2, queries=shorter), "queries and keys of different number"
    rare = [
        Task("more queries than keys", replace(long, keys=shorter), aspect=differ),
        Task("more keys than queries", fewer, aspect=differ),
        *[
            Task("more queries than keys, causal", replace(long, keys=shorter, causal=True), aspect=differ),
            Task("more keys than queries, causal", replace(fewer, causal=True), aspect=differ),
            Task("one query, causal", replace(fewer, queries=1, causal=True), aspect=differ),
        ]
        * masked,  # none if the row fails the causal mask
        Task("one query", replace(fewer, queries=1), aspect=differ),
        Task("grouped heads", replace(causal, heads=4, kv_heads=2), aspect="grouped heads"),
        Task("a scale of its own", replace(usual, scale=0.3), aspect="scale"),
    ]
    memory = [
        Task(about, replace(causal, batch=2), memory=name, aspect="strides") for name, (_, _, about) in MEMORY.items()
    ]
    # This task comes twice: in the second call a row may use what it has kept from the first one.
    memory.insert(1, replace(memory[0], about=f"{memory[0].about}, again"))
    yield from rare + memory
    for other in [name for name in DTYPES if name != dtype]:
        # `plain`: one tile; several tiles, causal if the row passed causal masks; and, if it passed odd lengths, the
        # odd length with a causal mask. rare[-2:] have grouped heads and a scale. memory[0] and memory[1], of one
        # layout, are left out.
        plain = [simple[0], simple[3 if masked else 2]] + simple[6:] * (length == ODD)
        for task in plain + rare[-2:] + memory[2:]:
            # A kernel that refuses grouped heads or a scale says nothing about dtypes: these tasks keep their aspects.
            yield replace(task, case=replace(task.case, dtype=other), aspect=task.aspect if task in rare else other)


def larger(case: AttentionCase) -> list[Task]:
    """Variants of a small case as real models have them: more heads and keys, other head dimensions, and USES."""
    usual = [
        Task("a negative scale", replace(case, scale=-0.3), aspect="scale"),
        Task("six heads", replace(case, heads=6, kv_heads=6), aspect=HEADS),
        Task("30 pairs of batch and head", replace(case, batch=5, heads=6, kv_heads=6), aspect=HEADS),
        Task("more than 1,024 keys", replace(case, keys=1100, queries=32, causal=False), aspect=LONGER),
        Task("a last tile of one key", replace(case, keys=65, queries=65), aspect=LONGER),
    ]
    wide = [
        Task(f"head dimension {width}", replace(case, head_dim=width), aspect="head dimensions")
        for width in (40, 80, 96, 128)
    ]
    return [
        *usual,
        *wide,
        *[Task(about, case, aspect="calls of models", use=use) for about, use in USES.items()],
        *[  # a row may run other code if no gradients are needed: o comes from such a call, the gradients do not
            Task(
                f"{aspect}, without gradients",
                changed,
                aspect=aspect,
                use=lambda call, inputs, grad: _once(call, inputs, grad) | {"o": _forward(call, inputs, False)},
            )
            for aspect, changed in (("causal mask", replace(case, causal=True)), ("scale", replace(case, scale=0.3)))
        ],
    ]


def tasks_of_options(case: AttentionCase) -> Iterator[Task]:
    """A task with a small causal case for each option of attention beside `causal`.

    Options without a value here are True in the case: `pattern_of` draws tensors and documents for them.
    """
    small = replace(case.plain, batch=2, heads=2, kv_heads=1, queries=40, keys=40, causal=True)
    values: dict[str, Any] = {"window": 10, "offset": 9, "softcap": 2.0, "prefix": 30}
    yield from (
        Task(f"with {name}", replace(small, **{name: values.get(name, True)}), aspect="options") for name in OPTIONS
    )


def pattern_of(case: AttentionCase, seed: int) -> Pattern:
    """The case's mask and other options as a `Pattern`, with tensors drawn by `seed`."""
    draw = torch.Generator().manual_seed(seed)
    shape = case.batch, case.heads, case.queries, case.keys  # of the scores
    drawn: dict[str, Any] = {
        "documents": Documents([case.keys // 3, case.keys - case.keys // 3], case.device),
        "key_lengths": torch.randint(1, case.keys + 1, (case.batch,), generator=draw, dtype=torch.int32),
        "mask": torch.rand(shape, generator=draw) < 0.5,
        "bias": torch.randn(shape, generator=draw),
        "alibi": torch.rand(1, case.heads, generator=draw),
        "sinks": torch.randn(1, case.heads, generator=draw),
    }
    given = {name: drawn.get(name, value) for name, value in case.options.items()}
    return Pattern(
        case.causal, **{name: x.to(case.device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    )


def answer(
    row: Row, task: Task, inputs: Inputs, grad: bool, pattern: Pattern | None = None
) -> tuple[dict[str, torch.Tensor], Fault | None]:
    """Calls the row. Returns (its results by name, fault).

    The fault is an exception, a changed input, or a wrong shape or dtype; None if there is none of these. The values of
    the results are judged elsewhere. If the fault is in the backward, the results of the forward are returned as well.
    """
    given: dict[str, Any] = {"causal": task.case.causal, "scale": task.case.scale}
    before = {name: x.clone() for name, x in inputs.tensors.items()}
    try:
        outputs = (
            run(row, inputs, grad=grad, pattern=pattern, **given)
            if task.use is None
            else task.use(partial(row, **given), inputs, grad)
        )
        torch.cuda.synchronize() if task.case.device == "cuda" else None
    except Exception as error:
        outputs, fault = answer(row, task, inputs, grad=False, pattern=pattern) if grad else ({}, Fault.raised(error))
        return outputs, fault or Fault.raised(error, backward=True)
    if not task.use and (changed := [x for x, kept in before.items() if not torch.equal(kept, inputs.tensors[x])]):
        return {}, Fault(f"  the function changes its input {changed[0]}")
    for name, x in outputs.items():
        like = inputs.tensors[LIKE[name]] if name in LIKE else inputs.q[..., 0].float()  # lse: (B, H, Q), float32
        if x.shape != like.shape or x.dtype != like.dtype:
            right = {earlier: outputs[earlier] for earlier in list(outputs)[: list(outputs).index(name)]}
            return right, Fault(
                f"  {name} is {x.dtype} of shape {tuple(x.shape)}; expected {like.dtype} of shape {tuple(like.shape)}",
                backward=name not in ("o", "lse"),
            )
    return outputs, None


def _forward(call: Row, inputs: Inputs, grad: bool) -> torch.Tensor:
    """o, the result of a call."""
    with torch.set_grad_enabled(grad):
        return call(*inputs.leaves(grad))


def _results(o: torch.Tensor, inputs: Inputs, grad: bool, retain: bool = False) -> dict[str, torch.Tensor]:
    """A copy of o, and with `grad` dq, dk and dv for the upstream gradient `inputs.do`, by name.

    retain: the graph is kept for another backward.
    """
    gradients = torch.autograd.grad(o, inputs.leaves(grad), inputs.do, retain_graph=retain) if grad else ()
    return {"o": o.detach().clone(), **dict(zip(("dq", "dk", "dv"), gradients, strict=False))}


def _once(call: Row, inputs: Inputs, grad: bool) -> dict[str, torch.Tensor]:
    """The results of one forward and backward."""
    return _results(_forward(call, inputs, grad), inputs, grad)


def two_forwards(call: Row, inputs: Inputs, grad: bool) -> dict[str, torch.Tensor]:
    """Calls twice, then reads the first result and runs its backward."""
    o = _forward(call, inputs, grad)
    _forward(call, inputs.others(), grad)
    return _results(o, inputs, grad)


def second_backward(call: Row, inputs: Inputs, grad: bool) -> dict[str, torch.Tensor]:
    """Runs a backward twice on a retained graph. Returns the results of the second."""
    o = _forward(call, inputs, grad)
    _results(o, inputs, grad, retain=True)
    return _results(o, inputs, grad)


def changed_inputs(call: Row, inputs: Inputs, grad: bool) -> dict[str, torch.Tensor]:
    """Calls twice, with inputs that are overwritten in place between the calls, as a cache is.

    Returns the results of the second call.
    """
    _once(call, inputs, grad)
    return _once(call, inputs.redraw_(inputs.seed + 1), grad)


def two_threads(call: Row, inputs: Inputs, grad: bool) -> dict[str, torch.Tensor]:
    """Calls from two threads at once, four times with these inputs and four times with others, in turns.

    Returns the first result on these inputs whose o differs from that of a single call; if none does, the first result.
    """
    alone, both = _once(call, inputs, grad), [inputs, inputs.others()]
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda x: _once(call, x, grad), both * 4))[::2]  # those on `inputs`
    return next((outputs for outputs in results if not torch.equal(outputs["o"], alone["o"])), results[0])


USES: dict[str, Use] = {
    "two forwards before a backward": two_forwards,
    "a second backward": second_backward,
    "inputs that change between calls": changed_inputs,
    "calls from two threads": two_threads,
}
