"""Inputs of the head and loss, their exact answer at the full shape, and checks of calls that are timed.

`benchmarks.bench_loss` calls this module, and lists the implementations in its table LOSSES. The usual one is
`unchunked`, below; those of other people are in `benchmarks.loss_peers`. An implementation maps hidden states (N, M), a
weight (V, M) and targets (N) to the mean loss. Its answer is that loss and the gradients of hidden and weight. N
tokens, V classes, M features.

    before timing   `Inputs.check` compares a whole answer with `references`, which `Inputs.in_blocks` makes
    timed calls     `Inputs.keep` copies a part of the answer, `Inputs.judge` compares it with `sampled_answer`
    afterwards      `repeat` judges the part of a timed call that a record holds, for `lmsys verify`, without a GPU

`benchmarks.models` computes budgets, the errors that are allowed. Some tokens are extreme (`lmsys.extremes.loss`).
These tokens, and the classes whose gradients they add to, have a budget of their own, so that they do not widen the
budget of all others.

Of a timed call the loss and some rows of both gradients are judged. `slices_of` chooses the rows by the call's key, a
random number that is drawn after the call, so that no implementation can foresee them; some are rows of extreme tokens
and their classes. A row of the gradient of hidden depends on all classes, and a row of the gradient of the weight on
all tokens. One row goes into the record, for `repeat`. NUM_SLICES and SLICE_ROWS say how many rows are judged.
"""

import base64
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import BUDGET_RTOL, ERROR_RTOL, LOSS_SCALE, ROUNDING, finite, mean_ratio, ratio_by_group, widened
from lmsys import draws, extremes, testing
from lmsys.bench import Kept, Record
from lmsys.bench.plain import check_plain
from lmsys.extremes.loss import WIDTH, ExtremeTokens, is_extreme, write_head, write_kind
from lmsys.training.prepare import autocast

LOSS, D_HIDDEN, D_WEIGHT = OUTPUTS = ("loss", "gradient of hidden", "gradient of weight")
ERRORS = ("loss_error", "d_hidden_error", "d_weight_error")  # fields of records, by output
ODD_TOKENS, ODD_VOCABULARY = 101, 517  # sizes that no block of a kernel divides
BLOCK_LOGITS = {"cuda": 2**26, "cpu": 2**22}  # logits that a reference holds at once, by device
Answer = tuple[Tensor, Tensor, Tensor]  # the loss, or that of each token (N), and the gradients of hidden and weight
Formula = Callable[[Tensor, Tensor], Tensor]  # from logits (N, V) and targets (N): the loss of each token (N)
cross_entropy: Formula = partial(F.cross_entropy, reduction="none")


def unchunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The head and the loss as they are usually written: the logits of all tokens, in float32 or wider."""
    return F.cross_entropy(widened(F.linear(hidden, weight)), targets)


class Inputs:
    """The inputs hidden (N, M) and weight (V, M), both leaves, and targets (N). `LossDraws` fills them.

    scale         gradients are of the loss times this: in fp16 small gradients would be 0 otherwise
    groups        (group of each token (N), group of each class (V)): 0 for ordinary tokens, and for classes to whose
                  gradient no extreme token adds. Each group of tokens or classes has a budget of its own
    exact, plain  the two answers of `references`, with the loss of each token: one in float64, one by plain PyTorch in
                  the precision that is tested. () until `bench_loss.py` sets them for `check` and `errors`. They are on
                  the host, to leave the device's memory to the implementation
    """

    def __init__(self, tokens: int, d_model: int, vocab_size: int, precision: str, device: str):
        self.hidden, self.weight = (
            torch.empty(n, d_model, device=device, requires_grad=True) for n in (tokens, vocab_size)
        )
        self.targets = torch.empty(tokens, dtype=torch.int64, device=device)
        self.precision, self.scale = precision, LOSS_SCALE if precision == "fp16" else 1.0
        self.groups = torch.zeros(tokens), torch.zeros(vocab_size)
        self.exact: Sequence[Tensor] = ()
        self.plain: Sequence[Tensor] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The inputs by name, which `LossDraws` fills and no output may overlap."""
        return {"hidden": self.hidden, "weight": self.weight, "targets": self.targets}

    @property
    def device(self) -> str:
        return self.hidden.device.type

    def make_extreme(self, draw: int) -> None:
        """Makes the extreme tokens of a draw, in place. They and their classes are group 1."""
        extreme = ExtremeTokens.of(draw, len(self.targets), len(self.weight))
        self.groups = is_extreme(extreme.tokens, len(self.targets)), is_extreme(extreme.classes, len(self.weight))
        extreme.write_weight(self.weight)
        extreme.write_tokens(self.hidden, self.weight, self.targets)

    def check(self, answer: Answer) -> dict[str, float]:
        """The error over its budget of each output of an implementation. `exact` and `plain` must be set."""
        # The loss is a mean over tokens, and the first gradient has a row for each token: both have the tokens' groups.
        return ratios(answer, self.exact, self.plain, self.groups[:1] + self.groups, self.precision, self.device)

    def errors(self, answer: Answer) -> dict[str, float | None]:
        """{name in ERRORS: the largest error against float64, over the largest value}; None for NaN or inf.

        Rows of extreme tokens and classes, whose gradients are largest, are compared only with one another.
        """
        result = {ERRORS[0]: finite(abs(answer[0].item() / self.exact[0].mean().item() - 1))}
        for i in (1, 2):  # the gradients of hidden and weight, whose rows are tokens and classes
            result[ERRORS[i]] = relative_error(
                answer[i], self.exact[i].to(self.device), self.groups[i - 1].to(self.device)
            )
        return result

    def run(self, call: Callable[..., Tensor]) -> Answer:
        """The answer of an implementation, on the device."""
        with autocast(self.precision, self.device):
            loss = call(self.hidden, self.weight, self.targets)
        d_hidden, d_weight = torch.autograd.grad(loss * self.scale, (self.hidden, self.weight))
        return loss.detach(), d_hidden, d_weight

    def in_blocks(self, exact: bool, formula: Formula = cross_entropy) -> Answer:
        """The answer of a formula, with the loss of each token, on the host; in float64 if `exact`.

        It is computed from one block of tokens after another, so that only one block's logits are in memory.
        """
        dtype, precision = self.arithmetic(exact)
        weight, share = self.weight.detach().to(dtype).requires_grad_(), self.scale / len(self.targets)
        losses, d_hidden, d_weight = [], [], torch.zeros_like(weight)
        for hidden_block, targets in self.blocks():
            hidden = hidden_block.to(dtype).requires_grad_()
            with autocast(precision, self.device):
                loss = formula(widened(F.linear(hidden, weight)), targets)
            gradients = torch.autograd.grad(loss.sum() * share, (hidden, weight))
            losses.append(loss.detach())
            d_hidden.append(gradients[0])
            d_weight += gradients[1]
        return torch.cat(losses).cpu(), torch.cat(d_hidden).cpu(), d_weight.cpu()

    def keep(self, answer: Answer, key: int | None) -> Any:
        """Copies of a timed call's loss and of the rows of both gradients that the key chooses; None without a key.

        `check_plain` raises `Failed` for an output that is not a plain tensor of the right shape and dtype.
        """
        for name, x, like in zip(OUTPUTS, answer, (self.hidden.new_empty(()), self.hidden, self.weight), strict=True):
            check_plain(name, x, like, self.tensors.values())
        if key is None:
            return None
        tokens, classes = slices_of(self, key)
        loss, d_hidden, d_weight = answer
        return loss.clone(), torch.cat([d_hidden[x] for x in tokens]), torch.cat([d_weight[x] for x in classes])

    def judge(self, kept: Kept) -> Mapping[str, float]:
        """The error over its budget of each output of a timed call. Adds a row of a gradient to `kept.evidence`."""
        tokens, classes = map(indices, slices_of(self, kept.key))
        exact, plain = references(partial(sampled_answer, self, tokens, classes))
        groups = self.groups[0], self.groups[0][tokens], self.groups[1][classes]
        kept.evidence["part"] = _evidence(kept.key, groups[1], kept.result[1], exact[1])
        return ratios(kept.result, exact, plain, groups, self.precision)

    def arithmetic(self, exact: bool) -> tuple[torch.dtype, str]:
        """(dtype of hidden and weight, precision of the computation) of a reference."""
        return (torch.float64, "fp32") if exact else (torch.float32, self.precision)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields hidden states (n, M) and targets (n) of blocks of tokens that have at most BLOCK_LOGITS logits."""
        size = max(1, BLOCK_LOGITS[self.device] // len(self.weight))
        yield from zip(self.hidden.detach().split(size), self.targets.split(size), strict=True)


class LossDraws(draws.Draws):
    """Fills the inputs that all implementations share. A draw, a number, decides their values together with the seed.

    Logits are about standard normal, except those of extreme tokens.

    odd  inputs of a small shape that no block divides, for checks before timing
    """

    def __init__(self, inputs: Inputs, seed: int):
        super().__init__(
            inputs.tensors, seed, std={"weight": std_of(inputs.weight)}, below={"targets": len(inputs.weight)}
        )
        self.inputs, self.odd = inputs, odd_inputs(inputs.precision, inputs.device, seed)

    def fill(self, draw: int, names: Iterable[str] | None = None) -> None:
        super().fill(draw, names)
        self.inputs.make_extreme(draw)


def odd_inputs(
    precision: str, device: str, seed: int, tokens: int = ODD_TOKENS, vocab_size: int = ODD_VOCABULARY
) -> Inputs:
    """Inputs of a small shape. Their tokens have five kinds in turn, each with a group of its own.

    Kind 0 is ordinary. Kinds 1 to 4 are those extreme ones of `lmsys.extremes.loss.KINDS` whose logits are exact in
    every precision.
    """
    x = Inputs(tokens, WIDTH, vocab_size, precision, device)
    hidden, weight, targets = x.hidden.data, x.weight.data, x.targets
    targets[:] = torch.arange(tokens, device=device) * 31 % vocab_size  # all differ: 31 shares no factor with it
    for name, tensor, std in (("hidden", hidden, 1.0), ("weight", weight, std_of(weight))):
        tensor[:] = draws.values(draws.key(seed, name), 0, tensor.numel(), device).view(tensor.shape) * std
    # Token i has kind i % 5. The target of a token of kind 4 has the lowest logit.
    write_head(weight, lowest=targets[4::5])
    for kind in range(5):
        write_kind(kind, hidden[kind::5])
    x.groups = torch.arange(tokens) % 5, torch.zeros(vocab_size)
    return x


def ratios(
    answer: Sequence[Tensor],
    exact: Sequence[Tensor],
    plain: Sequence[Tensor],
    groups: Sequence[Tensor],
    precision: str,
    device: str | None = None,
) -> dict[str, float]:
    """The error over its budget of each output. `exact` and `plain` have the loss of each token, `answer` their mean.

    groups  three tensors: the group of each token's loss, and of each row of the two gradients. A group has a budget of
            its own
    device  where outputs are compared, one after another to save memory; None: where `answer` is
    """
    result = {LOSS: mean_ratio(answer[0], exact[0], plain[0], groups[0])}
    for i in (1, 2):  # the two gradients
        x, y, z = (tensors[i].to(device or answer[i].device) for tensors in (answer, exact, plain))
        result[OUTPUTS[i]] = ratio_by_group(x, y, z, ROUNDING[precision], groups[i])
    return result


def relative_error(x: Tensor, exact: Tensor, groups: Tensor) -> float | None:
    """The largest error over the largest exact value, in the group of rows where that is worst; None for NaN or inf."""
    parts = [groups == group for group in groups.unique()]
    errors = [(x[rows] - exact[rows]).abs().max() / exact[rows].abs().max() for rows in parts]
    return finite(torch.stack(errors).max().item())


def std_of(weight: Tensor) -> float:
    """The standard deviation of a weight's elements: logits of standard normal hidden states are standard normal."""
    return float(weight.shape[1] ** -0.5)


