"""The attention implementation `flash_gluon`: launches the forward and the backward kernels of this folder.

The table of implementations, `lmsys/attention/table.py`, names the function `flash_gluon` at the end of this file.
There `custom_ops.flash` makes the public function and the autograd Function of `_forward` and `_backward`. The first
call of a shape computes sizes, grid and binary (`_Forward`, `_Backward`), which `_launches` keeps. A backward launches
three kernels: one of preprocess.py before the kernel of backward.py, and one after it. Settings are in plans.py. Under
a pattern (windows, documents) NaN in hidden keys spoils whole tiles. The kernels then set a flag, and kernels of
flash_triton.py compute the tiles again. A kernel without a pattern is called *dense*.

Kernels get their arguments by place. A new argument stands at the same place in a kernel's signature, in the examples
with which `__init__` compiles the kernel, and in the call in `run`; an integer is named in `do_not_specialize`, too.

In the backward causal heads that are grouped (G > 1) may *walk down*: the CTAs (programs) of a key head, one for each
of its key tiles, begin at the last tile of queries. Each takes that tile for all G query heads, then the tile below it,
and so on. The CTAs thus come to a tile of dq together, while the L2 cache holds it. Otherwise a CTA goes up through the
tiles of one query head after another. `next_tile` in dq.py has all orders.

Legend: B batch, H query heads, Hkv key heads, G = H / Hkv, Q queries, K keys, D head dimension. q, k, v, o, their
gradients and do have 2 bytes a number; lse, delta and the dq that is added up have 4.
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

from lmsys.attention import custom_ops, documents, flash_triton
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
from lmsys.kernels.launch import DirectKernel, geometry, raw_stream, with_aligned_rows

LOG2_E = math.log2(math.e)
TILE_K = 128  # keys of a CTA of the backward
ROWS = 64  # queries that one warp group of the forward owns
BLOCK_Q = {64: 128, 128: 64}  # by head_dim: queries of a step of the backward
# Numbers of dq (16 KiB of float32) that a consumer adds to in a step: 64 queries by 64 columns, as `add_registers` and
# `clear` of hopper.py move them. The kernels of backward.py, backward_steps.py and dq.py write this number themselves.
DQ_TILE = 4096
# int64 slots: five scalars that preprocess_kernel writes, and the flag for NaN. They are an even number, so that
# dq_semaphore behind them is 16-byte aligned, as the compiler assumes.
NUM_PARAMETERS = 6
# {causal: MiB}. In the deterministic mode, with its fixed order of additions to dq, the backward works on as many heads
# at a time as touch this much memory together.
IN_ORDER_MIB = {True: 8, False: 16}
MOST_DOWN = 32  # most key tiles of a head that walks down: with more, CTAs wait for one another at each tile of dq
DOWN_AT_ONCE = 2  # the least number of key heads that are worked on together where heads walk down
# Waves: how often the CTAs of a grid fill the GPU. With no more than FEW_WAVES a causal backward works on all heads
# together, the longest tiles first: the last CTAs would otherwise cost more time than the reuse of the L2 cache saves.
FEW_WAVES = 8
DOWN_WAVES = 4  # the limit FEW_WAVES where heads walk down
MOST_CLEARED = 8  # tiles of DQ_TILE numbers that a CTA clears: more of them would delay the CTA's own loads
# The arguments of forward and backward under a pattern. In dense kernels all are None.
EXTENT = "first_ptr", "end_ptr", "per_entry"
FORWARD_EXTENT, BACKWARD_EXTENT = (*EXTENT, "spoilt_ptr"), (*EXTENT, "query_end_ptr")
# (consumer warp groups of a CTA, CTAs that share a multiprocessor) -> registers of a thread: in consumers, and in all
# warp groups at the start. A multiprocessor has 65,536; consumers take what the producer gives back. The forward gets
# its number as a constant; `backward_kernel` has the 240 of (2, 1) in its own text: change both together.
REGISTERS = {(2, 1): (240, 168), (2, 2): (104, 80), (3, 1): (160, 128)}
# Arguments that kernels are compiled with. Their values do not matter: Triton compiles for the type of a float, and
# kernels name the integers in `do_not_specialize`. For an integer that they do not name, Triton would make code of its
# own for 1 and for multiples of 16; 8 is neither.
EXAMPLE_SCALE = 1.5
EXAMPLE_INTEGER = 8

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}

_launches: dict[tuple[Any, ...], Any] = {}  # the `_Forward` or `_Backward` of each shape, by the keys made below
_kernels: dict[tuple[Any, ...], "Kernel"] = {}  # see `_kept`
_counters: dict[Hashable, Tensor] = {}  # see `_counter`


def layout(block: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout in shared memory of a `block` (its shape), as TMA writes and wgmma reads it."""
    if len(block) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[dtype])


