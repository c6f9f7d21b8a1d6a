"""The tests of whole trainings: what each is asked, and what it is called."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks import model_cells
from benchmarks.model_cells import AUTO, LLAMA, rows_called
from benchmarks.parallel_cells import BUCKETED, TUNED
from benchmarks.ranks import default_world_size
from benchmarks.sections import TrainingSection, with_axes
from lmsys.attention import ATTENTION
from lmsys.config import ModelConfig, model_config
from lmsys.parallel import STRATEGIES
from lmsys.registry import Entry
from lmsys.training.config import RunConfig, TrainConfig

WITH_BUCKETS = (*BUCKETED, TUNED)
# Learning rate times d_model: Adam's goes with the inverse width (Yang et al. 2022, arXiv 2203.03466).
LR_BY_WIDTH = 0.256
LEAST_LR, WARMUP = 0.1, 0.1  # of the learning rate; of all steps


@dataclass(frozen=True)
class Cell:
    """One test: a model with some attention row, trained by a strategy on ranks with a batch each.

    num_ranks  of the group, which all strategies share: with the batch they make the global batch
    bucket_mb  MiB, or None: the strategy has no buckets to set
    micro      sequences that a rank holds at once; 0: its batch
    """

    section: TrainingSection
    size: str
    context: int
    batch: int
    precision: str
    compile: str
    num_ranks: int
    attention: Entry
    strategy: Entry
    bucket_mb: float | str | None
    device: str
    micro: int = 0

    @property
    def group(self) -> str:
        """What is compared: all attention rows and strategies."""
        compiled = "" if self.compile == "eager" else f"-{self.compile}"
        work = f"T{self.section.train_tokens}x{self.section.epochs}"
        return (
            f"{self.section.name}-{self.size}-S{self.context}B{self.batch}-{self.precision}{compiled}"
            f"-W{self.num_ranks}-{work}"
        )

    @property
    def row(self) -> str:
        """The strategy with its option, where that is not all that the section has."""
        several = self.bucket_mb is not None and len(self.section.bucket_mbs) > 1
        return f"{self.strategy.name}-{self.bucket_mb}MiB" if several else self.strategy.name

    @property
    def impl(self) -> str:
        return f"{self.attention.name}-{self.row}"

    @property
    def id(self) -> str:
        return f"{self.group}-{self.impl}"

    @property
    def world_size(self) -> int:
        """Of the ranks that train."""
        return 1 if self.strategy.name == "none" else self.num_ranks

    @property
    def global_batch(self) -> int:
        return self.batch * self.num_ranks

    @property
    def steps(self) -> int:
        """Of an epoch. ValueError where its tokens do not fill one."""
        tokens = self.global_batch * self.context
        if self.section.train_tokens < tokens:
            raise ValueError(
                f"--train-tokens {self.section.train_tokens}: must be at least {tokens}, which one step takes"
                f" (batch {self.batch} x {self.num_ranks} ranks x context {self.context})"
            )
        return self.section.train_tokens // tokens

    @property
    def windows(self) -> int:
        """Of the held-out text. ValueError where its tokens do not fill one."""
        if self.section.val_tokens < self.context:
            raise ValueError(f"--val-tokens {self.section.val_tokens}: must be at least the context, {self.context}")
        return self.section.val_tokens // self.context

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def as_model(self) -> model_cells.Cell:
        """The same asked of the model alone."""
        start = (self.section.name, self.size, self.context, self.batch, self.precision, None, "step", self.compile)
        return model_cells.Cell(*start, self.attention, self.device)

    @property
    def model(self) -> ModelConfig:
        name = ATTENTION.pick(AUTO.name, self.as_model.case).name if self.attention == AUTO else self.attention.name
        return model_config(
            self.size, context_length=self.context, vocab_size=self.section.vocab_size, attention=name
        )  # fmt: skip

    def config(self, seed: int) -> RunConfig:
        """As the training loop takes it. ValueError for what it has not."""
        if self.bucket_mb == "auto":
            raise ValueError("the training loop has no automatic size of buckets: --bucket-mb is to name MiB")
        if self.compile == "graphed":
            raise ValueError("the training loop replays no CUDA graph: --compile is to be eager or compiled")
        steps, model = self.steps * self.section.epochs, self.model
        lr = LR_BY_WIDTH / model.d_model
        train = TrainConfig(
            steps=steps,
            batch_size=self.global_batch,
            micro_batch_size=self.micro or self.batch,
            lr=lr,
            min_lr=LEAST_LR * lr,
            warmup_steps=int(WARMUP * steps),
            seed=seed,
            precision=self.precision,
            compile=self.compile == "compiled",
            strategy=self.strategy.target if ".py:" in self.strategy.target else self.strategy.name,
            bucket_mb=self.bucket_mb,
        )
        return RunConfig(model=model, train=train)


def cells_of(section: TrainingSection, axes: dict[str, Any], rows: list[Entry] | None, device: str) -> Iterator[Cell]:
    """The section's cells with the command line's axes, and with the attention rows named there, if any.

    On one rank there is `none` only. ValueError for numbers of tokens on the command line that fill no step or window.
    """
    one = with_axes(section, axes)
    attention = [row for row in (rows_called(one.rows) if rows is None else rows) if row != LLAMA]
    most = default_world_size("nccl" if device == "cuda" else "gloo")
    ranks = list(dict.fromkeys(size or most for size in one.world_sizes))
    settings = product(one.sizes, one.contexts, one.batch, one.precisions, one.compiles, ranks)
    for setting, row, strategy in product(settings, attention, STRATEGIES.select(one.strategies)):
        if setting[-1] == 1 and strategy.name != "none":
            continue
        for bucket_mb in one.bucket_mbs if strategy.name in WITH_BUCKETS else (None,):
            cell = Cell(one, *setting, row, strategy, bucket_mb, device)
            if axes.keys() & {"train_tokens", "val_tokens"}:
                _ = cell.steps, cell.windows
            yield cell
