"""The softmax of a row of logits in Triton: its loss, and its gradient in the place of the logits.

A program owns a row. One of up to TILE logits is read once, and stays in registers: as one tile, or as a large and a
small one, where two leave fewer places unused. Over a longer row the program walks twice.
The first pass finds the maximum and the sum; each lane keeps both for itself, so that warps meet once a row and not
once a tile. The second writes the gradient, from the end of the row to its beginning: what was read last lies in the L2
cache still, so memory sees about one read and one write of a logit.

Legend: C rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmsys.measure.profile import register_kernels

TILE = 2**14  # logits of a row at once
SMALLEST_TILE = 2**9
HELD_PER_THREAD, PASSED_PER_THREAD = 32, 16  # logits, of a row that is read once (of its first tile) and twice
# Of a thread that holds logits. The compiler would take up to 128, and half as many rows would be under way. Rows of
# 16,384 take 0.73 of the time on one H200, although some numbers spill; rows of 10,000 take 0.79, and none spills.
MAX_REGISTERS = 64
NUM_STAGES = 1  # stages of the loads: with more they go through shared memory
LOWEST = tl.constexpr(-3e38)  # finite: a lane that sees nothing but -inf must not take the difference of two

register_kernels(r"^_cross_entropy_kernel$", "reduction")


@triton.jit
def _load(row_ptr, cols, stride, V):
    """Loads in float32, and -inf from V on: up to the row's stride memory is read too, so that loads are wide."""
    x = tl.load(row_ptr + cols, mask=cols < stride, other=0.0)
    return tl.where(cols < V, x.to(tl.float32), float("-inf"))


@triton.jit
def _store_gradient(row_ptr, cols, p, label, counted, stride):
    gradient = tl.where(counted, p - tl.where(cols == label, 1.0, 0.0), 0.0)
    tl.store(row_ptr + cols, gradient.to(row_ptr.dtype.element_ty), mask=cols < stride)


@triton.jit(do_not_specialize=["V"])
def _cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, stride, V,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, VECTOR: tl.constexpr, ONE_READ: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK logits are a tile; REST are a second one of a row that is read once, if that is not 0."""
    row = tl.program_id(0).to(tl.int64)  # C x V may pass 2**31
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    counted, is_class = label != IGNORED, (label >= 0) & (label < V)
    # Before the second pass overwrites it: the reductions between wait for all warps.
    chosen = tl.load(logits_ptr + label, mask=is_class, other=0.0).to(tl.float32)
    if ONE_READ:
        label = label.to(tl.int32)  # which each of the columns is compared with
        tile = tl.arange(0, BLOCK)
        if REST:  # the first tile is full
            second = BLOCK + tl.arange(0, REST)
            x, y = tl.load(logits_ptr + tile).to(tl.float32), _load(logits_ptr, second, stride, V)
            row_top = tl.maximum(tl.maximum(tl.max(x), tl.max(y)), LOWEST)
            x, y = tl.exp(x - row_top), tl.exp(y - row_top)
            row_total = tl.sum(x) + tl.sum(y)
        else:
            x = _load(logits_ptr, tile, stride, V)
            row_top = tl.maximum(tl.max(x), LOWEST)
            x = tl.exp(x - row_top)
            row_total = tl.sum(x)
    else:
        LANES: tl.constexpr = BLOCK // VECTOR
        tile = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # a lane's share: one wide load
        top = tl.full([LANES], LOWEST, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=NUM_STAGES):
            x = _load(logits_ptr, start + tile, stride, V)
            new_top = tl.maximum(top, tl.max(x, 1))
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top[:, None]), 1)
            top = new_top
        row_top = tl.max(top, 0)
        row_total = tl.sum(total * tl.exp(top - row_top), 0)
    row_total = tl.where(is_class, row_total, float("nan"))  # and with it a row that counts without being of a class
    tl.store(losses_ptr + row, tl.where(counted, row_top - chosen + tl.log(row_total), 0.0))
    if ONE_READ:
        _store_gradient(logits_ptr, tile, x * (1 / row_total), label, counted, stride)
        if REST:
            _store_gradient(logits_ptr, second, y * (1 / row_total), label, counted, stride)
    else:
        last = (V - 1) // BLOCK * BLOCK
        for done in tl.range(0, V, BLOCK, num_stages=NUM_STAGES):
            cols = last - done + tile
            p = tl.exp(_load(logits_ptr, cols, stride, V) - row_top) * (1 / row_total)
            _store_gradient(logits_ptr, cols, p, label, counted, stride)


def options(vocabulary: int, vector: int) -> dict[str, int]:
    """How the kernel runs for rows of so many logits, of which `vector` are 16 bytes: constants, and the compiler's."""
    one_read = vocabulary <= TILE
    tile, rest = _tiles(vocabulary) if one_read else (TILE, 0)
    num_warps = max(1, tile // (32 * (HELD_PER_THREAD if one_read else PASSED_PER_THREAD)))
    found = {"BLOCK": tile, "REST": rest, "VECTOR": vector, "ONE_READ": one_read, "NUM_STAGES": NUM_STAGES}
    capped = one_read and torch.version.hip is None  # an option of NVIDIA's compiler alone
    return found | {"num_warps": num_warps} | ({"maxnreg": MAX_REGISTERS} if capped else {})


def _tiles(vocabulary: int) -> tuple[int, int]:
    """The sizes of one tile or two, powers of two, that hold a row; one where two would be as large together."""
    whole = max(SMALLEST_TILE, triton.next_power_of_2(vocabulary))
    first = whole // 2
    rest = max(SMALLEST_TILE, triton.next_power_of_2(max(1, vocabulary - first)))
    return (first, rest) if rest < first else (whole, 0)


def replace_by_gradient(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """The loss of each row (C,) in float32, 0 where its label is `ignored`; `logits` (C, V) become its gradient.

    The logits are float32, float16 or bfloat16, of unit stride within a row; what lies between two rows is overwritten.
    The labels (C,) are classes; a row whose label is none, and not `ignored`, becomes NaN.
    """
    (num_rows, vocabulary), stride = logits.shape, logits.stride(0)
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    given = options(vocabulary, 16 // logits.element_size())
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(num_rows,)](
            logits, labels.contiguous(), losses, stride, vocabulary, IGNORED=ignored, **given
        )
    return losses
