"""Additions to dq: over zeros that CTAs write for one another, or in a fixed order, where the first one stores.

In both modes a semaphore in global memory (FlashAttention's `dq_semaphore`) says when the consumers of a CTA may add.
The producer waits for it and then lets the consumers pass a named barrier.
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

# The tiles of queries that a CTA visits in each of the G heads of its group: [low, end), from `start` on; `end` is None
# where it is `num_tiles`, the tiles of a head. `steps` counts the tiles of all G heads; `last_bh` is the last of these
# heads.
Walk = namedtuple("Walk", "low end start num_tiles steps last_bh G")
# A fixed order of additions, for the CTA of key tile n: a semaphore for each tile of dq, and under a pattern where the
# intervals of the Q queries of its batch entry end (else `ends` and Q are None).
Order = namedtuple("Order", "semaphore n num_key_tiles ends Q")
# The zeros of dq, for a CTA of key head kv_bh of `num_heads`: `size` tiles for each key head, written `ahead` key heads
# before they are added to.
Clearing = namedtuple("Clearing", "dq_ptr kv_bh num_heads ahead size")
STAGES = gl.constexpr(2)
BLOCK_K = gl.constexpr(128)  # keys of a CTA, 64 of each consumer
DQ_ACQUIRED = gl.constexpr(FIRST_BARRIER.value + 1 + 2 * STAGES.value)  # named barriers: each consumer may add to dq


@gluon.jit
def next_tile(bh, m, walk, ORDER: gl.constexpr):
    """(bh, m): head and tile of queries that come after tile m of head bh.

    ORDER "straight" goes up. "around" goes up to `high`, goes on at `low`, and begins the next head when it is back at
    `start`. "down" takes the same tile of the next head, and after the last head of the group the tile below.
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
    """Lets the consumers add to dq once all `size` tiles of head kv_bh are zero; then clears a share of a later head.

    A CTA waits only for CTAs of lower numbers (see `ahead_of` in launch.py), so they must begin in that order.
    """
    is_first = clearing.kv_bh < clearing.ahead
    semaphore_wait(order.semaphore + clearing.kv_bh, gl.where(is_first, 0, order.num_key_tiles), DQ_ACQUIRED)
    later = clearing.kv_bh + clearing.ahead
    if later < clearing.num_heads:
        share = gl.cdiv(clearing.size, order.num_key_tiles)
        tile = later.to(gl.int64) * clearing.size
        for i in range(order.n * share, gl.minimum((order.n + 1) * share, clearing.size)):
            clear(clearing.dq_ptr + (tile + i) * 4096)  # floats of a tile
        thread_barrier()
        semaphore_release(order.semaphore + later)


@gluon.jit
def semaphore_value(n, m, num_key_tiles, ends, Q, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """How many CTAs come to dq's tile m before key tile n, in the deterministic order: the value to wait for.

    In full attention all key tiles begin at m = 0, and follow one another as a chain, the lowest first. Causal ones
    begin at their diagonal, so the highest comes first to every m, and nobody waits if all keep step. Under a pattern
    the highest comes first too, whether it begins later or not; `ends` points to where the intervals of this batch
    entry's queries end.
    """
    if ends is not None:
        return (gl.load(ends + (gl.minimum((m + 1) * BLOCK_Q, Q) - 1)) - 1) // BLOCK_K - n
    elif CAUSAL:
        return gl.minimum(num_key_tiles - 1, ((m + 1) * BLOCK_Q - 1) // BLOCK_K) - n
    else:
        return n


@gluon.jit
def release_and_acquire(order, step, dq_tile, walk, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr, ORDER: gl.constexpr):
    """Releases the tile of dq that step - STAGES has added to or stored, then acquires the one of the step after it.

    `dq_tile` and the result: (bh, m) of the tile that is released next.
    """
    bh, m = dq_tile
    if step >= STAGES:
        semaphore_release(order.semaphore + (bh * walk.num_tiles + m))
        bh, m = next_tile(bh, m, walk, ORDER)
    if step <= walk.steps:
        number = semaphore_value(order.n, m, order.num_key_tiles, order.ends, order.Q, CAUSAL, BLOCK_Q)
        semaphore_acquire(order.semaphore + (bh * walk.num_tiles + m), number, DQ_ACQUIRED)
    return bh, m
