"""The tokens that trainings are measured on: the beginning of a real text, made once a run in a temporary folder."""

import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from lmsys.bench.ranks import Unsupported
from lmsys.tokenizer import Tokenizer, train
from lmsys.tokenizer.chunks import Chunk, chunks
from lmsys.tokenizer.pretokens import Pretokenizer
from lmsys.training.corpora import END_OF_TEXT, stdlib
from lmsys.training.tokens import encode_files

CORPUS = "stdlib"
BYTES_PER_TOKEN = 4  # about; what a tokenizer is trained on has so many for each token
LEAST_BYTES = 500_000


@dataclass(frozen=True)
class Tokens:
    """Files of ids, .npy; they go with this process."""

    train: Path
    valid: Path


@cache
def folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="lmsys-tokens-")


@cache
def tokens_of(train_tokens: int, val_tokens: int, vocab_size: int) -> Tokens:
    """So many ids of the standard library's text, and of what it holds out; the vocabulary is trained on its beginning.

    Unsupported where the text has fewer.
    """
    corpus = stdlib()
    size = max(LEAST_BYTES, BYTES_PER_TOKEN * train_tokens)
    beginning = next(chunks(corpus.train[:1], Pretokenizer([END_OF_TEXT]), size))
    tokenizer = train([beginning], vocab_size, [END_OF_TEXT], len(os.sched_getaffinity(0)))
    place = Path(folder().name) / f"{train_tokens}-{val_tokens}-{vocab_size}"
    place.mkdir(exist_ok=True)
    found = Tokens(place / "train.npy", place / "valid.npy")
    np.save(found.train, _first(tokenizer, corpus.train, train_tokens, "--train-tokens"))
    np.save(found.valid, _first(tokenizer, corpus.valid, val_tokens, "--val-tokens"))
    return found


def _first(tokenizer: Tokenizer, parts: tuple[Chunk, ...], count: int, option: str) -> np.ndarray:
    """`count` ids and the one that follows them."""
    found: list[np.ndarray] = []
    for chunk in chunks(parts, Pretokenizer([END_OF_TEXT]), max(LEAST_BYTES, BYTES_PER_TOKEN * count)):
        found += encode_files(tokenizer, [chunk], 1)
        if sum(map(len, found)) > count:
            return np.concatenate(found)[: count + 1]
    raise Unsupported(f"{option} {count}: must be less than {sum(map(len, found))}, which is all that {CORPUS} has")
