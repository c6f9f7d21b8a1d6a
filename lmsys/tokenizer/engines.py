"""Adapters for tokenizer packages that encode with our vocabulary and merges, and `choose`, which compares their ids.

An engine is such an adapter; "ours" means the `Tokenizer` of codec.py. The benchmark of tokenizers times the engines.
The training pipeline calls `choose`, and `lmsys.training.data` encodes files with the engine that `choose` returns. For
a new package add a class here and to ENGINES, its name to `lmsys.training.config.ENGINES`, and if it is faster than
ours, to FASTER.
"""

import json
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module, metadata
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lmsys import commands, values
from lmsys.tokenizer import chunks, codec, pretokens

# PIECE: bytes of a piece of text. `choose` compares the ids of the first FIRST pieces and of DRAWN random others.
PIECE, FIRST, DRAWN = 1 << 16, 16, 16


class Engine:
    """A package's tokenizer with the vocabulary and the merges of one of ours. It gets texts without special tokens.

    A subclass sets `package`, and either `reader` and `batch` or a `_function` of its own. It overrides `flat` if the
    package does not give one list of ids for each text.

    package   the module to import
    needs     other modules without which the package gives results of another form
    reader    the method of the module's class Tokenizer that makes a tokenizer from the text of a tokenizer.json
    batch     the fastest method of that tokenizer that encodes a list of texts
    threads   the number of threads that the engine may use. All packages but tiktoken use Rayon, which has one such
              number for a process: RAYON_NUM_THREADS if that is set, else `threads` of the first engine that is made
    encode    the function that encodes a list of texts; `flat` reads its results
    name      package and version; `choose` adds on how many bytes the ids were compared

    The constructor raises ImportError if one of the modules is missing. It passes on what the package raises for a
    vocabulary that it does not take.
    """

    package, reader, batch = "", "", ""
    needs: tuple[str, ...] = ()

    def __init__(self, tokenizer: codec.Tokenizer, threads: int = 1):
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
        self.tokenizer, self.threads = tokenizer, threads
        self._pretokenizer = pretokens.Pretokenizer(tokenizer.special_tokens)
        self.encode = self._function(self.imported())
        self.name = f"{self.package} {metadata.version(self.package)}"

    @classmethod
    def imported(cls) -> Any:
        """The module `package`. ImportError where it, or one of `needs`, is missing."""
        module = import_module(cls.package)
        for name in cls.needs:
            import_module(name)
        return module

    def _function(self, module: Any) -> Callable[[list[str]], Any]:
        """The package's function that encodes a list of texts with our vocabulary and merges."""
        return getattr(getattr(module.Tokenizer, self.reader)(as_json(self.tokenizer)), self.batch)

    def flat(self, encoded: Any) -> tuple[np.ndarray, np.ndarray]:
        """(the ids of all texts, the number of ids of each text), from a result of `encode`."""
        lists = [getattr(encoding, "ids", encoding) for encoding in encoded]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return np.fromiter(chain.from_iterable(lists), np.uint32, lengths.sum()), lengths

    def encode_array(self, text: bytes) -> np.ndarray:
        """The ids of UTF-8 text, as `Tokenizer.encode_array` gives them. Our tokenizer finds the special tokens."""
        pieces = self._pretokenizer.divide(text)  # a text, a special token, a text, and so on; the last is a text
        ids, lengths = self.flat(self.encode([piece.decode() for piece in pieces[::2]]))
        specials = [self.tokenizer.special_ids[special] for special in pieces[1::2]]
        return np.insert(ids, np.cumsum(lengths)[:-1], specials).astype(self.tokenizer.dtype)

    def hold_to_ours(self, piece: chunks.Chunk) -> None:
        """ValueError, with the file and the byte, where the ids of a piece differ from ours. `choose` calls it."""
        text = piece.read()
        ours, theirs = self.tokenizer.encode_array(text), self.encode_array(text)
        if not np.array_equal(ours, theirs):
            shorter = min(len(ours), len(theirs))
            place = int(np.append(ours[:shorter] != theirs[:shorter], True).argmax())  # of the first id that differs
            start = len(self.tokenizer.decode_bytes(ours[:place].tolist()))
            raise ValueError(
                f"{self.name} has other ids than this library from byte {piece.start + start:,} of {piece.path} on,"
                f" {text[start : start + 20]!r}: {theirs[place : place + 3]} in place of {ours[place : place + 3]}"
            )


