"""FlashAttention-2 in Triton: one forward kernel, and a backward of two that needs no atomics.

Forward (Dao 2023, arXiv 2307.08691, Algorithm 1): a program owns a tile of queries and walks over the keys
that it sees; o and the log-sum-exp leave the chip once. Backward (Algorithm 2) in two passes that recompute
P: `_dq_kernel` owns query tiles, `_dkdv_kernel` owns key tiles, so every sum has one owner and one order,
and repeats are bitwise equal. The price is 7 matmuls in place of 5.

Choices, each measured on one H200 with bfloat16 inputs:
- All tiles, and the row vectors of the backward, move through tensor descriptors (TMA on Hopper; Triton
  lowers them to plain loads elsewhere). Descriptors also zero-fill what lies outside, so no length needs to
  be a multiple of a tile. Loading the row vectors by pointers cost up to 70 registers and spilled.
- One loop, with the mask under a branch, instead of a masked and an unmasked loop: fewer registers, one prologue.
- `_dq_kernel` runs first and leaves delta = rowsum(o * do) and the log-sum-exp, in base 2 and padded, to the other.
- Longest rows first when causal, in groups of heads whose keys and values stay in L2 together.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

import math
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lmsys.attention.contract import AttentionCase
from lmsys.attention.flash_torch import backward_here
from lmsys.attention.operators import attend, function, operator
from lmsys.attention.tuning import Tile, candidates, tune
from lmsys.operator import launch

INTERPRETED = triton.knobs.runtime.interpret
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
HEADS_AT_ONCE = tl.constexpr(8)
ROW_PADDING = 128  # of delta and the log-sum-exp: a multiple of every BLOCK_Q
RUNTIME_SIZES = ["num_heads", "H", "Q", "Q_PADDED", "K", "num_tiles"]  # one binary for all lengths


@triton.jit
def _owned_tile(num_heads, num_tiles):
    """(head, tile) of this program: within HEADS_AT_ONCE heads, tile 0 of each, then tile 1 of each ..."""
    program = tl.program_id(0)
    first_head = program // (HEADS_AT_ONCE * num_tiles) * HEADS_AT_ONCE
    heads = tl.minimum(HEADS_AT_ONCE, num_heads - first_head)
    within = program - first_head * num_tiles
    return first_head + within % heads, within // heads


@triton.jit
def _load(desc, batch, head, start, BLOCK: tl.constexpr, D: tl.constexpr):
    return desc.load([batch, head, start, 0]).reshape(BLOCK, D)


@triton.jit
def _store(desc, batch, head, start, tile, BLOCK: tl.constexpr, D: tl.constexpr):
    desc.store([batch, head, start, 0], tile.to(desc.dtype).reshape(1, 1, BLOCK, D))


@triton.jit
def _add_dot(acc, a, b, PRECISION: tl.constexpr):
    """acc + a b. In float32 each tile is summed apart: 65,536 roundings one after another would be too many."""
    if a.dtype == tl.float32:
        acc -= tl.dot(-a, b, input_precision=PRECISION)  # a plain sum would be folded into the dot
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _key_range(row, K, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Queries [row, row + BLOCK_Q) see the keys [0, stop); key tiles that start below `full` need no mask."""
    stop, full = K, K // BLOCK_K * BLOCK_K
    if CAUSAL:
        stop = tl.minimum(K, row + BLOCK_Q)
        full = tl.minimum(full, (row + 1) // BLOCK_K * BLOCK_K)
    return stop, full


@triton.jit
def _hide(scores, rows, cols, K, CAUSAL: tl.constexpr):
    visible = (cols < K)[None, :]
    if CAUSAL:
        visible = visible & (rows[:, None] >= cols[None, :])
    return tl.where(visible, scores, float("-inf"))


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, num_heads, H, G, Q, K, num_tiles,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head_index, tile = _owned_tile(num_heads, num_tiles)
    if CAUSAL:
        tile = num_tiles - 1 - tile
    batch, head = head_index // H, head_index % H
    row = tile * BLOCK_Q
    rows = row + tl.arange(0, BLOCK_Q)
    scale *= LOG2_E  # scores in base 2: exp2 is one instruction
    q = _load(q_desc, batch, head, row, BLOCK_Q, D)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    stop, full = _key_range(row, K, CAUSAL, BLOCK_Q, BLOCK_K)
    for col in range(0, stop, BLOCK_K):
        k = _load(k_desc, batch, head // G, col, BLOCK_K, D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if col >= full:
            scores = _hide(scores, rows, col + tl.arange(0, BLOCK_K), K, CAUSAL)
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        v = _load(v_desc, batch, head // G, col, BLOCK_K, D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    _store(o_desc, batch, head, row, acc / total[:, None], BLOCK_Q, D)
    tl.store(lse_ptr + head_index.to(tl.int64) * Q + rows, (top + tl.log2(total)) * LN_2, mask=rows < Q)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _dq_kernel(
    q_desc, k_desc, v_desc, o_desc, do_desc, dq_desc, lse_ptr, lse2_ptr, delta_ptr,
    scale, num_heads, H, G, Q, Q_PADDED, K, num_tiles,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head_index, tile = _owned_tile(num_heads, num_tiles)
    if CAUSAL:
        tile = num_tiles - 1 - tile
    batch, head = head_index // H, head_index % H
    row = tile * BLOCK_Q
    rows = row + tl.arange(0, BLOCK_Q)
    q = _load(q_desc, batch, head, row, BLOCK_Q, D)
    do = _load(do_desc, batch, head, row, BLOCK_Q, D)
    o = _load(o_desc, batch, head, row, BLOCK_Q, D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    # Rows past the end get a log-sum-exp of inf, which makes their P zero in both kernels.
    lse = tl.load(lse_ptr + head_index.to(tl.int64) * Q + rows, mask=rows < Q, other=float("inf")) * LOG2_E
    padded = head_index * Q_PADDED + rows
    tl.store(lse2_ptr + padded, lse)
    tl.store(delta_ptr + padded, delta)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    stop, full = _key_range(row, K, CAUSAL, BLOCK_Q, BLOCK_K)
    stop = tl.where(row < Q, stop, 0)
    for col in range(0, stop, BLOCK_K):
        k = _load(k_desc, batch, head // G, col, BLOCK_K, D)
        v = _load(v_desc, batch, head // G, col, BLOCK_K, D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        if col >= full:
            scores = _hide(scores, rows, col + tl.arange(0, BLOCK_K), K, CAUSAL)
        p = tl.exp2(scores * (scale * LOG2_E) - lse[:, None])
        ds = p * (dp - delta[:, None])
        dq = _add_dot(dq, ds.to(k.dtype), k, PRECISION)
    _store(dq_desc, batch, head, row, dq * scale, BLOCK_Q, D)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse2_desc, delta_desc,
    scale, num_heads, H, G, Q, Q_PADDED, K, num_tiles,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head_index, tile = _owned_tile(num_heads, num_tiles)  # of key/value heads
    batch, kv_head = head_index // (H // G), head_index % (H // G)
    col = tile * BLOCK_K
    cols = col + tl.arange(0, BLOCK_K)
    k = _load(k_desc, batch, kv_head, col, BLOCK_K, D)
    v = _load(v_desc, batch, kv_head, col, BLOCK_K, D)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    start, full = 0, 0  # query tiles that start at `full` or later need no mask
    if CAUSAL:
        start = col // BLOCK_Q * BLOCK_Q
        full = col + BLOCK_K - 1
    for group in range(G):
        head = kv_head * G + group
        for row in range(start, Q, BLOCK_Q):
            padded = (batch * H + head) * Q_PADDED + row
            q = _load(q_desc, batch, head, row, BLOCK_Q, D)
            do = _load(do_desc, batch, head, row, BLOCK_Q, D)
            lse = lse2_desc.load([padded])
            scores = tl.dot(k, q.T, input_precision=PRECISION)  # transposed: P and dS stay in registers
            dp = tl.dot(v, do.T, input_precision=PRECISION)
            p = tl.exp2(scores * (scale * LOG2_E) - lse[None, :])
            if CAUSAL:  # noqa: SIM102 - known when compiling, unlike the next
                if row < full:
                    p = tl.where((row + tl.arange(0, BLOCK_Q))[None, :] >= cols[:, None], p, 0.0)
            delta = delta_desc.load([padded])
            ds = p * (dp - delta[None, :])
            dv = _add_dot(dv, p.to(do.dtype), do, PRECISION)
            dk = _add_dot(dk, ds.to(q.dtype), q, PRECISION)
    _store(dk_desc, batch, kv_head, col, dk * scale, BLOCK_K, D)
    _store(dv_desc, batch, kv_head, col, dv, BLOCK_K, D)


def _length_class(length: int) -> int:
    return max(128, triton.next_power_of_2(length))


def _describable(x: Tensor) -> Tensor:
    """x itself when a tensor descriptor can address it, else a copy whose rows start at multiples of 16 bytes."""
    size = x.element_size()
    outer = [stride * size for stride, length in zip(x.stride()[:-1], x.shape[:-1], strict=True) if length > 1]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in outer):
        return x
    padding = -x.shape[-1] % (16 // size)
    copy = x.new_empty(*x.shape[:-1], x.shape[-1] + padding)[..., : x.shape[-1]]
    return copy.copy_(x)


def _describe(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """Without the constructor's checks, which `_describable` has made and which cost the host more than the launch."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape = x, shape, strides, block
    descriptor.padding = "zero"
    return descriptor


class _Call:
    """What the three kernels of one call share; `run` picks a tile for a kernel and launches it."""

    def __init__(self, q: Tensor, k: Tensor, causal: bool, scale: float, tile: Tile | None):
        (self.batch, self.heads, self.queries, head_dim), (_, self.kv_heads, self.keys, _) = q.shape, k.shape
        self.group = self.heads // self.kv_heads
        self.block_d = max(16, triton.next_power_of_2(head_dim))
        self.queries_padded = triton.cdiv(self.queries, ROW_PADDING) * ROW_PADDING
        self.causal, self.scale, self.tile = causal, scale, tile
        self.dtype, self.device = q.dtype, q.device
        tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        self.precision = "tf32" if tf32 else "ieee"

    def run(self, name: str, kernel: Any, tensors: list[tuple[Tensor, str]], by_keys: bool = False) -> None:
        """`tensors`: each with what it is tiled by, "q" or "k" rows, "row" vectors, or "" for a plain pointer."""
        owners = self.batch * (self.kv_heads if by_keys else self.heads)
        # The padding of the row vectors is written too: a later tile of queries may be longer.
        rows = self.queries_padded if name == "dq" else self.queries
        lengths = [self.queries, self.keys] if name == "fwd" else [self.queries, self.queries_padded, self.keys]
        sizes = [self.scale, owners, self.heads, self.group, *lengths]

        def launch_with(tile: Tile) -> None:
            num_tiles = triton.cdiv(self.keys, tile.block_k) if by_keys else triton.cdiv(rows, tile.block_q)
            constants = tile.block_q, tile.block_k, self.block_d, self.causal, self.precision
            args = [*(self._argument(x, kind, tile) for x, kind in tensors), *sizes, num_tiles, *constants]
            key = tile, self.dtype, *constants, self.group, self.device
            grid, options = (owners * num_tiles, 1, 1), {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            with torch.cuda.device_of(tensors[0][0]):
                launch(kernel, key, grid, args, **options)

        if self.tile:
            return launch_with(self.tile)
        owners_class = min(256, triton.next_power_of_2(owners))
        shape = self.block_d, self.causal, _length_class(self.queries), _length_class(self.keys), owners_class
        tiles = (Tile(32, 32, 4, 1),) if INTERPRETED else candidates(name, self.dtype, self.block_d, self.precision)
        launch_with(tune((name, self.dtype, self.precision, *shape), tiles, launch_with, self.device))

    def _argument(self, x: Tensor, kind: str, tile: Tile) -> Any:
        if not kind:
            return x
        block = tile.block_k if kind == "k" else tile.block_q
        if kind == "row":
            return _describe(x, [x.numel()], [1], [block])
        shape = list(x.shape)
        # Strides of dimensions of length 1 never matter, but must be multiples of 16 bytes.
        strides = [s if n > 1 else shape[-1] * 16 for s, n in zip(x.stride(), shape, strict=True)]
        strides[-1] = 1
        return _describe(x, shape, strides, [1, 1, block, self.block_d])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """q (B, H, Q, D), k and v (B, Hkv, K, D) -> o (B, H, Q, D) and lse (B, H, Q), natural log, float32."""
    o = _describable(torch.empty_like(q))  # in q's own layout: behind a projection that is (B, Q, H, D) memory
    q, k, v = (_describable(x) for x in (q, k, v))
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    call = _Call(q, k, causal, scale, tile)
    call.run("fwd", _fwd_kernel, [(q, "q"), (k, "k"), (v, "k"), (o, "q"), (lse, "")])
    return o, lse


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    scale: float,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, H, Q, D), dk and dv (B, Hkv, K, D)."""
    if q.is_cuda:
        # autograd runs this in a thread of its own, where nothing may have bound a CUDA context yet: Triton binds one
        # on launch, but encodes descriptors before. This call binds it, also while a graph is captured.
        torch.cuda.is_current_stream_capturing()
    dq, dk, dv = (_describable(torch.empty_like(x)) for x in (q, k, v))
    q, k, v, o, do = (_describable(x) for x in (q, k, v, o, do))
    call = _Call(q, k, causal, scale, tile)
    rows = (q.shape[0] * q.shape[1] * call.queries_padded,)
    lse2, delta = (torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(2))
    call.run(
        "dq",
        _dq_kernel,
        [(q, "q"), (k, "k"), (v, "k"), (o, "q"), (do, "q"), (dq, "q"), (lse, ""), (lse2, ""), (delta, "")],
    )
    call.run(
        "dkdv",
        _dkdv_kernel,
        [(q, "q"), (k, "k"), (v, "k"), (do, "q"), (dk, "k"), (dv, "k"), (lse2, "row"), (delta, "row")],
        by_keys=True,
    )
    return dq, dk, dv


FlashTriton = function("FlashTriton", _forward, _backward)  # its `tile` is that of all three kernels
FlashTritonTorchBackward = function("FlashTritonTorchBackward", _forward, backward_here)
_operator = operator("flash_triton", _forward, _backward)
_operator_torch_bwd = operator("flash_triton_torch_bwd", _forward, backward_here)


def flash_triton(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """softmax(scale · q kᵀ) v: q (B, H, Q, D), k and v (B, Hkv, K, D) -> (B, H, Q, D), in memory linear in Q and K."""
    return attend(FlashTriton, _operator, q, k, v, causal, scale)


def flash_triton_torch_bwd(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """`flash_triton` with a compiled PyTorch backward, as a course solution has it before its own Triton backward."""
    return attend(FlashTritonTorchBackward, _operator_torch_bwd, q, k, v, causal, scale)


def flash_triton_supports(case: AttentionCase) -> str | None:
    if case.head_dim > 256:
        return f"head_dim {case.head_dim} is above 256, the largest tile that shared memory holds"
    if case.dtype == "float64":
        return "float64 has no tensor-core path; use naive"
    if case.device == "cuda":
        if case.capability is not None and case.capability < (8, 0):
            return f"needs compute capability 8.0 or later; this GPU has {case.capability[0]}.{case.capability[1]}"
        return None
    if not INTERPRETED:
        return "runs on CUDA; on CPU only in Triton's interpreter (TRITON_INTERPRET=1), for verification"
    if numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
        return f"Triton's interpreter needs numpy below 2.4; this is {numpy.__version__}"
    if case.dtype == "bfloat16":
        return "Triton's interpreter computes bfloat16 wrongly"
    if case.batch * case.heads * case.queries * case.keys > 2**18:
        return "too slow in Triton's interpreter above 2**18 scores"
    return None


flash_triton_torch_bwd_supports = flash_triton_supports
