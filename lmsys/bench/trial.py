"""A trial: one group of cases on its way from inputs to records.

A *row* is an implementation under test, a *case* is one row with one set of sizes, a *group* is the cases that share
inputs. `lmsys.bench.runner` makes a `Trial` per group and calls its parts in order: prepare (inputs, first calls,
checks), take (samples and checks of timed calls, memory and energy, turn by turn), check_again, repeat, result. A
*candidate* holds the state of a row while the group runs; a *turn* is the cases that are sampled together. `result`
makes the record from what these parts and the benchmark's hooks have found: a new field of every record goes there, and
into `fields.COMMON`. A benchmark that overrides `sample` gets the trial, and calls `interleave`, `candidate` and others
of its names: change them in benchmarks/, too.

A call that raises has a failure, (outcome, reason), which `compare.attempt` makes of the exception. `candidate.watched`
does this for calls of a row's code, and `candidate.attempt` also notes the failure on the candidate. `Trial.own_part`
is for the bench's own work: if it fails, all rows fail.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from lmsys import draws
from lmsys.bench import findings, instruments, watch
from lmsys.bench.benchmark import Benchmark, Cases, judges_calls
from lmsys.bench.case import Candidate, Case, Measurement, facts_of, verdict
from lmsys.bench.fields import Record
from lmsys.bench.record import rounded, summarize
from lmsys.measure import clock, energy, profile, repeats
from lmsys.measure.compare import attempt, interleave, release_memory
from lmsys.measure.sensors import Reading
from lmsys.measure.step import Failure, Step, nothing

# NOT_TIMED, IN_RANGES, INTERPRETED: the `reason` of a case that is right and was not timed.
NOT_TIMED = "verified, not timed (--benchmark-disable)"
IN_RANGES = "called in NVTX ranges, not timed (--nvtx)"
INTERPRETED = "verified in Triton's interpreter, never timed"
# The `energy_note` of a case that other processes run, such as ranks.
OTHERS_ENERGY = "energy is measured of calls that the bench's own process makes again and again: here others make them"


Endings = Mapping[str, tuple[str, str, bool]]  # {case id: (outcome, reason, True if the case's process ended)}


class Trial:
    """One group on its way from inputs to records.

    candidates    by `Benchmark.key` of a case: the state of its row
    measurements  by case id: its samples, the failure of its timed calls, and fields of its record
    ended         endings of cases that are not run again, because they ended an earlier process
    """

    def __init__(
        self, benchmark: Benchmark, cases: Cases, runner: instruments.Instruments, ended: Endings | None = None
    ):
        self.benchmark, self.cases, self.runner, self.ended = benchmark, cases, runner, ended or {}
        self.settings = runner.settings
        self.candidates: dict[Any, Candidate] = {}
        for case in cases:
            self.candidates.setdefault(benchmark.key(case), Candidate(case=case))
        on_gpu = self.settings.device == "cuda" and runner.is_watched
        self.watch = watch.Watch(self.candidates.values(), self.settings, runner.heartbeat, on_gpu)
        for candidate in self.candidates.values():
            candidate.watched = partial(self.watch.watched, candidate)
        self.measurements = {case.id: Measurement() for case in cases}
        self.setup: Any = None
        self._readings: list[Reading] = []  # of the sensors, in the present turn
        self.called_here: set[str] = set()  # cases whose calls this process makes

    def candidate(self, case: Case) -> Candidate:
        """The candidate of a case; cases with one `Benchmark.key` share it."""
        return self.candidates[self.benchmark.key(case)]

    def good(self) -> list[Candidate]:
        """The candidates that have not failed."""
        return [candidate for candidate in self.candidates.values() if candidate.outcome == "ok"]

    def own_part(self, call: Callable[..., Any], *args: Any) -> None:
        """Runs a part of the trial that is the bench's own work. If it fails, every candidate that was ok fails.

        A failure before there are inputs keeps its outcome: inputs that do not fit into memory are "oom" for every row.
        A later failure is an "error". In both cases the reason says that the bench failed.
        """
        _, failure = attempt(call, *args)
        self._mend(self.good())  # first: if a row has replaced a judging function, the rows are wrong
        if failure:
            for candidate in self.good():
                outcome = failure[0] if self.setup is None else "error"
                candidate.failed(outcome, f"the bench failed, not the row: {failure[1]}")

    def prepare(self) -> None:
        """Makes the inputs, calls each row for the first time, and checks it. Rows that cannot run here fail."""
        benchmark = self.benchmark
        for case in self.cases:
            if case.id in self.ended:
                outcome, reason, crashed = self.ended[case.id]
                self.candidate(case).failed(outcome, reason)
                if crashed:
                    self.candidate(case).notes["crashed"] = True
        self.watch.doing = "while it was asked whether it can run"
        for candidate in self.good():
            why, failure = candidate.watched(benchmark.why_not, candidate.case)
            # Under --against an error of the earlier state becomes "unsupported": otherwise today's row would be
            # reported as mended.
            if failure and self.settings.earlier:
                why, failure = f"the earlier state cannot run it: {failure[1]}", None
            if why or failure:
                candidate.failed(*(failure or ("unsupported", why)))
        if not self.good():
            return
        for case in self.cases:
            self.measurements[case.id].failure = benchmark.no_sample(case)  # for cases that are checked, but not timed
        self.setup = benchmark.setup(self.cases, self.settings)
        benchmark.redraw(self.setup, self.settings.seed)
        self.watch.doing = "in its first call"
        for candidate in self.good() if benchmark.opens else ():
            self._first_call(candidate)
        self.watch.doing = "in its check"
        benchmark.check_all(self.good(), self.setup, self.runner)
        release_memory()

    def _first_call(self, candidate: Candidate) -> None:
        """Opens the candidate, and notes how long that took and which kernels ran."""

        def first_call() -> None:
            start = time.perf_counter()
            with findings.interpreted_kernels() as launched, findings.loaded_kernels() as kernels:
                self.benchmark.open(candidate, self.setup)
            self.runner.kernels.setdefault(candidate.entry.target, {}).update(kernels)
            clock.synchronize(self.settings.device)
            candidate.compile_s, candidate.interpreted = (
                time.perf_counter() - start,
                bool(launched) or getattr(candidate.call, "interpreted", False),
            )

        candidate.attempt(first_call)
        self._mend([candidate])

    def _mend(self, suspects: Sequence[Candidate]) -> None:
        """Puts back the functions, of those that judge and measure, that a row has replaced; then all suspects fail."""
        if names := self.runner.guard.mend():
            for candidate in suspects:
                candidate.failed("wrong", f"a row replaced {', '.join(names)}, by which it is judged")

    def is_able(self, case: Case) -> bool:
        """True while the case is still to be timed."""
        candidate = self.candidate(case)
        return candidate.outcome == "ok" and not candidate.interpreted and not self.measurements[case.id].failure

    def take(self, turn: Cases) -> None:
        """Samples the cases of a turn, checks timed calls, and measures memory and energy, into `measurements`."""
        turn = [case for case in turn if self.is_able(case)]  # without rows that have failed in an earlier turn
        if not turn:
            return
        self.watch.doing = "while it was timed"
        if len(turn) == 1:  # the row at work is known, even if `sample` announces no call (as work on ranks)
            self.watch.beat(self.candidate(turn[0]))
        conditions, self._readings = self.runner.conditions(), []
        self.benchmark.sample(turn, self)  # by default that calls `interleave` below
        self.watch.heartbeat.rest()
        fields = conditions.record(self._readings)
        for case in turn:
            self.measurements[case.id].record = fields | self.measurements[case.id].record
        self._mend([self.candidate(case) for case in turn])
        self.watch.doing = "when timed calls were checked"
        for case in turn:
            self._check_timed(case)
        self.watch.doing = "when its memory was measured"
        for case in turn:
            candidate, measurement = self.candidate(case), self.measurements[case.id]
            if measurement.samples and not measurement.failure:
                measurement.failure = self._unproved(case) or self.impossible(
                    case, statistics.median(measurement.samples)
                )
            if self.is_able(case) and measurement.samples is not None:
                fields, _ = candidate.watched(self.benchmark.inspect, case, candidate, self.setup)
                measurement.record |= fields or {}
                if self.settings.energy:
                    self.watch.doing = "when its energy was measured"
                    measurement.record |= self._energy(case)

    def _energy(self, case: Case) -> Record:
        """The record's fields on the energy of the case's calls, or `energy_note`, which says why there is none.

        The energy is measured after the case's samples and memory, in a pass of many calls, alone on the device.
        Inputs are drawn once, before the pass, since drawing takes energy too. So a row could return a result that it
        remembers: a row that is faster in the pass than its arithmetic allows gets no energy.
        """
        sensors, candidate = self.runner.sensors, self.candidate(case)
        if why_not := sensors.why_no_joules if case.id in self.called_here else OTHERS_ENERGY:
            return {"energy_note": why_not}

        def wait() -> None:
            clock.synchronize(self.settings.device)
            # --deadline bounds a few calls, and this pass has many: so the deadline starts anew at each wait.
            self.watch.heartbeat.renew(self.settings.deadline_s)

        def measure() -> energy.Energy:
            step = self.benchmark.step(case, candidate, self.setup)
            self.redraw_of(step)(self.settings.seed)
            step.redraw_late(self.settings.seed)
            return energy.of_step(step, sensors, wait)

        conditions = self.runner.conditions()
        measured, failure = candidate.watched(measure)
        if failure := failure or self.impossible(case, measured.call_s, cached=True):
            return {"energy_note": failure[1]}
        return measured.record(self.benchmark.tokens(case), conditions.record([sensors.read()])["disturbed"])

    def redraw_of(self, step: Step) -> Callable[[int], None]:
        """The function that draws the inputs of a step: its own `redraw` if it has one, else the benchmark's."""
        return partial(self.benchmark.redraw, self.setup) if step.redraw is nothing else step.redraw

    def impossible(self, case: Any, time_s: float, cached: bool = False) -> Failure | None:
        """A failure, "wrong", if no right call of the case can be that fast on this machine; else None.

        time_s  seconds of a call
        cached  True: the inputs may be in a cache, so reading them may take no time
        """
        work, limits = self.benchmark.least_work(case), self.runner.limits
        if work is None or limits is None:
            return None
        flops, dtype, read_bytes = work
        if time_s >= (least_s := limits.least_s(flops, dtype, 0 if cached else read_bytes)):
            return None
        return "wrong", (
            f"faster than this machine can be: {time_s * 1e6:.3g} us, where its arithmetic and its reads take at least"
            f" {least_s * 1e6:.3g}"
        )

    def interleave(self, turn: Cases, min_rounds: int | None = None) -> None:
        """Times the steps of a turn side by side, in at least `min_rounds` rounds (default: the settings')."""
        steps, candidates = {}, {case.id: self.candidate(case) for case in turn}
        self.watch.doing = "before it was timed"
        for case in turn:
            step, self.measurements[case.id].failure = self._step(case, candidates[case.id])
            if step is not None:
                steps[case.id] = step
        self.watch.expected_s = math.inf
        sampled = interleave(
            steps,
            self.runner.clocks[self.benchmark.clock],
            seconds=self.settings.seconds_per_row,
            min_rounds=min_rounds or self.settings.min_rounds,
            trials=self.benchmark.trials,  # calls before the sampling, by which it is planned
            look=self.runner.sensors.read,
            expect=partial(setattr, self.watch, "expected_s"),  # called with the seconds that all samples should take
            turns=self.runner.turns,  # with the worker of the other state of the code, under --against
        )
        self.watch.settle()
        self.watch.heartbeat.rest()
        self._readings += sampled.looks
        self.called_here |= steps.keys()
        for name in steps:
            measurement = self.measurements[name]
            measurement.samples, failure = sampled.samples.get(name), sampled.failures.get(name)
            measurement.failure = self.watch.failure(candidates[name], failure)
            measurement.kept = sampled.kept.get(name, [])
            measurement.record = {
                "clock_share_s": sampled.share_s.get(name),
                "prepare_s": sampled.prepare_s.get(name),
            }

    def call_in_ranges(self) -> None:
        """Calls each case in NVTX ranges of its id, for a profiler (--nvtx), instead of timing it."""
        self.watch.doing = "while it was called for a profiler"
        for case in self.cases:
            if self.is_able(case):
                step, failure = self._step(case, self.candidate(case))
                if step is not None:
                    _, failure = attempt(profile.call_in_ranges, case.id, step, self.settings.device)
                self.measurements[case.id].failure = failure
        self.watch.settle()
        self.watch.heartbeat.rest()

    def _step(self, case: Any, candidate: Candidate) -> tuple[Step | None, Failure | None]:
        """(the case's step, None) with each call watched, or (None, how making the step failed).

        If the step has no `redraw`, it gets the benchmark's. If it has no `keep` and the benchmark judges calls, it
        gets `watch.copied`.
        """
        step, failure = candidate.watched(self.benchmark.step, case, candidate, self.setup)
        if failure:
            return None, failure
        keep = watch.copied if step.keep is nothing and judges_calls(self.benchmark) else step.keep
        return self.watch.over(step, candidate, self.redraw_of(step), keep), None

    def _check_timed(self, case: Case) -> None:
        """Judges the kept timed calls, each on its own inputs, which are drawn again. Stops at the first wrong call."""
        candidate, measurement = self.candidate(case), self.measurements[case.id]
        for kept in sorted(measurement.kept, key=attrgetter("index")):
            if not self.is_able(case):
                break
            self.benchmark.redraw(self.setup, kept.draw)
            ratios, failure = candidate.watched(self.benchmark.judge, case, candidate, self.setup, kept)
            if ratios and not failure:
                worst, failure = verdict(ratios)
                candidate.error_ratio = max(worst or 0.0, candidate.error_ratio or 0.0)
                call = {"call": kept.index, "draw": kept.draw, "key": kept.key, "error_ratios": dict(ratios)}
                measurement.proof.append(call | kept.evidence)
            if failure:
                reason = f"right before it was timed, not in timed call {kept.index}: {failure[1]}"
                measurement.failure = failure[0], reason
        measurement.kept = []

    def _unproved(self, case: Case) -> Failure | None:
        """A failure, "wrong", if fewer timed calls were checked than the benchmark asks for (`num_proofs`); else None.

        Fewer ones mean that kept calls were removed before they could be checked, as a row that cheats may do.
        """
        measurement = self.measurements[case.id]
        proved, least = len(measurement.proof), min(self.benchmark.num_proofs, len(measurement.samples or ()))
        return (
            ("wrong", f"{proved} of its timed calls were checked, where {least} are kept")
            if proved < least and self.is_able(case)
            else None
        )

    def check_again(self) -> None:
        """Checks once more, on new inputs, the rows of which no timed call was checked."""
        self.watch.doing = "in its check after it was timed"
        again = dict[Any, Candidate]()
        for case in self.cases:
            measurement = self.measurements[case.id]
            if self.is_able(case) and measurement.samples and not measurement.proof:
                again[self.benchmark.key(case)] = self.candidate(case)
        if again:
            self.benchmark.redraw(self.setup, self.settings.seed + 2)  # another draw than that of `prepare`
            self.benchmark.check_all(list(again.values()), self.setup, self.runner)
        for candidate in again.values():
            if candidate.outcome != "ok":
                candidate.reason = f"right before it was timed, not after: {candidate.reason}"

    def repeat(self) -> None:
        """Calls each timed row several times on one draw, and notes whether its results have the same bits.

        This comes last, since it also calls rows with a batch of one: a row may compile anew for that, and its calls of
        other shapes may be slower from then on. A benchmark that does not override `outputs` is left out.
        """
        if type(self.benchmark).outputs is Benchmark.outputs:
            return
        if cases := [case for case in self.cases if self.measurements[case.id].samples and self.is_able(case)]:
            self.benchmark.redraw(self.setup, self.settings.seed)
        self.watch.doing = "when it was called again on the same inputs"
        for candidate in {self.benchmark.key(case): self.candidate(case) for case in cases}.values():
            candidate.notes["same_bits"] = self._same_bits(candidate)

    def _same_bits(self, candidate: Candidate) -> Record:
        """The record's field `same_bits`, found by repeated calls on the present inputs.

        calls     how many calls were compared
        differ    {tensor: largest difference} of the tensors whose bits differed from the first call's
        elements  the elements of the batch that were then called alone; [] if a batch cannot be divided
        alone     {tensor: largest difference} of the tensors that repeat, but have other bits if an element is called
                  alone
        failure   why the calls could not be compared, or None. The record keeps its other fields in both cases

        A row whose calls differ is not wrong.
        """
        record: Record = {"calls": 0, "differ": {}, "elements": [], "alone": {}, "failure": None}
        call = partial(self.benchmark.outputs, candidate, self.setup)
        again, failure = candidate.watched(repeats.repeated, call, 0.1 * self.settings.seconds_per_row)
        if failure:
            return record | {"failure": failure[1]}  # (outcome, reason): the reason
        first, record["calls"], record["differ"] = again
        whole = {name: x for name, x in first.items() if name not in record["differ"]}

        def alone() -> Record:
            """`elements` and `alone`: calls the first and the last element of the batch alone."""
            batch, differ = self.benchmark.batch_of(candidate), dict[str, float]()
            elements = [0, batch - 1] if batch > 1 else []
            for element in elements:
                sizes = repeats.apart(call(element), {name: x[[element]] for name, x in whole.items()})
                differ |= {name: max(size, differ.get(name, 0.0)) for name, size in sizes.items()}
            return {"elements": elements, "alone": differ}

        finding, failure = candidate.watched(alone)
        return record | ({"failure": failure[1]} if failure else finding)

    def release(self) -> None:
        """Drops inputs and rows' state, so that the next group's gc.freeze() does not keep them."""
        self.setup = None
        self.watch.state.close()
        for candidate in self.candidates.values():
            candidate.call = candidate.state = None
        release_memory()

    def ending(self, case: Case) -> tuple[str, str | None]:
        """(outcome, reason) of a case as things stand: its own failure, else its candidate's."""
        candidate, failure = self.candidate(case), self.measurements[case.id].failure
        return failure if failure and candidate.outcome == "ok" else (candidate.outcome, candidate.reason)

    def result(self, case: Case) -> Record:
        """The case's record, sealed; with its samples if it is right and was timed."""
        benchmark, candidate, measurement = self.benchmark, self.candidate(case), self.measurements[case.id]
        outcome, reason = self.ending(case)
        samples = measurement.samples if outcome == "ok" else None
        if samples is not None and not samples:
            reason = "its benchmark has taken no samples"
        if outcome == "ok" and samples is None and reason is None:
            reason = INTERPRETED if candidate.interpreted else IN_RANGES if self.settings.nvtx else NOT_TIMED
        record: Record = {
            **facts_of(case),
            "benchmark": benchmark.name,
            "outcome": outcome,
            "reason": reason,
            "comparison": f"{case.comparison} {self.runner.machine['date']}",
            "clock": benchmark.clock_name(case, self.runner),
            "compile_s": candidate.compile_s,
            "error_ratio": candidate.error_ratio,
            "memory_limit_bytes": self.settings.memory_limit_bytes,
            "own_process": candidate.entry.apart,
        }
        # A benchmark that streams has turns of one case.
        record |= candidate.notes | ({"alone": True} if benchmark.streams else {})
        if samples:
            samples = rounded(samples)
            record |= summarize(samples) | {"samples_s": samples} | measurement.record
            record["proof"] = {
                "generator": draws.VERSION,
                "seed": self.settings.seed,
                "source": findings.source_of(candidate.entry),
                "kernels": self.runner.kernels.get(candidate.entry.target, {}),
                "calls": measurement.proof,
            }
        return self.runner.rated(benchmark, case, record)
