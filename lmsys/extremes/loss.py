"""Extreme tokens for a head and its loss: the target has the lowest logit by far, another class (*top*) the highest.

The benchmark of losses writes such tokens into its draws by `ExtremeTokens`. `lmsys check`, and the benchmark before it
times a row, write several kinds of extreme logits into small inputs by `write_head` and `write_kind`. A new kind is an
entry of KINDS, which `lmsys check` reads, and a branch of `write_kind`; `odd_inputs` of benchmarks/loss.py takes kinds
0 to 4.

The hidden state of an extreme token that `ExtremeTokens` writes is SCALE times the weight's row of the class top. The
rows of the targets are the negative of that row. The rows of all other classes are as drawn, and nearly orthogonal to
it. So the logits are about +-SCALE, the loss is twice that, and an exponential without a maximum subtracted overflows
float32. The elements of these rows are powers of two of about the usual size. So the logits of both classes are exact
in float16 and bfloat16, rounding changes no probability, and the error that the loss may have does not grow.

Legend: N tokens, V vocabulary, M d_model.
"""

import math
import random
from dataclasses import dataclass

import torch

EVERY = 127  # every 127th token is extreme: a prime, so that they fall anywhere in tiles and chunks
SCALE = 2.0**8  # the size of an extreme logit, up to a factor of 2: M ** -0.5 is rounded to a power of two


@dataclass(frozen=True)
class ExtremeTokens:
    """The extreme tokens of a draw, and their classes. All are ranges, so that no index is copied to a device.

    tokens   the indices of the extreme tokens, among all N
    classes  for each extreme token its target, the class with the lowest logit; after these top, the class with the
             highest. Extreme tokens add next to nothing to the gradients of other classes.
    """

    tokens: range
    classes: range

    @classmethod
    def of(cls, draw: int, num_tokens: int, vocab_size: int) -> "ExtremeTokens":
        """The extreme tokens of a draw, at most vocab_size - 1. ValueError for a vocabulary of one class."""
        if vocab_size < 2:
            raise ValueError(f"{vocab_size=} must be at least 2: a lowest and a highest logit")
        chance = random.Random(f"{draw} extreme tokens")
        tokens = range(chance.randrange(min(EVERY, num_tokens)), num_tokens, EVERY)[: vocab_size - 1]
        first = chance.randrange(vocab_size - len(tokens))
        return cls(tokens, range(first, first + len(tokens) + 1))

    def write_weight(self, weight: torch.Tensor) -> None:
        """Writes the rows of `classes` into weight (V, M), in place. The row of top keeps the signs of its draw."""
        top = weight.data[self.classes[-1]]
        top.copy_(torch.copysign(torch.full_like(top, 2.0 ** round(-math.log2(weight.shape[1]) / 2)), top))
        weight.data[self.classes.start : self.classes[-1]] = -top

    def write_tokens(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
        """Writes the extreme tokens into hidden (N, M) and targets (N), in place.

        weight (V, M) is as `write_weight` leaves it.
        """
        here = slice(self.tokens.start, self.tokens.stop, EVERY)
        hidden.data[here] = weight.data[self.classes[-1]] * SCALE
        targets.data[here] = torch.arange(self.classes.start, self.classes[-1], device=targets.device)


def is_extreme(places: range, length: int) -> torch.Tensor:
    """(length,) int64: 1 at these places, else 0. By it, extreme tokens or classes are judged apart from the others."""
    marks = torch.zeros(length, dtype=torch.int64)
    marks[places.start : places.stop : places.step] = 1
    return marks


# The kinds of extreme logits, with the numbers by which `write_kind` knows them. The logits of all kinds but the last
# are exact in every dtype.
KINDS = {
    "logits far above 0": 1,
    "logits far below 0": 2,
    "equal logits": 3,
    "targets with the lowest logit by far": 4,
    "logits of hundreds": 5,
}
WIDTH = 64  # features of the hidden states that `write_head` and `write_kind` write


def write_head(weight: torch.Tensor, lowest: torch.Tensor) -> None:
    """Writes features of weight (V, WIDTH) in place, by which `write_kind` makes logits extreme.

    Features 0 to 15 raise all logits equally. Feature 16 gives the classes one of eight logits in turn. Features 32 to
    63 lower the logits of the classes `lowest`, and raise that of the last class.
    """
    weight[:, :16] = 0.25
    weight[:, 16] = torch.arange(len(weight), device=weight.device) % 8
    weight[lowest, 32:] = -0.25
    weight[-1, 32:] = 0.25


def write_kind(kind: int, hidden: torch.Tensor) -> None:
    """Writes a kind, a value of KINDS, into hidden (n, WIDTH), drawn as standard normal, in place; 0 is ordinary.

    The logits are those of a head that `write_head` has written.
    """
    if kind in (0, 5):
        hidden[:, :17] = 0.0  # without the features that give all classes the same logit, or one of eight
        hidden.mul_(2.0**7 if kind == 5 else 1.0)
        return
    hidden.zero_()  # kind 3 stays so: all logits are 0
    if kind in (1, 2):
        hidden[:, :16] = SCALE / 4 if kind == 1 else -SCALE / 4
        hidden[:, 16] = 2.0
    if kind == 4:
        hidden[:, 32:] = SCALE / 8
