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
from lmsys.check.trained import Failure, Result, train, why_not
from lmsys.extremes.strategy import Trial, trials
from lmsys.parallel.group import WorkerError
from lmsys.processes import DIED

Run = Callable[..., Sequence[Any]]  # of `lmsys.bench.ranks.Ranks`
_NUMBERS = itertools.count(2**31)  # of trainings: apart from those of a check
_ASKED: set[Any] = set()  # right rows, with their options and ranks


@on_part
def small_training(case: ParallelCase, trial: Trial, number: int) -> Result:
    """On a rank: the result of the trial."""
    return train(case.entry, trial, number, _options(case), subgroup(case.world_size))


def judge_by_trials(candidate: Candidate, run: Run, seed: int) -> None:
    """Asks a right row what training has beyond the gate's model, once, and names the mistake of a wrong one.

    Under torchrun nothing is asked: a rank that another one waits for there cannot be started again.
    """
    case, right = candidate.case, candidate.outcome == "ok"
    key = case.entry.target, repr(_options(case)), case.world_size, case.backend
    if joined() is not None or (right and key in _ASKED) or candidate.outcome not in ("ok", "wrong"):
        return
    if right:
        _ASKED.add(key)
    row, ask = case.entry.load(), partial(_ask, case, run)
    for trial in trials(case.world_size, seed):
        if why_not(case.entry, trial, row) is not None or (right and not trial.extreme):
            continue
        results = ask(trial)
        failure = blamed(results)
        if failure is not None and failure.kind == DIED:
            return
        wrong = None if right and failure is not None else fault(ask, trial, results)
        if wrong is None:
            continue
        if right:
            candidate.failed("wrong", f"{trial.about}: {wrong.mistake or wrong.text.strip().splitlines()[0]}")
        elif wrong.mistake:
            candidate.reason = f"{candidate.reason}: {wrong.mistake}"
        return


def _ask(case: ParallelCase, run: Run, trial: Trial) -> Sequence[Result]:
    """The results by rank; where ranks have ended without any, that they died."""
    try:
        return run(case.world_size, case.backend, small_training, case, trial, next(_NUMBERS))
    except WorkerError as error:
        return [Result(failure=Failure(error.rank, DIED, str(error), ""))]


def _options(case: ParallelCase) -> dict[str, Any]:
    """The case's options but for narrow dtypes, and but for a size of buckets that has to be measured."""
    return {name: value for name, value in case.options.items() if name not in NARROW and value != "auto"}
