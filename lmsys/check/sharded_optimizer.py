"""Sharded optimizers: trainings of a small module on two ranks, each held to torch's optimizer on one process.

A sharded optimizer is called as f(params, optimizer_cls, **kwargs), as in CS336, assignment 2. Ranks begin with equal
weights; before each step every rank has the mean over ranks of the gradients, as after an all-reduce. Every rank must
then end with all of the weights that `optimizer_cls` alone leads to in float64.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lmsys.check.question import Options, Question
from lmsys.check.strategy import Ranks
from lmsys.check.strategy import asked as asked_of_ranks
from lmsys.check.strategy_mistakes import Rule
from lmsys.check.trained import Before
from lmsys.extremes.strategy import OPTIMIZERS, optimizer_trials
from lmsys.registry import Entry

CHANGED = ("lr", "momentum"), ("lr",), ("momentum",)  # options that a schedule changes


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The trials, from the simplest to the rarest. Ranks start once, and again only where a trial has ended them."""
    with Ranks() as ranks:
        yield from asked(ranks, entry, options)


def asked(ranks: Ranks, entry: Entry, options: Options) -> Iterator[Question]:
    """The questions, by ranks that run already."""
    yield from asked_of_ranks(ranks, entry, options, optimizer_trials, rules)


def rules(steps: Sequence[Before]) -> Iterator[Rule]:
    """Each known mistake, and the weights that the last of the steps then leads to."""
    now, number, trial = steps[-1], len(steps) - 1, steps[-1].trial
    g, world_size, given = now.means, trial.world_size, OPTIMIZERS[trial.optimizer]
    yield "no rank steps ({names})", now.weights
    for names in CHANGED if trial.schedule and number > 0 else ():
        words = f"{' and '.join(names)} as changed in param_groups: the change is not used"
        yield words, now.after(g, {name: given[name] for name in names})
    yield "gradients are summed over ranks again", now.after({name: world_size * x for name, x in g.items()})
    yield (
        "gradients are divided by the number of ranks again",
        now.after({name: x / world_size for name, x in g.items()}),
    )
    theirs = getattr(torch.optim, trial.optimizer)([torch.zeros(1)]).defaults
    lost: dict[str, dict[str, Any]] = {
        "the options of a group are lost: it has those of the first group": now.optimizer.param_groups[0],
        "the options of a group are lost: it has the optimizer's": now.optimizer.defaults,
        "the optimizer's options are lost: it has torch's defaults": theirs,
    }
    for words, options in lost.items():
        yield words, now.after(g, {name: value for name, value in options.items() if name != "params"})
    if number > 0:
        yield "the optimizer's state is lost between steps", now.after(g, afresh=True)
        left = steps[-2].means
        stale = {name: x + left[name] * (world_size - 1) / world_size for name, x in g.items()}
        yield "zero_grad() leaves gradients of parameters that other ranks own: they add to the next", now.after(stale)
        both = {name: x + left[name] for name, x in g.items()}
        yield "zero_grad() leaves gradients: they add to the next", now.after(both)
    yield "it is stepped twice", now.after(g, times=2)
