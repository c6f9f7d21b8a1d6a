"""The base class of all benchmarks: what a benchmark declares, and the hooks that the runner calls. Imports no torch.

To write a benchmark, subclass `Benchmark`, override hooks, and end the file with a test that `bench` makes. The runner
(`lmsys.bench.runner`, `lmsys.bench.trial`) calls the hooks, and alone decides their order. A *row* is an implementation
under test, an `Entry` of a table; a *case* is one row with one set of sizes. The *budget* of an error is the largest
error that is right. A new hook is a method of `Benchmark` with a default, and a call of it in runner.py or trial.py. A
new setting is a field of `Settings`, which `plugin._session` fills from an option of pytest.

class Matmul(Benchmark):
    name = "matmul"
    axes = (Axis("size", positive, (256, 1024)),)
    fields = columns("size", TIME, ...)
    def cases(self, grid, settings): ...            # what is run, and what it is compared with
    def setup(self, cases, settings): ...           # inputs, which all candidates of a group share
    def redraw(self, setup, draw): ...              # new inputs, before every timed call; `draw` is their seed
    def step(self, case, candidate, setup): ...     # what is timed
    def errors(self, setup, result): ...            # by tensor: the error of a call's result over its budget

test_matmul = bench(Matmul)
"""

import importlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from lmsys.bench.case import Candidate, Case
from lmsys.bench.fields import Axis, Field, Grid, Record, grouped
from lmsys.measure.step import Failure, Kept, Step
from lmsys.registry import Entry, Table, module_of

DEFAULT_ROUNDS = 10  # samples of each row at least, unless --benchmark-min-rounds asks for more


@dataclass(frozen=True)
class Settings:
    """How to measure, in plain values. `lmsys.bench.plugin` makes them from the options of pytest.

    device           "cpu" or "cuda"
    sweep            the name of the sweep, for the result file
    seconds_per_row  for how long each row of a comparison is sampled
    min_rounds       samples of each row at least
    timed            False: rows are checked and not timed
    memory_limit_bytes  the most that the GPU's allocator may give; None: no limit
    command          the command line, for the result file
    seed             the seed of inputs outside of timed calls; those of timed calls have random seeds
    deadline_s       seconds after which a call that may compile, or a run on ranks, is ended
    nvtx             each case is called in NVTX ranges, for a profiler, instead of being timed
    energy           the energy of each case's calls is measured, in a pass of its own
    sustained        the matmul rate that the machine sustains under its power limit is measured, too
    checks_files     rows from files first have to pass the quick part of `lmsys check`
    earlier          rows are those of an earlier state of the code, which may lack some
    apart            rows get processes of their own; bench_attention.py alone reads it
    """

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
    earlier: bool = False
    apart: bool = False


Cases = Sequence[Any]  # its items are objects of `Case`, or of a benchmark's subclass of it
# What `Runner.collect` returns: cases by id, and their rows as JSON by (kind of the table, name of the row).
Collected = tuple[dict[str, Case], dict[tuple[str, str], Record]]


