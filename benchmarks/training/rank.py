"""A training on its rank: the first step is looked into, then it goes epoch by epoch, then it is evaluated."""

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.cases import TrainingCase
from benchmarks.training.tokens import Tokens
from lmsys.bench.ranks import release, subgroup, takes_part
from lmsys.bench.runner import interpreted_kernels
from lmsys.measure import memory
from lmsys.measure.clock import synchronize
from lmsys.measure.machine import sm_clock_reader
from lmsys.parallel.group import device
from lmsys.training.data import TokenFiles, fixed_windows
from lmsys.training.loop import Trainer

_TRAINER: list[Trainer] = []  # the one that trains now, from call to call

sm_clock = cache(sm_clock_reader)


@dataclass(frozen=True)
class Inspection:
    """Findings of the first steps. refused: why the training loop does not take the case."""

    refused: str | None = None
    first_step_s: float = 0.0
    peak_bytes: int = 0
    interpreted: bool = False


@dataclass(frozen=True)
class Epoch:
    """seconds of all its steps together; the loss of all ranks, and the norm of the gradient, by step."""

    seconds: float
    losses: list[float]
    norms: list[float]
    sm_clock_mhz: float | None


@dataclass(frozen=True)
class Ended:
    """The loss on held-out text, and what tells whether ranks have one model."""

    valid_loss: float
    model: str


def trainer(case: TrainingCase, tokens: Tokens, seed: int) -> Trainer:
    config = case.config(seed)
    windows = fixed_windows(TokenFiles([tokens.valid]), case.context, case.windows)
    if config.train.compile:
        torch.compiler.reset()  # the blocks of one case are not to count as those of another again
    group = subgroup(case.world_size)
    return Trainer(config, TokenFiles([tokens.train]), windows, device(), group=group)


def inspect(case: TrainingCase, tokens: Tokens, seed: int) -> Inspection | None:
    """The first step, which compiles and tunes, and the memory of one behind it, in a run of their own."""
    if not takes_part(case.world_size):
        return None
    clear(case)
    made: dict[str, Any] = {}

    def init() -> None:
        made["trainer"] = trainer(case, tokens, seed)

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
        return Inspection(refused=str(error))
    return Inspection(None, made["first_s"], found["step"]["peak_bytes"], made["interpreted"])


def begin(case: TrainingCase, tokens: Tokens, seed: int) -> None:
    if takes_part(case.world_size):
        clear(case)
        _TRAINER.append(trainer(case, tokens, seed))


def epoch(case: TrainingCase, steps: int) -> Epoch | None:
    """The next steps, which ranks begin together."""
    if not takes_part(case.world_size):
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


def end(case: TrainingCase) -> Ended | None:
    if not takes_part(case.world_size):
        return None
    (one,) = _TRAINER
    found = Ended(one.evaluate().loss, one.strategy.fingerprint())
    clear(case)
    return found


def clear(_: TrainingCase) -> None:
    """Drops a training, also one that is given up."""
    _TRAINER.clear()
    release()
