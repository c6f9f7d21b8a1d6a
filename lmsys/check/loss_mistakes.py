"""The formula of the cross-entropy loss, `right`, and the mistakes that people make in it, for `loss.py`.

`loss.py` gives `right`, `plain` and `mistakes` to `formulas.judge`, which tries the mistakes in their order and reports
the first that gives the wrong result: so the plainest come first. To add a mistake, add an exhibit (a published loss
that makes it) to `tests/museum/`, and its words and a function to the table for the place of the mistake:

    MAXIMUM          what is subtracted before the exponential
    IGNORED          ignored tokens
    _of_vocabulary   classes that are padded, left out or counted several times
    _of_chunks       means over chunks of tokens
    _of_gradients    the backward alone; for the gradient of the head's weight alone `_of_weights`
    OF_OPTIONS       an option, such as weights of tokens
    FIRST_FOR_ALL    the backward of a loss with options
    `others` in `mistakes`: all else

The function is a `Formula` or a `Gradients` (`formulas.py`). A Formula computes the loss from (inputs, settings), which
lambdas call x and s; `forwards` derives its gradients by autograd. A Gradients returns mistaken gradients directly, for
`backwards`. *Counted* tokens are those that are not ignored.

Legend: N tokens, V vocabulary, p = softmax(logits).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys import testing
from lmsys.check.formulas import (
    Formula,
    Gradients,
    Inputs,
    Mistakes,
    Outputs,
    Problem,
    Settings,
    backwards,
    cut,
    forwards,
    outputs_of,
    padding,
    parts_of_sum,
)
from lmsys.model.loss import cross_entropy

OPTIONS = "reduction", "token_weights", "label_smoothing", "z_loss", "softcap"  # those of lmsys.model.loss
CHUNKS = (16, 32, 50, 64, 100, 128, 256)  # tokens that a kernel may take at a time
FINITE = (0.0, -10.0, -15.0, -20.0, -30.0, -50.0, -100.0)  # logits that a kernel may pad with, in place of -inf
SMOOTHINGS = (0.1, 0.05, 0.01, 0.2)  # amounts of label smoothing that a loss may apply unasked


def right(inputs: Inputs, settings: Settings) -> Tensor:
    """The right loss: the mean of -log softmax(logits)[target] over counted tokens, or what the options make of it."""
    others = {name: value for name, value in settings.items() if name != "targets"}
    formula: Callable[..., Tensor] = cross_entropy if options_of(settings) else F.cross_entropy
    return formula(logits_of(inputs), settings["targets"], **others)


def logits_of(inputs: Inputs) -> Tensor:
    """The logits (N, V): an input, or the product of the hidden states and the head's weight."""
    return inputs["logits"] if "logits" in inputs else F.linear(inputs["hidden"], inputs["weight"])


def plain(inputs: Inputs, settings: Settings) -> Tensor:
    """`right`, except in float32 without options: there a log-sum-exp, as it is often written, token by token.

    Two things may make a right implementation less exact than `right`. A matrix product of a few rows, as in a small
    chunk, may add in another order than one of many rows, and round more. Where logits are large, both terms of
    log-sum-exp - logit round. So `judge` allows the larger of the errors of `right` and `plain`.
    """
    if options_of(settings) or next(iter(inputs.values())).dtype != torch.float32:
        return right(inputs, settings)
    targets = settings["targets"].where(counted_tokens(settings), 0)
    tokens = [{**inputs, "hidden": x} for x in inputs["hidden"].split(1)] if "hidden" in inputs else [inputs]
    return mean(testing.log_sum_exp_loss(torch.cat([logits_of(x) for x in tokens]), targets), settings)


def options_of(settings: Settings) -> list[str]:
    """The names of the options among the settings."""
    return [name for name in OPTIONS if name in settings]


def counted_tokens(settings: Settings) -> Tensor:
    """(N,): True for tokens that are not ignored."""
    return settings["targets"] != settings["ignore_index"]


def mean(each: Tensor, settings: Settings) -> Tensor:
    """The mean over the tokens that are not ignored."""
    return each.where(counted_tokens(settings), 0).sum() / counted_tokens(settings).sum()


def at_target(x: Tensor, settings: Settings) -> Tensor:
    """(N,): the values of x (N, V) at the targets. For ignored tokens the values mean nothing."""
    return x.gather(1, settings["targets"].where(counted_tokens(settings), 0)[:, None])[:, 0]


