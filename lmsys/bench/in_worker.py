"""The functions that `Isolated` runs in its worker, and what the worker keeps between them."""

import faulthandler
import importlib
import importlib.util
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lmsys.bench.axes import Grid
from lmsys.bench.benchmark import Benchmark, Case, Cases, Collected, Settings
from lmsys.bench.fields import Record
from lmsys.bench.heartbeat import NOBODY, Heartbeat
from lmsys.measure.turns import ALONE, Turns
from lmsys.processes import tell

Where = tuple[str, str, str]  # a benchmark's class: its module, the module's file, its name
Line = tuple[int, bool]  # to the worker that it takes turns with: an open file's number, and whether it goes first
_runner: Any = None
_turns: Turns = ALONE
_benchmarks: dict[Where, Benchmark] = {}


@dataclass(frozen=True)
class Begun:
    """A worker has begun a group: the ids of the cases of each candidate, in the order of its heartbeat's rows."""

    candidates: list[list[str]]


def where(cls: type[Benchmark]) -> Where:
    return cls.__module__, str(getattr(sys.modules[cls.__module__], "__file__", "")), cls.__qualname__


def begin(shared: int, trace: int, settings: Settings, machine: Record | None, line: Line | None) -> None:
    """First of all: what is to be said should a row crash, and the judges as they are."""
    global _runner, _turns
    faulthandler.enable(file=trace)
    faulthandler.register(signal.SIGUSR1, file=trace)
    from lmsys.bench.runner import Runner

    _runner = Runner(settings, tell, Heartbeat(shared))
    if line is not None:
        _turns = Turns(Connection(line[0]), line[1], _runner.heartbeat.rest)
    if machine is not None:
        _runner.__dict__["machine"] = machine
    _runner.limit_memory()


def call(path: list[str], needed: Sequence[Where], pickled: bytes) -> None:
    """Cases are found where their benchmark's module is."""
    sys.path[:] = path
    for one in needed:
        _benchmark(one)
    function, args = pickle.loads(pickled)
    function(*args)


def told(function: Callable[..., Any], *args: Any) -> None:
    tell(function(*args))


def _benchmark(at: Where) -> Benchmark:
    """The benchmark, made once in a worker, of a module that the caller has imported by whatever name."""
    if at not in _benchmarks:
        module, file, name = at
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None and spec.loader is not None
            found = sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        cls: Any = found
        for part in name.split("."):
            cls = getattr(cls, part)
        _benchmarks[at] = cls()
    return _benchmarks[at]


def collect(at: Where, grids: Sequence[Grid], texts: Mapping[str, str]) -> Collected:
    benchmark = _benchmark(at)
    _runner.ready() if any(".py" in text for text in texts.values()) else None
    _runner.heartbeat.beat(NOBODY, "while it was imported", _runner.settings.deadline_s)
    try:
        return _runner.collect(benchmark, grids, texts)
    finally:
        _runner.heartbeat.rest()


def run(at: Where, cases: Cases, ended: Mapping[str, Any], in_turns: bool) -> None:
    _runner.turns = _turns if in_turns else ALONE
    with _runner.turns.session():
        _runner.ready()
    for result in _runner.run(_benchmark(at), cases, ended, begun=lambda ids: tell(Begun(ids))):
        tell(result)


def facts() -> Record:
    return _runner.facts()


def machine() -> Record:
    _runner.ready()
    return _runner.machine


def rate_again(found: Sequence[tuple[Where, Case, Record]]) -> tuple[list[str], list[Record], Record]:
    moved, records = _runner.rate_again([(_benchmark(at), case, record) for at, case, record in found])
    return moved, records, _runner.machine
