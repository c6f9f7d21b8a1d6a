"""Computes the mean of the tensors that all ranks have sent, in Triton, for the copy engines' all-reduce.

`Exchange` of copy_engine.py calls `mean_`. Each tensor is read once. The tensors are summed in the order of ranks, in
float32 or float64, so the result does not depend on the rank that computes it. The trait `kernels` in copy_engine.py
has the kernel's name, by which profiles recognize it.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # elements of a program: 32 for each of 128 threads


@triton.jit
def _mean_kernel(
    OWN, OTHERS, OUT, num, between,
    RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT (num,) becomes the mean of OWN (num,) and of the others, which begin every `between` elements in OTHERS.

    RANK is the place of OWN among the WORLD_SIZE tensors, WIDE the dtype of the sum, BLOCK the elements of a program.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num
    total = tl.zeros((BLOCK,), WIDE)
    for rank in tl.static_range(WORLD_SIZE):
        if rank == RANK:
            x = tl.load(OWN + place, mask=mask, other=0.0)
        else:  # OTHERS has no row for RANK, so rows of higher ranks come one place earlier
            x = tl.load(OTHERS + (rank - (rank > RANK)) * tl.cast(between, tl.int64) + place, mask=mask, other=0.0)
        total += x.to(WIDE)
    tl.store(OUT + place, (total / WORLD_SIZE).to(OUT.dtype.element_ty), mask=mask)


def mean_(own: torch.Tensor, others: torch.Tensor, out: torch.Tensor, rank: int) -> None:
    """out (n,) becomes the mean of own (n,), the tensor of `rank`, and of others (world_size - 1, n), by rank.

    own and out are contiguous, and so is each row of others. out may be own. Complex numbers are added as pairs of real
    numbers, since Triton has no complex dtype.
    """
    if own.is_complex():
        own, others, out = (torch.view_as_real(x).flatten(-2) for x in (own, others, out))
    num = own.numel()
    _mean_kernel[(triton.cdiv(num, BLOCK),)](
        own, others, out, num, others.stride(0), RANK=rank, WORLD_SIZE=len(others) + 1,
        WIDE=tl.float64 if own.dtype == torch.float64 else tl.float32, BLOCK=BLOCK,
    )  # fmt: skip
