"""The forward kernel: one producer warp group loads, two or three consumer warp groups of 64 queries each compute.

`launch.py` launches `forward_kernel`, which writes o and the log-sum-exp; its settings are a `ForwardPlan` of
`plans.py`. The algorithm is FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608, Algorithms 1 and 2).

A CTA (a program of the kernel) takes one tile of queries after another. For each it visits the key tiles from the last
to the first, so that the key tiles that need a mask come first. A step computes Q Kᵀ of one key tile, and P V of the
key tile visited before. With OVERLAP, P V runs while the softmax of the step is computed. Without it, where two CTAs
share a multiprocessor, P V comes first, and the matmuls of one CTA run during the softmax of the other. With PING_PONG
the consumers of a CTA take turns at the tensor cores.

Under a pattern (windows, documents) a CTA visits the key tiles between the first and the last that its queries see. A
consumer skips those at either end that only other consumers need (`_pass_over`).

Producer and consumers share a protocol of waits and releases. A change of scores or masks need not touch it:

- A ring is a buffer of S slots in shared memory, which are used in turn; those of `Ring` are called stages. The n-th
  use has slot n % S and phase (n // S) & 1. A consumer waits for the barrier `full` with this phase, the producer for
  `empty` with the opposite phase, so that the producer does not wait in the first round.
- `fill` counts key tiles, `turn` tiles of queries. The producer and all consumers must advance them alike.
- For each key tile every consumer waits for `k_full`, waits for its turn and passes it on (PING_PONG), and releases K.
  It waits for `v_full` and releases V one step later, since P V of a key tile runs in the step of the next key tile.
- A consumer must do all of this for every key tile. For a key tile that it skips, `_pass_over` does all of it at once.

Scores are computed in `_weights` and `_step`, masks in `hide` of `intervals.py`, and settings are chosen in `plans.py`.
`python -m pytest tests/attention/test_gluon_kernels.py` checks all of this in a simulation without a GPU, and
`tests/attention/test_flash_gluon.py` on a GPU. The first also finds some lines of this file by their exact text, and
replaces them by faulty ones: if you change such a line, change it there, too.

Legend: B batch, H query heads, G query heads of one key head, Q queries, K keys, D head dimension. WG is the number of
a consumer among the WGS of a CTA. K_FREE and V_FREE are the numbers of the first named barriers for the release of K
and of V; stage s has the number K_FREE + s or V_FREE + s.
"""

from collections import namedtuple

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
    WARPS,
    barriers,
    gdc_launch_dependents,
    gdc_wait,
    load_rows,
    named_barrier,
    narrow,
    owned_tile,
    scale_rows,
    store_rows,
    thread_barrier,
)
from lmsys.attention.flash_gluon.intervals import (
    ROWS,
    Extent,
    Hides,
    hide,
    intervals,
    key_tiles,
    note_nan,
    own_key_tiles,
)

LN_2 = gl.constexpr(0.6931471805599453)
# The least value of a row's maximum. Where all scores of a row are hidden (-inf), it keeps the maximum finite, so that
# exp2(-inf - LEAST) is 0; with a maximum of -inf the difference would be NaN.
LEAST = gl.constexpr(-1.0e30)
# Buffers in shared memory, each with a barrier for "loaded" (full) and one for "released" (empty). `Slots` occur twice:
# `queries` holds tiles of queries, and in the `mailbox` the producer tells the consumers the number of the next tile.
Slots = namedtuple("Slots", "tiles full empty")  # two slots each
Ring = namedtuple("Ring", "ks k_full k_empty vs v_full v_empty")  # STAGES tiles of keys, and as many of values
# num_heads = B H; num_tiles: tiles of queries in a head; at_once: heads worked on together, for the L2 cache.
Sizes = namedtuple("Sizes", "num_heads H G Q K num_tiles at_once")


