"""A training on its rank: the first step is looked into, then it goes epoch by epoch, then it is evaluated.

Its tokens are the beginning of a real text, made once a run in a temporary folder.
"""

import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.training.cases import TrainingCase
from lmsys.bench.findings import interpreted_kernels
from lmsys.bench.ranks import Unsupported, on_part, release, subgroup
from lmsys.measure import memory
from lmsys.measure.clock import synchronize
from lmsys.measure.sensors import sensors_of
from lmsys.parallel.group import device
from lmsys.tokenizer import Tokenizer, train
from lmsys.tokenizer.chunks import Chunk, chunks
from lmsys.tokenizer.pretokens import Pretokenizer
from lmsys.training.corpora import END_OF_TEXT, stdlib
from lmsys.training.data import TokenFiles, fixed_windows
from lmsys.training.loop import Trainer
from lmsys.training.reproducible import weights_sha256
from lmsys.training.tokens import encode_files

CORPUS = "stdlib"
BYTES_PER_TOKEN = 4  # about; what a tokenizer is trained on has so many for each token
LEAST_BYTES = 500_000


@dataclass(frozen=True)
class Tokens:
    """Files of ids, .npy; they go with this process."""

    train: Path
    valid: Path


@cache
def folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="lmsys-tokens-")


@cache
def tokens_of(train_tokens: int, val_tokens: int, vocab_size: int) -> Tokens:
    """So many ids of the standard library's text, and of what it holds out; the vocabulary is trained on its beginning.

    Unsupported where the text has fewer.
    """
    corpus = stdlib()
    size = max(LEAST_BYTES, BYTES_PER_TOKEN * train_tokens)
    beginning = next(chunks(corpus.train[:1], Pretokenizer([END_OF_TEXT]), size))
    tokenizer = train([beginning], vocab_size, [END_OF_TEXT], len(os.sched_getaffinity(0)))
    place = Path(folder().name) / f"{train_tokens}-{val_tokens}-{vocab_size}"
    place.mkdir(exist_ok=True)
    found = Tokens(place / "train.npy", place / "valid.npy")
    np.save(found.train, _first(tokenizer, corpus.train, train_tokens, "--train-tokens"))
    np.save(found.valid, _first(tokenizer, corpus.valid, val_tokens, "--val-tokens"))
    return found


def _first(tokenizer: Tokenizer, parts: tuple[Chunk, ...], count: int, option: str) -> np.ndarray:
    """`count` ids and the one that follows them."""
    found: list[np.ndarray] = []
    for chunk in chunks(parts, Pretokenizer([END_OF_TEXT]), max(LEAST_BYTES, BYTES_PER_TOKEN * count)):
        found += encode_files(tokenizer, [chunk], 1)
        if sum(map(len, found)) > count:
            return np.concatenate(found)[: count + 1]
    raise Unsupported(f"{option} {count}: must be less than {sum(map(len, found))}, which is all that {CORPUS} has")


INTERPRETED = "its kernels are interpreted here, which is too slow to train with"
_TRAINER: list[Trainer] = []  # the one that trains now, from call to call

sensors = cache(sensors_of)


@dataclass(frozen=True)
class Epoch:
    """seconds of all its steps together; the loss of all ranks, and the norm of the gradient, by step."""

    seconds: float
    losses: list[float]
    norms: list[float]
    sm_clock_mhz: float | None


def trainer(case: TrainingCase, tokens: Tokens, seed: int) -> Trainer:
    config = case.run_config(seed)
    if config.train.compile:
        torch.compiler.reset()  # the blocks of one case are not to count as those of another again
    windows = fixed_windows(TokenFiles([tokens.valid]), case.context, case.windows)
    group = subgroup(case.world_size)
    with torch.random.fork_rng():  # a trainer seeds torch, and the rank is others' next
        return Trainer(config, TokenFiles([tokens.train]), windows, device(), group=group)


@on_part
def inspect(case: TrainingCase, tokens: Tokens, seed: int) -> tuple[str | None, float, int]:
    """(why the case is not trained, seconds of the first step, which compiles and tunes, peak bytes of one behind it).

    In a run of their own.
    """
    clear(case)
    took: list[float] = []

    def first() -> None:
        start = perf_counter()
        _TRAINER[0].train_step()
        synchronize(device().type)
        took.append(perf_counter() - start)

    def step() -> None:
        if not launched:
            _TRAINER[0].train_step()

    phases = {"init": lambda: _TRAINER.append(trainer(case, tokens, seed)), "first": first, "step": step}
    try:
        with interpreted_kernels() as launched:
            found = memory.phases(phases, device().type)
    except ValueError as error:
        if _TRAINER:
            raise
        return str(error), 0.0, 0
    _TRAINER.clear()
    return INTERPRETED if launched else None, took[0], found["step"]["peak_bytes"]


@on_part
def begin(case: TrainingCase, tokens: Tokens, seed: int) -> None:
    clear(case)
    _TRAINER.append(trainer(case, tokens, seed))


@on_part
def epoch(case: TrainingCase, steps: int) -> Epoch:
    """The next steps, which ranks begin together."""
    (one,) = _TRAINER
    if one.world_size > 1:
        dist.barrier(one.group)
    synchronize(device().type)
    start = perf_counter()
    taken = [one.train_step()[0] for _ in range(steps)]
    clock = sensors(device().type).read().sm_clock_mhz
    synchronize(device().type)
    seconds = perf_counter() - start
    return Epoch(seconds, [step.loss for step in taken], [step.norm for step in taken], clock)


@on_part
def end(case: TrainingCase) -> tuple[float, str]:
    """(the loss on held-out text, what tells whether ranks have one model)."""
    (one,) = _TRAINER
    same = weights_sha256(one.strategy.full_state_dict()) if case.reproducible else one.strategy.fingerprint()
    found = one.evaluate().loss, same
    clear(case)
    return found


def clear(_: TrainingCase) -> None:
    """Drops a training, also one that is given up."""
    _TRAINER.clear()
    release()
