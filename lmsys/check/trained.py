"""A trial's training: by a strategy on ranks, and by plain sums on one process. Runs on the ranks, and beside them."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmsys import doing
from lmsys.check.poison import poison
from lmsys.check.recorder import Recorder
from lmsys.extremes.strategy import Probe, Trial, batch, probe
from lmsys.parallel.adapter import Adapter
from lmsys.parallel.group import STOPPED, device, is_lost_peer
from lmsys.processes import DIED, TIMEOUT
from lmsys.registry import Entry

SGD: dict[str, Any] = {"lr": 0.25, "momentum": 0.5}
OTHERS_S = 2.0  # for the other ranks to end, once this one has raised
SMALL_MB = 2.0**-13  # 32 float32: a layer has more
REFUSALS = ("ValueError", "RuntimeError", "NotImplementedError")
State = dict[str, Tensor]


@dataclass(frozen=True)
class Failure:
    """An exception of a rank: its kind, its first line, and what the rank was doing."""

    rank: int
    kind: str
    text: str
    doing: str

    @property
    def refuses(self) -> bool:
        """True for an exception that a strategy raises to say that it does not take what it was given."""
        return self.kind in REFUSALS and not is_lost_peer(self.kind, self.text)

    def __str__(self) -> str:
        ended = self.kind in (DIED, STOPPED, TIMEOUT)
        return self.text if ended else f"rank {self.rank} raises {self.kind} {self.doing}: {self.text}"


@dataclass(frozen=True)
class Result:
    """The end of a training on a rank.

    unwaited  collectives that nobody had waited for when the optimizer stepped
    raced     collectives whose tensors were written to while they were under way
    """

    state: State = field(default_factory=dict)
    unwaited: tuple[str, ...] = ()
    raced: tuple[str, ...] = ()
    failure: Failure | None = None


def prepare(entry: Entry) -> None:
    """Imports what a rank needs, torch's compiler for the first optimizer too, and makes uninitialised memory NaN."""
    poison(setattr)
    entry.load()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], **SGD).step()


def train(entry: Entry, trial: Trial, number: int, options: Mapping[str, Any], group: Any = None) -> Result:
    """On a rank: the trial by the strategy `entry`, built with `options`. `number` is of this training alone."""
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    module = probe(trial, rank).to(device())
    recorder = Recorder(number, group, _by_numel(module))

    def training() -> Result:
        with recorder.recording():
            return _trained(entry, trial, module, rank, options, recorder)

    return guarded(recorder, training)


def guarded(recorder: Recorder, training: Callable[[], Result]) -> Result:
    """The training's result, or its failure, which all ranks have ended with; raised where another rank still waits."""
    try:
        result = training()
        recorder.mark("the end of the training")
        return result
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        recorder.fail(error)
        if not recorder.others_end(OTHERS_S):
            raise
        return Result(failure=Failure(dist.get_rank(recorder.group), type(error).__name__, lines[0], doing.last()))


def _trained(
    entry: Entry, trial: Trial, module: Probe, rank: int, options: Mapping[str, Any], recorder: Recorder
) -> Result:
    doing.now("as it wraps the module")
    strategy = Adapter(entry.load(), module, recorder.group, **options)
    optimizer, unwaited = strategy.make_optimizer(torch.optim.SGD, **SGD), list[str]()
    recorder.mark("the end of the strategy's constructor")
    for step in range(trial.steps):
        for micro in range(trial.micro_batches):
            last = micro == trial.micro_batches - 1
            tokens = batch(trial, step, micro, rank).to(device())
            with nullcontext() if last else strategy.no_sync():
                doing.now(f"in the forward of step {step + 1}")
                loss = strategy(tokens, **trial.switches(rank, micro)) / trial.micro_batches
                doing.now(f"in the backward of step {step + 1}")
                loss.backward()
        doing.now(f"in finish_gradient_synchronization of step {step + 1}")
        strategy.finish()
        unwaited += recorder.unwaited.values()
        doing.now(f"in the optimizer's step {step + 1}")
        optimizer.step()
        optimizer.zero_grad()
        recorder.mark(f"the end of step {step + 1}")
    doing.now("in full_state_dict()")
    state = {name.removeprefix("module."): x.detach().cpu().clone() for name, x in strategy.full_state_dict().items()}
    return Result(state, tuple(unwaited), tuple(recorder.raced))


