"""Samples several callables side by side, and turns the exception of a failing one into an outcome and a reason.

A *row* is one of these callables. `lmsys.bench.trial` calls `interleave` with a `Step` for each row, and gets the
samples of each; `attempt` turns whatever a row's call raises into an outcome and a reason. A new outcome goes into
`outcome_of`, into OUTCOMES of `lmsys.bench.record`, and into OUTCOMES and MEANINGS of `lmsys.reports.words`.

Under load the clock rate of a GPU changes, which changes a time by up to a fifth, so rows measured minutes apart cannot
be compared. Here all rows of a comparison take turns, in rounds: A B C, C A B, ... Round i of one row runs beside round
i of the others, and a speedup is the median over rounds of the ratio of two rows' times. The clock rate also depends on
the row just before. So each round has another random order, or one row would always come after the same other row.

Every round has its own inputs, drawn right before each call. Parts of the results of a few calls are kept, to be
checked afterwards. The calls and the parts are drawn from the system's entropy after the call, so that no row can know
them.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lmsys.measure.clock import LEAD_S, NUM_SPANS, SHORT_S, Clock, ClockError, Cost, CpuClock, synchronize
from lmsys.measure.step import Failure, Kept, Step, nothing
from lmsys.measure.turns import ALONE, Turns
from lmsys.processes import NO_CPU_MEMORY
from lmsys.values import shortened

MAX_ROUNDS = 200  # the most rounds of a call of `interleave`, unless its `min_rounds` is more
MOST_LOOKS = 20  # about how often the sensors are read during one sampling
MOST_OF_EXPECTED = 2.0  # sampling ends after this many times the expected wall time: the machine has become busy
FIRST_LEAD_S = 0.02  # seconds that a GPU waits before calls of unknown cost: almost any call is launched in less
_ENTROPY = random.SystemRandom()  # draws numbers of 53 bits, the most that every reader of JSON holds exactly


@dataclass
class Sampled:
    """The result of `interleave`. Each field but the last is a dict by the name of a row.

    samples    seconds of each timed call
    kept       the timed calls that are to be checked
    prepare_s  the least seconds that the untimed `prepare` before a call took
    share_s    seconds that were taken off each sample, since the clock itself adds them
    failures   outcome and reason of rows that failed during the sampling
    looks      the readings that `look` returned between rounds, for all rows together
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    kept: dict[str, list[Kept]] = field(default_factory=dict)
    prepare_s: dict[str, float] = field(default_factory=dict)
    share_s: dict[str, float] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    looks: list[Any] = field(default_factory=list)


class Lost(BaseException):
    """Raised when this process cannot measure any more rows, as when its device is lost: a worker then ends."""


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, Failure | None]:
    """(result of call(*args), None), or (None, (outcome, reason)) with the memory of the failed call released.

    Whatever the call raises is its failure, SystemExit included; only interrupts are raised again. Raises Lost if the
    device cannot be used any more.
    """
    try:
        return call(*args), None
    except (KeyboardInterrupt, Lost):
        raise
    except BaseException as error:
        failure = outcome_of(error)
    try:  # after some errors, such as an access out of bounds, every call to the device fails in the same way
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:
        lost = outcome_of(error)[1]
        raise Lost(f"{failure[1]} ({lost})" if failure[1] != lost else lost) from None
    release_memory()  # only here is the traceback gone, which held the call's tensors
    return None, failure


def outcome_of(error: BaseException) -> Failure:
    """(outcome, reason) of an exception: "oom" if memory ran out, else "error"; the reason is one short line.

    An exception with an attribute `failure`, a pair (outcome, reason), decides for itself.
    """
    try:
        known = getattr(error, "failure", None)
        if known is not None and known[0] in ("oom", "unsupported", "wrong", "error"):
            return str(known[0]), shortened(str(known[1]))
        text = str(error).strip()
    except BaseException:
        return "error", f"{type(error).__name__}, which cannot be printed"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_CPU_MEMORY in text:
        return "oom", shortened(". ".join(text.splitlines()[0].split(". ")[:2]) if text else "out of memory")
    return "error", shortened(f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}")


