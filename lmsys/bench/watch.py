"""The watch over a row's calls: each is announced and has a deadline, and its changes of the process are undone.

    heartbeat.beat(row, "in its first call", seconds)

A *row* is an implementation under test. A *beat* says which row is at work, what it is doing, and by when it must be
done. A worker process writes beats into memory that it shares with its parent. The parent reads the last beat when the
worker has died or hangs (`lmsys.bench.isolation`). A GPU executes calls later than the host launches them. So a timed
call on a GPU is also announced by a small copy in the CUDA stream, right before the call: the copied number says which
row the GPU has reached.

`lmsys.bench.trial` makes a `Watch` for each group of cases. Its candidates are the rows, numbered from 0.
`lmsys.bench.guard` lists what is put back after a call. The deadline of a call is the run's --deadline; that of a timed
call is computed from WARM_S and TIMES_EXPECTED. A new hook of `Step` that runs a row's code is wrapped in `Watch.over`.
"""

import ctypes
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from lmsys.bench import guard
from lmsys.bench.benchmark import Settings
from lmsys.bench.case import Candidate
from lmsys.doing import map_file
from lmsys.measure.clock import synchronize
from lmsys.measure.compare import attempt
from lmsys.measure.step import Failed, Failure, Step, nothing

NOBODY = -1  # the bench itself is at work
TIMED = "in a timed call"  # the phrase of a beat during timed calls; `row_on_device` compares with it
ROOT = Path(__file__).parents[2]  # the folder that lmsys is imported from: in a checkout its root
COPY_S = 0.05  # seconds between two copies, by a thread, of the number of the row that the GPU has reached


class Beat(ctypes.Structure):
    """One beat, as it lies in the shared memory: `from_buffer` writes there, and `from_buffer_copy` reads.

    number    grows by 1 with every beat
    until     the deadline, as a time of `time.monotonic`
    row       index of the row among the candidates of its group; NOBODY while the bench itself is at work
    phrase    such as b"in its first call"; `doing` has it as text
    gpu_row   index of the row that the GPU had reached at the last copy; NOBODY if unknown
    gpu_seen  the time of that copy, by `time.monotonic`
    """

    _fields_ = (
        ("number", ctypes.c_int64),
        ("until", ctypes.c_double),
        ("row", ctypes.c_int64),
        ("phrase", ctypes.c_char * 128),
        ("gpu_row", ctypes.c_int64),
        ("gpu_seen", ctypes.c_double),
    )

    @property
    def doing(self) -> str:
        return str(self.phrase, errors="replace")

    @property
    def row_on_device(self) -> int:
        """The index of the row that the device works for.

        While calls are timed, this is `gpu_row`. Otherwise the host waits for the device after each call, so this is
        `row`. It is `row`, too, if `gpu_row` was copied more than a second ago: then a call of `row` holds the
        interpreter's lock, so that the thread that copies cannot run.
        """
        is_known = self.gpu_row != NOBODY and time.monotonic() < self.gpu_seen + 1.0
        return self.gpu_row if self.doing == TIMED and is_known else self.row

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.until


class Heartbeat:
    """Writes the beats of this process into a shared file.

    file  the descriptor of that file; -1: there is none, and beats go into memory that no other process reads
    """

    def __init__(self, file: int = -1):
        self.now = Beat.from_buffer(map_file(file))
        self.now.gpu_row = NOBODY
        self.rest()

    def beat(self, row: int, doing: str, seconds: float) -> None:
        """Says that the row at this index is at work, for at most `seconds`. `doing` completes "it crashed ..."."""
        self.now.until, self.now.row, self.now.phrase = time.monotonic() + seconds, row, doing.encode()[:128]
        self.now.number += 1  # last: if a reader found the beat half written, the number then changes

    def rest(self) -> None:
        """Says that no row is at work: the bench itself may take as long as it needs."""
        self.beat(NOBODY, "while no row was at work", math.inf)

    def renew(self, seconds: float) -> None:
        """Extends the current row's deadline to `seconds` from now."""
        self.beat(self.now.row, self.now.doing, seconds if self.now.row != NOBODY else math.inf)

    @cached_property
    def gpu(self) -> "GpuRow":
        """Finds out which row the GPU has reached, which may be an earlier one than the host has launched last."""
        return GpuRow(self.now)


class GpuRow:
    """The row that the GPU has reached: the GPU writes its number into pinned memory, and a thread copies it to a beat.

    beat  the beat in the memory that the parent process reads
    """

    def __init__(self, beat: Beat):
        self._beat = beat
        self._host = torch.full((1,), NOBODY, dtype=torch.int64, pin_memory=True)
        self._numbers: Any = torch.arange(1024, device="cuda")  # what `enqueue` copies; a group has fewer rows
        self._seen = self._host.numpy()
        threading.Thread(target=self._copy, daemon=True).start()

    def enqueue(self, row: int) -> None:
        """Announces this row's next launches: the GPU writes its number when it reaches this place in the stream."""
        self._host.copy_(self._numbers[row : row + 1], non_blocking=True)

    def _copy(self) -> None:
        while True:
            self._beat.gpu_row, self._beat.gpu_seen = int(self._seen[0]), time.monotonic()
            time.sleep(COPY_S)


