"""The loss of rows of logits in Triton, with the gradient in the place of the logits: the kernel of loss.py on CUDA.

`_replace_by_gradient` of loss.py calls `replace_by_gradient`. A program computes one row, the logits of one token. A
row of up to TILE logits is read once, and stays in registers: as one tile, or as a large and a small tile, where two
have fewer unused elements. A longer row is read twice. The first pass finds the maximum and the sum; each lane keeps
both for itself, so that warps communicate once a row and not once a tile. The second pass writes the gradient, from the
end of the row to its beginning: the logits that were read last are still in the L2 cache, so each logit is read from
memory and written to it about once. Soft cap, label smoothing, z-loss and factors of the gradients are applied on the
way; an option that is None costs nothing. Sizes of tiles are chosen in `row_options`; loss.py says what a new option
needs.

Legend: C rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from lmsys.attention.flash_triton_kernels import _tanh
from lmsys.measure.profile import register_kernels
from lmsys.model.loss import LossOptions

TILE = 2**14  # the most logits of a tile
SMALLEST_TILE = 2**9  # the fewest logits of a tile
HELD_PER_THREAD, PASSED_PER_THREAD = 32, 16  # logits of a tile per thread: in a row read once, in a row read twice
# Registers of a thread, for rows read once. The compiler would take up to 128, and half as many rows would run at once.
# With this limit rows of 16,384 take 0.73 of the time on one H200, although some registers spill; rows of 10,000, of
# which none spill, take 0.79.
MAX_REGISTERS = 64
NUM_STAGES = 1  # pipeline stages of the loads: with more than one, loads go through shared memory
LOWEST = tl.constexpr(-3e38)  # finite: a lane that sees nothing but -inf must not compute -inf - (-inf)

register_kernels(r"^_cross_entropy_kernel$", "reduction")


@triton.jit
def _ratio(x, softcap):
    """A logit's *ratio*, in which form the kernel holds it: the logit itself, or with a soft cap tanh(x / softcap)."""
    return x.to(tl.float32) if softcap is None else _tanh(x.to(tl.float32) / softcap)


@triton.jit
def _capped(x, softcap):
    """The logit that a ratio stands for, after the soft cap if there is one."""
    return x if softcap is None else softcap * x


@triton.jit
def _load(row_ptr, cols, stride, V, softcap):
    """Ratios in float32; -inf for columns from V on. Memory up to the row's stride is read, so that loads are wide."""
    x = tl.load(row_ptr + cols, mask=cols < stride, other=0.0)
    return tl.where(cols < V, _ratio(x, softcap), float("-inf"))


@triton.jit
def _store_gradient(row_ptr, cols, x, p, label, counted, stride, V, label_smoothing, softcap, factors_ptr, row):
    """Writes the gradient in the place of logits. x are their ratios, p their probabilities, scaled for a z-loss."""
    gradient = p - tl.where(cols == label, 1.0, 0.0)
    if label_smoothing is not None:
        gradient += tl.where(cols < V, label_smoothing * (tl.where(cols == label, 1.0, 0.0) - 1.0 / V), 0.0)
    if softcap is not None:
        gradient *= tl.where(cols < V, (1.0 - x) * (1.0 + x), 0.0)
    if factors_ptr is not None:  # None saves this load, for which the end of each row would wait
        gradient *= tl.load(factors_ptr + row)
    gradient = tl.where(counted, gradient, 0.0)
    tl.store(row_ptr + cols, gradient.to(row_ptr.dtype.element_ty), mask=cols < stride)


