"""Sharded optimizers: trainings of a small module on two ranks, each held to torch's own optimizer on one process.

A sharded optimizer is called as f(params, optimizer_cls, **kwargs), as in CS336, assignment 2. Ranks begin with equal
weights; before each step every rank has the mean over ranks of the gradients, as after an all-reduce. Every rank must
then end with all of the weights that `optimizer_cls` alone leads to in float64.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmsys import doing
from lmsys.check.question import Fault, Options, Question
from lmsys.check.recorder import Recorder
from lmsys.check.strategy import WORLD_SIZE, Ranks, failed, refusal, refused, wrong_weights
from lmsys.check.strategy_mistakes import Ask, listed, ratio, wrong_parameters
from lmsys.check.trained import Result, State, guarded
from lmsys.extremes.sharded_optimizer import OptimizerTrial, change_options, module_of, optimizer_trials
from lmsys.extremes.strategy import batch
from lmsys.parallel.group import device
from lmsys.registry import Entry


def questions(entry: Entry, options: Options) -> Iterator[Question]:
    """The trials, from the simplest to the rarest. Ranks start once, and again only where a trial has ended them."""
    with Ranks() as ranks:
        yield from asked(ranks, entry, options)


def asked(ranks: Ranks, entry: Entry, options: Options) -> Iterator[Question]:
    """The questions, by ranks that run already."""
    for trial in optimizer_trials(WORLD_SIZE, options.seed):
        ask = partial(ranks.ask, step, entry)
        results = ask(trial)
        if trial.extreme and (failure := refusal(results)):
            yield Question(trial.about, lambda: None, reason=refused(trial, failure), extreme=True)
            continue
        judge = partial(fault, ask, trial, results)
        yield Question(trial.about, judge, f"{trial.about}, {WORLD_SIZE} ranks", extreme=trial.extreme)


def step(entry: Entry, trial: OptimizerTrial, number: int, _: Mapping[str, Any], group: Any = None) -> Result:
    """On a rank: the trial by the sharded optimizer `entry`. `number` is of this training alone."""
    group = dist.group.WORLD if group is None else group
    recorder = Recorder(number, group)
    return guarded(recorder, lambda: _stepped(entry, trial, recorder))


def _stepped(entry: Entry, trial: OptimizerTrial, recorder: Recorder) -> Result:
    module, unwaited = module_of(trial).to(device()), list[str]()
    doing.now("as it makes the optimizer")
    with recorder.recording():
        optimizer = entry.load()(trial.params(module), getattr(torch.optim, trial.optimizer), **trial.options)
        recorder.mark("the end of the optimizer's constructor")
    for number in range(trial.steps):
        rank = dist.get_rank(recorder.group)
        module(batch(trial, number, 0, rank).to(device())).backward()
        for p in module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=recorder.group)
                p.grad /= trial.world_size
        doing.now(f"in step {number + 1}")
        with recorder.recording():
            optimizer.step()
            unwaited += recorder.unwaited.values()
            optimizer.zero_grad()
            recorder.mark(f"the end of step {number + 1}")
        if trial.schedule:
            change_options(optimizer)
    state = {name: x.detach().cpu().clone() for name, x in module.state_dict().items()}
    return Result(state, tuple(unwaited), tuple(recorder.raced))


@dataclass(frozen=True)
class Before:
    """The plain optimizer before a step, in one dtype, and the mean gradients of it by name."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    grads: State
    trial: OptimizerTrial

    @property
    def weights(self) -> State:
        return {name: x.detach() for name, x in self.module.state_dict().items()}

    def after(self, change: Callable[["Before"], None] = lambda _: None, times: int = 1) -> State:
        """The weights after a step with what `change` makes of copies of the module and its optimizer."""
        module, optimizer = copy.deepcopy((self.module, self.optimizer))
        for name, p in module.named_parameters():
            p.grad = self.grads[name].clone() if name in self.grads else None
        copied = Before(module, optimizer, self.grads, self.trial)
        change(copied)
        for _ in range(times):
            optimizer.step()
        return copied.weights


@lru_cache(maxsize=64)
def plain(trial: OptimizerTrial, dtype: torch.dtype) -> list[Before]:
    """torch's optimizer before each step, and after the last."""
    module = module_of(trial).to(dtype)
    optimizer = getattr(torch.optim, trial.optimizer)(trial.params(module), **trial.options)
    steps = list[Before]()
    for number in range(trial.steps + 1):
        losses = [module(batch(trial, number, 0, rank)) for rank in range(trial.world_size)]
        torch.stack(losses).mean().backward()
        grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        steps.append(Before(*copy.deepcopy((module, optimizer)), grads, trial))
        optimizer.step()
        optimizer.zero_grad()
        if trial.schedule:
            change_options(optimizer)
    return steps


CHANGED = ("lr", "momentum"), ("lr",), ("momentum",)  # options that a schedule changes
Rule = tuple[str, State]  # in words, and the weights after the step


