"""Extreme rows for norms, rotary embedding and gates, and gradients for optimizers, written by exact operations.

In a model some embeddings are such rows, and come to norms and to rotary embedding with their tokens. Some gates of
each feed-forward are saturated, while what they let through is as large as ever.

Squares of huge rows overflow float16, and so do those of an outlier channel. An exponential of a saturated gate
overflows float32, of one sign or of both.

Gradients are zero, tiny, near 1e-20, or huge, near 1e+20. The square of HUGE is beyond float32, which ends at
2**128; the 1 - beta2 = 0.001 of it that AdamW adds to its second moment is not: the order of the products decides. The
square of TINY lies below the smallest normal number, 2**-126, and is nothing beside any eps.

torch's CUDA kernels square a gradient before they scale it: from HUGE they make moments of inf, the fused ones NaN
(torch 2.11, one H200), where those of a CPU are right. Code that follows the papers, v = β2 v + (1 - β2) g², does so
on a CPU too. So what is held to torch on a GPU gets LARGE, whose square float32 has, and so does what `lmsys.check` is
asked about.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

HUGE_ROW = 2.0**12
GATE = 2.0**8
EVERY_ID, EVERY_GATE = 193, 61  # primes: from one extreme embedding, or gate, to the next of its kind


# An ordinary embedding, for the first token of a sequence: a zero that sees nothing else stays zero through all blocks,
# and each norm multiplies its gradient by 1 / sqrt(eps).
FIRST_ID = 0
EMBEDDINGS, GATES_OF, VALUES_OF = "token_embeddings.weight", "ffn.w1.weight", "ffn.w3.weight"


def huge(x: Tensor) -> None:
    """Every row of x (N, M) is HUGE_ROW times as large."""
    x.mul_(HUGE_ROW)


def outlier(x: Tensor) -> None:
    """A channel of x (N, M), in one row of each sign, is HUGE_ROW; the others are as they were."""
    channel = x.shape[-1] // 3
    x[..., channel] = HUGE_ROW
    x[1::2, ..., channel] = -HUGE_ROW


def large_mean(x: Tensor) -> None:
    """Every row of x (N, M) has a mean beside which its deviations are small."""
    x.add_(HUGE_ROW)


def saturated(x: Tensor) -> None:
    """Gates (N, F) of hundreds, in neighbouring columns of either sign."""
    x.abs_().add_(1.0).mul_(GATE / 2)
    x[..., 1::2].neg_()


ROWS: dict[str, Callable[[Tensor], object]] = {
    "rows of zeros": Tensor.zero_,
    "huge rows": huge,
    "rows with an outlier channel": outlier,
}
GATES: dict[str, Callable[[Tensor], object]] = {"saturated gates": saturated, "gates of zero": Tensor.zero_}


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


TINY, LARGE, HUGE = 2.0**-66, 2.0**62, 2.0**66  # 1.4e-20, 4.6e+18 and 7.4e+19
SIZES = "zero", "tiny", "huge", "mixed"


def planted(held_by_torch: bool) -> tuple[float, ...]:
    """The values of the rows that `plant` writes, in this order. held_by_torch: that torch's kernels on a GPU hold."""
    return 0.0, TINY, LARGE if held_by_torch else HUGE


def extreme(gradient: Tensor, size: str, held_by_torch: bool) -> Tensor:
    """`gradient` times a value of `planted`, for a size of "zero", "tiny" or "huge". Exact in float32.

    In "mixed" the rows have these factors in turn, and every fourth row stays as it is.
    """
    factors = dict(zip(SIZES, planted(held_by_torch), strict=False))
    if size != "mixed":
        return gradient * factors[size]
    in_turn = torch.tensor([*factors.values(), 1.0], dtype=gradient.dtype, device=gradient.device)
    of_rows = in_turn[torch.arange(len(gradient), device=gradient.device) % len(in_turn)]
    return gradient * of_rows.view(-1, *[1] * (gradient.dim() - 1))


def plant(gradient: Tensor, rows: Sequence[int], values: Sequence[float], scale: float = 1.0) -> None:
    """Fills rows of a gradient in place, each with its value times a loss scale."""
    for row, value in zip(rows, values, strict=True):
        gradient[row] = value * scale
