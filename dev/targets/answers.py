"""Asks for the facts about the kernels of a target, by card: see `answers_by_card`. Imports no torch.

A card is a kind of GPU, a target is a function that launches kernels. `__main__.py` calls `answers_by_card`. Kernels
are recorded and compiled in processes, by `recording.py`. A new fact is a name in ANSWER, which `binary.read` fills.
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

# Variables of the processes: no GPU is there, on any machine, and kernels are compiled, not interpreted.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
shorten = partial(textwrap.shorten, width=300)  # a message in a line
LIMIT_S = 600.0  # for recording the launches of a card, and for compiling each of them
CALLER = "its caller"  # in place of a kernel's name, for a failure of the code that launches kernels
# Facts about one configuration of a kernel on a card, by the names in ANSWER, which docs/targets.md explains.
Answer = dict[str, Any]
ANSWER = "card names kernel constants dtypes reason has needs registers spills tensor_cores copies blocks lacks".split()


def answers_by_card(chosen: Sequence[Card], *target: Any) -> Iterator[list[Answer]]:
    """Yields the answers for each card, in the order of the cards; kernels are compiled for several cards at once.

    target  the arguments of `recording.load`. ValueError for one that it refuses
    """
    # In a new folder no row has tuned anything, so it launches all the tiles that it would time.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(min(len(chosen), os.cpu_count() or 1)) as threads:
        yield from threads.map(lambda card: _answers_on(card, target, Path(folder)), chosen)


def _answers_on(card: Card, target: tuple[Any, ...], folder: Path) -> list[Answer]:
    """The answers for a card, one for each configuration of each kernel.

    The target runs in a process of its own, since its code may remember which card it has seen. If the compiler ends
    this process, the answer for its kernel says so, and another process goes on with the next kernel. `folder` is for
    logs and caches.
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
    """The compiler's first error in its log or message; else the message's last line, below the kernel's source."""
    text = f"{log.read_text(errors='replace')}\n{error}"
    found = re.search(r"^.*\b(?:error|fatal)\s*:.*", text, re.IGNORECASE | re.MULTILINE)
    line = found[0] if found else text.strip().rpartition("\n")[2]
    return shorten(re.sub("<.*>", "<...>", line))  # types differ from configuration to configuration
