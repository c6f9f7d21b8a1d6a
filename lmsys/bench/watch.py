"""The watch over a row's calls: each is announced and has a deadline, and what it leaves changed is put back.

    heartbeat.beat(row, "its first call", seconds)

Which row is at work, at what, and until when it may be, is in memory that a worker shares with its parent. When the
worker has died or hangs, nobody in it can tell: the last beat does. A GPU works behind the host, so there a beat also
goes through the stream, right before the call that it announces.
"""

import math
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from lmsys.bench import guard
from lmsys.bench.benchmark import Settings
from lmsys.bench.case import Candidate
from lmsys.doing import SIZE, map_file
from lmsys.measure.clock import synchronize
from lmsys.measure.compare import attempt
from lmsys.measure.step import Failure, Step, nothing

NOBODY = -1  # the bench itself is at work
TIMED = "in a timed call"  # a GPU may be far behind the host
_BEAT = struct.Struct("=qdq128s")  # number, until, row, doing
_GPU_ROW = struct.Struct("=qd")  # row, when it was copied
_GPU_AT = SIZE // 2
COPY_S = 0.05  # how often a worker copies what its GPU has reached


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
        is_known = self.gpu_row != NOBODY and time.monotonic() < self.gpu_seen + 1.0
        return self.gpu_row if self.doing == TIMED and is_known else self.row

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.until


class Heartbeat:
    """The beats of this process into a shared file, or without one into memory that nobody reads."""

    def __init__(self, file: int = -1):
        self._memory, self._number = map_file(file), 0
        self.rest()

    def beat(self, row: int, doing: str, seconds: float) -> None:
        """The row by its place; `doing` goes behind "it crashed", as in "in its first call"."""
        self._number += 1
        _BEAT.pack_into(self._memory, 0, self._number, time.monotonic() + seconds, row, doing.encode()[:128])

    def rest(self) -> None:
        """The bench itself is at work, for as long as it needs."""
        self.beat(NOBODY, "while no row was at work", math.inf)

    def renew(self, seconds: float) -> None:
        """Extends the current row's deadline to `seconds` from now."""
        last = read_beat(self._memory)
        self.beat(last.row, last.doing, seconds if last.row != NOBODY else math.inf)

    @cached_property
    def gpu(self) -> "GpuRow":
        """The row that the GPU is at, which is behind the host."""
        return GpuRow(self._memory)


def read_beat(memory: Any) -> Beat:
    number, until, row, doing = _BEAT.unpack_from(memory, 0)
    gpu_row, gpu_seen = _GPU_ROW.unpack_from(memory, _GPU_AT)
    return Beat(number, until, row, doing.rstrip(b"\0").decode(errors="replace"), gpu_row - 1, gpu_seen)


class GpuRow:
    """A number in the host's pinned memory, which the GPU writes, and a thread that copies it where the parent sees."""

    def __init__(self, memory: Any):
        self._memory = memory
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._rows: Any = torch.arange(1, 1025, device="cuda")  # 0: none yet
        self._seen = self._host.numpy()
        threading.Thread(target=self._copy, daemon=True).start()

    def enqueue(self, row: int) -> None:
        """A beat in the current stream: once the GPU comes to it, what is launched next is at work there."""
        self._host.copy_(self._rows[row : row + 1], non_blocking=True)

    def _copy(self) -> None:
        while True:
            _GPU_ROW.pack_into(self._memory, _GPU_AT, int(self._seen[0]), time.monotonic())
            time.sleep(COPY_S)


WARM_S, TIMES_EXPECTED = 30.0, 20.0  # deadline of a warm call: 30 s, or 20 times what it should take, if that is longer


class Watch:
    """Over the candidates of one group.

    doing       what is being done, as it goes behind "it crashed": "in its first call"
    expected_s  what a timed call should take; infinity where that is not known
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        settings: Settings,
        heartbeat: Heartbeat,
        on_gpu: bool,
    ):
        self.settings, self.heartbeat, self._on_gpu = settings, heartbeat, on_gpu
        self.rows = {id(candidate): row for row, candidate in enumerate(candidates)}
        self.doing, self.expected_s = "in its first call", math.inf
        self.state = guard.State()
        self._last: int | None = None  # the row whose work nobody has looked at since
        self._left: dict[int, str] = {}

    def beat(self, candidate: Candidate) -> None:
        """Says that this row is at work."""
        self.heartbeat.beat(self.rows[id(candidate)], self.doing, self.settings.deadline_s)

    def attempt(self, candidate: Candidate, call: Callable[..., Any], *args: Any) -> tuple[Any, Failure | None]:
        """`attempt` of a row's own work: until the device has done it, and with what it leaves changed put back."""

        def done() -> Any:
            result = call(*args)
            synchronize(self.settings.device)
            return result

        self.beat(candidate)
        result, failure = attempt(done)
        failure = _with(failure, self.state.mend())
        self.heartbeat.rest()
        return None if failure else result, failure

    def settle(self) -> None:
        """Puts back what the last row at work has left changed, after calls behind which nobody has looked."""
        if self._last is not None and (left := self.state.mend()):
            self._left.setdefault(self._last, left)
        self._last = None

    def failure(self, candidate: Candidate, failure: Failure | None) -> Failure | None:
        """How the row has failed in its timed calls, with what it has left changed there."""
        return _with(failure, self._left.pop(self.rows[id(candidate)], None))

    def over(self, step: Step, candidate: Candidate, own_redraw: Callable[[int], None], own_keep: Any) -> Step:
        """The step with each of its timed calls announced, and held to leave nothing changed that others would feel."""
        row = self.rows[id(candidate)]

        def at_work(call: Callable[..., Any], *args: Any) -> Any:
            if self._last != row:
                self.settle()
            self._last = row
            most_s = self.settings.deadline_s
            if self.expected_s < math.inf:
                most_s = max(min(most_s, WARM_S), TIMES_EXPECTED * self.expected_s)
            self.heartbeat.beat(row, TIMED, most_s)
            return call(*args)

        def redraw(draw: int) -> None:
            self.settle()
            _, failure = attempt(own_redraw, draw)
            if failure:
                raise BenchFault(failure[1])
            if self._on_gpu:
                self.heartbeat.gpu.enqueue(row)
            at_work(nothing)

        def keep(result: Any, key: int | None) -> Any:
            self._last = None
            if left := self.state.mend():
                raise guard.Changed(left)
            return own_keep(result, key)

        return replace(
            step,
            redraw=redraw,
            keep=keep,
            before=partial(at_work, step.before),
            like=step.like and partial(at_work, step.like),
        )


def _with(failure: Failure | None, left: str | None) -> Failure | None:
    return failure if not left else (failure[0], f"{failure[1]}; {left}") if failure else ("error", left)


class BenchFault(RuntimeError):
    """A failure in the bench's own part of a call."""

    failure = property(lambda self: ("error", f"the bench failed, not the row: {self}"))


def copied(result: Any, key: int | None) -> Any:
    """A copy of a tensor, or of a tuple or list of them, where a key is given."""
    if key is None:
        return None
    return result.clone() if isinstance(result, torch.Tensor) else [copied(part, key) for part in result]
