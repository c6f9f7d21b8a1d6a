"""Addition and norm, and SwiGLU's product, in Triton: each reads and writes an element once, forward and backward.

Legend: T tokens, M d_model, N elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmsys.kernels.launch import launch
from lmsys.measure.profile import register_kernels

PROGRAMS = 8  # a multiprocessor, of the backward of a norm: each sums its rows' part of the weight's gradient
BLOCK = 2048  # elements of a program of SwiGLU

register_kernels(r"^_(add_norm|swiglu)_(forward|backward)_kernel$", "elementwise")


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
        x = x.to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + row + at, x, mask=mask)
        x = x.to(tl.float32)
    rstd = 1 / tl.sqrt_rn(tl.sum(x * x) / M + eps)
    tl.store(RSTD + tl.program_id(0), rstd)
    y = x * rstd * tl.load(WEIGHT + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(NORMALISED + row + at, y.to(NORMALISED.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_backward_kernel(
    D_NORMALISED, D_TOTAL, TOTAL, WEIGHT, RSTD, DX, D_BRANCH, D_WEIGHT, num_rows,
    M: tl.constexpr, BLOCK_M: tl.constexpr, ADDS: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """A program owns some rows, one after another. ADDS: the sum's own gradient is added. BOTH: the gradient is written
    in the branch's dtype as well."""
    at = tl.arange(0, BLOCK_M)
    mask = at < M
    weight = tl.load(WEIGHT + at, mask=mask, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK_M], tl.float32)
    number = tl.program_id(0).to(tl.int64)
    for _ in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = number * M
        dy = tl.load(D_NORMALISED + row + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + number)
        x = tl.load(TOTAL + row + at, mask=mask, other=0.0).to(tl.float32) * rstd
        d_weight += dy * x
        dy *= weight
        dx = rstd * (dy - x * (tl.sum(dy * x) / M))
        if ADDS:
            dx += tl.load(D_TOTAL + row + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(DX + row + at, dx.to(DX.dtype.element_ty), mask=mask)
        if BOTH:
            tl.store(D_BRANCH + row + at, dx.to(D_BRANCH.dtype.element_ty), mask=mask)
        number += tl.num_programs(0)
    tl.store(D_WEIGHT + tl.program_id(0).to(tl.int64) * M + at, d_weight, mask=mask)


@triton.jit(do_not_specialize=["num_elements"])
def _swiglu_forward_kernel(GATE, VALUE, PRODUCT, num_elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_elements
    gate = tl.load(GATE + at, mask=mask, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * tl.load(VALUE + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(PRODUCT + at, product.to(PRODUCT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_elements"])
def _swiglu_backward_kernel(D_PRODUCT, GATE, VALUE, D_GATE, D_VALUE, num_elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_elements
    gate = tl.load(GATE + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(VALUE + at, mask=mask, other=0.0).to(tl.float32)
    d_product = tl.load(D_PRODUCT + at, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate = d_product * value * share * (1 + gate * (1 - share))
    tl.store(D_GATE + at, d_gate.to(D_GATE.dtype.element_ty), mask=mask)
    tl.store(D_VALUE + at, (d_product * gate * share).to(D_VALUE.dtype.element_ty), mask=mask)


def _tile(width: int) -> dict[str, int]:
    """A row in one tile, of about 8 elements a thread."""
    block = triton.next_power_of_2(width)
    return {"M": width, "BLOCK_M": block, "num_warps": max(1, min(16, block // 256))}


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, M), branch (T, M) or None, weight (M) in float32 -> x + branch in x's dtype, which is x itself without one;
    that over its root mean square, times weight, in `dtype`; and one over the root mean square (T) in float32. All are
    contiguous."""
    total = x if branch is None else torch.empty_like(x)
    normalised = torch.empty_like(x, dtype=dtype)
    rstd = torch.empty(len(x), dtype=torch.float32, device=x.device)
    given = x, x if branch is None else branch, weight, total, normalised, rstd, eps
    launch(_add_norm_forward_kernel, len(x), *given, **_tile(x.shape[-1]), ADDS=branch is not None)
    return total, normalised, rstd


def add_norm_backward(
    d_normalised: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """-> dx (T, M) in the dtype of `total`; the same in `dtype`, that of the branch, or None for none; d_weight (M)."""
    dx = torch.empty_like(total)
    both = dtype not in (None, total.dtype)
    d_branch = torch.empty_like(total, dtype=dtype) if both else dx
    cores = torch.cuda.get_device_properties(total.device).multi_processor_count if total.is_cuda else 1
    programs = min(len(total), PROGRAMS * cores)
    d_weight = torch.empty(programs, total.shape[-1], dtype=torch.float32, device=total.device)
    given = d_normalised, total if d_total is None else d_total, total, weight, rstd, dx, d_branch, d_weight
    options = _tile(total.shape[-1]) | {"ADDS": d_total is not None, "BOTH": both}
    launch(_add_norm_backward_kernel, programs, *given, len(total), **options)
    return dx, None if dtype is None else d_branch, d_weight.sum(0)


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """gate · sigmoid(gate) · value, of one shape and dtype and contiguous; computed in float32."""
    product = torch.empty_like(gate)
    launch(_swiglu_forward_kernel, triton.cdiv(gate.numel(), BLOCK), gate, value, product, gate.numel(), BLOCK=BLOCK)
    return product


def swiglu_backward(d_product: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    d_gate, d_value = torch.empty_like(gate), torch.empty_like(value)
    given = d_product, gate, value, d_gate, d_value, gate.numel()
    launch(_swiglu_backward_kernel, triton.cdiv(gate.numel(), BLOCK), *given, BLOCK=BLOCK)
    return d_gate, d_value
