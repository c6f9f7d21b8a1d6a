"""The declarations of a benchmark; the runner alone owns the order. Imports no torch.

class Matmul(Benchmark):
    name = "matmul"
    axes = (Axis("size", positive, (256, 1024)),)
    fields = (*axes_("size"), TIME, ...)
    def cases(self, grid, settings): ...            # what is run, and what it is compared with
    def setup(self, cases, settings): ...           # inputs, which all candidates of a group share
    def redraw(self, setup, draw): ...              # new inputs, before every timed call
    def step(self, case, candidate, setup): ...     # what is timed
    def errors(self, setup, result): ...            # of a call, timed or not, over their budgets, by tensor

test_matmul = bench(Matmul)
"""

import importlib.util
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, cast

from lmsys.bench.case import Candidate, Case
from lmsys.bench.fields import Axis, Field, Grid, Record, grouped
from lmsys.measure.step import Failure, Kept, Step
from lmsys.registry import Entry, Table

if TYPE_CHECKING:
    from lmsys.bench.ranks import Ranks
    from lmsys.measure.clock import Clock

DEFAULT_ROUNDS = 10


@dataclass(frozen=True)
class Settings:
    """How to measure, in plain values. deadline_s: for what may compile, and a run on ranks; nvtx: calls in ranges, for
    a profiler, in place of timed ones; energy: each case's, in a pass of its own; sustained: what the machine reaches
    under its power limit, too; checks_files: rows from files are asked the quick part of `lmsys check` first."""

    device: str = "cpu"
    sweep: str = "default"
    seconds_per_row: float = 0.2
    min_rounds: int = DEFAULT_ROUNDS
    timed: bool = True
    memory_limit_bytes: int | None = None
    command: str = ""
    seed: int = 0
    deadline_s: float = 600.0
    nvtx: bool = False
    energy: bool = False
    sustained: bool = False
    checks_files: bool = True


Cases = Sequence[Any]
Collected = tuple[dict[str, Case], dict[tuple[str, str], Record]]  # cases by id; rows of theirs by kind and name


class Tools(Protocol):
    """The part of the runner that hooks of a benchmark use."""

    settings: Settings
    say: Callable[[str], None]

    @property
    def ranks(self) -> "Ranks":
        """Started when first asked for."""

    @property
    def clocks(self) -> "Mapping[str, Clock]":
        """Each by its kind, as in `Benchmark.clock`."""


