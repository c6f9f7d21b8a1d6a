"""The cases of whole trainings: an attention row and a strategy, a text, a number of epochs; their ids."""

from dataclasses import dataclass, replace

from benchmarks.models import COMPILED, LR_BY_WIDTH, MAX_SCORES, TrainedCase, attention_case, attention_row
from lmsys.attention import ATTENTION, AttentionCase
from lmsys.bench import Entry, Record
from lmsys.config import ModelConfig
from lmsys.parallel import STRATEGIES
from lmsys.training.config import RunConfig, TrainConfig

LEAST_LR, WARMUP = 0.1, 0.1  # of the learning rate; of all steps


@dataclass(frozen=True)
class TrainingCase(TrainedCase):
    """A model with some attention row, trained by a strategy; all attention rows and strategies compare.

    num_ranks     of the group, which all strategies share: with the batch they make the global batch
    epochs        passes over train_tokens tokens, rounded down to whole steps
    bucket_mb     MiB, or None: the strategy has no buckets to set
    reproducible  the batch in leaves that are added as one tree, so that all have the same weights, bit for bit
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
        own = super().axes
        for name in ("names_bucket", "micro", "checkpoint", "residual"):  # the last two are always the defaults
            del own[name]
        rows = {"attention": self.attention.name, "row": self.row}
        labels = {"attention_label": self.attention.label or self.attention.name}
        peers = {"attention_peer": self.attention.peer, "strategy_peer": self.entry.peer}
        return {**own, **rows, **labels, **peers, "global_batch": self.global_batch, "world_size": self.world_size}

    @property
    def peer(self) -> bool:
        return self.attention.peer or self.entry.peer

    @property
    def comparison(self) -> str:
        return f"{super().comparison}-W{self.num_ranks}-T{self.train_tokens}x{self.epochs}"

    @property
    def row(self) -> str:
        """The strategy with its options."""
        size = f"-{self.bucket_mb}MiB" if self.names_bucket else ""
        return self.entry.name + size + ("-reproducible" if self.reproducible else "")

    @property
    def impl(self) -> str:
        return f"{self.attention.name}-{self.row}"

    @property
    def world_size(self) -> int:
        """The ranks that train: one, which accumulates the batches of all, where the strategy does not synchronize."""
        return self.num_ranks if self.synchronizes else 1

    @property
    def global_batch(self) -> int:
        return self.batch * self.num_ranks

    @property
    def steps(self) -> int:
        """Steps of an epoch. ValueError where its tokens do not fill one."""
        tokens = self.global_batch * self.context
        if self.train_tokens < tokens:
            raise ValueError(
                f"--train-tokens {self.train_tokens}: must be at least {tokens}, which one step takes"
                f" (batch {self.batch} x {self.num_ranks} ranks x context {self.context})"
            )
        return self.train_tokens // tokens

    @property
    def tokens(self) -> int:
        """Tokens of an epoch: as many as its steps take, so that steps and epochs end together."""
        return self.steps * self.global_batch * self.context

    @property
    def windows(self) -> int:
        """Windows of the held-out text. ValueError where its tokens do not fill one."""
        if self.val_tokens < self.context:
            raise ValueError(f"--val-tokens {self.val_tokens}: must be at least the context, {self.context}")
        return self.val_tokens // self.context

    @property
    def text(self) -> tuple[int, int, int]:
        """Tokens of an epoch, those held out, and the vocabulary."""
        return self.tokens, self.val_tokens, self.vocab_size

    @property
    def config(self) -> ModelConfig:
        return replace(super().config, vocab_size=self.vocab_size)

    @property
    def asked(self) -> AttentionCase:
        """The attention case that the row must be able to run."""
        return attention_case(self.config, self.batch, self.precision, self.device)

    @property
    def lr(self) -> float:
        return LR_BY_WIDTH / self.config.d_model

    @property
    def reference(self) -> "TrainingCase":
        """One process with naive attention, in micro-batches whose scores fit."""
        alone = next(row for row in STRATEGIES.values() if not row.trait("synchronizes", True))
        fitting = max(1, MAX_SCORES // (self.config.num_heads * self.context**2))
        micro = max(size for size in range(1, self.batch + 1) if self.batch % size == 0 and size <= fitting)
        plain = replace(self, bucket_mb=None, compile="eager", reproducible=False)
        return replace(plain, attention=ATTENTION["naive"], entry=alone, micro=micro)

    def run_config(self, seed: int) -> RunConfig:
        """The case as the training loop takes it. ValueError for an option that the loop does not have."""
        if isinstance(self.bucket_mb, str):
            raise ValueError("the training loop has no automatic size of buckets: --bucket-mb is to name MiB")
        if self.compile == "fused" and (reason := self.entry.trait("why_not_fused", "")):
            raise ValueError(reason)
        if self.reproducible and (reason := self.entry.trait("why_not_reproducible", "")):
            raise ValueError(reason)
        steps = self.steps * self.epochs
        train = TrainConfig(
            steps=steps,
            batch_size=self.global_batch,
            micro_batch_size=self.micro or self.batch,
            reproducible=self.reproducible,
            lr=self.lr,
            min_lr=LEAST_LR * self.lr,
            warmup_steps=int(WARMUP * steps),
            seed=seed,
            precision=self.precision,
            compile=self.compile in COMPILED,
            fused=self.compile == "fused",
            graph=self.replayed,
            strategy=self.entry.target if ".py:" in self.entry.target else self.entry.name,
            bucket_mb=self.bucket_mb,
        )
        model = replace(self.config, attention=attention_row(self.attention, self.asked).name)
        return RunConfig(model=model, train=train)
