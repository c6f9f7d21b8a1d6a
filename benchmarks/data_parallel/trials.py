"""The small trainings of `python -m lmsys.check`, asked of a sweep's row by the ranks that run already.

A row that trains the language model right is asked the extreme ones: smaller batches and unused parameters on one rank,
gradients from 1e-20 to 1e+10. It is wrong where it ends with wrong weights. Where it raises an exception or begins
other collectives it does harm to nobody unseen, so that this is no reason against its times. A row that is wrong is
asked all of them, for the name of its mistake.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.data_parallel.cases import NARROW, ParallelCase
from lmsys.bench import Candidate
from lmsys.bench.ranks import joined, on_part, subgroup
from lmsys.check.strategy import blamed, fault
from lmsys.check.trained import Result, options_of, train, why_not
from lmsys.extremes.strategy import Trial, trials
from lmsys.parallel.group import WorkerError

Run = Callable[..., Sequence[Any]]  # of `lmsys.bench.ranks.Ranks`
_NUMBERS = itertools.count(2**31)  # of trainings: apart from those of a check
_ASKED: set[Any] = set()  # rows, with their options and ranks


@on_part
def small_trainings(case: ParallelCase, asked: Sequence[Trial], first: int) -> list[Result]:
    """On a rank: the result of each trial, whose numbers are those from `first` on."""
    group, options = subgroup(case.world_size), _options(case)
    return [
        train(case.entry, trial, number, options | options_of(trial), group)
        for number, trial in enumerate(asked, start=first)
    ]


def judge_by_trials(candidate: Candidate, run: Run, seed: int) -> None:
    """Asks a right row what training has beyond the gate's model, and names the mistake of a wrong one."""
    if candidate.outcome == "ok" and (reason := extreme_mistake(candidate.case, run, seed)):
        candidate.failed("wrong", reason)
    elif candidate.outcome == "wrong" and (name := mistake(candidate.case, run, seed)):
        candidate.reason = f"{candidate.reason}: {name}"


def extreme_mistake(case: ParallelCase, run: Run, seed: int) -> str | None:
    """The reason why a row is wrong in an extreme trial, None where it is right in all that it takes. Asked once.

    Under torchrun nothing is asked: a rank that another one waits for there cannot be started again.
    """
    key = case.entry.target, repr(_options(case)), case.world_size, case.backend
    if key in _ASKED or joined() is not None:
        return None
    _ASKED.add(key)
    asked = [trial for trial in _taken(case, seed) if trial.extreme]
    try:
        ranks = _results(case, run, asked)
    except WorkerError:
        return None
    for trial, *results in zip(asked, *ranks, strict=True):
        if blamed(results) is None and (wrong := fault(partial(_ask, case, run), trial, results)):
            return f"{trial.about}: {wrong.mistake or wrong.text.strip().splitlines()[0]}"
    return None


def mistake(case: ParallelCase, run: Run, seed: int) -> str | None:
    """The known mistake of a wrong row, in words; None where no trial shows one."""
    for trial in _taken(case, seed) if joined() is None else ():
        try:
            wrong = fault(partial(_ask, case, run), trial, _ask(case, run, trial))
        except WorkerError:
            return None
        if wrong is not None:
            return wrong.mistake
    return None


def _taken(case: ParallelCase, seed: int) -> list[Trial]:
    strategy = case.entry.load()
    return [trial for trial in trials(case.world_size, seed) if why_not(case.entry, trial, strategy) is None]


def _ask(case: ParallelCase, run: Run, trial: Trial) -> list[Result]:
    return [results[0] for results in _results(case, run, [trial])]


def _results(case: ParallelCase, run: Run, asked: Sequence[Trial]) -> Sequence[Sequence[Result]]:
    """By rank, and by trial."""
    first = [next(_NUMBERS) for _ in asked][0]
    return run(case.world_size, case.backend, small_trainings, case, asked, first)


def _options(case: ParallelCase) -> dict[str, Any]:
    """The case's options but for narrow dtypes, and but for a size of buckets that has to be measured."""
    return {name: value for name, value in case.options.items() if name not in NARROW and value != "auto"}
