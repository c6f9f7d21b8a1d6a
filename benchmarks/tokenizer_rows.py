"""The rows of the tokenizer's benchmark: this library, and the tokenizers that a user would take instead.

`python -m benchmarks.tokenizer_rows TASK ROW PROCESSES TEXT FOLDER` does a row's task once, in a process of its own,
with nothing else loaded: that is how its memory is measured. Imports no torch.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lmsys.tokenizer import Tokenizer, train
from lmsys.tokenizer.pretokens import PATTERN
from lmsys.training.corpora import END_OF_TEXT
from lmsys.training.tokens import encode_files

LABELS = {
    "lmsys": "this library",
    "lmsys_serial": "this library, one process",
    "tiktoken": "tiktoken",
    "huggingface": "Hugging Face tokenizers",
}
PACKAGES = {"tiktoken": "tiktoken", "huggingface": "tokenizers"}
Encoded = np.ndarray


def why_not(task: str, row: str) -> str | None:
    """None, or why the row cannot do the task."""
    if row == "tiktoken" and task == "train":
        return "tiktoken does not train"
    package = PACKAGES.get(row)
    if package and importlib.util.find_spec(package) is None:
        return f"{package} is not installed: pip install {package}"
    return None


def trainer(row: str, processes: int, vocab_size: int, text: Path) -> Callable[[], int]:
    """A function that trains once; it returns the size of the vocabulary."""
    if row == "huggingface":
        documents = text.read_text(encoding="utf-8").split(END_OF_TEXT)
        return lambda: _train_huggingface(documents, vocab_size, processes)
    return lambda: train([text], vocab_size, [END_OF_TEXT], 1 if row == "lmsys_serial" else processes).vocab_size


def encoder(row: str, processes: int, tokenizer: Tokenizer, text: Path) -> Callable[[], Any]:
    """A function that encodes the text once, from a start at which no word is known; `ids_of` makes ids of its result.

    Ours reads the file, and starts its processes, within the function; the others have the documents in memory.
    """
    if row in ("lmsys", "lmsys_serial"):
        new = Tokenizer(tokenizer.vocab, tokenizer.merges, tokenizer.special_tokens)
        return lambda: list(encode_files(new, [text], 1 if row == "lmsys_serial" else processes))
    documents = text.read_text(encoding="utf-8").split(END_OF_TEXT)
    if row == "huggingface":
        theirs = _huggingface(tokenizer, processes)
        return lambda: theirs.encode_batch_fast(documents)
    encoding = _tiktoken(tokenizer)
    return lambda: encoding.encode_ordinary_batch(documents, num_threads=processes)


def ids_of(result: list[Any], end_of_text: int) -> Encoded:
    """One row of ids; between the documents of a row that was given them apart, the token that was there."""
    if result and isinstance(result[0], np.ndarray):
        return np.concatenate(result).astype(np.int64)
    documents = [one if isinstance(one, list) else one.ids for one in result]
    joined = list(chain.from_iterable((*one, end_of_text) for one in documents))
    return np.array(joined[:-1], np.int64)


def _train_huggingface(documents: list[str], vocab_size: int, threads: int) -> int:
    tokenizers = _import_tokenizers(threads)
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = byte_level(add_prefix_space=False)
    options = {"special_tokens": [END_OF_TEXT], "initial_alphabet": byte_level.alphabet(), "show_progress": False}
    learner.train_from_iterator(documents, tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return int(learner.get_vocab_size())


def _huggingface(tokenizer: Tokenizer, threads: int) -> Any:
    from lmsys.tokenizer.files import as_written

    tokenizers = _import_tokenizers(threads)
    vocab = {as_written(token): number for number, token in tokenizer.vocab.items()}
    merges = [(as_written(left), as_written(right)) for left, right in tokenizer.merges]
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return found


def _import_tokenizers(threads: int) -> Any:
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # read when it first works
    import tokenizers

    return tokenizers


def _tiktoken(tokenizer: Tokenizer) -> Any:
    import tiktoken

    specials = {token: tokenizer.encode(token)[0] for token in tokenizer.special_tokens}
    ranks = {token: number for number, token in tokenizer.vocab.items() if number not in specials.values()}
    return tiktoken.Encoding("own", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def main(task: str, row: str, processes: str, text: str, folder: str, vocab_size: str) -> None:
    if task == "train":
        trainer(row, int(processes), int(vocab_size), Path(text))()
    else:
        encoder(row, int(processes), Tokenizer.load(Path(folder)), Path(text))()


if __name__ == "__main__":
    main(*sys.argv[1:])