def release_memory() -> None:
    """Gives memory that nothing refers to back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def interleave(
    steps: Mapping[str, Step],
    clock: Clock,
    *,
    seconds: float,
    min_rounds: int,
    trials: int = 3,
    look: Callable[[], Any] = nothing,
    expect: Callable[[float], Any] = nothing,
    turns: Turns = ALONE,
) -> Sampled:
    """Samples every step, in turns, for about `seconds` of wall time each and at least `min_rounds` rounds.

    Sampling ends early, but not before `min_rounds` rounds, once it has taken twice as long as the trial calls
    predicted. If it takes turns with another process, it does not end early.

    A slow row gets fewer rounds than a quick one, so the lists of samples differ in length. They start in the same
    round, after rounds that only warm the device. With `clock.ahead`, on a GPU, the host enqueues two rounds ahead;
    where launching is slower than executing, the GPU is made to wait. Without it `step.before` runs before each sample.

    seconds     wall time of each row's samples, about
    min_rounds  the fewest rounds of each row
    trials      calls of each row before the sampling; the quickest one says what a call costs
    look        called between rounds, at even distances, about MOST_LOOKS times: it reads the device's sensors
    expect      called with the seconds that the sampling should take
    turns       takes turns with another process, which samples rows of the same names: as many rounds, on equal inputs
    """
    # Rows with a clock of their own: they run in processes of their own (`lmsys.bench.foreign`).
    apart = {name for name, step in steps.items() if step.clock is not Step.clock}
    taken = _Taken(steps, clock)
    if not (costs := taken.costs(trials)):
        return taken.result
    rounds = {
        name: max(min_rounds, min(MAX_ROUNDS, int(seconds / max(cost.host_s, cost.device_s))))
        for name, cost in costs.items()
    }
    warming = math.ceil(clock.warm_s / sum(cost.device_s for cost in costs.values()))
    # Both sides make the same number of rounds. Without another side there is no answer.
    theirs, their_warming = turns.exchange((rounds, warming)) or (dict[str, int](), 0)
    warming = max(warming, their_warming)
    rounds = {name: max(count, theirs.get(name, 0)) for name, count in rounds.items()}
    expected_s = sum(max(cost.host_s, cost.device_s) * (rounds[name] + warming) for name, cost in costs.items())
    expect(expected_s)
    # The clock measures the bench's own work between prepare and run, which is equal for all rows; 0 is any seed.
    clock.expect(partial(next(iter(steps.values())).redraw_late, 0))
    look_cost, distance = CpuClock().cost(look, lead_s=0), math.ceil(max(rounds.values()) / MOST_LOOKS)
    end_watch = clock.watch()
    if turns.together:
        turns.begin(-warming)
    else:
        clock.wait(2 * sum(cost.host_s for cost in (look_cost,) + tuple(costs.values())))
    until = time.monotonic() + MOST_OF_EXPECTED * expected_s
    for index in range(-warming, max(rounds.values())):  # rounds below 0 only warm the device
        order = _order(index, [name for name in taken.pending if index < rounds[name]], theirs)
        order.sort(key=apart.__contains__)  # rows in other processes come last: the device is idle after them
        if not order or (index >= min_rounds and time.monotonic() > until and not turns.together):
            break
        draw = turns.before(index, _ENTROPY.getrandbits(53))  # the number that all inputs of the round are drawn from
        looks = index % distance == 0
        host_s = looks * look_cost.host_s + sum(costs[name].host_s for name in order)
        if turns.together or apart:  # the device is idle; the first call after a wait is slower, so it is no sample
            clock.wait(2 * (host_s + costs[order[0]].host_s))
            taken.attempt(_call, order[0])
        else:
            # The device works on this round for the seconds that are subtracted. If launching the round takes longer,
            # the device waits for the difference, so that the host stays ahead. 1.25: launching may take longer now
            # than in the trial calls.
            clock.wait(1.25 * host_s - sum(costs[name].device_s for name in order))
        for name in order:
            taken.sample(name, draw, index)
        if looks:
            reading = look()
            taken.result.looks += [reading] if index >= 0 else []
        if turns.together:
            clock.drain()
            turns.after(index, draw)
    end_watch()
    _read_marks(taken.result, {name: (steps[name], marks) for name, marks in taken.pending.items()}, clock, warming)
    return taken.result


class _Taken:
    """The samples that are being taken.

    pending  the clock's marks of the calls of each row that has not failed, to be read at the end
    result   a `Sampled`, with all that is known so far
    """

    def __init__(self, steps: Mapping[str, Step], clock: Clock):
        self.result, self.pending = Sampled(), dict[str, list[Any]]()
        self._steps, self._clocks = steps, {name: step.clock(clock) for name, step in steps.items()}

    def costs(self, trials: int) -> dict[str, Cost]:
        """The cost of a call of each row, by a few trial calls; rows that fail are left out."""
        costs = {}
        for name in self._steps:
            self.pending[name], self.result.kept[name] = [], []
            if cost := self.attempt(_cost, name, trials):
                costs[name] = cost
        return costs

    def sample(self, name: str, draw: int, index: int) -> None:
        """Takes one more sample of a row, unless it has failed. draw, index: as in `_sample`."""
        if name in self.pending and (sample := self.attempt(_sample, name, draw, index)):
            mark, place, kept = sample
            self.pending[name].append(mark)
            if kept is not None:  # at a new place it is appended, else it replaces an earlier call
                self.result.kept[name][place : place + 1] = [kept]

    def attempt(self, call: Callable[..., Any], name: str, *args: Any) -> Any:
        """The result of `call` for a row's step; None where the row has failed, whose samples are then dropped."""
        result, failure = attempt(call, self._steps[name], self._clocks[name], *args)
        if failure:
            self.result.failures[name] = failure
            self._clocks[name].forget(self.pending.pop(name))
            del self.result.kept[name]
        return result


