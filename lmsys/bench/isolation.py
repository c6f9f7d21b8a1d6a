"""Runs rows in a worker process, so that a row that crashes or hangs costs only its own cases.

    Isolated(settings)    # is called as a `Runner` is; this process itself runs no row and makes no CUDA context

A *row* is an implementation under test, a *case* is one row with one set of sizes, a *group* is the cases that share
inputs. `lmsys.bench.results.Session` uses `Isolated` unless --no-isolation is given. A worker process runs group after
group. Its *heartbeat* (`lmsys.bench.watch`) is memory that it shares with this process: it says which row is at work,
and until when it may be. When the worker dies or misses this deadline, the row that was at work has failed, and the
rest of its group runs again, in turns as before, in a fresh worker. If it is not known which row to blame, as when
memory ran out, each row of the group first runs alone in a fresh worker. Rows that fail alone have failed, and the
others then run together again.

Limits are the constants below. A new way in which a worker can end by itself is a case in `Isolated._ended`; a new
reason for this process to end the worker belongs in `Isolated._look_at`.
"""

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lmsys import doing
from lmsys.bench import fields, watch
from lmsys.bench.benchmark import Benchmark, Cases, Collected, Settings
from lmsys.bench.checkout import Checkout
from lmsys.measure import host, step, turns
from lmsys.processes import DIED, Told, Worker, answered, tell

# (file descriptor of a socket to the worker that this worker takes turns with, True if this worker goes first)
Line = tuple[int, bool]
_runner: Any = None  # in a worker: its Runner
_turns: turns.Turns = turns.ALONE  # in a worker: its turns with the other worker of --against


@dataclass(frozen=True)
class Begun:
    """A worker has begun a group: the ids of the cases of each candidate, in the order of its heartbeat's rows."""

    candidates: list[list[str]]


def begin(shared: int, trace: int, settings: Settings, machine: fields.Record | None, line: Line | None) -> None:
    """Called first in a worker: prepares traces of crashes, and makes the worker's runner.

    shared   descriptor of the shared file that heartbeats go to
    trace    descriptor of the file that faulthandler writes to
    machine  facts of the machine, if they were measured before
    line     to the other worker of --against, if there is one
    """
    global _runner, _turns
    faulthandler.enable(file=trace)
    faulthandler.register(signal.SIGUSR1, file=trace)
    from lmsys.bench import foreign, runner

    _runner = runner.Runner(settings, tell, watch.Heartbeat(shared))
    foreign.Process.heartbeat = _runner.heartbeat
    if line is not None:
        _turns = turns.Turns(Connection(line[0]), is_first=line[1], rest=_runner.heartbeat.rest)
    if machine is not None:
        _runner.__dict__["machine"] = machine  # where the cached property would keep it


def answer(path: list[str], pickled: bytes) -> None:
    """Called in a worker: sends back what a method of its runner returns; for `run`, each result as it comes.

    path     the parent's `sys.path`, from which benchmarks are imported
    pickled  (the method's name, its arguments), pickled. A benchmark comes before its cases, so that its module is
             imported before they are unpickled
    """
    sys.path[:] = path
    name, args = pickle.loads(pickled)
    if name != "run":
        tell(getattr(_runner, name)(*args))
        return
    benchmark, cases, ended, in_turns = args
    _runner.turns = _turns if in_turns else turns.ALONE
    with _runner.turns.session():
        _runner.ready()
    for result in _runner.run(benchmark, cases, ended, begun=lambda ids: tell(Begun(ids))):
        tell(result)


POLL_S = 0.1  # seconds between two looks at a worker that sends nothing
QUIET_S = 20.0  # after so long without a line for the user, a line says which row is at work
# A worker that holds more than this share of the host's memory that was free when it started is ended as "oom".
MOST_HELD = 0.9


class Ended(RuntimeError):
    """Raised when a worker process has ended.

    row      the index, in the group that was running, of the row that ended it; NOBODY if that is unknown
    outcome  the outcome that the cases of this row get
    """

    def __init__(self, reason: str, row: int = watch.NOBODY, outcome: str = "error"):
        super().__init__(reason)
        self.reason, self.row, self.outcome = reason, row, outcome