class Kernel(DirectKernel):
    """A binary whose first arguments are descriptors of tensors.

    `tensors`: an example of the tensor of each descriptor; `blocks`: the shape of the block of each that TMA moves.
    `others` and `options` are those of `DirectKernel`.
    """

    def __init__(
        self, function: Any, tensors: list[Tensor], blocks: list[list[int]], others: list[Any], **options: Any
    ):
        descriptors = [
            TensorDescriptor(x, *geometry(x), block, layout(block, x.dtype))
            for x, block in zip(tensors, blocks, strict=True)
        ]
        super().__init__(function, descriptors, others, num_warps=4, **options)


def _like(x: Tensor) -> Tensor:
    """An empty tensor like x. It has x's layout where rows are contiguous, as in (B, S, H, D) after a projection."""
    return torch.empty_like(x) if x.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _counter(device: torch.device, stream: int) -> Tensor:
    """(2,) int32 zeros for `forward_kernel`, which leaves them zero.

    Each stream has a pair of its own: kernels of one stream follow one another, kernels of two streams may overlap.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)  # a graph may be replayed on any stream
    counter = _counters.get((device.index, stream))
    if counter is None:
        make = partial(torch.zeros, 2, dtype=torch.int32, device=device)
        # `most` pairs is no limit: none may be dropped for a newer one while kernels that use it are queued.
        counter = documents.keep(_counters, (device.index, stream), make, device, most=2**31)
    return counter


def _extent(bounds: Bounds, *more: Tensor) -> tuple[Any, ...]:
    """Values of the arguments EXTENT: addresses, and 1 where each batch entry has bounds of its own, else 0.

    `more`: the tensor of the last argument in FORWARD_EXTENT or BACKWARD_EXTENT.
    """
    return bounds.first.data_ptr(), bounds.end.data_ptr(), int(bounds.first.shape[0] > 1), *(x.data_ptr() for x in more)


def _samples(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Example tensors to compile kernels with: (1, 1, 1, D) of q's dtype; (128,) of float32, of int32 and of int64."""
    half = torch.empty(1, 1, 1, q.shape[-1], dtype=q.dtype, device=q.device)
    return half, *(torch.empty(128, dtype=x, device=q.device) for x in (torch.float32, torch.int32, torch.int64))


def _kept(key: tuple[Any, ...], *arguments: Any, **options: Any) -> Kernel:
    """The kernel of this key. The first time it is compiled, by `Kernel(*arguments, **options)`."""
    if key not in _kernels:
        _kernels[key] = Kernel(*arguments, **options)
    return _kernels[key]


def forward_options(head_dim: int, causal: bool, ragged: bool, plan: ForwardPlan, bounded: bool) -> dict[str, Any]:
    """The constants and compiler options of `forward_kernel`.

    `ragged`: the keys are no whole number of tiles. `bounded`: under a pattern. Without a pattern the arguments
    FORWARD_EXTENT are constants, None.
    """
    registers, cap = REGISTERS[plan.consumers, plan.ctas]
    return {
        "BLOCK_K": plan.tile_k, "D": head_dim, "WGS": plan.consumers, "STAGES": plan.stages,
        "REGISTERS": registers, "PING_PONG": plan.ping_pong, "OVERLAP": plan.ctas == 1, "NAMED": plan.named,
        "DYNAMIC": plan.dynamic, "CHAINED": plan.chained, "CAUSAL": causal, "RAGGED": ragged, "maxnreg": cap,
        "launch_pdl": plan.chained, **dict.fromkeys(() if bounded else FORWARD_EXTENT),
    }  # fmt: skip


