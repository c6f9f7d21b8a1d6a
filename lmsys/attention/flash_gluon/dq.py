"""How the backward adds up dq: over zeros that CTAs write for one another, or in a fixed order.

In both the producer waits until a count in global memory says that its CTA's consumers may add, and then lets them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lmsys.attention.flash_gluon.hopper import FIRST_BARRIER, admit, clear, give_turn, publish

STAGES = gl.constexpr(2)
BLOCK_K = gl.constexpr(128)  # keys of a CTA, 64 of each consumer
TURN = gl.constexpr(FIRST_BARRIER.value + 1 + 2 * STAGES.value)  # named barriers: each consumer may add to dq


@gluon.jit
def next_tile(head, m, low, start, num_tiles, AROUND: gl.constexpr):
    """After the last tile of queries the lowest, and where that leads to the start again the next query head."""
    m += 1
    if AROUND:
        m = gl.where(m == num_tiles, low, m)
        head = gl.where(m == start, head + 1, head)
    return head, m


@gluon.jit
def clear_ahead(dq_ptr, cleared, kv_bh, n, num_heads, num_key_tiles, ahead, size):
    """Consumers may add to dq once all its `size` tiles are zero. Then this CTA clears its share for a later head.

    CTAs wait for those of lower numbers alone, see `ahead_of`: they must begin in the order of their numbers.
    """
    admit(cleared + kv_bh, gl.where(kv_bh < ahead, 0, num_key_tiles), TURN)
    later = kv_bh + ahead
    if later < num_heads:
        share = gl.cdiv(size, num_key_tiles)
        tile = later.to(gl.int64) * size
        for i in range(n * share, gl.minimum((n + 1) * share, size)):
            clear(dq_ptr + (tile + i) * 4096)
        gl.thread_barrier()
        publish(cleared + later)


@gluon.jit
def at_start(place, num_tiles, members):
    """The tile of queries that a member of a team begins with: members begin evenly spread."""
    return place * num_tiles // members


@gluon.jit
def turn_of(n, m, num_tiles, num_key_tiles, team, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr):
    """How many add to dq's tile m before key tile n, in the order of the deterministic mode.

    That is the order in which they come to it if all of a team keep step: nobody waits. Causal tiles begin at their
    diagonal, so the highest comes first to every m. In full attention the members of a team begin evenly spread: first
    comes the one that begins closest below m, or at it.
    """
    if CAUSAL:
        last = gl.minimum(num_key_tiles - 1, ((m + 1) * BLOCK_Q - 1) // BLOCK_K)
        return last - n
    else:
        place = n % team
        members = gl.minimum(team, num_key_tiles - n + place)
        first = ((m + 1) * members - 1) // num_tiles
        return n - place + first - place + gl.where(first < place, members, 0)


@gluon.jit
def pass_on(
    order, step, steps, turn, low, start, num_tiles,
    BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr, AROUND: gl.constexpr,
):  # fmt: skip
    """Publishes step - STAGES, which is over and added to dq's tile m; then the turn of the step after it."""
    tickets, n, num_key_tiles, team = order
    bh, m = turn
    if step >= STAGES:
        publish(tickets + (bh * num_tiles + m))
        bh, m = next_tile(bh, m, low, start, num_tiles, AROUND)
    if step <= steps:
        number = turn_of(n, m, num_tiles, num_key_tiles, team, CAUSAL, BLOCK_Q)
        give_turn(tickets + (bh * num_tiles + m), number, TURN)
    return bh, m
