"""Inputs of the head and loss, their exact answer in blocks of tokens at the full shape, and checks of timed calls.

`benchmarks.bench_loss` calls it. Some tokens are extreme: see `lmsys.extremes.loss`. Extreme tokens, and the rows of
the weight that they add to, are judged apart, so that they do not widen the budget of the others.

Timed calls are checked at tokens and classes that no row can know beforehand: some rows of the gradient of hidden
states, each of which depends on all classes, and some rows of the weight's gradient, each of which depends on all
tokens. Some of them are of extreme tokens and their classes. The loss is held to the mean of the losses of all tokens.
One row of the gradient of hidden states goes into the record, so that `repeat` can judge it again without a GPU.
"""

import base64
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import (
    BUDGET_RTOL,
    ERROR_RTOL,
    LOSS_SCALE,
    ROUNDING,
    mean_ratio,
    ratio_by_group,
    widened,
)
from lmsys import draws, testing
from lmsys.bench import Record, plain
from lmsys.extremes import has_extremes
from lmsys.extremes.loss import WIDTH, ExtremeTokens, is_extreme, write_head, write_kind
from lmsys.measure.step import Kept
from lmsys.model.linear import matmul_dtype
from lmsys.training.prepare import autocast

LOSS, D_HIDDEN, D_WEIGHT = OUTPUTS = ("loss", "gradient of hidden", "gradient of weight")
ODD_TOKENS, ODD_VOCABULARY = 101, 517  # of the shape that no block divides
BLOCK_LOGITS = {"cuda": 2**26, "cpu": 2**22}  # of the reference, held at once
Answer = tuple[Tensor, Tensor, Tensor]  # the loss, and the gradients of hidden and weight
Formula = Callable[[Tensor, Tensor], Tensor]  # from logits (N, V) and targets (N): the loss of each token (N)
cross_entropy: Formula = partial(F.cross_entropy, reduction="none")


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
    return F.linear_cross_entropy(
        hidden.to(dtype), weight.to(dtype), targets, options=torch.nn.LinearCrossEntropyOptions()
    )


def torch_chunked_supports(_: object) -> str | None:
    able = hasattr(torch.nn, "LinearCrossEntropyOptions")
    return None if able else f"torch {torch.__version__} cannot make this loss in chunks; torch 2.13 and later can"