class _Forward:
    """The sizes, the grid and the binary that all calls of one shape share.

    `bounded`: each call brings a pattern, as `_extent`. `causal` is then True: the order of tiles is that of causal
    attention.
    """

    def __init__(self, q: Tensor, k: Tensor, causal: bool, bounded: bool, plan: ForwardPlan):
        (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
        self.device = q.device.index
        num_tiles = triton.cdiv(queries, plan.consumers * ROWS)
        num_heads, group = batch * heads, heads // kv_heads
        bytes_per_head = 4 * keys * head_dim  # k and v of a key head, 2 bytes a number
        at_once = heads_at_once(plan.l2_mib, bytes_per_head) * group if plan.l2_mib else 1
        self.sizes = num_heads, heads, group, queries, keys, num_tiles, min(at_once, num_heads)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        self.grid = min(plan.ctas * processors, num_heads * num_tiles)
        self.dynamic = plan.dynamic
        ragged = not causal and keys % plan.tile_k != 0
        key = "forward", self.device, q.dtype, head_dim, causal, bounded, ragged, plan
        half, floats, ints, longs = _samples(q)
        q_block, k_block = [1, 1, ROWS, head_dim], [1, 1, plan.tile_k, head_dim]
        extent = [ints, ints, EXAMPLE_INTEGER, longs] if bounded else []
        self.kernel = _kept(
            key,
            forward.forward_kernel,
            [half] * 4,  # q, k, v, o
            [q_block, k_block, k_block, q_block],
            [floats, ints, EXAMPLE_SCALE, *self.sizes, *extent],
            **forward_options(head_dim, causal, ragged, plan, bounded),
        )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, extent: tuple[Any, ...]
    ) -> None:
        """Fills o (B, H, Q, D) and lse (B, H, Q), natural log."""
        stream = raw_stream(self.device)
        counter = _counter(q.device, stream).data_ptr() if self.dynamic else 0
        # `DirectKernel.__call__` takes the grid, the stream, tensors to describe, and the other arguments.
        self.kernel(
            self.grid, stream, (q, k, v, o),
            (lse.data_ptr(), counter, scale * LOG2_E, *self.sizes, *extent),
        )  # fmt: skip


