"""Strategies: trainings of small modules on two ranks, each held to plain SGD in float64 on one process.

The ranks are processes of gloo on a CPU, or GPUs with NCCL where there are two. What is right is the mean over ranks of
each rank's gradient, as in DistributedDataParallel: with equal batches that is the gradient of the batch of all ranks,
and a rank with a smaller batch counts as much as the others. Every rank must end with the weights of that training, by
`lmsys.testing.error_ratio`, and begins with weights of its own, so that rank 0's have to be broadcast.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Self

import torch

from lmsys.check.question import Fault, Options, Question
from lmsys.check.recorder import Mismatch, PeerFailed
from lmsys.check.strategy_mistakes import Ask, Rules, explain, rules
from lmsys.check.trained import Failure, Result, plain, prepare, train, why_not, wrong_parameters
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


def asked(
    ranks: "Ranks",
    entry: Entry,
    options: Options,
    trials: Callable[[int, int], Sequence[Trial]] = trials,
    rules: Rules = rules,
) -> Iterator[Question]:
    """The questions, by ranks that run already, and the rules by which mistakes are named."""
    row = entry.load()
    for trial in trials(WORLD_SIZE, options.seed):
        reason = why_not(entry, trial, row)
        results = ranks.ask(entry, trial) if reason is None else []
        failure = blamed(results)
        may_refuse = trial.extreme or trial.micro_batches > 1  # what not every strategy takes
        if may_refuse and failure is not None and failure.refuses:
            reason = f"{trial.about}: it raises {failure.kind}: {failure.text.partition('. ')[0]}"
        judge = partial(fault, partial(ranks.ask, entry), trial, results, rules)
        yield Question(trial.about, judge, f"{trial.about}, {WORLD_SIZE} ranks", reason, trial.extreme)


class Ranks:
    """Two ranks that train what they are asked; those that a training has ended are started again."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._group: WorkerGroup | None = None

    def ask(self, entry: Entry, trial: Trial) -> Sequence[Result]:
        """The results of the trial by rank; where a rank dies or hangs, its failure alone."""
        try:
            if self._group is None or self._group.ended:
                self._group = WorkerGroup(WORLD_SIZE, timeout_s=START_S, environment=QUIET)
                self._group.run(prepare, entry)
            return self._group.run(train, entry, trial, next(self._numbers), {}, timeout_s=TRIAL_S)
        except WorkerError as error:
            first, *trace = str(error).strip().splitlines()
            kinds = f"{error.kind}: ", f"torch.distributed.{error.kind}: "
            texts = [first, *(line.partition(": ")[2] for line in trace if line.startswith(kinds))]
            doing = first.partition(" failed ")[2].rstrip(":")
            return [Result(failure=Failure(error.rank, error.kind, texts[-1], doing))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            self._group.close()


def blamed(results: Sequence[Result]) -> Failure | None:
    """The failure that others follow from."""
    failures = [result.failure for result in results if result.failure is not None]
    return min(failures, key=lambda failure: failure.kind == PeerFailed.__name__, default=None)


def fault(ask: Ask, trial: Trial, results: Sequence[Result], rules: Rules = rules) -> Fault | None:
    """The fault of the ranks' results of a trial; None where there is none."""
    failure = blamed(results)
    if failure is not None and failure.kind == Mismatch.__name__:
        return Fault(f"  {failure.text}, {failure.doing}", "ranks begin different collectives")
    if failure is not None:
        return Fault(f"  {failure}")
    exact, ordinary = (plain(trial, dtype)[-1].weights for dtype in (torch.float64, torch.float32))
    for rank, result in enumerate(results):
        if other := sorted(result.state.keys() ^ exact.keys()):
            return Fault(f"  the state of rank {rank} is not the module's: it differs in {', '.join(other)}")
    wrong = wrong_parameters(results, exact, ordinary)
    if not wrong:
        return None
    name, mistake = max(wrong, key=lambda name: wrong[name]), explain(ask, trial, rules)
    text = (
        f"  after {trial.steps} step{'s' * (trial.steps > 1)} {len(wrong)} of {len(exact)} tensors are wrong;"
        f" the largest error is in {name}, {wrong[name]:.3g} times what is allowed\n"
    )
    text += f"  pattern: {mistake}" if mistake else "  no known mistake gives this result"
    return Fault(text, mistake, wrong[name])