class Benchmark:
    """The base class. Its hooks do what most benchmarks need.

    A *group* is the cases with one `Case.group`: they share inputs, and run one after another. The argument `setup` of
    hooks is what the hook `setup` has returned for the group. A `Candidate` holds the state of a row while the group
    runs.

    name            names the benchmark in records, results and sweeps
    case_type       the class of its cases, of which `case_of` makes an object from a record
    tables          the tables that its rows come from, by their kind, such as "attention"
    axes, fields    the quantities that it varies, and the fields of its records beside `fields.COMMON`
    layout          how a report shows it, beside its fields (`lmsys.reports.layout`); empty: by its fields alone
    clock           what a sample is (`lmsys.measure.clock`). "device": the time that the device takes for a call;
                    "loop": the time of a call in a loop, for calls with more launches than a device queues: the host's
                    launches count if they are slower than the device; "host": wall time. On a CPU all are wall time
    trials          calls before sampling, from which the runner learns how long a call takes
    opens           True: the hook `open` makes the call of each row in the runner's process; False: it is not called,
                    since ranks (processes that work together, see `OnRanks`) load and call the rows
    streams         True: each case is a turn of its own, and its result is given as it ends, not as its group ends
    num_proofs      a case is wrong unless this many of its timed calls were checked, or all if it has fewer. The record
                    holds evidence of each, from which `repeat` judges the call again
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
        """Pickles a reference. Another process unpickles its own one instance, which keeps the state of its hooks."""
        cls = type(self)
        return _benchmark, (cls.__module__, getattr(sys.modules[cls.__module__], "__file__", ""), cls.__qualname__)

    def cases(self, grid: Grid, settings: Settings) -> Iterator[Any]:
        """The cases of a grid, whose ids are unique."""
        raise NotImplementedError

    def rows_of(self, case: Any) -> Mapping[str, Entry]:
        """The rows that a case is about, by the kind of their table."""
        return dict.fromkeys(self.tables or ("row",), case.entry)

    def why_not(self, case: Any) -> str | None:
        """None, or the reason why the case cannot run here, in words from which a user learns what to do."""
        return case.entry.why_not(case)

    def no_sample(self, case: Any) -> Failure | None:
        """None, or why this case is not timed, although its candidate is checked and may be timed in other cases."""

    def key(self, case: Any) -> Hashable:
        """Cases with one key share a candidate: it is opened and checked once for all of them."""
        return case.id

    def contends(self, case: Any) -> bool:
        """True for a row that may be called the fastest of its comparison: it does the same work as the others."""
        return True

    def context(self, cases: Cases) -> AbstractContextManager[Any]:
        """The context that all of a group runs in."""
        return nullcontext()

    def setup(self, cases: Cases, settings: Settings) -> Any:
        """Makes all that the candidates of a group share, such as inputs. If it fails, the whole group fails."""

    def open(self, candidate: Candidate, setup: Any) -> None:
        """Makes `candidate.call`. By default it only loads the row.

        An override also calls it once, which compiles and tunes: the time of this hook becomes the record's
        `compile_s`. Besides the setup, only what this hook has kept for earlier candidates is in memory then.
        """
        candidate.call = candidate.entry.load()

    def check(self, candidate: Candidate, setup: Any) -> Mapping[str, float]:
        """The candidate's errors over their budgets, by tensor: at most 1 if it is right; {} for nothing to check.

        By default they are the errors of one call, which is made as timed calls are made.
        """
        step = self.step(candidate.case, candidate, setup) if judges_calls(self) else None
        return self.errors(setup, step.once()) if step else {}

    def errors(self, setup: Any, result: Any) -> Mapping[str, float]:
        """Errors over their budgets, by tensor, of what a call returned; {} if there is nothing to check.

        The default `check`, before timing, and the default `judge`, for timed calls, call this hook. A benchmark that
        needs more than the setup and the result overrides `check` and `judge` instead.
        """
        return {}

    def check_all(self, candidates: Sequence[Candidate], setup: Any, runner: Any) -> None:
        """Judges every candidate; overridden where checks share something that does not fit in memory twice.

        runner  the `lmsys.bench.instruments.Instruments`; its `say` prints a line for the user
        """
        for candidate in candidates:
            if ratios := candidate.attempt(self.check, candidate, setup):
                candidate.judge(ratios)

    def redraw(self, setup: Any, draw: int) -> None:
        """Writes inputs drawn from `draw`, a seed, into the same memory as before (`lmsys.draws`).

        Called before every timed call, unless the step has a `redraw` of its own, and again before a timed call is
        judged.
        """

    def judge(self, case: Any, candidate: Candidate, setup: Any, kept: Kept) -> Mapping[str, float]:
        """Errors over their budgets, by tensor, of a timed call; {} if it is not checked.

        Before this hook, the call's inputs have been drawn again. `kept.result` holds the copies that `Step.keep` has
        made, by default of all tensors that the call returned. An override puts what `repeat` will need into
        `kept.evidence`. If none of a row's timed calls was checked, the row is checked once more after timing, on new
        inputs.
        """
        return self.errors(setup, kept.result)

    def case_of(self, record: Record) -> Any:
        """The case that a record is about, made again; None if the record lacks a field of `case_type`.

        A field with a default may be missing, because records may be older than the field.
        """
        axes = fields(self.case_type)[len(fields(Case)) :]  # the fields that the subclass of `Case` adds
        if self.case_type is Case or any(axis.name not in record and axis.default is MISSING for axis in axes):
            return None
        asked_for = {axis.name: record[axis.name] for axis in axes if axis.name in record}
        asked = [(table, name) for kind, table in self.tables.items() for name in (record["impl"], record.get(kind))]
        known = [table[name] for table, name in asked if isinstance(name, str) and name in list(table)]
        entry = known[0] if known else Entry(record["impl"], "", record["label"], record["peer"])
        return self.case_type(record["section"], entry, record["device"], **asked_for)

    def repeat(self, record: Record, call: Record) -> Iterable[str | int]:
        """Judges a timed call again, from its record alone, on any machine. `lmsys verify` calls this hook.

        Yields a sentence for each thing that is wrong, and numbers of elements that were recomputed. A sentence that
        begins with `lmsys.verify.NOT_RECOMPUTED` says what was left out, and is no fault.

        call  the call's item in "calls" of the record's field `proof`, with what `judge` put into `kept.evidence`
        """
        return ()

    def turns(self, cases: Cases) -> Iterable[Cases]:
        """The turns, in their order: each is the cases that are sampled together. By default, those of a comparison."""
        return grouped((case.id if self.streams else case.comparison, case) for case in cases).values()

    def step(self, case: Any, candidate: Candidate, setup: Any) -> Step:
        """The call that is timed. The hook may run the call once, alone: if memory then runs out, the case is `oom`."""
        raise NotImplementedError

    def outputs(self, candidate: Candidate, setup: Any, element: int | None = None) -> Mapping[str, Any]:
        """All tensors that a call returns on the inputs as they stand, by name.

        Benchmarks that override this get `same_bits` in their records: whether these tensors repeat bit for bit
        (`lmsys.bench.trial`). With `element`, the batch holds this element of the whole batch alone; that is asked
        only if `batch_of` says more than 1.
        """
        return {}

    def batch_of(self, candidate: Candidate) -> int:
        """The first dimension of all outputs, if the candidate can be called with any one element of it alone."""
        return 1

    def sample(self, turn: Cases, trial: Any) -> None:
        """Fills the measurements of a turn: interleaved, with the runner's clock."""
        trial.interleave(turn)

    def clock_name(self, case: Any, runner: Any) -> str:
        """How the case is timed, as its record says it."""
        return runner.clocks[self.clock].name

    def inspect(self, case: Any, candidate: Candidate, setup: Any) -> Record:
        """Fields of the record that need a run of their own after timing, such as peak memory."""
        return {}

    def least_work(self, case: Any) -> tuple[float, str, float] | None:
        """(operations, their dtype, bytes read from outside of caches) that every right row needs; None if unknown."""

    def tokens(self, case: Any) -> int | None:
        """The number of tokens that a call works on, for the energy of a token; None if it works on none."""

    def metrics(self, case: Any, record: Record, machine: Record) -> Record:
        """The record's fields on work and rates, computed from shapes and its `time_s`; an untimed case has no time."""
        return {}


