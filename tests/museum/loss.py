"""Losses in the museum of published faults, and right losses, which HONEST lists.

`lmsys check` must refuse each fault, and must not accuse the right losses. A new fault is a function or an autograd
Function with the decorator `exhibit(kind, where it was published, what users saw, a part of the mistake's name)`. A
loss takes logits (N, V), or hidden states (N, M) and the head's weight (V, M).

Legend: N tokens, V vocabulary, M d_model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.model.loss import cross_entropy as ours
from lmsys.model.loss import linear_cross_entropy as ours_in_chunks
from lmsys.registry import Entry
from tests.museum.exhibit import exhibit

IGNORED = -100  # the target of an ignored token, by default


def each(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """(N,): the loss of each token in float32, 0 if it is ignored."""
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="none")


@exhibit("loss", "PAIR-code/tiny-transformers#67", "The loss is inf or NaN once a logit is above 88.", "no maximum")
def no_max(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.float()
    return (wide.exp().sum(dim=-1).log() - wide.gather(1, targets[:, None])[:, 0]).mean()


@exhibit("loss", "PaddlePaddle/Paddle#23708", "The mean is too small where tokens are ignored.", "ignored tokens count")
def ignored_in_the_mean(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    return each(logits, targets, ignore_index).mean()


@exhibit(
    "loss",
    "huggingface/transformers#34191",
    "With gradient accumulation the loss is not that of the whole batch, where chunks hold unequal counts.",
    "averaged with equal weight",
)
def mean_of_means(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    parts = zip(logits.split(64), targets.split(64), strict=True)
    sums = [each(x, y, ignore_index).sum() / (y != ignore_index).sum().clamp(min=1) for x, y in parts]
    return torch.stack(sums).mean()


@exhibit(
    "loss",
    "paiml/aprender#2123",
    "Gradients of micro-batches are summed and not divided; clipping to a norm of 1 hides it.",
    "summed, not averaged",
)
def sum_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return each(logits, targets).sum()


@exhibit(
    "loss",
    "unslothai/unsloth-zoo#434",
    "A loss scale, or a factor before the loss, is lost on the way back.",
    "grad_output is ignored",
)
class UpstreamIgnored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
            loss = F.cross_entropy(F.linear(*leaves).float(), targets)
            ctx.gradients = torch.autograd.grad(loss, leaves)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *ctx.gradients, None


@exhibit(
    "loss",
    "unslothai/unsloth#5002",
    "In float32 the caller's logits are other ones after the loss; in bfloat16 they are not.",
    "changes its input",
)
class LogitsOverwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.detach().float()  # float32: the same memory
        wide.sub_(wide.amax(dim=-1, keepdim=True))
        log_p = wide.log_softmax(dim=-1)
        ctx.save_for_backward(log_p, targets)
        ctx.dtype = logits.dtype
        return F.nll_loss(log_p, targets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        log_p, targets = ctx.saved_tensors
        p = log_p.exp()
        p[torch.arange(len(p)), targets] -= 1
        return (p * grads[0] / len(p)).to(ctx.dtype), None


@exhibit(
    "loss",
    "unslothai/unsloth#10616",
    "Lanes behind a vocabulary that no block divides are -30 after the soft cap, not -inf, and count in the sum.",
    "padded classes count",
)
def finite_tail(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.float()
    tail = F.pad(wide, (0, -wide.shape[-1] % 256), value=-30.0)
    return (tail.logsumexp(dim=-1) - wide.gather(1, targets[:, None])[:, 0]).mean()


@exhibit(
    "loss",
    "TimDettmers/ConvE#55",
    "Smoothed labels are (1 - 0.1) at the label and 1 / V at every class: they sum to 1.9, and training converges.",
    "target probabilities sum to 1.9",
)
def smoothing(logits: Tensor, targets: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(dim=-1)
    smooth = 0.9 * F.one_hot(targets, logits.shape[-1]) + 1 / logits.shape[-1]
    return -(smooth * log_p).sum(dim=-1).mean()


class _LogSoftmax(torch.autograd.Function):
    """Log-softmax with a wrong backward: right is dy - exp(y) * sum(dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.float().log_softmax(dim=-1)
        ctx.save_for_backward(y)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (y,), dy = ctx.saved_tensors, grads[0]
        return (dy - (dy * y).sum(dim=-1, keepdim=True)).to(ctx.dtype)


@exhibit(
    "loss",
    "uxlfoundation/oneDNN#616",
    "The forward of log-softmax is right; its backward is that of another function.",
    "dy - sum(dy * y), not",
)
def log_softmax_backward(logits: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(_LogSoftmax.apply(logits), targets)


@exhibit(
    "loss",
    "OpenRLHF/OpenRLHF#583",
    "One micro-batch of which no token counts makes every parameter NaN.",
    "number of tokens that count, which is 0",
)
def mean_of_nothing(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    counted = targets != ignore_index
    log_p = logits.float().log_softmax(dim=-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return -(log_p * counted).sum() / counted.sum()


@exhibit(
    "loss",
    "linkedin/Liger-Kernel#512",
    "With many chunks the gradient of the head's weight, summed in bfloat16, loses small terms.",
)
class WeightGradientInBfloat16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)  # in the dtype of the weight
        total = torch.zeros((), device=hidden.device)
        for rows in torch.arange(len(hidden)).split(2):
            x, labels = hidden[rows], targets[rows]
            logits = F.linear(x, weight).float()
            total += F.cross_entropy(logits, labels, reduction="sum")
            p = logits.softmax(dim=-1)
            p[torch.arange(len(p)), labels] -= 1
            p = (p / len(hidden)).to(x.dtype)
            d_hidden[rows] = p @ weight
            d_weight += p.mT @ x
        ctx.save_for_backward(d_hidden, d_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *(x * grads[0] for x in ctx.saved_tensors), None


@exhibit(
    "loss",
    "NVIDIA/Megatron-LM#7452",
    "Ranks that hold all logits add up their sums of exponentials: the loss is too large by the logarithm of ranks.",
    "every class counts 4 times",
)
def every_class_of_four_ranks(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.float()
    top = wide.amax(dim=-1, keepdim=True)
    total = sum((wide - top).exp().sum(dim=-1) for _ in range(4))
    return (total.log() + (top - wide.gather(1, targets[:, None]))[:, 0]).mean()


# Right losses.


def torchs(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=ignore_index)


def in_float32(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index)


def all_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def small_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return ours_in_chunks(hidden, weight, targets, chunk=16)


def of_no_token_zero(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    return each(logits, targets, ignore_index).sum() / (targets != ignore_index).sum().clamp(min=1)


def torchs_in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """torch's loss. With large vocabularies its gradient of hidden states has a large error: see benchmarks/loss.py."""
    return F.linear_cross_entropy(hidden, weight, targets, ignore_index=ignore_index)


HONEST = [
    Entry(function.__name__, f"{function.__module__}:{function.__name__}")
    for function in (ours, ours_in_chunks, small_chunks, torchs, in_float32, all_logits, of_no_token_zero)
]
HONEST += [Entry("CrossEntropyLoss", "torch.nn:CrossEntropyLoss")]
if hasattr(F, "linear_cross_entropy"):
    HONEST += [Entry("torchs_in_chunks", f"{__name__}:torchs_in_chunks")]
