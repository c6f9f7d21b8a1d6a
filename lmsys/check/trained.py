"""Runs the training of a `Trial`: on ranks by a strategy or sharded optimizer, and by torch on one process.

`strategy.py` and the benchmark of data parallelism run `train` on each rank. `strategy.py` compares the `Result` with
`plain`, the right training in float64. The `Before` of each step of `plain` is what `strategy_mistakes.py` computes
mistakes from.
"""

import copy
import inspect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from lmsys import doing, processes, registry, testing, traits, values
from lmsys.check import laptop, question
from lmsys.check.recorder import Recorder
from lmsys.extremes.strategy import Probe, Trial, batch, change_options, made_optimizer, probe
from lmsys.parallel import adapter, baselines
from lmsys.parallel.group import STOPPED, device, is_lost_peer

OTHERS_S = 2.0  # how long a rank that raised waits for the other ranks to end
SMALL_MB = 2.0**-13  # the size of small buckets, 32 float32: each layer has more, so that a module fills several
# Exceptions by which a strategy refuses what it is given.
REFUSALS = ("ValueError", "RuntimeError", "NotImplementedError")
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Failure:
    """An exception of a rank: its type, its first line, and what the rank was doing."""

    rank: int
    kind: str
    text: str
    doing: str

    @property
    def refuses(self) -> bool:
        """True if the strategy refuses the trial by the exception, and no lost peer caused it."""
        return self.kind in REFUSALS and not is_lost_peer(self.kind, self.text)

    def __str__(self) -> str:
        return (
            self.text
            if self.kind in (processes.DIED, STOPPED, processes.TIMEOUT)
            else f"rank {self.rank} raises {self.kind} {self.doing}: {self.text}"
        )


@dataclass(frozen=True)
class Result:
    """The result of a training on a rank.

    state     the tensors of full_state_dict() at the end
    unwaited  collectives that the strategy had not waited for when the optimizer stepped, in words
    raced     collectives whose tensors were written to while they were running, in words
    failure   the exception that ended the training; None if it ended well
    """

    state: State = field(default_factory=dict)
    unwaited: tuple[str, ...] = ()
    raced: tuple[str, ...] = ()
    failure: Failure | None = None


def prepare(entry: registry.Entry) -> None:
    """Prepares a rank, once: uninitialised memory is NaN from now on, and all that a training imports is imported.

    The step of an optimizer imports torch's compiler, which takes seconds.
    """
    question.poison(setattr)
    laptop.install()  # without a GPU, torch and Triton pretend that there is one
    entry.load()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()


def train(entry: registry.Entry, trial: Trial, number: int, options: Mapping[str, Any], group: Any = None) -> Result:
    """Runs the trial on this rank, by the row's strategy or sharded optimizer, built with `options`.

    `number` identifies this training among all; it is the same on all ranks. `group` has the ranks that train; None:
    all. An exception becomes a `Failure` in the result if all ranks have ended, and is raised if another rank still
    waits.
    """
    group = torch.distributed.group.WORLD if group is None else group
    module = probe(trial, torch.distributed.get_rank(group)).to(device())
    counts = Counter(p.numel() for p in module.parameters())
    # Only parameters whose number of elements no other has: the recorder finds a name by this number.
    alone = {p.numel(): name for name, p in module.named_parameters() if counts[p.numel()] == 1}
    recorder = Recorder(number, group, alone)
    try:
        with recorder.recording():
            result = _trained(entry, trial, module, recorder, options)
            recorder.mark("the end of the training")
        return result
    except Exception as error:
        recorder.fail(error)
        if not recorder.others_end(OTHERS_S):
            raise
        return Result(
            failure=Failure(
                torch.distributed.get_rank(group),
                type(error).__name__,
                registry.message_of(error).partition("\n")[0] + registry.place_of(error),
                doing.last(),
            )
        )


