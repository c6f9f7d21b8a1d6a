"""The tiles of keys that the forward visits, and what is hidden in them.

`hides` says what a consumer's queries do not see: the `extent` of `intervals.py`, their `intervals`, and of their
`edges` all but the first; a dense kernel is given zeros for all but the extent.

Legend: B batch, H query heads, Q queries, K keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lmsys.attention.flash_gluon.intervals import edges, hide_outside

ROWS = gl.constexpr(64)  # queries of a consumer: the M of a warp group's matmul


@gluon.jit
def key_tiles(extent, bh, H, tile, Q, K, CAUSAL: gl.constexpr, TILE_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """(low, high): a tile of queries visits the tiles of keys low <= j < high, at least one."""
    if extent[0] is None:
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
    extent, first, length, stop, full_from, full_to = hides
    if extent[0] is None:
        scores = gl.where(_up_to_the_last(row, col, K, CAUSAL, BLOCK_K, LAYOUT), scores, float("-inf"))
    else:
        cols = col + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
        first = gl.convert_layout(first, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        length = gl.convert_layout(length, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
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