def rules(before: Sequence[Before], number: int) -> Iterator[Rule]:
    """Each known mistake, and the weights that step `number` then leads to."""
    now, world_size = before[number], before[number].trial.world_size

    def with_grads(change: Callable[[str, Tensor], Tensor]) -> Callable[[Before], None]:
        def put(before: Before) -> None:
            for name, p in before.module.named_parameters():
                if p.grad is not None:
                    p.grad = change(name, p.grad)

        return put

    def with_options(**options: Any) -> Callable[[Before], None]:
        def put(before: Before) -> None:
            for group in before.optimizer.param_groups:
                group.update(options)

        return put

    def afresh(before: Before) -> None:
        before.optimizer.state.clear()

    keeps = {name: value for name, value in now.optimizer.param_groups[0].items() if name not in ("params",)}
    defaults = {name: value for name, value in now.optimizer.defaults.items() if name not in ("params",)}
    theirs = getattr(torch.optim, now.trial.optimizer)([torch.zeros(1)]).defaults
    yield "no rank steps", now.weights
    for names in CHANGED if now.trial.schedule and number > 0 else ():
        words = f"{' and '.join(names)} as changed in param_groups: the change is not used"
        yield words, now.after(with_options(**{name: now.trial.options[name] for name in names}))
    yield "gradients are summed over ranks again", now.after(with_grads(lambda _, g: world_size * g))
    yield "gradients are divided by the number of ranks again", now.after(with_grads(lambda _, g: g / world_size))
    yield "the options of a group are lost: it has those of the first group", now.after(with_options(**keeps))
    yield "the options of a group are lost: it has the optimizer's", now.after(with_options(**defaults))
    yield "the optimizer's options are lost: it has torch's defaults", now.after(with_options(**theirs))
    if number > 0:
        yield "the optimizer's state is lost between steps", now.after(afresh)
        left = before[number - 1].grads

        def stale(name: str, g: Tensor) -> Tensor:
            return g + left[name] * (world_size - 1) / world_size

        words = "zero_grad() leaves gradients of parameters that other ranks own: they add to the next"
        yield words, now.after(with_grads(stale))
        yield "zero_grad() leaves gradients: they add to the next", now.after(with_grads(lambda n, g: g + left[n]))
    yield "it is stepped twice", now.after(times=2)


def explain(ask: Ask, trial: OptimizerTrial) -> str | None:
    """The mistake, in words, of an optimizer whose result of the trial is wrong; None where no known one gives it."""
    exact, ordinary = plain(trial, torch.float64), plain(trial, torch.float32)
    for steps in range(trial.steps + 1):
        results = ask(replace(trial, steps=steps))
        if any(result.failure for result in results):
            return None
        wrong = wrong_parameters(results, exact[steps].weights, ordinary[steps].weights)
        if wrong and steps == 0:
            return f"the optimizer's constructor changes weights: {listed(list(wrong))}"
        if raced := [call for result in results for call in result.raced]:
            return f"what the {raced[0]} works on is written to before it has been waited for"
        if wrong:
            name = _of_step(results, list(wrong), exact[:steps], ordinary[:steps])
            return name and (name if steps == 1 else f"{name} (from step {steps} on)")
    return None


def _of_step(
    results: Sequence[Result], wrong: Sequence[str], exact: Sequence[Before], ordinary: Sequence[Before]
) -> str | None:
    number = len(exact) - 1
    if sentence := _not_shared(results, wrong, exact[number], ordinary[number]):
        return sentence
    left, sentences = list(wrong), list[str]()
    for (words, wide), (_, narrow) in zip(rules(exact, number), rules(ordinary, number), strict=True):
        names = [name for name in left if all(ratio(x.state[name], wide[name], narrow[name]) <= 1 for x in results)]
        if names:
            some = len(names) < len(wrong) or "no rank" in words
            sentences.append(f"{words} ({listed(names)})" if some else words)
            left = [name for name in left if name not in names]
    return "; ".join(sentences) or _apart(results, wrong)


def _not_shared(results: Sequence[Result], wrong: Sequence[str], exact: Before, ordinary: Before) -> str | None:
    """The parameters that some ranks have stepped, and others have left as they were."""
    after, before = (exact.after(), ordinary.after()), (exact.weights, ordinary.weights)
    keeps: dict[int, list[str]] = {}
    for name in wrong:
        for rank, result in enumerate(results):
            if ratio(result.state[name], *(x[name] for x in before)) <= 1:
                keeps.setdefault(rank, []).append(name)
            elif ratio(result.state[name], *(x[name] for x in after)) > 1:
                return None
    keepers = [sum(name in names for names in keeps.values()) for name in wrong]
    if not keeps or len(results) in keepers:  # what no rank has stepped is another mistake
        return None
    words = "; ".join(f"rank {rank} keeps its old {listed(names)}" for rank, names in keeps.items())
    waits = [call for result in results for call in result.unwaited]
    return f"updates are not shared with all ranks: {words}" + (f"; nobody waits for the {waits[0]}" if waits else "")


def _apart(results: Sequence[Result], wrong: Sequence[str]) -> str | None:
    first, *others = results
    apart = [name for name in wrong if not all(torch.equal(first.state[name], other.state[name]) for other in others)]
    return f"ranks end with different weights: {listed(apart)}" if apart else None


def fault(ask: Ask, trial: OptimizerTrial, results: Sequence[Result]) -> Fault | None:
    """The fault of the ranks' results of a trial; None where there is none."""
    if (failure := failed(results)) is not None:
        return failure
    exact, ordinary = (plain(trial, dtype)[-1].weights for dtype in (torch.float64, torch.float32))
    wrong = wrong_parameters(results, exact, ordinary)
    return wrong_weights(trial, wrong, len(exact), explain(ask, trial)) if wrong else None
