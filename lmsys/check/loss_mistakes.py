"""Mistakes that people make in losses, tried one after another to explain a wrong result: see `formulas`."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.check.formulas import Formula, Mistake, Outputs, Problem, backward, forward, grad_output_ignored, narrow

CHUNKS = (16, 32, 50, 64, 100, 128, 256)
BLOCKS = (32, 64, 128, 256, 512, 1024)
FINITE = (-10.0, -15.0, -20.0, -30.0, -50.0, -100.0)  # what stands for -inf
SMOOTHINGS = (0.1, 0.05, 0.01, 0.2)
Inputs = Mapping[str, Tensor]
Settings = Mapping[str, Any]


def right(inputs: Inputs, settings: Settings) -> Tensor:
    """The mean of -log softmax(logits)[target] over the tokens that count."""
    return F.cross_entropy(logits_of(inputs), settings["targets"], ignore_index=settings["ignore_index"])


def logits_of(inputs: Inputs) -> Tensor:
    return inputs["logits"] if "logits" in inputs else F.linear(inputs["hidden"], inputs["weight"])


def plain(inputs: Inputs, settings: Settings) -> Tensor:
    """`right` as it is often written: a log-sum-exp less a logit, both of which round where they are large."""
    logits = logits_of(inputs)
    return (
        _mean(logits.logsumexp(dim=-1), logits, settings) if logits.dtype == torch.float32 else right(inputs, settings)
    )


def losses(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """The loss of each token, 0 where it is ignored; whether it counts."""
    counted = settings["targets"] != settings["ignore_index"]
    found = F.cross_entropy(logits, settings["targets"], ignore_index=settings["ignore_index"], reduction="none")
    return found, counted


def mistakes(problem: Problem) -> Iterator[Mistake]:
    """The plainest first."""
    targets = problem.settings["targets"]
    counted = targets != problem.settings["ignore_index"]
    first = problem.inputs["weight" if "weight" in problem.inputs else "logits"]
    vocabulary = len(first) if "weight" in problem.inputs else first.shape[-1]
    yield forward("the losses are summed, not averaged", lambda x, s: losses(logits_of(x), s)[0].sum())
    yield from _of_the_maximum()
    yield from _of_ignored(counted)
    yield from _of_the_vocabulary(vocabulary)
    yield from _of_chunks(counted)
    yield forward("the softmax is taken over tokens, not over classes", _over_tokens)
    yield forward("targets are shifted by a token once more", _shifted)
    yield forward("the logarithm has base 2", lambda x, s: right(x, s) / math.log(2))
    yield forward("it is a probability, not its logarithm: the mean of 1 - p", _of_probabilities)
    for amount in SMOOTHINGS:
        yield forward(f"labels are smoothed by {amount:g}", _smoothed(1.0 - amount, amount))
        yield forward(f"labels are smoothed by {amount:g}, and their sum is not 1", _smoothed(1.0 - amount, 1.0))
    yield from _of_backwards(counted)
    if "weight" in problem.inputs:
        yield from _of_weights(len(targets))


def _of_the_maximum() -> Iterator[Mistake]:
    def shifted_by(top: Callable[[Tensor], Tensor]) -> Formula:
        def formula(x: Inputs, s: Settings) -> Tensor:
            logits = logits_of(x).float()
            shift = top(logits.detach())
            lse = (logits - shift).exp().sum(dim=-1).log() + shift[:, 0]
            return _mean(lse, logits, s)

        return formula

    at_zero = torch.zeros(())
    yield narrow(
        "no maximum is subtracted before the exponential: it overflows",
        shifted_by(lambda x: at_zero.to(x).expand(len(x), 1)),
        torch.float32,
    )
    yield narrow(
        "the maximum begins at 0, not at -inf: logits far below it underflow",
        shifted_by(lambda x: x.amax(dim=-1, keepdim=True).clamp(min=0)),
        torch.float32,
    )
    yield narrow(
        "the first logit is subtracted, not the largest: it overflows", shifted_by(lambda x: x[:, :1]), torch.float32
    )
    yield narrow(
        "the largest logit of all tokens is subtracted, not that of each: others underflow",
        shifted_by(lambda x: x.amax().expand(len(x), 1)),
        torch.float32,
    )


def _mean(lse: Tensor, logits: Tensor, settings: Settings) -> Tensor:
    counted = settings["targets"] != settings["ignore_index"]
    label = settings["targets"].where(counted, 0)
    each = lse - logits.gather(1, label[:, None])[:, 0]
    return each.where(counted, 0).sum() / counted.sum()


def _of_ignored(counted: Tensor) -> Iterator[Mistake]:
    if bool(counted.all()):
        return

    def as_they_are(x: Inputs, s: Settings) -> Tensor:
        return F.cross_entropy(logits_of(x), s["targets"].clamp(min=0))

    yield forward(
        "ignored tokens count in the mean: the sum is divided by all tokens",
        lambda x, s: losses(logits_of(x), s)[0].mean(),
    )
    yield forward("ignored tokens are not left out: they count as tokens of their class, or of class 0", as_they_are)
    yield forward(
        "the loss of ignored tokens is added, and the sum divided by those that count",
        lambda x, s: as_they_are(x, s) * len(counted) / counted.sum(),
    )


def _of_the_vocabulary(vocabulary: int) -> Iterator[Mistake]:
    def padded(more: int, by: float = 0.0) -> Formula:
        return lambda x, s: _mean(F.pad(logits_of(x), (0, more), value=by).logsumexp(dim=-1), logits_of(x), s)

    def repeated(times: int) -> Formula:
        return lambda x, s: right(x, s) + math.log(times)

    def cut(classes: int) -> Formula:
        return lambda x, s: _mean(logits_of(x)[:, :classes].logsumexp(dim=-1), logits_of(x), s)

    for more in sorted({-vocabulary % block for block in BLOCKS} - {0}):
        for value in (0.0, *FINITE):
            told = f"{more} classes behind the last one count, with logits of {value:g}, not -inf"
            yield forward(told, padded(more, value))
    for classes in sorted({*(vocabulary // block * block for block in BLOCKS), vocabulary - 1}):
        if 0 < classes < vocabulary:
            yield forward(f"classes from {classes} on do not count in the sum", cut(classes))
    for times in (2, 4, 8):
        yield forward(f"every class counts {times} times in the sum of exponentials", repeated(times))


def _of_chunks(counted: Tensor) -> Iterator[Mistake]:
    def of_means(size: int) -> Formula:
        def formula(x: Inputs, s: Settings) -> Tensor:
            each, counts = losses(logits_of(x), s)
            sums = torch.stack([part.sum() for part in each.split(size)])
            some = torch.stack([part.sum() for part in counts.split(size)])
            return (sums / some.clamp(min=1)).mean()

        return formula

    for size in CHUNKS:
        if size < len(counted):
            yield forward(
                f"the mean of the means of chunks of {size} tokens, which hold unequal counts", of_means(size)
            )
    for parts in (2, 4, 8):
        if (size := math.ceil(len(counted) / parts)) not in CHUNKS:
            yield forward(f"the mean of the means of {parts} chunks, which hold unequal counts", of_means(size))


def _over_tokens(inputs: Inputs, settings: Settings) -> Tensor:
    logits, counted = logits_of(inputs), settings["targets"] != settings["ignore_index"]
    label = settings["targets"].where(counted, 0)
    return -logits.log_softmax(dim=0).gather(1, label[:, None])[:, 0].where(counted, 0).sum() / counted.sum()


def _shifted(inputs: Inputs, settings: Settings) -> Tensor:
    return F.cross_entropy(logits_of(inputs)[:-1], settings["targets"][1:], ignore_index=settings["ignore_index"])


def _of_probabilities(inputs: Inputs, settings: Settings) -> Tensor:
    each, counted = losses(logits_of(inputs), settings)
    return (1 - each.neg().exp()).where(counted, 0).sum() / counted.sum()


def _smoothed(of_label: float, of_all: float) -> Formula:
    """Targets of `of_label` at the label, and `of_all` shared by all classes."""

    def formula(inputs: Inputs, settings: Settings) -> Tensor:
        logits, counted = logits_of(inputs), settings["targets"] != settings["ignore_index"]
        at_all = -logits.log_softmax(dim=-1).mean(dim=-1) * of_all
        return (losses(logits, settings)[0] * of_label + at_all.where(counted, 0)).sum() / counted.sum()

    return formula


def _of_backwards(counted: Tensor) -> Iterator[Mistake]:
    yield grad_output_ignored(right)

    def times(text: str, factor: float) -> Mistake:
        def scaled(problem: Problem, found: Outputs) -> Outputs:
            return {name: x * factor for name, x in found.items() if name in problem.inputs}

        return backward(text, right, scaled)

    count, tokens = int(counted.sum()), len(counted)
    yield times("gradients are those of the sum: they are not divided by the number of tokens", count)
    yield times("gradients are divided by the number of tokens twice", 1 / count)
    if count != tokens:
        yield times("gradients are divided by all tokens, ignored ones too", count / tokens)
    yield times("the sign of the gradients is wrong", -1.0)

    def of(of_logits: Callable[[Tensor, Tensor, Settings], Tensor]) -> Callable[[Problem, Outputs], Outputs]:
        return lambda problem, found: _through_the_head(problem, of_logits)

    def without_the_label(p: Tensor, one_hot: Tensor, settings: Settings) -> Tensor:
        return p.where(counted[:, None], 0)

    def with_ignored(p: Tensor, one_hot: Tensor, settings: Settings) -> Tensor:
        return p - one_hot

    def without_p(p: Tensor, one_hot: Tensor, settings: Settings) -> Tensor:
        """dx = dy - dot(dy, y) in the place of dy - exp(y) sum(dy), y the log-softmax."""
        return (-one_hot + (one_hot * p.log()).sum(dim=-1, keepdim=True)).where(counted[:, None], 0)

    yield backward("in the backward 1 is not subtracted at the target", right, of(without_the_label))
    if count != tokens:
        yield backward("in the backward ignored tokens have a gradient", right, of(with_ignored))
    yield backward(
        "the backward subtracts the product of gradient and result, not the probabilities", right, of(without_p)
    )


def _through_the_head(problem: Problem, of_logits: Callable[[Tensor, Tensor, Settings], Tensor]) -> Outputs:
    """Gradients of the inputs; `of_logits` makes those of the logits from p, targets as one-hot rows, and settings."""
    assert problem.grad_output is not None
    targets, logits = problem.settings["targets"], logits_of(problem.inputs)
    counted = targets != problem.settings["ignore_index"]
    one_hot = F.one_hot(targets.where(counted, 0), logits.shape[-1]).to(logits).where(counted[:, None], 0)
    d_logits = of_logits(logits.softmax(dim=-1), one_hot, problem.settings) * problem.grad_output / counted.sum()
    if "logits" in problem.inputs:
        return {"logits": d_logits}
    hidden, weight = problem.inputs["hidden"], problem.inputs["weight"]
    return {"hidden": d_logits @ weight, "weight": d_logits.mT @ hidden}


def _of_weights(tokens: int) -> Iterator[Mistake]:
    def some(rows: slice) -> Callable[[Problem, Outputs], Outputs]:
        def gradients(problem: Problem, found: Outputs) -> Outputs:
            def of_logits(p: Tensor, one_hot: Tensor, settings: Settings) -> Tensor:
                counted = settings["targets"] != settings["ignore_index"]
                kept = torch.zeros_like(p)
                kept[rows] = (p - one_hot).where(counted[:, None], 0)[rows]
                return kept

            return {"weight": _through_the_head(problem, of_logits)["weight"]}

        return gradients

    sizes = {*CHUNKS, *(math.ceil(tokens / parts) for parts in (2, 4, 8))}
    for size in sorted(size for size in sizes if size < tokens):
        last = (tokens - 1) // size * size
        yield backward(
            f"only the last chunk of {size} tokens adds to the gradient of weight", right, some(slice(last, None))
        )
        yield backward(
            f"only the first chunk of {size} tokens adds to the gradient of weight", right, some(slice(size))
        )
