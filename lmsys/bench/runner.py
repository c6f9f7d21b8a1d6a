"""The one runner. For each group of cases it owns the order:

why not -> setup -> first call -> check -> samples, in turns -> check of timed calls -> memory -> record.
"""

import json
from collections.abc import Callable, Iterator
from functools import cached_property

from lmsys.bench import fields
from lmsys.bench.benchmark import Benchmark, Case, Cases, Settings
from lmsys.bench.fields import Record
from lmsys.bench.guard import Guard
from lmsys.bench.proof import seal
from lmsys.bench.ranks import Ranks
from lmsys.bench.trial import Result, Trial
from lmsys.measure import machine
from lmsys.measure.clock import Clock, CpuClock, clock_of
from lmsys.measure.limits import Limits, limits_of
from lmsys.measure.memory import cap_host_memory


class Runner:
    """Runs groups of cases. The clocks, the machine and its ceilings are made on first use, once a run.

    say  tells the user what is going on
    """

    def __init__(self, settings: Settings, say: Callable[[str], None] = lambda _: None):
        self.settings, self.say = settings, say
        self.kernels: dict[str, dict[str, str]] = {}  # by a row's target: names and hashes of what it has loaded

    def run(self, benchmark: Benchmark, cases: Cases) -> Iterator[Result]:
        """A result for each case of one group, in their order unless the benchmark streams them.

        What fails outside a row's own calls fails every case that was still good.
        """
        _ = self.guard  # before a row runs
        trial = Trial(benchmark, cases, self)
        with benchmark.context(cases):
            trial.attempt(trial.prepare)
            try:
                for turn in trial.turns():
                    trial.attempt(trial.take, turn)
                    if benchmark.streams:
                        yield from trial.results(turn)
            except KeyboardInterrupt:
                if benchmark.keeps_interrupted:
                    yield from trial.results(trial.sampled(self.settings.min_rounds))
                raise
            trial.attempt(trial.check_again)
        trial.release()
        yield from trial.results(cases)

    def ready(self) -> None:
        """Everything that is made once, before a row runs: nothing may differ for the first of them."""
        if "guard" in vars(self):
            return
        self.say("measuring what this machine reaches")
        _ = self.guard, self.machine, self.clock("loop"), self.sm_clock
        if self.settings.device == "cpu":
            cap_host_memory()

    @cached_property
    def machine(self) -> Record:
        one = self.settings
        facts = machine.describe(one.device, command=one.command, seed=one.seed, sweep=one.sweep)
        facts["limits"] = self.limits.to_json() if self.limits else None
        clock = self.clock("device")
        facts["clock_share"] = {"seconds": clock.share_s, "measured_by": clock.share_by}
        return facts | {"ceilings": machine.measure_ceilings(one.device)}

    def measure_ceilings_again(self) -> list[str]:
        """Keeps the higher of each; sentences on what has moved."""
        before, after = self.machine["ceilings"], machine.measure_ceilings(self.settings.device)
        self.machine["ceilings"] = machine.best_of(before, after)
        self.machine["ceilings_moved"] = machine.moved(before, after)
        return list(self.machine["ceilings_moved"])

    def rated(self, benchmark: Benchmark, case: Case, record: Record) -> Record:
        """The record with its rates as shares of what the machine reaches by now, sealed."""
        record = _completed(record | benchmark.metrics(case, record, self.machine), benchmark)
        record = json.loads(json.dumps(record))  # as a reader gets it
        return record | {"seal": seal(record)}

    @cached_property
    def limits(self) -> Limits | None:
        return limits_of(self.settings.device, machine.max_sm_mhz())

    @cached_property
    def _clocks(self) -> dict[str, Clock]:
        device = self.settings.device
        return {"device": clock_of(device), "loop": clock_of(device, ahead=False), "host": CpuClock()}

    def clock(self, kind: str) -> Clock:
        return self._clocks[kind]

    @cached_property
    def sm_clock(self) -> Callable[[], float | None]:
        return machine.sm_clock_reader()

    @cached_property
    def guard(self) -> Guard:
        """Remembers the judges as they are before the first row's file is imported."""
        return Guard()

    @cached_property
    def ranks(self) -> Ranks:
        """Processes for what several do together."""
        return Ranks(self.settings.memory_limit_bytes)

    def close(self) -> None:
        if "ranks" in self.__dict__:
            self.ranks.close()


def _completed(record: Record, benchmark: Benchmark) -> Record:
    """With the fields that are functions of others. ValueError for a field that nobody has declared."""
    known = fields.declared(fields.COMMON, benchmark.fields)
    for field in known.values():
        if field.of is not None:
            record[field.name] = field.value(record)
    if undeclared := sorted(record.keys() - known.keys()):
        raise ValueError(f"benchmark {benchmark.name!r}: the fields {undeclared} of its records are declared nowhere")
    return record