NUM_SLICES, SLICE_ROWS = 4, 16  # of each gradient of a timed call, 4 slices of 16 rows are judged
MOST_ELEMENTS = 2**25  # the largest weight or hidden states that `repeat` draws again: they take seconds on a CPU


def slices_of(inputs: Inputs, key: int) -> tuple[list[slice], list[slice]]:
    """(slices of tokens, slices of classes) that the key chooses.

    They are slices, and no lists of indices, since these would have to be copied to the device. The first slice of
    tokens holds an extreme token, and the first of classes a class of such a token, if there are any.
    """
    rng = random.Random(key)

    def draw_slices(groups: Tensor) -> list[slice]:
        starts = list(range(0, len(groups), SLICE_ROWS))
        holding = sorted({index - index % SLICE_ROWS for index in groups.nonzero().flatten().tolist()})
        first = [rng.choice(holding)] if holding else []
        others = [start for start in starts if start not in first]
        chosen = first + rng.sample(others, min(NUM_SLICES, len(starts)) - len(first))
        return [slice(start, min(start + SLICE_ROWS, len(groups))) for start in chosen]

    return draw_slices(inputs.groups[0]), draw_slices(inputs.groups[1])


def indices(slices: list[slice]) -> list[int]:
    """The numbers in these slices, in their order."""
    return [index for rows in slices for index in range(rows.start, rows.stop)]


