"""Extreme tokens of a head and loss: the target has the lowest logit by far, and another class the highest.

Their hidden states are along the row of the weight that the highest class has; the rows of the targets are its
negative, and the rows of all other classes are as drawn, and nearly orthogonal. So logits are about +-SCALE, the loss
is twice that, and an exponential that no maximum was subtracted from overflows float32. The elements of these rows are
powers of two of about the usual size: the logits of both classes are exact in float16 and bfloat16, rounding changes no
probability, and the budget of the loss is not widened.

Legend: N tokens, V vocabulary, M d_model.
"""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

EVERY = 127  # tokens from one extreme token to the next: a prime, so that they lie anywhere in tiles and chunks
SCALE = 2.0**8  # of a logit, to a factor of 2: the powers of two decide


@dataclass(frozen=True)
class ExtremeTokens:
    """Which tokens of a draw are extreme, and their classes. All are ranges: no index has to travel to a device.

    tokens   the extreme ones of N
    targets  for each its class, the one of the lowest logit
    top      the class of the highest logit, behind the targets
    """

    tokens: range
    targets: range
    top: int

    @classmethod
    def of(cls, draw: int, num_tokens: int, vocab_size: int) -> "ExtremeTokens":
        """Those of a draw; no more than there are classes for. ValueError for a vocabulary of one class."""
        if vocab_size < 2:
            raise ValueError(f"{vocab_size=} must be at least 2: a lowest and a highest logit")
        chance = random.Random(f"{draw} extreme tokens")
        tokens = range(chance.randrange(min(EVERY, num_tokens)), num_tokens, EVERY)[: vocab_size - 1]
        first = chance.randrange(vocab_size - len(tokens))
        top = first + len(tokens)
        return cls(tokens, range(first, top), top)

    @property
    def classes(self) -> range:
        """The targets and the top: extreme tokens add nothing that counts to the gradients of other classes."""
        return range(self.targets.start, self.top + 1)

    def write_weight(self, weight: Tensor) -> None:
        """Writes the classes' rows of weight (V, M) in place, with the signs that the row of the top was drawn with."""
        top = weight.data[self.top]
        top.copy_(torch.copysign(torch.full_like(top, 2.0 ** round(-math.log2(weight.shape[1]) / 2)), top))
        weight.data[self.targets.start : self.targets.stop] = -top

    def write_tokens(self, hidden: Tensor, weight: Tensor, targets: Tensor, first: int = 0) -> None:
        """Writes hidden (n, M) and targets (n) in place, which are those of the tokens first, first + 1, ...

        weight (V, M) is as `write_weight` leaves it.
        """
        begin = max(0, -((self.tokens.start - first) // EVERY))  # of the extreme tokens the first that is here
        stop = max(begin, min(len(self.tokens), -((self.tokens.start - first - len(hidden)) // EVERY)))
        if begin == stop:
            return
        here = slice(self.tokens[begin] - first, self.tokens[stop - 1] - first + 1, EVERY)
        hidden.data[here] = weight.data[self.top] * SCALE
        targets.data[here] = torch.arange(self.targets[begin], self.targets[stop - 1] + 1, device=targets.device)


def is_extreme(places: range, length: int) -> Tensor:
    """(length,) of 1 at these places, else 0."""
    marks = torch.zeros(length, dtype=torch.int64)
    marks[places.start : places.stop : places.step] = 1
    return marks


KINDS = {  # of tokens of a head of WIDTH features, all exact but for the last
    "logits far above 0": 1,
    "logits far below 0": 2,
    "equal logits": 3,
    "targets with the lowest logit by far": 4,
    "logits of hundreds": 5,
}
WIDTH = 64


def write_head(weight: Tensor, lowest: Tensor) -> None:
    """Writes weight (V, WIDTH) in place, so that `write_kind` can make logits extreme; those of `lowest` can be lowest.

    16 features lift all logits alike, one spreads them by eighths of the classes, and 32 are against each other.
    """
    weight[:, :16] = 0.25
    weight[:, 16] = torch.arange(len(weight), device=weight.device) % 8
    weight[lowest, 32:] = -0.25
    weight[-1, 32:] = 0.25


def write_kind(kind: int, hidden: Tensor) -> None:
    """Writes hidden (n, WIDTH), drawn as standard normal, in place; kind 0 is ordinary."""
    if kind in (0, 5):
        hidden[:, :17] = 0.0
        hidden.mul_(2.0**7 if kind == 5 else 1.0)
        return
    hidden.zero_()
    if kind in (1, 2):
        hidden[:, :16] = SCALE / 4 if kind == 1 else -SCALE / 4
        hidden[:, 16] = 2.0
    if kind == 4:
        hidden[:, 32:] = SCALE / 8