def of_sum(
    inputs: Inputs,
    settings: Settings,
    lse: Callable[[Tensor], Tensor] = lambda logits: logits.logsumexp(dim=-1),
    times: int = 1,
) -> Tensor:
    """The loss with `lse` in place of log-sum-exp; each class counts `times` in the sum of exponentials.

    lse  logits (N, V) -> (N,)
    """
    logits = logits_of(inputs)
    return mean(lse(logits) + math.log(times) - at_target(logits, settings), settings)


def losses(inputs: Inputs, settings: Settings) -> Tensor:
    """(N,): the loss of each token, 0 if it is ignored."""
    return F.cross_entropy(
        logits_of(inputs), settings["targets"], ignore_index=settings["ignore_index"], reduction="none"
    )


def mistakes(problem: Problem) -> Mistakes:
    """The mistakes for a problem, the plainest first, since the first that explains the result is reported.

    With options only mistakes in these options are tried.
    """
    if options := options_of(problem.settings):
        without = {
            f"{name} is ignored": lambda x, s, name=name: right(x, {each: s[each] for each in s if each != name})
            for name in options
            if name != "reduction"
        }
        of_options = {text: formula for name in options for text, formula in OF_OPTIONS.get(name, {}).items()}
        return forwards(without | of_options) | backwards(right, FIRST_FOR_ALL)
    counted = counted_tokens(problem.settings)
    tokens, vocabulary = logits_of(problem.inputs).shape
    smoothed = {
        **{
            f"labels are smoothed by {amount:g}": partial(_smoothed, of_label=1.0 - amount, of_all=amount)
            for amount in SMOOTHINGS
        },
        **{
            f"label smoothing adds the mean over classes times 1, not times {amount:g}:"
            f" target probabilities sum to {2 - amount:g}": partial(_smoothed, of_label=1.0 - amount, of_all=1.0)
            for amount in SMOOTHINGS
        },
    }
    others: dict[str, Formula] = {
        "the softmax is taken over tokens, not over classes": (
            lambda x, s: mean(-at_target(logits_of(x).log_softmax(dim=0), s), s)
        ),
        "targets are shifted by one token, which the caller has done already": (
            lambda x, s: F.cross_entropy(logits_of(x)[:-1], s["targets"][1:], ignore_index=s["ignore_index"])
        ),
        "the logarithm has base 2, not e": lambda x, s: right(x, s) / math.log(2),
        "the loss is 1 - p of the target, not -log p": lambda x, s: mean(1 - (-losses(x, s)).exp(), s),
    }
    return {
        **forwards({"the losses are summed, not averaged": lambda x, s: losses(x, s).sum()}),
        # Computed in float32, where exp overflows beyond 88. In float64 it overflows beyond 709, so logits of hundreds
        # would not show these mistakes.
        **forwards(MAXIMUM, torch.float32),
        **forwards(
            ({} if bool(counted.all()) else IGNORED)
            | _of_vocabulary(vocabulary)
            | _of_chunks(tokens)
            | others
            | smoothed
        ),
        **backwards(right, _of_gradients(counted) | (_of_weights(counted) if "weight" in problem.inputs else {})),
    }


OF_OPTIONS: dict[str, dict[str, Formula]] = {  # {option: {mistake in words: formula}}
    "token_weights": {
        "the weighted sum is divided by the number of tokens, not by the sum of weights": (
            lambda x, s: right(x, {**s, "reduction": "sum"}) / counted_tokens(s).sum()
        ),
        "the weights of ignored tokens count in the mean: the sum is divided by all weights": (
            lambda x, s: right(x, {**s, "reduction": "sum"}) / s["token_weights"].sum()
        ),
    },
    "label_smoothing": {
        "the smoothing is divided among the V - 1 other classes, not among all V as torch divides it": (
            lambda x, s: right(x, {**s, "label_smoothing": s["label_smoothing"] / (1 - 1 / logits_of(x).shape[1])})
        ),
        "ignored tokens count in the smoothing: it is the mean over all tokens": (
            lambda x, s: (
                mean(losses(x, s), s) * (1 - s["label_smoothing"])
                - logits_of(x).log_softmax(dim=-1).mean() * s["label_smoothing"]
            )
        ),
    },
    "z_loss": {
        "ignored tokens count in the z-loss: it is the mean over all tokens": (
            lambda x, s: mean(losses(x, s), s) + s["z_loss"] * logits_of(x).logsumexp(dim=-1).square().mean()
        ),
    },
    "reduction": {
        "the losses of ignored tokens are not 0": (
            lambda x, s: F.cross_entropy(logits_of(x), s["targets"].clamp(min=0), reduction=s["reduction"])
        ),
    },
}
FIRST_FOR_ALL: dict[str, Gradients] = {  # mistakes in the backward of a loss with options
    "every token's gradient is multiplied by the first token's grad_output, not by its own": (
        lambda problem, _: outputs_of(
            right, replace(problem, grad_output=problem.grad_output.flatten()[0].expand(problem.grad_output.shape))
        )
    )
}


