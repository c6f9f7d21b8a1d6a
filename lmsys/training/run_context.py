"""The context of each step of the pipeline: settings, this rank, and the text and the tokenizer that settings name."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lmsys import values
from lmsys.parallel import group
from lmsys.tokenizer import Tokenizer
from lmsys.training import corpora, prepare
from lmsys.training.config import RunConfig

DOWNLOAD_LINES_S = 5.0  # between lines on a download


@dataclass(frozen=True)
class RunContext:
    """The settings and the rank of a step of the pipeline, and where it reads and writes."""

    config: RunConfig
    rank: int
    world_size: int

    @property
    def checkpoints(self) -> Path:
        return self.config.folder / "checkpoints"

    @property
    def processes(self) -> int:
        """How many processes this rank may tokenize in."""
        return self.config.data.processes or max(
            1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        )

    @property
    def device(self) -> torch.device:
        """This rank's device. ValueError for a setting that names none of this machine."""
        if torch.distributed.is_initialized():
            return group.device()
        name = self.config.train.device or ("cuda" if torch.cuda.is_available() else "cpu")
        known = name == "cpu" or (name == "cuda" and torch.cuda.is_available())
        values.hold((known, f"train.device={name!r} must be cpu, or cuda where there is a CUDA device"))
        return torch.device(name)

    @property
    def autocast(self) -> Callable[[], torch.autocast]:
        """Makes the context of a forward, as in training: an attention row may take no other dtype."""
        return partial(prepare.autocast, self.config.train.precision, self.device.type)

    def say(self, text: str) -> None:
        """Prints a line on rank 0, with escapes for characters that the terminal does not have."""
        if self.rank == 0:
            encoding = sys.stdout.encoding or "utf-8"
            print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)

    def wait(self) -> None:
        """Waits until all ranks have come here."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def corpus(self) -> corpora.Corpus:
        """The text that the settings name, made or downloaded where it is missing, with lines on the progress."""
        last_line_s = time.monotonic()

        def tell(what: str, done: int, total: int) -> None:
            nonlocal last_line_s
            if time.monotonic() - last_line_s >= DOWNLOAD_LINES_S or done == total:
                last_line_s = time.monotonic()
                self.say(f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

        return corpora.corpus_of(self.config.data, tell)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that data.tokenizer names, or the run's own. ValueError where it is missing or too large."""
        folder = Path(self.config.data.tokenizer or self.config.folder / "tokenizer")
        values.hold(
            (folder.is_dir(), f"{folder}: there is no tokenizer; make one by the step `tokenizer`, without --skip-data")
        )
        tokenizer = Tokenizer.load(folder, [corpora.END_OF_TEXT] if self.config.data.tokenizer else [])
        size, most = tokenizer.vocab_size, self.config.model.vocab_size
        values.hold((size <= most, f"{folder}: has {size:,} tokens, more than model.vocab_size={most:,}"))
        return tokenizer