def _trained(
    entry: registry.Entry, trial: Trial, module: Probe, recorder: Recorder, options: Mapping[str, Any]
) -> Result:
    """The training itself. For a sharded optimizer the strategy is `Naive`, which only averages gradients."""
    loaded, rank, unwaited = entry.load(), torch.distributed.get_rank(recorder.group), list[str]()
    doing.now("as it wraps the module")  # this line and those below become `Failure.doing`
    options = {**options, "bucket_mb": SMALL_MB} if trial.small_buckets else options
    strategy = adapter.Adapter(baselines.Naive if trial.sharded else loaded, module, recorder.group, **options)
    doing.now("as it makes the optimizer")
    make = (
        loaded if trial.sharded else lambda _, optimizer_cls, **kwargs: strategy.make_optimizer(optimizer_cls, **kwargs)
    )
    optimizer = made_optimizer(trial, module, make)
    recorder.mark("the end of the constructor")
    for step in range(trial.steps):
        for micro in range(trial.micro_batches):
            with nullcontext() if micro == trial.micro_batches - 1 else strategy.no_sync():
                doing.now(f"in the forward of step {step + 1}")
                loss = (
                    strategy(batch(trial, step, micro, rank).to(device()), **trial.switches(rank, micro))
                    / trial.micro_batches
                )
                doing.now(f"in the backward of step {step + 1}")
                loss.backward()
        doing.now(f"in finish_gradient_synchronization of step {step + 1}")
        strategy.finish()
        doing.now(f"in the optimizer's step {step + 1}")
        optimizer.step()
        unwaited += recorder.unwaited.values()
        optimizer.zero_grad()
        recorder.mark(f"the end of step {step + 1}")
        if trial.schedule:
            change_options(optimizer)
    doing.now("in full_state_dict()")
    return Result(
        state={
            name.removeprefix("module."): x.detach().cpu().clone() for name, x in strategy.full_state_dict().items()
        },
        unwaited=tuple(unwaited),
        raced=tuple(recorder.raced),
    )


def why_not(entry: registry.Entry, trial: Trial, loaded: Any) -> str | None:
    """None, or why the row cannot run the trial. `loaded` is what the row's entry loads."""
    strategy, takes_sizes, accumulates = traits.StrategyTraits.of(entry), True, trial.micro_batches > 1
    with suppress(TypeError, ValueError):
        takes_sizes = not {"bucket_mb", "bucket_size_mb"}.isdisjoint(inspect.signature(loaded).parameters)
    return next(
        values.sentences_of(
            (not strategy.synchronizes, "it synchronizes nothing"),
            (trial.small_buckets and not takes_sizes, "it takes no size of buckets"),
            (accumulates and not hasattr(loaded, "no_sync"), "it has no no_sync()"),
            (accumulates and not strategy.accumulates, "it does not accumulate"),
            (not {"once", "idle", "rare"}.isdisjoint(trial.parts), strategy.why_not_unused or ""),
            ("rare" in trial.parts, strategy.why_not_unequal),
        ),
        None,
    )


@dataclass(frozen=True)
class Before:
    """The state of the training on one process just before an optimizer's step, in one dtype.

    module, optimizer  with the weights and the state of this moment
    grads  by parameter (world_size, micro_batches, ...): gradients of the loss that each backward is called on
    early  by weight that the forward uses twice: the part of `grads` from the second use, which a backward makes first
    used   by parameter (world_size,): True for the ranks that use it
    """

    trial: Trial
    module: Probe
    optimizer: torch.optim.Optimizer
    grads: State
    early: State
    used: State

    @property
    def weights(self) -> State:
        return {name: x.detach() for name, x in self.module.state_dict().items()}

    @property
    def means(self) -> State:
        """By parameter, the mean over ranks of each rank's gradient. Parameters that no rank uses are left out."""
        return {name: g.sum(dim=1).mean(dim=0) for name, g in self.grads.items() if self.used[name].any()}

    def after(
        self, grads: State, options: Mapping[str, Any] | None = None, afresh: bool = False, times: int = 1
    ) -> State:
        """The weights after `times` steps by `grads`.

        options  options of all param groups that replace the optimizer's
        afresh   the optimizer's state is cleared before
        """
        module, optimizer = copy.deepcopy((self.module, self.optimizer))
        for name, p in module.named_parameters():
            p.grad = grads.get(name)
        for group in optimizer.param_groups:
            group.update(options or {})
        if afresh:
            optimizer.state.clear()
        for _ in range(times):
            optimizer.step()
        return {name: x.detach() for name, x in module.state_dict().items()}