def _shifted(inputs: Inputs, settings: Settings, by: Callable[[Tensor], Tensor]) -> Tensor:
    """The loss that subtracts `by(logits)`, (N, 1), from the logits before the exponential."""
    shift = by(logits_of(inputs).detach())
    return of_sum(inputs, settings, lambda logits: (logits - shift).exp().sum(dim=-1).log() + shift[..., 0])


MAXIMUM = {  # mistakes in what is subtracted before the exponential
    "no maximum is subtracted before the exponential, which overflows": (
        partial(_shifted, by=lambda x: torch.zeros_like(x[:, :1]))
    ),
    "the maximum begins at 0, not at -inf: logits far below 0 underflow": (
        partial(_shifted, by=lambda x: x.amax(dim=-1, keepdim=True).clamp(min=0))
    ),
    "the first logit is subtracted, not the largest: the exponential overflows": (
        partial(_shifted, by=lambda x: x[:, :1])
    ),
    "one maximum is taken over all tokens, not one per token: exponentials of other tokens underflow": (
        partial(_shifted, by=lambda x: x.amax().expand(len(x), 1))
    ),
}


def _as_they_are(inputs: Inputs, settings: Settings) -> Tensor:
    """The loss in which ignored tokens count, as tokens of class 0 where `ignore_index` is negative."""
    return F.cross_entropy(logits_of(inputs), settings["targets"].clamp(min=0))


IGNORED: dict[str, Formula] = {  # mistakes in ignored tokens
    "ignored tokens count in the mean: the sum is divided by all tokens": lambda x, s: losses(x, s).mean(),
    "ignored tokens are not left out: they count as tokens of class ignore_index, or of class 0 where it is negative": (
        _as_they_are
    ),
    "the losses of ignored tokens are added to the sum, which is divided by the number of other tokens": (
        lambda x, s: _as_they_are(x, s) * len(counted_tokens(s)) / counted_tokens(s).sum()
    ),
}


def _of_vocabulary(vocabulary: int) -> dict[str, Formula]:
    """Mistakes in the sum of exponentials over the classes, of which there are `vocabulary`."""

    def padded(more: int, by: float = 0.0) -> Formula:
        """The loss with `more` classes appended, whose logits are `by`; a negative `more` drops the last classes."""
        return partial(of_sum, lse=lambda x: F.pad(x, (0, more), value=by).logsumexp(dim=-1))

    return {
        **{
            f"{more} padded classes count, with logits of {by:g}: they need -inf": padded(more, by)
            for more in padding(vocabulary)
            for by in FINITE
        },
        **{
            f"classes from {classes} on do not count in the sum of exponentials": padded(classes - vocabulary)
            for classes in cut(vocabulary)
        },
        **{f"every class counts {n} times in the sum of exponentials": partial(of_sum, times=n) for n in (2, 4, 8)},
    }


def _of_chunks(tokens: int) -> dict[str, Formula]:
    """Mistakes of a mean loss over `tokens` tokens that is computed chunk by chunk."""
    sizes = {f"chunks of {size} tokens": size for size in CHUNKS if size < tokens}
    parts = {f"{parts} chunks": math.ceil(tokens / parts) for parts in (2, 4, 8)}
    sizes |= {words: size for words, size in parts.items() if size not in CHUNKS}
    return {
        f"{words} are averaged with equal weight, though they hold different numbers of counted tokens": partial(
            _mean_of_means, size=size
        )
        for words, size in sizes.items()
    }


