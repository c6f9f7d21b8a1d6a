"""Training and encoding by each tokenizer, as its users would do it. `bench_tokenizer.py` times these calls.

A row is the class `Ours`, or a class of `lmsys.tokenizer.engines`, which calls another package. All rows encode; those
with a function in TRAINERS train, too. `call_of` makes the function that is timed, `ids_by_document` reads what an
encoding returned, and `supports` says if the row of another package can do a task.

`python -m benchmarks.tokenizer.rows TASK CLASS PROCESSES TEXT FOLDER VOCAB_SIZE` does a task once, in a process with
nothing else loaded, so that its memory can be measured. This module does not import torch.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lmsys.registry import load_target
from lmsys.tokenizer import Tokenizer, engines, train
from lmsys.training import corpora, data

Call = Callable[[], Any]  # does a task once: what is timed


class Ours:
    """Our tokenizer. Reading the file and starting processes is timed, too; other rows have the documents in memory."""

    @staticmethod
    def trainer(text: Path, vocab_size: int, processes: int) -> Call:
        """A function that trains a tokenizer."""
        return lambda: train([text], vocab_size, [corpora.END_OF_TEXT], processes)

    @staticmethod
    def encoder(text: Path, tokenizer: Tokenizer, processes: int) -> Call:
        """A function that encodes the text with an empty cache of words. `ids_by_document` reads its result."""
        new = Tokenizer(tokenizer.vocab, tokenizer.merges, tokenizer.special_tokens)
        return lambda: list(data.encode_files(new, [text], processes))


def engine_encoder(row: type[engines.Engine], text: Path, tokenizer: Tokenizer, threads: int) -> Call:
    """A function as `Ours.encoder` makes it, by a package: it returns (engine, result). The engine's cache is empty."""
    engine, documents = row(tokenizer, threads), documents_of(text)
    return lambda: (engine, engine.encode(documents))


def huggingface_trainer(text: Path, vocab_size: int, threads: int) -> Call:
    """A function as `Ours.trainer` makes it. The first call in a process sets the number of threads of all calls."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    documents = documents_of(text)

    def train_once() -> int:
        import tokenizers

        learner = tokenizers.Tokenizer(tokenizers.models.BPE())
        learner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            initial_alphabet=learner.pre_tokenizer.alphabet(),
            show_progress=False,
            vocab_size=vocab_size,
            special_tokens=[corpora.END_OF_TEXT],
        )
        learner.train_from_iterator(documents, trainer)
        return int(learner.get_vocab_size())

    return train_once


TRAINERS = {Ours: Ours.trainer, engines.HuggingFace: huggingface_trainer}


def call_of(row: Any, task: str, text: Path, wanted: Any, processes: int) -> Call:
    """The call of a row. wanted: the size of the vocabulary to train, or the tokenizer to encode with."""
    if task == "train":
        return TRAINERS[row](text, wanted, processes)
    return (row.encoder if row is Ours else partial(engine_encoder, row))(text, wanted, processes)


def documents_of(text: Path) -> list[str]:
    """The documents of a text file, which END_OF_TEXT divides."""
    return text.read_text(encoding="utf-8").split(corpora.END_OF_TEXT)


def ids_by_document(result: Any, end_of_text: int) -> list[Any]:
    """The ids of each document, from what a function for encoding has returned. `end_of_text`: the id of END_OF_TEXT.

    Packages encode documents one by one. `Ours` encodes the file, so the id `end_of_text` divides the documents.
    """
    if isinstance(result, tuple):  # of `engine_encoder`
        engine, encoded = result
        ids, lengths = engine.flat(encoded)
        return np.split(ids, np.cumsum(lengths)[:-1])
    ids = np.concatenate(result)
    ends = [-1] + np.flatnonzero(ids == end_of_text).tolist() + [len(ids)]
    return [ids[start + 1 : stop] for start, stop in pairwise(ends)]


def supports(case: Any) -> str | None:
    """None, or why the row of a `TokenizerCase` does not do its task. ImportError if its package is missing."""
    row = case.entry.load()
    if case.task == "train" and row not in TRAINERS:
        return f"{row.package} does not train"
    row.imported()
    return None


def main(task: str, target: str, processes: str, text: str, folder: str, vocab_size: str) -> None:
    """Does a task once, for the command above. `folder` has our trained tokenizer, which `encode` needs."""
    asked = int(vocab_size) if task == "train" else Tokenizer.load(Path(folder))
    call_of(load_target(target), task, Path(text), asked, int(processes))()


if __name__ == "__main__":  # calls `main` of the imported module, since TRAINERS has the class `Ours` of that module
    load_target("benchmarks.tokenizer.rows:main")(*sys.argv[1:])
