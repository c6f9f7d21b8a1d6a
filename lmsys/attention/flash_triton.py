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
- What calls of one case share is worked out once (`_Launch`), and descriptors are kept: short calls wait for the host.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lmsys.attention.contract import AttentionCase, why_not_plain
from lmsys.attention.custom_ops import attend, autograd_function, custom_op
from lmsys.attention.flash_torch import backward_here
from lmsys.attention.tuning import Tile, candidates, tune
from lmsys.kernels.launch import Kernel, geometry, stream_of

INTERPRETED = triton.knobs.runtime.interpret
INTERPRETED_SCORES = 2**18  # at most, or a check takes minutes
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
HEADS_AT_ONCE = tl.constexpr(8)
ROW_PADDING = 128  # delta and the log-sum-exp are padded to it: a multiple of every BLOCK_Q
# One binary for all lengths and addresses.
UNSPECIALISED = ["num_heads", "H", "Q", "Q_PADDED", "K", "num_tiles", "lse_ptr", "lse2_ptr", "delta_ptr"]


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


@triton.jit(do_not_specialize=UNSPECIALISED)
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


@triton.jit(do_not_specialize=UNSPECIALISED)
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


@triton.jit(do_not_specialize=UNSPECIALISED)
def _dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse2_desc, delta_desc,
    scale, num_heads, H, G, Q, Q_PADDED, K, num_tiles,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head_index, tile = _owned_tile(num_heads, num_tiles)  # a key/value head
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


# Each kernel, and what its descriptors are tiled by: rows of q queries or k keys, or a vector over rows of queries.
KERNELS = {
    "fwd": (_fwd_kernel, ["q", "k", "k", "q"]),
    "dq": (_dq_kernel, ["q", "k", "k", "q", "q", "q"]),
    "dkdv": (_dkdv_kernel, ["q", "k", "k", "q", "k", "k", "vector", "vector"]),
}
MAX_LAUNCHES = 4096  # about 1 KiB each

_kernels: dict[tuple[Any, ...], Any] = {}
_launches: dict[tuple[Any, ...], "_Launch"] = {}


