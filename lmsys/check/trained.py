"""Runs the training of a `Trial`: on ranks by a strategy or sharded optimizer, and by torch on one process.

A trial is a small training (`lmsys.extremes.strategy`). `strategy.py` and the benchmark of data parallelism run `train`
on each rank. `strategy.py` compares the `Result` with that of `plain`, the right training in float64. `plain` returns a
`Before` for each step, from which `strategy_mistakes.py` computes what each mistake would lead to. If only some
strategies can run a new trial, say so in `why_not`; a new condition of a mistake goes to `StepGradients.holds`.
"""

import copy
import inspect
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
SMALL_MB = 2.0**-13  # MiB of a small bucket: 32 float32. Each layer has more, so that a module fills several buckets
# Exceptions by which a strategy refuses what it is given.
REFUSALS = ("ValueError", "RuntimeError", "NotImplementedError", "AssertionError")
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Failure:
    """An exception of a rank, or the end of its process.

    kind   the exception's type; DIED, STOPPED (by SIGSTOP) or TIMEOUT if the process did not raise one
    text   the first line of the exception's message
    doing  what the rank was doing, in words such as "in the backward of step 2"
    """

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

    The first step of an optimizer imports torch's compiler, which takes seconds.
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
    sizes = [p.numel() for p in module.parameters()]
    # Only parameters whose number of elements no other has: the recorder finds a name by this number.
    alone = {p.numel(): name for name, p in module.named_parameters() if sizes.count(p.numel()) == 1}
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
                rank=torch.distributed.get_rank(group),
                kind=type(error).__name__,
                text=registry.message_of(error).partition("\n")[0] + registry.place_of(error),
                doing=doing.last(),
            )
        )


def _trained(
    entry: registry.Entry, trial: Trial, module: Probe, recorder: Recorder, options: Mapping[str, Any]
) -> Result:
    """Runs the training. For a sharded optimizer the strategy is `Naive`, which only averages gradients."""
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
    strategy, accumulates = traits.StrategyTraits.of(entry), trial.micro_batches > 1
    return next(
        values.sentences_of(
            (not strategy.synchronizes, "it synchronizes nothing"),
            (
                trial.small_buckets
                and {"bucket_mb", "bucket_size_mb"}.isdisjoint(inspect.signature(loaded).parameters),
                "it takes no size of buckets",
            ),
            (accumulates and not hasattr(loaded, "no_sync"), "it has no no_sync()"),
            (accumulates and not strategy.accumulates, "it does not accumulate"),
            (not {"once", "idle", "rare"}.isdisjoint(trial.parts), strategy.why_not_unused or ""),
            ("rare" in trial.parts, strategy.why_not_unequal),
        ),
        None,
    )


@dataclass(frozen=True)
class StepGradients:
    """The gradients of one parameter in a step, from all ranks.

    grads    (world_size, micro_batches, ...): of the loss that each backward is called on
    early    (world_size, ...): for a weight that is used twice, the part of its gradient from the second use, which a
             backward makes first; else 0
    used     (world_size, 1, ..., 1): 1 for each rank that uses the parameter, so that its gradient is not 0; else 0
    sizes    (world_size, 1, ..., 1): the number of examples in each rank's batch
    """

    grads: torch.Tensor
    early: torch.Tensor
    used: torch.Tensor
    sizes: torch.Tensor

    @property
    def local(self) -> torch.Tensor:
        """(world_size, ...): each rank's gradient."""
        return self.grads.sum(dim=1)

    @property
    def mean(self) -> torch.Tensor:
        """(1, ...): the mean over ranks, which is the right gradient on all of them."""
        return over_ranks(self.local)

    def resummed(self, factor: float) -> torch.Tensor:
        """(1, ...): the sum over ranks, if all so far is multiplied by `factor` before a micro-batch is added."""
        summed = torch.zeros_like(self.mean)
        for micro in self.grads.unbind(dim=1):
            summed = factor * summed + micro.sum(dim=0)
        return summed

    def holds(self, condition: str) -> bool:
        """True if a mistake with this condition, the first item in `strategy_mistakes.MISTAKES`, can be made here."""
        return {
            "": True,
            "unused": bool(0 < self.used.sum() < len(self.used)),  # some ranks, but not all, use the parameter
            "uneven": self.sizes.unique().numel() > 1,  # ranks have batches of different sizes
            "micro": self.grads.shape[1] > 1,  # there are several micro-batches
            "twice": bool(self.early.any()),  # the forward uses the weight twice
        }[condition]


