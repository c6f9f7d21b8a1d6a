"""The mean of tensors by rank in Triton: each is read once, in the order of ranks, summed in float32 or wider."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a program: 32 for each of 128 threads


@triton.jit
def _mean_kernel(
    OWN, OTHERS, OUT, num, between,
    RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT (num,) becomes the mean of OWN and of those that begin every `between` elements from OTHERS on."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num
    total = tl.zeros((BLOCK,), WIDE)
    for rank in tl.static_range(WORLD_SIZE):
        if rank == RANK:
            x = tl.load(OWN + place, mask=mask, other=0.0)
        elif rank < RANK:
            x = tl.load(OTHERS + rank * tl.cast(between, tl.int64) + place, mask=mask, other=0.0)
        else:
            x = tl.load(OTHERS + (rank - 1) * tl.cast(between, tl.int64) + place, mask=mask, other=0.0)
        total += x.to(WIDE)
    tl.store(OUT + place, (total / WORLD_SIZE).to(OUT.dtype.element_ty), mask=mask)


def mean_(own: Tensor, others: Tensor, out: Tensor, rank: int) -> None:
    """out (n,), which may be own, becomes the mean of own (n,), which is `rank`'s, and of the others' (others, n)."""
    num = own.numel()
    wide = tl.float64 if own.dtype == torch.float64 else tl.float32
    _mean_kernel[(triton.cdiv(num, BLOCK),)](
        own, others, out, num, others.stride(0), RANK=rank, WORLD_SIZE=len(others) + 1, WIDE=wide, BLOCK=BLOCK
    )