def _describable(x: Tensor) -> Tensor:
    """x itself when a tensor descriptor can address it, else a copy whose rows start at multiples of 16 bytes."""
    b, h, s, d = x.stride()
    if d == 1 and b and h and s and not (b | h | s) * x.element_size() & 15 and not x.data_ptr() & 15:
        return x
    padding = -x.shape[-1] % (16 // x.element_size())
    copy = x.new_empty(*x.shape[:-1], x.shape[-1] + padding)[..., : x.shape[-1]]
    return copy.copy_(x)


def _padded(queries: int) -> int:
    return -(-queries // ROW_PADDING) * ROW_PADDING  # triton.cdiv takes 2 us


class _Launch:
    """A kernel with a tile, and what all calls of one case share."""

    def __init__(
        self, name: str, tensors: tuple[Tensor, ...], others: tuple[Any, ...], causal: bool, precision: str, tile: Tile
    ):
        function, tiled_by = KERNELS[name]
        q, k = tensors[:2]
        (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
        lengths = [queries, keys] if name == "fwd" else [queries, _padded(queries), keys]
        if name == "dkdv":
            owners, num_tiles = batch * kv_heads, triton.cdiv(keys, tile.block_k)
        else:  # the padding of the row vectors is written too: a later tile of queries may be longer
            owners = batch * heads
            num_tiles = triton.cdiv(_padded(queries) if name == "dq" else queries, tile.block_q)
        self.grid = owners * num_tiles
        self.sizes = owners, heads, heads // kv_heads, *lengths, num_tiles
        block_d = _block_d(head_dim)
        key = name, tile, q.dtype, block_d, causal, precision, heads // kv_heads, q.device
        if key not in _kernels:
            q_block, k_block = ([1, 1, rows, block_d] for rows in (tile.block_q, tile.block_k))
            blocks = {"q": q_block, "k": k_block, "vector": [tile.block_q]}
            _kernels[key] = Kernel(
                function,
                [TensorDescriptor(x, *geometry(x), blocks[by]) for x, by in zip(tensors, tiled_by, strict=True)],
                [*others, *self.sizes],
                BLOCK_Q=tile.block_q,
                BLOCK_K=tile.block_k,
                D=block_d,
                CAUSAL=causal,
                PRECISION=precision,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        self.kernel = _kernels[key]

    def __call__(self, tensors: tuple[Tensor, ...], others: tuple[Any, ...]) -> None:
        self.kernel(self.grid, stream_of(tensors[0]), tensors, (*others, *self.sizes))


def _block_d(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _length_class(length: int) -> int:
    return max(128, triton.next_power_of_2(length))


def _run(name: str, tensors: tuple[Tensor, ...], others: tuple[Any, ...], causal: bool, tile: Tile | None) -> None:
    """Launches a kernel on `tensors` to describe, the first of them q and k, and `others`: pointers, then the scale."""
    q, k = tensors[:2]
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    precision = "tf32" if tf32 else "ieee"
    key = name, q.shape, k.shape, q.dtype, q.device, causal, precision, tile
    launch = _launches.get(key)
    if launch is None:

        @cache
        def made(tile: Tile) -> _Launch:
            return _Launch(name, tensors, others, causal, precision, tile)

        launch = made(tile or _tuned(name, q, k, causal, precision, lambda tile: made(tile)(tensors, others)))
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):  # the tile may be one for want of another
            _launches[key] = launch
    launch(tensors, others)


def _tuned(name: str, q: Tensor, k: Tensor, causal: bool, precision: str, launch: Callable[[Tile], None]) -> Tile:
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    block_d = _block_d(head_dim)
    tiles = (Tile(32, 32, 4, 1),) if INTERPRETED else candidates(name, q.dtype, block_d, precision)
    owners_class = min(256, triton.next_power_of_2(batch * (kv_heads if name == "dkdv" else heads)))
    shape = block_d, causal, _length_class(queries), _length_class(keys), owners_class
    return tune((name, q.dtype, precision, *shape), tiles, launch, q.device)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """q (B, H, Q, D), k and v (B, Hkv, K, D) -> o (B, H, Q, D) and lse (B, H, Q), natural log, float32."""
    o = _describable(torch.empty_like(q))  # in q's own layout: behind a projection that is (B, Q, H, D) memory
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    q, k, v = _describable(q), _describable(k), _describable(v)
    with torch.cuda.device_of(q):
        _run("fwd", (q, k, v, o), (lse, scale), causal, tile)
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
        # on launch, but descriptors are encoded before. This call binds it, also while a graph is captured.
        torch.cuda.is_current_stream_capturing()
    dq, dk, dv = (_describable(torch.empty_like(x)) for x in (q, k, v))
    q, k, v, o, do = (_describable(x) for x in (q, k, v, o, do))
    rows = q.shape[0] * q.shape[1] * _padded(q.shape[2])
    lse2, delta = (torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(2))
    with torch.cuda.device_of(q):
        _run("dq", (q, k, v, o, do, dq), (lse, lse2, delta, scale), causal, tile)
        _run("dkdv", (q, k, v, do, dk, dv, lse2, delta), (scale,), causal, tile)
    return dq, dk, dv


FlashTriton = autograd_function("FlashTriton", _forward, _backward)  # its `tile` is that of all three kernels
FlashTritonTorchBackward = autograd_function("FlashTritonTorchBackward", _forward, backward_here)
_custom_op = custom_op("flash_triton", _forward, _backward)
_custom_op_torch_bwd = custom_op("flash_triton_torch_bwd", _forward, backward_here)


def flash_triton(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """softmax(scale · q kᵀ) v: q (B, H, Q, D), k and v (B, Hkv, K, D) -> (B, H, Q, D), in memory linear in Q and K."""
    return attend(FlashTriton, _custom_op, q, k, v, causal, scale)


def flash_triton_torch_bwd(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """`flash_triton` with a compiled PyTorch backward, as a course solution has it before its own Triton backward."""
    return attend(FlashTritonTorchBackward, _custom_op_torch_bwd, q, k, v, causal, scale)


def flash_triton_supports(case: AttentionCase) -> str | None:
    if reason := why_not_plain(case):
        return reason
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
        return f"Triton's interpreter needs numpy below 2.4; this is {numpy.__version__}: pip install 'numpy<2.4'"
    if case.dtype == "bfloat16":
        return "Triton's interpreter computes bfloat16 wrongly"
    if case.batch * case.heads * case.queries * case.keys > INTERPRETED_SCORES:
        return f"Triton's interpreter is too slow above {INTERPRETED_SCORES:,} scores (batch x heads x queries x keys)"
    return None


flash_triton_torch_bwd_supports = flash_triton_supports
