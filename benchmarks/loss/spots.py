"""Timed calls of the head and loss, checked at tokens and classes that no row can know.

Of the gradients some rows are looked at: those of hidden states, which depend on all classes, and those of the weight,
which depend on all tokens. Some of them are those of extreme tokens, and of their classes. The loss is held to the mean
of what the tokens lose. One gradient of a hidden state goes into the record, by which others can repeat the check on a
machine without a GPU: `repeat`.
"""

import base64
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arithmetic import BUDGET_RTOL, ERROR_RTOL, ROUNDING, autocast, ratio_by_group, widened
from benchmarks.loss.inputs import D_HIDDEN, OUTPUTS, Answer, Inputs, ratios, std_of, unchunked
from lmsys import draws
from lmsys.bench import Record
from lmsys.bench.plain import check_plain
from lmsys.extremes import has_extremes
from lmsys.measure.compare import Kept

NUM_BLOCKS, BLOCK_ROWS = 4, 16  # of each gradient
MOST_ELEMENTS = 2**25  # of a weight that `repeat` draws again: seconds on a CPU


class Spots:
    """Copies and judges parts of timed calls, by the key of each."""

    def __init__(self, inputs: Inputs):
        self.inputs = inputs

    def keep(self, answer: Answer, key: int | None) -> Any:
        """The loss, and the rows of both gradients that the key says; None without a key. See `check_plain`."""
        x = self.inputs
        like = x.hidden.new_empty(()), x.hidden, x.weight
        for name, found, one in zip(OUTPUTS, answer, like, strict=True):
            check_plain(name, found, one, x.tensors.values())
        if key is None:
            return None
        blocks = zip(answer[1:], blocks_of(x, key), strict=True)
        return answer[0].clone(), *(torch.cat([found[rows] for rows in some]) for found, some in blocks)

    def judge(self, kept: Kept) -> Mapping[str, float]:
        """The error over its budget of each; leaves one row as evidence."""
        x = self.inputs
        tokens, classes = (indices(some) for some in blocks_of(x, kept.key))
        exact, plain = (parts(x, tokens, classes, exact) for exact in (True, False))
        of_tokens, of_classes = x.groups
        groups = of_tokens, of_tokens[tokens], of_classes[classes]
        kept.evidence["part"] = _evidence(kept.key, groups[1], kept.result[1], exact[1])
        return ratios(kept.result, exact, plain, groups, x.precision)


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


def parts(inputs: Inputs, tokens: list[int], classes: list[int], exact: bool) -> Answer:
    """The loss of each token, and of the eager row's answer the gradients of these tokens' hidden states and of these
    rows of the weight; in float64 where `exact`."""
    dtype, precision = inputs.arithmetic(exact)
    weight, share = inputs.weight.detach().to(dtype), inputs.scale / len(inputs.targets)
    rows, columns = weight[classes].requires_grad_(), torch.tensor(classes, device=weight.device)
    losses, d_rows = [], torch.zeros_like(rows)
    for block, targets in inputs.blocks():
        hidden = block.to(dtype)
        with autocast(precision, inputs.device):
            logits = F.linear(hidden, weight).index_copy(1, columns, F.linear(hidden, rows))
            loss = F.cross_entropy(widened(logits), targets, reduction="none")
        d_rows += torch.autograd.grad(loss.sum() * share, rows)[0]
        losses.append(loss.detach())
    leaf = inputs.hidden.detach()[tokens].to(dtype).requires_grad_()
    with autocast(precision, inputs.device):
        mean = unchunked(leaf, weight, inputs.targets[tokens])
    (d_hidden,) = torch.autograd.grad(mean * len(tokens) * share, leaf)
    return torch.cat(losses), d_hidden, d_rows


def _evidence(key: int, groups: Tensor, found: Tensor, exact: Tensor) -> Record:
    """One row of the gradients of hidden states, as often of an extreme token as not: its values, the largest error."""
    chance = random.Random(key)
    group = chance.choice(groups.unique().tolist())
    row = chance.choice((groups == group).nonzero().flatten().tolist())
    return {
        "tensor": D_HIDDEN,
        "row": row,
        "values": base64.b64encode(found[row].cpu().view(torch.uint8).numpy().tobytes()).decode(),
        "error": (found[row].double() - exact[row]).abs().max().item(),
    }


def repeat(record: Record, call: Record) -> Iterator[str]:
    """Sentences on what is wrong with a call of a record, or could not be made again: inputs, answer and error."""
    part, size = call["part"], record["d_model"] * record["vocab_size"]
    if size > MOST_ELEMENTS:
        yield f"not recomputed: a weight of {size:,} elements (at most {MOST_ELEMENTS:,} here)"
        return
    inputs = _inputs_of(record, call)
    tokens = range(len(inputs.targets))
    exact, plain = (parts(inputs, [*tokens], [0], exact)[1] for exact in (True, False))
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


def _inputs_of(record: Record, call: Record) -> Inputs:
    """The inputs of the hidden states that a call was looked at by, drawn again; gradients are those of the mean over
    all tokens."""
    num_tokens, d_model, vocab_size = (record[name] for name in ("tokens", "d_model", "vocab_size"))
    whole = Inputs.empty(num_tokens, d_model, vocab_size, record["precision"], "cpu")
    if has_extremes(record["proof"]["generator"]):
        whole.choose_extreme(call["draw"])
    tokens, _ = blocks_of(whole, call["key"])

    def drawn(name: str, first: int, count: int, **what: Any) -> Tensor:
        return draws.part(record["proof"]["seed"], call["draw"], name, first, count, whole.tensors[name].dtype, **what)

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
    groups = whole.groups[0][indices(tokens)], whole.groups[1]
    return Inputs(hidden, weight, targets, whole.precision, whole.scale * len(targets) / num_tokens, groups)
