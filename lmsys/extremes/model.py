"""Extreme rows for norms, rotary embedding and gates, written in place by exact operations.

In a model some embeddings are such rows, and come to norms and to rotary embedding with their tokens. Some gates of
each feed-forward are saturated, while what they let through is as large as ever.

Squares of huge rows overflow float16, and so do those of an outlier channel. An exponential of a saturated gate
overflows float32, of one sign or of both.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

HUGE = 2.0**12
GATE = 2.0**8
EVERY_ID, EVERY_GATE = 193, 61  # primes: from one extreme embedding, or gate, to the next of its kind


# An ordinary embedding, for the first token of a sequence: a zero that sees nothing else stays zero through all blocks,
# and each norm multiplies its gradient by 1 / sqrt(eps).
FIRST_ID = 0
EMBEDDINGS, GATES_OF, VALUES_OF = "token_embeddings.weight", "ffn.w1.weight", "ffn.w3.weight"


def zeros(x: Tensor) -> None:
    """Every row of x (N, M) is zero."""
    x.zero_()


def huge(x: Tensor) -> None:
    """Every row of x (N, M) is HUGE times as large."""
    x.mul_(HUGE)


def outlier(x: Tensor) -> None:
    """A channel of x (N, M), in one row of each sign, is HUGE; the others are as they were."""
    channel = x.shape[-1] // 3
    x[..., channel] = HUGE
    x[1::2, ..., channel] = -HUGE


def large_mean(x: Tensor) -> None:
    """Every row of x (N, M) has a mean beside which its deviations are small."""
    x.add_(HUGE)


def saturated(x: Tensor) -> None:
    """Gates (N, F) of hundreds, in neighbouring columns of either sign."""
    x.abs_().add_(1.0).mul_(GATE / 2)
    x[..., 1::2].neg_()


ROWS: dict[str, Callable[[Tensor], Any]] = {
    "rows of zeros": zeros,
    "huge rows": huge,
    "rows with an outlier channel": outlier,
}
GATES: dict[str, Callable[[Tensor], Any]] = {"saturated gates": saturated, "gates of zero": zeros}


def write_model(parameters: Mapping[str, Tensor]) -> None:
    """Writes weights of a model of ours, by their names, in place: `group_of` says which rows."""
    for name, weight in parameters.items():
        x = weight.data
        if name == EMBEDDINGS:
            for number, make in enumerate(ROWS.values(), start=1):
                make(x[number::EVERY_ID])
        elif name.endswith(GATES_OF):
            x[1::EVERY_GATE] *= GATE / 2
        elif name.endswith(VALUES_OF):
            x[1::EVERY_GATE] /= GATE / 2


def group_of(name: str, rows: int) -> Tensor:
    """A number for each row of a parameter: 0 where it is ordinary, 1, 2, ... for each kind of extreme ones.

    Rows of saturated gates are ordinary: their gradients are small, and of those few tokens at which the gate is near 0
    the rounding of a large gate decides. What they are multiplied by has large gradients.
    """
    group = torch.zeros(rows, dtype=torch.int64)
    if name == EMBEDDINGS:
        for number in range(1, len(ROWS) + 1):
            group[number::EVERY_ID] = number
    elif name.endswith(VALUES_OF):
        group[1::EVERY_GATE] = 1
    return group
