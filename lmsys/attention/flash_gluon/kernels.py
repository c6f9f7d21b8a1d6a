"""The row `flash_gluon`: launchers, custom operator, autograd Function, public function.

Legend: B batch, H query heads, Hkv key heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmsys.attention import custom_ops, documents
from lmsys.attention.bounds import Bounds
from lmsys.attention.flash_gluon import backward, forward
from lmsys.attention.flash_gluon.plans import (
    BackwardPlan,
    ForwardPlan,
    backward_plan,
    forward_plan,
    heads_at_once,
)
from lmsys.attention.flash_gluon.preprocess import postprocess_kernel, preprocess_kernel
from lmsys.attention.pattern import Pattern
from lmsys.kernels.launch import DirectKernel, describable, geometry, raw_stream

LOG2_E = math.log2(math.e)
TILE_K = 128
ROWS = 64  # queries that one warp group of the forward owns
NUM_PARAMETERS = 6  # int64, five of them written: what follows begins at a multiple of 16 bytes, as kernels are told
BLOCK_Q = {64: 128, 128: 64}  # by head_dim: queries of a step of the backward
IN_ORDER_MIB = {True: 8, False: 16}  # by causal: a backward of fixed order works on heads of so many MiB in turns
DOWN_AT_ONCE = 2  # key heads, at least, that are worked on together where grouped heads walk down
MOST_DOWN = 32  # key tiles of a head that walk down: with more, CTAs wait for one another at each tile of dq
DOWN_WAVES = 4  # waves of CTAs: below this the longest tiles of all heads come first, also where heads walk down
FEW_WAVES = 8  # waves of CTAs: below this, the tail costs more than L2 reuse gains
DQ_TILE = 4096  # numbers of dq that are added to at a time
MOST_CLEARED = 8  # tiles of dq: more of them would keep the loads of a CTA that clears them waiting
EXTENT = "first_ptr", "end_ptr", "per_entry", "query_end_ptr"  # of a pattern, the last of a backward alone
# By consumers and CTAs of a processor: registers of a consumer's threads, and of all threads at the start.
REGISTERS = {(2, 1): (240, 168), (2, 2): (104, 80), (3, 1): (160, 128)}

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}

_launches: dict[tuple[Any, ...], Any] = {}
_kernels: dict[tuple[Any, ...], "Kernel"] = {}
_counters: dict[Hashable, Tensor] = {}


def layout(block: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of a block in shared memory, as TMA writes and wgmma reads it."""
    if len(block) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[dtype])


class Kernel(DirectKernel):
    """`tensors` and `blocks`: of the descriptors, an example of each and its block. `others`: as of `DirectKernel`."""

    def __init__(
        self, function: Any, tensors: list[Tensor], blocks: list[list[int]], others: list[Any], **options: Any
    ):
        described = [
            TensorDescriptor(x, *geometry(x), block, layout(block, x.dtype))
            for x, block in zip(tensors, blocks, strict=True)
        ]
        super().__init__(function, described, others, num_warps=4, **options)


def _like(x: Tensor) -> Tensor:
    """An empty result, in x's own layout where rows are contiguous: (B, S, H, D) memory after a projection."""
    return torch.empty_like(x) if x.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _counter(device: torch.device, stream: int) -> Tensor:
    """Two zeros, which the kernel leaves zero: a pair for each stream, used once the kernel before has ended."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)  # a graph may be replayed on any stream
    counter = _counters.get((device.index, stream))
    if counter is None:
        make = partial(torch.zeros, 2, dtype=torch.int32, device=device)
        counter = documents.keep(_counters, (device.index, stream), make, device, most=2**31)
    return counter


def _extent(bounds: Bounds, *more: Tensor) -> tuple[Any, ...]:
    """Values for EXTENT."""
    return bounds.first.data_ptr(), bounds.end.data_ptr(), int(bounds.first.shape[0] > 1), *(x.data_ptr() for x in more)


def _samples(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Examples that kernels are compiled for: a row of q's dtype and head dimension, float32, int32 and int64."""
    half = torch.empty(1, 1, 1, q.shape[-1], dtype=q.dtype, device=q.device)
    return half, *(torch.empty(128, dtype=x, device=q.device) for x in (torch.float32, torch.int32, torch.int64))


def _kept(key: tuple[Any, ...], *arguments: Any, **options: Any) -> Kernel:
    """The binary of this key, which is compiled once."""
    if key not in _kernels:
        _kernels[key] = Kernel(*arguments, **options)
    return _kernels[key]


