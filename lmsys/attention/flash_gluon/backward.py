"""The backward: one pass over tiles of keys, five matmuls for each tile of queries, dq added up in global memory.

After FlashAttention-2 (Dao 2023, arXiv 2307.08691, Algorithm 2) with the transposed scores of FlashAttention-3:
P and dS leave the registers of one matmul for the next. dq is added up in float32. `prepare_kernel` comes before:
delta = rowsum(o * do), the log-sum-exp in base 2, and zeros for dq; `convert_kernel` comes after: dq in its own dtype.

Legend: B batch, H query heads, Hkv key heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lmsys.attention.flash_gluon.hopper import (
    FIRST_BARRIER,
    add_registers,
    admit_kernel_after,
    await_kernel_before,
    barriers,
    load_rows,
    named_barrier,
    narrow,
    owned_tile,
    store_rows,
    tma_reduce_add,
    wait_for_writes,
    widen,
)

STAGES = gl.constexpr(2)
BLOCK_K = gl.constexpr(128)  # keys of a CTA, 64 of each consumer
EXCHANGE = FIRST_BARRIER  # named barriers: both consumers have written dS; then the stages of q, and of do
Q_FREE = gl.constexpr(FIRST_BARRIER.value + 1)
DO_FREE = gl.constexpr(FIRST_BARRIER.value + 1 + STAGES.value)
NEVER = gl.constexpr(2**31 - 1)


@gluon.jit
def _await_free(step, FIRST: gl.constexpr):
    if step >= STAGES:
        named_barrier("sync", FIRST + step % STAGES, 384)


@gluon.jit
def _release(step, FIRST: gl.constexpr):
    named_barrier("arrive", FIRST + step % STAGES, 384)


@gluon.jit
def _next_tile(head, m, first, num_tiles, GROUPED: gl.constexpr):
    """After the last tile of a query head the first of the next."""
    if GROUPED:
        last = m + 1 == num_tiles
        head = gl.where(last, head + 1, head)
        m = gl.where(last, first, m + 1)
    else:
        m += 1
    return head, m


@gluon.jit
def _load_queries(q_desc, do_desc, lse_desc, delta_desc, ring, batch, head, row, padded, step):
    qs, lses, q_full, dos, deltas, do_full = ring
    stage = step % STAGES
    _await_free(step, Q_FREE)
    mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
    load_rows(q_desc, batch, head, row, q_full.index(stage), qs.index(stage))
    tma.async_copy_global_to_shared(lse_desc, [padded], q_full.index(stage), lses.index(stage))
    _await_free(step, DO_FREE)
    mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
    load_rows(do_desc, batch, head, row, do_full.index(stage), dos.index(stage))
    tma.async_copy_global_to_shared(delta_desc, [padded], do_full.index(stage), deltas.index(stage))


@gluon.jit
def _producer(
    q_desc, do_desc, lse_desc, delta_desc, ring, work, H, Q_PADDED,
    BLOCK_Q: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """All tiles of queries but the first."""
    batch, head, first, num_tiles, steps = work
    m = first
    for step in range(1, steps):
        head, m = _next_tile(head, m, first, num_tiles, GROUPED)
        row = m * BLOCK_Q
        padded = (batch * H + head) * Q_PADDED + row
        _load_queries(q_desc, do_desc, lse_desc, delta_desc, ring, batch, head, row, padded, step)
    for step in range(gl.maximum(steps, STAGES), steps + STAGES):  # arrivals have to be met before the CTA may end
        _await_free(step, Q_FREE)
    for step in range(gl.maximum(steps, STAGES), steps + STAGES):
        _await_free(step, DO_FREE)


@gluon.jit
def _last_adder(m, num_key_tiles, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """The highest of the key tiles that add to dq's tile m."""
    last = num_key_tiles - 1
    return gl.minimum(last, ((m + 1) * BLOCK_Q - 1) // BLOCK_K) if CAUSAL else last


@gluon.jit
def _turn_of(n, m, num_key_tiles, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """How many add to dq's tile m before key tile n, in the order of the deterministic mode.

    Causal tiles start at their diagonal, so the highest key tile comes first to every m, and all go on in step.
    """
    return _last_adder(m, num_key_tiles, CAUSAL, BLOCK_Q) - n if CAUSAL else n


@gluon.jit
def _hide(p, n, m, K, WG: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr, S_LAYOUT: gl.constexpr):
    """0 where a query may not look: (keys, queries), and for keys past the end."""
    keys = n * BLOCK_K + WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    queries = m * BLOCK_Q + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, S_LAYOUT))
    first = gl.where(keys < K, keys if CAUSAL else 0, NEVER)
    return gl.where(queries[None, :] >= first[:, None], p, 0.0)


