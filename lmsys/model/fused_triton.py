"""The kernels of fused.py and rotary.py in Triton: addition and norm, SwiGLU's product, rotation of queries and keys.

fused.py calls `add_norm`, `swiglu` and their backwards, and rotary.py calls `turn`. Each kernel reads and writes an
element once, forward and backward. The functions named `..._options` choose a kernel's tile and warps by the width of a
row: change these numbers in the functions, since tests compile the kernels with the results of the functions. fused.py
and rotary.py compute the same in plain PyTorch: a change of a formula is made there, too.

Legend: T tokens, M d_model, F d_ff, B batch, S sequence length, H query heads, Hkv key/value heads, D head dimension.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmsys.kernels.launch import launch
from lmsys.measure.profile import register_kernels

SWIGLU_BLOCK = 4096  # the most elements of the product that one program of SwiGLU computes
NORM_BLOCK = 1024  # elements that a program of a norm's backward holds at once: whole rows, and at least one
# A norm's backward has as many programs as make WARPS warps on each multiprocessor, or fewer. Each program sums up a
# part of d_weight over its rows.
WARPS = 32
SUM_COLUMNS = 16  # columns of these partial sums that a program of _sum_rows_kernel adds up
ROTATION_BLOCK = 2048  # elements of a tile: 16 for each of 128 threads, two loads of 16 bytes in half precision

register_kernels(r"^_(add_norm|swiglu)_(forward|backward)_kernel$|^_(sum_rows|rotate)_kernel$", "elementwise")


@triton.jit
def _add_norm_forward_kernel(
    X, BRANCH, WEIGHT, TOTAL, NORMALISED, RSTD, eps,
    M: tl.constexpr, BLOCK_M: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """A program owns a row: total = x + branch, normalised = total / rms(total) · weight."""
    row = tl.program_id(0).to(tl.int64) * M
    at = tl.arange(0, BLOCK_M)
    mask = at < M
    x = tl.load(X + row + at, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(BRANCH + row + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(TOTAL.dtype.element_ty)  # the norm is that of the rounded sum, which the backward reads
        tl.store(TOTAL + row + at, x, mask=mask)
        x = x.to(tl.float32)
    rstd = 1 / tl.sqrt_rn(tl.sum(x * x) / M + eps)
    tl.store(RSTD + tl.program_id(0), rstd)
    y = x * rstd * tl.load(WEIGHT + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(NORMALISED + row + at, y.to(NORMALISED.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_backward_kernel(
    D_NORMALISED, D_TOTAL, TOTAL, WEIGHT, RSTD, DX, D_BRANCH, D_WEIGHTS, num_rows,
    M: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """A program owns some rows, ROWS at once, and writes its part of the gradient of the weight.

    ADDS: the gradient of the sum itself is added. BOTH: the gradient is written in the branch's dtype as well.
    In the loop x is total / rms(total). dy is first the gradient of the normalised result x · weight, then that of x.
    """
    at = tl.arange(0, BLOCK_M)
    weight = tl.load(WEIGHT + at, mask=at < M, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros([ROWS, BLOCK_M], tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for _ in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        mask = (row < num_rows)[:, None] & (at < M)[None, :]
        element = row[:, None] * M + at[None, :]
        dy = tl.load(D_NORMALISED + element, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, mask=row < num_rows, other=0.0)[:, None]
        x = tl.load(TOTAL + element, mask=mask, other=0.0).to(tl.float32) * rstd
        d_weight += dy * x
        dy *= weight
        dx = rstd * (dy - x * (tl.sum(dy * x, axis=1)[:, None] / M))
        if ADDS:
            dx += tl.load(D_TOTAL + element, mask=mask, other=0.0).to(tl.float32)
        tl.store(DX + element, dx.to(DX.dtype.element_ty), mask=mask)
        if BOTH:
            tl.store(D_BRANCH + element, dx.to(D_BRANCH.dtype.element_ty), mask=mask)
        row += tl.num_programs(0) * ROWS
    tl.store(D_WEIGHTS + tl.program_id(0).to(tl.int64) * M + at, tl.sum(d_weight, axis=0), mask=at < M)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_rows_kernel(PARTS, SUM, num_rows, M: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr):
    """A program adds up BLOCK_M columns over all rows. It holds all of them at once: num_rows <= ROWS."""
    at, row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None] & (at < M)[None, :]
    parts = tl.load(PARTS + row[:, None] * M + at[None, :], mask=mask, other=0.0)
    tl.store(SUM + at, tl.sum(parts, axis=0), mask=at < M)


@triton.jit
def _swiglu_forward_kernel(HALVES, PRODUCT, F: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes BLOCK elements of a row of PRODUCT. A row of HALVES has F elements of gate, F of value."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < F
    gate = tl.load(HALVES + row * 2 * F + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(HALVES + row * 2 * F + F + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(PRODUCT + row * F + at, (gate * tl.sigmoid(gate) * value).to(PRODUCT.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(D_PRODUCT, HALVES, D_HALVES, F: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes the gradients of BLOCK elements of the gate and of the value, at the same places of a row."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < F
    gate = tl.load(HALVES + row * 2 * F + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(HALVES + row * 2 * F + F + at, mask=mask, other=0.0).to(tl.float32)
    d_product = tl.load(D_PRODUCT + row * F + at, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate, d_value = d_product * value * share * (1 + gate * (1 - share)), d_product * gate * share
    tl.store(D_HALVES + row * 2 * F + at, d_gate.to(D_HALVES.dtype.element_ty), mask=mask)
    tl.store(D_HALVES + row * 2 * F + F + at, d_value.to(D_HALVES.dtype.element_ty), mask=mask)


def norm_options(width: int) -> dict[str, int]:
    """Constants and warps of the forward for rows of `width`: a row is one tile, of about 8 elements a thread."""
    block = triton.next_power_of_2(width)
    return {"M": width, "BLOCK_M": block, "num_warps": max(1, min(16, block // 256))}


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, M), branch (T, M) or None, weight (M) in float32 -> (total, normalised, rstd); all are contiguous.

    total       x + branch in x's dtype; without a branch x itself
    normalised  total over its root mean square, times weight, in `dtype`
    rstd        one over the root mean square, (T) in float32
    """
    total = x if branch is None else torch.empty_like(x)
    normalised = torch.empty_like(x, dtype=dtype)
    rstd = torch.empty(len(x), dtype=torch.float32, device=x.device)
    launch(
        _add_norm_forward_kernel, len(x), x, x if branch is None else branch, weight, total, normalised, rstd, eps,
        **norm_options(x.shape[-1]), ADDS=branch is not None,
    )  # fmt: skip
    return total, normalised, rstd