def forward_options(head_dim: int, causal: bool, ragged: bool, plan: ForwardPlan, bounded: bool) -> dict[str, Any]:
    """The constants and compiler options of `forward_kernel`."""
    registers, cap = REGISTERS[plan.consumers, plan.ctas]
    return {
        "BLOCK_K": plan.tile_k, "D": head_dim, "WGS": plan.consumers, "STAGES": plan.stages,
        "REGISTERS": registers, "PING_PONG": plan.ping_pong, "OVERLAP": plan.ctas == 1, "NAMED": plan.named,
        "DYNAMIC": plan.dynamic, "CHAINED": plan.chained, "CAUSAL": causal, "RAGGED": ragged, "maxnreg": cap,
        "launch_pdl": plan.chained, **dict.fromkeys(() if bounded else EXTENT[:3]),
    }  # fmt: skip


class _Forward:
    """The sizes, the grid and the binary that all calls of one shape share.

    `bounded`: under a pattern, whose `_extent` each call brings. Plan and order are then those of causal attention.
    """

    def __init__(self, q: Tensor, k: Tensor, causal: bool, bounded: bool, plan: ForwardPlan):
        (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
        self.device = q.device.index
        num_tiles = triton.cdiv(queries, plan.consumers * ROWS)
        num_heads, group = batch * heads, heads // kv_heads
        at_once = heads_at_once(plan.l2_mib, 4 * keys * head_dim) * group if plan.l2_mib else 1
        self.sizes = num_heads, heads, group, queries, keys, num_tiles, min(at_once, num_heads)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        self.grid = min(plan.ctas * processors, num_heads * num_tiles)
        self.dynamic = plan.dynamic
        ragged = not causal and keys % plan.tile_k != 0
        key = "forward", self.device, q.dtype, head_dim, causal, bounded, ragged, plan
        half, floats, ints, _ = _samples(q)
        q_block, k_block = [1, 1, ROWS, head_dim], [1, 1, plan.tile_k, head_dim]
        extent = [ints, ints, 1] if bounded else []
        self.kernel = _kept(
            key,
            forward.forward_kernel,
            [half] * 4,
            [q_block, k_block, k_block, q_block],
            [floats, ints, 1.5, *self.sizes, *extent],
            **forward_options(head_dim, causal, ragged, plan, bounded),
        )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, extent: tuple[Any, ...]
    ) -> None:
        stream = raw_stream(self.device)
        counter = _counter(q.device, stream).data_ptr() if self.dynamic else 0
        self.kernel(
            self.grid, stream, (q, k, v, o),
            (lse.data_ptr(), counter, scale * LOG2_E, *self.sizes, *extent),
        )  # fmt: skip


