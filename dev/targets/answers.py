"""`answers_by_card` gets the facts about the kernels of a target, for each card. Imports no torch.

A card is a kind of GPU, a target is a function that launches kernels. `__main__.py` calls `answers_by_card`. This file
starts a process for each card, in which `recording.py` records the launches and compiles the kernels. To add a fact,
name it in ANSWER and in docs/targets.md, and return it from `binary.read`, or from `recording.answer` if it depends on
the card. If it gets a column of the table, it is also a name in NUMBERS of `__main__.py`, with a width in WIDTHS.
"""

import os
import re
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from dev.targets.cards import Card
from lmsys import processes

# Environment variables of the processes: these see no GPU, on any machine, and compile kernels, not interpret them.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
shorten = partial(textwrap.shorten, width=300)  # makes a message one line of at most 300 characters
LIMIT_S = 600.0  # time limit for recording the launches for a card, and for compiling each of them
CALLER = "its caller"  # stands for a kernel's name in the answer about a target whose own code failed
# Facts about one configuration of a kernel on a card, by the names in ANSWER, which docs/targets.md explains.
Answer = dict[str, Any]
ANSWER = "card names kernel constants dtypes reason has needs registers spills tensor_cores copies blocks lacks".split()


def answers_by_card(chosen: Sequence[Card], *target: Any) -> Iterator[list[Answer]]:
    """Yields a list of answers for each card, in the order of the cards; several cards are worked on at once.

    target  the arguments of `recording.load`; ValueError for a target that it refuses
    """
    # The folder is the cache of tuning results. It is empty, so that a row which tunes tile sizes tries all of them.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(min(len(chosen), os.cpu_count() or 1)) as threads:
        yield from threads.map(lambda card: _answers_on(card, target, Path(folder)), chosen)


def _answers_on(card: Card, target: tuple[Any, ...], folder: Path) -> list[Answer]:
    """The answers for a card, one for each configuration of each kernel.

    The target runs in a process of its own, since its code may remember which card it has seen. If the compiler crashes
    and ends this process, the answer about that kernel says so, and a new process goes on with the next kernel.

    target  the arguments of `recording.load`
    folder  for the compiler's log and for caches
    """
    known = dict.fromkeys(ANSWER) | {"card": card.arch, "names": card.names, "has": card.block_bytes}
    log, answers = folder / card.arch, []
    with processes.Worker(ENVIRONMENT | {"LMSYS_CACHE_DIR": str(folder)}) as worker:
        try:
            kernels, raised = worker.call("dev.targets.recording:begin", card, target, timeout_s=LIMIT_S)
        except processes.ProcessError as error:
            kernels, raised = [], error.failure[1]
        for number, kernel in enumerate(kernels):
            try:
                facts = worker.call("dev.targets.recording:answer", card, target, number, log, timeout_s=LIMIT_S)
            except processes.ProcessError as error:  # the next call begins in a new process
                facts = {"reason": f"its compiler ends: {compiler_error(log, error)}"}
            lacking = [dtype for dtype in kernel["dtypes"] if dtype in card.lacks]
            answers.append(known | kernel | facts | {"lacks": ", ".join(lacking) or None})
    if raised:
        answers.append(known | {"kernel": CALLER, "constants": {}, "dtypes": [], "reason": raised})
    return answers


def compiler_error(log: Path, error: Exception) -> str:
    """The first line with an error in the compiler's log or in the exception, else the last line of the exception.

    The exception's text repeats the source of the kernel, so its last line is what says most.
    """
    text = f"{log.read_text(errors='replace')}\n{error}"
    found = re.search(r"^.*\b(?:error|fatal)\s*:.*", text, re.IGNORECASE | re.MULTILINE)
    line = found[0] if found else text.strip().rpartition("\n")[2]
    return shorten(re.sub("<.*>", "<...>", line))  # an error names types, which differ between configurations