def add_norm_backward(
    d_normalised: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dx (T, M) in the dtype of `total`, the gradient of the branch or None, d_weight (M) in float32).

    d_normalised  (T, M) the gradient of `normalised`
    d_total       (T, M) the gradient of the sum itself; None: nothing else has read the sum
    total, rstd   results of `add_norm`
    dtype         of the branch, whose gradient is dx in this dtype; None: there is no branch, and no gradient of it
    """
    dx = torch.empty_like(total)
    both = dtype not in (None, total.dtype)
    d_branch = torch.empty_like(total, dtype=dtype) if both else dx
    width = total.shape[-1]
    options = norm_backward_options(width)
    cores = torch.cuda.get_device_properties(total.device).multi_processor_count if total.is_cuda else 1
    programs = min(triton.cdiv(len(total), options["ROWS"]), WARPS // options["num_warps"] * cores)
    parts = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    launch(
        _add_norm_backward_kernel, programs, d_normalised, total if d_total is None else d_total, total, weight, rstd,
        dx, d_branch, parts, len(total), **options, ADDS=d_total is not None, BOTH=both,
    )  # fmt: skip
    return dx, None if dtype is None else d_branch, _sum_rows(parts)


def norm_backward_options(width: int) -> dict[str, int]:
    """Constants and warps of the backward for rows of `width`: tiles of whole rows, of about 8 elements a thread."""
    block = triton.next_power_of_2(width)
    at_once = max(1, NORM_BLOCK // block)
    return {"M": width, "BLOCK_M": block, "ROWS": at_once, "num_warps": min(16, at_once * block // 256)}


def _sum_rows(parts: Tensor) -> Tensor:
    """The sum of parts (P, M) over rows, (M). The order of the additions is fixed. torch.sum is much slower here."""
    num_rows, width = parts.shape
    rows = triton.next_power_of_2(num_rows)
    total = parts.new_empty(width)
    launch(
        _sum_rows_kernel, triton.cdiv(width, SUM_COLUMNS), parts, total, num_rows,
        M=width, BLOCK_M=SUM_COLUMNS, ROWS=rows, num_warps=max(1, min(16, rows * SUM_COLUMNS // 256)),
    )  # fmt: skip
    return total


def swiglu(halves: Tensor) -> Tensor:
    """halves (..., 2 F), gate and value -> gate · sigmoid(gate) · value (..., F), computed in float32.

    Tensors are contiguous. Loads are 16 bytes wide where a row of F elements is a multiple of that.
    """
    assert halves.shape[-1] % 2 == 0
    return _launch_swiglu(_swiglu_forward_kernel, halves, halves.new_empty(*halves.shape[:-1], halves.shape[-1] // 2))


def swiglu_backward(d_product: Tensor, halves: Tensor) -> Tensor:
    """The gradient of `halves` (..., 2 F), from that of the product (..., F)."""
    return _launch_swiglu(_swiglu_backward_kernel, d_product, halves, torch.empty_like(halves))


def _launch_swiglu(kernel: Any, *tensors: Tensor) -> Tensor:
    """Runs a kernel on tensors (..., F) and (..., 2 F), in the kernel's order; returns the last, which it writes."""
    width = min(x.shape[-1] for x in tensors)  # of the product
    options = swiglu_options(width)
    num_rows, parts = tensors[-1].numel() // tensors[-1].shape[-1], triton.cdiv(width, options["BLOCK"])
    launch(kernel, num_rows, *tensors, **options, grid_y=parts)
    return tensors[-1]


