"""Inputs of the head and loss, and the answer to them, made in blocks of tokens at the full shape."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arithmetic import LOSS_SCALE, autocast, widened
from lmsys.draws import Draws

BLOCK_LOGITS = {"cuda": 2**26, "cpu": 2**22}  # of the reference, held at once
Answer = tuple[Tensor, Tensor, Tensor]  # the loss, and the gradients of hidden and weight


def unchunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The head and the loss as they are usually written: the logits of all tokens, in float32 or wider."""
    return F.cross_entropy(widened(F.linear(hidden, weight)), targets)


def torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's own loss, in chunks of tokens. Autocast does not reach inside, so inputs and loss are cast here.

    torch 2.13 chooses chunks of a token or two where the vocabulary is large beside the features, as 10,000 beside 64.
    Its products for them may sum over the vocabulary term by term (on an AMD EPYC they do): in float32 the gradient of
    hidden then errs several times as much as that of the usual loss, and the bench calls it wrong.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden.to(dtype), weight.to(dtype), targets, options=options)


def torch_chunked_supports(_: object) -> str | None:
    has = hasattr(torch.nn, "LinearCrossEntropyOptions")
    return None if has else f"torch {torch.__version__} cannot make this loss in chunks; torch 2.13 and later can"


@dataclass
class Inputs:
    """hidden (N, M) and weight (V, M), both leaves, and targets (N); gradients are those of the loss times `scale`.

    exact, plain  the eager row's answer in float64 and in the precision itself; on the host, where no row is measured
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    precision: str
    scale: float
    exact: Sequence[Tensor] = ()
    plain: Sequence[Tensor] = ()

    @classmethod
    def empty(cls, tokens: int, d_model: int, vocab_size: int, precision: str, device: str) -> "Inputs":
        shapes = (tokens, d_model), (vocab_size, d_model)
        hidden, weight = (torch.empty(shape, device=device, requires_grad=True) for shape in shapes)
        targets = torch.empty(tokens, dtype=torch.int64, device=device)
        return cls(hidden, weight, targets, precision, LOSS_SCALE if precision == "fp16" else 1.0)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"hidden": self.hidden, "weight": self.weight, "targets": self.targets}

    @property
    def device(self) -> str:
        return self.hidden.device.type

    def draws(self, seed: int) -> Draws:
        """Logits are about standard normal."""
        return Draws(self.tensors, seed, std={"weight": std_of(self.weight)}, below={"targets": len(self.weight)})

    def run(self, call: Callable[..., Tensor]) -> Answer:
        with autocast(self.precision, self.device):
            loss = call(self.hidden, self.weight, self.targets)
        d_hidden, d_weight = torch.autograd.grad(loss * self.scale, (self.hidden, self.weight))
        return loss.detach(), d_hidden, d_weight

    def in_blocks(self, exact: bool) -> Answer:
        """The eager row's answer, made from one block of tokens after another; in float64 where `exact`."""
        dtype, precision = self.arithmetic(exact)
        weight = self.weight.detach().to(dtype).requires_grad_()
        total, d_hidden, d_weight = weight.new_zeros(()), [], torch.zeros_like(weight)
        for hidden, targets in self.blocks():
            share = len(targets) / len(self.targets)
            leaf = hidden.to(dtype).requires_grad_()
            loss, *gradients = Inputs(leaf, weight, targets, precision, self.scale * share).run(unchunked)
            total += loss * share
            d_hidden.append(gradients[0])
            d_weight += gradients[1]
        return total, torch.cat(d_hidden), d_weight

    def arithmetic(self, exact: bool) -> tuple[torch.dtype, str]:
        """The dtype of leaves, and the precision that they are computed in."""
        return (torch.float64, "fp32") if exact else (torch.float32, self.precision)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Hidden states and targets, of so many tokens at a time that their logits fit."""
        size = max(1, BLOCK_LOGITS[self.device] // len(self.weight))
        yield from zip(self.hidden.detach().split(size), self.targets.split(size), strict=True)


def std_of(weight: Tensor) -> float:
    return float(weight.shape[1] ** -0.5)