def backward_options(
    head_dim: int, causal: bool, ragged: bool, grouped: bool, deterministic: bool, plan: BackwardPlan, bounded: bool,
    down: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The constants of `backward_kernel`."""
    return {
        "BLOCK_Q": BLOCK_Q[head_dim], "D": head_dim, "CAUSAL": causal, "RAGGED": ragged, "GROUPED": grouped,
        "PREFETCH": plan.prefetch, "WIDE": plan.wide, "LATE_DV": plan.late_dv, "BY_QUERY": plan.by_query,
        "FMA_EXP": plan.fma_exp, "PEELED": plan.peeled and causal and not bounded,
        "SPREAD": not causal and ragged and not deterministic, "DOWN": down, "DETERMINISTIC": deterministic,
        **dict.fromkeys(() if bounded else EXTENT),
    }  # fmt: skip


def ahead_of(at_once: int, num_key_tiles: int, num_heads: int, processors: int) -> int:
    """How many key heads ahead a CTA writes the zeros of dq: so many that their CTAs fill the GPU once.

    In whole groups, so that CTAs wait for those of lower numbers alone; the first `ahead` heads are zero before.
    """
    return min(triton.cdiv(processors, at_once * num_key_tiles) * at_once, num_heads)


class _Backward:
    """As `_Forward`, for the three kernels of the backward."""

    def __init__(self, q: Tensor, k: Tensor, causal: bool, bounded: bool, deterministic: bool, plan: BackwardPlan):
        (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
        self.device, self.heads, self.queries = q.device.index, heads, queries
        self.block_q = BLOCK_Q[head_dim]
        group, num_heads, kv_num_heads = heads // kv_heads, batch * heads, batch * kv_heads
        self.padded = triton.cdiv(queries, self.block_q) * self.block_q  # rows of dq, delta and the log-sum-exp
        num_key_tiles = triton.cdiv(keys, TILE_K)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        self.grid = kv_num_heads * num_key_tiles
        num_tiles = triton.cdiv(queries, self.block_q)
        bytes_per_head = 8 * max(queries * group, keys) * head_dim
        down = causal and group > 1 and not (deterministic or bounded) and num_key_tiles <= MOST_DOWN
        waves, least = (DOWN_WAVES, DOWN_AT_ONCE) if down else (FEW_WAVES, 1)
        if deterministic:  # as many as fit, as CTAs of one head that begin together wait for one another
            at_once = heads_at_once(IN_ORDER_MIB[causal], bytes_per_head)
        elif plan.l2_mib and self.grid > waves * processors:
            at_once = max(least, heads_at_once(plan.l2_mib, bytes_per_head))
        else:  # causal, all of the longest tiles first: the last head's would end alone
            at_once = kv_num_heads if causal else 1
        at_once = min(at_once, kv_num_heads)
        share = triton.cdiv(group * self.padded * head_dim, num_key_tiles * DQ_TILE)  # to be cleared by a CTA
        ahead = kv_num_heads
        if not deterministic and share <= MOST_CLEARED:
            ahead = ahead_of(at_once, num_key_tiles, kv_num_heads, processors)
        num_cleared = ahead * group  # heads of dq that begin as zeros
        if deterministic and not bounded and (causal or keys >= TILE_K):  # else nobody stores: see `walk_over`
            num_cleared = 0
        self.num_semaphores = num_heads * num_tiles if deterministic else kv_num_heads
        self.sizes = kv_num_heads, heads, group, queries, self.padded, keys, num_key_tiles, at_once, ahead
        self.preprocess_sizes = (
            num_heads, heads, group, queries, self.padded, num_key_tiles, at_once, self.num_semaphores, num_cleared,
        )  # fmt: skip
        # float32 dq (B H, Qpad, D), padded log-sum-exp and delta (B H, Qpad), parameters (int64), dq_semaphore (int32)
        self.num_rows = num_heads * self.padded
        self.num_dq = self.num_rows * head_dim
        self.floats = self.num_dq + 2 * self.num_rows + 2 * NUM_PARAMETERS + self.num_semaphores
        self.rows = DQ_TILE // head_dim  # rows of a program of the kernel before
        self.preprocess_grid = self.num_rows // self.rows
        self.postprocess_grid = self.num_rows // ROWS
        self.preprocess, self.main, self.postprocess = self._compiled(
            q, head_dim, causal, bounded, keys, deterministic, group, plan, down
        )

    def _compiled(
        self, q: Tensor, head_dim: int, causal: bool, bounded: bool, keys: int, deterministic: bool, group: int,
        plan: BackwardPlan, down: bool,
    ) -> tuple[Kernel, Kernel, Kernel]:  # fmt: skip
        half, floats, ints, longs = _samples(q)
        ragged = not causal and keys % TILE_K != 0
        same = self.device, q.dtype, head_dim
        preprocess = _kept(
            ("preprocess", *same, bounded), preprocess_kernel, [], [],
            [half, half, floats, floats, floats, floats, ints, longs, 0.5, *self.preprocess_sizes, *[8] * 6],
            ROWS=self.rows, D=head_dim, BOUNDED=bounded,
        )  # fmt: skip
        postprocess = _kept(
            ("postprocess", *same), postprocess_kernel, [], [], [floats, half, 0.5, *[8] * 6],
            ROWS=ROWS, D=head_dim, launch_pdl=True,
        )  # fmt: skip
        q_block, k_block, out_block = ([1, 1, rows, head_dim] for rows in (self.block_q, TILE_K, 64))
        row_block = [self.block_q]
        main = _kept(
            ("backward", *same, causal, bounded, ragged, deterministic, group > 1, down, replace(plan, l2_mib=0)),
            backward.backward_kernel,
            [half, half, half, half, floats, floats, half, half],
            [q_block, k_block, k_block, q_block, row_block, row_block, out_block, out_block],
            [floats, longs, ints, 1.5, *self.sizes, *([ints, ints, 1, ints] if bounded else [])],
            **backward_options(head_dim, causal, ragged, group > 1, deterministic, plan, bounded, down),
            maxnreg=168,
            launch_pdl=True,
        )  # fmt: skip
        return preprocess, main, postprocess

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, scale: float, extent: tuple[Any, ...],
    ) -> None:  # fmt: skip
        stream = raw_stream(self.device)
        space = torch.empty(self.floats, dtype=torch.float32, device=q.device)
        dq32, lse2, delta, rest = space.split_with_sizes(
            (self.num_dq, self.num_rows, self.num_rows, self.floats - self.num_dq - 2 * self.num_rows)
        )
        parameters = rest.data_ptr()
        dq_semaphore = parameters + 8 * NUM_PARAMETERS
        pointers = (o, do, lse, lse2, delta, dq32)
        self.preprocess(
            self.preprocess_grid, stream, (),
            (*(x.data_ptr() for x in pointers), dq_semaphore, parameters, scale, *self.preprocess_sizes,
             *_eighths(o), *_eighths(do)),
        )  # fmt: skip
        self.main(
            self.grid, stream, (q, k, v, do, lse2, delta, dk, dv),
            (dq32.data_ptr(), parameters, dq_semaphore, scale * LOG2_E, *self.sizes, *extent),
        )  # fmt: skip
        self.postprocess(
            self.postprocess_grid, stream, (),
            (dq32.data_ptr(), dq.data_ptr(), scale, self.heads, self.queries, self.padded, *_eighths(dq)),
        )  # fmt: skip


def _eighths(x: Tensor) -> tuple[int, int, int]:
    """The strides that kernels are given: in 8 elements, so that they know them for multiples of 16 bytes."""
    b, h, s, _ = x.stride()
    return b // 8, h // 8, s // 8


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, plan: ForwardPlan | None = None,
    pattern: Pattern | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (B, H, Q, D), k and v (B, Hkv, K, D) -> o (B, H, Q, D) and lse (B, H, Q), natural log, float32.

    `pattern` stands in the place of `causal`.
    """
    o = _like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    q, k, v = describable(q), describable(k), describable(v)
    bounded, extent = pattern is not None, ()
    if pattern is not None:
        bounds = pattern.bounds(q.shape[2], k.shape[2], q.device)  # kept until the kernel that reads it is launched
        causal, extent = True, _extent(bounds)
        plan = plan or forward_plan(q.shape[-1], causal, k.shape[2], pattern.span(k.shape[2]))
    key = "forward", q.shape, k.shape, q.dtype, causal, bounded, q.device.index, plan
    launch = _launches.get(key)
    with torch.cuda.device_of(q):
        if launch is None:
            plan = plan or forward_plan(q.shape[-1], causal, k.shape[2])
            launch = _launches[key] = _Forward(q, k, causal, bounded, plan)
        launch.run(q, k, v, o, lse, scale, extent)
    return o, lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float,
    deterministic: bool | None = None, plan: BackwardPlan | None = None, pattern: Pattern | None = None,
    together: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq (B, H, Q, D), dk and dv (B, Hkv, K, D). `deterministic` defaults to what torch is set to.

    `pattern` stands in the place of `causal`; `together` is that of `gradients_like`.
    """
    # autograd runs this in a thread of its own, where nothing may have bound a CUDA context yet. This call does.
    torch.cuda.is_current_stream_capturing()
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = custom_ops.gradients_like(q, k, v, _like, together)
    q, k, v, o, do = describable(q), describable(k), describable(v), describable(o), describable(do)
    bounded, extent = pattern is not None, ()
    if pattern is not None:
        bounds = pattern.bounds(q.shape[2], k.shape[2], q.device)
        causal, extent = True, _extent(bounds.of_keys, bounds.end)
    key = "backward", q.shape, k.shape, q.dtype, causal, bounded, q.device.index, deterministic, plan
    launch = _launches.get(key)
    with torch.cuda.device_of(q):
        if launch is None:
            plan = plan or backward_plan(q.shape[-1], causal, k.shape[2])
            launch = _launches[key] = _Backward(q, k, causal, bounded, deterministic, plan)
        launch.run(q, k, v, o, lse, do, dq, dk, dv, scale, extent)
    return dq, dk, dv


# For bfloat16 and float16, D 64 and 128. dq is added up in no fixed order, unless
# `torch.use_deterministic_algorithms(True)`.
FlashGluon, flash_gluon = custom_ops.flash(
    "flash_gluon", "FlashGluon", _forward, _backward, registered=partial(_backward, together=False)
)
