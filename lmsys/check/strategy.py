"""Strategies: trainings of small modules on two ranks, each held to plain SGD in float64 on one process.

The ranks are processes of gloo on a CPU, or GPUs with NCCL where there are two. What is right is the mean over ranks of
each rank's gradient, as in DistributedDataParallel: with equal batches that is the gradient of the batch of all ranks,
and a rank with a smaller batch counts as much as the others. Every rank must end with the weights of that training, by
`lmsys.testing.error_ratio`, and begins with weights of its own, so that rank 0's have to be broadcast.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch

from lmsys.check.question import Fault, Options, Question
from lmsys.check.recorder import Mismatch, PeerFailed
from lmsys.check.strategy_mistakes import Ask, explain, wrong_parameters
from lmsys.check.trained import Failure, Result, options_of, plain, prepare, train, why_not
from lmsys.extremes.strategy import Trial, trials
from lmsys.parallel.group import WorkerError, WorkerGroup
from lmsys.registry import Entry

WORLD_SIZE = 2
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # of ranks: else a wait that ends warns in four lines
START_S, TRIAL_S = 120.0, 12.0  # to start ranks and import what they need; for a training of milliseconds


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The trials, from the simplest to the rarest. Ranks start once, and again only where a trial has ended them."""
    with Ranks() as ranks:
        yield from asked(ranks, entry, options)


def asked(ranks: "Ranks", entry: Entry, options: Options) -> Iterator[Question]:
    """The questions, by ranks that run already."""
    strategy = entry.load()
    for trial in trials(WORLD_SIZE, options.seed):
        if reason := why_not(entry, trial, strategy):
            yield Question(trial.about, _right, reason=reason, extreme=trial.extreme)
            continue
        ask = partial(ranks.ask, train, entry, options=options_of(trial))
        results = ask(trial)
        if trial.extreme and (failure := refusal(results)):
            yield Question(trial.about, _right, reason=refused(trial, failure), extreme=True)
            continue
        judge = partial(fault, ask, trial, results)
        yield Question(trial.about, judge, f"{trial.about}, {WORLD_SIZE} ranks", extreme=trial.extreme)


def _right() -> None:
    return None


class Ranks:
    """Two ranks that train what they are asked; those that a training has ended are started again."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._group: WorkerGroup | None = None

    def ask(self, function: Callable[..., Result], entry: Entry, trial: Any, options: Any = None) -> Sequence[Result]:
        """The results of function(entry, trial, number, options) on ranks; of one that dies or hangs, its failure."""
        try:
            if self._group is None or self._group.ended:
                self._group = WorkerGroup(WORLD_SIZE, timeout_s=START_S, environment=QUIET)
                self._group.run(prepare, entry)
            number = next(self._numbers)
            return self._group.run(function, entry, trial, number, options or {}, timeout_s=TRIAL_S)
        except WorkerError as error:
            return [Result(failure=Failure(error.rank, error.kind, *_text_and_doing(error)))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            self._group.close()


def _text_and_doing(error: WorkerError) -> tuple[str, str]:
    """The text of a rank's failure, and what it was doing."""
    first, *trace = str(error).strip().splitlines()
    named = [line for line in trace if line.startswith((f"{error.kind}:", f"torch.distributed.{error.kind}:"))]
    doing = first.partition(" failed ")[2].rstrip(":")
    return (named[-1].partition(": ")[2] if named else first), doing


def blamed(results: Sequence[Result]) -> Failure | None:
    """The failure that others follow from."""
    failures = [result.failure for result in results if result.failure is not None]
    first = [failure for failure in failures if failure.kind != PeerFailed.__name__]
    return next(iter(first or failures), None)


def refusal(results: Sequence[Result]) -> Failure | None:
    """The failure of a strategy that says aloud that it does not take the module."""
    failure = blamed(results)
    return failure if failure is not None and failure.refuses else None


def refused(trial: Trial, failure: Failure) -> str:
    """The reason of a question that is not asked."""
    return f"{trial.about}: it raises {failure.kind}: {failure.text.partition('. ')[0]}"


def fault(ask: Ask, trial: Trial, results: Sequence[Result]) -> Fault | None:
    """The fault of the ranks' results of a trial; None where there is none."""
    if (failure := failed(results)) is not None:
        return failure
    exact, ordinary = (plain(trial, dtype)[-1].weights for dtype in (torch.float64, torch.float32))
    for rank, result in enumerate(results):
        if result.state.keys() != exact.keys():
            other = sorted(result.state.keys() ^ exact.keys())
            return Fault(f"  the state of rank {rank} is not the module's: it differs in {', '.join(other)}")
    wrong = wrong_parameters(results, exact, ordinary)
    return wrong_weights(trial, wrong, len(exact), explain(ask, trial)) if wrong else None


def failed(results: Sequence[Result]) -> Fault | None:
    """The fault of ranks that have failed, None where none has."""
    failure = blamed(results)
    if failure is not None and failure.kind == Mismatch.__name__:
        return Fault(f"  {failure.text}, {failure.doing}", "ranks begin different collectives")
    return None if failure is None else Fault(f"  {failure}")


def wrong_weights(trial: Trial, wrong: Mapping[str, float], count: int, mistake: str | None) -> Fault:
    """The fault of a training that ends with `wrong` weights of `count`, by name their errors over their budgets."""
    name, steps = max(wrong, key=lambda name: wrong[name]), f"{trial.steps} step{'s' * (trial.steps > 1)}"
    lines = [
        f"  after {steps} {len(wrong)} of {count} tensors are wrong; the largest error is in {name},"
        f" {wrong[name]:.3g} times what is allowed",
        f"  pattern: {mistake}" if mistake else "  no known mistake gives this result",
    ]
    return Fault("\n".join(lines), mistake, wrong[name])