@dataclass
class Inputs:
    """hidden (N, M) and weight (V, M), both leaves, and targets (N); gradients are those of the loss times `scale`.

    groups        a number for each token (N) and class (V): 0 where it is ordinary, and no extreme token adds to it
    extreme       the extreme ones of the tokens; None: none are
    exact, plain  the answer in float64 and in the precision itself, by `references`, the loss for each token; on the
                  host, where no row is measured
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
        hidden, weight = (torch.empty(n, d_model, device=device, requires_grad=True) for n in (tokens, vocab_size))
        targets = torch.empty(tokens, dtype=torch.int64, device=device)
        scale, ordinary = LOSS_SCALE if precision == "fp16" else 1.0, (torch.zeros(tokens), torch.zeros(vocab_size))
        return cls(hidden, weight, targets, precision, scale, ordinary)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"hidden": self.hidden, "weight": self.weight, "targets": self.targets}

    @property
    def device(self) -> str:
        return self.hidden.device.type

    def choose_extreme(self, draw: int) -> None:
        """Says which tokens of a draw are extreme; they and their classes are a group of their own."""
        self.extreme = ExtremeTokens.of(draw, len(self.targets), len(self.weight))
        self.groups = (
            is_extreme(self.extreme.tokens, len(self.targets)),
            is_extreme(self.extreme.classes, len(self.weight)),
        )

    def check(self, call: Callable[..., Tensor]) -> dict[str, float]:
        """The error over its budget of each output of a row; `exact` and `plain` are made before.

        Only the row's own answer is on the device while it runs.
        """
        answer, groups = [x.cpu() for x in self.run(call)], (self.groups[0],) + self.groups
        return ratios(answer, self.exact, self.plain, groups, self.precision, self.device)

    def run(self, call: Callable[..., Tensor]) -> Answer:
        with autocast(self.precision, self.device):
            loss = call(self.hidden, self.weight, self.targets)
        d_hidden, d_weight = torch.autograd.grad(loss * self.scale, (self.hidden, self.weight))
        return loss.detach(), d_hidden, d_weight

    def in_blocks(self, exact: bool, formula: Formula = cross_entropy) -> Answer:
        """The answer of a formula on the host, made from one block of tokens after another; in float64 where `exact`.

        In the loss's place are those of the tokens, of which it is the mean.
        """
        dtype, precision = self.arithmetic(exact)
        weight, share = self.weight.detach().to(dtype).requires_grad_(), self.scale / len(self.targets)
        losses, d_hidden, d_weight = [], [], torch.zeros_like(weight)
        for block, targets in self.blocks():
            hidden = block.to(dtype).requires_grad_()
            with autocast(precision, self.device):
                loss = formula(widened(F.linear(hidden, weight)), targets)
            gradients = torch.autograd.grad(loss.sum() * share, (hidden, weight))
            losses.append(loss.detach())
            d_hidden.append(gradients[0])
            d_weight += gradients[1]
        return torch.cat(losses).cpu(), torch.cat(d_hidden).cpu(), d_weight.cpu()

    def keep(self, answer: Answer, key: int | None) -> Any:
        """The loss of a timed call, and the rows of both gradients that the key says; None without a key.

        ValueError as of `check_plain`.
        """
        for name, x, like in zip(OUTPUTS, answer, (self.hidden.new_empty(()), self.hidden, self.weight), strict=True):
            plain.check_plain(name, x, like, self.tensors.values())
        if key is None:
            return None
        tokens, classes = blocks_of(self, key)
        loss, d_hidden, d_weight = answer
        parts = torch.cat([d_hidden[rows] for rows in tokens]), torch.cat([d_weight[rows] for rows in classes])
        return loss.clone(), *parts

    def judge(self, kept: Kept) -> Mapping[str, float]:
        """The error over its budget of each part of a timed call; leaves one row as evidence."""
        tokens, classes = (indices(blocks) for blocks in blocks_of(self, kept.key))
        exact, plain = references(partial(parts, self, tokens, classes))
        of_tokens, of_classes = self.groups
        groups = of_tokens, of_tokens[tokens], of_classes[classes]
        kept.evidence["part"] = _evidence(kept.key, groups[1], kept.result[1], exact[1])
        return ratios(kept.result, exact, plain, groups, self.precision)

    def arithmetic(self, exact: bool) -> tuple[torch.dtype, str]:
        """The dtype of leaves, and the precision that they are computed in."""
        return (torch.float64, "fp32") if exact else (torch.float32, self.precision)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Hidden states and targets, of so many tokens at a time that their logits fit."""
        size = max(1, BLOCK_LOGITS[self.device] // len(self.weight))
        yield from zip(self.hidden.detach().split(size), self.targets.split(size), strict=True)


class LossDraws(draws.Draws):
    """Draws of these inputs: logits are about standard normal, but for the extreme tokens."""

    def __init__(self, inputs: Inputs, seed: int):
        super().__init__(
            inputs.tensors, seed, std={"weight": std_of(inputs.weight)}, below={"targets": len(inputs.weight)}
        )
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
        tensor[:] = draws.values(draws.key(seed, name), 0, tensor.numel(), device).view(tensor.shape) * std
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


NUM_BLOCKS, BLOCK_ROWS = 4, 16  # of each gradient
MOST_ELEMENTS = 2**25  # of a weight, or hidden states, that `repeat` draws again: seconds on a CPU


def blocks_of(inputs: Inputs, key: int) -> tuple[list[slice], list[slice]]:
    """Blocks of tokens and of classes, as slices: an index would have to travel to the device.

    The first block of each holds an extreme token, or a class of one.
    """
    chance, extreme = random.Random(key), inputs.extreme

    def some(length: int, some_extreme: range) -> list[slice]:
        starts = list(range(0, length, BLOCK_ROWS))
        holding = sorted({index - index % BLOCK_ROWS for index in some_extreme})
        first = [chance.choice(holding)] if holding else []
        others = [start for start in starts if start not in first]
        chosen = first + chance.sample(others, min(NUM_BLOCKS, len(starts)) - len(first))
        return [slice(start, min(start + BLOCK_ROWS, length)) for start in chosen]

    tokens, classes = (extreme.tokens, extreme.classes) if extreme else (range(0), range(0))
    return some(len(inputs.hidden), tokens), some(len(inputs.weight), classes)


def indices(blocks: list[slice]) -> list[int]:
    return [index for rows in blocks for index in range(rows.start, rows.stop)]


def references(answer: Callable[..., Sequence[Tensor]]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The answer in float64; and in the precision itself, element by element, that of the formula that errs more.

    answer  called with `exact`, and a formula of the loss
    """
    exact, *plain = answer(True), answer(False), answer(False, testing.log_sum_exp_loss)
    return exact, [testing.larger_error(*x) for x in zip(exact, *plain, strict=True)]


def parts(
    inputs: Inputs, tokens: list[int], classes: list[int], exact: bool, formula: Formula = cross_entropy
) -> Answer:
    """The loss of each token by a formula, and of its answer the gradients of these tokens' hidden states and of these
    rows of the weight; in float64 where `exact`."""
    dtype, precision = inputs.arithmetic(exact)
    weight, share = inputs.weight.detach().to(dtype), inputs.scale / len(inputs.targets)
    rows, columns = weight[classes].requires_grad_(), torch.tensor(classes, device=weight.device)
    losses, d_rows = [], torch.zeros_like(rows)
    for block, targets in inputs.blocks():
        hidden = block.to(dtype)
        with autocast(precision, inputs.device):
            logits = widened(F.linear(hidden, weight).index_copy(1, columns, F.linear(hidden, rows)))
            loss = formula(logits, targets)
        d_rows += torch.autograd.grad(loss.sum() * share, rows)[0]
        losses.append(loss.detach())
    leaf = inputs.hidden.detach()[tokens].to(dtype).requires_grad_()
    with autocast(precision, inputs.device):
        loss = formula(widened(F.linear(leaf, weight)), inputs.targets[tokens])
    (d_hidden,) = torch.autograd.grad(loss.sum() * share, leaf)
    return torch.cat(losses), d_hidden, d_rows


def _evidence(key: int, groups: Tensor, gradient: Tensor, exact: Tensor) -> Record:
    """One row of the gradients of hidden states, as often of an extreme token as not: its values, the largest error."""
    chance = random.Random(key)
    row = chance.choice((groups == chance.choice(groups.unique().tolist())).nonzero().flatten().tolist())
    return {
        "tensor": D_HIDDEN,
        "row": row,
        "values": base64.b64encode(gradient[row].cpu().view(torch.uint8).numpy().tobytes()).decode(),
        "error": (gradient[row].double() - exact[row]).abs().max().item(),
    }


def repeat(record: Record, call: Record) -> Iterator[str | int]:
    """Judges a call of a record again: its inputs are drawn and its answer is made anew.

    Yields sentences on what is wrong or too large to be made again, and how many elements were judged.
    """
    part, size = call["part"], record["d_model"] * max(record["vocab_size"], record["tokens"])
    if set(call["error_ratios"]) != set(OUTPUTS):
        yield f"not proved: its errors are of {', '.join(call['error_ratios'])}, and not of {', '.join(OUTPUTS)}"
    if size > MOST_ELEMENTS:
        yield f"not recomputed: a weight or hidden states of {size:,} elements (at most {MOST_ELEMENTS:,} here)"
        return
    inputs = _inputs_of(record, call)
    tokens = range(len(inputs.targets))
    exact, plain = (answer[1] for answer in references(partial(parts, inputs, list(tokens), [0])))
    values = torch.frombuffer(bytearray(base64.b64decode(part["values"])), dtype=torch.float32)
    if part["row"] not in tokens or values.shape != exact[0].shape:
        yield f"{values.numel()} values of row {part['row']} were recorded, of {len(exact)} rows of {exact.shape[1]}"
        return
    error = (values.double() - exact[part["row"]]).abs().max().item()
    if not abs(error - part["error"]) <= ERROR_RTOL * max(error, part["error"]):
        yield f"its recorded values are off by {error:.4g} from what is right, and it says {part['error']:.4g}"
    answer = exact.clone()
    answer[part["row"]] = values
    ratio = ratio_by_group(answer, exact, plain, ROUNDING[inputs.precision], inputs.groups[0])
    recorded = call["error_ratios"][D_HIDDEN]
    if recorded < ratio * (1 - BUDGET_RTOL):
        yield f"its error ratio {recorded:.4g} is less than that of its own row, about {ratio:.4g}"
    yield values.numel()


def _inputs_of(record: Record, call: Record) -> Inputs:
    """The inputs of the hidden states that a call was looked at by, drawn again; gradients are those of the mean over
    all tokens."""
    num_tokens, d_model, vocab_size = (record[name] for name in ("tokens", "d_model", "vocab_size"))
    whole = Inputs.empty(num_tokens, d_model, vocab_size, record["precision"], "cpu")
    if has_extremes(record["proof"]["generator"]):
        whole.choose_extreme(call["draw"])
    tokens, _ = blocks_of(whole, call["key"])

    def drawn(name: str, first: int, count: int, **options: Any) -> Tensor:
        return draws.part(
            record["proof"]["seed"], call["draw"], name, first, count, whole.tensors[name].dtype, **options
        )

    weight = drawn("weight", 0, d_model * vocab_size, std=std_of(whole.weight)).view(vocab_size, d_model)
    if whole.extreme:
        whole.extreme.write_weight(weight)
    blocks = []
    for rows in tokens:
        count = rows.stop - rows.start
        hidden = drawn("hidden", rows.start * d_model, count * d_model).view(count, d_model)
        targets = drawn("targets", rows.start, count, below=vocab_size)
        if whole.extreme:
            whole.extreme.write_tokens(hidden, weight, targets, rows.start)
        blocks.append((hidden, targets))
    hidden, targets = (torch.cat(x) for x in zip(*blocks, strict=True))
    return Inputs(
        hidden,
        weight,
        targets,
        whole.precision,
        whole.scale * len(targets) / num_tokens,
        (whole.groups[0][indices(tokens)], whole.groups[1]),
    )
