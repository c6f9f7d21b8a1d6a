"""Patterns, as kernels read them: where the interval that each query, or each key, sees begins and ends.

`extent` is what a kernel is given of `lmsys.attention.bounds.Bounds`: two pointers, to `first` and `end`, and whether
each batch entry has rows of its own (1) or all have the same (0). A dense kernel is given None for each, and none of
this becomes code.
Owners are the queries of a forward, and the keys of a backward; others are those that they see.

Of a forward, here are also the tiles of keys that it visits, and what is hidden in them. `hides` says what a consumer's
queries do not see: the `extent`, their `intervals`, and of their `edges` all but the first; a dense kernel is given
zeros for all but the extent.

Legend: B batch, H query heads, Q queries, K keys.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

Extent = namedtuple("Extent", "first end per_entry")
Hides = namedtuple("Hides", "extent first length stop full_from full_to")
ROWS = gl.constexpr(64)  # queries of a consumer: the M of a warp group's matmul


@gluon.jit
def edges(extent, batch, start, length, NUM: gl.constexpr):
    """Owners [start, start + NUM), of `length`: some see [low, stop), all of them see [full_from, full_to)."""
    rows = batch * extent.per_entry * length
    first = rows + gl.minimum(start, length - 1)
    last = rows + gl.minimum(start + NUM, length) - 1
    return (
        gl.load(extent.first + first),
        gl.load(extent.end + last),
        gl.load(extent.first + last),
        gl.load(extent.end + first),
    )


@gluon.jit
def intervals(extent, batch, start, length, NUM: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the intervals of owners [start, start + NUM) begin, and how long they are; 0 of those past the end."""
    owners = start + gl.arange(0, NUM, layout=LAYOUT)
    places = batch * extent.per_entry * length + owners
    inside = owners < length
    first = gl.load(extent.first + places, mask=inside, other=0)
    return first, gl.maximum(gl.load(extent.end + places, mask=inside, other=0) - first, 0)


@gluon.jit
def hide_outside(x, others, first, length, HIDDEN: gl.constexpr):
    """x (owners, others), but HIDDEN, 0 or -inf, where an owner does not see the other.

    By one comparison: unsigned, the others before `first` are farthest from it. As two, or where the compiler sees how
    the distances come about, a step takes 60 to 150 instructions more, and spills registers.
    """
    arguments = [x, others[None, :], first[:, None], length[:, None]]
    return gl.inline_asm_elementwise(
        _hide_outside_asm(HIDDEN), "=f,f,r,r,r", arguments, dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _hide_outside_asm(hidden):
    bits = {0.0: "0f00000000", float("-inf"): "0fFF800000"}[hidden]
    return f"""{{
        .reg .pred seen;
        .reg .b32 distance;
        sub.s32 distance, $2, $3;
        setp.lt.u32 seen, distance, $4;
        selp.f32 $0, $1, {bits}, seen;
    }}"""


@gluon.jit
def key_tiles(extent, bh, H, tile, Q, K, CAUSAL: gl.constexpr, TILE_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """(low, high): a tile of queries visits the tiles of keys low <= j < high, at least one."""
    if extent.first is None:
        low = 0
        keys = gl.minimum(K, (tile + 1) * TILE_Q) if CAUSAL else K
        high = gl.cdiv(keys, BLOCK_K)
    else:
        first, stop, _, _ = edges(extent, bh // H, tile * TILE_Q, Q, TILE_Q)
        low = first // BLOCK_K
        high = gl.maximum(gl.cdiv(stop, BLOCK_K), low + 1)
    return low, high


@gluon.jit
def own_key_tiles(extent, batch, row, low, high, Q, BLOCK_K: gl.constexpr):
    """The part of [low, high) that the queries of one consumer visit, and their `edges` but the first."""
    first, stop, full_from, full_to = edges(extent, batch, row, Q, ROWS)
    low = gl.minimum(first // BLOCK_K, high - 1)
    high = gl.maximum(gl.cdiv(stop, BLOCK_K), low + 1)
    return low, high, stop, full_from, full_to


@gluon.jit
def hide(scores, row, col, K, hides, CAUSAL: gl.constexpr, BLOCK_K: gl.constexpr, LAYOUT: gl.constexpr):
    """-inf where a query may not look; query `row` + i sees the keys up to min(row + i, K - 1), or its interval."""
    if hides.extent.first is None:
        scores = gl.where(_up_to_the_last(row, col, K, CAUSAL, BLOCK_K, LAYOUT), scores, float("-inf"))
    else:
        cols = col + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
        first = gl.convert_layout(hides.first, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        length = gl.convert_layout(hides.length, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        scores = hide_outside(scores, cols, first, length, float("-inf"))
    return scores


@gluon.jit
def _up_to_the_last(row, col, K, CAUSAL: gl.constexpr, BLOCK_K: gl.constexpr, LAYOUT: gl.constexpr):
    if not CAUSAL:  # it is the same for all tiles of queries: say otherwise, or 32 registers would hold the mask
        col = gl.where(row < 0, row, col)
    cols = col + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
    last = gl.full([ROWS], K - 1, gl.int32, gl.SliceLayout(1, LAYOUT))
    if CAUSAL:
        last = gl.minimum(last, row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)))
    return cols[None, :] <= last[:, None]
