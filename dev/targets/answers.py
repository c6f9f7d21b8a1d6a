"""Asks a target what its kernels are on one card, in a process of its own."""

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

COMPILED = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}  # also where others interpret
LONGEST = 300  # of a message
LIMIT_S = 600.0  # for the launches of a card, and for each of their binaries
CALLER = "its caller"  # in place of a kernel


@dataclass(frozen=True)
class Answer:
    """Facts about one configuration of a kernel on a card, or, where there are none, why.

    reason        why it does not compile, or does not fit; None where it does
    needs, has    bytes of shared memory: of a block, and the card's limit
    spills        in loops, where the compiler says which; else all
    tensor_cores  whether its products use them; None without products
    copies        asynchronous copies in the binary
    blocks        that a multiprocessor holds at once
    lacks         dtypes of its tensors that the card does not compute with
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


def asked(card: Card, load: Callable[[], Callable[[], Any]], folder: Path) -> list[Answer]:
    """The answers of a card. What code keeps of its card holds for no other, so they come from processes of their own.

    A compiler may end its process: that is the answer for the kernel at hand, and the next goes on behind it.
    ValueError for a target that `load` refuses.
    """
    answers: list[Answer] = []
    log = folder / card.arch
    while True:
        with processes.Worker(COMPILED | {"LMSYS_CACHE_DIR": str(folder)}) as worker:
            try:
                kernels, ended = worker.call(begin, card, load, timeout_s=LIMIT_S)
            except processes.ProcessError as error:
                return [_known(card, CALLER, {}, reason=_in_a_line(str(error)))]
            try:
                for number in range(len(answers), len(kernels)):
                    answers.append(worker.call(answer, card, number, log, timeout_s=LIMIT_S))
            except processes.ProcessError as error:
                reason = f"its compiler ends: {_told(log.read_text(errors='replace'), str(error))}"
                answers.append(_known(card, *kernels[number], reason=reason))
                continue
        return answers + ([_known(card, CALLER, {}, reason=ended)] if ended else [])


def _known(card: Card, kernel: str, constants: dict[str, Any], **others: Any) -> Answer:
    return Answer(card.arch, card.names, kernel, constants, has=card.block_bytes, **others)


def _told(logged: str, message: str) -> str:
    """The compiler's first error. Else what has ended it, in its last line: the others are the kernel's source."""
    error = re.search(r"^.*\b(?:error|fatal)\s*:.*", f"{logged}\n{message}", re.IGNORECASE | re.MULTILINE)
    told = error[0] if error else message.strip().rpartition("\n")[2]
    return _in_a_line(re.sub("<.*>", "<...>", told))  # of types, which differ from configuration to configuration


def _in_a_line(text: str) -> str:
    return textwrap.shorten(text, LONGEST)


def begin(card: Card, load: Callable[[], Callable[[], Any]]) -> tuple[list[tuple[str, dict[str, Any]]], str | None]:
    """Records the target's launches: the name and constants of each, and what the target has raised."""
    from dev.targets import recording

    os.dup2(2, 1)  # what a target prints is no answer
    recording.install(card)
    ended = recording.record(load)
    raised = f"raises {type(ended).__name__}: {_in_a_line(str(ended))}" if ended else None
    return [(launch.name, launch.constants) for launch in recording.launches], raised


def answer(card: Card, number: int, log: Path) -> Answer:
    """That on one of the launches which `begin` has recorded. What the compiler prints goes to `log`."""
    from dev.targets import binary, recording

    launch = recording.launches[number]
    lacking = ", ".join(sorted(launch.dtypes & {*card.lacks})) or None
    known = partial(_known, card, launch.name, launch.constants, lacks=lacking)
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        kernel = recording.compiled(launch)
        facts = binary.read(kernel)
    except Exception as error:
        told = _told(log.read_text(errors="replace"), str(error))
        return known(reason=f"does not compile: {type(error).__name__}: {told}")
    needs = facts["needs"]
    reason = f"needs {needs} bytes of shared memory, has {card.block_bytes}" if needs > card.block_bytes else None
    return known(reason=reason, blocks=card.held(facts["registers"], needs, kernel.metadata.num_warps), **facts)


def load(target: str, shape: tuple[int, ...], dtype: str, grad: bool) -> Callable[[], Any]:
    """The call that launches a target's kernels: attention on q, k and v of a shape, and all else as it is.

    ValueError for a target that is none.
    """
    from lmsys import registry

    function: Any = registry.load_target(target) if ".py" in target else _row(target)
    signature = inspect.signature(function)
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    if all(x.default is not x.empty or x.kind in variadic for x in signature.parameters.values()):
        return function
    from lmsys.attention import contract  # which kernels that take nothing need not wait for

    if not contract.is_function(function) and len(signature.parameters) < 3:
        raise ValueError(
            f"{target} takes {signature}: name a function of q, k, v, or one without parameters"
            " that makes its own tensors and calls your kernels"
        )
    return partial(_attend, contract.adapt(function), shape, dtype, grad)


def _row(name: str) -> Callable[..., Any]:
    from lmsys.attention import ATTENTION, attention

    return partial(attention, impl=ATTENTION[name].name)


def _attend(function: Any, shape: tuple[int, ...], dtype: str, grad: bool) -> None:
    import torch

    made = [torch.randn(shape, dtype=getattr(torch, dtype), device="cuda", requires_grad=grad) for _ in range(3)]
    o = function(*made, causal=True, scale=None)
    if o.requires_grad:
        o.backward(torch.ones_like(o))
