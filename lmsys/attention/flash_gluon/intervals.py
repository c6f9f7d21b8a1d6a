"""Masks of the Gluon kernels: patterns (windows, documents), read as intervals, and the causal mask of the forward.

`forward.py`, `backward.py` and `backward_steps.py` call these functions. Under a pattern each query sees one interval
of keys, and each key is seen by one interval of queries. The forward reads the first kind, the backward the second. The
functions for both use two words: *owners* are the queries in the forward and the keys in the backward; the *others* of
an owner are the keys that this query sees, or the queries that see this key. The others of an owner are an interval
[first, end), which may be empty. Neither `first` nor `end` decreases from one owner to the next. Nothing else of a
pattern is read here; `support.py` says which options the row takes.

`Extent` is what a kernel is given of `lmsys.attention.bounds.Bounds`: pointers to `first` and `end`, each (B or 1,
owners) int32, and `per_entry`, 1 if each batch entry has a row of its own, 0 if all share one. A kernel without a
pattern (a *dense* kernel) is given None for all three, and is compiled without this code.

`Hides` says which keys the queries of one consumer (warp group) of the forward do not see: their intervals as `first`
and `length` (ROWS,), and `stop`, `full_from` and `full_to` of `edges`. In a dense kernel all but the extent are zeros.

`note_nan` sets a flag. If it is set, the tiles that NaN in hidden keys may have spoilt are computed again.

Only the forward calls the functions from `key_tiles` on: they give the tiles of keys that it visits, and the mask of a
tile.

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
    """(low, stop, full_from, full_to) of the owners [start, start + NUM) of a batch entry, which has `length` owners.

    No interval of these owners reaches outside of [low, stop), and all of them contain [full_from, full_to), which may
    be empty. It is enough to read the intervals of the first and of the last owner, since neither `first` nor `end`
    decreases between them.
    """
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
    """(first, length), each (NUM,): where the intervals of owners [start, start + NUM) begin, and how long they are.

    The argument `length` is the number of owners in a batch entry. Past the end of the owners both results are 0.
    """
    owners = start + gl.arange(0, NUM, layout=LAYOUT)
    places = batch * extent.per_entry * length + owners
    inside = owners < length
    first = gl.load(extent.first + places, mask=inside, other=0)
    return first, gl.maximum(gl.load(extent.end + places, mask=inside, other=0) - first, 0)


@gluon.jit
def note_nan(flag, x):
    """Stores 1 at `flag`, a pointer to int64, if x (rows, columns) holds NaN."""
    sums = gl.sum(x, 1)  # the rows of a thread, without another warp
    spoilt = (sums != sums).to(gl.int64)
    gl.store(flag + 0 * spoilt, spoilt, mask=spoilt > 0)


@gluon.jit
def hide_outside(x, others, first, length, HIDDEN: gl.constexpr):
    """x (owners, others) float32, with HIDDEN, 0 or -inf, where the other is outside of the owner's interval.

    x        scores or weights, one row for each owner, one column for each of the others
    others   the number of each column's query or key
    first    where each owner's interval begins, and
    length   how long it is, both as `intervals` returns them
    """
    # (other - first) as unsigned < length tests both ends: an `other` before `first` wraps to a huge number. This is
    # inline PTX because the compiler would make two comparisons, with 60 to 150 more instructions a step and spilt
    # registers.
    arguments = [x, others[None, :], first[:, None], length[:, None]]
    return gl.inline_asm_elementwise(
        _hide_outside_asm(HIDDEN), "=f,f,r,r,r", arguments, dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _hide_outside_asm(hidden):
    """The PTX of `hide_outside`."""
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
    """(low, high): tile `tile` of the queries of head bh, TILE_Q of them, visits the key tiles low <= j < high.

    There is always at least one. `bh` counts the query heads of all batch entries.
    """
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
    """(low, high, stop, full_from, full_to) for the queries [row, row + ROWS) of one consumer.

    They visit the tiles of keys low <= j < high, at least one of those that the CTA visits. `stop`, `full_from` and
    `full_to` are those of `edges`.
    """
    first, stop, full_from, full_to = edges(extent, batch, row, Q, ROWS)
    low = gl.minimum(first // BLOCK_K, high - 1)
    high = gl.maximum(gl.cdiv(stop, BLOCK_K), low + 1)
    return low, high, stop, full_from, full_to


@gluon.jit
def hide(scores, row, col, K, hides, CAUSAL: gl.constexpr, BLOCK_K: gl.constexpr, LAYOUT: gl.constexpr):
    """scores (ROWS, BLOCK_K) of the keys from `col` on, with -inf where a query does not see a key.

    Query `row` + i sees its interval under a pattern. Otherwise it sees the keys up to min(row + i, K - 1) if CAUSAL,
    else up to K - 1.
    """
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
    """(ROWS, BLOCK_K): True where a query sees a key, in a dense kernel."""
    # `row < 0` is never true. It makes the mask look dependent on `row`: otherwise the compiler hoists it out of the
    # loop over tiles of queries, into 32 registers.
    if not CAUSAL:
        col = gl.where(row < 0, row, col)
    cols = col + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
    last = gl.full([ROWS], K - 1, gl.int32, gl.SliceLayout(1, LAYOUT))
    if CAUSAL:
        last = gl.minimum(last, row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)))
    return cols[None, :] <= last[:, None]
