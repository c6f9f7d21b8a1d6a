"""The one runner. For each group of cases it owns the order:

why not -> setup -> first call -> check -> samples, in turns -> check of timed calls -> memory ->
same bits -> record.
"""

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from lmsys.bench.benchmark import Benchmark, Case, Cases, Collected, Settings
from lmsys.bench.fields import COMMON, Grid, Record, declared, filled, given_axes
from lmsys.bench.guard import Guard
from lmsys.bench.ranks import Ranks
from lmsys.bench.record import seal
from lmsys.bench.trial import Endings, Result, Trial
from lmsys.bench.watch import NOBODY, Heartbeat
from lmsys.measure import machine
from lmsys.measure.clock import Clock, CpuClock, clock_of, synchronize
from lmsys.measure.compare import Lost, release_memory
from lmsys.measure.host import resident_bytes
from lmsys.measure.machine import Limits, limits_of
from lmsys.measure.memory import cap_gpu_memory, cap_host_memory
from lmsys.measure.sensors import Conditions, Sensors, sensors_of
from lmsys.measure.turns import ALONE, Turns
from lmsys.registry import Traits

RANKS_SHARE = 0.7  # of a deadline: ranks that hang end first, and say which
EATEN_BYTES = 2**28  # that a group has kept: it is told from what allocators hold


class MemoryEaten(Lost):
    """There is too little memory for the rest, and nobody knows whose fault it is."""


