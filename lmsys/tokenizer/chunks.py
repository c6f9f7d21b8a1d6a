"""Text files of any size, a piece at a time, cut where no pre-token crosses."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lmsys.tokenizer.pretokens import Pretokenizer

CHUNK_BYTES = 4 << 20
_WINDOW = 1 << 16  # bytes that are searched for a cut at once


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `stop` of a file."""

    path: Path
    start: int
    stop: int

    def read(self) -> bytes:
        """ValueError, with the place, for what is not UTF-8."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        if len(data) != self.stop - self.start:
            raise ValueError(f"{self.path} became shorter while it was read")
        try:
            data.decode()
        except UnicodeDecodeError as error:
            place = self.start + error.start
            raise ValueError(f"{self.path} is not UTF-8 text: {error.reason} at byte {place:,}") from None
        return data


def chunks(paths: Iterable[Path], pretokenizer: Pretokenizer, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The files in pieces of about `size` bytes; longer where there is no place to cut. An empty file has none."""
    for path in paths:
        end, start = file_size(path), 0
        with path.open("rb") as file:
            while start < end:
                os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
                stop = end if start + size >= end else _cut(file.fileno(), pretokenizer, start + size, end)
                yield Chunk(path, start, stop)
                start = stop


def file_size(path: Path) -> int:
    """In bytes. ValueError unless `path` is a file."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    return path.stat().st_size


def _cut(file: int, pretokenizer: Pretokenizer, after: int, end: int) -> int:
    """The first place behind `after` where the file may be cut, or its end."""
    window, context = _WINDOW, pretokenizer.context
    while after < end:
        begin = max(0, after - context)
        data = os.pread(file, window + 2 * context, begin)
        place = pretokenizer.cut(data, after - begin)
        if place is not None:
            return begin + place
        after += window
    return end
