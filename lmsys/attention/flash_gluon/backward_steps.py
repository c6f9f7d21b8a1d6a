"""The inner part of `backward_kernel`: a consumer's work for one tile of queries (`_step`), and the loops over tiles.

A CTA (a program of the kernel) owns 128 keys, and has two consumers: warp groups that compute, each for 64 of the keys.
Each consumer calls `walk_over` once, in `backward.py`. To change the arithmetic of a step, edit `_step`; to change a
mask, edit `_hide`. `tests/attention/test_gluon_kernels.py` checks the result in a simulation. It also finds some lines
of this file by their exact text, and replaces them by faulty ones: if you change such a line, change it there, too.

P and dS go from the registers of one matmul straight into the next. dq is added up in float32, in global memory. The
constants in capitals come from the fields of a `BackwardPlan` in `plans.py`; DETERMINISTIC, CAUSAL and RAGGED are those
of `backward_kernel`, and STORES is explained in `_steps`.

Legend: P the softmax weights, dS the gradient of the scores; n a tile of keys, m a tile of queries, bh a query head
among all of the batch; K keys, D head dimension. WG is the number of the consumer, 0 or 1.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lmsys.attention.flash_gluon.dq import BLOCK_K, DQ_ACQUIRED, STAGES, next_tile
from lmsys.attention.flash_gluon.hopper import (
    FIRST_BARRIER,
    add_registers,
    await_acquired,
    exp2_of_eight,
    named_barrier,
    narrow,
    store_registers,
    widen,
)
from lmsys.attention.flash_gluon.intervals import hide_outside

# Numbers of named barriers. At EXCHANGE a consumer waits until both consumers have written dS. At Q_FREE + stage and
# DO_FREE + stage the consumers tell the producer that they have read a tile of q or of do; `stage` is the tile's place
# in the ring. The numbers after these belong to `dq.py`.
EXCHANGE = FIRST_BARRIER
Q_FREE = gl.constexpr(FIRST_BARRIER.value + 1)
DO_FREE = gl.constexpr(FIRST_BARRIER.value + 1 + STAGES.value)
NEVER = gl.constexpr(2**31 - 1)  # in place of the first query that sees a key, for keys past the end: no query does
# The ring in shared memory: q, log-sum-exp, do and delta of STAGES tiles of queries. The barriers q_full and do_full
# complete when a tile is loaded: q and its log-sum-exp, and do and its delta.
Ring = namedtuple("Ring", "qs lses q_full dos deltas do_full")
# The tiles of queries that need a mask are m < `until`, and under a pattern also m >= `beginning`. `spans`, (4, 64) in
# shared memory, holds the keys' intervals under a pattern: two rows of `first` and two of `length`, one for each
# consumer (`_keep_intervals`). Without a pattern it is None.
Masked = namedtuple("Masked", "until beginning spans")


@gluon.jit
def _release(step, FIRST: gl.constexpr):
    """Tells the producer that this consumer has read the tile of this step in the ring. FIRST: Q_FREE or DO_FREE."""
    named_barrier("arrive", FIRST + step % STAGES, 384)  # the threads of the CTA's three warp groups


@gluon.jit
def _hide(
    p, n, m, K, spans, WG: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr, S_LAYOUT: gl.constexpr
):  # fmt: skip
    """P (keys, queries) of tiles n and m, with 0 for each query that does not see a key, and for keys past the end."""
    KEY_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    queries = m * BLOCK_Q + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, S_LAYOUT))
    if spans is None:
        keys = n * BLOCK_K + WG * 64 + gl.arange(0, 64, layout=KEY_LAYOUT)
        first = gl.where(keys < K, keys if CAUSAL else 0, NEVER)
        p = gl.where(queries[None, :] >= first[:, None], p, 0.0)
    else:
        first, length = spans.index(WG).load(KEY_LAYOUT), spans.index(2 + WG).load(KEY_LAYOUT)
        p = hide_outside(p, queries, first, length, 0.0)
    return p


@gluon.jit
def _step(
    dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, num_tiles, step, steps, bh, m, dk, dv, lse,
    WG: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, MASK: gl.constexpr, CAUSAL: gl.constexpr,
    PREFETCH: gl.constexpr, WIDE: gl.constexpr, LATE_DV: gl.constexpr, BY_QUERY: gl.constexpr,
    FMA_EXP: gl.constexpr, DETERMINISTIC: gl.constexpr, STORES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Computes one step, tile m of query head bh, and returns (dk, dv, lse).

    dk / sm_scale and dv, (64, D), are sums over the tiles so far, for this consumer's keys. With PREFETCH the returned
    `lse` is the log-sum-exp of the next tile, loaded a step ahead.

    dq_ptr, scale, K  as in `backward_kernel`
    n       the CTA's key tile
    k, v    this consumer's keys and values
    all_k   the keys of both consumers
    dss     dS of both consumers, in two places of shared memory that are used in turn: (keys, queries), or with
            BY_QUERY (queries, keys)
    steps   how many steps this consumer has; `step` is the number of this one
    STORES  as in `_steps`
    """
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    stage = step % STAGES
    phase = (step // STAGES) & 1
    q = ring.qs.index(stage)
    do = ring.dos.index(stage)
    zeros = gl.zeros([64, BLOCK_Q], gl.float32, S_LAYOUT)
    mbarrier.wait(ring.q_full.index(stage), phase)
    s_token = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(ring.do_full.index(stage), phase)
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_token])
    if not PREFETCH:
        lse = ring.lses.index(stage).load(ROW_LAYOUT)
    exponents = s * scale - lse[None, :]
    p = exp2_of_eight(exponents) if FMA_EXP else gl.exp2(exponents)
    if MASK:
        hides = m < masked.until
        if masked.spans is not None:
            hides = hides | (m >= masked.beginning)
        if hides:
            p = _hide(p, n, m, K, masked.spans, WG, CAUSAL, BLOCK_Q, S_LAYOUT)
    p_narrow = narrow(p, DTYPE)
    p_operand = gl.convert_layout(p_narrow, P_LAYOUT)
    if not LATE_DV:
        dv_token = warpgroup_mma(p_operand, do, dv, is_async=True)
    if PREFETCH:
        delta = ring.deltas.index(stage).load(ROW_LAYOUT)
        dp = warpgroup_mma_wait(0 if LATE_DV else 1, deps=[dp_token])
    else:
        dp = warpgroup_mma_wait(0 if LATE_DV else 1, deps=[dp_token])
        delta = ring.deltas.index(stage).load(ROW_LAYOUT)
    if WIDE:
        ds = narrow(p * (dp - delta[None, :]), DTYPE)
    else:  # to keep p in float32 until here would cost registers
        ds = narrow(widen(p_narrow, DTYPE) * (dp - delta[None, :]), DTYPE)
    ds_shared = dss.index(step & 1)
    if BY_QUERY:
        ds_shared.slice(WG * 64, 64, dim=1).permute((1, 0)).store(ds)
        ds_rows = ds_shared
    else:
        ds_shared.slice(WG * 64, 64).store(ds)
        ds_rows = ds_shared.permute((1, 0))
    if LATE_DV:
        dv_token = warpgroup_mma(p_operand, do, dv, is_async=True)
    fence_async_shared()
    # Waits for the 256 threads of both consumers.
    named_barrier("sync", EXCHANGE, 256)
    dq_zeros = gl.zeros([64, 64], gl.float32, DQ_LAYOUT)
    if D == 128:  # each consumer computes half of the columns of dq's tile; at head_dim 64, half of its rows
        dq_token = warpgroup_mma(ds_rows, all_k.slice(WG * 64, 64, dim=1), dq_zeros, use_acc=False, is_async=True)
    else:
        dq_token = warpgroup_mma(ds_rows.slice(WG * 64, 64), all_k, dq_zeros, use_acc=False, is_async=True)
    ds_operand = gl.convert_layout(ds, P_LAYOUT)
    dk_token = warpgroup_mma(ds_operand, q, dk, is_async=True)
    if PREFETCH:
        following = step + 1
        mbarrier.wait(ring.q_full.index(following % STAGES), (following // STAGES) & 1, pred=following < steps)
        lse = ring.lses.index(following % STAGES).load(ROW_LAYOUT)
    place = (bh * num_tiles + m) * 2 + WG  # a tile of queries has two tiles (64, 64) of dq, one for each consumer
    if DETERMINISTIC:
        await_acquired(DQ_ACQUIRED + WG)
    dq, dv, p_operand = warpgroup_mma_wait(1, deps=[dq_token, dv_token, p_operand])
    _release(step, DO_FREE)
    tile = dq_ptr + place.to(gl.int64) * 4096  # a tile of dq has 64 · 64 elements
    # The first CTA to reach tile m of dq is, under CAUSAL, the one with the highest key tile that m sees; otherwise it
    # is the one with the lowest key tile. It stores; all others add.
    if STORES == "some":
        if m < masked.until if CAUSAL else n == 0:
            store_registers(tile, dq)
        else:
            add_registers(tile, dq)
    elif STORES == "all":
        store_registers(tile, dq)
    else:
        add_registers(tile, dq)
    dk, ds_operand = warpgroup_mma_wait(0, deps=[dk_token, ds_operand])
    _release(step, Q_FREE)
    return dk, dv, lse


@gluon.jit
def _steps(
    dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk, first, last, state,
    WG: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, MASK: gl.constexpr, CAUSAL: gl.constexpr,
    ORDER: gl.constexpr, PREFETCH: gl.constexpr, WIDE: gl.constexpr, LATE_DV: gl.constexpr, BY_QUERY: gl.constexpr,
    FMA_EXP: gl.constexpr, DETERMINISTIC: gl.constexpr, STORES: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Computes the steps [first, last), and returns the `state` after them.

    state   (bh, m, dk / sm_scale (64, D), dv (64, D), the log-sum-exp of tile m if it is loaded ahead); bh and m are
            those of the next step
    walk    the `Walk` of `dq.py`
    STORES  which of these steps are the first to reach their tile of dq, and so store it instead of adding: "none",
            "all", or "some", where `_step` decides by m and n
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    bh, m, dk, dv, lse = state
    for step in range(first, last):
        dk, dv, lse = _step(
            dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk.num_tiles, step, walk.steps, bh, m, dk, dv, lse,
            WG, D, BLOCK_Q, MASK, CAUSAL, PREFETCH, WIDE, LATE_DV, BY_QUERY, FMA_EXP, DETERMINISTIC, STORES,
            S_LAYOUT, O_LAYOUT, DQ_LAYOUT, DTYPE,
        )  # fmt: skip
        bh, m = next_tile(bh, m, walk, ORDER)
    return bh, m, dk, dv, lse


@gluon.jit
def _causal_head(
    dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk, first, free_from, last, state,
    WG: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, ORDER: gl.constexpr, PREFETCH: gl.constexpr,
    WIDE: gl.constexpr, LATE_DV: gl.constexpr, BY_QUERY: gl.constexpr, FMA_EXP: gl.constexpr,
    DETERMINISTIC: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Computes the steps [first, last) of one head under a causal mask, and returns the `state` after them.

    The steps before `free_from` need a mask, and have a loop of their own. In the deterministic mode these steps, and
    no others, store dq instead of adding to it.
    """
    # The two booleans after BLOCK_Q are MASK and CAUSAL.
    state = _steps(
        dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk, first, free_from, state,
        WG, D, BLOCK_Q, True, True, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY, FMA_EXP, DETERMINISTIC,
        "all" if DETERMINISTIC else "none", DTYPE,
    )  # fmt: skip
    return _steps(
        dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk, free_from, last, state,
        WG, D, BLOCK_Q, False, True, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY, FMA_EXP, DETERMINISTIC, "none", DTYPE,
    )  # fmt: skip


@gluon.jit
def walk_over(
    dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk, state,
    WG: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    ORDER: gl.constexpr, PREFETCH: gl.constexpr, WIDE: gl.constexpr, LATE_DV: gl.constexpr, BY_QUERY: gl.constexpr,
    FMA_EXP: gl.constexpr, PEELED: gl.constexpr, DETERMINISTIC: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Computes all steps of a consumer, and returns the `state` after them (see `_steps`).

    Masked steps have a loop of their own if the plan is PEELED, or if this is the last, RAGGED key tile. The other
    steps then have no branch around a mask: the compiler cannot overlap instructions across such a branch. The two
    loops follow one another: as the two branches of an `if` they would spill registers.

    ORDER  the order in which `next_tile` visits tiles
    """
    # In the calls of `_steps` the two arguments after BLOCK_Q are MASK and CAUSAL.
    steps = walk.steps
    if PEELED:
        if ORDER == "straight":
            free_from = gl.minimum(gl.maximum(masked.until - walk.low, 0), steps)
            return _causal_head(
                dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk, 0, free_from, steps, state,
                WG, D, BLOCK_Q, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY, FMA_EXP, DETERMINISTIC, DTYPE,
            )  # fmt: skip
        if ORDER == "around":
            tiles = gl.maximum(walk.num_tiles - walk.low, 1)
            for first in range(0, steps, tiles):
                free_from = first + gl.minimum(gl.maximum(masked.until - walk.low, 0), tiles)
                state = _causal_head(
                    dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk, first, free_from, first + tiles, state,
                    WG, D, BLOCK_Q, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY, FMA_EXP, DETERMINISTIC, DTYPE,
                )  # fmt: skip
            return state
        # "down": the masked tiles are the lowest, so they come last.
        free_until = steps - gl.minimum(gl.maximum(masked.until - walk.low, 0) * walk.G, steps)
        state = _steps(
            dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk, 0, free_until, state,
            WG, D, BLOCK_Q, False, True, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY, FMA_EXP, False, "none", DTYPE,
        )  # fmt: skip
        return _steps(
            dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk, free_until, steps, state,
            WG, D, BLOCK_Q, True, True, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY, FMA_EXP, False, "none", DTYPE,
        )  # fmt: skip
    STORES: gl.constexpr = (
        "some" if DETERMINISTIC and masked.spans is None else "none"
    )  # a pattern's dq begins as zeros
    free_from = 0
    # RAGGED (never causal): for the last key tile all steps need a mask, for the others none. The CTA of the last key
    # tile stores nothing: it is the first to reach dq only if there is one key tile, and then dq begins as zeros.
    if RAGGED:
        free_from = gl.where(masked.until == 0, 0, steps)
        state = _steps(
            dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk,
            0, free_from, state, WG, D, BLOCK_Q, True, CAUSAL, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY,
            FMA_EXP, DETERMINISTIC, "none", DTYPE,
        )  # fmt: skip
    return _steps(
        dq_ptr, scale, k, v, all_k, dss, ring, n, K, masked, walk,
        free_from, steps, state, WG, D, BLOCK_Q, CAUSAL, CAUSAL, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY,
        FMA_EXP, DETERMINISTIC, STORES, DTYPE,
    )  # fmt: skip