def swiglu_options(width: int) -> dict[str, int]:
    """Constants and warps of SwiGLU's kernels for rows of F = `width`: about 16 elements a thread."""
    block = min(SWIGLU_BLOCK, triton.next_power_of_2(width))
    return {"F": width, "BLOCK": block, "num_warps": max(1, block // 512)}


@triton.jit(do_not_specialize=["num_angles"])
def _rotate_kernel(
    HEADS, Q, K, V, COS, SIN, num_angles, H: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BACKWARD: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """A program rotates BLOCK_H of the heads of one token: those of q, then of k, then of v, which are only copied.

    num_angles: the rows of COS and SIN, S or B S. BACKWARD: it rotates back, reads Q, K and V, and writes HEADS.
    IN_PLACE: it reads and writes HEADS only, and leaves v alone.
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
    tl.store(target[:, None] + dim[None, :], tl.where((head < H + HKV)[:, None], turned, x), mask=mask)


@cache
def _blocks(total: int, head_dim: int) -> tuple[int, int, int]:
    """(heads of a tile, dimensions of a tile, tiles of a token) for `total` heads of a token."""
    block_d = triton.next_power_of_2(head_dim)
    block_h = max(1, min(triton.next_power_of_2(total), ROTATION_BLOCK // block_d))
    return block_h, block_d, triton.cdiv(total, block_h)


def turn(
    heads: Tensor, parts: tuple[Tensor, ...] | None, cos: Tensor, sin: Tensor, num_heads: int, *, backward: bool
) -> None:
    """Reads `heads`, rotates the pairs of q and k, and writes q, k and v into `parts`, which the caller has made.

    heads     (B, S, H + 2 Hkv, D): the heads of q, then of k, then of v
    parts     q (B, S, H, D), k and v (B, S, Hkv, D); None: q and k are rotated within heads, and v stays as it is
    cos, sin  (S, D / 2) or (B, S, D / 2), in float32 or float64
    backward  True: pairs are rotated back; with `parts`, these are read and `heads` is written
    All tensors are contiguous.
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