def _order(index: int, names: Collection[str], theirs: Container[str]) -> list[str]:
    """A random order of the rows for round `index`: first those that both processes have, then the others.

    Both processes draw the same order of shared rows. So each shared row follows the same row in both.

    theirs  the rows of the other process (`lmsys.measure.turns`); empty without one
    """
    shared = sorted(name for name in names if name in theirs)
    others = [name for name in names if name not in shared]
    chance = random.Random(index)
    return chance.sample(shared, len(shared)) + chance.sample(others, len(others))


def _read_marks(result: Sampled, pending: Mapping[str, tuple[Step, list[Any]]], clock: Clock, warming: int) -> None:
    """Fills `result` with the clock's readings of the marks, without the first `warming` ones.

    The time that the clock itself adds is subtracted. For rows of short calls it is measured here, row by row.
    """
    readings_of = {}
    for name, (step, marks) in pending.items():
        readings, failure = attempt(step.clock(clock).read, marks, 0.0)  # 0.0: nothing is subtracted yet
        if failure:
            result.failures[name] = failure
        else:
            readings_of[name] = readings[warming:]
    raw = {name: [reading.run_s for reading in readings] for name, readings in readings_of.items()}
    short = {
        name: pending[name][0]
        for name, samples in raw.items()
        if statistics.median(samples) < SHORT_S and pending[name][0].clock is Step.clock
    }
    shares = (attempt(clock.shares, partial(rounds_of, short, clock))[0] or {}) if short else {}
    for name, samples in raw.items():
        share_s = result.share_s[name] = shares.get(name, clock.share_s)
        result.prepare_s[name] = min(reading.prepare_s for reading in readings_of[name])
        if failure := _prepares_too_much(result.prepare_s[name], pending[name][0], clock):
            result.failures[name] = failure
        else:
            result.samples[name] = [max(sample - share_s, 1e-9) for sample in samples]  # never 0 s


def rounds_of(steps: Mapping[str, Step], clock: Clock, rounds: int = NUM_SPANS) -> list[tuple[str, Any]]:
    """(name, the clock's mark) of a few more calls of each step, sampled with the host well ahead."""
    taken: list[tuple[str, Any]] = []
    for index in range(rounds):
        clock.wait(LEAD_S)
        taken += [
            (name, _sample_again(steps[name], clock)) for name in random.Random(index).sample(list(steps), len(steps))
        ]
    return taken


