"""Reads text files of any size in chunks, in one process or in several.

No pre-token (see pretokens.py) crosses the cut between two chunks, so each chunk can be encoded alone. training.py
counts pre-tokens with `each_chunk`, and `lmsys.training.data` encodes files with it. engines.py and
`lmsys.training.corpora` cut files with `chunks`. `Pretokenizer.cut` decides where text may be cut; this file decides
how large chunks are.

In all functions `parts` are files, or pieces of files, in order, each as a `Chunk`. A piece ends at the end of its
file, or where the file may be cut.
"""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lmsys import values
from lmsys.processes import futures
from lmsys.tokenizer.pretokens import Pretokenizer

LARGEST, SMALLEST = 4 << 20, 1 << 20  # the limits of the size, in bytes, that `each_chunk` takes for its chunks
_WINDOW = 1 << 16  # bytes that are searched for a cut at once
_PIECES = 64  # `split` cuts the share of each reader into this many pieces: shares differ by about one piece


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `stop` of a file."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def read(self) -> bytes:
        """The chunk's bytes. ValueError if they are not UTF-8 (it names the byte), or the file has become shorter."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        values.hold((len(data) == self.size, f"{self.path} became shorter while it was read"))
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} is not UTF-8 text: {error.reason} at byte {(self.start + error.start):,}"
            ) from None
        return data


def chunks(parts: Iterable[Chunk], pretokenizer: Pretokenizer, size: int) -> Iterator[Chunk]:
    """Yields the parts in chunks. A chunk ends at the first place to cut after `size` bytes, or where its part ends."""
    for part in parts:
        start = part.start
        with part.path.open("rb") as file:
            while start < part.stop:
                stop = cut_file(file.fileno(), pretokenizer, start + size, part.stop)
                yield Chunk(part.path, start, stop)
                start = stop


def no_text(parts: Iterable[Chunk]) -> str:
    """The words of the error where all files are empty, or none are given."""
    paths = ", ".join(str(part.path) for part in parts)
    return f"there is no text in {paths}" if paths else "no files are given"


def whole(file: str | Path | Chunk) -> Chunk:
    """A file as one chunk; a chunk as it is. ValueError where there is no such file."""
    if isinstance(file, Chunk):
        return file
    path = values.path("file", file)
    values.hold((path.is_file(), f"{path}: there is no such file"))
    return Chunk(path, 0, path.stat().st_size)


def split(parts: Sequence[Chunk], pretokenizer: Pretokenizer, count: int) -> list[list[Chunk]]:
    """Divides the parts among `count` readers, in order: the shares have equal numbers of bytes, within two percent."""
    total, done = sum(part.size for part in parts), 0
    shares: list[list[Chunk]] = [[] for _ in range(count)]
    for chunk in chunks(parts, pretokenizer, max(1, total // (_PIECES * count))):
        shares[done * count // total].append(chunk)
        done += chunk.size
    return shares


def cut_file(file: int, pretokenizer: Pretokenizer, after: int, end: int) -> int:
    """The first place behind byte `after` where the file may be cut; `end` if there is none before it.

    A place is a number of bytes from the beginning of the file.

    file   the file descriptor of the open file
    after  the result is larger than this place
    end    the end of the file, or a place where it may be cut: the result is never beyond it

    The file is searched window by window. Each window is read with `context` bytes more on either side, so that a
    special token which crosses its border is seen whole.
    """
    window, context = _WINDOW, pretokenizer.context
    while after < end:
        begin = max(0, after - context)
        if (place := pretokenizer.cut(os.pread(file, window + 2 * context, begin), after - begin)) is not None:
            return min(end, begin + place)  # the file goes on behind the end of a part, such as the text to train on
        after += window
    return end


Result = TypeVar("Result")


def each_chunk(
    function: Callable[[Chunk], Result],
    files: Sequence[str | Path | Chunk],
    special_tokens: Sequence[str],
    processes: int,
) -> Generator[Result, None, None]:
    """Yields function(chunk) for each chunk of the files, in order. With processes=1 the function runs in this process.

    With more processes, the function and its results are pickled. ValueError for processes < 1.
    """
    values.whole("processes", processes, least=1)
    parts = list(map(whole, files))
    total = sum(part.size for part in parts)
    # Each process gets several chunks, and memory is bounded.
    size = max(SMALLEST, min(LARGEST, total // (4 * processes)))
    # No more processes than chunks: to start one takes as long as to read some megabytes.
    processes = min(processes, -(-total // size))
    pieces = chunks(parts, Pretokenizer(special_tokens), size)
    if processes <= 1:
        yield from map(function, pieces)
    else:
        # Without this setting numpy's OpenBLAS starts a thread for each core in every process.
        results = futures(function, pieces, processes, environment={"OPENBLAS_NUM_THREADS": "1"})
        yield from (future.result() for future in results)
