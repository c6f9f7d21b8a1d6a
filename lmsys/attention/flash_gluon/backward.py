"""The backward kernel: one pass over key tiles, five matmuls for each tile of queries, dq added up in global memory.

`launch.py` launches `backward_kernel`, between the two kernels of `preprocess.py`. The arithmetic of a step is in
`backward_steps.py`, the order of additions to dq in `dq.py`, masks under a pattern in `intervals.py`, and settings in
`plans.py`: the constants in capitals from PREFETCH to PEELED are fields of a `BackwardPlan`.
`python -m pytest tests/attention/test_gluon_kernels.py` checks the kernel in a simulation without a GPU. It also finds
some lines of this file by their exact text, and replaces them by faulty ones: if you change such a line, change it
there, too. The docstring of `launch.py` says what a new argument needs; tests/support/sass_gluon.py also has a type for
each argument, by its name.

The algorithm is that of FlashAttention-2 (Dao 2023, arXiv 2307.08691, Algorithm 2), with the transposed scores of
FlashAttention-3: P and dS go from the registers of one matmul into the next. dq is added up in float32.

A CTA (a program of the kernel) owns one tile of keys, and visits tiles of queries; a *step* is the work for one of
them. It has three warp groups: a producer, which loads tiles into a ring of STAGES places in shared memory, and two
consumers, which compute. Under a pattern (windows, documents) each key has an interval of queries that see it, and the
CTA visits only tiles with queries that see its keys. The intervals are kept in shared memory for the masks, since
pointers to them would occupy registers all through the loop.

Legend: B batch, H query heads, Hkv key heads, G = H / Hkv, Q queries, K keys, D head dimension; P the softmax weights,
dS the gradient of the scores; n a tile of keys, m a tile of queries, bh a query head among all B H, kv_bh a key head
among all B Hkv. WG is the number of the consumer, 0 or 1.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from lmsys.attention.flash_gluon.backward_steps import DO_FREE, EXCHANGE, Q_FREE, Masked, Ring, walk_over
from lmsys.attention.flash_gluon.dq import (
    BLOCK_K,
    DQ_ACQUIRED,
    STAGES,
    Clearing,
    Order,
    Walk,
    clear_ahead,
    next_tile,
    release_and_acquire,
)
from lmsys.attention.flash_gluon.hopper import (
    WARPS,
    async_load,
    await_acquired,
    barriers,
    gdc_launch_dependents,
    gdc_wait,
    load_rows,
    named_barrier,
    narrow,
    owned_tile,
    reinterpret,
    store_rows,
    thread_barrier,
)
from lmsys.attention.flash_gluon.intervals import Extent, edges, intervals, note_nan

# The keys and values of a CTA in shared memory, and the barrier that completes when they are loaded.
Loaded = namedtuple("Loaded", "ks vs full")
# The tiles of queries that a CTA visits: its batch entry, its first query head, and the `Walk` of dq.py.
Work = namedtuple("Work", "batch first_bh walk")


@gluon.jit
def _await_free(step, FIRST: gl.constexpr):
    """Waits until both consumers have released the place in the ring that the tile of this step goes to.

    FIRST: the number of the named barrier of the ring's first place, Q_FREE or DO_FREE. Places are free at first.
    """
    if step >= STAGES:
        named_barrier("sync", FIRST + step % STAGES, 384)  # the threads of the CTA's three warp groups


@gluon.jit
def _load_queries(q_desc, do_desc, lse_desc, delta_desc, ring, batch, head, row, padded, step):
    """Copies q, do, log-sum-exp and delta of a tile of queries into the ring, once their places in it are free."""
    stage = step % STAGES
    _await_free(step, Q_FREE)
    mbarrier.expect(ring.q_full.index(stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
    load_rows(q_desc, batch, head, row, ring.q_full.index(stage), ring.qs.index(stage))
    async_load(lse_desc, [padded], ring.q_full.index(stage), ring.lses.index(stage))
    _await_free(step, DO_FREE)
    mbarrier.expect(ring.do_full.index(stage), do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
    load_rows(do_desc, batch, head, row, ring.do_full.index(stage), ring.dos.index(stage))
    async_load(delta_desc, [padded], ring.do_full.index(stage), ring.deltas.index(stage))


@gluon.jit
def _load_tiles(
    q_desc, do_desc, lse_desc, delta_desc, ring, work, order, dq_tile, place, first, last, H, Q_PADDED,
    BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr, ORDER: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """Loads the tiles of queries of the steps [first, last), which come after the tile at `place`, (bh, m).

    In the deterministic mode it also releases and acquires tiles of dq (`release_and_acquire`); `dq_tile` is the
    (bh, m) of the tile to release next. Returns dq_tile and place as they are after these steps.
    """
    bh, m = place
    for step in range(first, last):
        bh, m = next_tile(bh, m, work.walk, ORDER)
        row = m * BLOCK_Q
        padded = bh * Q_PADDED + row
        _load_queries(q_desc, do_desc, lse_desc, delta_desc, ring, work.batch, bh - work.batch * H, row, padded, step)
        if DETERMINISTIC:
            dq_tile = release_and_acquire(order, step, dq_tile, work.walk, BLOCK_Q, CAUSAL, ORDER)
    return dq_tile, (bh, m)


@gluon.jit
def _producer(
    q_desc, do_desc, lse_desc, delta_desc, ring, work, order, clearing, H, Q_PADDED, BLOCK_Q: gl.constexpr,
    CAUSAL: gl.constexpr, ORDER: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """The producer: loads all tiles of queries except the first, which the kernel loads before `warp_specialize`.

    In the deterministic mode it also acquires and releases the tiles of dq for the consumers. Otherwise it writes zeros
    into dq of a later head, once it has filled the ring.
    """
    steps = work.walk.steps
    dq_tile = work.first_bh, work.walk.start
    place = work.first_bh, work.walk.start
    first = 1
    if not DETERMINISTIC:
        first = gl.minimum(steps, STAGES)
        dq_tile, place = _load_tiles(
            q_desc, do_desc, lse_desc, delta_desc, ring, work, order, dq_tile, place, 1, first, H, Q_PADDED,
            BLOCK_Q, CAUSAL, ORDER, DETERMINISTIC,
        )  # fmt: skip
        clear_ahead(clearing, order)
    dq_tile, place = _load_tiles(
        q_desc, do_desc, lse_desc, delta_desc, ring, work, order, dq_tile, place, first, steps, H, Q_PADDED,
        BLOCK_Q, CAUSAL, ORDER, DETERMINISTIC,
    )  # fmt: skip
    FIRST: gl.constexpr = 1 if DETERMINISTIC else STAGES
    # Consumers release the places of all steps, also of the last ones, for which no tile follows. The producer waits
    # for these releases too: the CTA must not end before them.
    for step in range(gl.maximum(steps, FIRST), steps + STAGES):
        _await_free(step, Q_FREE)
        if DETERMINISTIC:
            dq_tile = release_and_acquire(order, step, dq_tile, work.walk, BLOCK_Q, CAUSAL, ORDER)
    for step in range(gl.maximum(steps, STAGES), steps + STAGES):
        _await_free(step, DO_FREE)


@gluon.jit
def _assignment(index, num_key_tiles, num_heads, at_once, DETERMINISTIC: gl.constexpr, CAUSAL: gl.constexpr):
    """(kv_bh, n) of the CTA `index`. CTAs work on `at_once` key heads at a time, which share the L2 cache.

    Causal heads begin with the key tile that most queries see, and in the deterministic mode with the key tile that the
    fewest see. In that mode a CTA waits only for CTAs of its head that come before it in this order. These have lower
    numbers, so they have begun: there is no deadlock, as long as the GPU starts CTAs in the order of their numbers.
    """
    kv_bh, n = owned_tile(index, num_key_tiles, num_heads, at_once)
    if DETERMINISTIC and CAUSAL:
        n = num_key_tiles - 1 - n
    return kv_bh, n


@gluon.jit
def _consumer(
    dq_ptr, dk_desc, dv_desc, parameters, scale, kvs, ring, dss,
    bh, n, walk, masked, K,
    WG: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    ORDER: gl.constexpr, PREFETCH: gl.constexpr, WIDE: gl.constexpr, LATE_DV: gl.constexpr, BY_QUERY: gl.constexpr,
    FMA_EXP: gl.constexpr, PEELED: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """A consumer: computes dk and dv of its 64 keys of the CTA's key tile, and adds its part to dq.

    Before it adds to dq it waits for the producer. In the deterministic mode it does so for each tile of dq, in
    `walk_over`. Otherwise it waits here, once, until all of dq of this key head is zero (`clear_ahead`).
    """
    DTYPE: gl.constexpr = dk_desc.dtype
    k = kvs.ks.slice(WG * 64, 64)
    v = kvs.vs.slice(WG * 64, 64)
    if not DETERMINISTIC:
        await_acquired(DQ_ACQUIRED + WG)
    mbarrier.wait(kvs.full, 0)
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk = gl.zeros([64, D], gl.float32, O_LAYOUT)
    dv = gl.zeros([64, D], gl.float32, O_LAYOUT)
    if PREFETCH:
        mbarrier.wait(ring.q_full.index(0), 0, pred=walk.steps > 0)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    lse = ring.lses.index(0).load(gl.SliceLayout(0, S_LAYOUT))
    state = bh, walk.start, dk, dv, lse
    state = walk_over(
        dq_ptr, scale, k, v, kvs.ks, dss, ring, n, K, masked, walk, state,
        WG, D, BLOCK_Q, CAUSAL, RAGGED, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY, FMA_EXP, PEELED, DETERMINISTIC,
        DTYPE,
    )  # fmt: skip
    bh, m, dk, dv, lse = state
    # These values are read and computed again, although `backward_kernel` had them: kept since then, they would occupy
    # registers all through the loop.
    kv_heads = gl.load(parameters).to(gl.int32)
    num_key_tiles = gl.load(parameters + 1).to(gl.int32)
    num_heads = gl.load(parameters + 2).to(gl.int32)
    at_once = gl.load(parameters + 3).to(gl.int32)
    sm_scale = gl.load(parameters + 4).to(gl.int32).to(gl.float32, bitcast=True)
    kv_bh, n = _assignment(gl.program_id(0), num_key_tiles, num_heads, at_once, DETERMINISTIC, CAUSAL)
    batch = kv_bh // kv_heads
    kv_head = kv_bh % kv_heads
    row = n * BLOCK_K + WG * 64
    if masked.spans is not None:  # under a pattern
        note_nan(parameters + 5, dk + dv)
    gdc_launch_dependents()
    # dk and dv go to global memory through the buffer of dS, which is free now. A slice of v's tile could not serve,
    # since its rows are not contiguous.
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], DTYPE)
    TILES: gl.constexpr = BLOCK_K * BLOCK_Q // (64 * D)  # tiles (64, D) in the buffer; Triton 3.8 reinterprets it whole
    out = reinterpret(dss.index(WG), DTYPE, [TILES, 64, D], OUT).index(0)
    named_barrier("sync", EXCHANGE, 256)  # the other consumer may still read the last dS
    out.store(narrow(dv, DTYPE))
    fence_async_shared()
    store_rows(dv_desc, batch, kv_head, row, out)
    tma.store_wait(0)
    thread_barrier()
    out.store(narrow(dk * sm_scale, DTYPE))
    fence_async_shared()
    store_rows(dk_desc, batch, kv_head, row, out)
    tma.store_wait(0)


@gluon.jit
def _visited(extent, batch, n, K, BLOCK_Q: gl.constexpr):
    """(low, end, masked_until, masked_from) of key tile n under a pattern; all four are numbers of tiles of queries.

    The CTA visits the tiles [low, end). The tiles below masked_until, and those from masked_from on, need a mask.
    """
    first, stop, full_from, full_to = edges(extent, batch, n * BLOCK_K, K, BLOCK_K)
    low = first // BLOCK_Q
    end = gl.where(first < stop, gl.cdiv(stop, BLOCK_Q), low)
    return low, end, gl.cdiv(full_from, BLOCK_Q), full_to // BLOCK_Q


@gluon.jit
def _keep_intervals(spans, extent, batch, n, K):
    """Stores the keys' intervals of queries in `spans` (4, 64), in shared memory, for the masks of the consumers.

    For the 64 keys of consumer w, spans[w] has the first query of each interval, and spans[2 + w] its length.
    """
    for w in gl.static_range(2):
        first, length = intervals(extent, batch, n * BLOCK_K + w * 64, K, 64, WARPS)
        spans.index(w).store(first)
        spans.index(2 + w).store(length)


@gluon.jit(
    do_not_specialize=[
        "num_heads", "H", "G", "Q", "Q_PADDED", "K", "num_key_tiles", "at_once", "ahead",
        "first_ptr", "end_ptr", "per_entry", "query_end_ptr",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_ptr, parameters, dq_semaphore,
    scale, num_heads, H, G, Q, Q_PADDED, K, num_key_tiles, at_once, ahead,
    first_ptr, end_ptr, per_entry, query_end_ptr,
    BLOCK_Q: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, GROUPED: gl.constexpr,
    PREFETCH: gl.constexpr, WIDE: gl.constexpr, LATE_DV: gl.constexpr, BY_QUERY: gl.constexpr, FMA_EXP: gl.constexpr,
    PEELED: gl.constexpr, SPREAD: gl.constexpr, DOWN: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """Writes dk and dv, and adds up dq / sm_scale in float32 (B H, Q_PADDED, D), Q_PADDED a multiple of BLOCK_Q.

    At the end dq has tiles (64, 64) in the order in which `add_registers` leaves them; `postprocess_kernel` restores
    rows.

    scale         sm_scale times log2(e), for exponentials in base 2
    parameters    scalars in global memory. `preprocess_kernel` has written the first five: Hkv, num_key_tiles,
                  num_heads, at_once and the bits of sm_scale. Under a pattern the sixth is the flag for NaN
    num_heads     B Hkv
    at_once       how many key heads the CTAs work on at a time (`_assignment`)
    ahead         dq begins as zeros for the first `ahead` key heads; the CTAs of each key head write zeros for the key
                  head that is `ahead` later
    dq_semaphore  points to zeros: one for each key head, or with DETERMINISTIC one for each tile of dq
    first_ptr, end_ptr, per_entry  the keys' `Extent` of `intervals.py`, under a pattern; else None
    query_end_ptr  points to the ends of the queries' intervals, under a pattern; else None
    CAUSAL        a causal mask. It is set under a pattern, too, where it gives the order of tiles
    RAGGED        K is no multiple of BLOCK_K; a causal kernel does not need this
    GROUPED       G > 1
    SPREAD        the key tiles of a head begin at different tiles of queries, evenly spread, and wrap around
    DOWN          grouped causal heads begin at the last tile of queries, and visit a tile for all G heads before the
                  tile below it. So the key tiles of a head come to a tile together, while the L2 cache holds it. If
                  they visited one head after another, they would drift apart, as lower key tiles visit more tiles of
                  each head
    DETERMINISTIC  CTAs add to dq in a fixed order. The first CTA to come to a tile of dq overwrites it, so the tile
                  need not be zeros. Under a pattern, or in full attention with K < BLOCK_K, all of dq begins as zeros
                  instead
    """
    BOUNDED: gl.constexpr = first_ptr is not None
    DTYPE: gl.constexpr = q_desc.dtype
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, D], DTYPE)
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, D], DTYPE)
    DS_ROWS: gl.constexpr = BLOCK_Q if BY_QUERY else BLOCK_K
    DS_COLUMNS: gl.constexpr = BLOCK_K if BY_QUERY else BLOCK_Q
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DS_ROWS, DS_COLUMNS], DTYPE)
    ks = gl.allocate_shared_memory(DTYPE, [BLOCK_K, D], K_LAYOUT)
    vs = gl.allocate_shared_memory(DTYPE, [BLOCK_K, D], K_LAYOUT)
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_Q, D], Q_LAYOUT)
    dos = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_Q, D], Q_LAYOUT)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout)
    dss = gl.allocate_shared_memory(DTYPE, [2, DS_ROWS, DS_COLUMNS], DS_LAYOUT)
    kvs = Loaded(ks, vs, barriers(1, 1).index(0))
    ring = Ring(qs, lses, barriers(STAGES, 1), dos, deltas, barriers(STAGES, 1))
    fence_async_shared()
    MAY_WALK_DOWN: gl.constexpr = GROUPED and CAUSAL and not BOUNDED and not DETERMINISTIC
    gl.static_assert(MAY_WALK_DOWN or not DOWN, "only grouped causal heads walk down, in no fixed order")
    ORDER: gl.constexpr = "down" if DOWN else "around" if GROUPED or SPREAD else "straight"
    kv_bh, n = _assignment(gl.program_id(0), num_key_tiles, num_heads, at_once, DETERMINISTIC, CAUSAL)
    num_tiles = gl.cdiv(Q, BLOCK_Q)
    low = 0  # the first tile of queries that sees these keys
    masked_until = 0  # tiles of queries below this number need a mask
    end, masked_from, spans, ends = None, None, None, None  # these have values under a pattern only
    if BOUNDED:
        extent = Extent(first_ptr, end_ptr, per_entry)
        low, end, masked_until, masked_from = _visited(extent, kv_bh // (H // G), n, K, BLOCK_Q)
        spans = gl.allocate_shared_memory(gl.int32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    elif CAUSAL:
        low = n * BLOCK_K // BLOCK_Q
        masked_until = (n + 1) * BLOCK_K // BLOCK_Q
    # In the deterministic mode a causal CTA stores dq, instead of adding, for exactly the tiles of queries that it
    # masks: it is the first to come to them. The last key tile is the first to come to all tiles of queries that it
    # sees, so all of them count as masked, even if K is a multiple of BLOCK_K.
    STORES: gl.constexpr = DETERMINISTIC and CAUSAL and not BOUNDED
    if (n + 1) * BLOCK_K >= K if STORES else (n + 1) * BLOCK_K > K:
        masked_until = num_tiles
    start = low
    if SPREAD:
        start = n * num_tiles // num_key_tiles
    if DOWN:
        start = num_tiles - 1
    batch = kv_bh // (H // G)
    kv_head = kv_bh % (H // G)
    steps = gl.maximum((end if BOUNDED else num_tiles) - low, 0)
    if GROUPED:
        steps *= G
    bh = kv_bh * G
    mbarrier.expect(kvs.full, 2 * k_desc.block_type.nbytes)
    load_rows(k_desc, batch, kv_head, n * BLOCK_K, kvs.full, ks)
    load_rows(v_desc, batch, kv_head, n * BLOCK_K, kvs.full, vs)
    if BOUNDED:
        _keep_intervals(spans, extent, batch, n, K)
        ends = query_end_ptr + batch * per_entry * Q
    gdc_wait()
    if steps > 0:
        row = start * BLOCK_Q
        padded = kv_bh * G * Q_PADDED + row
        _load_queries(q_desc, do_desc, lse_desc, delta_desc, ring, batch, kv_head * G, row, padded, 0)
    walk = Walk(low, end, start, num_tiles, steps, bh + G - 1, G)
    masked = Masked(masked_until, masked_from, spans)
    order = Order(dq_semaphore, n, num_key_tiles, ends, Q if BOUNDED else None)
    clearing = Clearing(dq_ptr, kv_bh, num_heads, ahead, G * (Q_PADDED * D // 4096))
    work = Work(batch, bh, walk)
    # The first function is the producer, with the kernel's own warps. The two lists at the end are for the consumers:
    # their numbers of warps, and the registers of each of their threads.
    gl.warp_specialize([
            (_producer, (
                q_desc, do_desc, lse_desc, delta_desc, ring, work, order, clearing, H, Q_PADDED, BLOCK_Q, CAUSAL,
                ORDER, DETERMINISTIC
            )),
            (_consumer, (
                dq_ptr, dk_desc, dv_desc, parameters, scale, kvs, ring, dss, bh, n, walk, masked, K,
                0, D, BLOCK_Q, CAUSAL, RAGGED, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY,
                FMA_EXP, PEELED, DETERMINISTIC
            )),
            (_consumer, (
                dq_ptr, dk_desc, dv_desc, parameters, scale, kvs, ring, dss, bh, n, walk, masked, K,
                1, D, BLOCK_Q, CAUSAL, RAGGED, ORDER, PREFETCH, WIDE, LATE_DV, BY_QUERY,
                FMA_EXP, PEELED, DETERMINISTIC
            )),
    ], [4, 4], [240, 240])  # fmt: skip
