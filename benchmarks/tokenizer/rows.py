"""The work of each tokenizer, as its users would have it done: `bench_tokenizer.py` times these calls.

`python -m benchmarks.tokenizer.rows TASK CLASS PROCESSES TEXT FOLDER VOCAB_SIZE` does a task once, in a process of its
own, with nothing else loaded: that is how its memory is measured. Imports no torch.
"""

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lmsys.registry import load_target
from lmsys.tokenizer import Tokenizer, codec, pretokens, train
from lmsys.training import corpora, data

Call = Callable[[], Any]


class Ours:
    """Reads the file, and starts its processes, within what is timed; the others have the documents in memory."""

    @staticmethod
    def trainer(text: Path, vocab_size: int, processes: int) -> Call:
        """A function that trains once."""
        return lambda: train([text], vocab_size, [corpora.END_OF_TEXT], processes)

    @staticmethod
    def encoder(text: Path, tokenizer: Tokenizer, processes: int) -> Call:
        """A function that encodes the text with an empty cache of words. `ids_by_document` reads its result."""
        new = Tokenizer(tokenizer.vocab, tokenizer.merges, tokenizer.special_tokens)
        return lambda: list(data.encode_files(new, [text], processes))


class Tiktoken:
    """OpenAI's, which encodes and does not train; it has threads for processes."""

    @staticmethod
    def encoder(text: Path, tokenizer: Tokenizer, processes: int) -> Call:
        import tiktoken

        specials = {token: tokenizer.encode(token)[0] for token in tokenizer.special_tokens}
        ranks = {token: number for number, token in tokenizer.vocab.items() if number not in specials.values()}
        theirs = tiktoken.Encoding("own", pat_str=pretokens.PATTERN, mergeable_ranks=ranks, special_tokens=specials)
        documents = documents_of(text)
        return lambda: theirs.encode_ordinary_batch(documents, num_threads=processes)


class HuggingFace:
    """Hugging Face's tokenizers; it has threads for processes, as many at every call as at the first."""

    @staticmethod
    def trainer(text: Path, vocab_size: int, processes: int) -> Call:
        documents = documents_of(text)

        def train_once() -> int:
            tokenizers, pre_tokenizer = _huggingface(processes)
            learner = tokenizers.Tokenizer(tokenizers.models.BPE())
            learner.pre_tokenizer = pre_tokenizer
            trainer = tokenizers.trainers.BpeTrainer(
                initial_alphabet=pre_tokenizer.alphabet(),
                show_progress=False,
                vocab_size=vocab_size,
                special_tokens=[corpora.END_OF_TEXT],
            )
            learner.train_from_iterator(documents, trainer)
            return int(learner.get_vocab_size())

        return train_once

    @staticmethod
    def encoder(text: Path, tokenizer: Tokenizer, processes: int) -> Call:
        tokenizers, pre_tokenizer = _huggingface(processes)
        vocab = {codec.as_written(token): number for number, token in tokenizer.vocab.items()}
        merges = [(codec.as_written(left), codec.as_written(right)) for left, right in tokenizer.merges]
        theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
        theirs.pre_tokenizer = pre_tokenizer
        documents = documents_of(text)
        return lambda: theirs.encode_batch_fast(documents)


def _huggingface(threads: int) -> tuple[Any, Any]:
    """The package, and the rule by which it cuts text into words."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # read when it first works
    import tokenizers

    return tokenizers, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)


def call_of(row: Any, task: str, text: Path, wanted: int | Tokenizer, processes: int) -> Call:
    """The call by which a row trains a vocabulary of this size, or encodes with this tokenizer."""
    return getattr(row, {"train": "trainer", "encode": "encoder"}[task])(text, wanted, processes)


def documents_of(text: Path) -> list[str]:
    return text.read_text(encoding="utf-8").split(corpora.END_OF_TEXT)


def ids_by_document(result: list[Any], end_of_text: int) -> list[Any]:
    """The ids of each document. Some rows encode each alone; in the chunks of others ends of text divide them."""
    if not (result and isinstance(result[0], np.ndarray)):
        return [getattr(encoding, "ids", encoding) for encoding in result]
    ids = np.concatenate(result)
    ends = [-1] + np.flatnonzero(ids == end_of_text).tolist() + [len(ids)]
    return [ids[start + 1 : stop] for start, stop in pairwise(ends)]


def tiktoken_supports(case: Any) -> str | None:
    if case.task == "train":
        return "tiktoken does not train"
    import tiktoken  # noqa: F401

    return None


def huggingface_supports(case: Any) -> None:
    import tokenizers  # noqa: F401


def main(task: str, target: str, processes: str, text: str, folder: str, vocab_size: str) -> None:
    asked = int(vocab_size) if task == "train" else Tokenizer.load(Path(folder))
    call_of(load_target(target), task, Path(text), asked, int(processes))()


if __name__ == "__main__":
    main(*sys.argv[1:])