class Runner:
    """Runs groups of cases in this process. The clocks, the machine and its ceilings are made on first use, once a run.

    ValueError for a memory limit that is more than the GPU has.

    say        tells the user what is going on
    heartbeat  of a worker whose parent watches
    turns      with the worker that measures the same rows as they were
    """

    def __init__(
        self, settings: Settings, say: Callable[[str], None] = lambda _: None, heartbeat: Heartbeat | None = None
    ):
        self.settings, self.say = settings, say
        self.heartbeat, self.is_watched = heartbeat or Heartbeat(), heartbeat is not None
        self.turns: Turns = ALONE
        self.kernels: dict[str, dict[str, str]] = {}  # by a row's target: names and hashes of what it has loaded
        if self.settings.memory_limit_bytes is not None and self.settings.device == "cuda":
            cap_gpu_memory(self.settings.memory_limit_bytes)

    def collect(self, benchmark: Benchmark, grids: Sequence[Grid], texts: Mapping[str, str]) -> Collected:
        """The benchmark's cases, with what the command line says of its axes. ValueError for bad values."""
        if any(".py" in text for text in texts.values()):
            self.ready()  # before a user's file is imported
        self.heartbeat.beat(NOBODY, "while it was imported", self.settings.deadline_s)
        try:
            given = given_axes(benchmark.axes, texts)
            asked = [filled(grid, benchmark.axes, given) for grid in grids]
            cases = {case.id: case for grid in asked for case in benchmark.cases(grid, self.settings)}
            if "guard" in vars(self) and (names := self.guard.mend()):
                raise ValueError(
                    f"a file replaces {', '.join(names)} when it is imported, by which its rows are judged"
                )
            pairs = [pair for case in cases.values() for pair in benchmark.rows_of(case).items()]
            rows = {(kind, row.name): row.to_json() | Traits.of(row).changed for kind, row in pairs}
            return Collected(cases, {name: case.group for name, case in cases.items()}, rows)
        finally:
            self.heartbeat.rest()

    def run(
        self,
        benchmark: Benchmark,
        cases: Cases,
        ended: Endings | None = None,
        begun: Callable[[list[list[str]]], None] = lambda _: None,
    ) -> Iterator[Result]:
        """A result for each case of one group, in their order unless the benchmark streams them.

        What fails outside a row's own calls fails every case that was still good. `ended`: how cases have ended before,
        which are not run; `begun` is told the cases of each row.
        """
        _ = self.guard  # before a row runs
        gc.freeze()  # what lives between groups is code, which the many collections of this one need not visit
        held = self._held()
        with benchmark.context(cases):
            trial = Trial(benchmark, cases, self, ended)
            begun(trial.ids)
            self._in_session(trial, trial.prepare)
            if self.settings.nvtx:
                trial.attempt(trial.call_in_ranges)
            try:
                for turn in trial.turns():
                    self._in_session(trial, trial.take, turn)
                    if benchmark.streams:
                        yield from trial.results(turn)
            except KeyboardInterrupt:
                if benchmark.keeps_interrupted:
                    yield from trial.results(trial.sampled(self.settings.min_rounds))
                raise
            self._in_session(trial, trial.check_again)
            self._in_session(trial, trial.repeat)
        trial.release()
        kept = self._held() - held
        if (
            self.is_watched
            and len(trial.candidates) > 1
            and any(trial.ending(case)[0] == "oom" for case in cases)
            and kept > EATEN_BYTES
        ):
            raise MemoryEaten(f"a row has kept {kept / 2**30:.1f} GiB of memory, and others found too little")
        yield from trial.results(cases)

    def _in_session(self, trial: Trial, part: Callable[..., None], *args: Any) -> None:
        """A part of the trial while the other worker, if there is one, waits; it then has the memory."""
        with self.turns.session():
            trial.attempt(part, *args)
            if self.turns is not ALONE:
                synchronize(self.settings.device)
                release_memory()

    def _held(self) -> int:
        """Bytes of the device's memory."""
        return torch.cuda.memory_allocated() if self.settings.device == "cuda" else resident_bytes()

    def facts(self) -> Record:
        """The machine and the code, without what has to be measured."""
        return machine.describe(self.settings.device, command="", seed=0, sweep="")

    def ready(self) -> Record:
        """Makes what is made once, before a row runs: nothing may differ for the first of them. The machine."""
        if "guard" in vars(self):
            return self.machine
        if "machine" not in vars(self) and self.settings.timed:
            self.say("measuring what this machine reaches")
            if self.settings.energy and (why := self.sensors.why_no_joules):
                self.say(f"--energy: no energy is measured: {why}")
        _ = self.guard, self.machine, self.clocks, self.sensors
        if self.settings.device == "cpu":
            cap_host_memory()
        return self.machine

    @cached_property
    def machine(self) -> Record:
        one = self.settings
        facts = machine.describe(one.device, command=one.command, seed=one.seed, sweep=one.sweep)
        facts["limits"] = vars(self.limits) if self.limits else None
        clock = self.clocks["device"]
        facts["clock_share"] = {"seconds": clock.share_s, "measured_by": clock.share_by}
        if one.timed:
            facts["ceilings"] = self._ceilings()
        if one.timed and one.sustained:
            self.say("measuring what it sustains")
            facts["sustained"] = machine.measure_sustained(one.device, self.sensors)
        return facts

    def _ceilings(self) -> Record:
        """Each for as long as two rows, so that a quick look is quick."""
        return machine.measure_ceilings(self.settings.device, 2 * self.settings.seconds_per_row)

    def rate_again(self, found: Sequence[tuple[Benchmark, Case, Record]]) -> tuple[list[str], list[Record]]:
        """By the higher of each ceiling's measurements, before the first row and now: what has moved, as sentences, and
        the records."""
        before, after = self.machine["ceilings"], self._ceilings()
        self.machine["ceilings"] = machine.best_of(before, after)
        self.machine["ceilings_moved"] = machine.moved(before, after)
        return list(self.machine["ceilings_moved"]), [self.rated(*one) for one in found]

    def rated(self, benchmark: Benchmark, case: Case, record: Record) -> Record:
        """The record with its rates as shares of what the machine reaches by now, sealed."""
        record = _completed(record | benchmark.metrics(case, record, self.machine), benchmark)
        record = json.loads(json.dumps(record))  # as a reader gets it
        return record | {"seal": seal(record)}

    @cached_property
    def limits(self) -> Limits | None:
        return limits_of(self.settings.device, self.sensors.settings().get("max_sm_mhz"))

    @cached_property
    def clocks(self) -> dict[str, Clock]:
        """By kind, as a benchmark's `clock` names it."""
        device = self.settings.device
        return {"device": clock_of(device), "loop": clock_of(device, ahead=False), "host": CpuClock()}

    @cached_property
    def sensors(self) -> Sensors:
        return sensors_of(self.settings.device)

    def conditions(self) -> Conditions:
        """The conditions on the device from now on; this run's own processes are no strangers there."""
        return Conditions(self.settings.device, self.sensors, os.getppid() if self.is_watched else os.getpid())

    @cached_property
    def guard(self) -> Guard:
        """Remembers the judges as they are before the first row's file is imported."""
        return Guard()

    @cached_property
    def ranks(self) -> Ranks:
        """Processes for what several do together."""
        seconds = self.settings.deadline_s
        return Ranks(self.settings.memory_limit_bytes, RANKS_SHARE * seconds, lambda: self.heartbeat.renew(seconds))

    def close(self) -> None:
        if "ranks" in self.__dict__:
            self.ranks.close()


def _completed(record: Record, benchmark: Benchmark) -> Record:
    """Adds the fields that are functions of others. ValueError for a field that nobody has declared."""
    known = declared(COMMON, benchmark.fields)
    for field in known.values():
        if field.of is not None:
            record[field.name] = field.value(record)
    if undeclared := sorted(record.keys() - known.keys()):
        raise ValueError(f"benchmark {benchmark.name!r}: the fields {undeclared} of its records are declared nowhere")
    return record