@lru_cache(maxsize=64)  # the same training is needed again to name a mistake, and for other rows
def plain(trial: Trial, dtype: torch.dtype) -> list[Before]:
    """The right training, by torch's optimizer on one process: its state before each step, and after the last one.

    It steps by the mean over ranks of each rank's gradient. If all batches have the same size, that is the gradient of
    the batch of all ranks.
    """
    # In `apart` both uses of a weight have parameters of their own, and `trial.twins` says which belong together.
    module, apart = probe(trial, rank=0).to(dtype), probe(trial, rank=0, apart=True).to(dtype)
    optimizer = made_optimizer(trial, module, lambda params, optimizer_cls, **options: optimizer_cls(params, **options))
    steps = list[Before]()
    for step in range(trial.steps + 1):
        weights = module.state_dict()
        apart.load_state_dict(weights | {twin: weights[first] for twin, first in trial.twins.items()})
        by_use, used = _gradients(apart, trial, step)
        early = {first: by_use[twin] for twin, first in trial.twins.items()}
        grads = {n: g + early[n] if n in early else g for n, g in by_use.items() if n not in trial.twins}
        # Copied together, so that the copy of the optimizer has the parameters of the copy of the module.
        steps.append(Before(trial, *copy.deepcopy((module, optimizer)), grads, early, used))
        for name, p in module.named_parameters():
            p.grad = steps[-1].means.get(name)
        optimizer.step()
        if trial.schedule:
            change_options(optimizer)
    return steps


def _gradients(module: Probe, trial: Trial, step: int) -> tuple[State, State]:
    """(grads, used) of a step, by parameter: as in `Before`.

    `module` is built with `apart`, so that each use of a weight is a parameter of its own.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    backwards, shape = [], (trial.world_size, trial.micro_batches)
    for rank, micro in itertools.product(*map(range, shape)):
        loss = module(batch(trial, step, micro, rank), **trial.switches(rank, micro)) / trial.micro_batches
        backwards.append(torch.autograd.grad(loss, list(named.values()), allow_unused=True))
    grads, used = State(), State()
    for number, (name, p) in enumerate(named.items()):
        parts = [gradients[number] for gradients in backwards]
        used[name] = torch.tensor([x is not None for x in parts]).view(shape).any(dim=1)
        grads[name] = torch.stack([torch.zeros_like(p) if x is None else x for x in parts]).view(*shape, *p.shape)
    return grads, used


def wrong_parameters(results: Sequence[Result], exact: State, ordinary: State) -> dict[str, float]:
    """The tensors that are wrong: by name, the error over its budget, above 1, on the rank where it is largest.

    exact     the right values, in float64
    ordinary  those of the right training in float32
    """
    worst = {name: max(ratio(result.state[name], exact[name], ordinary[name]) for result in results) for name in exact}
    return {name: value for name, value in worst.items() if not value <= 1}  # NaN is wrong, too


def ratio(x: torch.Tensor, exact: torch.Tensor, ordinary: torch.Tensor) -> float:
    """The error of x over its budget, relative to the tensor's size: weights of 1e-20 are judged as those of 1."""
    return testing.ratio_of(x, exact, ordinary, torch.float32, mean=False)