class Tiktoken(Engine):
    """OpenAI's tiktoken. It reads no merges: it joins neighbours that together are a token, the smallest id first."""

    package = "tiktoken"

    def _function(self, module: Any) -> Callable[[list[str]], Any]:
        ranks = {token: id_ for id_, token in self.tokenizer.vocab.items() if token not in self.tokenizer.special_ids}
        theirs = module.Encoding("own", pat_str=pretokens.PATTERN, mergeable_ranks=ranks, special_tokens={})
        return partial(theirs.encode_ordinary_batch, num_threads=self.threads)


class HuggingFace(Engine):
    """Hugging Face's tokenizers."""

    package, reader, batch = "tokenizers", "from_str", "encode_batch_fast"


class Gigatoken(Engine):
    """Gigatoken, whose ids are one array."""

    package, reader, batch = "gigatoken", "from_json", "encode_batch"
    needs = ("awkward",)  # without it results are lists, which take longer

    def flat(self, encoded: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(encoded.layout.content.data), np.diff(encoded.layout.offsets.data)


class Fastokens(Engine):
    """Crusoe's fastokens, whose ids are one string of bytes."""

    package, reader, batch = "fastokens", "from_json_str", "encode_batch_flat"

    def flat(self, encoded: Any) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = encoded
        return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(offsets, np.int64))


def as_json(tokenizer: codec.Tokenizer) -> str:
    """The vocabulary and the merges as Hugging Face's tokenizer.json, without special tokens."""
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "vocab": {codec.as_written(token): number for number, token in tokenizer.vocab.items()},
        "merges": [" ".join(map(codec.as_written, merge)) for merge in tokenizer.merges],
    }
    return json.dumps({"added_tokens": [], "pre_tokenizer": split, "model": model})


ENGINES: dict[str, type[Engine]] = {kind.package: kind for kind in (Gigatoken, Fastokens, Tiktoken, HuggingFace)}
FASTER = ("gigatoken", "fastokens")  # engines faster than ours, the fastest first: docs/training.md has the figures


def choose(
    name: str,
    tokenizer: codec.Tokenizer,
    parts: Sequence[str | Path | chunks.Chunk],
    threads: int = 1,
    say: Callable[[str], None] = print,
) -> Engine | None:
    """Returns the engine of this name, after a comparison of its ids with ours; None: our own tokenizer encodes.

    name     "own": ours; a name of ENGINES; or "auto": the first of FASTER that is installed and has our ids, else ours
    parts    files or chunks: the text that will be encoded, of which pieces are compared
    threads  the number of threads that the engine may use
    say      is called with a line for each engine that "auto" passes over

    The first FIRST pieces of the text, and DRAWN others that a fixed seed draws, are compared, of PIECE bytes each. A
    text that has no more pieces is compared whole, which proves that the ids are equal. For a longer text there is no
    proof: an engine whose ids differ only in pieces that were not compared is accepted.

    ValueError for an unknown name, and for a named engine that is missing or has other ids: with the file and the byte.
    """
    values.one_of("engine", name, ("own", "auto", *ENGINES))
    pieces = (
        list(chunks.chunks(map(chunks.whole, parts), pretokens.Pretokenizer(tokenizer.special_tokens), PIECE))
        if name != "own"
        else []
    )
    others = pieces[FIRST:]
    compared = pieces[:FIRST] + random.Random(0).sample(others, min(DRAWN, len(others)))
    for candidate in {"own": (), "auto": FASTER}.get(name, (name,)):  # "own" tries no engine
        try:
            engine = ENGINES[candidate](tokenizer, threads)
            for piece in compared:
                engine.hold_to_ours(piece)
            part, whole = sum(piece.size for piece in compared), sum(piece.size for piece in pieces)
            engine.name += f", its ids compared with ours on {part:,} of {whole:,} bytes"
            return engine
        except Exception as error:  # a package may refuse a vocabulary by any kind of error
            advice = f"; {commands.PIP} {candidate} brings it" if isinstance(error, ImportError) else ""
            # An engine that was asked for by its name must work: only "auto" passes it over.
            values.hold((name == "auto", f"engine={name!r}: {error}{advice}"))
            say(f"{candidate} is not used: {error}{advice}")
    return None
