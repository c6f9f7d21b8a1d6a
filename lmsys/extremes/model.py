"""Extreme rows for norms, rotary embedding and gates, and extreme gradients for optimizers, by exact operations.

`lmsys check` takes ROWS, GATES and `extreme`. Benchmarks of models write weights by `write_model`, and gradients by
`plant`. A new kind of extreme row or gate is an entry of ROWS or GATES; `write_model` and `group_of` go through ROWS.

In a model some rows of the embedding are extreme, and reach norms and rotary embedding with their tokens. In each
feed-forward some gates are saturated, and the values that they are multiplied by are scaled down, so that products stay
of the usual size.

Squares of huge rows overflow float16, and so do squares of an outlier channel. Exponentials of saturated gates x
overflow float32: exp(-x) for negative gates, exp(x) for positive ones. Which of the two is computed depends on how
sigmoid is written.

Gradients are zero, tiny, near 1e-20, or huge, near 1e+20. The square of HUGE, 2**132, overflows float32, which ends at
2**128. But AdamW adds only 1 - beta2 = 0.001 of the square to its second moment, and this product fits:
((1 - beta2) g) g is finite, while (1 - beta2) (g g) is inf. The square of TINY lies below the smallest normal number,
2**-126, and does not matter beside any eps.

torch's CUDA kernels square a gradient before they scale it: with HUGE their moments become inf, in the fused kernels
NaN (torch 2.11, one H200), while those of a CPU are right. Code that follows the papers, v = β2 v + (1 - β2) g²,
overflows on a CPU too. So optimizers that are compared with torch on a GPU get LARGE in place of HUGE: float32 can hold
its square. Those that `lmsys check` asks get LARGE, too.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

HUGE_ROW = 2.0**12  # the factor of a huge row, and the value of an outlier channel
GATE = 2.0**8  # the size of a saturated gate
# The distance between two extreme embeddings, or gates, of one kind: primes, so that they fall anywhere in tiles.
EVERY_ID, EVERY_GATE = 193, 61


# A token with an ordinary embedding. Benchmarks begin each sequence with it, since the first token sees no other: a row
# of zeros there would stay zero through all blocks, and each norm would multiply its gradient by 1 / sqrt(eps).
FIRST_ID = 0
# A name of a parameter, and the ends of the names of two parameters of each block.
EMBEDDINGS, GATES_OF, VALUES_OF = "token_embeddings.weight", "ffn.w1.weight", "ffn.w3.weight"


def huge(x: Tensor) -> None:
    """Multiplies x (N, M) by HUGE_ROW, in place."""
    x.mul_(HUGE_ROW)


def outlier(x: Tensor) -> None:
    """Writes HUGE_ROW into one channel of x (N, M), in place, with opposite signs in neighbouring rows."""
    channel = x.shape[-1] // 3
    x[..., channel] = HUGE_ROW
    x[1::2, ..., channel] = -HUGE_ROW


def large_mean(x: Tensor) -> None:
    """Adds HUGE_ROW to x (N, M), in place: the mean of each row is then large beside its deviations."""
    x.add_(HUGE_ROW)


def saturated(x: Tensor) -> None:
    """Makes gates x (N, F) hundreds in size, in place, with opposite signs in neighbouring columns."""
    x.abs_().add_(1.0).mul_(GATE / 2)  # GATE where |x| is 1, and GATE / 2 at least
    x[..., 1::2].neg_()


ROWS: dict[str, Callable[[Tensor], object]] = {  # by kind of extreme rows: what writes them into x (N, M), in place
    "rows of zeros": Tensor.zero_,
    "huge rows": huge,
    "rows with an outlier channel": outlier,
}
# By kind of extreme gates: what writes them into x (N, F), in place.
GATES: dict[str, Callable[[Tensor], object]] = {"saturated gates": saturated, "gates of zero": Tensor.zero_}


def write_model(parameters: Mapping[str, Tensor]) -> None:
    """Writes extreme rows into weights of `lmsys.model`'s Transformer, by name, in place: see `group_of`."""
    for name, weight in parameters.items():
        x = weight.data
        if name == EMBEDDINGS:
            for number, make in enumerate(ROWS.values(), start=1):
                make(x[number::EVERY_ID])
        elif name.endswith(GATES_OF):
            x[1::EVERY_GATE] *= GATE / 2  # the largest gates of a new model are 2 to 3: they become hundreds
        elif name.endswith(VALUES_OF):
            x[1::EVERY_GATE] /= GATE / 2  # so that gate times value stays of the usual size


def group_of(name: str, rows: int) -> Tensor:
    """(rows,) int64: 0 for an ordinary row of the parameter `name`, 1, 2, ... for each kind of extreme row.

    Gradients are judged group by group. Rows of w1 that make saturated gates count as ordinary. Their gradients are
    small, since the gates are multiplied by small values, and cannot be judged by themselves: where a gate happens to
    be near 0, the rounding of its large terms decides its gradient. The rows of w3, which make the small values, have
    large gradients, and are a group.
    """
    group = torch.zeros(rows, dtype=torch.int64)
    if name == EMBEDDINGS:
        for number in range(1, len(ROWS) + 1):
            group[number::EVERY_ID] = number
    elif name.endswith(VALUES_OF):
        group[1::EVERY_GATE] = 1
    return group


TINY, LARGE, HUGE = 2.0**-66, 2.0**62, 2.0**66  # 1.4e-20, 4.6e+18 and 7.4e+19
SIZES = "zero", "tiny", "huge", "mixed"  # of gradients: see `extreme`


def planted(held_by_torch: bool) -> tuple[float, ...]:
    """The values of zero, tiny and huge gradients, in this order.

    held_by_torch  True where torch's own kernels on a GPU must work with these gradients: the huge one is then LARGE,
                   whose square float32 can hold, in place of HUGE
    """
    return 0.0, TINY, LARGE if held_by_torch else HUGE


def extreme(gradient: Tensor, size: str, held_by_torch: bool) -> Tensor:
    """`gradient` times the value of `planted` for `size`, a name in SIZES. It is exact in float32.

    For "mixed" the rows are multiplied by the three values in turn, and every fourth row stays as it is.
    """
    factors = dict(zip(SIZES, planted(held_by_torch), strict=False))  # "mixed" has no factor
    if size != "mixed":
        return gradient * factors[size]
    in_turn = torch.tensor([*factors.values(), 1.0], dtype=gradient.dtype, device=gradient.device)
    of_rows = in_turn[torch.arange(len(gradient), device=gradient.device) % len(in_turn)]
    return gradient * of_rows.view(-1, *[1] * (gradient.dim() - 1))


def plant(gradient: Tensor, rows: Sequence[int], values: Sequence[float], scale: float = 1.0) -> None:
    """Fills each of `rows` of a gradient, in place, with the value of the same place in `values` times `scale`.

    scale  the factor by which the loss was multiplied, as in training in float16, and so all gradients
    """
    for row, value in zip(rows, values, strict=True):
        gradient[row] = value * scale