class Isolated:
    """Has the methods of `Runner` that a `Session` calls. They run in a worker process, until a row ends that process.

    settings  how to measure
    say       called with each line for the user
    checkout  an earlier state of the code, whose rows the worker runs instead of today's
    """

    def __init__(self, settings: Settings, say: Callable[[str], None] = step.nothing, checkout: Checkout | None = None):
        self.settings, self.checkout = settings, checkout
        self._say, self._said_s = say, time.monotonic()
        self.rows = list[list[str]]()  # the case ids of each candidate of the group that is running
        self.line: Line | None = None  # to the other worker of --against
        self._worker: Worker | None = None
        self._reading: Generator[Any, None, None] = (None for _ in "")  # messages of the last answer; none at first
        self._machine: fields.Record | None = None
        self._has_files = False  # True once a worker has imported a file of the user's

    def say(self, text: str) -> None:
        self._said_s = time.monotonic()
        self._say(text)

    def collect(self, benchmark: Benchmark, grids: Sequence[fields.Grid], texts: Mapping[str, str]) -> Collected:
        """`Runner.collect` in the worker. ValueError also if a user's file ends or hangs the worker when imported."""
        self._has_files |= any(".py" in text for text in texts.values())
        try:
            return self.ask("collect", benchmark, grids, texts)
        except Ended as ended:
            files = [word for word in ",".join(texts.values()).split(",") if ".py" in word]
            raise ValueError(
                f"{', '.join(files) or type(benchmark).__module__} cannot be imported: {ended.reason}"
            ) from None

    def run(self, benchmark: Benchmark, cases: Cases) -> Iterator[Any]:
        """Yields a result for each case of a group, even if rows of it end their worker."""
        group = Group(self, benchmark, cases)
        while group.left:
            try:
                yield from filter(None, group.results())
            except Ended as fault:
                group.blame(fault)

    def ready(self) -> fields.Record:
        """The facts of the machine. The first call has a worker measure them; later workers are given them."""
        if self._machine is None:
            if self._has_files:  # then a fresh worker, which has imported no user's file, measures the machine
                self.close()
            self._machine = self.ask("ready")
        return self._machine

    @property
    def machine(self) -> fields.Record:
        return self.ready()

    def close(self, grace_s: float = 2.0) -> None:
        """Ends the worker, which gets `grace_s` seconds to end by itself. The next call starts a fresh one."""
        if self._worker is not None:
            self._worker.close(grace_s)
            os.close(self._shared)
            self._trace.close()
        self._worker = None

    def ask(self, name: str, *args: Any) -> Any:
        """Returns what the method `name` of the worker's runner returns."""
        (answer,) = [message for message in self.stream(name, *args) if message is not None]
        return answer

    def _start(self) -> Worker:
        """Starts a worker and has it run `begin`. Raises Ended if it ends meanwhile."""
        self._shared, self._trace = doing.shared_file(), tempfile.TemporaryFile()  # noqa: SIM115
        self._memory = doing.map_file(self._shared)
        watch.Heartbeat(self._shared)  # writes a first beat
        files = [self._shared, self._trace.fileno()] + ([self.line[0]] if self.line else [])
        worker = self._worker = Worker(
            open_files=files, path=self._path(), folder=self.checkout.working_folder if self.checkout else None
        )
        self._most_bytes, self._oom_kills = MOST_HELD * host.available_bytes(), host.oom_kills()
        for _ in self._answers(
            worker, begin, self._shared, self._trace.fileno(), self.settings, self._machine, self.line
        ):
            pass
        return worker

    def _path(self) -> list[str]:
        return self.checkout.path(sys.path) if self.checkout else [str(folder) for folder in sys.path]

    def stream(self, name: str, *args: Any) -> Iterator[Any]:
        """Yields the messages that the worker sends while it runs the method `name`, and None while none comes.

        Raises Ended when the worker is gone.
        """
        self._reading.close()  # if the last answer was not read to its end, this ends its worker: see `_answers`
        self.rows = []
        worker = self._worker or self._start()
        self._reading = self._answers(worker, answer, self._path(), pickle.dumps((name, args)))
        return self._reading

    def _answers(self, worker: Worker, function: Callable[..., None], *args: Any) -> Generator[Any, None, None]:
        """Has the worker call function(*args), and yields what it sends meanwhile, as `stream` does.

        Lines for the user go to `say`, and `Begun` fills `rows`: both are not yielded. An exception of the worker is
        raised here, as Ended if a row has ended the worker.
        """
        self._said_s = time.monotonic()
        try:
            worker.send(function, *args)
            while True:
                if not answered([worker], POLL_S):
                    self._look_at(worker)
                    yield None
                    continue
                failure, message = worker.receive()
                if failure is not None:
                    raise self._ended(failure) or failure.error()
                if not isinstance(message, Told):
                    return
                if isinstance(message.what, str):
                    self.say(message.what)
                elif isinstance(message.what, Begun):
                    self.rows = message.what.candidates
                else:
                    yield message.what
        except BaseException as error:
            has_answered = isinstance(error, Exception) and not isinstance(error, Ended)
            if not has_answered and worker is self._worker:  # it may still be at work: ends it
                self.close(0.0)
            raise

    def _look_at(self, worker: Worker) -> None:
        """Raises Ended if the worker has missed its deadline or holds more memory than it may.

        After a while without a line for the user, says which row is at work.
        """
        if (held := host.resident_bytes(worker.pid)) > self._most_bytes:
            raise Ended(f"it held {held / 2**30:.1f} GiB of memory", outcome="oom")
        beat = watch.Beat.from_buffer_copy(self._memory)
        if time.monotonic() > self._said_s + QUIET_S:
            ids = self.rows[beat.row] if 0 <= beat.row < len(self.rows) else ["the bench itself"]
            self.say(f"  at work: {ids[0]}, {beat.doing}")
        if not beat.is_late:
            return
        row = beat.row_on_device  # read at once: after a second the GPU's row counts as unknown
        time.sleep(POLL_S)
        if watch.Beat.from_buffer_copy(self._memory).number != beat.number:
            return  # the beat has changed since: the worker goes on
        worker.signal(signal.SIGUSR1)  # faulthandler then writes its stack to `_trace`, even if native code hangs
        time.sleep(1.0)
        raise Ended(f"no answer within the deadline {beat.doing}{self._place()}", row)

    def _ended(self, failure: Any) -> Ended | None:
        """The Ended that says how a row has ended the worker; None for an exception of the bench's own code."""
        # `failure.kind` is DIED or the name of the exception's class: "MemoryEaten" of runner.py, "Lost" of
        # lmsys/measure/compare.py.
        if failure.kind == "Lost":
            time.sleep(2 * watch.COPY_S)  # meanwhile a thread of the worker copies which row the GPU has reached
        beat = watch.Beat.from_buffer_copy(self._memory)
        if failure.kind == DIED and "SIGKILL" in failure.text and host.oom_kills() > self._oom_kills:
            return Ended(f"memory ran out, and the system killed its process {beat.doing}", outcome="oom")
        if failure.kind == DIED:
            return Ended(f"its process {failure.text} {beat.doing}{self._place()}", beat.row)
        text = failure.text.strip().splitlines()[-1].partition(": ")[2]  # the message, at the end of the traceback
        if failure.kind == "MemoryEaten":
            return Ended(text, outcome="oom")
        if failure.kind in ("Lost", "KeyboardInterrupt"):
            row = beat.row_on_device if failure.kind == "Lost" else beat.row
            return Ended(f"{text or 'it raises KeyboardInterrupt'} {beat.doing}", row)
        return None

    def _place(self) -> str:
        """ ", at file:line in function" of the user's code that the worker was in; empty if no trace was written."""
        self._trace.seek(0)
        place = watch.place_in(
            self._trace.read().decode(errors="replace"), self.checkout.tree if self.checkout else watch.ROOT
        )
        return f", at {place}" if place else ""