def _prepares_too_much(prepare_s: float, step: Step, clock: Clock) -> Failure | None:
    """A failure if the untimed `prepare` before each timed call takes far longer than its reference; else None.

    If a backward is timed, `prepare` is the forward with autograd, and its reference, `step.like`, one without it. Both
    are timed right after a timed call, which leaves a CPU's threads busy for a while. The least of each is
    compared. If `prepare_s` is too long, both are measured again, up to three times, since the machine may be busy. A
    step whose `like` is None is not judged; one without a `prepare` of its own may take no time there.
    """
    like, clock = nothing if step.prepare is nothing else step.like, step.clock(clock)
    if like is None:
        return None
    for _ in range(3):
        alone_s, failure = attempt(_least_after_a_call, step, like, clock) if like is not nothing else (0.0, None)
        if failure:
            return failure
        if prepare_s <= 2 * alone_s + clock.saving_s:
            return None
        clock.wait(FIRST_LEAD_S)
        readings = clock.read([_sample_again(step, clock) for _ in range(1 + clock.num_prepares)])
        prepare_s = min(reading.prepare_s for reading in readings[1:])  # the first follows no call
    return ClockError(
        f"the untimed call before each timed one took {prepare_s * 1e6:.0f} us, alone it takes {alone_s * 1e6:.0f}: "
        "work that was to be timed was done there",
        clock.others(),
    ).failure


def _least_after_a_call(step: Step, call: Callable[[], Any], clock: Clock) -> float:
    """The least seconds of a few calls, each right after a call of the step."""
    clock.wait(FIRST_LEAD_S)
    marks: list[tuple[Any, Any]] = [
        (_sample_again(step, clock), clock.sample(lambda _: call())[0]) for _ in range(clock.num_prepares)
    ]
    clock.forget([before for before, _ in marks])
    return min(reading.run_s for reading in clock.read([mark for _, mark in marks], trusted=True))


def _sample_again(step: Step, clock: Clock) -> Any:
    """Takes one more sample. Returns the mark that the clock reads it by."""
    return _sample(step, clock, _ENTROPY.getrandbits(53))[0]


def _sample(step: Step, clock: Clock, draw: int, index: int = -1) -> tuple[Any, int, Kept | None]:
    """Takes a sample: (the clock's mark, the call's place among the kept ones, what is kept of its result or None).

    draw   the number from which the inputs are drawn
    index  the number of the round; negative in calls that are never kept

    Whether a call is kept is drawn after the call, so that a row cannot find out while it runs. Calls of index 0 and
    more all have the same chance to be kept in the end, since a later one may take the place of an earlier one (Vitter,
    "Random sampling with a reservoir", 1985, algorithm R).
    """
    if not clock.ahead:
        synchronize("cuda")
        step.before()
    step.redraw(draw)
    mark, result = clock.sample(step.run, step.prepare, partial(step.redraw_late, draw))
    place = index if index < step.num_kept else _ENTROPY.randrange(index + 1)
    if not 0 <= place < step.num_kept:
        return mark, place, step.keep(result, None)
    key = _ENTROPY.getrandbits(53)
    copies = step.keep(result, key)
    return mark, place, None if copies is None else Kept(index, draw, key, copies)


def _call(step: Step, clock: Clock) -> None:
    """Calls a step once, on inputs of its own, and takes no sample: a row must not know the inputs of the next one."""
    clock.forget([_sample_again(step, clock)])


def _cost(step: Step, clock: Clock, calls: int) -> Cost:
    """The cost of one sample with its prepare: the least of `calls`, which also warm caches and clocks."""
    costs: list[Cost] = []
    for _ in range(calls):
        costs.append(clock.cost(partial(_call, step, clock), 2 * costs[-1].host_s if costs else FIRST_LEAD_S))
    return Cost(min(cost.host_s for cost in costs), min(cost.device_s for cost in costs))
