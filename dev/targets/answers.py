"""Compiles the kernels of a target for one card, in a process of its own, and returns the facts: see `answers_on`.

A card is a kind of GPU, a target is a function that launches kernels. `__main__.py` calls `load` and `answers_on`;
`begin` and `answer` run in the process. A new fact is a field of `Answer`, which `binary.read` fills.
"""

import inspect
import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dev.targets.cards import Card
from lmsys import processes

COMPILED = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}  # environment: kernels are compiled, not interpreted
LONGEST = 300  # characters of a message
LIMIT_S = 600.0  # for recording the launches of a card, and for compiling each of them
CALLER = "its caller"  # in place of a kernel's name, for a failure of the code that launches kernels


@dataclass(frozen=True)
class Answer:
    """Facts about one configuration of a kernel on a card, or the reason why there are none.

    card          as in `Card.arch`
    names         as in `Card.names`
    constants     the configuration: numbers and words among the kernel's constants, warps and stages
    reason        why it does not compile, or does not fit; None if it does
    has, needs    bytes of shared memory: the card's limit for a block, and what a block needs
    registers     of a thread
    spills        spill instructions in loops on NVIDIA's cards; spilled registers on AMD's
    tensor_cores  True if its matmuls use them; None if it has no matmuls
    copies        asynchronous copies in the binary
    blocks        blocks that a multiprocessor holds at once
    lacks         dtypes of its tensors that the card's tensor cores do not multiply
    """

    card: str
    names: str
    kernel: str
    constants: dict[str, Any]
    reason: str | None
    has: int
    needs: int | None = None
    registers: int | None = None
    spills: int | None = None
    tensor_cores: bool | None = None
    copies: int | None = None
    blocks: int | None = None
    lacks: str | None = None


def answers_on(card: Card, load: Callable[[], Callable[[], Any]], folder: Path) -> list[Answer]:
    """The answers for a card, one for each configuration of each kernel.

    The target runs in a process of its own, since its code may remember which card it has seen. If the compiler ends
    this process, the answer for its kernel says so, and another process goes on with the next kernel. ValueError for a
    target that `load` refuses. `folder` is for logs and caches.
    """
    answers: list[Answer] = []
    log = folder / card.arch
    while True:
        with processes.Worker(COMPILED | {"LMSYS_CACHE_DIR": str(folder)}) as worker:
            try:
                kernels, raised = worker.call(begin, card, load, timeout_s=LIMIT_S)
            except processes.ProcessError as error:
                return [_answer_about(card, CALLER, {}, reason=_in_a_line(str(error)))]
            try:
                for number in range(len(answers), len(kernels)):
                    answers.append(worker.call(answer, card, number, log, timeout_s=LIMIT_S))
            except processes.ProcessError as error:
                reason = f"its compiler ends: {_compiler_error(log.read_text(errors='replace'), str(error))}"
                answers.append(_answer_about(card, *kernels[number], reason=reason))
                continue
        return answers + ([_answer_about(card, CALLER, {}, reason=raised)] if raised else [])


def _answer_about(card: Card, kernel: str, constants: dict[str, Any], **others: Any) -> Answer:
    """An answer for a card and a kernel; `others` are its other fields."""
    return Answer(card.arch, card.names, kernel, constants, has=card.block_bytes, **others)


def _compiler_error(logged: str, message: str) -> str:
    """The compiler's first error in its log or message; else the message's last line, below the kernel's source."""
    error = re.search(r"^.*\b(?:error|fatal)\s*:.*", f"{logged}\n{message}", re.IGNORECASE | re.MULTILINE)
    text = error[0] if error else message.strip().rpartition("\n")[2]
    return _in_a_line(re.sub("<.*>", "<...>", text))  # types differ from configuration to configuration


def _in_a_line(text: str) -> str:
    return textwrap.shorten(text, LONGEST)


def begin(card: Card, load: Callable[[], Callable[[], Any]]) -> tuple[list[tuple[str, dict[str, Any]]], str | None]:
    """Records the target's launches: ((name, constants) of each, the exception that the target raised, or None)."""
    from dev.targets import recording

    os.dup2(2, 1)  # output of the target must not mix with the answers
    recording.install(card)
    error = recording.record(load)
    raised = f"raises {type(error).__name__}: {_in_a_line(str(error))}" if error else None
    return [(launch.name, launch.constants) for launch in recording.launches], raised


def answer(card: Card, number: int, log: Path) -> Answer:
    """The answer for launch `number` of those that `begin` recorded. The compiler's output goes to `log`."""
    from dev.targets import binary, recording

    launch = recording.launches[number]
    lacking = ", ".join(sorted(launch.dtypes & {*card.lacks})) or None
    known = partial(_answer_about, card, launch.name, launch.constants, lacks=lacking)
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        kernel = recording.compiled(launch)
        facts = binary.read(kernel)
    except Exception as error:
        error_text = _compiler_error(log.read_text(errors="replace"), str(error))
        return known(reason=f"does not compile: {type(error).__name__}: {error_text}")
    needs = facts["needs"]
    reason = f"needs {needs} bytes of shared memory, has {card.block_bytes}" if needs > card.block_bytes else None
    return known(reason=reason, blocks=card.held(facts["registers"], needs, kernel.metadata.num_warps), **facts)


def load(target: str, shape: tuple[int, ...], dtype: str, grad: bool) -> Callable[[], Any]:
    """A function without parameters that launches a target's kernels. Attention is called on q, k, v of this shape.

    ValueError for a target that cannot be called so.
    """
    from lmsys import registry

    function: Any = registry.load_target(target) if ".py" in target else _row(target)
    taken = inspect.signature(function)
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    if all(x.default is not x.empty or x.kind in variadic for x in taken.parameters.values()):
        return function
    from lmsys import signature  # here, since it takes seconds that functions without parameters need not wait
    from lmsys.attention import contract

    if not signature.is_function(function) and len(taken.parameters) < 3:
        raise ValueError(
            f"{target} takes {taken}: name a function of q, k, v, or one without parameters"
            " that makes its own tensors and calls your kernels"
        )
    return partial(_attend, contract.adapt(function), shape, dtype, grad)


def _row(name: str) -> Callable[..., Any]:
    """Attention by the row of this name."""
    from lmsys.attention import ATTENTION, attention

    return partial(attention, impl=ATTENTION[name].name)


def _attend(function: Any, shape: tuple[int, ...], dtype: str, grad: bool) -> None:
    """Calls attention on random q, k and v of this shape, with `grad` also its backward."""
    import torch

    qkv = [torch.randn(shape, dtype=getattr(torch, dtype), device="cuda", requires_grad=grad) for _ in range(3)]
    o = function(*qkv, causal=True, scale=None)
    if o.requires_grad:
        o.backward(torch.ones_like(o))