# By backend, how records call the clock of `lmsys.bench.ranks.times`.
CLOCKS = {"gloo": "perf_counter", "nccl": "cuda_event_steps"}


class OnRanks(Benchmark):
    """A benchmark whose rows run on ranks alone; its cases have a `backend`, which connects the ranks: gloo or nccl."""

    opens = False  # the ranks open rows

    def clock_name(self, case: Any, runner: Any) -> str:
        return CLOCKS[case.backend]


@cache
def _benchmark(module: str, file: str, name: str) -> Benchmark:
    """The instance of a benchmark, by the names of its module, file and class in the process that pickled it."""
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError:
        home = module_of(module, Path(file))
    return cast(Benchmark, attrgetter(name)(home)())


def judges_calls(benchmark: Benchmark) -> bool:
    """True if the benchmark overrides a hook that judges results of calls."""
    return (type(benchmark).judge, type(benchmark).errors) != (Benchmark.judge, Benchmark.errors)


def bench(cls: type[Benchmark]) -> Callable[..., None]:
    """The test of a benchmark, for pytest: `test_matmul = bench(Matmul)`; one test for each of its cases.

    `lmsys.bench.plugin` recognises the test by its attribute `benchmark`, gives it the ids of the cases as `cell`, and
    has the fixture `lmsys_measured`.
    """

    def test(cell: str, lmsys_measured: Callable[[str], None]) -> None:
        lmsys_measured(cell)

    test.benchmark = cls  # type: ignore[attr-defined]
    test.__doc__, test.__name__ = cls.__doc__, f"test_{cls.name}"
    return test
