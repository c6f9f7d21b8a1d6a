"""What ranks do for the benchmark of trainings: each is examined, then trains epoch by epoch, then is evaluated."""

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention_gate import interpreted_kernels
from benchmarks.parallel_workbench import fingerprint, release, takes_part
from benchmarks.ranks import subgroup
from benchmarks.training_cells import Cell
from benchmarks.training_data import Tokens
from lmsys.measure import memory
from lmsys.measure.clock import synchronize
from lmsys.measure.machine import sm_clock_reader
from lmsys.parallel.group import device
from lmsys.training.data import TokenFiles, fixed_windows
from lmsys.training.loop import Trainer

_TRAINER: list[Trainer] = []  # the one that trains now, from call to call

sm_clock = cache(sm_clock_reader)


@dataclass(frozen=True)
class Seen:
    """What a first look has shown. refused: why the training loop does not take the cell."""

    refused: str | None = None
    first_step_s: float = 0.0
    peak_bytes: int = 0
    interpreted: bool = False


@dataclass(frozen=True)
class Epoch:
    """seconds of all its steps; of each step the loss of all ranks, and the norm of the gradient."""

    seconds: float
    losses: list[float]
    norms: list[float]
    sm_clock_mhz: float | None


@dataclass(frozen=True)
class Ended:
    """The loss on held-out text, and what tells whether ranks have one model."""

    valid_loss: float
    model: str


def trainer(cell: Cell, tokens: Tokens, seed: int) -> Trainer:
    config = cell.config(seed)
    windows = fixed_windows(TokenFiles([tokens.valid]), cell.context, cell.windows)
    if config.train.compile:
        torch.compiler.reset()  # the blocks of one cell are not to count as those of another again
    group = subgroup(cell.world_size)
    return Trainer(config, TokenFiles([tokens.train]), windows, device(), group=group)


def examine(cell: Cell, tokens: Tokens, seed: int) -> Seen | None:
    """The first step, which compiles and tunes, and the memory of one behind it, in a run of their own."""
    if not takes_part(cell):
        return None
    clear(cell)
    made: dict[str, Any] = {}

    def init() -> None:
        made["trainer"] = trainer(cell, tokens, seed)

    def first() -> None:
        start = time.perf_counter()
        with interpreted_kernels() as launched:
            made["trainer"].train_step()
        synchronize(device().type)
        made["first_s"], made["interpreted"] = time.perf_counter() - start, bool(launched)

    def step() -> None:
        if not made["interpreted"]:
            made["trainer"].train_step()

    try:
        found = memory.phases({"init": init, "first": first, "step": step}, device().type)
    except ValueError as error:
        if made:
            raise
        return Seen(refused=str(error))
    return Seen(None, made["first_s"], found["step"]["peak_bytes"], made["interpreted"])


def begin(cell: Cell, tokens: Tokens, seed: int) -> None:
    if takes_part(cell):
        clear(cell)
        _TRAINER.append(trainer(cell, tokens, seed))


def epoch(cell: Cell, steps: int) -> Epoch | None:
    """The next steps, which ranks begin together."""
    if not takes_part(cell):
        return None
    (one,) = _TRAINER
    if one.world_size > 1:
        dist.barrier(one.group)
    synchronize(device().type)
    start = time.perf_counter()
    taken = [one.train_step()[0] for _ in range(steps)]
    clock = sm_clock()()
    synchronize(device().type)
    seconds = time.perf_counter() - start
    return Epoch(seconds, [step.loss for step in taken], [step.norm for step in taken], clock)


def end(cell: Cell) -> Ended | None:
    if not takes_part(cell):
        return None
    (one,) = _TRAINER
    found = Ended(one.evaluate().loss, fingerprint(one.strategy))
    clear(cell)
    return found


def clear(_: Cell) -> None:
    """Nothing of a training stays, also of one that is given up."""
    _TRAINER.clear()
    release()
