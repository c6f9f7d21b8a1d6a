"""Checks `flash_gluon` in a process that shares a GPU: `python -m tests.support.turns SECONDS FOLDER PROCESSES`.

A test starts PROCESSES of these at a time. The GPU interrupts kernels anywhere to let another process run. Results must
have the bits of those that the process obtained while it ran alone; the exit code is 1 if they differ. FOLDER is an
empty folder, in which the processes wait for one another. A plan is a choice of tiles and warps. A new plan or option
is a call in `calls`.
"""

import fcntl
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lmsys.attention.flash_gluon import launch as flash_gluon
from tests.support.time_limit import time_limit

CALLS = 40  # how many calls of a plan are launched before the process waits for the GPU
WIDTH = 2048  # heads * head_dim
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
Call = Callable[[], tuple[Tensor, ...]]


def inputs(head_dim: int, length: int, batch: int) -> list[Tensor]:
    """q, k, v and do, each (batch, WIDTH / head_dim, length, head_dim) in bfloat16."""
    shape = batch, WIDTH // head_dim, length, head_dim
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]


def calls() -> dict[str, Call]:
    """{name: call} of forwards by all plans, of deterministic backwards, and of default ones on whole numbers."""
    made: dict[str, Call] = {}
    for head_dim, causal, length in itertools.product((64, 128), (False, True), LENGTHS):
        q, k, v, do = inputs(head_dim, length, batch=max(1, 4096 // length))
        arguments = causal, head_dim**-0.5
        name = f"{head_dim=} {causal=} {length=}"
        made[name] = lambda q=q, k=k, v=v, rest=arguments: flash_gluon._forward(q, k, v, *rest)
        if length == 1024:
            o, lse = flash_gluon._forward(q, k, v, *arguments)
            tensors = q, k, v, o, lse, do
            made[f"backward {name}"] = lambda x=tensors, rest=arguments: flash_gluon._backward(*x, *rest, True)
            made[f"backward of whole numbers {name}"] = whole_numbers(tensors, arguments)
    return made


def whole_numbers(like: tuple[Tensor, ...], arguments: tuple[bool, float]) -> Call:
    """A default backward with the shapes of `like`, whose sums are exact in any order, so that its bits are known.

    Its inputs are small whole numbers; lse gives all keys equal weights, and o is passed as zero.
    """
    q, k, v, o, lse, do = (torch.zeros_like(x) for x in like)
    for x in (k, v, do):
        x.random_(-1, 2)
    lse.fill_(math.log(k.shape[2]))
    return lambda: flash_gluon._backward(q, k, v, o, lse, do, *arguments)


def main(seconds: float, folder: Path, processes: int) -> None:
    # Now even few causal heads are computed in groups, in which a CTA also zeroes dq for later heads.
    flash_gluon.FEW_WAVES = 0
    alone = {}
    with open(folder / "lock", "w") as lock, time_limit("alone", 120.0 * processes):
        fcntl.flock(lock, fcntl.LOCK_EX)
        todo = calls()
        for name, call in todo.items():
            alone[name] = call()
            torch.cuda.synchronize()
        (folder / f"ready-{os.getpid()}").touch()
        fcntl.flock(lock, fcntl.LOCK_UN)
        while len(list(folder.glob("ready-*"))) < processes:
            time.sleep(0.01)
    end = time.monotonic() + seconds
    for rounds in itertools.count():
        for name, call in todo.items():
            if rounds and time.monotonic() > end:
                print(f"{rounds} rounds")
                return
            with time_limit(name, 60.0):
                results = [call() for _ in range(CALLS)]
                torch.cuda.synchronize()
            for number, result in enumerate(results):
                if not all(torch.equal(x, expected) for x, expected in zip(result, alone[name], strict=True)):
                    sys.exit(f"{name}: call {number} of round {rounds} differs from one that was alone")


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
