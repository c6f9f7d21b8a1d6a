"""The sums behind `exact_norm` in Triton: every gradient is read once, in one launch.

Whole numbers are added, whose sum has no order, so that programs may add to one place as they end.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmsys.measure.profile import register_kernels
from lmsys.training.chunks import chunks_of

BLOCK, NUM_WARPS = 4096, 4

register_kernels(r"^_whole_squares_kernel$", "reduction")


@triton.jit
def _whole_squares_kernel(ADDRESSES, SIZES, OWNERS, CHUNKS, SCALES, SUMS, BLOCK: tl.constexpr):
    tensor = tl.load(OWNERS + tl.program_id(0))
    first = tl.load(CHUNKS + tl.program_id(0)).to(tl.int64) * BLOCK
    left = tl.load(SIZES + tensor) - first
    within = tl.arange(0, BLOCK)
    x_at = tl.load(ADDRESSES + tensor).to(tl.pointer_type(tl.float32)) + first + within
    x = tl.load(x_at, mask=within < left, other=0.0).to(tl.float64)
    scaled = x * x * tl.load(SCALES)
    whole = scaled.to(tl.int64)
    rest = (scaled - whole.to(tl.float64)) * tl.load(SCALES + 1)
    tl.atomic_add(SUMS, tl.sum(whole))
    tl.atomic_add(SUMS + 1, tl.sum(rest.to(tl.int64)))


def whole_squares(tensors: Sequence[Tensor], scales: Tensor) -> Tensor:
    """(2,) int64: see `exact_norm`. `tensors`: float32 and contiguous; `scales`: (2,) float64, on their device."""
    device = scales.device
    sizes, owners, chunks = chunks_of(tuple(x.numel() for x in tensors), BLOCK, device)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    addresses = torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64, pin_memory=scales.is_cuda)
    with torch.cuda.device_of(scales):
        _whole_squares_kernel[(len(owners),)](
            addresses.to(device, non_blocking=True), sizes, owners, chunks, scales, sums, BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return sums