def _by_numel(module: Probe) -> dict[int, str]:
    """The names of parameters that no other has as many elements as."""
    counts = Counter(p.numel() for p in module.parameters())
    return {p.numel(): name for name, p in module.named_parameters() if counts[p.numel()] == 1}


def options_of(trial: Trial) -> dict[str, Any]:
    """The options that the trial asks for."""
    return {"bucket_mb": SMALL_MB} if trial.small_buckets else {}


def why_not(entry: Entry, trial: Trial, strategy: Any) -> str | None:
    """None, or why the strategy cannot be asked the trial."""
    with suppress(TypeError, ValueError):
        taken = inspect.signature(strategy).parameters
        if trial.small_buckets and not {"bucket_mb", "bucket_size_mb"} & taken.keys():
            return "it takes no size of buckets"
    if trial.micro_batches > 1 and not hasattr(strategy, "no_sync"):
        return "it has no no_sync()"
    if trial.micro_batches > 1 and not entry.trait("accumulates", True):
        return "it does not accumulate"
    reason = ""
    if {"once", "idle", "rare"} & set(trial.parts):
        reason = entry.trait("why_not_unused", "")
    if "rare" in trial.parts:
        reason = reason or entry.trait("why_not_unequal", "")
    return reason or None


@dataclass(frozen=True)
class Before:
    """A step of the plain training, in one dtype.

    weights   before the step, with buffers; momenta: of SGD before it
    grads     by name (world_size, micro_batches, ...), of the loss that each backward is called on
    early     of a weight with two uses: the part of `grads` that its last use makes, which comes first in a backward
    used      by name (world_size,): the ranks that use a parameter
    """

    weights: State
    momenta: State
    grads: State
    early: State
    used: State


@lru_cache(maxsize=64)  # a reference is asked for again to name a mistake, and for other strategies
def plain(trial: Trial, dtype: torch.dtype) -> list[Before]:
    """Each step, and the state after the last: SGD on the mean over ranks of each rank's gradient.

    Where batches have one size, that is the gradient of the batch of all ranks.
    """
    module = probe(trial, 0, apart=True).to(dtype)
    weights = {name: x.detach().clone() for name, x in module.state_dict().items()}
    momenta = {name: torch.zeros_like(x) for name, x in module.named_parameters() if x.requires_grad}
    steps = list[Before]()
    for step in range(trial.steps + 1):
        module.load_state_dict(weights)
        by_use, used = _gradients(module, trial, step)
        early = {first: by_use[twin] for twin, first in trial.twins.items()}
        grads = {n: g + early[n] if n in early else g for n, g in by_use.items() if n not in trial.twins}
        steps.append(Before(_joined(weights), dict(momenta), grads, early, used))
        for name, g in grads.items():
            momenta[name] = SGD["momentum"] * momenta[name] + g.sum(dim=1).mean(dim=0)
            weights[name] = weights[name] - SGD["lr"] * momenta[name]
        weights |= {twin: weights[first] for twin, first in trial.twins.items()}
    return steps


def _joined(weights: State) -> State:
    """The state of the module whose tied weights are one."""
    return {name: x for name, x in weights.items() if not name.startswith("again.")}


def _gradients(module: Probe, trial: Trial, step: int) -> tuple[State, State]:
    """By name of each use (world_size, micro_batches, ...), and which ranks have a gradient."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows = []
    for rank in range(trial.world_size):
        for micro in range(trial.micro_batches):
            tokens = batch(trial, step, micro, rank)
            loss = module(tokens, **trial.switches(rank, micro)) / trial.micro_batches
            rows.append(torch.autograd.grad(loss, [*named.values()], allow_unused=True))
    shape = trial.world_size, trial.micro_batches
    grads, used = State(), State()
    for number, (name, p) in enumerate(named.items()):
        column = [row[number] for row in rows]
        used[name] = torch.tensor([x is not None for x in column]).view(shape).any(dim=1)
        grads[name] = torch.stack([torch.zeros_like(p) if x is None else x for x in column]).view(*shape, *p.shape)
    return grads, used