class Group:
    """A group of cases, which is run again and again until no row of it ends the worker any more.

    left   {case id: case} of the cases without a result yet
    ended  {case id: (outcome, reason, True if the worker ended)} of the cases that are not run again
    """

    def __init__(self, isolated: Isolated, benchmark: Benchmark, cases: Cases):
        self.isolated, self.benchmark, self.cases = isolated, benchmark, {case.id: case for case in cases}
        self.left, self.ended = dict(self.cases), dict[str, Any]()
        self._tried_alone = False

    def results(self, in_turns: bool = False) -> Generator[Any, None, None]:
        """Yields a result for each case in `left`, and None while none comes. Raises Ended if a row ends the worker.

        in_turns  True: the worker takes turns with another one, which runs the same group (`lmsys.bench.paired`)
        """
        for message in self.isolated.stream("run", self.benchmark, list(self.left.values()), self.ended, in_turns):
            if message is not None:
                del self.left[message["id"]]
            yield message

    def blame(self, fault: Ended) -> None:
        """Adds to `ended` the cases that are at fault. RuntimeError if the bench itself cannot run."""
        if 0 <= fault.row < len(self.isolated.rows):
            endings = dict.fromkeys(self.isolated.rows[fault.row], (fault.outcome, fault.reason, True))
        elif self.isolated.rows and not self._tried_alone:
            self._tried_alone, endings = True, self._alone()
        else:
            endings = dict.fromkeys(self.left, ("error", f"the bench's process ended: {fault.reason}", True))
        if endings and endings.keys() <= self.ended.keys():  # these cases were left out, and the worker ended again
            raise RuntimeError(f"the bench itself cannot run: {fault.reason}") from None
        self.ended |= endings
        if any(crashed for _, _, crashed in endings.values()):
            self.isolated.say(f"  a row ended its process; what is left of the group runs again: {fault.reason}")

    def _alone(self) -> dict[str, Any]:
        """The endings of the rows that fail even alone, each in a fresh worker, in the form of `ended`."""
        endings: dict[str, Any] = {}
        for ids in self.isolated.rows:
            cases = [self.left[name] for name in ids if name in self.left and name not in self.ended]
            self.isolated.close(0.0)
            try:
                # benchmark, cases, ended, in_turns: see `answer`
                for result in self.isolated.stream("run", self.benchmark, cases, {}, False) if cases else ():
                    if result and result["outcome"] != "ok":
                        endings[result["id"]] = result["outcome"], result["reason"], False
            except Ended as fault:
                endings |= dict.fromkeys((case.id for case in cases), (fault.outcome, fault.reason, True))
        self.isolated.close(0.0)
        return endings
