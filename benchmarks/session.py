"""One pytest run of the benchmarks: what it may measure, what it has measured, and where that is kept."""

import gc
import json
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from benchmarks.ranks import Ranks
from lmsys.bench.record import Record
from lmsys.measure import machine, record
from lmsys.measure.clock import Clock, clock_of

NOT_TIMED = "verified, not timed (--benchmark-disable)"
DONE = ("ok", "oom", "unsupported")  # what --resume takes over; wrong and error are run again


class Cell(Protocol):
    """One test."""

    @property
    def id(self) -> str: ...

    @property
    def group(self) -> str: ...


@dataclass
class Result:
    """A cell's record, and all its samples in seconds if it was timed."""

    record: Record
    samples: list[float] | None


Trial = Callable[[list[Any], "Settings"], Iterator[Result]]


@dataclass
class Settings:
    """How to measure. The clock, the machine and its ceilings are made on first use, once a run."""

    device: str
    sweep: str
    seconds_per_row: float
    min_rounds: int
    timed: bool
    memory_limit_bytes: int | None
    command: str
    seed: int = 0
    say: Callable[[str], None] = lambda _: None  # tells the user what is going on

    @cached_property
    def machine(self) -> Record:
        facts = machine.describe(self.device, command=self.command, seed=self.seed, sweep=self.sweep)
        return facts | {"ceilings": machine.measure_ceilings(self.device)}

    @cached_property
    def ranks(self) -> Ranks:
        """Processes for what several do together."""
        return Ranks()

    def on_ranks(self, world_size: int, backend: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What function(*args) returns on each of the first `world_size` ranks, under the memory limit."""
        if self.memory_limit_bytes is not None:
            self.ranks.run(world_size, backend, cap_gpu_memory, self.memory_limit_bytes)
        return self.ranks.run(world_size, backend, function, *args)[:world_size]

    @property
    def ceilings(self) -> Record:
        return self.machine["ceilings"]

    @property
    def run(self) -> str:
        """Tells this run's comparisons from another's: ratios are formed within one only."""
        return self.machine["date"]

    @cached_property
    def clock(self) -> Clock:
        return clock_of(self.device)

    @cached_property
    def loop_clock(self) -> Clock:
        """For what launches more than a device queues."""
        return clock_of(self.device, ahead=False)

    @cached_property
    def sm_clock(self) -> Callable[[], float | None]:
        return machine.sm_clock_reader()


@dataclass
class Session:
    """The selected cells, their results, the journal and the final file.

    output    where the result goes, None when it is not kept
    carried   records of an earlier run that stand as they are, and `carried_entries`, pytest-benchmark's share of them
    """

    settings: Settings
    output: Path | None
    carried: dict[str, Record] = field(default_factory=dict)
    carried_entries: list[Record] = field(default_factory=list)
    carried_machine: Record | None = None
    results: dict[str, Result] = field(default_factory=dict)
    saved: bool = False
    _cells: dict[str, tuple[Cell, Trial]] = field(default_factory=dict)
    _groups: dict[str, list[Cell]] = field(default_factory=dict)
    _failed: dict[str, str] = field(default_factory=dict)

    def add(self, cells: Iterable[Cell], trial: Trial) -> list[str]:
        """Cells that may be run, by `trial` for all of one group at once; returns their ids, which are the tests'."""
        added = {cell.id: (cell, trial) for cell in cells}
        self._cells |= added
        return list(added)

    def select(self, ids: Iterable[str]) -> None:
        """The cells that are left after -k and the like: a group is these, whichever of its tests comes first."""
        for cell, _ in (self._cells[one] for one in ids if one in self._cells and one not in self.carried):
            self._groups.setdefault(cell.group, []).append(cell)

    def result(self, cell_id: str) -> Result:
        """The cell's result; the first of a group to ask has the whole group run."""
        cell, trial = self._cells[cell_id]
        if cell.group in self._failed:
            raise RuntimeError(f"{cell.group} could not be run: {self._failed[cell.group]}")
        if cell_id not in self.results:
            try:
                self._run(cell.group, trial)
            except KeyboardInterrupt:
                # A new one: a traceback into the middle of a kernel can hold frames that pytest fails to print.
                raise KeyboardInterrupt(f"interrupted in {cell.group}") from None
            except Exception as error:
                self._failed[cell.group] = f"{type(error).__name__}: {error}"
                raise
        return self.results[cell_id]

    def _run(self, group: str, trial: Trial) -> None:
        if not self.results:
            self.settings.say("measuring what this machine reaches")
            self._ready()
        cells = self._groups[group]
        number = list(self._groups).index(group) + 1
        self.settings.say(f"[{number}/{len(self._groups)}] {group}: checking, then sampling {len(cells)} cells")
        for result in trial(cells, self.settings):
            if self.output:
                self.journal.add(result.record)
            self.results[result.record["id"]] = result
        gc.freeze()  # what lives between trials is code, which the many collections of the next need not visit again

    def _ready(self) -> None:
        """Everything that is made once, before a row runs: nothing may differ for the first of them."""
        _ = self.settings.machine, self.settings.clock, self.settings.loop_clock, self.settings.sm_clock
        if self.settings.device == "cpu":
            _limit_memory()

    @cached_property
    def journal(self) -> record.Journal:
        """Begins with what was carried over, so that it never holds less than the file that it goes on from."""
        assert self.output is not None
        journal = record.Journal(self.output, self.settings.machine)
        for one in self.carried.values():
            journal.add(one)
        return journal

    @property
    def records(self) -> list[Record]:
        return [*self.carried.values(), *(result.record for result in self.results.values())]

    def complete(self, output_json: Record) -> None:
        """pytest-benchmark's JSON with its samples trimmed, what was carried over, and our records."""
        for entry in output_json["benchmarks"]:
            if "data" in entry["stats"]:
                entry["stats"]["data"] = record.trim(entry["stats"]["data"])
        output_json["benchmarks"] = [*self.carried_entries, *output_json["benchmarks"]]
        facts = self.settings.machine if self.results else self.carried_machine
        output_json["lmsys"] = record.payload(facts or {}, self.records)
        self.saved = True

    def resume(self, found: Record, entries: Sequence[Record]) -> None:
        """Take over what an earlier run has done, under the same memory limit.

        ValueError when a fact of the machine or the code was another: one file states them once for all its records.
        """
        here = machine.describe(self.settings.device, command="", seed=0, sweep="")
        for fact in ("name", "torch", "triton", "driver", "commit"):
            if (there := found["machine"].get(fact)) != here[fact]:
                raise ValueError(f"it was measured with {fact} {there!r}, this is {here[fact]!r}: run that apart")
        self.carried |= {one["id"]: one for one in found["records"] if self._stands(one)}
        self.carried_entries += [one for one in entries if one["extra_info"].get("id") in self.carried]
        self.carried_machine = found["machine"]

    def _stands(self, one: Record) -> bool:
        same_question = one.get("memory_limit_bytes") == self.settings.memory_limit_bytes
        return one["outcome"] in DONE and one.get("reason") != NOT_TIMED and same_question

    def summary(self) -> Iterator[str]:
        counts = Counter(one["outcome"] for one in self.records)
        if counts:
            yield ", ".join(f"{counts[outcome]} {outcome}" for outcome in record.OUTCOMES if counts[outcome])
        for one in self.records:
            if one["outcome"] in ("wrong", "error"):
                ratio = f" (error ratio {one['error_ratio']:.3g})" if one.get("error_ratio") is not None else ""
                yield f"{one['outcome']} {one['id']}{ratio}: {one['reason']}"


def _limit_memory() -> None:
    """On a CPU, what is too large must fail as the GPU's allocator does, not bring the machine down."""
    if sys.platform != "linux":
        return
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(facts["MemAvailable"].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (available if hard < 0 else min(available, hard), hard))


def cap_gpu_memory(limit_bytes: int) -> None:
    """The allocator of this process gives no more. ValueError for more than the GPU has."""
    total = torch.cuda.get_device_properties(0).total_memory
    if limit_bytes > total:
        limit, most = (f"{size / 2**30:.4g}GiB" for size in (limit_bytes, total))
        raise ValueError(f"--memory-limit {limit} is more than the {most} of this GPU")
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total)


class ResultFile:
    """pytest-benchmark's output file, opened when it is written and not before: until then the old content stands.

    pytest-benchmark takes a path from 5.3.1 on, before that an open file; this is either.
    """

    def __init__(self, path: Path):
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __enter__(self) -> BinaryIO:
        self._file = self.path.open("wb")
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __repr__(self) -> str:
        return str(self.path)


def read_results(path: Path) -> Iterator[tuple[Record, list[Record]]]:
    """(our part, pytest-benchmark's entries) of a result file, then of the journal of a killed run that resumed it."""
    journal = path.with_name(path.name + ".partial")
    is_result = path.suffix != ".partial" and path.is_file() and path.stat().st_size
    if is_result or not journal.is_file():
        yield record.load(path), json.loads(path.read_text()).get("benchmarks", []) if is_result else []
    if journal.is_file():
        yield record.load(journal), []
