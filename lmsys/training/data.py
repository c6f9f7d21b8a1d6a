"""Makes files of token ids from text files, and batches from files of token ids.

The pipeline calls `tokenize_files`, which writes ids as a .npy array and beside it a .json about their tokenizer;
`open_tokens` and `read_end_of_text` read this .json, so its entries are changed in all three. With several ranks each
writes a shard for its share of the text, in parallel; the shards, one after another, equal what one rank writes alone.
`TokenFiles` reads ids from such files. `Batches` makes of these ids the inputs and targets of a training step: they
depend on the step's number alone, so there is no state to save. `fixed_windows` gives the sequences to evaluate on.

Imports no torch: batches are numpy arrays, which `torch.from_numpy` takes as they are.
Legend: B sequences of a micro-batch, S context length, N windows of a source. A window is S + 1 ids: a sequence's
inputs, and its targets, which are the inputs moved on by one.
"""

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from lmsys import config, strict_json, values
from lmsys.files import replacing, write_json
from lmsys.tokenizer import Tokenizer, chunks, engines, pretokens
from lmsys.training.corpora import END_OF_TEXT


def encode_files(
    tokenizer: Tokenizer,
    files: Sequence[Path | chunks.Chunk],
    processes: int = 1,
    engine: engines.Engine | None = None,
) -> Iterator[np.ndarray]:
    """The ids of the files' text, one file after another, in arrays; each process holds one chunk of text at a time.

    engine  encodes in the place of `tokenizer`, in this process and in threads of its own, see `engines.choose`
    ValueError for a file that is absent or not UTF-8, and for an engine of another tokenizer.
    """
    values.instance("engine", engine, engines.Engine | None)
    values.hold(
        (
            engine is None or engine.tokenizer.fingerprint == tokenizer.fingerprint,
            "engine must have been made for the tokenizer that is given",
        )
    )
    # An engine has threads of its own, so it runs in this process.
    encode, processes = partial(_encode, engine or tokenizer), 1 if engine else processes
    return chunks.each_chunk(encode, files, tokenizer.special_tokens, processes)


def _encode(encoder: Tokenizer | engines.Engine, chunk: chunks.Chunk) -> np.ndarray:
    return encoder.encode_array(chunk.read())


