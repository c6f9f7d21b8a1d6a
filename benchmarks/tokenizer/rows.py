"""The calls that `bench_tokenizer.py` times: training and encoding by each tokenizer, as its users would do it.

A row is a tokenizer to compare: the class `Ours`, or a class of `lmsys.tokenizer.engines`, which calls another package.
All rows encode; rows with a function in TRAINERS train, too. `call_of` makes the function that is timed,
`ids_by_document` reads what an encoding returned, and `supports` says if the row of another package can do a task. A
new row is a class in `engines.py` and a row of TOKENIZERS in `bench_tokenizer.py`; if it trains, also an item of
TRAINERS.

`python -m benchmarks.tokenizer.rows TASK CLASS PROCESSES TEXT FOLDER VOCAB_SIZE` does a task ("train" or "encode")
once. `bench_tokenizer.py` starts this command to measure memory, in a process with nothing else loaded; so this module
does not import torch.
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
    """Our tokenizer.

    Its time includes reading the file and starting processes; other rows get the documents in memory.
    """

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
    """A function that encodes the text by another package, with an empty cache; it returns (engine, result).

    row  the class of `lmsys.tokenizer.engines` that calls the package
    """
    engine, documents = row(tokenizer, threads), documents_of(text)
    return lambda: (engine, engine.encode(documents))


def huggingface_trainer(text: Path, vocab_size: int, threads: int) -> Call:
    """A function that trains a tokenizer by Hugging Face's `tokenizers`.

    The first call in a process sets the number of threads for all later calls: Rayon, which the package uses, reads
    RAYON_NUM_THREADS once. A value that the user has set stays.
    """
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
    """The call of a row that does `task`, "train" or "encode".

    wanted     the size of the vocabulary to train, or our tokenizer, whose vocabulary and merges the row encodes with
    processes  how many processes or threads the row uses
    """
    if task == "train":
        return TRAINERS[row](text, wanted, processes)
    return (row.encoder if row is Ours else partial(engine_encoder, row))(text, wanted, processes)


def documents_of(text: Path) -> list[str]:
    """The documents of a text file: the token END_OF_TEXT stands between them."""
    return text.read_text(encoding="utf-8").split(corpora.END_OF_TEXT)


def ids_by_document(result: Any, end_of_text: int) -> list[Any]:
    """The ids of each document, from the result of a call that encodes.

    Packages encode documents one by one. `Ours` encodes the whole file, in which END_OF_TEXT stands between documents.

    end_of_text  the id of END_OF_TEXT
    """
    if isinstance(result, tuple):  # the call was made by `engine_encoder`
        engine, encoded = result
        ids, lengths = engine.flat(encoded)
        return np.split(ids, np.cumsum(lengths)[:-1])
    ids = np.concatenate(result)
    ends = [-1] + np.flatnonzero(ids == end_of_text).tolist() + [len(ids)]
    return [ids[start + 1 : stop] for start, stop in pairwise(ends)]


def supports(case: Any) -> str | None:
    """The reason why the row of a `TokenizerCase` cannot do its task, or None; ImportError without its package."""
    row = case.entry.load()
    if case.task == "train" and row not in TRAINERS:
        return f"{row.package} does not train"
    row.imported()
    return None


def main(task: str, target: str, processes: str, text: str, folder: str, vocab_size: str) -> None:
    """Does a task once, for the command in the module's docstring.

    folder  has our trained tokenizer; only the task "encode" reads it
    """
    asked = int(vocab_size) if task == "train" else Tokenizer.load(Path(folder))
    call_of(load_target(target), task, Path(text), asked, int(processes))()


# As a script this file is the module `__main__`, and its class `Ours` is not the one of `benchmarks.tokenizer.rows`,
# which `load_target` finds. So the `main` of the imported module is called.
if __name__ == "__main__":
    load_target("benchmarks.tokenizer.rows:main")(*sys.argv[1:])
