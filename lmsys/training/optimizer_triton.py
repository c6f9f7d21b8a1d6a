"""One AdamW step of many float32 tensors in Triton, for `optimizer.AdamW`, and the sums of `reproducible.exact_norm`.

optimizer.py makes a `FusedAdamW` and calls its `step`; reproducible.py calls `whole_squares`. The formulas of a step
are in `_update`: it must equal torch's AdamW but for rounding, since optimizer.py calls that for all other tensors.

A launch takes any number of tensors. A program owns a block of elements of one tensor, and finds it by four tables:

    ADDRESSES  where each tensor begins in memory
    SIZES      the number of elements of each tensor
    OWNERS     the tensor of each program
    CHUNKS     the number of each program's block within its tensor (`chunks_of` makes the last three)

A step is two kernels: one counts the step and computes rates, the other updates everything. The second reads 16 and
writes 12 bytes for each parameter, and takes the time of this traffic. Its arithmetic is float32 with IEEE division and
square root; the bias corrections 1 - βᵗ are computed in float64, since float32 would lose digits in the subtraction.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
import triton
import triton.language as tl

from lmsys.measure.profile import register_kernels

# 8 elements for each thread. On an H200 (4.8 TB/s) the step moves 3.80 TB/s; with 2048 elements 3.72, with 4096 3.40.
BLOCK, NUM_WARPS = 1024, 4
SQUARES_BLOCK = 4096  # elements of a program of `whole_squares`
# Rows of ADDRESSES in a step, (6, num_tensors) int64: parameter, gradient, the two moments, rounded copy (0 if there is
# none) and step counter. `FusedAdamW.step` lists the addresses in this order.
P, G, M, V, COPY, STEP = (tl.constexpr(row) for row in range(6))
COPIES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # dtypes of the rounded copies of parameters

# The kinds that a profile counts the kernels as.
register_kernels(r"^_adamw_(rates_)?kernel$", "elementwise")
register_kernels(r"^_whole_squares_kernel$", "reduction")


@triton.jit
def _block(SIZES, OWNERS, CHUNKS, BLOCK: tl.constexpr):
    """The elements that this program owns: (tensor, first element, elements of the tensor from there, 0 to BLOCK - 1).

    SIZES, OWNERS, CHUNKS  the tables of `chunks_of`
    """
    tensor = tl.load(OWNERS + tl.program_id(0))
    first = tl.load(CHUNKS + tl.program_id(0)).to(tl.int64) * BLOCK
    return tensor, first, tl.load(SIZES + tensor) - first, tl.arange(0, BLOCK)


@triton.jit
def _address(
    ADDRESSES, row: tl.constexpr, tensor, num_tensors, ALIGNED: tl.constexpr, dtype: tl.constexpr = tl.float32
):
    """The pointer to the first element of a tensor, from any row of the table except STEP.

    ALIGNED  True: all tensors of these rows begin at multiples of 16 bytes
    """
    pointer = tl.load(ADDRESSES + row * num_tensors + tensor).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _adamw_rates_kernel(ADDRESSES, RATES, FOUND_INF, num_tensors, lr, log2_beta1, log2_beta2, BLOCK_N: tl.constexpr):
    """Adds 1 to every step counter, and leaves lr / (1 - β1ᵗ) and 1 / √(1 - β2ᵗ) in RATES (2, num_tensors).

    FOUND_INF               None, or GradScaler's scalar: if it is 1, the step is skipped
    log2_beta1, log2_beta2  base-2 logarithms of β1 and β2, so that βᵗ is 2 to the power of t times these
    """
    if FOUND_INF is not None:  # noqa: SIM102  Triton would evaluate both sides of an `and`
        if tl.load(FOUND_INF) == 1:
            return
    tensor = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = tensor < num_tensors
    counter = tl.load(ADDRESSES + STEP * num_tensors + tensor, mask=mask).to(tl.pointer_type(tl.float32))
    step = tl.load(counter, mask=mask, other=0.0) + 1
    tl.store(counter, step, mask=mask)
    wide = step.to(tl.float64)
    tl.store(RATES + tensor, lr / (1 - tl.exp2(wide * log2_beta1)), mask=mask)
    tl.store(RATES + num_tensors + tensor, 1 / tl.sqrt(1 - tl.exp2(wide * log2_beta2)), mask=mask)


@triton.jit
def _update(
    p_at, g_at, m_at, v_at, copy_at, copied, mask, GRAD_SCALE, FACTOR,
    rate, root, decay, beta1, rest1, beta2, rest2, eps,
):  # fmt: skip
    """Steps the elements at the pointers p_at to v_at, and writes their rounded copy to copy_at if `copied`.

    rate, root  lr / (1 - β1ᵗ) and 1 / √(1 - β2ᵗ) of this tensor, from RATES; the others as in `_adamw_kernel`
    """
    p, m, v = tl.load(p_at, mask=mask), tl.load(m_at, mask=mask), tl.load(v_at, mask=mask)
    g = tl.load(g_at, mask=mask)
    if GRAD_SCALE is not None:
        g = tl.div_rn(g, tl.load(GRAD_SCALE))
        tl.store(g_at, g, mask=mask)
    if FACTOR is not None:
        g *= tl.load(FACTOR)
    m = beta1 * m + rest1 * g
    v = beta2 * v + (rest2 * g) * g  # in this order: the square of 1e20 is beyond float32, 0.001 of it is not
    p -= decay * p
    p -= tl.div_rn(rate * m, tl.sqrt_rn(v) * root + eps)
    tl.store(p_at, p, mask=mask)
    tl.store(m_at, m, mask=mask)
    tl.store(v_at, v, mask=mask)
    if copy_at is not None:  # noqa: SIM102  Triton would evaluate both sides of an `and`
        if copied:
            tl.store(copy_at, p.to(copy_at.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(
    ADDRESSES, SIZES, OWNERS, CHUNKS, RATES, GRAD_SCALE, FACTOR, FOUND_INF, num_tensors,
    decay, beta1, rest1, beta2, rest2, eps, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, COPY_DTYPE: tl.constexpr,
):  # fmt: skip
    """Steps the block of elements that this program owns.

    decay                  lr weight_decay
    rest1, rest2           1 - β1 and 1 - β2
    GRAD_SCALE, FOUND_INF  GradScaler's scalars, or None: gradients are divided by GRAD_SCALE, in memory too
    FACTOR                 a scalar by which gradients are multiplied as they are read, but not in memory; or None
    COPY_DTYPE             the dtype of rounded copies of parameters, which are written where their address is not 0;
                           None if no parameter has a copy
    """
    if FOUND_INF is not None:  # noqa: SIM102  Triton would evaluate both sides of an `and`
        if tl.load(FOUND_INF) == 1:
            return
    tensor, first, left, within = _block(SIZES, OWNERS, CHUNKS, BLOCK)
    p = _address(ADDRESSES, P, tensor, num_tensors, ALIGNED) + first + within
    g = _address(ADDRESSES, G, tensor, num_tensors, ALIGNED) + first + within
    m = _address(ADDRESSES, M, tensor, num_tensors, ALIGNED) + first + within
    v = _address(ADDRESSES, V, tensor, num_tensors, ALIGNED) + first + within
    copy, copied = None, False
    if COPY_DTYPE is not None:
        copied = tl.load(ADDRESSES + COPY * num_tensors + tensor) != 0
        copy = _address(ADDRESSES, COPY, tensor, num_tensors, ALIGNED, COPY_DTYPE) + first + within
    rate, root = tl.load(RATES + tensor), tl.load(RATES + num_tensors + tensor)
    if left >= BLOCK:  # a full block needs no mask; Triton makes loads 16 bytes wide only without one
        _update(p, g, m, v, copy, copied, None, GRAD_SCALE, FACTOR, rate, root, decay, beta1, rest1, beta2, rest2, eps)
    else:
        _update(
            p, g, m, v, copy, copied, within < left, GRAD_SCALE, FACTOR, rate, root, decay, beta1, rest1, beta2, rest2,
            eps,
        )  # fmt: skip


class FusedAdamW:
    """The AdamW step of one list of contiguous float32 tensors on one device, whose shapes do not change.

    It holds the tables that the kernels read: the size of each tensor, its blocks, and addresses.
    """

    def __init__(self, params: list[torch.Tensor]) -> None:
        device = params[0].device
        self.sizes, self.owners, self.chunks = chunks_of(tuple(p.numel() for p in params), BLOCK, device)
        self.rates = torch.empty(2, len(params), device=device)
        self._addresses: list[int] = []  # those of `_table`, which `_locate` makes

    def step(
        self,
        lists: tuple[list[torch.Tensor], ...],
        copies: Sequence[torch.Tensor | None],
        group: dict[str, Any],
        scale: Any,
        found_inf: Any,
        factor: Any,
    ) -> None:
        """Updates everything in place. The host does not wait.

        lists             parameters, gradients, exp_avgs, exp_avg_sqs and step counters
        copies            for each parameter None, or a contiguous copy that is written too; all copies have one dtype
        group             the param group, with lr, betas, eps and weight_decay
        scale, found_inf  GradScaler's scalar tensors, or None
        factor            multiplies gradients as they are read: a scalar tensor or None
        """
        *updated, counters = lists
        written = [copy for copy in copies if copy is not None]
        places = [0 if copy is None else copy.data_ptr() for copy in copies]
        self._locate([*map(torch.Tensor.data_ptr, chain(*updated)), *places, *map(torch.Tensor.data_ptr, counters)])
        num_tensors, (beta1, beta2), lr = len(self.sizes), group["betas"], float(group["lr"])
        logs = (math.log2(beta) if beta else -math.inf for beta in (beta1, beta2))
        with torch.cuda.device_of(self.rates):
            _adamw_rates_kernel[(triton.cdiv(num_tensors, 128),)](
                self._table, self.rates, found_inf, num_tensors, lr, *logs, BLOCK_N=128
            )
            if len(self.owners):
                _adamw_kernel[(len(self.owners),)](
                    self._table, self.sizes, self.owners, self.chunks, self.rates, scale, factor, found_inf,
                    num_tensors, lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, group["eps"],
                    BLOCK=BLOCK, ALIGNED=self._aligned, COPY_DTYPE=COPIES[written[0].dtype] if written else None,
                    num_warps=NUM_WARPS,
                )  # fmt: skip
        torch.autograd.graph.increment_version([*chain(*lists), *written])  # as torch's kernels do

    def _locate(self, addresses: list[int]) -> None:
        """Writes the table of addresses anew if they have changed, as gradients' do from step to step.

        The copy may still read pinned memory when this returns; torch's allocator reuses it only after the copy.
        """
        if addresses == self._addresses:
            return
        # Step counters, which are scalars, need no alignment. The bitwise or is a multiple of 16 if every address is.
        self._addresses, self._aligned = addresses, reduce(or_, addresses[: -len(self.sizes)]) % 16 == 0
        table = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.rates.is_cuda)
        self._table = table.to(self.rates.device, non_blocking=True)


@triton.jit
def _whole_squares_kernel(ADDRESSES, SIZES, OWNERS, CHUNKS, SCALES, SUMS, BLOCK: tl.constexpr):
    """Adds the two sums of `whole_squares` over the block that this program owns to SUMS (2,).

    The numbers are whole, and their sum is the same in any order, so programs may add to one place as they end.
    ADDRESSES (num_tensors) int64 are those of the tensors; SCALES is `scales`.
    """
    tensor, first, left, within = _block(SIZES, OWNERS, CHUNKS, BLOCK)
    x_at = tl.load(ADDRESSES + tensor).to(tl.pointer_type(tl.float32)) + first + within
    x = tl.load(x_at, mask=within < left, other=0.0).to(tl.float64)
    scaled = x * x * tl.load(SCALES)
    whole = scaled.to(tl.int64)
    rest = (scaled - whole.to(tl.float64)) * tl.load(SCALES + 1)
    tl.atomic_add(SUMS, tl.sum(whole))
    tl.atomic_add(SUMS + 1, tl.sum(rest.to(tl.int64)))


def whole_squares(tensors: Sequence[torch.Tensor], scales: torch.Tensor) -> torch.Tensor:
    """The sums (2,) int64 of `lmsys.training.reproducible._whole_squares`, which says what they are.

    tensors  float32 and contiguous
    scales   (2,) float64, on their device
    """
    device = scales.device
    sizes, owners, chunks = chunks_of(tuple(x.numel() for x in tensors), SQUARES_BLOCK, device)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    addresses = torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64, pin_memory=scales.is_cuda)
    with torch.cuda.device_of(scales):
        _whole_squares_kernel[(len(owners),)](
            addresses.to(device, non_blocking=True), sizes, owners, chunks, scales, sums, BLOCK=SQUARES_BLOCK,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return sums


@lru_cache(16)
def chunks_of(
    sizes: tuple[int, ...], block: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tables of the chunks of `block` elements that tensors of these `sizes` have, on the device.

    They are (elements of each tensor, each chunk's tensor, each chunk's number within its tensor).
    """
    elements = torch.tensor(sizes)
    counts = (elements + block - 1) // block
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    numbers = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]  # 0, 1, ... in each tensor
    on_cuda = device.type == "cuda"  # from pinned memory the host copies without waiting for the GPU
    elements, owners, numbers = (
        (table.pin_memory() if on_cuda else table).to(device, non_blocking=on_cuda)
        for table in (elements, owners.int(), numbers.int())
    )
    return elements, owners, numbers