# The deadline of a timed call is the longer one of two times: TIMES_EXPECTED times `Watch.expected_s`; and WARM_S, or
# --deadline if this is shorter. While `expected_s` is not known, the deadline is --deadline.
WARM_S, TIMES_EXPECTED = 30.0, 20.0


class Watch:
    """The watch over the candidates of one group.

    candidates  the rows, in the order of their numbers
    on_gpu      True: timed calls are also announced in the CUDA stream
    doing       what rows are doing, as a phrase that completes "it crashed ...": "in its first call"
    expected_s  seconds that the present sampling should take, all rounds of all its rows together (`interleave` in
                `lmsys.measure.compare`); infinity while that is not known
    state       remembers the process as it was before the group's first call. `state.mend()` puts changes back, and
                returns them in words, or None
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
        self._last: int | None = None  # the row that ran last, if `mend` was not called since
        self._changes: dict[int, str] = {}  # {row: what it changed}, found by `settle` and reported by `failure`

    def beat(self, candidate: Candidate) -> None:
        """Says that this row is at work."""
        self.heartbeat.beat(self.rows[id(candidate)], self.doing, self.settings.deadline_s)

    def watched(self, candidate: Candidate, call: Callable[..., Any], *args: Any) -> tuple[Any, Failure | None]:
        """Makes a call of the row that is not timed. Returns (its result, None), or (None, how it failed).

        Waits for the device, and puts back what the row has changed in the process: such a change is a failure.
        """

        def done() -> Any:
            result = call(*args)
            synchronize(self.settings.device)
            return result

        self.beat(candidate)
        result, failure = attempt(done)
        failure = _joined(failure, self.state.mend())
        self.heartbeat.rest()
        return None if failure else result, failure

    def settle(self) -> None:
        """Puts back what the row that ran last has changed, and notes these changes for `failure`.

        If `keep` (in `over`) has put them back already, there is nothing left to do.
        """
        if self._last is not None and (changes := self.state.mend()):
            self._changes.setdefault(self._last, changes)
        self._last = None

    def failure(self, candidate: Candidate, failure: Failure | None) -> Failure | None:
        """The row's failure in its timed calls, joined with what it has changed there; None for neither."""
        return _joined(failure, self._changes.pop(self.rows[id(candidate)], None))

    def over(self, step: Step, candidate: Candidate, own_redraw: Callable[[int], None], own_keep: Any) -> Step:
        """A copy of the step that announces each timed call by a beat. A call that changes the process fails.

        own_redraw, own_keep  the hooks that take the place of `step.redraw` and `step.keep`; `Trial._step` chooses them

        `Step` (lmsys/measure/step.py) explains the hooks. `lmsys.measure.compare` calls those of a timed call in this
        order. Here is what this method adds:

        1. `before` may be the row's own code: a beat announces it. It is called only if `clock.ahead` is False.
        2. `redraw` first puts back what the last row changed. After the inputs are drawn, a beat announces this row.
        3. `prepare` and `run`, the row's call, stay as they are, since `run` is timed.
        4. `keep` first puts back what the row changed. If there was something, the call fails, and nothing is kept.

        `like` is called apart from these: its time is the reference for that of `prepare`. It is the row's own code, so
        a beat announces it, too.
        """
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
                raise Failed("error", f"the bench failed, not the row: {failure[1]}")
            if self._on_gpu:
                self.heartbeat.gpu.enqueue(row)
            at_work(nothing)  # announces the row; its call comes next

        def keep(result: Any, key: int | None) -> Any:
            self._last = None  # first, so that a later change is not blamed on this row if this raises
            if changes := self.state.mend():
                raise guard.Changed("error", changes)
            return own_keep(result, key)

        return replace(
            step,
            redraw=redraw,
            keep=keep,
            before=partial(at_work, step.before),
            like=step.like and partial(at_work, step.like),
        )


def _joined(failure: Failure | None, changes: str | None) -> Failure | None:
    """The failure, with what the row changed behind its reason; "error" if the change is the only failure."""
    if not changes:
        return failure
    return (failure[0], f"{failure[1]}; {changes}") if failure else ("error", changes)


def copied(result: Any, key: int | None) -> Any:
    """The hook `keep` of a step that has none of its own (`Trial._step`): copies of a tensor, or of a sequence of them.

    Returns None if `key` is None: then the call is not checked, and nothing is kept.
    """
    if key is None:
        return None
    return result.clone() if isinstance(result, torch.Tensor) else [copied(part, key) for part in result]


def place_in(trace: str, root: Path = ROOT) -> str:
    """`file:line in function` of the innermost frame outside of libraries and our packages; empty if there is none.

    trace  text that `faulthandler` has written, innermost frames first
    root   the folder that our packages stand in
    """
    for path, line, function in re.findall(r'^  File "(.+)", line (\d+) in (.+)$', trace, re.MULTILINE):
        ours = any(Path(path).is_relative_to(root / package) for package in ("lmsys", "benchmarks", "dev"))
        library = "site-packages" in Path(path).parts or path.startswith((sys.base_prefix, "<"))
        if not ours and not library:
            return f"{Path(path).name}:{line} in {function}"
    return ""
