"""How the CTAs of `backward_kernel` add up dq in global memory, which many of them share.

There are two modes. By default CTAs add in any order: `clear_ahead` has each of them write zeros for heads that come
later. In the deterministic mode CTAs add in a fixed order: the first one stores, so no zeros are needed
(`release_and_acquire`). In both modes a semaphore in global memory (FlashAttention's `dq_semaphore`) says when the
consumers of a CTA may add. The producer waits for it and then lets the consumers pass a named barrier.

A CTA owns key tile n. Tile m of head bh is a tile of queries, of q and of dq.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lmsys.attention.flash_gluon.hopper import (
    FIRST_BARRIER,
    clear,
    semaphore_acquire,
    semaphore_release,
    semaphore_wait,
    thread_barrier,
)

# The tiles of queries that a CTA visits in each of the G query heads of its key head: [low, end), beginning at `start`.
# `end` is None where it equals `num_tiles`, the tiles of a head. `steps` counts the tiles of all G heads; `last_bh` is
# the last of these heads.
Walk = namedtuple("Walk", "low end start num_tiles steps last_bh G")
# What the CTA of key tile n needs to keep its turn: the semaphores, one for each tile of dq in the deterministic mode,
# else one for each key head. Under a pattern `ends` points to where the intervals of the Q queries of its batch entry
# end; otherwise `ends` and Q are None.
Order = namedtuple("Order", "semaphore n num_key_tiles ends Q")
# The zeros of dq, as a CTA of key head kv_bh of `num_heads` writes them, for the key head that comes `ahead` key heads
# later. dq of a key head has `size` pieces of 4,096 floats, as `clear` writes them.
Clearing = namedtuple("Clearing", "dq_ptr kv_bh num_heads ahead size")
STAGES = gl.constexpr(2)  # places in the ring of tiles of queries in shared memory (`backward_steps.Ring`)
BLOCK_K = gl.constexpr(128)  # keys of a CTA, 64 of each consumer
# Two named barriers, one for each consumer, at which it waits until it may add to dq. The numbers before these are of
# `backward_steps.py`: EXCHANGE, then Q_FREE and DO_FREE for each of the STAGES places.
DQ_ACQUIRED = gl.constexpr(FIRST_BARRIER.value + 1 + 2 * STAGES.value)


@gluon.jit
def next_tile(bh, m, walk, ORDER: gl.constexpr):
    """(bh, m): the head and tile of queries that a CTA visits after tile m of head bh.

    ORDER "straight" goes up. "around" goes up to `high`, continues at `low`, and begins the next head when it is back
    at `start`. "down" takes tile m of the next head, and after the last head of the group tile m - 1 of the first.
    """
    high = walk.num_tiles if walk.end is None else walk.end
    if ORDER == "down":
        ends = bh == walk.last_bh
        bh = gl.where(ends, bh + 1 - walk.G, bh + 1)
        m = gl.where(ends, m - 1, m)
    else:
        m += 1
        if ORDER == "around":
            m = gl.where(m == high, walk.low, m)
            bh = gl.where(m == walk.start, bh + 1, bh)
    return bh, m


@gluon.jit
def clear_ahead(clearing, order):
    """Lets the consumers add to dq once it is zero in all of head kv_bh. Then zeroes a share of a later head.

    A head's semaphore counts the CTAs of an earlier head that have zeroed their share of it: `num_key_tiles` at last.
    The first `ahead` heads are zero from the beginning (`preprocess_kernel`): they wait for 0, which is there at once.
    A CTA waits only for CTAs of lower numbers (see `ahead_of` in launch.py), so CTAs must start in that order.
    """
    is_first = clearing.kv_bh < clearing.ahead
    semaphore_wait(order.semaphore + clearing.kv_bh, gl.where(is_first, 0, order.num_key_tiles), DQ_ACQUIRED)
    later = clearing.kv_bh + clearing.ahead
    if later < clearing.num_heads:
        share = gl.cdiv(clearing.size, order.num_key_tiles)  # in pieces
        piece = later.to(gl.int64) * clearing.size
        for i in range(order.n * share, gl.minimum((order.n + 1) * share, clearing.size)):
            clear(clearing.dq_ptr + (piece + i) * 4096)
        thread_barrier()
        semaphore_release(order.semaphore + later)


@gluon.jit
def semaphore_value(n, m, num_key_tiles, ends, Q, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """How many CTAs add to dq's tile m before the CTA of key tile n does, in the deterministic mode.

    This is the value of the semaphore to wait for. In full attention the lowest key tile adds first, since all begin at
    m = 0. In causal attention a key tile begins at its diagonal; the highest adds first to every m, and no CTA waits as
    long as all advance equally. Under a pattern the highest adds first too; `ends` points to where the intervals of
    this batch entry's queries end.
    """
    if ends is not None:
        return (gl.load(ends + (gl.minimum((m + 1) * BLOCK_Q, Q) - 1)) - 1) // BLOCK_K - n
    elif CAUSAL:
        return gl.minimum(num_key_tiles - 1, ((m + 1) * BLOCK_Q - 1) // BLOCK_K) - n
    else:
        return n


@gluon.jit
def release_and_acquire(order, step, dq_tile, walk, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr, ORDER: gl.constexpr):
    """Releases the tile of dq that step - STAGES has written, then acquires the tile of the step after that one.

    To acquire a tile is to wait until the CTAs before this one have added to it, and then to let the consumers add. To
    release it is to let the next CTA add. The producer calls this for the steps 1 to walk.steps + STAGES - 1, from step
    STAGES on once both consumers have freed the place of step - STAGES in the ring, behind their additions to dq. The
    first call has nothing to release, and the last one nothing to acquire.

    `dq_tile` is the (bh, m) of the tile to release here. The result is the (bh, m) of the tile to release next.
    """
    bh, m = dq_tile
    if step >= STAGES:
        semaphore_release(order.semaphore + (bh * walk.num_tiles + m))
        bh, m = next_tile(bh, m, walk, ORDER)
    if step <= walk.steps:
        number = semaphore_value(order.n, m, order.num_key_tiles, order.ends, order.Q, CAUSAL, BLOCK_Q)
        semaphore_acquire(order.semaphore + (bh * walk.num_tiles + m), number, DQ_ACQUIRED)
    return bh, m
