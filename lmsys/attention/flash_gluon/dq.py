"""Says when the CTAs of `backward_kernel` may add to dq in global memory, where each tile is a sum over many CTAs.

`backward.py` calls these functions in its producer warp group (the one that loads). The consumer warp groups, which
compute, do the additions themselves, in `backward_steps.py`. To visit tiles of queries in another order, add a value of
ORDER to `next_tile` and to `walk_over` in `backward_steps.py`; `semaphore_value` must fit the order.
`tests/attention/test_gluon_kernels.py` finds some lines of this file by their exact text: change them there, too.

There are two modes. By default CTAs add in any order. dq must then begin as zeros: each CTA writes zeros for a head
that later CTAs work on (`clear_ahead`). In the deterministic mode CTAs add in a fixed order (`semaphore_value`). There
the first CTA stores instead of adding, so dq needs no zeros; `backward_kernel` names the exceptions. In both modes a
semaphore in global memory (FlashAttention's `dq_semaphore`) says when the consumers of a CTA may add. The producer
waits for it and then lets the consumers pass a named barrier.

A CTA is a program of the kernel. It owns key tile n, and visits tiles of queries. Tile m of head bh means tile m of the
queries of that head, with its rows of q and of dq.
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
# Without a pattern `end` is None, which stands for `num_tiles`, the number of tiles in a head. `steps` is the number of
# tiles in all G heads together; `last_bh` is the last of these heads.
Walk = namedtuple("Walk", "low end start num_tiles steps last_bh G")
# By an `Order` the CTA of key tile n knows when it may add. `semaphore` points to the semaphores: one for each tile of
# dq in the deterministic mode, else one for each key head. A pattern gives each of the Q queries of a batch entry an
# interval of keys; `ends` points to the ends of these intervals. Without a pattern `ends` and Q are None.
Order = namedtuple("Order", "semaphore n num_key_tiles ends Q")
# The zeros that a CTA of key head kv_bh writes: into dq of key head kv_bh + ahead, if that is less than `num_heads`,
# the key heads of all batch entries. dq of a key head has `size` pieces of 4,096 floats; `clear` writes one piece.
Clearing = namedtuple("Clearing", "dq_ptr kv_bh num_heads ahead size")
STAGES = gl.constexpr(2)  # places in the ring of tiles of queries in shared memory (`backward_steps.Ring`)
BLOCK_K = gl.constexpr(128)  # keys of a CTA, 64 of each consumer
# The first of two named barriers, one for each consumer, which waits there until it may add to dq. The lower numbers
# belong to `backward_steps.py`: EXCHANGE, then Q_FREE and DO_FREE for each of the STAGES places.
DQ_ACQUIRED = gl.constexpr(FIRST_BARRIER.value + 1 + 2 * STAGES.value)


@gluon.jit
def next_tile(bh, m, walk, ORDER: gl.constexpr):
    """(bh, m): the head and tile of queries that a CTA visits after tile m of head bh.

    ORDER "straight": tile m + 1 of the same head. "around": tile m + 1 as well, but `low` follows the last tile, and
    when `start` is reached again, the next head begins there. "down": tile m of the next head; after the last of the G
    heads follows tile m - 1 of the first.
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
    """Lets the consumers add to dq once it is zero in all of key head kv_bh. Then zeroes a share of a later head.

    The `num_key_tiles` CTAs of a head each zero a share of dq of the head that is `ahead` later. That head's semaphore
    counts the CTAs that have done so: at `num_key_tiles` all of its dq is zero. The first `ahead` heads are zero from
    the beginning (`preprocess_kernel`), so their CTAs expect the value 0 and do not wait. A CTA waits only for CTAs of
    lower numbers (see `ahead_of` in launch.py), so CTAs must start in that order, or it would wait forever.
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

    This is the value of the semaphore to wait for. In full attention all key tiles begin at m = 0, and the lowest key
    tile adds first. In causal attention a key tile begins at its diagonal. So the highest key tile that m sees comes to
    m first and adds first, and no CTA waits as long as all advance equally. Under a pattern the highest one adds first,
    too. `ends` and Q are those of `Order`.
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
    release it is to let the next CTA add. The producer calls this function for 1 <= step < walk.steps + STAGES. From
    step STAGES on the producer first waits until both consumers have freed the ring's place of step - STAGES: they do
    so after they have added that step's tile to dq. The first call has nothing to release, and the last one nothing to
    acquire.

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