def tokenize_files(
    tokenizer: Tokenizer,
    files: Sequence[Path | chunks.Chunk],
    output: Path,
    *,
    processes: int = 1,
    engine: engines.Engine | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Path:
    """Writes the ids to `output`, NAME.npy, or as one of several ranks to its shard NAME-00001-of-00004.npy.

    Ids are uint16, or uint32 for a vocabulary of more than 65,536. The file appears when it is complete. Returns its
    path.

    processes         as in `encode_files`
    engine            as in `encode_files`; the .json names it
    rank, world_size  of the calling rank; each rank calls this function for its own shard
    ValueError: no text, a file that is absent or not UTF-8, an engine of another tokenizer, a rank outside of 0 to
    world_size - 1.
    """
    values.whole("rank", rank, least=0, most=values.whole("world_size", world_size, least=1) - 1)
    parts = [chunks.whole(file) for file in values.several("files", files)]
    pretokenizer = pretokens.Pretokenizer(values.instance("tokenizer", tokenizer, Tokenizer).special_tokens)
    share = chunks.split(parts, pretokenizer, world_size)[rank]
    path = shards(values.path("output", output), world_size)[rank]
    written = {file.resolve() for file in (path, path.with_suffix(".json"))}
    values.hold(
        (sum(part.size for part in parts), chunks.no_text(parts)),
        (
            len(written) == 2 and written.isdisjoint(part.path.resolve() for part in parts),
            f"output={str(output)!r} must be another NAME.npy: ids are written there and facts about them"
            f" to {path.with_suffix('.json').name}, over a text that is to be read, or over the ids",
        ),
    )
    ids = encode_files(tokenizer, share, processes, engine)
    path.with_suffix(".json").unlink(missing_ok=True)  # until the new array is whole, nothing may describe it
    with replacing(path) as file:
        count = _write_array(file, ids, tokenizer.dtype)
    write_json(
        path.with_suffix(".json"),
        {
            "tokens": count,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.fingerprint,
            "end_of_text": end_of_text(tokenizer),
            "engine": engine.name if engine else "own",
        },
    )
    return path


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The id that ends a document; None where the tokenizer has no special token for it."""
    has_end = END_OF_TEXT in values.instance("tokenizer", tokenizer, Tokenizer).special_tokens
    return tokenizer.encode(END_OF_TEXT)[0] if has_end else None


def read_end_of_text(path: Path) -> int:
    """The id that ends a document in a file of ids. ValueError where the .json beside the file names none."""
    facts_file = values.path("path", path).with_suffix(".json")
    facts = strict_json.read_json(facts_file, vocab_size=int) if facts_file.is_file() else {"vocab_size": 0}
    number: Any = facts.get("end_of_text")
    values.hold(
        (
            number is not None,
            f"{path}: its documents cannot be told apart, as no end_of_text is named in {facts_file.name}: tokenize the"
            f" text anew, by the step `tokenize` and a tokenizer with the special token {END_OF_TEXT}",
        ),
        (
            type(number) is int and 0 <= number < facts["vocab_size"],
            f"{facts_file}: end_of_text must be an id from 0 to {facts['vocab_size'] - 1};"
            f" got {values.shortly(number)}",
        ),
    )
    return number


def shards(output: Path, world_size: int) -> list[Path]:
    """The files that world_size ranks write for `output`, by rank."""
    ranks = range(values.whole("world_size", world_size, least=1))
    return (
        [output] if world_size == 1 else [output.with_stem(f"{output.stem}-{x:05}-of-{world_size:05}") for x in ranks]
    )


def open_tokens(path: Path, tokenizer: Tokenizer | None = None) -> np.ndarray:
    """The ids of one file, memory mapped.

    ValueError for a file that is no array of ids, that is not complete, or whose ids another tokenizer than `tokenizer`
    made. All ids are read once if they have a signed dtype, since none may be negative, or if there is no .json beside
    the array, since then each must be in the tokenizer's vocabulary.
    """
    path = values.path("path", path)
    values.instance("tokenizer", tokenizer, Tokenizer | None)
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises almost any kind for a file that holds no array
        cause = getattr(error, "strerror", None) or error
        raise ValueError(values.shortened(f"{path}: cannot be read as an array of token ids: {cause}")) from error
    values.hold((isinstance(ids, np.ndarray), f"{path}: must be an array, a .npy; it is an archive of several"))
    values.hold(
        (
            ids.ndim == 1 and ids.dtype.kind in "ui",
            f"{path}: must be one row of whole numbers; got {ids.dtype} of shape {ids.shape}",
        )
    )
    if ids.size and ids.dtype.kind == "i" and (least := int(ids.min())) < 0:
        raise ValueError(f"{path}: id {least} is less than 0")
    facts_file = path.with_suffix(".json")
    if not facts_file.is_file():
        if ids.size and tokenizer and (largest := int(ids.max())) >= tokenizer.vocab_size:
            raise ValueError(f"{path}: id {largest} is not in this vocabulary of {tokenizer.vocab_size}")
        return ids
    facts = strict_json.read_json(facts_file, tokens=int, vocab_size=int, tokenizer=str)
    values.hold(
        (
            facts["tokens"] == len(ids),
            values.shortened(
                f"{path}: holds {len(ids):,} ids, and {facts_file.name} says {facts['tokens']:,}: make it anew"
            ),
        )
    )
    if tokenizer and facts["tokenizer"] != tokenizer.fingerprint:
        raise ValueError(
            values.shortened(
                f"{path}: was made with another tokenizer, of {facts['vocab_size']:,} tokens; this one has"
                f" {tokenizer.vocab_size:,}: tokenize the text anew"
            )
        )
    return ids


def _write_array(file: BinaryIO, pieces: Iterator[np.ndarray], dtype: np.dtype) -> int:
    """Writes a one-dimensional .npy and returns its length. The header is written again once the length is known."""

    def write_header(count: int) -> None:
        file.seek(0)
        np.lib.format.write_array_header_1_0(
            file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
        )

    write_header(0)
    count = 0
    for ids in pieces:
        file.write(ids.tobytes())
        count += len(ids)
    write_header(count)
    return count


class Source(Protocol):
    """The source of batches: a sequence of token ids, such as `TokenFiles`."""

    def __len__(self) -> int:
        """The number of ids."""

    @property
    def end_of_text(self) -> int:
        """The id that ends each document, read only where documents are packed. ValueError where it is not known."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids from `start` to `stop` - 1, int64."""


class TokenFiles:
    """The ids of .npy files, one after another, read from disk when asked for. ValueError as in `open_tokens`."""

    def __init__(self, paths: Sequence[Path], tokenizer: Tokenizer | None = None):
        self._paths = values.several("paths", paths)
        values.hold((paths, "no paths of token files are given"))
        self._arrays = [open_tokens(path, tokenizer) for path in self._paths]
        self._firsts = np.cumsum([0, *map(len, self._arrays)]).tolist()

    def __len__(self) -> int:
        return self._firsts[-1]

    @property
    def end_of_text(self) -> int:
        """The id that ends each document. ValueError for a file whose .json has none, or another one than the first."""
        first, *others = map(read_end_of_text, self._paths)
        values.hold(
            *(
                (number == first, f"{path}: end_of_text={number} must be {first}, as in {self._paths[0]}")
                for path, number in zip(self._paths[1:], others, strict=True)
            )
        )
        return first

    def read(self, start: int, stop: int) -> np.ndarray:
        files = zip(self._arrays, self._firsts[:-1], strict=True)
        pieces = [ids[max(0, start - first) : max(0, stop - first)] for ids, first in files]
        return np.concatenate(pieces).astype(np.int64)


@dataclass(frozen=True)
class Batches:
    """A rank's batches: windows of context_length + 1 ids, in an order drawn from `seed`.

    The last id of a window is the first of the window that follows it in the text.

    Every epoch takes each of the N windows once, in an order of its own. It also draws the token at which the first
    window in the text begins, so that epochs cut the text at different places. A step's global batch is batch_size ·
    world_size · accumulation windows; a step of fewer ranks that accumulate more often has the same windows.

    batch_size    sequences of a micro-batch
    accumulation  micro-batches of a rank in a step
    neighbours    True: a rank's micro-batches stand side by side in the global batch: of the micro-batches 0, 1, 2 and
                  3 of two ranks the first rank has 0 and 1. A reproducible training needs this, unless its strategy
                  sums every backward over ranks. False: ranks take turns, so that the first has 0 and 2
    end_of_text   the id that ends a document, if documents are packed: no target follows it, and where a sequence
                  begins or ends inside of a document, its piece counts as a document. None: they are not packed
    ValueError for sizes below 1, a seed below 0, a rank outside of 0 to world_size - 1, a source with less than one
    window.
    """

    source: Source
    context_length: int
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    accumulation: int = 1
    neighbours: bool = False
    end_of_text: int | None = None

    def __post_init__(self) -> None:
        values.counts(
            context_length=self.context_length,
            batch_size=self.batch_size,
            world_size=self.world_size,
            accumulation=self.accumulation,
        )
        values.flag("neighbours", self.neighbours)
        values.whole("end_of_text", 0 if self.end_of_text is None else self.end_of_text, least=0)
        values.hold(
            (
                isinstance(self.source, Sized) and hasattr(self.source, "read"),
                f"source={values.shortly(self.source)} must have a length and read(start, stop)",
            )
        )
        values.whole("seed", self.seed, least=0)
        values.whole("rank", self.rank, least=0, most=self.world_size - 1)
        values.hold(
            (
                self.num_windows >= 1,
                f"{len(self.source):,} tokens are too few: one window of context_length={self.context_length}"
                f" needs {self.context_length + 1:,}",
            )
        )

    @property
    def num_windows(self) -> int:
        return (len(self.source) - 1) // self.context_length

    @property
    def global_batch(self) -> int:
        """Sequences of a step, on all ranks."""
        return self.batch_size * self.world_size * self.accumulation

    def batch(self, step: int, micro: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (B, S) int64, of micro-batch `micro` of a step; both count from 0."""
        first = self._place(step, micro) + step * self.global_batch
        return _divided(np.stack(list(map(self.window, range(first, first + self.batch_size)))), self.end_of_text)

    def weight(self, step: int, micro: int = 0) -> float:
        """The factor of a micro-batch's mean loss: its number of targets, divided by the step's mean per micro-batch.

        With these factors the mean of the losses of all micro-batches, on all ranks, is the mean over all targets of
        the step. Without `end_of_text` it is 1.
        """
        first = self._place(step, micro)
        if self.end_of_text is None:
            return 1.0
        counts = _num_targets(self, step)
        mine, total = counts[first : first + self.batch_size].sum(), counts.sum()
        return float(mine * (self.global_batch // self.batch_size) / max(1, total))

    def _place(self, step: int, micro: int) -> int:
        """The place of a micro-batch's first sequence in the global batch of the step.

        ValueError for a step below 0, or a micro-batch that a rank does not have.
        """
        values.whole("step", step, least=0)
        values.whole("micro", micro, least=0, most=self.accumulation - 1)
        turn = self.rank * self.accumulation + micro if self.neighbours else micro * self.world_size + self.rank
        return turn * self.batch_size

    def window(self, index: int) -> np.ndarray:
        """The ids (S + 1,) of window `index`. Indices count the windows of all steps, from 0 at the first step."""
        epoch, place = divmod(index, self.num_windows)
        first, order = _epoch_order(self.seed, epoch, self.num_windows, (len(self.source) - 1) % self.context_length)
        start = first + int(order[place]) * self.context_length
        return self.source.read(start, start + self.context_length + 1)


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_windows: int, slack: int) -> tuple[int, np.ndarray]:
    """(the first token of an epoch, 0 to `slack`; the order of its windows)."""
    generator = np.random.default_rng((seed, epoch))
    return int(generator.integers(slack + 1)), generator.permutation(num_windows)


@lru_cache(maxsize=2)
def _num_targets(batches: Batches, step: int) -> np.ndarray:
    """How many targets each sequence of a step has. Every rank reads all sequences, so ranks need not communicate."""
    first = step * batches.global_batch
    windows = map(batches.window, range(first, first + batches.global_batch))
    return np.array([np.count_nonzero(window[:-1] != batches.end_of_text) for window in windows])


def _divided(windows: np.ndarray, end_of_text: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (B, S) of windows (B, S + 1); what follows an end of text is no target (IGNORED)."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    return inputs, targets if end_of_text is None else np.where(inputs == end_of_text, config.IGNORED, targets)


def fixed_windows(
    source: Source, context_length: int, count: int, end_of_text: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, (count, S) int64, spread evenly over the source: what a model is evaluated on.

    There are fewer where the source has fewer windows; ValueError where it has none. end_of_text: as in `Batches`.
    """
    values.whole("count", count, least=1)
    num_windows = Batches(source, context_length, batch_size=1, end_of_text=end_of_text).num_windows
    places = np.arange(min(count, num_windows)) * num_windows // min(count, num_windows) * context_length
    return _divided(
        np.stack([source.read(int(place), int(place) + context_length + 1) for place in places]), end_of_text
    )
