"""The rotation of queries and keys in Triton: one pass over the projections, forward and backward."""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from lmsys.kernels.launch import launch
from lmsys.measure.profile import register_kernels

ELEMENTS = 2048  # elements of a tile: 16 for each of 128 threads, two loads of 16 bytes in half precision

register_kernels(r"^_rotate_kernel$", "elementwise")


@triton.jit(do_not_specialize=["num_angles"])
def _rotate_kernel(
    HEADS, Q, K, V, COS, SIN, num_angles, H: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BACKWARD: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """A program turns BLOCK_H of the heads of one token: those of q, then of k, then of v, which it only copies.

    IN_PLACE it reads and writes HEADS, and leaves v alone.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim, pair = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    mask = (head < (H + HKV if IN_PLACE else H + 2 * HKV))[:, None] & (dim < D)[None, :]
    together = HEADS + (token * (H + 2 * HKV) + head) * D
    of_q, of_k, of_v = token * H + head, token * HKV + head - H, token * HKV + head - H - HKV
    apart = tl.where(head < H, Q + of_q * D, tl.where(head < H + HKV, K + of_k * D, V + of_v * D))
    source, target = (apart, together) if BACKWARD else (together, apart)
    if IN_PLACE:
        source, target = together, together
    angles = token % num_angles * (D // 2) + pair
    cos = tl.load(COS + angles, mask=pair < D // 2, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(SIN + angles, mask=pair < D // 2, other=0.0).to(tl.float32)[None, :]
    sin = -sin if BACKWARD else sin
    x = tl.load(source[:, None] + dim[None, :], mask=mask, other=0.0)
    even, odd = tl.split(x.to(tl.float32).reshape(BLOCK_H, BLOCK_D // 2, 2))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos).reshape(BLOCK_H, BLOCK_D).to(x.dtype)
    y = tl.where((head < H + HKV)[:, None], turned, x)
    tl.store(target[:, None] + dim[None, :], y, mask=mask)


@cache
def _blocks(total: int, head_dim: int) -> tuple[int, int, int]:
    """Heads and dimensions of a tile, and tiles of a token's heads."""
    block_d = triton.next_power_of_2(head_dim)
    block_h = max(1, min(triton.next_power_of_2(total), ELEMENTS // block_d))
    return block_h, block_d, triton.cdiv(total, block_h)


def turn(
    heads: Tensor, parts: tuple[Tensor, ...] | None, cos: Tensor, sin: Tensor, num_heads: int, *, backward: bool
) -> None:
    """heads (B, S, H + 2 Hkv, D) into parts q (B, S, H, D), k and v (B, S, Hkv, D); `backward`: parts into heads, each
    pair turned back. Without parts q and k are turned within heads, and v stays as it is. cos and sin (S, D / 2) or
    (B, S, D / 2) in float32 or float64. All are contiguous.
    """
    batch, length, total, head_dim = heads.shape
    kv_heads, in_place = (total - num_heads) // 2, parts is None
    block_h, block_d, num_blocks = _blocks(num_heads + kv_heads if in_place else total, head_dim)
    launch(
        _rotate_kernel,
        batch * length,
        heads,
        *(parts or (heads,) * 3),
        cos,
        sin,
        cos.numel() // (head_dim // 2),
        grid_y=num_blocks,
        H=num_heads,
        HKV=kv_heads,
        D=head_dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        BACKWARD=backward,
        IN_PLACE=in_place,
    )