@gluon.jit
def _announce(mailbox, turn, index):
    """The producer writes the number of the next tile of queries into one of the mailbox's two slots.

    `turn` counts the tiles announced before.
    """
    mbarrier.wait(mailbox.empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    mailbox.tiles.index(turn & 1).store(gl.full([1], index, gl.int32, WARPS))
    mbarrier.arrive(mailbox.full.index(turn & 1), count=1)


@gluon.jit
def _announced(mailbox, turn):
    """The number of the tile that the producer has announced for this turn; a consumer waits for it here."""
    mbarrier.wait(mailbox.full.index(turn & 1), (turn >> 1) & 1)
    index = gl.max(mailbox.tiles.index(turn & 1).load(WARPS), 0)
    mbarrier.arrive(mailbox.empty.index(turn & 1), count=1)
    return index


@gluon.jit
def _await_free(empty, stage, fill, NAMED: gl.constexpr, FIRST: gl.constexpr, WGS: gl.constexpr, STAGES: gl.constexpr):
    """The producer waits until all consumers have released the ring's `stage`. `fill`: key tiles loaded so far.

    With NAMED the consumers release it at the named barrier FIRST + stage, otherwise at the mbarriers `empty`. The
    named barrier counts 128 * (WGS + 1) threads: 128 of each consumer, which arrive, and 128 of the producer, which
    waits.
    """
    if NAMED:
        if fill >= STAGES:
            named_barrier("sync", FIRST + stage, 128 * (WGS + 1))
    else:
        mbarrier.wait(empty.index(stage), ((fill // STAGES) & 1) ^ 1)


@gluon.jit
def _release(empty, stage, NAMED: gl.constexpr, FIRST: gl.constexpr, WGS: gl.constexpr):
    """A consumer has read the tile in the ring's `stage`, which the producer may now overwrite."""
    if NAMED:
        named_barrier("arrive", FIRST + stage, 128 * (WGS + 1))
    else:
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, counter, queries, ring, mailbox, sizes, extent,
    WGS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    NAMED: gl.constexpr, DYNAMIC: gl.constexpr, CHAINED: gl.constexpr, K_FREE: gl.constexpr, V_FREE: gl.constexpr,
):  # fmt: skip
    """Loads the queries of each tile that this CTA takes, and the keys and values that they see, the last tile first.

    DYNAMIC: the next tile of queries comes from `counter`, which all CTAs share; otherwise it follows from the number
    of the CTA. CHAINED: this kernel may begin before the kernel that precedes it in its stream has ended.
    """
    fill = 0
    turn = 0
    index = gl.program_id(0)
    total = sizes.num_heads * sizes.num_tiles
    # The kernel before this one may still write the tensors and the counter. Only the producer has to wait for its end:
    # consumers write nothing before they get tiles from here.
    if CHAINED:
        gdc_wait()
    while index < total:
        if DYNAMIC:
            _announce(mailbox, turn, index)
        bh, tile = owned_tile(index, sizes.num_tiles, sizes.num_heads, sizes.at_once)
        if CAUSAL:
            tile = sizes.num_tiles - 1 - tile
        batch = bh // sizes.H
        head = bh % sizes.H
        slot = turn & 1
        mbarrier.wait(queries.empty.index(slot), ((turn >> 1) & 1) ^ 1)
        mbarrier.expect(queries.full.index(slot), WGS * q_desc.block_type.nbytes)
        for w in gl.static_range(WGS):
            row = (tile * WGS + w) * ROWS
            load_rows(q_desc, batch, head, row, queries.full.index(slot), queries.tiles.index(slot * WGS + w))
        low, high = key_tiles(extent, bh, sizes.H, tile, sizes.Q, sizes.K, CAUSAL, WGS * ROWS, BLOCK_K)
        for j in range(high - low):
            col = (high - 1 - j) * BLOCK_K
            stage = fill % STAGES
            _await_free(ring.k_empty, stage, fill, NAMED, K_FREE, WGS, STAGES)
            mbarrier.expect(ring.k_full.index(stage), k_desc.block_type.nbytes)
            load_rows(k_desc, batch, head // sizes.G, col, ring.k_full.index(stage), ring.ks.index(stage))
            _await_free(ring.v_empty, stage, fill, NAMED, V_FREE, WGS, STAGES)
            mbarrier.expect(ring.v_full.index(stage), v_desc.block_type.nbytes)
            load_rows(v_desc, batch, head // sizes.G, col, ring.v_full.index(stage), ring.vs.index(stage))
            fill += 1
        turn += 1
        if DYNAMIC:
            index = gl.atomic_add(counter, 1) + gl.num_programs(0)
        else:
            index += gl.num_programs(0)
    if CHAINED:
        gdc_launch_dependents()
    if DYNAMIC:
        # The end is announced before the ring is drained: a consumer that still waits for the number of a tile would
        # never release the stage that the drain waits for.
        _announce(mailbox, turn, index)
        if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:  # the last CTA resets both numbers to 0
            gl.store(counter, 0)
            gl.store(counter + 1, 0)
    if NAMED:  # consumers release the last stages, too, and the producer must meet them there before the CTA ends
        for i in range(gl.maximum(fill - STAGES, 0), fill):
            named_barrier("sync", K_FREE + i % STAGES, 128 * (WGS + 1))
            named_barrier("sync", V_FREE + i % STAGES, 128 * (WGS + 1))


@gluon.jit
def _partial_sums(p, BLOCK_K: gl.constexpr):
    """(ROWS, 4): the sums of p (ROWS, BLOCK_K) over the columns that one thread holds.

    Four threads hold a row of a matmul's result: of every 8 columns each holds 2 that are adjacent.
    """
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, BLOCK_K // 8, 4, 2]), 3), 1)


@gluon.jit
def _weights(
    q, k, scale, row, col, K, hides,
    WG: gl.constexpr, WGS: gl.constexpr, BLOCK_K: gl.constexpr, PING_PONG: gl.constexpr, CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr,
):  # fmt: skip
    """(maxima (ROWS,), weights (ROWS, BLOCK_K)) of a consumer's first key tile: exp2 of scores minus their maximum.

    `row` is the consumer's first query, `col` the first key of the tile. Without a pattern no other key tile needs a
    mask (under causal order because BLOCK_K is a multiple of ROWS). The ping-pong's barriers count 256 threads: 128 of
    the consumer that waits, and 128 of the consumer that arrives.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    if PING_PONG:
        named_barrier("sync", FIRST_BARRIER + WG, 256)
    zeros = gl.zeros([ROWS, BLOCK_K], gl.float32, LAYOUT)
    scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if PING_PONG:
        named_barrier("arrive", FIRST_BARRIER + (WG + 1) % WGS, 256)
    s = warpgroup_mma_wait(0, deps=[scores])
    if CAUSAL or RAGGED:
        s = hide(s, row, col, K, hides, CAUSAL, BLOCK_K, LAYOUT)
        top = gl.maximum(gl.max(s, 1) * scale, LEAST)
    else:
        top = gl.max(s, 1) * scale
    return top, gl.exp2(s * scale - top[:, None])


@gluon.jit
def _first_weights(
    q, k, scale, row, col, K, hides,
    WG: gl.constexpr, WGS: gl.constexpr, BLOCK_K: gl.constexpr, PING_PONG: gl.constexpr, CAUSAL: gl.constexpr,
    RAGGED: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """As `_weights`, but if no query sees the right half of the tile, only the left half is computed; the rest is 0.

    Under causal order no query sees the right half if the tile has more than ROWS keys and begins at the consumer's
    first query. Under a pattern no query sees it if all of their intervals end before it.
    """
    if CAUSAL and BLOCK_K > ROWS:
        half = row == col
        if hides.extent.first is not None:
            half = hides.stop <= col + ROWS
        if half:
            top, left = _weights(
                q, k.slice(0, ROWS), scale, row, col, K, hides, WG, WGS, ROWS, PING_PONG, CAUSAL, RAGGED
            )
            both = gl.join(left, gl.zeros_like(left)).permute((0, 2, 1)).reshape([ROWS, BLOCK_K])
            weights = gl.convert_layout(both, S_LAYOUT, assert_trivial=True)
            top = gl.convert_layout(top, gl.SliceLayout(1, S_LAYOUT), assert_trivial=True)
        else:
            top, weights = _weights(q, k, scale, row, col, K, hides, WG, WGS, BLOCK_K, PING_PONG, CAUSAL, RAGGED)
    else:
        top, weights = _weights(q, k, scale, row, col, K, hides, WG, WGS, BLOCK_K, PING_PONG, CAUSAL, RAGGED)
    return top, weights


@gluon.jit
def _pass_over(
    ring, fill,
    WG: gl.constexpr, WGS: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr,
    NAMED: gl.constexpr, K_FREE: gl.constexpr, V_FREE: gl.constexpr,
):  # fmt: skip
    """Skips a key tile that only other consumers of the CTA need: waits until it is loaded, and releases it unread."""
    stage = fill % STAGES
    phase = (fill // STAGES) & 1
    mbarrier.wait(ring.k_full.index(stage), phase)
    if PING_PONG:
        named_barrier("sync", FIRST_BARRIER + WG, 256)
        named_barrier("arrive", FIRST_BARRIER + (WG + 1) % WGS, 256)
    _release(ring.k_empty, stage, NAMED, K_FREE, WGS)
    mbarrier.wait(ring.v_full.index(stage), phase)
    _release(ring.v_empty, stage, NAMED, V_FREE, WGS)


@gluon.jit
def _step(
    q, ring, zeros, acc, top, total, p, fill, scale, row, col, K, hides,
    WG: gl.constexpr, WGS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr,
    OVERLAP: gl.constexpr, NAMED: gl.constexpr, K_FREE: gl.constexpr, V_FREE: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """(acc, top, total, p) after the scores of this key tile, and P V of the key tile visited before it.

    acc    (ROWS, D), the output so far, without this key tile, relative to top
    top    (ROWS,), the maxima of the scaled scores
    total  (ROWS, 4), the `_partial_sums` of weights, relative to top
    p      (ROWS, BLOCK_K), the weights of this key tile, for P V in the next step

    With OVERLAP both products run at once, otherwise P V comes first. Only under a pattern may the tile need a mask.
    """
    stage = fill % STAGES
    before = (fill - 1) % STAGES
    mbarrier.wait(ring.k_full.index(stage), (fill // STAGES) & 1)
    if PING_PONG:
        named_barrier("sync", FIRST_BARRIER + WG, 256)
    if OVERLAP:
        scores = warpgroup_mma(q, ring.ks.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(ring.v_full.index(before), ((fill - 1) // STAGES) & 1)
    product = warpgroup_mma(p, ring.vs.index(before), acc, is_async=True)
    if not OVERLAP:
        acc, p = warpgroup_mma_wait(0, deps=[product, p])
        _release(ring.v_empty, before, NAMED, V_FREE, WGS)
        scores = warpgroup_mma(q, ring.ks.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if PING_PONG:
        named_barrier("arrive", FIRST_BARRIER + (WG + 1) % WGS, 256)
    s = warpgroup_mma_wait(1 if OVERLAP else 0, deps=[scores])
    _release(ring.k_empty, stage, NAMED, K_FREE, WGS)
    if hides.extent.first is not None:  # noqa: SIM102 - decided at compile time, unlike the next `if`
        if (col < hides.full_from) | (col + BLOCK_K > hides.full_to):
            s = hide(s, row, col, K, hides, True, BLOCK_K, S_LAYOUT)  # True: CAUSAL, which a pattern replaces
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    weights = gl.exp2(s * scale - new_top[:, None])
    rescale = gl.exp2(top - new_top)
    total = scale_rows(total, rescale) + _partial_sums(weights, BLOCK_K)
    if OVERLAP:
        acc, p = warpgroup_mma_wait(0, deps=[product, p])
        _release(ring.v_empty, before, NAMED, V_FREE, WGS)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
    p = gl.convert_layout(narrow(weights, DTYPE), P_LAYOUT)
    return acc, new_top, total, p


@gluon.jit
def _consumer(
    o_desc, lse_ptr, spoilt_ptr, scale, outs, queries, ring, mailbox, sizes, extent,
    WG: gl.constexpr, WGS: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    PING_PONG: gl.constexpr, OVERLAP: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    NAMED: gl.constexpr, DYNAMIC: gl.constexpr, K_FREE: gl.constexpr, V_FREE: gl.constexpr,
):  # fmt: skip
    """Computes o and the log-sum-exp of ROWS queries, those of consumer WG of WGS, in each tile that this CTA takes."""
    DTYPE: gl.constexpr = o_desc.dtype
    BOUNDED: gl.constexpr = extent.first is not None
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    fill = 0
    turn = 0
    if PING_PONG and WG == WGS - 1:  # gives consumer 0 the first turn
        named_barrier("arrive", FIRST_BARRIER, 256)
    index = gl.program_id(0)
    if DYNAMIC:
        index = _announced(mailbox, 0)
    while index < sizes.num_heads * sizes.num_tiles:
        bh, tile = owned_tile(index, sizes.num_tiles, sizes.num_heads, sizes.at_once)
        if CAUSAL:
            tile = sizes.num_tiles - 1 - tile
        row = (tile * WGS + WG) * ROWS
        low, high = key_tiles(extent, bh, sizes.H, tile, sizes.Q, sizes.K, CAUSAL, WGS * ROWS, BLOCK_K)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        zeros = gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT)
        slot = turn & 1
        q = queries.tiles.index(slot * WGS + WG)
        mbarrier.wait(queries.full.index(slot), (turn >> 1) & 1)
        own_low, own_high = low, high
        hides = Hides(extent, 0, 0, 0, 0, 0)  # without a pattern nothing reads the zeros
        if BOUNDED:
            batch = bh // sizes.H
            own_low, own_high, stop, full_from, full_to = own_key_tiles(extent, batch, row, low, high, sizes.Q, BLOCK_K)
            first, length = intervals(extent, batch, row, sizes.Q, ROWS, ROW_LAYOUT)
            hides = Hides(extent, first, length, stop, full_from, full_to)
        elif CAUSAL and WGS * ROWS > BLOCK_K:  # the last key tiles may lie beyond this consumer's queries
            own_high = gl.cdiv(gl.minimum(sizes.K, row + ROWS), BLOCK_K)
        if BOUNDED or (CAUSAL and WGS * ROWS > BLOCK_K):
            for _ in range(own_high, high):
                _pass_over(ring, fill, WG, WGS, STAGES, PING_PONG, NAMED, K_FREE, V_FREE)
                fill += 1
        stage = fill % STAGES
        mbarrier.wait(ring.k_full.index(stage), (fill // STAGES) & 1)
        top, weights = _first_weights(
            q, ring.ks.index(stage), scale, row, (own_high - 1) * BLOCK_K, sizes.K, hides, WG, WGS, BLOCK_K, PING_PONG,
            CAUSAL, RAGGED, S_LAYOUT,
        )  # fmt: skip
        _release(ring.k_empty, stage, NAMED, K_FREE, WGS)
        total = _partial_sums(weights, BLOCK_K)
        p = gl.convert_layout(narrow(weights, DTYPE), P_LAYOUT)
        fill += 1
        for j in range(1, own_high - own_low):
            col = (own_high - 1 - j) * BLOCK_K
            acc, top, total, p = _step(
                q, ring, zeros, acc, top, total, p, fill, scale, row, col, sizes.K, hides,
                WG, WGS, BLOCK_K, STAGES, PING_PONG, OVERLAP, NAMED, K_FREE, V_FREE,
                S_LAYOUT, O_LAYOUT, P_LAYOUT, DTYPE,
            )  # fmt: skip
            fill += 1
        mbarrier.arrive(queries.empty.index(slot), count=1)
        before = (fill - 1) % STAGES
        mbarrier.wait(ring.v_full.index(before), ((fill - 1) // STAGES) & 1)
        product = warpgroup_mma(p, ring.vs.index(before), acc, is_async=True)
        sums = gl.convert_layout(gl.sum(total, 1), ROW_LAYOUT)
        lse = (top + gl.log2(sums)) * LN_2
        if BOUNDED:
            sums = gl.where(sums == 0.0, 1.0, sums)  # a query that sees nothing: o is 0, and the log-sum-exp -inf
        inverse = gl.convert_layout(1.0 / sums, gl.SliceLayout(1, O_LAYOUT))
        turn += 1
        # Under a pattern the remaining key tiles are released before the next tile is awaited: the producer announces
        # that tile only after it has loaded all of these.
        if BOUNDED:
            acc, p = warpgroup_mma_wait(0, deps=[product, p])
            _release(ring.v_empty, before, NAMED, V_FREE, WGS)
            for _ in range(low, own_low):
                _pass_over(ring, fill, WG, WGS, STAGES, PING_PONG, NAMED, K_FREE, V_FREE)
                fill += 1
        if DYNAMIC:
            index = _announced(mailbox, turn)
        else:
            index += gl.num_programs(0)
        if not BOUNDED:
            acc, p = warpgroup_mma_wait(0, deps=[product, p])
            _release(ring.v_empty, before, NAMED, V_FREE, WGS)
        acc = acc * inverse[:, None]
        if row < sizes.Q:
            if BOUNDED:
                note_nan(spoilt_ptr, acc)
            out = outs.index(WG)
            tma.store_wait(0)
            thread_barrier()  # the thread that issued the last store has now seen that its data left shared memory
            out.store(acc.to(DTYPE))
            fence_async_shared()
            store_rows(o_desc, bh // sizes.H, bh % sizes.H, row, out)
            rows = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
            gl.store(lse_ptr + bh.to(gl.int64) * sizes.Q + rows, lse, mask=rows < sizes.Q)
    if PING_PONG and WG == 0:  # takes the turn that the last consumer has passed on after its last tile
        named_barrier("sync", FIRST_BARRIER, 256)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_heads", "H", "G", "Q", "K", "num_tiles", "at_once", "first_ptr", "end_ptr", "per_entry",
        "spoilt_ptr",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter, scale, num_heads, H, G, Q, K, num_tiles, at_once,
    first_ptr, end_ptr, per_entry, spoilt_ptr,
    BLOCK_K: gl.constexpr, D: gl.constexpr, WGS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PING_PONG: gl.constexpr, OVERLAP: gl.constexpr, NAMED: gl.constexpr, DYNAMIC: gl.constexpr,
    CHAINED: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Writes o (B, H, Q, D) and lse (B, H, Q), natural log, float32.

    `scale` includes the factor log2(e). `counter` points to two int32 zeros, which are zero again at the end. The
    integers from `num_heads` to `at_once` are those of `Sizes`; one binary serves all of their values.
    `launch.forward_options` sets the constants by a `ForwardPlan`: BLOCK_K is its `tile_k`, WGS its `consumers`, and
    OVERLAP says that `ctas` is 1. REGISTERS, those of a consumer's thread, follow from `consumers` and `ctas`. STAGES,
    PING_PONG, NAMED, DYNAMIC and CHAINED are the plan's fields of these names.
    RAGGED: K is no multiple of BLOCK_K. It is set only for kernels without CAUSAL; a causal kernel always masks the
    keys past the end.
    `first_ptr`, `end_ptr` and `per_entry` are the queries' `Extent` of `intervals.py`, and `spoilt_ptr` points to the
    flag of `note_nan`; all are None without a pattern. Under a pattern CAUSAL is set as well: tiles have the order of
    causal attention, and the consumers of a CTA do not all see the same keys.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, D], DTYPE)
    qs = gl.allocate_shared_memory(DTYPE, [2 * WGS, ROWS, D], Q_LAYOUT)
    outs = gl.allocate_shared_memory(DTYPE, [WGS, ROWS, D], Q_LAYOUT)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_K, D], K_LAYOUT)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_K, D], K_LAYOUT)
    tiles = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queries = Slots(qs, barriers(2, 1), barriers(2, WGS))
    k_full, v_full = barriers(STAGES, 1), barriers(STAGES, 1)
    # Make no barrier that nobody waits at: Triton sees no use of it after its initialisation, and reuses its memory for
    # what `atomic_add` returns, without mbarrier.inval. Where processes took turns on a GPU, such kernels hung or left
    # tiles out.
    if NAMED:
        ring = Ring(ks, k_full, k_full, vs, v_full, v_full)  # k_full, v_full as `empty`: placeholders, never waited at
    else:
        ring = Ring(ks, k_full, barriers(STAGES, WGS), vs, v_full, barriers(STAGES, WGS))
    if DYNAMIC:
        mailbox = Slots(tiles, barriers(2, 1), barriers(2, WGS))
    else:
        mailbox = Slots(tiles, k_full, k_full)  # placeholders, never waited at
    sizes = Sizes(num_heads, H, G, Q, K, num_tiles, at_once)
    extent = Extent(first_ptr, end_ptr, per_entry)
    fence_async_shared()
    # Named barriers: WGS for the ping-pong, then one for each stage of K and of V.
    K_FREE: gl.constexpr = FIRST_BARRIER + (WGS if PING_PONG else 0)
    V_FREE: gl.constexpr = K_FREE + STAGES
    gl.static_assert(not NAMED or V_FREE + STAGES <= 16, "there are 16 named barriers")
    if WGS == 2:
        gl.warp_specialize([
            (_producer, (
                q_desc, k_desc, v_desc, counter, queries, ring, mailbox, sizes, extent, WGS, BLOCK_K, STAGES, CAUSAL,
                NAMED, DYNAMIC, CHAINED, K_FREE, V_FREE
            )),
            (_consumer, (
                o_desc, lse_ptr, spoilt_ptr, scale, outs, queries, ring, mailbox, sizes, extent, 0, WGS, BLOCK_K, D,
                STAGES, PING_PONG, OVERLAP, CAUSAL, RAGGED, NAMED, DYNAMIC, K_FREE, V_FREE
            )),
            (_consumer, (
                o_desc, lse_ptr, spoilt_ptr, scale, outs, queries, ring, mailbox, sizes, extent, 1, WGS, BLOCK_K, D,
                STAGES, PING_PONG, OVERLAP, CAUSAL, RAGGED, NAMED, DYNAMIC, K_FREE, V_FREE
            )),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_producer, (
                q_desc, k_desc, v_desc, counter, queries, ring, mailbox, sizes, extent, WGS, BLOCK_K, STAGES, CAUSAL,
                NAMED, DYNAMIC, CHAINED, K_FREE, V_FREE
            )),
            (_consumer, (
                o_desc, lse_ptr, spoilt_ptr, scale, outs, queries, ring, mailbox, sizes, extent, 0, WGS, BLOCK_K, D,
                STAGES, PING_PONG, OVERLAP, CAUSAL, RAGGED, NAMED, DYNAMIC, K_FREE, V_FREE
            )),
            (_consumer, (
                o_desc, lse_ptr, spoilt_ptr, scale, outs, queries, ring, mailbox, sizes, extent, 1, WGS, BLOCK_K, D,
                STAGES, PING_PONG, OVERLAP, CAUSAL, RAGGED, NAMED, DYNAMIC, K_FREE, V_FREE
            )),
            (_consumer, (
                o_desc, lse_ptr, spoilt_ptr, scale, outs, queries, ring, mailbox, sizes, extent, 2, WGS, BLOCK_K, D,
                STAGES, PING_PONG, OVERLAP, CAUSAL, RAGGED, NAMED, DYNAMIC, K_FREE, V_FREE
            )),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
