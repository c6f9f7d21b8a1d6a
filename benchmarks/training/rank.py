"""A training on its rank: its first steps are measured apart, then it trains epoch by epoch, then it is evaluated.

`bench_training.py` asks the ranks for `inspect`, `begin`, `epoch` (once for each epoch) and `end`, in this order, and
for `clear` where a training is given up. Under `ranks.on_part` a function runs on the first `case.world_size` ranks,
and returns None on the others. The tokens are the beginning of a real text, made once per run in a temporary folder.
"""

import os
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from benchmarks.models import COMPILED, LR_BY_WIDTH, MAX_SCORES, TrainedCase, attention_row
from lmsys import config, traits, values
from lmsys.attention import ATTENTION
from lmsys.bench import Entry, Failed, Record, findings, ranks
from lmsys.measure import clock, memory, sensors
from lmsys.parallel import STRATEGIES, group
from lmsys.tokenizer import Tokenizer, chunks, pretokens, train
from lmsys.training import corpora, data, loop, reproducible
from lmsys.training.config import RunConfig, TrainConfig


@dataclass(frozen=True)
class TrainingCase(TrainedCase):
    """A model with the row `attention`, trained by the strategy `entry`. Cases that differ in these alone are compared.

    It overrides what the runner and the reports read of a `Case`: `axes`, the fields of the record, `peer`,
    `comparison`, and `impl`, the row's name. `steps`, `windows` and `run_config` raise ValueError for a case that
    cannot run: `bench_training.py` asks them for the reason.

    num_ranks     of the group, which all strategies share: with the batch they make the global batch
    epochs        passes over train_tokens tokens, rounded down to whole steps
    bucket_mb     MiB; "auto" or "all", which `run_config` refuses; None: the strategy has no buckets to set
    reproducible  gradients are added in one order, that of `lmsys.training.reproducible`, so that strategies have the
                  same weights, bit for bit
    names_bucket  the bucket size is part of the row's name, since there are others
    micro         sequences that a rank holds at once; 0: its batch
    """

    attention: Entry
    num_ranks: int
    bucket_mb: float | str | None
    epochs: int
    train_tokens: int
    val_tokens: int
    vocab_size: int
    reproducible: bool = False
    names_bucket: bool = False
    micro: int = 0

    @property
    def axes(self) -> Record:
        return {
            # Checkpoint and residual are always the defaults, and `row` and `impl` tell the bucket size.
            **{
                name: value
                for name, value in super().axes.items()
                if name not in ("names_bucket", "micro", "checkpoint", "residual")
            },
            "attention": self.attention.name,
            "row": self.row,
            "attention_label": self.attention.label or self.attention.name,
            "attention_peer": self.attention.peer,
            "strategy_peer": self.entry.peer,
            "global_batch": self.global_batch,
            "world_size": self.world_size,
        }

    @property
    def peer(self) -> bool:
        return self.attention.peer or self.entry.peer

    @property
    def comparison(self) -> str:
        return f"{super().comparison}-W{self.num_ranks}-T{self.train_tokens}x{self.epochs}"

    @property
    def row(self) -> str:
        """The strategy with its options."""
        return self.entry.name + f"-{self.bucket_mb}MiB" * self.names_bucket + "-reproducible" * self.reproducible

    @property
    def impl(self) -> str:
        return f"{self.attention.name}-{self.row}"

    @property
    def world_size(self) -> int:
        """The ranks that train: one, which accumulates the batches of all, where the strategy does not synchronize."""
        return self.num_ranks if self.traits.synchronizes else 1

    @property
    def global_batch(self) -> int:
        return self.batch * self.num_ranks

    @property
    def steps(self) -> int:
        """Steps of an epoch. ValueError where its tokens do not fill one."""
        tokens = self.global_batch * self.context
        values.hold(  # takes (condition, message) pairs: ValueError with the message of the first false condition
            (
                self.train_tokens >= tokens,
                f"--train-tokens {self.train_tokens}: must be at least {tokens}, which one step takes"
                f" (batch {self.batch} x {self.num_ranks} ranks x context {self.context})",
            )
        )
        return self.train_tokens // tokens

    @property
    def tokens(self) -> int:
        """Tokens of an epoch: as many as its steps take, so that steps and epochs end together."""
        return self.steps * self.global_batch * self.context

    @property
    def windows(self) -> int:
        """Windows of the held-out text. ValueError where its tokens do not fill one."""
        values.hold(
            (
                self.val_tokens >= self.context,
                f"--val-tokens {self.val_tokens}: must be at least the context, {self.context}",
            )
        )
        return self.val_tokens // self.context

    @property
    def config(self) -> config.ModelConfig:
        return replace(super().config, vocab_size=self.vocab_size)

    @property
    def lr(self) -> float:
        return LR_BY_WIDTH / self.config.d_model

    @property
    def reference(self) -> "TrainingCase":
        """The case to compare with: one process with naive attention, in micro-batches whose scores fit in memory."""
        fitting = max(1, MAX_SCORES // (self.config.num_heads * self.context**2))
        return replace(
            self,
            attention=ATTENTION["naive"],
            entry=next(row for row in STRATEGIES.values() if not traits.StrategyTraits.of(row).synchronizes),
            micro=max(size for size in range(1, self.batch + 1) if self.batch % size == 0 and size <= fitting),
            bucket_mb=None,
            compile="eager",
            reproducible=False,
        )

    def run_config(self, seed: int) -> RunConfig:
        """The case as the training loop takes it. ValueError for an option that the loop does not have."""
        if isinstance(self.bucket_mb, str):
            raise ValueError("the training loop has no automatic size of buckets: --bucket-mb is to name MiB")
        values.hold(
            (
                self.precision != "fp16",
                "with fp16 each row may skip other steps at first, until its loss scale fits, and has another curve:"
                " --precision bf16",
            ),
            (self.compile != "fused" or not self.traits.why_not_fused, self.traits.why_not_fused),
            (not self.reproducible or not self.traits.why_not_reproducible, self.traits.why_not_reproducible),
        )
        steps = self.steps * self.epochs
        return RunConfig(
            model=replace(self.config, attention=attention_row(self.attention, self.asked).name),
            train=TrainConfig(
                steps=steps,
                batch_size=self.global_batch,
                micro_batch_size=self.micro or self.batch,
                reproducible=self.reproducible,
                lr=self.lr,
                min_lr=0.1 * self.lr,
                warmup_steps=int(0.1 * steps),
                seed=seed,
                precision=self.precision,
                compile=self.compile in COMPILED,
                fused=self.compile == "fused",
                graph=self.replayed,
                strategy=self.entry.target if ".py:" in self.entry.target else self.entry.name,
                bucket_mb=self.bucket_mb,
            ),
        )


CORPUS = "stdlib"
BYTES_PER_TOKEN = 4  # bytes of text, about, for each token that is asked for
LEAST_BYTES = 500_000  # of text that is read at once, and that a tokenizer is trained on


Tokens = tuple[Path, Path]  # files of ids to train on, and held out, .npy: see `tokens_of`


@cache
def folder() -> "tempfile.TemporaryDirectory[str]":
    """The folder of this process for files of tokens, deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="lmsys-tokens-")


@cache
def tokens_of(train_tokens: int, val_tokens: int, vocab_size: int) -> Tokens:
    """Files of `train_tokens` ids of the standard library's text, and of `val_tokens` ids of its held-out text.

    The process that asks the ranks makes them, once for the same arguments, and deletes them when it ends; ranks read
    them. The tokenizer is trained on the beginning of the text. `Failed` is raised where a text has fewer
    ids.
    """
    corpus = corpora.stdlib()
    beginning = next(
        chunks.chunks(
            corpus.train[:1],
            pretokens.Pretokenizer([corpora.END_OF_TEXT]),
            max(LEAST_BYTES, BYTES_PER_TOKEN * train_tokens),
        )
    )
    tokenizer = train([beginning], vocab_size, [corpora.END_OF_TEXT], len(os.sched_getaffinity(0)))
    place = Path(folder().name) / f"{train_tokens}-{val_tokens}-{vocab_size}"
    place.mkdir(exist_ok=True)
    paths = place / "train.npy", place / "valid.npy"
    np.save(paths[0], _first(tokenizer, corpus.train, train_tokens, "--train-tokens"))
    np.save(paths[1], _first(tokenizer, corpus.valid, val_tokens, "--val-tokens"))
    return paths


def _first(tokenizer: Tokenizer, parts: tuple[chunks.Chunk, ...], count: int, option: str) -> np.ndarray:
    """`count` ids of the text and the next one, which is the target of the last. `option` is for the message."""
    pieces: list[np.ndarray] = []
    for chunk in chunks.chunks(
        parts, pretokens.Pretokenizer([corpora.END_OF_TEXT]), max(LEAST_BYTES, BYTES_PER_TOKEN * count)
    ):
        pieces += data.encode_files(tokenizer, [chunk], 1)
        if sum(map(len, pieces)) > count:
            return np.concatenate(pieces)[: count + 1]
    raise Failed(
        "unsupported",
        f"{option} {count}: must be less than {sum(map(len, pieces))}, which is all that {CORPUS} has",
    )


INTERPRETED = "its kernels are interpreted here, which is too slow to train with"
_TRAINER: list[loop.Trainer] = []  # the trainer at work, kept from one call to the next; at most one

sensors_of = cache(sensors.sensors_of)


@dataclass(frozen=True)
class Epoch:
    """The results of an epoch on a rank.

    seconds        of all its steps together
    losses, norms  by step: the loss over all ranks, the norm of the gradient
    sm_clock_mhz   the GPU's clock at the end; None where no sensor tells it
    """

    seconds: float
    losses: list[float]
    norms: list[float]
    sm_clock_mhz: float | None


def trainer(case: TrainingCase, tokens: Tokens, seed: int) -> loop.Trainer:
    """A new trainer of the case on this rank. ValueError where the case cannot be trained."""
    config = case.run_config(seed)
    if config.train.compile:
        torch.compiler.reset()  # else blocks of earlier cases would count as recompilations
    with torch.random.fork_rng():  # a trainer seeds torch, and this rank runs other cases next
        return loop.Trainer(
            config,
            data.TokenFiles(tokens[:1]),  # to train on; the other is held out
            data.fixed_windows(data.TokenFiles(tokens[1:]), case.context, case.windows),
            group.device(),
            group=ranks.subgroup(case.world_size),
        )


@ranks.on_part
def inspect(case: TrainingCase, tokens: Tokens, seed: int) -> tuple[str | None, float, int]:
    """(why the case is not trained, seconds of the first step, which compiles and tunes, peak bytes of the second).

    These steps are no part of the training that is timed. A kernel in Triton's interpreter is a reason, too.
    """
    clear(case)

    def step() -> None:
        """The next step, unless a kernel was interpreted in the step before."""
        if not launched:
            _TRAINER[0].train_step()
            if group.device().type == "cpu":  # there memory is profiled: see `memory.phases`
                _TRAINER[0].strategy.wait()

    try:
        with findings.interpreted_kernels() as launched:
            first_step_s, phases = memory.first_steps(
                make=lambda: _TRAINER.append(trainer(case, tokens, seed)), step=step, device=group.device().type
            )
    except ValueError as error:
        if _TRAINER:  # the trainer was made, so a step has failed: that is an error, not a reason
            raise
        return str(error), 0.0, 0
    _TRAINER.clear()
    return INTERPRETED if launched else None, first_step_s, phases["step"]["peak_bytes"]


@ranks.on_part
def begin(case: TrainingCase, tokens: Tokens, seed: int) -> None:
    """Makes the trainer of the training that is timed."""
    clear(case)
    _TRAINER.append(trainer(case, tokens, seed))


@ranks.on_part
def epoch(case: TrainingCase, steps: int) -> Epoch:
    """The result of the next `steps` steps, which ranks begin together."""
    (trainer,) = _TRAINER
    if trainer.world_size > 1:
        torch.distributed.barrier(trainer.group)
    kind = group.device().type
    clock.synchronize(kind)
    start = perf_counter()
    taken = [trainer.train_step()[0] for _ in range(steps)]
    sm_clock_mhz = sensors_of(kind).read().sm_clock_mhz
    clock.synchronize(kind)
    return Epoch(perf_counter() - start, [step.loss for step in taken], [step.norm for step in taken], sm_clock_mhz)


@ranks.on_part
def end(case: TrainingCase) -> tuple[float, str]:
    """(the loss on held-out text, a fingerprint of the weights: ranks with one model have the same)."""
    (trainer,) = _TRAINER
    same = (
        reproducible.weights_sha256(trainer.strategy.full_state_dict())
        if case.reproducible
        else trainer.strategy.fingerprint()
    )
    result = trainer.evaluate().loss, same
    clear(case)
    return result


def clear(_: TrainingCase) -> None:
    """Drops a training, also one that is given up. Ranks are asked for a function of a case, so it takes one."""
    _TRAINER.clear()
    ranks.release()
