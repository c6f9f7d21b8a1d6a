"""The known mistake that a strategy's weights show, found by making each of them in float64.

The first wrong step is looked for by shorter and shorter trainings. Before it the weights are right, so each rank's
gradients of that step are known, and so is what every mistake would make of them, parameter by parameter.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmsys.check.trained import SGD, Before, Result, State, plain
from lmsys.extremes.strategy import Trial
from lmsys.testing import error_ratio

Ask = Callable[[Trial], Sequence[Result]]  # a training on the ranks, by rank
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Seen:
    """The gradients of a parameter that ranks make in a step.

    grads  (world_size, micro_batches, ...); early: the part of its last use, or None; used: (world_size,)
    sizes  (world_size,): examples of each rank
    weights  of the parameter before the step
    """

    grads: Tensor
    early: Tensor | None
    used: Tensor
    sizes: Tensor
    weights: Tensor

    @property
    def of_ranks(self) -> Tensor:
        """(world_size, ...)"""
        return self.grads.sum(dim=1)

    @property
    def mean(self) -> Tensor:
        return self.of_ranks.mean(dim=0)


Rule = tuple[str, Tensor]  # what is done to gradients, in words, and the gradient that each rank then steps by


def rules(seen: Seen) -> Iterator[Rule]:
    """Each known mistake, and the gradients (world_size, ...) that it leaves on the ranks."""
    g, mean, world_size = seen.of_ranks, seen.mean, len(seen.grads)

    def on_all(x: Tensor) -> Tensor:
        return x.expand_as(g)

    yield "are never synchronized: each rank steps by its own", g
    if not seen.used.all() and seen.used.any():
        among = g[seen.used].mean(dim=0)
        yield "are averaged over the ranks that use the parameter, where the others count as zero", on_all(among)
        yield "are lost on the ranks that do not use the parameter", _where(seen.used, on_all(mean))
        yield "are averaged over the ranks that use it, and lost on the others", _where(seen.used, on_all(among))
    yield "are summed over ranks, not averaged", on_all(world_size * mean)
    yield "are divided by the number of ranks twice", on_all(mean / world_size)
    for rank in range(world_size):
        yield f"are those of rank {rank} alone on every rank, and are not averaged", on_all(g[rank])
    if seen.sizes.unique().numel() > 1:
        weights = (seen.sizes / seen.sizes.sum()).view(-1, *[1] * (g.dim() - 1))
        yield (
            "are weighted by the number of tokens of each rank; the contract is the mean over ranks",
            on_all((g * weights).sum(dim=0)),
        )
        scaled = g * (seen.sizes / seen.sizes.max()).view(-1, *[1] * (g.dim() - 1))
        yield "are weighted by the tokens of each rank, over those of the largest batch", on_all(scaled.mean(dim=0))
    if seen.grads.shape[1] > 1:
        yield from _of_micro_batches(seen, on_all)
    if seen.early is not None:
        yield from _too_early(seen, on_all)
    yield "are not used: it keeps its weights", torch.zeros_like(g)
    yield "begin at the weights, as in a buffer that is not zeroed", on_all(mean + seen.weights)
    yield "are counted twice", on_all(2 * mean)
    yield "are multiplied by the number of ranks twice", on_all(world_size**2 * mean)
    yield "are subtracted where they are to be added", on_all(-mean)
    for dtype in NARROW:
        words = f"are communicated in {str(dtype).removeprefix('torch.')}"
        yield words, on_all(g.to(dtype).sum(dim=0).to(g.dtype) / world_size)
        yield words, on_all((g / world_size).to(dtype).sum(dim=0).to(g.dtype))
        yield words, on_all((g.to(dtype).sum(dim=0) / world_size).to(g.dtype))
        yield words, on_all(g.to(dtype).to(g.dtype).mean(dim=0))
        yield words, on_all(mean.to(dtype).to(g.dtype))


def _where(used: Tensor, x: Tensor) -> Tensor:
    return x * used.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)


def _of_micro_batches(seen: Seen, on_all: Callable[[Tensor], Tensor]) -> Iterator[Rule]:
    by_micro, world_size = seen.grads, len(seen.grads)
    first, last = by_micro[:, 0], by_micro[:, -1]
    count = by_micro.shape[1]
    yield "are those of the last micro-batch alone", on_all(last.mean(dim=0))
    yield "are those of the first micro-batch alone", on_all(first.mean(dim=0))
    local = by_micro[:, :-1].sum(dim=1)
    yield (
        "of micro-batches under no_sync() are not synchronized at all, those of the last are",
        (local + last.mean(dim=0)),
    )
    yield (
        "are synchronized after the first micro-batch, and not when the step is made",
        (first.mean(dim=0) + by_micro[:, 1:].sum(dim=1)),
    )
    yield "are synchronized under no_sync(), and those of the last micro-batch are not", local.mean(dim=0) + last
    summed = divided = again = torch.zeros_like(first)
    for micro in range(count):
        summed = on_all((summed + by_micro[:, micro]).sum(dim=0))
        divided = (divided + by_micro[:, micro]) / world_size
        again = on_all((again + by_micro[:, micro]).sum(dim=0) / world_size)
    yield "of earlier micro-batches are summed over ranks again with each later one", summed / world_size
    yield "are summed over ranks again with each micro-batch, and never divided", summed
    yield (
        "of earlier micro-batches are divided by the number of ranks again with each later one",
        on_all(divided.sum(dim=0)),
    )
    yield "are summed over micro-batches twice", on_all(count * seen.mean)
    yield "are divided by the number of micro-batches twice", on_all(seen.mean / count)


def _too_early(seen: Seen, on_all: Callable[[Tensor], Tensor]) -> Iterator[Rule]:
    assert seen.early is not None
    early, world_size = seen.early.sum(dim=1), len(seen.grads)
    rest = seen.of_ranks - early
    early_words = "are synchronized too early, before the last use of the weight has added to them"
    yield f"{early_words}: what comes later stays on its rank", early.mean(dim=0) + rest
    yield f"{early_words}: what comes later is lost", on_all(early.mean(dim=0))
    yield "are those of one use of the weight alone", on_all(rest.mean(dim=0))
    yield (
        "of a weight with two uses are counted twice: the first part is summed over ranks again with the second",
        on_all(world_size * early.mean(dim=0) + rest.mean(dim=0)),
    )
    yield (
        "of a weight with two uses are counted twice: the second part is averaged twice",
        on_all(early.mean(dim=0) + world_size * rest.mean(dim=0)),
    )
    yield "of a weight with two uses are counted twice in part", on_all(2 * early.mean(dim=0) + rest.mean(dim=0))
    yield "of a weight with two uses are counted twice in part", on_all(early.mean(dim=0) + 2 * rest.mean(dim=0))


def wrong_parameters(results: Sequence[Result], exact: State, ordinary: State) -> dict[str, float]:
    """Errors over their budgets above 1, by name, on the rank where they are worst."""
    worst = {name: max(ratio(result.state[name], exact[name], ordinary[name]) for result in results) for name in exact}
    return {name: value for name, value in worst.items() if not value <= 1}


def ratio(x: Tensor, exact: Tensor, ordinary: Tensor) -> float:
    """`error_ratio` in units of the largest value, a power of two: weights of 1e-20 are judged as those of 1 are."""
    largest = exact.abs().max()
    unit = torch.where(largest > 0, torch.exp2(torch.frexp(largest).exponent.double()), 1.0)
    return error_ratio(x.double() / unit, exact / unit, (ordinary.double() / unit).float())


def explain(ask: Ask, trial: Trial) -> str | None:
    """The mistake, in words, of a strategy whose result of the trial is wrong; None where no known one explains it."""
    exact, ordinary = plain(trial, torch.float64), plain(trial, torch.float32)
    for steps in range(trial.steps + 1):
        results = ask(replace(trial, steps=steps))
        if any(result.failure for result in results):
            return None
        wrong = wrong_parameters(results, exact[steps].weights, ordinary[steps].weights)
        if wrong and steps == 0:
            return _beginning(trial, list(wrong), exact[0])
        if raced := [call for result in results for call in result.raced]:
            return f"what the {raced[0]} works on is written to before it has been waited for"
        if wrong:
            name = _step(trial, results, list(wrong), exact[steps - 1], ordinary[steps - 1])
            return name and (name if steps == 1 else f"{name} (from step {steps} on)")
    return None


def _beginning(trial: Trial, wrong: Sequence[str], exact: Before) -> str:
    weights = [name for name in wrong if name in exact.grads]
    others = [name for name in wrong if name not in exact.grads and name not in trial.twins]
    sentences = list[str]()
    if weights:
        sentences.append(f"initial weights are not broadcast from rank 0: {listed(weights)}")
    if frozen := [name for name in others if name != "scale"]:
        sentences.append(f"initial weights of frozen parameters are not broadcast from rank 0: {listed(frozen)}")
    if "scale" in others:
        sentences.append("buffers are not broadcast from rank 0: scale")
    return "; ".join(sentences)


def _step(trial: Trial, results: Sequence[Result], wrong: Sequence[str], exact: Before, ordinary: Before) -> str | None:
    fitting = {name: list(_fitting(trial, results, name, exact, ordinary)) for name in wrong if name in exact.grads}
    if frozen := [name for name in wrong if name not in exact.grads and name not in trial.twins]:
        return f"what is not to be trained has changed: {listed(frozen)}"
    left, sentences = dict(fitting), list[str]()
    while left and any(left.values()):
        counts: dict[str, int] = {}
        for rule in (rule for fits in left.values() for rule in fits):
            counts[rule] = counts.get(rule, 0) + 1
        rule = max(counts, key=lambda rule: counts[rule])
        names = [name for name, fits in left.items() if rule in fits]
        sentences.append(_sentence(rule, names, trial, results, exact))
        left = {name: fits for name, fits in left.items() if name not in names}
    if (
        len(sentences) == trial.world_size
        and all("alone on every rank" in sentence for sentence in sentences)
        and not left
    ):
        return "each parameter is stepped by the gradient of one rank, its owner, which is not averaged"
    if sentences:
        return "; ".join(sentences)
    if apart := [name for name in wrong if not all(_same(results[0], other, name) for other in results[1:])]:
        return f"ranks end with different weights: {listed(apart)}"
    return None


def _fitting(trial: Trial, results: Sequence[Result], name: str, exact: Before, ordinary: Before) -> Iterator[str]:
    """The mistakes that leave every rank with the weights that it has."""
    sizes = torch.tensor([trial.examples(rank) for rank in range(trial.world_size)])
    both = [
        rules(Seen(g, before.early.get(name), before.used[name], sizes.to(g.dtype), before.weights[name]))
        for before, g in ((exact, exact.grads[name]), (ordinary, ordinary.grads[name]))
    ]
    for (words, wide), (_, narrow) in zip(*both, strict=True):
        ends = _stepped(exact, name, wide), _stepped(ordinary, name, narrow)  # (world_size, ...) each
        if all(ratio(result.state[name], ends[0][rank], ends[1][rank]) <= 1 for rank, result in enumerate(results)):
            yield words
    means = [before.grads[name].sum(dim=1).mean(dim=0) for before in (exact, ordinary)]
    after = _stepped(exact, name, means[0]), _stepped(ordinary, name, means[1])
    old = exact.weights[name], ordinary.weights[name]
    keeps = [rank for rank, result in enumerate(results) if ratio(result.state[name], *old) <= 1]
    steps = [rank for rank, result in enumerate(results) if ratio(result.state[name], *after) <= 1]
    if keeps and steps and len(keeps) + len(steps) == len(results):
        yield f"keeps its old value on rank {', '.join(map(str, keeps))}"


def _stepped(before: Before, name: str, grads: Tensor) -> Tensor:
    """The weights after a step of SGD by these gradients: (world_size, ...), or those of a single rank."""
    return before.weights[name] - SGD["lr"] * (SGD["momentum"] * before.momenta[name] + grads)


def _sentence(rule: str, names: Sequence[str], trial: Trial, results: Sequence[Result], exact: Before) -> str:
    if rule.startswith("keeps"):
        return f"an update is not shared with all ranks: {listed(names)} {rule}"
    trained = [name for name, used in exact.used.items() if used.any() and name in exact.grads]
    whole = set(names) == set(trained)
    if rule.startswith("of "):
        subject = "gradients" if whole else f"gradients (of {listed(names)})"
    else:
        subject = "gradients" if whole else f"the gradients of {listed(names)}"
    if "tied" in trial.parts and list(names) == ["embed.weight"] and ("summed" in rule or "twice" in rule):
        subject, rule = "the gradients of the tied weight embed.weight", f"{rule}: it counts once for each name"
    sentence = f"{subject} {rule}"
    if not rule.startswith("are never synchronized"):
        return sentence
    if waits := [call for result in results for call in result.unwaited]:
        return f"{sentence}; nobody waits for the {waits[0]}"
    if not whole and set(names) == set(trained[: len(names)]):
        return f"{sentence}; they are the last in a backward, as a last bucket that is not sent"
    return sentence


def _same(first: Result, other: Result, name: str) -> bool:
    return torch.equal(first.state[name], other.state[name])


def listed(names: Sequence[str]) -> str:
    """The names, or the first of many."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
