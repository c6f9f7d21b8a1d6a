"""Inputs of the head and loss, and the answer to them, made in blocks of tokens at the full shape.

A token in EVERY is extreme: see `lmsys.extremes.loss`. Extreme tokens, and the rows of the weight that they add to, are
judged apart from the others, which have the budget that they would have without them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arithmetic import LOSS_SCALE, ROUNDING, autocast, mean_ratio, ratio_by_group, widened
from lmsys.draws import Draws, key, values
from lmsys.extremes.loss import WIDTH, ExtremeTokens, is_extreme, write_head, write_kind
from lmsys.model.linear import matmul_dtype

LOSS, D_HIDDEN, D_WEIGHT = OUTPUTS = ("loss", "gradient of hidden", "gradient of weight")
ODD_TOKENS, ODD_VOCABULARY = 101, 517  # of the shape that no block divides
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
    dtype = matmul_dtype(hidden)
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden.to(dtype), weight.to(dtype), targets, options=options)


def torch_chunked_supports(_: object) -> str | None:
    has = hasattr(torch.nn, "LinearCrossEntropyOptions")
    return None if has else f"torch {torch.__version__} cannot make this loss in chunks; torch 2.13 and later can"


@dataclass
class Inputs:
    """hidden (N, M) and weight (V, M), both leaves, and targets (N); gradients are those of the loss times `scale`.

    groups        a number for each token (N) and class (V): 0 where it is ordinary, and no extreme token adds to it
    extreme       the extreme ones of the tokens; None: none are
    exact, plain  the eager row's answer in float64 and in the precision itself, the loss for each token; on the host,
                  where no row is measured
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    precision: str
    scale: float
    groups: tuple[Tensor, Tensor]
    extreme: ExtremeTokens | None = None
    exact: Sequence[Tensor] = ()
    plain: Sequence[Tensor] = ()

    @classmethod
    def empty(cls, tokens: int, d_model: int, vocab_size: int, precision: str, device: str) -> "Inputs":
        shapes = (tokens, d_model), (vocab_size, d_model)
        hidden, weight = (torch.empty(shape, device=device, requires_grad=True) for shape in shapes)
        targets = torch.empty(tokens, dtype=torch.int64, device=device)
        scale, ordinary = LOSS_SCALE if precision == "fp16" else 1.0, (torch.zeros(tokens), torch.zeros(vocab_size))
        return cls(hidden, weight, targets, precision, scale, ordinary)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"hidden": self.hidden, "weight": self.weight, "targets": self.targets}

    @property
    def device(self) -> str:
        return self.hidden.device.type

    def draws(self, seed: int) -> "LossDraws":
        return LossDraws(self, seed)

    def choose_extreme(self, draw: int) -> None:
        """Says which tokens of a draw are extreme; they and their classes are a group of their own."""
        self.extreme = ExtremeTokens.of(draw, len(self.targets), len(self.weight))
        of_tokens = is_extreme(self.extreme.tokens, len(self.targets))
        self.groups = of_tokens, is_extreme(self.extreme.classes, len(self.weight))

    def check(self, call: Callable[..., Tensor]) -> dict[str, float]:
        """The error over its budget of each output of a row; `exact` and `plain` are made before.

        Only the row's own answer is on the device while it runs.
        """
        answer = [x.cpu() for x in self.run(call)]
        of_tokens, of_classes = self.groups
        return ratios(answer, self.exact, self.plain, (of_tokens, of_tokens, of_classes), self.precision, self.device)

    def run(self, call: Callable[..., Tensor]) -> Answer:
        with autocast(self.precision, self.device):
            loss = call(self.hidden, self.weight, self.targets)
        d_hidden, d_weight = torch.autograd.grad(loss * self.scale, (self.hidden, self.weight))
        return loss.detach(), d_hidden, d_weight

    def in_blocks(self, exact: bool) -> Answer:
        """The eager row's answer, made from one block of tokens after another; in float64 where `exact`.

        In the loss's place are those of the tokens, of which it is the mean.
        """
        dtype, precision = self.arithmetic(exact)
        weight, share = self.weight.detach().to(dtype).requires_grad_(), self.scale / len(self.targets)
        losses, d_hidden, d_weight = [], [], torch.zeros_like(weight)
        for block, targets in self.blocks():
            hidden = block.to(dtype).requires_grad_()
            with autocast(precision, self.device):
                loss = F.cross_entropy(widened(F.linear(hidden, weight)), targets, reduction="none")
            gradients = torch.autograd.grad(loss.sum() * share, (hidden, weight))
            losses.append(loss.detach())
            d_hidden.append(gradients[0])
            d_weight += gradients[1]
        return torch.cat(losses), torch.cat(d_hidden), d_weight

    def arithmetic(self, exact: bool) -> tuple[torch.dtype, str]:
        """The dtype of leaves, and the precision that they are computed in."""
        return (torch.float64, "fp32") if exact else (torch.float32, self.precision)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Hidden states and targets, of so many tokens at a time that their logits fit."""
        size = max(1, BLOCK_LOGITS[self.device] // len(self.weight))
        yield from zip(self.hidden.detach().split(size), self.targets.split(size), strict=True)


class LossDraws(Draws):
    """Draws of these inputs: logits are about standard normal, but for the extreme tokens."""

    def __init__(self, inputs: Inputs, seed: int):
        std = {"weight": std_of(inputs.weight)}
        super().__init__(inputs.tensors, seed, std=std, below={"targets": len(inputs.weight)})
        self.inputs = inputs

    def fill(self, draw: int, names: Iterable[str] | None = None) -> None:
        x = self.inputs
        super().fill(draw, names)
        x.choose_extreme(draw)
        assert x.extreme is not None
        x.extreme.write_weight(x.weight)
        x.extreme.write_tokens(x.hidden, x.weight, x.targets)


def odd_inputs(precision: str, device: str, seed: int) -> Inputs:
    """A small shape that no block divides, with a token in five of each kind; logits are exact but for ordinary ones.

    The kinds are 0, ordinary, and those of `lmsys.extremes.loss.KINDS` up to 4.
    """
    x = Inputs.empty(ODD_TOKENS, WIDTH, ODD_VOCABULARY, precision, device)
    hidden, weight, targets = x.hidden.data, x.weight.data, x.targets
    targets[:] = torch.arange(ODD_TOKENS, device=device) * 31 % ODD_VOCABULARY
    for name, tensor, std in (("hidden", hidden, 1.0), ("weight", weight, std_of(weight))):
        tensor[:] = values(key(seed, name), 0, tensor.numel(), device).view(tensor.shape) * std
    write_head(weight, lowest=targets[4::5])
    for kind in range(5):
        write_kind(kind, hidden[kind::5])
    x.groups = torch.arange(ODD_TOKENS) % 5, torch.zeros(ODD_VOCABULARY)
    return x


def ratios(
    answer: Sequence[Tensor],
    exact: Sequence[Tensor],
    plain: Sequence[Tensor],
    groups: Sequence[Tensor],
    precision: str,
    device: str | None = None,
) -> dict[str, float]:
    """The error over its budget of each output: the loss against those of all tokens, the gradients by groups of rows.

    groups  of the terms of the loss, and of the rows of each gradient
    device  where one output after another is compared; by default where they are
    """
    result = {LOSS: mean_ratio(answer[0], exact[0], plain[0], groups[0])}
    for i in (1, 2):
        x, y, z = (tensors[i].to(device or answer[i].device) for tensors in (answer, exact, plain))
        result[OUTPUTS[i]] = ratio_by_group(x, y, z, ROUNDING[precision], groups[i])
    return result


def std_of(weight: Tensor) -> float:
    return float(weight.shape[1] ** -0.5)