def references(answer: Callable[..., Sequence[Tensor]]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """(the exact answer, in float64; the plain one, in the precision that is tested).

    There are two usual formulas of the loss, and an implementation may use either. Each element of the plain answer
    comes from the formula that has the larger error in this element.

    answer  answer(exact, formula) computes an answer; without a formula it uses F.cross_entropy
    """
    exact, usual, other = answer(True), answer(False), answer(False, testing.log_sum_exp_loss)
    return exact, [testing.larger_error(*x) for x in zip(exact, usual, other, strict=True)]


def sampled_answer(
    inputs: Inputs, tokens: list[int], classes: list[int], exact: bool, formula: Formula = cross_entropy
) -> Answer:
    """(the loss of each token (N), rows `tokens` of the gradient of hidden, rows `classes` of the gradient of weight).

    They are computed by a formula, in float64 if `exact`, as in `Inputs.in_blocks`, but without the other rows.
    """
    dtype, precision = inputs.arithmetic(exact)
    weight, share = inputs.weight.detach().to(dtype), inputs.scale / len(inputs.targets)
    rows, columns = weight[classes].requires_grad_(), torch.tensor(classes, device=weight.device)
    losses, d_rows = [], torch.zeros_like(rows)
    for hidden_block, targets in inputs.blocks():
        hidden = hidden_block.to(dtype)
        with autocast(precision, inputs.device):
            # The logits of these classes are computed from `rows`, a leaf: so the whole weight needs no gradient.
            loss = formula(widened(F.linear(hidden, weight).index_copy(1, columns, F.linear(hidden, rows))), targets)
        d_rows += torch.autograd.grad(loss.sum() * share, rows)[0]
        losses.append(loss.detach())
    leaf = inputs.hidden.detach()[tokens].to(dtype).requires_grad_()
    with autocast(precision, inputs.device):
        loss = formula(widened(F.linear(leaf, weight)), inputs.targets[tokens])
    (d_hidden,) = torch.autograd.grad(loss.sum() * share, leaf)
    return torch.cat(losses), d_hidden, d_rows


def _evidence(key: int, groups: Tensor, gradient: Tensor, exact: Tensor) -> Record:
    """A row of the kept gradient of hidden (n, M), for the record: its number, its values and its largest error.

    The key chooses a group, and then a row of it, so that an extreme token is as likely as an ordinary one.

    groups  the group of each of the n tokens
    """
    rng = random.Random(key)
    row = rng.choice((groups == rng.choice(groups.unique().tolist())).nonzero().flatten().tolist())
    return {
        "tensor": D_HIDDEN,
        "row": row,
        "values": base64.b64encode(gradient[row].cpu().view(torch.uint8).numpy().tobytes()).decode(),
        "error": (gradient[row].double() - exact[row]).abs().max().item(),
    }


def repeat(record: Record, call: Record) -> Iterator[str | int]:
    """Judges the recorded row of a timed call again: draws the inputs again, and computes the right gradient of hidden.

    Yields, as `Benchmark.repeat`, a sentence for each thing that is wrong or cannot be computed. If the row was judged,
    the number of its elements comes last.
    """
    evidence, size = call["part"], record["d_model"] * max(record["vocab_size"], record["tokens"])
    if set(call["error_ratios"]) != set(OUTPUTS):
        yield f"not proved: its errors are of {', '.join(call['error_ratios'])}, and not of {', '.join(OUTPUTS)}"
    if size > MOST_ELEMENTS:
        yield f"not recomputed: a weight or hidden states of {size:,} elements (at most {MOST_ELEMENTS:,} here)"
        return
    inputs = _inputs_of(record, call)
    # Only the gradient of hidden is judged. `sampled_answer` needs one class at least, so it gets class 0.
    exact, plain = (
        answer[1] for answer in references(partial(sampled_answer, inputs, list(range(len(inputs.targets))), [0]))
    )
    values = torch.frombuffer(bytearray(base64.b64decode(evidence["values"])), dtype=torch.float32)
    row = evidence["row"]
    if row not in range(len(exact)) or values.shape != exact[0].shape:
        yield f"{values.numel()} values of row {row} were recorded, of {len(exact)} rows of {exact.shape[1]}"
        return
    error = (values.double() - exact[row]).abs().max().item()
    if not abs(error - evidence["error"]) <= ERROR_RTOL * max(error, evidence["error"]):
        yield f"its recorded values are off by {error:.4g} from what is right, and it says {evidence['error']:.4g}"
    answer = exact.clone()  # all rows but the recorded one are right; the budget is that of its whole group
    answer[row] = values
    ratio = ratio_by_group(answer, exact, plain, ROUNDING[inputs.precision], inputs.groups[0])
    recorded = call["error_ratios"][D_HIDDEN]
    if recorded < ratio * (1 - BUDGET_RTOL):
        yield f"its error ratio {recorded:.4g} is less than that of its own row, about {ratio:.4g}"
    yield values.numel()


def _inputs_of(record: Record, call: Record) -> Inputs:
    """The inputs of a timed call, drawn again on the CPU: the whole weight, but only the sampled tokens.

    The call's loss is the mean over all tokens, so `scale` is that of the call times the share of the sampled tokens.
    """
    num_tokens, d_model, vocab_size = (record[name] for name in ("tokens", "d_model", "vocab_size"))
    whole = Inputs(num_tokens, d_model, vocab_size, record["precision"], "cpu")
    drawn = partial(draws.part, record["proof"]["seed"], call["draw"])
    whole.hidden = drawn("hidden", 0, num_tokens * d_model, torch.float32).view(num_tokens, d_model)
    whole.weight = drawn("weight", 0, d_model * vocab_size, torch.float32, std_of(whole.weight)).view(-1, d_model)
    whole.targets = drawn("targets", 0, num_tokens, torch.int64, below=vocab_size)
    if extremes.has_extremes(record["proof"]["generator"]):
        whole.make_extreme(call["draw"])
    rows = indices(slices_of(whole, call["key"])[0])
    whole.hidden, whole.targets = whole.hidden[rows], whole.targets[rows]
    whole.groups = whole.groups[0][rows], whole.groups[1]
    whole.scale = whole.scale * len(rows) / num_tokens
    return whole
