"""The watch over a row's calls: each is announced and has a deadline, and what it leaves changed is put back.

    heartbeat.beat(row, "in its first call", seconds)

A *beat* says which row is at work, at what, and by when it must be done. A worker writes beats into memory that it
shares with its parent, which reads the last one when the worker has died or hangs (`lmsys.bench.isolation`). A GPU
works behind the host, so there a beat also goes through the CUDA stream, right before the call that it announces.
`lmsys.bench.trial` makes a `Watch` per group. What is put back after a call is listed in `lmsys.bench.guard`.
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
_GPU_AT = SIZE // 2  # where it stands in the shared memory
COPY_S = 0.05  # how often a worker copies what its GPU has reached


@dataclass(frozen=True)
class Beat:
    """One beat, as the parent reads it.

    number    grows with every beat
    until     deadline, by `time.monotonic`
    row       index of the row among the candidates of its group; NOBODY while the bench itself is at work
    doing     a phrase such as "in its first call"
    gpu_row   index of the row that the GPU was at when last looked at; NOBODY if unknown
    gpu_seen  when that was, by `time.monotonic`
    """

    number: int
    until: float
    row: int
    doing: str
    gpu_row: int
    gpu_seen: float

    @property
    def row_on_device(self) -> int:
        """The index of the row that the device is at.

        While calls are timed, that is what the GPU says; otherwise the host waits for the device, so it is the host's
        row. It is the host's row, too, if the GPU was not looked at for a second: then a call of that row holds the
        interpreter and does not end.
        """
        is_known = self.gpu_row != NOBODY and time.monotonic() < self.gpu_seen + 1.0
        return self.gpu_row if self.doing == TIMED and is_known else self.row

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.until


class Heartbeat:
    """Writes the beats of this process into a shared file, by its number, or without one into private memory."""

    def __init__(self, file: int = -1):
        self._memory, self._number = map_file(file), 0
        self.rest()

    def beat(self, row: int, doing: str, seconds: float) -> None:
        """The row at this index is at work, for at most `seconds`; `doing` completes "it crashed ..."."""
        self._number += 1
        _BEAT.pack_into(self._memory, 0, self._number, time.monotonic() + seconds, row, doing.encode()[:128])

    def rest(self) -> None:
        """No row is at work: the bench itself may take as long as it needs."""
        self.beat(NOBODY, "while no row was at work", math.inf)

    def renew(self, seconds: float) -> None:
        """Extends the current row's deadline to `seconds` from now."""
        last = read_beat(self._memory)
        self.beat(last.row, last.doing, seconds if last.row != NOBODY else math.inf)

    @cached_property
    def gpu(self) -> "GpuRow":
        """Tells which row the GPU is at, which is behind the host."""
        return GpuRow(self._memory)


def read_beat(memory: Any) -> Beat:
    number, until, row, doing = _BEAT.unpack_from(memory, 0)
    gpu_row, gpu_seen = _GPU_ROW.unpack_from(memory, _GPU_AT)
    return Beat(number, until, row, doing.rstrip(b"\0").decode(errors="replace"), gpu_row - 1, gpu_seen)


class GpuRow:
    """The row that the GPU is at: a number in pinned memory, which the GPU writes and a thread copies to the parent."""

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
    """The watch over the candidates of one group.

    doing       what rows are doing, as a phrase that completes "it crashed ...": "in its first call"
    expected_s  how long a timed call should take; infinity while that is not known
    state       the process as it was before the group's first call, which is put back
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
        """Like `compare.attempt`, for a row's own work: waits for the device, and puts back what the row left changed.

        A row that left something changed has failed.
        """

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
        """Puts back what the last row has left changed, if its last call was not followed by a look."""
        if self._last is not None and (left := self.state.mend()):
            self._left.setdefault(self._last, left)
        self._last = None

    def failure(self, candidate: Candidate, failure: Failure | None) -> Failure | None:
        """The row's failure in its timed calls, joined with what it has left changed there; None for neither."""
        return _with(failure, self._left.pop(self.rows[id(candidate)], None))

    def over(self, step: Step, candidate: Candidate, own_redraw: Callable[[int], None], own_keep: Any) -> Step:
        """The step with each timed call announced by a beat, and refused if it leaves the process changed."""
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
    """Raised when the bench's own part of a timed call fails, such as drawing inputs."""

    failure = property(lambda self: ("error", f"the bench failed, not the row: {self}"))


def copied(result: Any, key: int | None) -> Any:
    """With a key, a copy of a tensor, or a list of copies of several; None without a key."""
    if key is None:
        return None
    return result.clone() if isinstance(result, torch.Tensor) else [copied(part, key) for part in result]