@triton.jit(do_not_specialize=["V"])
def _cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, lses_ptr, factors_ptr, stride, V, label_smoothing, z_loss, softcap,
    IGNORED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, VECTOR: tl.constexpr,
    ONE_READ: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A program writes the loss of its row, with a z-loss also the log-sum-exp, and with GRADIENT the gradient.

    The gradient replaces the logits. IGNORED: the label of rows that count for nothing.
    ONE_READ: a row is read once. BLOCK: the logits of a tile. REST: those of the second tile of a row that is read
    once; 0: there is none. VECTOR: the logits of a lane's wide load, in a row that is read twice.
    row_top, row_total: the largest logit, the sum of exp(logit - row_top). row_sum: of the logits, for label smoothing.
    """
    row = tl.program_id(0).to(tl.int64)  # C x V may pass 2**31
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    counted, is_class = label != IGNORED, (label >= 0) & (label < V)
    # The target's logit, read before the second pass overwrites it: the reductions between wait for all warps.
    chosen = _capped(_ratio(tl.load(logits_ptr + label, mask=is_class, other=0.0), softcap), softcap)
    if ONE_READ:
        label = label.to(tl.int32)  # of the columns' type, since all of them are compared with it
        tile = tl.arange(0, BLOCK)
        if REST:  # the first tile is full
            second = BLOCK + tl.arange(0, REST)
            x, y = _ratio(tl.load(logits_ptr + tile), softcap), _load(logits_ptr, second, stride, V, softcap)
            row_top = tl.maximum(_capped(tl.maximum(tl.max(x), tl.max(y)), softcap), LOWEST)
            p, q = tl.exp(_capped(x, softcap) - row_top), tl.exp(_capped(y, softcap) - row_top)
            row_total = tl.sum(p) + tl.sum(q)
            row_sum = _capped(tl.sum(x) + tl.sum(tl.where(second < V, y, 0.0)), softcap)
        else:
            x = _load(logits_ptr, tile, stride, V, softcap)
            row_top = tl.maximum(_capped(tl.max(x), softcap), LOWEST)
            p = tl.exp(_capped(x, softcap) - row_top)
            row_total = tl.sum(p)
            row_sum = _capped(tl.sum(tl.where(tile < V, x, 0.0)), softcap)
    else:
        LANES: tl.constexpr = BLOCK // VECTOR
        tile = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # a lane's share: one wide load
        top = tl.full([LANES], LOWEST, tl.float32)
        total, sums = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=NUM_STAGES):
            x = _capped(_load(logits_ptr, start + tile, stride, V, softcap), softcap)
            new_top = tl.maximum(top, tl.max(x, 1))
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top[:, None]), 1)
            top = new_top
            sums += tl.sum(tl.where(start + tile < V, x, 0.0), 1)
        row_top = tl.max(top, 0)
        row_total = tl.sum(total * tl.exp(top - row_top), 0)
        row_sum = tl.sum(sums, 0)
    row_total = tl.where(is_class, row_total, float("nan"))  # makes the loss NaN where the label is no class
    loss, lse, scale = row_top - chosen + tl.log(row_total), row_top + tl.log(row_total), 1 / row_total
    if label_smoothing is not None:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (lse - row_sum / V)
    if z_loss is not None:
        scale *= 1.0 + 2.0 * z_loss * lse
        tl.store(lses_ptr + row, tl.where(counted, lse, 0.0))
    tl.store(losses_ptr + row, tl.where(counted, loss, 0.0))
    if GRADIENT:
        if ONE_READ:
            _store_gradient(
                logits_ptr, tile, x, p * scale, label, counted, stride, V, label_smoothing, softcap, factors_ptr, row
            )
            if REST:
                _store_gradient(
                    logits_ptr, second, y, q * scale, label, counted, stride, V, label_smoothing, softcap,
                    factors_ptr, row,
                )  # fmt: skip
        else:
            last = (V - 1) // BLOCK * BLOCK
            for done in tl.range(0, V, BLOCK, num_stages=NUM_STAGES):
                cols = last - done + tile
                x = _load(logits_ptr, cols, stride, V, softcap)
                p = tl.exp(_capped(x, softcap) - row_top) * scale
                _store_gradient(
                    logits_ptr, cols, x, p, label, counted, stride, V, label_smoothing, softcap, factors_ptr, row
                )


def row_options(vocabulary: int, vector: int) -> dict[str, int]:
    """Constants, warps and registers of the kernel for rows of `vocabulary` logits. vector: logits in 16 bytes."""
    one_read = vocabulary <= TILE
    tile, rest = _tiles(vocabulary) if one_read else (TILE, 0)
    num_warps = max(1, tile // (32 * (HELD_PER_THREAD if one_read else PASSED_PER_THREAD)))
    constants = {"BLOCK": tile, "REST": rest, "VECTOR": vector, "ONE_READ": one_read, "NUM_STAGES": NUM_STAGES}
    capped = one_read and torch.version.hip is None  # an option of NVIDIA's compiler alone
    return constants | {"num_warps": num_warps} | ({"maxnreg": MAX_REGISTERS} if capped else {})


def _tiles(vocabulary: int) -> tuple[int, int]:
    """(BLOCK, REST): powers of two that together hold a row; REST is 0 where a second tile would save nothing."""
    whole = max(SMALLEST_TILE, triton.next_power_of_2(vocabulary))
    first = whole // 2
    rest = max(SMALLEST_TILE, triton.next_power_of_2(max(1, vocabulary - first)))
    return (first, rest) if rest < first else (whole, 0)


def replace_by_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    factors: torch.Tensor | None,
    options: LossOptions,
    gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, log-sum-exps) of the rows, each (C,) in float32 and 0 where ignored.

    Without a z-loss nothing writes the log-sum-exps, and their values mean nothing.

    logits    (C, V) float32, float16 or bfloat16, of unit stride within a row; what lies between rows is overwritten
    labels    (C,) classes; a row whose label is no class and not the ignored one becomes NaN
    factors   (C,) contiguous; None: 1 for each row
    gradient  logits become the gradient of the sum of losses · factors, which includes z-losses
    """
    num_rows, vocabulary = logits.shape
    stride = logits.stride(0) if num_rows > 1 else vocabulary  # torch may give a single row a stride beyond its memory
    losses, lses = torch.empty(2, num_rows, dtype=torch.float32, device=logits.device)
    given = row_options(vocabulary, 16 // logits.element_size())
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(num_rows,)](
            logits, labels.contiguous(), losses, lses, factors, stride, vocabulary,
            options.label_smoothing or None, options.z_loss or None, options.softcap,
            IGNORED=options.ignore_index, GRADIENT=gradient, **given,
        )  # fmt: skip
    return losses, lses
