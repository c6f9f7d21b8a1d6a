"""Text files of any size are read in chunks, in one process or several. No pre-token crosses the cut between chunks.

training.py counts pre-tokens with `each_chunk`, and `lmsys.training.data` encodes files with it. In all functions
`parts` are files, or pieces of files, in order. A piece ends at the end of its file, or where the file may be cut.
"""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lmsys import values
from lmsys.processes import futures
from lmsys.tokenizer.pretokens import Pretokenizer

LARGEST, SMALLEST = 4 << 20, 1 << 20  # bytes of a chunk
_WINDOW = 1 << 16  # bytes that are searched for a cut at once
_PIECES = 64  # in so many pieces of one size `split` gives each reader its share


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
        """The chunk's bytes. ValueError, with the place, where they are not UTF-8, or the file has become shorter."""
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
    """The parts, cut into chunks of about `size` bytes; longer where there is no place to cut."""
    for part in parts:
        start = part.start
        with part.path.open("rb") as file:
            while start < part.stop:
                stop = cut_file(file.fileno(), pretokenizer, start + size, part.stop)
                yield Chunk(part.path, start, stop)
                start = stop


def no_text(parts: Iterable[Chunk]) -> ValueError:
    """The error to raise where all files are empty, or none are given."""
    paths = ", ".join(str(part.path) for part in parts)
    return ValueError(f"there is no text in {paths}" if paths else "no files are given")


def whole(file: str | Path | Chunk) -> Chunk:
    """A file as one chunk; a chunk as it is. ValueError where there is no such file."""
    if isinstance(file, Chunk):
        return file
    path = values.path("file", file)
    values.hold((path.is_file(), f"{path}: there is no such file"))
    return Chunk(path, 0, path.stat().st_size)


def split(parts: Sequence[Chunk], pretokenizer: Pretokenizer, count: int) -> list[list[Chunk]]:
    """The parts divided among `count` readers, in order, with about as many bytes for each: within two percent."""
    total, done = sum(part.size for part in parts), 0
    shares: list[list[Chunk]] = [[] for _ in range(count)]
    for chunk in chunks(parts, pretokenizer, max(1, total // (_PIECES * count))):
        shares[done * count // total].append(chunk)
        done += chunk.size
    return shares


def cut_file(file: int, pretokenizer: Pretokenizer, after: int, end: int) -> int:
    """The first byte after byte `after`, but not that byte itself, before which the file may be cut; else `end`.

    file  the number of the open file
    end   the end of the file, or a place where it may be cut: the result is never beyond it
    The file is searched window by window. Each window is read with `context` bytes more on either side, so that a
    special token which crosses its border is seen whole.
    """
    window, context = _WINDOW, pretokenizer.context
    while after < end:
        begin = max(0, after - context)
        place = pretokenizer.cut(os.pread(file, window + 2 * context, begin), after - begin)
        if place is not None:
            return begin + place
        after += window
    return end


Result = TypeVar("Result")


def each_chunk(
    function: Callable[[Chunk], Result],
    files: Sequence[str | Path | Chunk],
    special_tokens: Sequence[str],
    processes: int,
) -> Generator[Result, None, None]:
    """Yields function(chunk) for each chunk of the files, in order; with processes=1 it runs in this process.

    With more, the function and its results are pickled. ValueError for processes < 1.
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
        # numpy's OpenBLAS would start a thread for each core in every process.
        results = futures(function, pieces, processes, environment={"OPENBLAS_NUM_THREADS": "1"})
        yield from (future.result() for future in results)