def over_ranks(x: torch.Tensor) -> torch.Tensor:
    """The mean over ranks of x (world_size, ...): (1, ...)."""
    return x.mean(dim=0, keepdim=True)


@dataclass(frozen=True)
class Before:
    """The state of the training on one process just before an optimizer's step, in one dtype.

    module, optimizer  with the weights and the state of this moment
    grads              by parameter: the gradients of the step
    """

    trial: Trial
    module: Probe
    optimizer: torch.optim.Optimizer
    grads: dict[str, StepGradients]

    @property
    def weights(self) -> State:
        return {name: x.detach() for name, x in self.module.state_dict().items()}

    @property
    def means(self) -> State:
        """By parameter, the mean over ranks of each rank's gradient. Parameters that no rank uses are left out."""
        return {name: s.mean[0] for name, s in self.grads.items() if s.used.any()}

    def after(
        self, grads: State, options: Mapping[str, Any] | None = None, afresh: bool = False, times: int = 1
    ) -> State:
        """The weights after `times` steps by `grads`.

        options  options of all param groups that replace the optimizer's; its "params" are left out
        afresh   the optimizer's state is cleared before
        """
        module, optimizer = copy.deepcopy((self.module, self.optimizer))
        for name, p in module.named_parameters():
            p.grad = grads.get(name)
        for group in optimizer.param_groups:
            group.update({name: value for name, value in (options or {}).items() if name != "params"})
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
    # `apart` is the same module, but both uses of a weight have parameters of their own, so that each use has its own
    # gradient. `trial.twins` says which parameters belong together.
    module, apart = probe(trial, rank=0).to(dtype), probe(trial, rank=0, apart=True).to(dtype)
    optimizer = made_optimizer(trial, module, lambda params, optimizer_cls, **options: optimizer_cls(params, **options))
    steps = list[Before]()
    for step in range(trial.steps + 1):
        weights = module.state_dict()
        apart.load_state_dict(weights | {twin: weights[first] for twin, first in trial.twins.items()})
        # Copied together, so that the copy of the optimizer has the parameters of the copy of the module.
        steps.append(Before(trial, *copy.deepcopy((module, optimizer)), _gradients(apart, trial, step)))
        for name, p in module.named_parameters():
            p.grad = steps[-1].means.get(name)
        optimizer.step()
        if trial.schedule:
            change_options(optimizer)
    return steps


def _gradients(module: Probe, trial: Trial, step: int) -> dict[str, StepGradients]:
    """The gradients of a step, by parameter.

    `module` is built with `apart`, so that each use of a weight is a parameter of its own.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    backwards, shape = [], (trial.world_size, trial.micro_batches)
    for rank, micro in itertools.product(*map(range, shape)):
        loss = module(batch(trial, step, micro, rank), **trial.switches(rank, micro)) / trial.micro_batches
        backwards.append(torch.autograd.grad(loss, list(named.values()), materialize_grads=True))
    by_use = {
        name: torch.stack(g).view(*shape, *g[0].shape)
        for name, g in zip(named, zip(*backwards, strict=True), strict=True)
    }
    # By weight, the part of its gradient from its second use, which a backward makes first.
    second = {name: by_use.pop(twin) for twin, name in trial.twins.items()}
    sizes, made = torch.tensor([trial.examples(rank) for rank in range(trial.world_size)]), {}
    for name, g in by_use.items():
        early = second.get(name, torch.zeros_like(g))
        used = (g + early).flatten(start_dim=1).any(dim=1)
        users, examples = (x.to(g.dtype).view(-1, *[1] * (g.dim() - 2)) for x in (used, sizes))
        made[name] = StepGradients(grads=g + early, early=early.sum(dim=1), used=users, sizes=examples)
    return made


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
