"""Strategies and sharded optimizers: small trainings on two ranks, and on one, compared with one process in float64.

`kinds.py` calls `questions` for a strategy, and `optimizer_questions` for a sharded optimizer. The trainings are the
trials of `lmsys.extremes.strategy`: add a training there, and a known mistake in `strategy_mistakes.py`. The ranks are
processes with gloo on a CPU, or GPUs with NCCL if there are two.

The right gradient is the mean over ranks of each rank's gradient, as in DistributedDataParallel. With equal batches it
is the gradient of the batch of all ranks; a rank with a smaller batch counts as much as the others. Every rank must end
with the weights of the one process, up to the error that `lmsys.testing.error_ratio` allows. Ranks begin with different
weights, so that rank 0's have to be broadcast.

A sharded optimizer is called as f(params, optimizer_cls, **kwargs), as in CS336, assignment 2. Ranks begin with equal
weights; before each step every rank has the mean over ranks of the gradients, as after an all-reduce. Every rank must
then end with all of the weights that `optimizer_cls` alone leads to in float64.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

from lmsys.check import question, recorder, strategy_mistakes, trained
from lmsys.extremes.strategy import Trial, trials
from lmsys.parallel.group import WorkerError, WorkerGroup
from lmsys.registry import Entry

WORLD_SIZE = 2  # ranks of all trials but one
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # environment of ranks: otherwise torch logs each wait that times out
START_S, TRIAL_S = 120.0, 12.0  # timeouts: for ranks to start and import; for a trial, which takes milliseconds


def questions(
    entry: Entry,
    options: question.Options,
    ranks: "Ranks | None" = None,
    trials: Callable[[int, int], Sequence[Trial]] = trials,
) -> Iterator[question.Question]:
    """A question for each trial, from the simplest to the rarest. Ranks are started again only if a trial ended them.

    ranks   ranks that run already, and are not ended here; None: they start here, and end after the last question
    trials  (world size, seed) -> the trials
    """
    row, device = entry.load(), "cuda" if torch.cuda.device_count() >= WORLD_SIZE else "cpu"
    with nullcontext(ranks) if ranks else Ranks() as running:
        # The last trial has a single rank: it shows a strategy that divides by 2, not by the number of ranks.
        alone = replace(trials(1, options.seed)[0], about="a single rank", extreme=True)
        for trial in (*trials(WORLD_SIZE, options.seed), alone):
            reason = entry.why_not(SimpleNamespace(device=device)) or trained.why_not(entry, trial, row)
            results = running.ask(entry, trial) if reason is None else []
            failure = blamed(results)
            # A strategy may refuse, by an exception, a trial that is extreme or has micro-batches. That exception is
            # then the reason why the question is not asked.
            if failure is not None and failure.refuses and (trial.extreme or trial.micro_batches > 1):
                reason = f"{trial.about}: it raises {failure.kind}: {failure.text.partition('. ')[0]}"
            yield question.Question(
                about=trial.about,
                judge=partial(fault, partial(running.ask, entry), trial, results),
                shape=trial.about if trial is alone else f"{trial.about}, {WORLD_SIZE} ranks",
                reason=reason,
                extreme=trial.extreme,
            )


class Ranks(AbstractContextManager["Ranks"]):
    """Ranks that run trials, two or one alone. They start when first asked, and again after a trial has ended them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._groups: dict[int, WorkerGroup] = {}  # by world size

    def ask(self, entry: Entry, trial: Trial) -> Sequence[trained.Result]:
        """The results of the trial by rank. If a rank dies or hangs, the only result is its failure."""
        try:
            group = self._groups.get(trial.world_size)
            if group is None or group.ended:
                group = self._groups[trial.world_size] = WorkerGroup(
                    trial.world_size, timeout_s=START_S, environment=QUIET
                )
                group.run(trained.prepare, entry)
            # The arguments of `train`: entry, trial, number of the training, options of the strategy (none).
            return group.run(trained.train, entry, trial, next(self._numbers), {}, timeout_s=TRIAL_S)
        except WorkerError as error:
            first, *trace = str(error).strip().splitlines()
            # The last text is the exception's own message if the trace has it, else the first line.
            texts = [
                first,
                *(
                    line.partition(": ")[2]
                    for line in trace
                    if line.startswith((f"{error.kind}: ", f"torch.distributed.{error.kind}: "))
                ),
            ]
            # The first line is "rank N failed DOING:" where a rank raised, with what it was doing.
            return [
                trained.Result(
                    failure=trained.Failure(
                        rank=error.rank,
                        kind=error.kind,
                        text=texts[-1],
                        doing=first.partition(" failed ")[2].rstrip(":"),
                    )
                )
            ]

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            group.close()


def blamed(results: Sequence[trained.Result]) -> trained.Failure | None:
    """The failure that caused the others; None if no rank failed.

    It is the first one that is not `recorder.PeerFailed`, by which a rank reports the failure of another.
    """
    failures = (result.failure for result in results if result.failure is not None)
    return min(failures, key=lambda failure: failure.kind == recorder.PeerFailed.__name__, default=None)


def fault(ask: strategy_mistakes.Ask, trial: Trial, results: Sequence[trained.Result]) -> question.Fault | None:
    """The fault of the ranks' results of a trial; None if they are right. `ask` runs shorter trials that explain it."""
    failure = blamed(results)
    if failure is not None and failure.kind == recorder.Mismatch.__name__:
        return question.Fault.explained(
            f"  {failure.text}, {failure.doing}",
            "ranks do not call the same collectives in the same order",
            error_ratio=None,
        )
    if failure is not None:
        return question.Fault(f"  {failure}")
    # The right state after the last step: exact, and with the roundings of float32, whose size is allowed.
    last, ordinary = (trained.plain(trial, dtype)[-1] for dtype in (torch.float64, torch.float32))
    for rank, result in enumerate(results):
        if other := sorted(result.state.keys() ^ last.weights.keys()):
            return question.Fault(f"  the state of rank {rank} is not the module's: it differs in {', '.join(other)}")
    if not (wrong := trained.wrong_parameters(results, last.weights, ordinary.weights)):
        return None
    name, mistake = max(wrong, key=lambda name: wrong[name]), strategy_mistakes.explain(ask, trial)
    # Frozen parameters and buffers are counted only if they alone are wrong.
    tensors, kind = (
        (last.grads, "trained parameters") if wrong.keys() & last.grads.keys() else (last.weights, "tensors")
    )
    count = len(wrong.keys() & tensors.keys())
    return question.Fault.explained(
        f"  after {trial.steps} step{'s' * (trial.steps > 1)} {count} of {len(tensors)} {kind}"
        f" {'are' if count > 1 else 'is'} wrong; the largest error, in {name}, is"
        f" {question.times_allowed(wrong[name])}",
        mistake,
        wrong[name],
    )


# As `questions`, for a sharded optimizer.
optimizer_questions = partial(questions, trials=partial(trials, sharded=True))
