"""A quick runner for tests of the harness, and `Telling`, a benchmark that records which of its hooks are called.

A hook is a method of a benchmark that the runner calls; a row is a function that a benchmark measures.
Tests make cases by `cases_of`, and run them by `records` or `results`. The facts about the machine, MACHINE, are made
up, since to measure them takes seconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmsys.bench import Axis, Benchmark, Candidate, Case, Entry, Field, Grid, Record, Settings, Step, Table
from lmsys.bench.ranks import Ranks
from lmsys.bench.runner import Runner
from lmsys.measure.step import nothing

CEILINGS = {"matmul_flops_per_s": {"float32": 1e12, "bfloat16": 2e12}, "copy_bytes_per_s": 1e11}
MACHINE = {"date": "now", "gpu": None, "name": "a machine", "ceilings": CEILINGS}


def runner(ranks: Ranks | None = None, say: Callable[[str], None] = nothing, **changes: Any) -> Runner:
    """A runner on the CPU with 10 ms for each row, and MACHINE.

    ranks    the ranks on which it measures; None: it starts its own when it needs them
    say      called with each line for the user
    changes  other settings
    """
    quick = Runner(replace(Settings(device="cpu", sweep="smoke", seconds_per_row=0.01), **changes), say)
    # In place of cached properties, which measure the machine and start ranks.
    vars(quick).update({"machine": MACHINE} | ({"ranks": ranks} if ranks else {}))
    return quick


def records(benchmark: Benchmark, cases: Sequence[Any], **changes: Any) -> dict[str, Record]:
    """{row: its record} of a run of these cases, which are one group. `changes`: those of `runner`."""
    return {record["impl"]: record for record in results(benchmark, cases, **changes)}


def results(benchmark: Benchmark, cases: Sequence[Any], **changes: Any) -> list[Record]:
    """The records of a run of these cases, as in `records`."""
    obtained = list(runner(**changes).run(benchmark, cases))
    assert sorted(record["id"] for record in obtained) == sorted(case.id for case in cases)
    return obtained


@dataclass(frozen=True)
class Number(Case):
    """A case of `Telling`. `size`: the number that is added to itself."""

    size: int


class Telling(Benchmark):
    """A benchmark of adding a number to itself.

    called  the hooks that the runner has called, in order: "hook", or "hook row"
    faults  {hook: exception that it raises}
    """

    name = "telling"
    axes = (Axis("size", int, (1,)),)
    fields = (Field("size", role="axis"),)
    rows = Table("adder", [Entry("right", "operator:add"), Entry("also", "operator:add")])

    def __init__(self, **faults: Exception):
        self.called: list[str] = []
        self.faults = faults

    def _note(self, hook: str, row: Any = "") -> None:
        """Records the call of a hook, and raises its exception if it has one."""
        self.called.append(f"{hook} {row}".strip())
        if hook in self.faults:
            raise self.faults[hook]

    def cases(self, grid: Grid, settings: Settings) -> Iterator[Number]:
        for (size,) in grid.product("size"):
            yield from (Number(grid.name, row, settings.device, size) for row in self.rows.values())

    def why_not(self, case: Number) -> str | None:
        self._note("why_not", case.impl)
        return None

    def setup(self, cases: Sequence[Number], settings: Settings) -> list[int]:
        self._note("setup")
        return [cases[0].size]

    def open(self, candidate: Candidate, setup: Any) -> None:
        self._note("open", candidate.case.impl)
        super().open(candidate, setup)

    def check(self, candidate: Candidate, setup: Any) -> Mapping[str, float]:
        self._note("check", candidate.case.impl)
        # The error ratio of a wrong sum is 7: any number above 1 means wrong.
        return {"sum": float(candidate.call(setup[0], setup[0]) != 2 * setup[0]) * 7}

    def redraw(self, setup: Any, seed: int) -> None:
        if self.called[-1] != "redraw" or "redraw" in self.faults:  # several in succession are recorded once
            self._note("redraw")

    def step(self, case: Number, candidate: Candidate, setup: Any) -> Step:
        self._note("step", case.impl)
        return Step(lambda _: candidate.call(setup[0], setup[0]))

    def inspect(self, case: Number, candidate: Candidate, setup: Any) -> dict[str, Any]:
        self._note("inspect", case.impl)
        return {}


def cases_of(benchmark: Benchmark, settings: Settings | None = None, **values: Any) -> list[Any]:
    """The benchmark's cases for a grid with these values of axes, and the defaults of the other axes."""
    defaults = {axis.name: axis.default for axis in benchmark.axes}
    grid = Grid("s", frozenset(values), **(defaults | values))
    return list(benchmark.cases(grid, settings or Settings(device="cpu")))
