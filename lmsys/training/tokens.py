"""Text files into files of token ids, in parallel: a .npy array that is memory mapped, and a .json that says whose.

With several ranks each makes a shard of its share of the text; the shards in order are what one rank makes alone.
Imports no torch.
"""

import tokenize
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile

import numpy as np

from lmsys.files import replacing, write_json
from lmsys.strict_json import read_json
from lmsys.tokenizer import Tokenizer
from lmsys.tokenizer.chunks import Chunk, no_text, split, whole
from lmsys.tokenizer.pretokens import Pretokenizer
from lmsys.tokenizer.workers import each_chunk
from lmsys.training.corpora import END_OF_TEXT
from lmsys.values import shortened, shortly

# What numpy raises of a file that holds none.
NOT_AN_ARRAY = OSError, ValueError, EOFError, SyntaxError, tokenize.TokenError, OverflowError, TypeError, BadZipFile


def encode_files(tokenizer: Tokenizer, files: Sequence[Path | Chunk], processes: int = 1) -> Iterator[np.ndarray]:
    """The ids of the files' text, one file behind another, in pieces; each process holds a chunk of text at a time.

    ValueError for a file that is absent or not UTF-8.
    """
    return each_chunk(partial(_encode, tokenizer), files, tokenizer.special_tokens, processes)


def _encode(tokenizer: Tokenizer, chunk: Chunk) -> np.ndarray:
    return tokenizer.encode_array(chunk.read())


def tokenize_files(
    tokenizer: Tokenizer,
    files: Sequence[Path | Chunk],
    output: Path,
    *,
    processes: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> Path:
    """Write the ids to `output`, NAME.npy, or as one of several ranks to its shard NAME-00001-of-00004.npy.

    uint16, or uint32 for more than 65,536 tokens. The file appears when it is whole. Returns its path.
    ValueError: no text, a file that is absent or not UTF-8, `rank` outside the world.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"{rank=} must lie in 0 to {world_size - 1}")
    parts = [whole(file) for file in files]
    if not sum(part.size for part in parts):
        raise no_text(parts)
    share = split(parts, Pretokenizer(tokenizer.special_tokens), world_size)[rank]
    path = shards(Path(output), world_size)[rank]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").unlink(missing_ok=True)  # an array without it is of nobody's making
    with replacing(path) as file:
        count = _write_array(file, encode_files(tokenizer, share, processes), tokenizer.dtype)
    facts = {
        "tokens": count,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "end_of_text": end_of_text(tokenizer),
    }
    write_json(path.with_suffix(".json"), facts)
    return path


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The id that ends a document; None: the tokenizer has no special token for it."""
    return tokenizer.encode(END_OF_TEXT)[0] if END_OF_TEXT in tokenizer.special_tokens else None


def read_end_of_text(path: Path) -> int:
    """The id that ends a document in a file of tokens. ValueError where the facts beside the file know none."""
    facts_file = Path(path).with_suffix(".json")
    facts = read_json(facts_file, vocab_size=int) if facts_file.is_file() else {"vocab_size": 0}
    found = facts.get("end_of_text")
    if found is None:
        raise ValueError(
            f"{path}: its documents cannot be told apart, as no end_of_text is named in {facts_file.name}: tokenize the"
            f" text anew, by the step `tokenize` and a tokenizer with the special token {END_OF_TEXT}"
        )
    if type(found) is not int or not 0 <= found < facts["vocab_size"]:
        raise ValueError(
            f"{facts_file}: end_of_text must be an id from 0 to {facts['vocab_size'] - 1}; got {shortly(found)}"
        )
    return found


def shards(output: Path, world_size: int) -> list[Path]:
    """The files that `world_size` ranks write for `output`."""
    if world_size == 1:
        return [output]
    return [output.with_stem(f"{output.stem}-{rank:05}-of-{world_size:05}") for rank in range(world_size)]


def open_tokens(path: Path, tokenizer: Tokenizer | None = None) -> np.ndarray:
    """The ids of one file, memory mapped.

    Signed ids are read once to see that none is less than 0, and an array of other making, with no .json beside it, to
    see that each is in the vocabulary. ValueError for what is no array of ids, is not whole, or is not of `tokenizer`.
    """
    path = Path(path)
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except NOT_AN_ARRAY as error:
        cause = getattr(error, "strerror", None) or error
        raise ValueError(shortened(f"{path}: cannot be read as an array of token ids: {cause}")) from error
    if not isinstance(ids, np.ndarray):
        raise ValueError(f"{path}: must be an array, a .npy; it is an archive of several")
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise ValueError(f"{path}: must be one row of whole numbers; got {ids.dtype} of shape {ids.shape}")
    if ids.size and ids.dtype.kind == "i" and (least := int(ids.min())) < 0:
        raise ValueError(f"{path}: id {least} is less than 0")
    facts_file = path.with_suffix(".json")
    if not facts_file.is_file():
        if ids.size and tokenizer and (largest := int(ids.max())) >= tokenizer.vocab_size:
            raise ValueError(f"{path}: id {largest} is not in this vocabulary of {tokenizer.vocab_size}")
        return ids
    facts = read_json(facts_file, tokens=int, vocab_size=int, tokenizer=str)
    if facts["tokens"] != len(ids):
        raise ValueError(
            shortened(f"{path}: holds {len(ids):,} ids, and {facts_file.name} says {facts['tokens']:,}: make it anew")
        )
    if tokenizer and facts["tokenizer"] != tokenizer.fingerprint:
        raise ValueError(
            shortened(
                f"{path}: was made with another tokenizer, of {facts['vocab_size']:,} tokens; this one has"
                f" {tokenizer.vocab_size:,}: tokenize the text anew"
            )
        )
    return ids


def _write_array(file: BinaryIO, pieces: Iterator[np.ndarray], dtype: np.dtype) -> int:
    """A one-dimensional .npy whose length is known at the end: numpy leaves room in the header for it."""

    def write_header(count: int) -> None:
        file.seek(0)
        layout = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, layout)

    write_header(0)
    start, count = file.tell(), 0
    for ids in pieces:
        file.write(ids.tobytes())
        count += len(ids)
    write_header(count)
    assert file.tell() == start
    return count