class Benchmark:
    """The base: what every benchmark can leave as it is.

    case_type       the class of its cases, by which a case is made again from a record
    tables          the tables that its rows come from, by their kind
    layout          how a report shows it, beside its fields (`lmsys.reports.layout`); empty: by its fields alone
    clock           "device": each call alone, its device time; "loop": the pace of a loop, for calls with more launches
                    than a device queues; "host": wall time
    trials          calls before sampling, from which the runner learns what one costs
    opens           whether a row is opened and called in this process; not where ranks do everything
    streams         whether each case is a turn of its own, whose result is given as it ends, not as its group ends
    num_proofs      checked calls that the record of a case holds for `repeat`, or as many as it has samples
    """

    name = ""
    case_type: type[Case] = Case
    axes: tuple[Axis, ...] = ()
    fields: tuple[Field, ...] = ()
    tables: Mapping[str, Table] = {}
    layout: Mapping[str, Any] = {}
    clock = "device"
    trials = 3
    opens = True
    streams = False
    num_proofs = 0

    def __reduce__(self) -> Any:
        """In another process it is that process's own: there is one of a class, which keeps what its hooks keep."""
        cls = type(self)
        return _benchmark, (cls.__module__, getattr(sys.modules[cls.__module__], "__file__", ""), cls.__qualname__)

    def cases(self, grid: Grid, settings: Settings) -> Iterator[Any]:
        """The cases of a grid, whose ids are unique."""
        raise NotImplementedError

    def rows_of(self, case: Any) -> Mapping[str, Entry]:
        """The rows that a case is about, by their kind."""
        return dict.fromkeys(self.tables or ("row",), case.entry)

    def why_not(self, case: Any) -> str | None:
        """None, or why the case cannot run here, for a reader who may act on it."""
        return case.entry.why_not(case)

    def no_sample(self, case: Any) -> Failure | None:
        """Why what its candidate can do otherwise is not done in this case."""

    def key(self, case: Any) -> Hashable:
        """Cases with one key share a candidate: it is opened and checked once for all of them."""
        return case.id

    def contends(self, case: Any) -> bool:
        """True of a row that may be called the fastest of its comparison: it does the same work as the others."""
        return True

    def context(self, cases: Cases) -> AbstractContextManager[Any]:
        """The context that all of a group runs in."""
        return nullcontext()

    def setup(self, cases: Cases, settings: Settings) -> Any:
        """Makes all that the candidates of a group share. A failure here is one of the group."""

    def open(self, candidate: Candidate, setup: Any) -> None:
        """Makes `candidate.call`, and calls it once, which compiles and tunes; nothing but the setup is live."""
        candidate.call = candidate.entry.load()

    def check(self, candidate: Candidate, setup: Any) -> Mapping[str, float]:
        """Errors over their budgets by tensor, at most 1 where it is right; {} for nothing to check.

        By default those of one call as it is timed.
        """
        step = self.step(candidate.case, candidate, setup) if judges_calls(self) else None
        return self.errors(setup, step.run(step.prepare())) if step else {}

    def errors(self, setup: Any, result: Any) -> Mapping[str, float]:
        """Errors over their budgets of what a call returned, before timing and of timed calls: {} for nothing to check.

        `check` and `judge` are for benchmarks that need more than the setup and the result.
        """
        return {}

    def check_all(self, candidates: Sequence[Candidate], setup: Any, runner: Tools) -> None:
        """Judges each; overridden where checks share what does not fit twice."""
        for candidate in candidates:
            if ratios := candidate.attempt(self.check, candidate, setup):
                candidate.judge(ratios)

    def redraw(self, setup: Any, draw: int) -> None:
        """The inputs of a draw, in the same memory: before every timed call, unless the step has a `redraw` of its own,
        and before a timed call is judged. See `lmsys.draws`."""

    def judge(self, case: Any, candidate: Candidate, setup: Any, kept: Kept) -> Mapping[str, float]:
        """Errors over their budgets of what was kept of a timed call, whose inputs are drawn again: the copies that
        `Step.keep` has made, without one copies of all tensors that the call returned.

        {} for a call that is not checked: a row without any is checked once more after timing, on new inputs. What
        `repeat` needs goes into `kept.evidence`.
        """
        return self.errors(setup, kept.result)

    def case_of(self, record: Record) -> Any:
        """The case that a record is about, made again; None where the record does not hold all of `case_type`.

        It may be without a field that has a default: records were made before the field was.
        """
        axes = fields(self.case_type)[len(fields(Case)) :]
        if self.case_type is Case or any(axis.name not in record and axis.default is MISSING for axis in axes):
            return None
        asked_for = {axis.name: record[axis.name] for axis in axes if axis.name in record}
        asked = [(table, name) for kind, table in self.tables.items() for name in (record["impl"], record.get(kind))]
        known = [table[name] for table, name in asked if isinstance(name, str) and name in list(table)]
        entry = known[0] if known else Entry(record["impl"], "", record["label"], record["peer"])
        return self.case_type(record["section"], entry, record["device"], **asked_for)

    def repeat(self, record: Record, call: Record) -> Iterable[str | int]:
        """Judges a call of a record's proof again, on any machine; `call` is its evidence.

        Yields a sentence for each thing that is wrong, and numbers of elements that were recomputed.
        """
        return ()

    def turns(self, cases: Cases) -> Iterable[Cases]:
        """Which cases are sampled together, one turn after another."""
        return grouped((case.id if self.streams else case.comparison, case) for case in cases).values()

    def step(self, case: Any, candidate: Candidate, setup: Any) -> Step:
        """The call that is timed. It may run alone here first: what runs out of memory then is `oom`."""
        raise NotImplementedError

    def outputs(self, candidate: Candidate, setup: Any, element: int | None = None) -> Mapping[str, Any]:
        """All tensors that a call returns on the inputs as they stand, by name: whether their bits come again is in the
        record (`lmsys.bench.findings`), of benchmarks that override this.

        With `element`, where `batch_of` says more than 1: of a batch that holds only this element of the whole one.
        """
        return {}

    def batch_of(self, candidate: Candidate) -> int:
        """The first dimension of all outputs, if the candidate can be called with any one element of it alone."""
        return 1

    def sample(self, turn: Cases, trial: Any) -> None:
        """Fills the measurements of a turn: interleaved, with the runner's clock."""
        trial.interleave(turn)

    def clock_name(self, case: Any, runner: Tools) -> str:
        """How the case is timed, as its record says it."""
        return runner.clocks[self.clock].name

    def inspect(self, case: Any, candidate: Candidate, setup: Any) -> Record:
        """Fields that need a run of their own, after timing: memory."""
        return {}

    def least_work(self, case: Any) -> tuple[float, str, float] | None:
        """(operations, their dtype, bytes read that are in no cache) of every right row at least; None: unknown."""

    def tokens(self, case: Any) -> int | None:
        """The tokens that a call works on, by which its energy is told; None where there are none."""

    def metrics(self, case: Any, record: Record, machine: Record) -> Record:
        """Work and rates, from shapes and the record's time, which is missing where nothing was timed."""
        return {}


CLOCKS = {"gloo": "perf_counter", "nccl": "cuda_event_steps"}  # of `lmsys.bench.ranks.times`


class OnRanks(Benchmark):
    """A benchmark whose rows run on ranks alone; its cases say the `backend` of theirs."""

    opens = False

    def clock_name(self, case: Any, runner: Tools) -> str:
        return CLOCKS[case.backend]


@cache
def _benchmark(module: str, file: str, name: str) -> Benchmark:
    """Makes a benchmark of a module that another process has imported by whatever name."""
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None and spec.loader is not None
        home = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(home)
    return cast(Benchmark, attrgetter(name)(home)())


def judges_calls(benchmark: Benchmark) -> bool:
    """True where results of calls are judged."""
    return (type(benchmark).judge, type(benchmark).errors) != (Benchmark.judge, Benchmark.errors)


def bench(cls: type[Benchmark]) -> Callable[..., None]:
    """The test of a benchmark, for pytest: `test_matmul = bench(Matmul)`; one test for each of its cases."""

    def test(cell: str, lmsys_measured: Callable[[str], None]) -> None:
        lmsys_measured(cell)

    test.benchmark = cls  # type: ignore[attr-defined]
    test.__doc__, test.__name__ = cls.__doc__, f"test_{cls.name}"
    return test
