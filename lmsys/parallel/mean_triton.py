"""The mean of tensors by rank in Triton: each is read once, in the order of ranks, summed in float32 or wider."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a program: 32 for each of 128 threads


@triton.jit
def _mean_kernel(
    OWN, OTHERS, num, between, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """OWN (num,) becomes the mean of it and of those that begin every `between` elements from OTHERS on."""
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
    tl.store(OWN + place, (total / WORLD_SIZE).to(OWN.dtype.element_ty), mask=mask)


def mean_(parts: list[Tensor], rank: int) -> None:
    """parts[rank] (n,) becomes the mean of all; the others (n,) lie one behind another, n elements apart."""
    own, others = parts[rank], [part for place, part in enumerate(parts) if place != rank]
    num = own.numel()
    assert all(x.data_ptr() == others[0].data_ptr() + i * num * x.itemsize for i, x in enumerate(others))
    wide = tl.float64 if own.dtype == torch.float64 else tl.float32
    _mean_kernel[(triton.cdiv(num, BLOCK),)](
        own, others[0], num, num, RANK=rank, WORLD_SIZE=len(parts), WIDE=wide, BLOCK=BLOCK
    )
