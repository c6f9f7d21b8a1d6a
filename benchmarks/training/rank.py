"""The part of the training benchmark that runs on each rank, the cases of the benchmark, and the tokens to train on.

`bench_training.py` calls these functions on all ranks: `inspect`, which measures the first two steps; `begin`; `epoch`,
once for each epoch; and `end`, which evaluates the model. It calls `clear` if it gives up a training. A function with
the decorator `ranks.on_part` runs on the first `case.world_size` ranks, and returns None on the others. A *row* is an
implementation in a table, here of attention or of a data-parallel strategy.

To change what is trained or with which hyper-parameters, see `TrainingCase.run_config`. To measure something more in an
epoch, add it to `Epoch`. The tokens come from the beginning of the text of Python's standard library; the process that
calls the ranks makes them once per run, in a temporary folder (`tokens_of`).
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

    This class overrides the properties of a `Case` that the runner and the reports read: `axes` (the fields of the
    record), `peer`, `comparison`, and `impl` (the row's name). `steps`, `windows` and `run_config` raise ValueError for
    a case that cannot run: `bench_training.py` reads them to learn the reason.

    attention     the table entry of the attention row
    num_ranks     ranks of the group; the global batch of every strategy has batch · num_ranks sequences
    bucket_mb     the bucket size in MiB; None: the strategy has no buckets to set. "auto" and "all", which the command
                  line allows, are refused by `run_config`
    epochs        the number of epochs; each takes the first train_tokens tokens, rounded down to whole steps
    val_tokens    held-out tokens, rounded down to whole windows of `context` tokens
    vocab_size    the size of the tokenizer's vocabulary, and of the model's
    reproducible  gradients are added in one fixed order (`lmsys.training.reproducible`), so that all strategies end
                  with the same weights, bit for bit
    names_bucket  True: the bucket size is part of the row's name, as there are rows with other sizes
    micro         sequences of a micro-batch, which a rank computes at once; 0: all of its batch
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
            # Left out: checkpoint and residual, which are always the defaults here; names_bucket, which only shapes
            # the names `row` and `impl`; and micro, which only `reference` sets.
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
        """The name of the strategy and its options, such as "bucketed-25MiB-reproducible"."""
        return self.entry.name + f"-{self.bucket_mb}MiB" * self.names_bucket + "-reproducible" * self.reproducible

    @property
    def impl(self) -> str:
        return f"{self.attention.name}-{self.row}"

    @property
    def world_size(self) -> int:
        """The number of ranks that train.

        With a strategy that does not synchronize it is 1: that rank accumulates the batches of all `num_ranks` ranks.
        """
        return self.num_ranks if self.traits.synchronizes else 1

    @property
    def global_batch(self) -> int:
        return self.batch * self.num_ranks

    @property
    def steps(self) -> int:
        """The number of steps of an epoch. ValueError if its tokens do not fill one step."""
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
        """The number of tokens of an epoch: a multiple of what a step takes, so that a step never crosses epochs."""
        return self.steps * self.global_batch * self.context

    @property
    def windows(self) -> int:
        """The number of windows of `context` held-out tokens. ValueError if the tokens do not fill one window."""
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
        """The case to compare with: one process with naive attention and the same global batch.

        Its micro-batch divides the batch, and is the largest whose attention has at most MAX_SCORES scores.
        """
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
        """The training loop's configuration for this case. ValueError for an option that the loop does not have."""
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


CORPUS = "stdlib"  # needs no download, and every machine has it
BYTES_PER_TOKEN = 4  # an estimate, by which `tokens_of` and `_first` choose how much text they read at once
LEAST_BYTES = 500_000  # the least text that they read at once; a tokenizer is trained on at least so much


Tokens = tuple[Path, Path]  # two .npy files of token ids, to train on and held out: see `tokens_of`


@cache
def folder() -> "tempfile.TemporaryDirectory[str]":
    """The folder of this process for files of tokens, deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="lmsys-tokens-")


@cache
def tokens_of(train_tokens: int, val_tokens: int, vocab_size: int) -> Tokens:
    """Files with the first `train_tokens` ids of the text to train on, and the first `val_tokens` of the held-out text.

    The text is that of Python's standard library (`corpora.stdlib`). Each file has one id more, the target of the last
    token. The process that calls the ranks makes the files, once for the same arguments, and deletes them when it ends;
    the ranks read them. The tokenizer is trained on the beginning of the text. `Failed` if a text has too few ids.
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
    """The first `count` ids of the text, and one more, which is the target of the last.

    option  the command line option that gave `count`, for the message of `Failed`, raised if the text has too few ids
    """
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
_TRAINER: list[loop.Trainer] = []  # the current trainer of this rank, kept between calls; at most one

sensors_of = cache(sensors.sensors_of)


@dataclass(frozen=True)
class Epoch:
    """The results of an epoch on a rank.

    seconds        the time of all its steps together
    losses, norms  by step: the loss over the global batch, and the norm of its gradient
    sm_clock_mhz   the GPU's clock at the end of the epoch; None if no sensor reads it
    """

    seconds: float
    losses: list[float]
    norms: list[float]
    sm_clock_mhz: float | None


def trainer(case: TrainingCase, tokens: Tokens, seed: int) -> loop.Trainer:
    """A new trainer of the case on this rank. ValueError where the case cannot be trained."""
    config = case.run_config(seed)
    if config.train.compile:
        torch.compiler.reset()  # else this case's blocks would count as recompilations of those of earlier cases
    with torch.random.fork_rng():  # a trainer seeds torch, which must not affect the cases that this rank runs next
        return loop.Trainer(
            config,
            data.TokenFiles(tokens[:1]),  # the file to train on; tokens[1] is the held-out file
            data.fixed_windows(data.TokenFiles(tokens[1:]), case.context, case.windows),
            group.device(),
            group=ranks.subgroup(case.world_size),
        )


@ranks.on_part
def inspect(case: TrainingCase, tokens: Tokens, seed: int) -> tuple[str | None, float, int]:
    """(the reason why the case is not trained, or None; seconds of the first step; peak bytes of the second step).

    The first step compiles and tunes. Both steps belong to a trainer of their own, not to the training that is timed.
    A reason is a ValueError while the trainer is made, or a kernel that ran in Triton's interpreter.
    """
    clear(case)

    def step() -> None:
        """The next step, unless a kernel was interpreted in the step before."""
        if not launched:
            _TRAINER[0].train_step()
            if group.device().type == "cpu":  # a CPU's memory is profiled (`memory.phases`), with no work left behind
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
    """Makes the trainer whose epochs are timed."""
    clear(case)
    _TRAINER.append(trainer(case, tokens, seed))


@ranks.on_part
def epoch(case: TrainingCase, steps: int) -> Epoch:
    """Trains the next `steps` steps, which all ranks begin together, and returns their results."""
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
    """(the loss on held-out text, a fingerprint of the weights). Then drops the trainer.

    The fingerprint is equal on ranks with equal weights; for a reproducible case it is the SHA-256 of all weights.
    """
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
    """Drops the current trainer and frees its memory. The argument is unused: ranks call each function with a case."""
    _TRAINER.clear()
    ranks.release()
