"""The instruments of a run, made on first use: clocks, sensors, the machine and its limits, the guard, ranks.

`lmsys.bench.runner.Runner` is a subclass of `Instruments`, and each `lmsys.bench.trial.Trial` reads its instruments
from the runner. To add an instrument, add a `cached_property` to `Instruments`; it is in `vars(self)` once it has been
made. If making it could change the times of a *row* (an implementation under test), also read it in `ready`, so that it
is made before the first row runs.
"""

import json
import os
from collections.abc import Callable
from functools import cached_property

from lmsys.bench import fields, watch
from lmsys.bench.benchmark import Benchmark, Settings
from lmsys.bench.case import Case
from lmsys.bench.guard import Guard
from lmsys.bench.ranks import Ranks
from lmsys.bench.record import seal
from lmsys.bench.validate import check_value
from lmsys.measure import machine, memory, step, turns
from lmsys.measure.clock import Clock, CpuClock, clock_of
from lmsys.measure.machine import Limits, limits_of
from lmsys.measure.sensors import Conditions, Sensors, sensors_of
from lmsys.values import hold


class Instruments:
    """All instruments of one process. ValueError for a memory limit that is more than the GPU has.

    settings   how to measure
    say        called with each line for the user
    heartbeat  in a worker process: it announces the row that is at work to the parent process (`lmsys.bench.watch`);
               None: this process is no worker

    Attributes:
    parent     the id of the process from which all processes of the run descend: in a worker, that of the process that
               started it; else that of this process. What other processes take of the device counts as a disturbance
    turns      with --against, how this worker takes turns with the other one (`lmsys.measure.turns`): one of the two
               runs today's rows, the other those of an earlier state of the code
    kernels    {target of a row: {name of a Triton kernel that it has loaded: hash}}; a target is the place of the row's
               code, "module:name" or "path.py:name"
    """

    def __init__(
        self, settings: Settings, say: Callable[[str], None] = step.nothing, heartbeat: watch.Heartbeat | None = None
    ):
        self.settings, self.say = settings, say
        self.heartbeat, self.is_watched = heartbeat or watch.Heartbeat(), heartbeat is not None
        self.parent = os.getppid() if self.is_watched else os.getpid()
        self.turns: turns.Turns = turns.ALONE
        self.kernels: dict[str, dict[str, str]] = {}
        if self.settings.memory_limit_bytes is not None and self.settings.device == "cuda":
            memory.cap_gpu_memory(self.settings.memory_limit_bytes)

    def ready(self) -> fields.Record:
        """Makes all instruments before the first row runs, so that no row differs by them. Returns `machine`."""
        if "machine" not in vars(self) and self.settings.timed:  # a worker may have been given the machine's facts
            self.say("measuring what this machine reaches")
            if self.settings.energy and (why := self.sensors.why_no_joules):
                self.say(f"--energy: no energy is measured: {why}")
        _ = self.guard, self.machine, self.clocks, self.sensors, self.memory_cap  # reading makes them
        return self.machine

    @cached_property
    def memory_cap(self) -> None:
        """Limits the memory of this process, on a CPU; the allocator of a GPU has its own limit.

        This is a cached property so that the limit is set once; its value is None.
        """
        if self.settings.device == "cpu":
            memory.cap_host_memory()

    @cached_property
    def machine(self) -> fields.Record:
        """The facts of the machine, as they stand in a result file, with its ceilings if rows are timed."""
        settings = self.settings
        facts = machine.describe(settings.device, command=settings.command, seed=settings.seed, sweep=settings.sweep)
        clock, limits = self.clocks["device"], vars(self.limits) if self.limits else None
        facts |= {"limits": limits, "clock_share": {"seconds": clock.share_s, "measured_by": clock.share_by}}
        if settings.timed:
            facts["ceilings"] = self.ceilings()
        if settings.timed and settings.sustained:
            self.say("measuring what it sustains")
            facts["sustained"] = machine.measure_sustained(settings.device, self.sensors)
        return facts

    def ceilings(self) -> fields.Record:
        """The rates that large matmuls and a large copy reach now, each measured for the time of two rows at most."""
        return machine.measure_ceilings(self.settings.device, 2 * self.settings.seconds_per_row)

    def rated(self, benchmark: Benchmark, case: Case, record: fields.Record) -> fields.Record:
        """The record with its rates, their shares of the machine's ceilings, and all derived fields; sealed.

        ValueError for a field that is declared nowhere, as `all_declared` raises it, and for a value that the field
        may not have, such as NaN.
        """
        record = all_declared(benchmark, record | benchmark.metrics(case, record, self.machine))
        for field in fields.declared(fields.COMMON, benchmark.fields).values():
            if field.of is not None:
                record[field.name] = field.value(record)
            check_value(  # else no reader would take the file
                f"benchmark {benchmark.name!r}, record {case.id!r}: {field.name}",
                record.get(field.name),
                field.to_json(),
            )
        record = json.loads(json.dumps(record, allow_nan=False))  # as a reader gets it; NaN may be in a list
        return record | {"seal": seal(record)}

    @cached_property
    def limits(self) -> Limits | None:
        """The rates that this device cannot exceed; None if they are unknown. A row that is faster counts as wrong."""
        return limits_of(self.settings.device, self.sensors.settings().get("max_sm_mhz"))

    @cached_property
    def clocks(self) -> dict[str, Clock]:
        """{kind: clock}; a benchmark's `clock` names the kind."""
        device = self.settings.device
        # ahead=False: each call begins on an idle device.
        return {"device": clock_of(device), "loop": clock_of(device, ahead=False), "host": CpuClock()}

    @cached_property
    def sensors(self) -> Sensors:
        return sensors_of(self.settings.device)

    def conditions(self) -> Conditions:
        """Starts to record conditions on the device, such as its clock rate and power, and returns the recorder.

        A clock that reads impossible times asks the recorder how many processes of other programs use the device.
        """
        by_host = self.settings.device == "cpu" or self.settings.apart  # a row's own process must be woken for a call
        now = Conditions(self.sensors, self.parent, by_host)
        for clock in self.clocks.values():
            clock.others = now.strangers
        return now

    @cached_property
    def guard(self) -> Guard:
        """The guard. It remembers the functions that judge rows as they are before the first row's file is imported."""
        return Guard()

    @cached_property
    def ranks(self) -> Ranks:
        """The ranks on which collectives and data parallelism are measured."""
        seconds = self.settings.deadline_s
        return Ranks(
            self.settings.memory_limit_bytes,
            timeout_s=0.7 * seconds,  # shorter than this process's deadline, so that the error names the rank
            alive=lambda: self.heartbeat.renew(seconds),
            parent=self.parent,
        )

    def close(self) -> None:
        """Ends the ranks, if any were started."""
        if "ranks" in self.__dict__:
            self.ranks.close()


def all_declared(benchmark: Benchmark, record: fields.Record) -> fields.Record:
    """The record, unchanged. ValueError if it has a field that neither the benchmark nor `fields.COMMON` declares."""
    unknown = sorted(record.keys() - fields.declared(fields.COMMON, benchmark.fields).keys())
    hold((not unknown, f"benchmark {benchmark.name!r}: the fields {unknown} of its records are declared nowhere"))
    return record
