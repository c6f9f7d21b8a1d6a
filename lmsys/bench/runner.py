"""The one runner: it collects a benchmark's cases, measures group after group, and decides the order of the steps.

A *row* is an implementation under test, a *case* is one row with one set of sizes, a *group* is the cases that share
inputs. The steps of a group, in their order:

why not (can the row run here?) -> setup -> first call -> check -> samples, in turns -> check of timed calls ->
memory -> energy, on request -> same bits (do repeated calls agree?) -> record.

`lmsys.bench.results.Session` calls the runner, in this process or, by default, in a worker (`lmsys.bench.isolation`).
The steps themselves are in `lmsys.bench.trial`: a new step is a method there, and a call of it in `Runner.run` or in a
method of `Trial` that `run` calls.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lmsys.bench import fields, guard, instruments, watch
from lmsys.bench.benchmark import Benchmark, Cases, Collected
from lmsys.bench.case import Case, facts_of
from lmsys.bench.trial import Endings, Trial
from lmsys.measure import clock, compare, host, machine, step, turns
from lmsys.registry import Traits, message_of, place_of
from lmsys.values import choice


class MemoryEaten(compare.Lost):
    """Raised when there is too little memory for the rest of a group, and the row at fault is not known.

    It ends the worker. `lmsys.bench.isolation` recognises it by the name of its class, and then runs each row of the
    group alone.
    """


class Runner(instruments.Instruments):
    """Runs groups of cases in this process.

    `lmsys.bench.isolation.Isolated` calls its methods in a worker by their names. A cached property of `Instruments` is
    in `vars(self)` once it has been made: so `"guard" in vars(self)` asks if there is a guard without making one.
    """

    def collect(self, benchmark: Benchmark, grids: Sequence[fields.Grid], texts: Mapping[str, str]) -> Collected:
        """The benchmark's cases and their rows, in the form of `Collected`. ValueError for bad values of axes.

        texts  values of axes on the command line, as `fields.given_axes` reads them
        """
        if any(".py" in text for text in texts.values()):
            _ = self.guard if self.is_watched else self.ready()  # before a user's file is imported
        self.heartbeat.beat(watch.NOBODY, "while it was imported", self.settings.deadline_s)
        try:
            cases, rows = dict[str, Case](), dict[tuple[str, str], fields.Record]()
            for grid in grids:
                grid = fields.filled(grid, benchmark.axes, fields.given_axes(benchmark.axes, texts))
                cases |= {case.id: case for case in benchmark.cases(grid, self.settings)}
            if "guard" in vars(self) and (names := self.guard.mend()):
                raise ValueError(
                    f"a file replaces {', '.join(names)} when it is imported, by which its rows are judged"
                )
            for case in cases.values():
                for kind, row in benchmark.rows_of(case).items():
                    rows[kind, row.name] = row.to_json() | Traits.of(row).changed
            return cases, rows
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"the cases of {benchmark.name!r}: {type(error).__name__}: {message_of(error)}{place_of(error)}"
            ) from error
        finally:
            self.heartbeat.rest()

    def run(
        self,
        benchmark: Benchmark,
        cases: Cases,
        ended: Endings | None = None,
        begun: Callable[[list[list[str]]], None] = step.nothing,
    ) -> Iterator[fields.Record]:
        """Yields a record for each case of one group, in their order unless the benchmark streams them.

        A failure outside of a row's own calls fails every case that was still ok.

        ended  the endings of cases that are not run, because they ended an earlier process (`trial.Endings`)
        begun  called with a list of case ids for each row, in the order in which the heartbeat numbers rows
        """
        self.guard.mend()
        self.guard = guard.Guard()  # before a row runs: a benchmark may have been imported since
        gc.freeze()  # the many garbage collections within a group then skip the objects that outlive it
        bytes_before = self._resident_bytes()
        with benchmark.context(cases):
            trial = Trial(benchmark, cases, self, ended)
            begun(list(fields.grouped((benchmark.key(case), case.id) for case in cases).values()))
            self._in_session(trial, trial.prepare)
            if self.settings.nvtx:
                trial.own_part(trial.call_in_ranges)
            for turn in benchmark.turns(cases) if self.settings.timed or benchmark.streams else ():
                self._in_session(trial, trial.take, turn)
                if benchmark.streams:
                    yield from map(trial.result, turn)
            self._in_session(trial, trial.check_again)
            self._in_session(trial, trial.repeat)
        trial.release()
        leaked = self._resident_bytes() - bytes_before
        if (
            self.is_watched
            and len(trial.candidates) > 1
            and any(trial.ending(case)[0] == "oom" for case in cases)
            and leaked > 2**28  # 256 MiB: less may be caches of allocators, more has leaked
        ):
            raise MemoryEaten(f"a row has kept {leaked / 2**30:.1f} GiB of memory, and others found too little")
        if not benchmark.streams:
            yield from map(trial.result, cases)

    def _in_session(self, trial: Trial, part: Callable[..., None], *args: Any) -> None:
        """Runs a part of the trial while the other worker of --against, if any, waits and has freed its memory."""
        with self.turns.session():
            trial.own_part(part, *args)
            if self.turns is not turns.ALONE:
                clock.synchronize(self.settings.device)
                compare.release_memory()

    def _resident_bytes(self) -> int:
        """Bytes of the device's memory that this process holds."""
        return torch.cuda.memory_allocated() if self.settings.device == "cuda" else host.resident_bytes()

    def facts(self) -> fields.Record:
        """The facts of the machine and the code, but for those that have to be measured; --resume compares them."""
        return machine.describe(self.settings.device, command="", seed=0, sweep="")

    def places(self, benchmark: Benchmark) -> dict[str, dict[str, str]]:
        """The `target` and `supports` of each row of the benchmark's tables, by the row's name.

        `lmsys.bench.paired` asks the worker of an earlier state of the code for them.
        """
        return {
            row.name: {"target": row.target, "supports": row.supports}
            for table in benchmark.tables.values()
            for row in table.values()
        }

    def made_up(self, cases: Sequence[tuple[Benchmark, Case]]) -> fields.Record:
        """Made-up results: facts of this machine, and a record of each case in which every measured number is 1.

        They show mistakes in a benchmark's metrics and layout before it is run. ValueError for a field that is declared
        nowhere, whether `metrics` returns it, or `metrics` or a field's `of` reads it.
        """
        ceilings = {"matmul_flops_per_s": {"float32": 1.0, "bfloat16": 1.0}, "copy_bytes_per_s": 1.0}
        facts, records = self.facts() | {"ceilings": ceilings}, list[fields.Record]()
        for benchmark, case in cases:
            declared = fields.declared(fields.COMMON, benchmark.fields)
            ones = {
                field.name: 1.0
                for field in declared.values()
                if field.role == "metric" or (field.role == "detail" and field.unit)
            }
            record = fields.Reads(ones | facts_of(case) | {"benchmark": benchmark.name, "outcome": "ok"})
            more, _ = compare.attempt(benchmark.metrics, case, record, facts)  # may fail: other fields are missing
            # `ones` once more, in place of numbers that `metrics` has computed.
            records.append(instruments.all_declared(benchmark, record | (more or {})) | ones)
            readers = {"metrics()": record}
            for field in declared.values():
                readers[f"field {field.name!r}"] = read = fields.Reads(records[-1])
                compare.attempt(field.value, read)
            for reader, name in [(reader, name) for reader, read in readers.items() for name in read.names]:
                choice(name, declared, f"benchmark {benchmark.name!r}: {reader} reads the field {name!r}: ")
        return {"machine": facts, "records": records}

    def rate(
        self, cases: Sequence[tuple[Benchmark, Case, fields.Record]], again: bool
    ) -> tuple[fields.Record, list[fields.Record]]:
        """(the machine, the records of these cases with their rates as shares of the machine's ceilings).

        again  True: the machine's ceilings are first measured once more. Each becomes the higher of both measurements,
               and the field `ceilings_moved` says which have moved
        """
        if again:
            before, after = self.machine["ceilings"], self.ceilings()
            self.machine["ceilings"] = machine.best_of(before, after)
            self.machine["ceilings_moved"] = machine.moved(before, after)
        return self.machine, [self.rated(*case) for case in cases]

    def ask(self, name: str, *args: Any) -> Any:
        """Returns what the method `name` returns; `Isolated.ask` does the same with a worker's runner."""
        return getattr(self, name)(*args)