def _mean_of_means(inputs: Inputs, settings: Settings, size: int) -> Tensor:
    """The mean over chunks of `size` tokens of each chunk's mean loss."""
    chunks, counted = (x.split(size) for x in (losses(inputs, settings), counted_tokens(settings)))
    return torch.stack([x.sum() / some.sum().clamp(min=1) for x, some in zip(chunks, counted, strict=True)]).mean()


def _smoothed(inputs: Inputs, settings: Settings, of_label: float, of_all: float) -> Tensor:
    """The loss for smoothed targets: `of_label` at the label, and `of_all` divided among all classes."""
    at_all = -logits_of(inputs).log_softmax(dim=-1).mean(dim=-1)
    return mean(losses(inputs, settings) * of_label + at_all * of_all, settings)


def _of_gradients(counted: Tensor) -> dict[str, Gradients]:
    """Mistakes in the backward. counted (N,): True for tokens that are not ignored."""

    def times(factor: float) -> Gradients:
        """All gradients, multiplied by a factor."""
        return lambda problem, right: {name: right[name] * factor for name in problem.inputs}

    count, all_counted = int(counted.sum()), bool(counted.all())
    gradients: dict[str, Gradients] = {
        "gradients are not divided by the number of tokens, though the loss is a mean": times(count),
        "gradients are divided by the number of tokens twice": times(1 / count),
        "gradients are divided by the number of all tokens, ignored ones too": times(count / len(counted)),
        "the sign of the gradients is wrong": times(-1.0),
        "the backward uses p in place of p - onehot(target)": (
            partial(_through_the_head, of_logits=lambda p, one_hot: p, tokens=counted)
        ),
        "in the backward ignored tokens have a gradient, which must be 0": (
            partial(_through_the_head, of_logits=torch.sub, tokens=torch.ones_like(counted))
        ),
        # y is the log-softmax, exp(y) = p, and dy = -onehot(target) is the loss's gradient with respect to y.
        "the backward of y = log_softmax is dy - sum(dy * y), not dy - exp(y) * sum(dy)": partial(
            _through_the_head,
            of_logits=lambda p, one_hot: -one_hot + (one_hot * p.log()).sum(dim=-1, keepdim=True),
            tokens=counted,
        ),
    }
    # The word "ignored" marks the mistakes that need ignored tokens.
    return {text: mistaken for text, mistaken in gradients.items() if not (all_counted and "ignored" in text)}


def _through_the_head(
    problem: Problem,
    _: Outputs,
    of_logits: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    names: tuple[str, ...] = ("hidden", "weight"),
) -> Outputs:
    """The gradients of the inputs that follow from mistaken gradients of the logits.

    If the logits are the input, these are the gradients. If there is a head, the gradients of its inputs are returned.

    of_logits  (p, targets as one-hot rows), (N, V) each -> gradients of the logits (N, V), for a loss that is a sum
    tokens     (N,), boolean: the tokens that add to the gradients
    names      the inputs of the head whose gradients are returned
    """
    inputs, counted, logits = problem.inputs, counted_tokens(problem.settings), logits_of(problem.inputs)
    one_hot = F.one_hot(problem.settings["targets"].where(counted, 0), logits.shape[-1])
    one_hot = one_hot.to(logits).where(counted[:, None], 0)
    d_logits = of_logits(logits.softmax(dim=-1), one_hot).where(tokens[:, None], 0)
    d_logits = d_logits * problem.grad_output / counted.sum()
    if "logits" in inputs:
        return {"logits": d_logits}
    both = {"hidden": d_logits @ inputs["weight"], "weight": d_logits.mT @ inputs["hidden"]}
    return {name: both[name] for name in names}


def _of_weights(counted: Tensor) -> dict[str, Gradients]:
    """Mistakes in the gradient of the head's weight, a sum over tokens from which a part is left out."""
    places = torch.arange(len(counted), device=counted.device)
    sizes = {math.ceil(len(counted) / parts) for parts in (2, 4, 8)}.union(CHUNKS)
    return {
        text: partial(
            _through_the_head,
            of_logits=torch.sub,  # p - onehot(target)
            tokens=counted & torch.isin(places, places[rows]),
            names=("weight",),
        )
        for text, rows in parts_of_sum("tokens", len(counted), sorted(sizes)).items()
    }