def backward_options(
    head_dim: int, causal: bool, ragged: bool, grouped: bool, deterministic: bool, plan: BackwardPlan, bounded: bool,
    down: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The constants of `backward_kernel`. `down`: heads walk down; `bounded`: under a pattern.

    SPREAD (see `backward_kernel`) gains speed only where the last key tile is not full.
    """
    return {
        "BLOCK_Q": BLOCK_Q[head_dim], "D": head_dim, "CAUSAL": causal, "RAGGED": ragged, "GROUPED": grouped,
        "PREFETCH": plan.prefetch, "WIDE": plan.wide, "LATE_DV": plan.late_dv, "BY_QUERY": plan.by_query,
        "FMA_EXP": plan.fma_exp, "PEELED": plan.peeled and causal and not bounded,
        "SPREAD": not causal and ragged and not deterministic, "DOWN": down, "DETERMINISTIC": deterministic,
        **dict.fromkeys(() if bounded else BACKWARD_EXTENT),
    }  # fmt: skip


def ahead_of(at_once: int, num_key_tiles: int, num_heads: int, processors: int) -> int:
    """The number `ahead`: a CTA of key head h writes zeros into its share of dq of key head h + ahead.

    `ahead` is the smallest multiple of `at_once` for which the CTAs of so many heads fill the GPU. CTAs start in the
    order of their index, which goes through `at_once` heads at a time (`owned_tile`). So a CTA waits only for zeros of
    CTAs with a lower index, which have started. preprocess_kernel zeroes the first `ahead` heads. If there are no more
    heads than that, it zeroes all of them, and no CTA of `backward_kernel` zeroes any.

    num_heads   key heads of all batch entries
    processors  multiprocessors of the GPU
    """
    return min(triton.cdiv(processors, at_once * num_key_tiles) * at_once, num_heads)


class _Backward:
    """The sizes, the grids and the binaries of the backward's three kernels, as `_Forward` has those of the forward."""

    def __init__(self, q: Tensor, k: Tensor, causal: bool, bounded: bool, deterministic: bool, plan: BackwardPlan):
        (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
        self.device, self.heads, self.queries, self.bounded = q.device.index, heads, queries, bounded
        self.block_q = BLOCK_Q[head_dim]
        group, num_heads, kv_num_heads = heads // kv_heads, batch * heads, batch * kv_heads
        self.padded = triton.cdiv(queries, self.block_q) * self.block_q  # rows of dq, delta and the log-sum-exp
        num_key_tiles = triton.cdiv(keys, TILE_K)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        self.grid = kv_num_heads * num_key_tiles
        num_tiles = triton.cdiv(queries, self.block_q)
        # Bytes of q and do (2 a number each) and dq (4) of a key head, or of its k, v, dk and dv (2 each): the larger.
        bytes_per_head = 8 * max(queries * group, keys) * head_dim
        down = causal and group > 1 and not (deterministic or bounded) and num_key_tiles <= MOST_DOWN  # heads walk down
        waves, least = (DOWN_WAVES, DOWN_AT_ONCE) if down else (FEW_WAVES, 1)
        if deterministic:  # heads take turns: CTAs of one head that begin together would wait for one another
            at_once = heads_at_once(IN_ORDER_MIB[causal], bytes_per_head)
        elif plan.l2_mib and self.grid > waves * processors:
            at_once = max(least, heads_at_once(plan.l2_mib, bytes_per_head))
        else:  # causal heads all together, the longest tiles first: else those of the last head would run alone
            at_once = kv_num_heads if causal else 1
        at_once = min(at_once, kv_num_heads)
        share = triton.cdiv(group * self.padded * head_dim, num_key_tiles * DQ_TILE)  # tiles of dq that a CTA clears
        ahead = kv_num_heads
        if not deterministic and share <= MOST_CLEARED:
            ahead = ahead_of(at_once, num_key_tiles, kv_num_heads, processors)
        num_cleared = ahead * group  # query heads of dq that preprocess_kernel zeroes
        # In a fixed order the first CTA that comes to a tile of dq stores it. Under a pattern, and where a single key
        # tile holds fewer than TILE_K keys, all CTAs add, and so need zeros (STORES in `walk_over`).
        if deterministic and not bounded and (causal or keys >= TILE_K):
            num_cleared = 0
        # In the deterministic mode there is a semaphore for each tile of queries, which gives additions their order.
        # Otherwise there is one for each key head, which counts the CTAs that have zeroed their share.
        self.num_semaphores = num_heads * num_tiles if deterministic else kv_num_heads
        self.sizes = kv_num_heads, heads, group, queries, self.padded, keys, num_key_tiles, at_once, ahead
        self.preprocess_sizes = (
            num_heads, heads, group, queries, self.padded, num_key_tiles, at_once, self.num_semaphores, num_cleared,
        )  # fmt: skip
        # One buffer, counted in float32: dq (B H, Qpad, D), padded log-sum-exp and delta (B H, Qpad), parameters
        # (int64, two float32 each), dq_semaphore (int32).
        self.num_rows = num_heads * self.padded
        self.num_dq = self.num_rows * head_dim
        self.floats = self.num_dq + 2 * self.num_rows + 2 * NUM_PARAMETERS + self.num_semaphores
        self.rows = DQ_TILE // head_dim  # of dq, log-sum-exp and delta, for each program of preprocess_kernel
        self.preprocess_grid = self.num_rows // self.rows
        self.postprocess_grid = self.num_rows // ROWS
        # The lists below have examples of arguments, in the order of the kernels' signatures.
        half, floats, ints, longs = _samples(q)
        ragged = not causal and keys % TILE_K != 0
        same = self.device, q.dtype, head_dim
        self.preprocess = _kept(  # [], []: this kernel and the postprocess get no descriptors
            ("preprocess", *same, bounded), preprocess_kernel, [], [],
            [half, half, floats, floats, floats, floats, ints, longs, EXAMPLE_SCALE, *self.preprocess_sizes,
             *[EXAMPLE_INTEGER] * 6],
            ROWS=self.rows, D=head_dim, BOUNDED=bounded,
        )  # fmt: skip
        self.postprocess = _kept(
            ("postprocess", *same, bounded), postprocess_kernel, [], [],
            [floats, half, longs if bounded else None, EXAMPLE_SCALE, self.heads, self.queries, self.padded,
             *[EXAMPLE_INTEGER] * 3],
            ROWS=ROWS, D=head_dim, launch_pdl=True,
        )  # fmt: skip
        q_block, k_block, out_block = ([1, 1, rows, head_dim] for rows in (self.block_q, TILE_K, 64))
        row_block = [self.block_q]
        extent = [ints, ints, EXAMPLE_INTEGER, ints] if bounded else []
        # `l2_mib` decides only `at_once`, an argument: plans that differ in it alone share a binary.
        self.main = _kept(
            ("backward", *same, causal, bounded, ragged, deterministic, group > 1, down, replace(plan, l2_mib=0)),
            backward.backward_kernel,
            [half, half, half, half, floats, floats, half, half],  # q, k, v, do, lse2, delta, dk, dv
            [q_block, k_block, k_block, q_block, row_block, row_block, out_block, out_block],
            [floats, longs, ints, EXAMPLE_SCALE, *self.sizes, *extent],
            **backward_options(head_dim, causal, ragged, group > 1, deterministic, plan, bounded, down),
            maxnreg=REGISTERS[2, 1][1],  # two consumers, one CTA on a processor
            launch_pdl=True,
        )  # fmt: skip

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, scale: float, extent: tuple[Any, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Fills dq (B, H, Q, D), dk and dv (B, Hkv, K, D).

        Returns lse2 and delta, padded for each head, and the flag for NaN, (1,) int64, or None without a pattern.
        """
        stream = raw_stream(self.device)
        # dq32: dq in float32, without sm_scale; lse2: the log-sum-exp in base 2; delta: row sums of o * do.
        space = torch.empty(self.floats, dtype=torch.float32, device=q.device)
        dq32, lse2, delta, rest = space.split_with_sizes(
            (self.num_dq, self.num_rows, self.num_rows, self.floats - self.num_dq - 2 * self.num_rows)
        )
        parameters = rest.data_ptr()
        dq_semaphore = parameters + 8 * NUM_PARAMETERS
        flag = None
        if self.bounded:  # the last of the parameters
            flag = rest[2 * NUM_PARAMETERS - 2 : 2 * NUM_PARAMETERS].view(torch.int64)
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
            (dq32.data_ptr(), dq.data_ptr(), flag if flag is None else flag.data_ptr(), scale, self.heads, self.queries,
             self.padded, *_eighths(dq)),
        )  # fmt: skip
        return lse2, delta, flag


def _eighths(x: Tensor) -> tuple[int, int, int]:
    """Strides (b, h, s) divided by 8; a kernel multiplies by 8, which proves 16-byte alignment to the compiler.

    All dtypes that the row takes have 2 bytes; `with_aligned_rows` makes the strides multiples of 8.
    """
    b, h, s, _ = x.stride()
    return b // 8, h // 8, s // 8


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, plan: ForwardPlan | None = None,
    pattern: Pattern | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (B, H, Q, D), k and v (B, Hkv, K, D) -> o (B, H, Q, D) and lse (B, H, Q), natural log, float32.

    If `pattern` is given, `causal` is not read. `plan` defaults to that of plans.py for the shape.
    """
    o = _like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    q, k, v = map(with_aligned_rows, (q, k, v))
    bounded, extent = pattern is not None, ()
    if pattern is not None:
        bounds = pattern.bounds(q.shape[2], k.shape[2], q.device)  # kept until the kernel that reads it is launched
        spoilt = torch.zeros(1, dtype=torch.int64, device=q.device)
        causal, extent = True, _extent(bounds, spoilt)
        plan = plan or forward_plan(q.shape[-1], causal, k.shape[2], pattern.span(k.shape[2]))
    key = "forward", q.shape, k.shape, q.dtype, causal, bounded, q.device.index, plan
    launch = _launches.get(key)
    with torch.cuda.device_of(q):
        if launch is None:
            plan = plan or forward_plan(q.shape[-1], causal, k.shape[2])
            launch = _launches[key] = _Forward(q, k, causal, bounded, plan)
        launch.run(q, k, v, o, lse, scale, extent)
        if pattern is not None:
            flash_triton.mend_forward((q, k, v, o), lse, spoilt, scale, pattern, bounds)
    return o, lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float,
    deterministic: bool | None = None, plan: BackwardPlan | None = None, pattern: Pattern | None = None,
    together: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv): dq (B, H, Q, D), dk and dv (B, Hkv, K, D). `deterministic` defaults to what torch is set to.

    If `pattern` is given, `causal` is not read. `plan` defaults to that of plans.py for the shape. With `together` dq,
    dk and dv are parts of one tensor if q, k and v are (`custom_ops.gradients_like`).
    """
    # autograd runs this in a thread of its own, where possibly no CUDA context is bound yet. This call binds one.
    torch.cuda.is_current_stream_capturing()
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = custom_ops.gradients_like(q, k, v, _like, together)
    q, k, v, o, do = map(with_aligned_rows, (q, k, v, o, do))
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
        vectors = launch.run(q, k, v, o, lse, do, dq, dk, dv, scale, extent)
        if pattern is not None:
            flash_triton.mend_backward((q, k, v, o, do, dq, dk, dv), (lse, *vectors), scale, pattern, bounds)
    return dq, dk, dv


# The autograd Function and the function that the table names. Both take bfloat16 and float16, D 64 and 128. They add dq
# up in no fixed order, unless `torch.use_deterministic_algorithms(True)` is set.
FlashGluon, flash_gluon = custom_ops.flash(
    "flash_gluon", "FlashGluon", _forward, _backward, registered=partial(_backward, together=False)
)