@gluon.jit
def _add_in_turn(dq_desc, dq, buffer, bh, row, col, tickets, before, ticket, turn):
    """Adds dq (64, 64) to its place in its turn, once `before`, the last addition, has landed."""
    wait_for_writes()
    gl.thread_barrier()  # the thread that issued the last addition has now seen it land
    if before >= 0:
        gl.atomic_add(tickets + before, 1)
    buffer.store(dq)
    fence_async_shared()
    seen = gl.atomic_add(tickets + ticket, 0)
    while seen != turn:
        seen = gl.atomic_add(tickets + ticket, 0)
    tma_reduce_add(dq_desc, [bh, row, col], buffer._reinterpret(gl.float32, [1, 64, 64], dq_desc.layout))


@gluon.jit
def _step(
    dq_desc, dq_ptr, tickets, scale, k, v, all_k, dss, dqs, ring, n, K, masked_until, num_tiles, num_key_tiles,
    step, steps, bh, m, s, dk, dv, lse, before,
    WG: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, MASK: gl.constexpr, CAUSAL: gl.constexpr,
    PREFETCH: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr, DETERMINISTIC: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    qs, lses, q_full, dos, deltas, do_full = ring
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    stage = step % STAGES
    phase = (step // STAGES) & 1
    q = qs.index(stage)
    do = dos.index(stage)
    zeros = gl.zeros([64, BLOCK_Q], gl.float32, S_LAYOUT)
    if not AHEAD:
        mbarrier.wait(q_full.index(stage), phase)
        s_token = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=[s_token])
    if not PREFETCH:
        lse = lses.index(stage).load(ROW_LAYOUT)
    p = gl.exp2(s * scale - lse[None, :])
    if MASK:  # noqa: SIM102 - known when compiling, unlike the next
        if m < masked_until:
            p = _hide(p, n, m, K, WG, CAUSAL, BLOCK_Q, S_LAYOUT)
    p_narrow = narrow(p, DTYPE)
    p_operand = gl.convert_layout(p_narrow, P_LAYOUT)
    dv_token = warpgroup_mma(p_operand, do, dv, is_async=True)
    if PREFETCH:
        delta = deltas.index(stage).load(ROW_LAYOUT)
        dp = warpgroup_mma_wait(1, deps=[dp_token])
    else:
        dp = warpgroup_mma_wait(1, deps=[dp_token])
        delta = deltas.index(stage).load(ROW_LAYOUT)
    ds = narrow(widen(p_narrow, DTYPE) * (dp - delta[None, :]), DTYPE)  # p itself would cost its registers until here
    if EARLY:
        ds_operand = gl.convert_layout(ds, P_LAYOUT)
        dk_token = warpgroup_mma(ds_operand, q, dk, is_async=True)
    ds_shared = dss.index(step & 1)
    ds_shared.slice(WG * 64, 64).store(ds)
    fence_async_shared()
    named_barrier("sync", EXCHANGE, 256)
    dq_zeros = gl.zeros([64, 64], gl.float32, DQ_LAYOUT)
    if D == 128:  # the consumers share dq by columns, at 64 by rows
        dq_token = warpgroup_mma(
            ds_shared.permute((1, 0)), all_k.slice(WG * 64, 64, dim=1), dq_zeros, use_acc=False, is_async=True
        )
        dq_row = m * BLOCK_Q
        dq_col = WG * 64
    else:
        dq_token = warpgroup_mma(
            ds_shared.slice(WG * 64, 64, dim=1).permute((1, 0)), all_k, dq_zeros, use_acc=False, is_async=True
        )
        dq_row = m * BLOCK_Q + WG * 64
        dq_col = 0
    if not EARLY:
        ds_operand = gl.convert_layout(ds, P_LAYOUT)
        dk_token = warpgroup_mma(ds_operand, q, dk, is_async=True)
    following = step + 1
    if PREFETCH or AHEAD:
        mbarrier.wait(q_full.index(following % STAGES), (following // STAGES) & 1, pred=following < steps)
    if AHEAD:
        dk, dv, p_operand, ds_operand = warpgroup_mma_wait(1, deps=[dk_token, dv_token, p_operand, ds_operand])
        _release(step, DO_FREE)
        _release(step, Q_FREE)
        next_q = qs.index(following % STAGES)
        s_token = warpgroup_mma(k, next_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if PREFETCH:
        lse = lses.index(following % STAGES).load(ROW_LAYOUT)
    if AHEAD:
        dq = warpgroup_mma_wait(1, deps=[dq_token])
    elif EARLY:
        dk, dv, p_operand, ds_operand = warpgroup_mma_wait(1, deps=[dk_token, dv_token, p_operand, ds_operand])
        _release(step, DO_FREE)
        _release(step, Q_FREE)
        dq = warpgroup_mma_wait(0, deps=[dq_token])
    else:
        dq, dv, p_operand = warpgroup_mma_wait(1, deps=[dq_token, dv_token, p_operand])
        _release(step, DO_FREE)
    ticket = (bh * num_tiles + m) * 2 + WG
    if DETERMINISTIC:
        turn = _turn_of(n, m, num_key_tiles, CAUSAL, BLOCK_Q)
        _add_in_turn(dq_desc, dq, dqs.index(WG), bh, dq_row, dq_col, tickets, before, ticket, turn)
    else:
        add_registers(dq_ptr + ticket.to(gl.int64) * 4096, dq)
    if AHEAD:
        s = warpgroup_mma_wait(0, deps=[s_token])
    if not EARLY:
        dk, ds_operand = warpgroup_mma_wait(0, deps=[dk_token, ds_operand])
        _release(step, Q_FREE)
    return s, dk, dv, lse, ticket


@gluon.jit
def _assignment(index, num_key_tiles, num_heads, at_once, DETERMINISTIC: gl.constexpr, CAUSAL: gl.constexpr):
    """(B Hkv index, key tile) of a CTA; causal tiles the longest first, when deterministic the first to add first."""
    kv_bh, n = owned_tile(index, num_key_tiles, num_heads, at_once)
    if CAUSAL and DETERMINISTIC:
        n = num_key_tiles - 1 - n
    return kv_bh, n


@gluon.jit
def _consumer(
    dq_desc, dq_ptr, dk_desc, dv_desc, parameters, tickets, scale, kvs, ring, dss, dqs,
    bh, n, first, num_tiles, steps, masked_until, K, num_key_tiles,
    WG: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, MASK: gl.constexpr, CAUSAL: gl.constexpr,
    GROUPED: gl.constexpr, PREFETCH: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr,
    DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    ks, vs, kv_full = kvs
    DTYPE: gl.constexpr = dk_desc.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dk = gl.zeros([64, D], gl.float32, O_LAYOUT)
    dv = gl.zeros([64, D], gl.float32, O_LAYOUT)
    k = ks.slice(WG * 64, 64)
    v = vs.slice(WG * 64, 64)
    mbarrier.wait(kv_full, 0)
    s = gl.zeros([64, BLOCK_Q], gl.float32, S_LAYOUT)
    if PREFETCH or AHEAD:
        mbarrier.wait(ring[2].index(0), 0, pred=steps > 0)
    if AHEAD:
        token = warpgroup_mma(k, ring[0].index(0).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[token])
    lse = ring[1].index(0).load(gl.SliceLayout(0, S_LAYOUT))
    m = first
    before = -1
    for step in range(steps):
        s, dk, dv, lse, before = _step(
            dq_desc, dq_ptr, tickets, scale, k, v, ks, dss, dqs, ring, n, K, masked_until, num_tiles, num_key_tiles,
            step, steps, bh, m, s, dk, dv, lse, before,
            WG, D, BLOCK_Q, MASK, CAUSAL, PREFETCH, EARLY, AHEAD, DETERMINISTIC, S_LAYOUT, O_LAYOUT, DQ_LAYOUT, DTYPE,
        )  # fmt: skip
        bh, m = _next_tile(bh, m, first, num_tiles, GROUPED)
    if DETERMINISTIC:
        wait_for_writes()
        gl.thread_barrier()
        if before >= 0:
            gl.atomic_add(tickets + before, 1)
    # Once more, and from memory: what is not needed until here would occupy registers all through the loop.
    kv_heads = gl.load(parameters).to(gl.int32)
    num_key_tiles = gl.load(parameters + 1).to(gl.int32)
    num_heads = gl.load(parameters + 2).to(gl.int32)
    at_once = gl.load(parameters + 3).to(gl.int32)
    sm_scale = gl.load(parameters + 4).to(gl.int32).to(gl.float32, bitcast=True)
    kv_bh, n = _assignment(gl.program_id(0), num_key_tiles, num_heads, at_once, DETERMINISTIC, CAUSAL)
    batch = kv_bh // kv_heads
    kv_head = kv_bh % kv_heads
    row = n * BLOCK_K + WG * 64
    admit_kernel_after()
    # Through a buffer that is free now: as a slice of their tile, the rows of v do not lie together.
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], DTYPE)
    out = dqs.index(WG)._reinterpret(DTYPE, [64, D], OUT)
    if DETERMINISTIC:
        tma.store_wait(0)
        gl.thread_barrier()
    else:
        named_barrier("sync", EXCHANGE, 256)  # the other consumer may still read the last dS
    out.store(narrow(dv, DTYPE))
    fence_async_shared()
    store_rows(dv_desc, batch, kv_head, row, out)
    tma.store_wait(0)
    gl.thread_barrier()
    out.store(narrow(dk * sm_scale, DTYPE))
    fence_async_shared()
    store_rows(dk_desc, batch, kv_head, row, out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_heads", "H", "G", "Q", "Q_PADDED", "K", "num_key_tiles", "at_once"])
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, dq_ptr, parameters, tickets,
    scale, num_heads, H, G, Q, Q_PADDED, K, num_key_tiles, at_once,
    BLOCK_Q: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, GROUPED: gl.constexpr,
    PREFETCH: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """dk and dv; dq / sm_scale is added to float32 zeros (B H, Q_PADDED, D), Q_PADDED a multiple of BLOCK_Q.

    dq ends as tiles (64, 64) in the order that `add_registers` leaves them in; if DETERMINISTIC as rows, added by TMA.
    `scale` is in base 2; `parameters` are those of `prepare_kernel`; `tickets` two zeros for each tile of queries if
    DETERMINISTIC; `num_heads` is B Hkv.
    RAGGED: K is no multiple of BLOCK_K (which a causal kernel need not be told). GROUPED: G > 1.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, D], DTYPE)
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, D], DTYPE)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], DTYPE)
    DQ_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
    ks = gl.allocate_shared_memory(DTYPE, [BLOCK_K, D], K_LAYOUT)
    vs = gl.allocate_shared_memory(DTYPE, [BLOCK_K, D], K_LAYOUT)
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_Q, D], Q_LAYOUT)
    dos = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_Q, D], Q_LAYOUT)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout)
    dss = gl.allocate_shared_memory(DTYPE, [2, BLOCK_K, BLOCK_Q], DS_LAYOUT)
    dqs = dss
    if DETERMINISTIC:
        dqs = gl.allocate_shared_memory(gl.float32, [2, 64, 64], DQ_LAYOUT)
    kvs = ks, vs, barriers(1, 1).index(0)
    ring = qs, lses, barriers(STAGES, 1), dos, deltas, barriers(STAGES, 1)
    fence_async_shared()
    kv_bh, n = _assignment(gl.program_id(0), num_key_tiles, num_heads, at_once, DETERMINISTIC, CAUSAL)
    num_tiles = gl.cdiv(Q, BLOCK_Q)
    first = 0
    masked_until = 0  # tiles of queries up to here need a mask
    if CAUSAL:
        first = n * BLOCK_K // BLOCK_Q
        masked_until = (n + 1) * BLOCK_K // BLOCK_Q
    if (n + 1) * BLOCK_K > K:
        masked_until = num_tiles
    batch = kv_bh // (H // G)
    kv_head = kv_bh % (H // G)
    steps = gl.maximum(num_tiles - first, 0)
    if GROUPED:
        steps *= G
    bh = kv_bh * G
    mbarrier.expect(kvs[2], 2 * k_desc.block_type.nbytes)
    load_rows(k_desc, batch, kv_head, n * BLOCK_K, kvs[2], ks)
    load_rows(v_desc, batch, kv_head, n * BLOCK_K, kvs[2], vs)
    await_kernel_before()
    if steps > 0:
        row = first * BLOCK_Q
        padded = kv_bh * G * Q_PADDED + row
        _load_queries(q_desc, do_desc, lse_desc, delta_desc, ring, batch, kv_head * G, row, padded, 0)
    work = batch, kv_head * G, first, num_tiles, steps
    gl.warp_specialize([
            (_producer, (
                q_desc, do_desc, lse_desc, delta_desc, ring, work, H, Q_PADDED, BLOCK_Q, GROUPED
            )),
            (_consumer, (
                dq_desc, dq_ptr, dk_desc, dv_desc, parameters, tickets, scale, kvs, ring, dss, dqs, bh, n, first,
                num_tiles, steps, masked_until, K, num_key_tiles, 0, D, BLOCK_Q, CAUSAL or RAGGED, CAUSAL, GROUPED,
                PREFETCH, EARLY, AHEAD, DETERMINISTIC
            )),
            (_consumer, (
                dq_desc, dq_ptr, dk_desc, dv_desc, parameters, tickets, scale, kvs, ring, dss, dqs, bh, n, first,
                num_tiles, steps, masked_until, K, num_key_tiles, 1, D, BLOCK_Q, CAUSAL or RAGGED, CAUSAL, GROUPED,
                PREFETCH, EARLY, AHEAD, DETERMINISTIC
            )),
    ], [4, 4], [240, 240])  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "num_heads", "H", "G", "Q", "Q_PADDED", "num_key_tiles", "at_once", "num_tickets",
        "o_b", "o_h", "o_q", "do_b", "do_h", "do_q",
    ]
)  # fmt: skip
def prepare_kernel(
    o_ptr, do_ptr, lse_ptr, lse2_ptr, delta_ptr, dq32_ptr, tickets, parameters, sm_scale,
    num_heads, H, G, Q, Q_PADDED, num_key_tiles, at_once, num_tickets, o_b, o_h, o_q, do_b, do_h, do_q,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """delta and the log-sum-exp in base 2 (B H, Q_PADDED), zeros in dq (B H, Q_PADDED, D) and tickets. Strides count 8.

    The last tiles come first, so that the L2 cache holds those that the next kernel begins with.
    """
    tl.extra.cuda.gdc_launch_dependents()
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles = Q_PADDED // ROWS
    bh = program // tiles
    start = program % tiles * ROWS
    rows = start + tl.arange(0, ROWS)
    cols = tl.arange(0, D)
    inside = rows < Q
    batch, head = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    o_rows = (batch * o_b + head * o_h + rows.to(tl.int64) * o_q) * 8
    do_rows = (batch * do_b + head * do_h + rows.to(tl.int64) * do_q) * 8
    o = tl.load(o_ptr + o_rows[:, None] + cols[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    do = tl.load(do_ptr + do_rows[:, None] + cols[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    # Rows past the end get a log-sum-exp of inf, which makes their P zero.
    lse = tl.load(lse_ptr + bh.to(tl.int64) * Q + rows, mask=inside, other=float("inf"))
    padded = bh * Q_PADDED + rows
    tl.store(lse2_ptr + padded, lse * 1.4426950408889634)
    tl.store(delta_ptr + padded, tl.sum(o * do, 1))
    tl.store(dq32_ptr + (padded.to(tl.int64) * D)[:, None] + cols[None, :], tl.zeros([ROWS, D], tl.float32))
    per_program = tl.cdiv(num_tickets, tl.num_programs(0))
    for first in range(0, per_program, 128):
        ticket = program * per_program + first + tl.arange(0, 128)
        last = tl.minimum((program + 1) * per_program, num_tickets)
        tl.store(tickets + ticket, tl.zeros([128], tl.int32), mask=ticket < last)
    if program == 0:  # for what would occupy registers all through `backward_kernel`
        tl.store(parameters, H // G)
        tl.store(parameters + 1, num_key_tiles)
        tl.store(parameters + 2, num_heads // G)
        tl.store(parameters + 3, at_once)
        tl.store(parameters + 4, sm_scale.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["H", "Q", "Q_PADDED", "stride_b", "stride_h", "stride_q"])
def convert_kernel(
    dq32_ptr, dq_ptr, sm_scale, H, Q, Q_PADDED, stride_b, stride_h, stride_q,
    ROWS: tl.constexpr, D: tl.constexpr, DETERMINISTIC: tl.constexpr,
):  # fmt: skip
    """dq = sm_scale * dq32; the last tiles first, which the L2 cache may still hold."""
    tl.extra.cuda.gdc_wait()
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles = Q_PADDED // ROWS
    bh = program // tiles
    rows = program % tiles * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, D)
    inside = (rows < Q)[:, None]
    if DETERMINISTIC:
        dq = tl.load(dq32_ptr + (program.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None] * D + cols[None, :])
    else:  # see `add_registers`
        flat = tl.load(dq32_ptr + program.to(tl.int64) * ROWS * D + tl.arange(0, ROWS * D))
        dq = flat.reshape(D // 64, 8, 4, 8, 4, 2, 2).permute(2, 5, 3, 0, 1, 4, 6).reshape(ROWS, D)
    place = (bh // H).to(tl.int64) * stride_b + (bh % H).to(tl.int64) * stride_h + rows.to(tl.int64) * stride_q
    tl.store(dq_ptr + place[:, None] * 8 + cols[None, :], dq * sm_scale, mask=inside)
