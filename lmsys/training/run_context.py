"""`RunContext`, which the steps of `lmsys train` share: the settings, this rank, and the run's text and tokenizer.

A step is here a step of the command: tokenizer, tokenize, train, evaluate or generate. It is a function in pipeline.py.
`pipeline.run` makes a `RunContext` on each rank and hands it to every step. Add here what several steps need.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from lmsys import values
from lmsys.parallel import group
from lmsys.tokenizer import Tokenizer
from lmsys.training import corpora, prepare
from lmsys.training.config import RunConfig

DOWNLOAD_LINES_S = 5.0  # seconds between two lines on the progress of a download


@dataclass(frozen=True)
class RunContext:
    """The settings of a run and this process's rank among `world_size`, and what steps derive from them.

    anew  True: the steps `tokenizer` and `tokenize` make their result anew even if it exists
    """

    config: RunConfig
    rank: int
    world_size: int
    anew: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.config.folder / "checkpoints"

    @property
    def processes(self) -> int:
        """The number of processes that this rank may tokenize in.

        It is data.processes, or, if that is not set, this machine's cores divided among its ranks.
        """
        return self.config.data.processes or max(
            1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        )

    @property
    def device(self) -> torch.device:
        """This rank's device. ValueError where train.device names a device that this machine lacks."""
        name = self.config.train.device or ("cuda" if torch.cuda.is_available() else "cpu")
        values.hold(
            (
                name == "cpu" or (name == "cuda" and torch.cuda.is_available()),
                f"train.device={name!r} must be cpu, or cuda where there is a CUDA device",
            )
        )
        return group.device() if torch.distributed.is_initialized() else torch.device(name)

    @property
    def autocast(self) -> Callable[[], torch.autocast]:
        """A function that makes the autocast context of a forward in the run's precision.

        The steps `evaluate` and `generate` run the forward under training's autocast, too: without it the attention row
        may not support the dtype.
        """
        return partial(prepare.autocast, self.config.train.precision, self.device.type)

    @cached_property
    def prompt(self) -> list[int]:
        """The ids of generate.prompt, or of END_OF_TEXT where it is empty.

        ValueError where it is longer than the model's context.
        """
        prompt, most = self.config.generate.prompt, self.config.model.context_length
        ids = self.tokenizer.encode(prompt or corpora.END_OF_TEXT)
        values.hold(
            (
                len(ids) <= most,
                f"generate.prompt={values.shortly(prompt)} is {len(ids):,} tokens; model.context_length is {most:,}",
            )
        )
        return ids

    def say(self, text: str) -> None:
        """Prints a line on rank 0, with escapes for characters that the terminal does not have.

        Where nobody reads on, as behind `lmsys train | head`, the run ends as by SIGTERM: training saves a checkpoint.
        """
        if self.rank == 0:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # stdout is None where it is closed
            try:
                print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                signal.raise_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Waits until all ranks have called this method."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def corpus(self) -> corpora.Corpus:
        """The text that the settings name, made or downloaded where it is missing; a download prints its progress."""
        last_line_s = time.monotonic()

        def tell(what: str, done: int, total: int) -> None:
            nonlocal last_line_s
            if time.monotonic() - last_line_s >= DOWNLOAD_LINES_S or done == total:
                last_line_s = time.monotonic()
                self.say(f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

        return corpora.corpus_of(self.config.data, tell)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder data.tokenizer, or the run's own.

        ValueError where it is missing, or has more tokens than the model (model.vocab_size).
        """
        folder = Path(self.config.data.tokenizer or self.config.folder / "tokenizer")
        values.hold(
            (folder.is_dir(), f"{folder}: there is no tokenizer; make one by the step `tokenizer`, without --skip-data")
        )
        # The run's own tokenizer was made with the token that ends a document; a given one may lack it.
        tokenizer = Tokenizer.load(folder, [corpora.END_OF_TEXT] if self.config.data.tokenizer else [])
        size, most = tokenizer.vocab_size, self.config.model.vocab_size
        values.hold((size <= most, f"{folder}: has {size:,} tokens, more than model.vocab_size={most:,}"))
        return tokenizer
