"""Which row is at work, at what, and until when it may be: in memory that a worker shares with its parent.

    heartbeat.beat(row, "its first call", seconds)

When the worker has died or hangs, nobody in it can tell: the last beat does. A GPU works behind the host, so there a
beat also goes through the stream, right before the call that it announces.
"""

import math
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

from lmsys.doing import SIZE, map_file

NOBODY = -1  # the bench itself is at work
TIMED = "in a timed call"  # a GPU may be far behind the host
_BEAT = struct.Struct("=qdq128s")  # number, until, row, doing
_GPU_ROW = struct.Struct("=qd")  # row, when it was copied
_GPU_AT = SIZE // 2
COPY_S = 0.05  # how often a worker copies what its GPU has reached
STALE_S = 1.0  # a copy that old: the host's own call holds Python's interpreter


@dataclass(frozen=True)
class Beat:
    """The row by its place among the candidates of its group; until when, by `time.monotonic`; on a GPU, the row that
    the device was at, and until when that was looked at."""

    number: int
    until: float
    row: int
    doing: str
    gpu_row: int
    gpu_seen: float

    @property
    def row_on_device(self) -> int:
        """The row that the device is at: while calls are timed, what the GPU says; else what the host does is done.

        The host's row, too, where its call holds the interpreter, so that nobody could look at the GPU: for that call
        does not end, whatever the GPU is at.
        """
        is_known = self.gpu_row != NOBODY and time.monotonic() < self.gpu_seen + STALE_S
        return self.gpu_row if self.doing == TIMED and is_known else self.row

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.until


class Heartbeat:
    """The beats of this process into a shared file, or without one into memory that nobody reads."""

    def __init__(self, file: int = -1):
        self._memory = map_file(file)
        self._number = 0
        self._gpu: Any = None
        self.rest()

    def beat(self, row: int, doing: str, seconds: float) -> None:
        """The row by its place; `doing` goes behind "it crashed", as in "in its first call"."""
        self._number += 1
        _BEAT.pack_into(self._memory, 0, self._number, time.monotonic() + seconds, row, doing.encode()[:128])

    def rest(self) -> None:
        """The bench itself is at work, for as long as it needs."""
        self.beat(NOBODY, "while no row was at work", math.inf)

    def renew(self, seconds: float) -> None:
        """The same row has so long from now on."""
        last = self.last()
        self.beat(last.row, last.doing, seconds if last.row != NOBODY else math.inf)

    def beat_on_gpu(self, row: int) -> None:
        """The same in the current stream: once the GPU comes to it, what is launched next is at work there."""
        if self._gpu is None:
            self._gpu = _GpuRow(self._memory)
        self._gpu.enqueue(row)

    def last(self) -> Beat:
        return read(self._memory)


def read(memory: Any) -> Beat:
    number, until, row, doing = _BEAT.unpack_from(memory, 0)
    gpu_row, gpu_seen = _GPU_ROW.unpack_from(memory, _GPU_AT)
    return Beat(number, until, row, doing.rstrip(b"\0").decode(errors="replace"), gpu_row - 1, gpu_seen)


class _GpuRow:
    """A number in the host's pinned memory, which the GPU writes, and a thread that copies it where the parent sees."""

    def __init__(self, memory: Any):
        import torch

        self._memory = memory
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._rows: Any = torch.arange(1, 1025, device="cuda")  # 0: none yet
        self._seen = self._host.numpy()
        threading.Thread(target=self._copy, daemon=True).start()

    def enqueue(self, row: int) -> None:
        self._host.copy_(self._rows[row : row + 1], non_blocking=True)

    def _copy(self) -> None:
        while True:
            _GPU_ROW.pack_into(self._memory, _GPU_AT, int(self._seen[0]), time.monotonic())
            time.sleep(COPY_S)
