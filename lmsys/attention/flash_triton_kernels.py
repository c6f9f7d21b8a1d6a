"""The kernels that `flash_triton.py` launches; its docstring says how they work. Read `_fwd_kernel` first.

A program *owns* a tile of queries or of keys of one head: it computes their results, and no other program does.
`num_heads` counts the heads of all batch entries: B·H where programs own queries, and B·Hkv where they own keys. Each
of these heads has `num_tiles` tiles. `Q_PADDED` is Q rounded up (`flash_triton._padded`): the numbers that `lse2`, the
log-sum-exp in base 2, and `delta` have for each query head. BLOCK_Q and BLOCK_K are the rows of a tile of queries and
of keys, D the columns of both (`tuning.block_d`), and PRECISION is the `input_precision` of matmuls.

`first_ptr` and the arguments after it describe a `Pattern`; each is None where the pattern lacks that option.
- `first_ptr`, `end_ptr`, `bounds_stride`: each query sees an interval of keys, and each key is seen by an interval of
  queries (`lmsys/attention/bounds.py`). The first two hold the intervals of the queries, or keys, that the program
  owns. Batch entries are `bounds_stride` apart, 0 where all have the same intervals. Where these are None, CAUSAL alone
  decides who sees what.
- `softcap`: the cap, a number.
- `slopes_ptr`, `position_ptr`: for ALiBi the slopes (B, H), and where queries stand among the keys (B, Q). Positions
  are padded by a tile or more at the end, so their loads need no mask.
- `dlse_ptr`: the gradient of the log-sum-exp (B, H, Q), where that was a result.

A key that is hidden from a query has weight zero in the sums of that query, and the query has weight zero in the sums
of that key. But 0 · NaN is NaN: a NaN or infinity in a hidden vector spoils (makes NaN) the sums of each program that
visits it. With intervals, sums that are NaN are therefore computed again:
1. A hidden vector that is not finite must add nothing. v in the forward, k and v in `_dq_kernel`, and q and do in
   `_dkdv_kernel` are therefore loaded as zeros if they are not finite (CLEAN). For all others, such as k in the
   forward, it is enough that the scores are masked after the dot.
2. The weight of such a vector is made NaN where it is seen, so what sees NaN stays NaN.
3. The new sums replace the old ones.
The forward does so at once, in its loop over `again`. In the backward such a loop would take registers which the first
sums need. There the first launch sets flags in `spoilt_ptr`, one for TOGETHER tiles. A second launch, of
`_dq_again_kernel` or `_dkdv_again_kernel`, has a program for each flag. If the flag is set, which is rare, the program
computes the flag's tiles again. The kernels of another row, `flash_gluon`, set one flag for all tiles (ONE_FLAG). If it
is set, each program computes again those of its tiles that hold NaN in memory; so does `_fwd_again_kernel`.

Without intervals nothing is computed again: under CAUSAL a NaN in a key or value may spoil all queries of a tile on the
diagonal, also those that do not see this key. Calls promise the opposite only under options that hide keys
(docs/kernel.md).

Arguments with `_desc` are descriptors (TMA). Where tiles move without TMA they are a `Strided` of
`lmsys/kernels/launch.py`, an address with strides, or for a vector the address alone.

Sizes of tiles are chosen in `tuning.py`. HEADS_AT_ONCE changes the speed alone. A new argument has the same place in a
kernel's signature, in the tuples that `flash_triton.py` passes, and in the calls at the end of this file; unless it is
a float or a constant, add it to UNSPECIALISED. `flash_triton_decode.py`, `lmsys/model/loss_triton.py` and
`lmsys/training/muon_triton.py` use functions of this file too, such as `_load` and `_tanh`.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension; P the softmax
weights, dp and ds the gradients of P and of the scores.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
HEADS_AT_ONCE = tl.constexpr(8)  # heads whose tiles are computed side by side, to share the L2 cache (`_owned_tile`)
# Tiles that share a flag in `spoilt_ptr`. `flash_triton.py` makes as many flags as q or k has rows, whichever has more.
# So TOGETHER must be at least 8: a single query is padded to ROW_PADDING rows, which are 8 tiles of 16, the smallest.
TOGETHER = tl.constexpr(32)
TENSORS = ["q", "k", "v", "o", "do", "dq", "dk", "dv", "lse2", "delta"]  # arguments named `q_desc` and so on
# Arguments on whose values Triton must not specialise: one binary serves all lengths and addresses.
UNSPECIALISED = ["num_heads", "H", "Q", "Q_PADDED", "K", "num_tiles", "lse_ptr", "lse2_ptr", "delta_ptr"]
UNSPECIALISED += ["spoilt_ptr", "first_ptr", "end_ptr", "bounds_stride", *(f"{x}_desc" for x in TENSORS)]
UNSPECIALISED += ["slopes_ptr", "position_ptr", "dlse_ptr"]


@triton.jit
def _owned_tile(num_heads, num_tiles, ahead=None):
    """(head, tile) of this program, or of the program whose number is `ahead` more.

    Within HEADS_AT_ONCE heads, programs own tile 0 of each head, then tile 1 of each ...
    """
    program = tl.program_id(0)
    if ahead is not None:
        program += ahead
    first_head = program // (HEADS_AT_ONCE * num_tiles) * HEADS_AT_ONCE
    heads = tl.minimum(HEADS_AT_ONCE, num_heads - first_head)
    within = program - first_head * num_tiles
    return first_head + within % heads, within // heads


@triton.jit
def _owned_queries(num_heads, num_tiles, H, BLOCK_Q: tl.constexpr, CAUSAL: tl.constexpr, ahead=None):
    """(batch * H + head, batch, head, row) of this program's tile of queries, which begins with query `row`.

    If CAUSAL, the first programs own the last tiles, which see most keys. `ahead` is that of `_owned_tile`.
    """
    head_index, tile = _owned_tile(num_heads, num_tiles, ahead)
    if CAUSAL:
        tile = num_tiles - 1 - tile
    return head_index, head_index // H, head_index % H, tile * BLOCK_Q


@triton.jit
def _is_finite(x):
    """True for each row of a tile that has neither NaN nor infinity."""
    return tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0


@triton.jit
def _has_nan(x):
    """True if any number of a tile is NaN."""
    return tl.max(tl.max((x != x).to(tl.int32), 1), 0) > 0


@triton.jit
def _note(spoilt_ptr, spoilt):
    """Sets the flag of this program's tile in `spoilt_ptr` if `spoilt`; never clears it, as other tiles share it."""
    if spoilt_ptr is not None:
        tl.store(spoilt_ptr + tl.program_id(0) // TOGETHER, spoilt, mask=spoilt)


@triton.jit
def _plain(number):
    """The number n that a `Strided` holds as 2 n + 1.

    In a tuple Triton compiles a kernel of its own for the value 1, and one for multiples of 16. For n > 0 the number
    2 n + 1 is neither, so that one kernel serves all n.
    """
    return number >> 1


@triton.jit
def _addresses(x, batch, head, start, away, D: tl.constexpr):
    """The addresses (rows, D) of the elements of some rows of x, a `Strided`.

    away  (rows,): row i begins away[i] · 16 bytes after row `start` of this head begins

    In the loops of this file only the address of row `start` changes, which has 64 bits. The distances of the elements
    from it stay the same, and fit 32 bits: with 64 bits for each element registers would spill.
    """
    unit: tl.constexpr = 128 // x.base.dtype.element_ty.primitive_bitwidth
    far = batch * _plain(x.batch).to(tl.int64) + head * _plain(x.head).to(tl.int64)
    far += start * _plain(x.row).to(tl.int64)
    return tl.multiple_of(x.base + far * unit, 16) + ((away * unit)[:, None] + tl.arange(0, D)[None, :])


@triton.jit
def _inside(x, rows, D: tl.constexpr):
    """(rows, D): True for those elements of these rows of a tile that are inside of x."""
    inside = (rows < _plain(x.rows))[:, None]
    if x.columns != D:
        inside = inside & (tl.arange(0, D) < x.columns)[None, :]
    return inside


@triton.jit
def _load(x, batch, head, start, BLOCK: tl.constexpr, D: tl.constexpr, CLEAN: tl.constexpr = False):
    """A tile of rows of x, a descriptor or `Strided`; with CLEAN a row that is not finite is loaded as zeros."""
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([batch, head, start, 0]).reshape(BLOCK, D)
    else:
        rows = tl.arange(0, BLOCK)
        at = _addresses(x, batch, head, start, rows * _plain(x.row), D)
        tile = tl.load(at, mask=_inside(x, start + rows, D), other=0.0)
    return tl.where(_is_finite(tile)[:, None], tile, 0.0) if CLEAN else tile


@triton.jit
def _load_vector(x, start, BLOCK: tl.constexpr):
    """BLOCK numbers of a vector, from `start` on, which is a multiple of BLOCK."""
    if isinstance(x, tl.tensor_descriptor):
        numbers = x.load([start])
    else:
        numbers = tl.load(tl.multiple_of(x + start, 16) + tl.arange(0, BLOCK))
    return numbers


@triton.jit
def _spoil(scores, v_desc, batch, head, start, BLOCK_K: tl.constexpr, D: tl.constexpr):
    """Scores of a tile of keys, with NaN for each key whose row of v is not finite."""
    return tl.where(_is_finite(_load(v_desc, batch, head, start, BLOCK_K, D))[None, :], scores, float("nan"))


@triton.jit
def _store(x, batch, head, start, tile, BLOCK: tl.constexpr, D: tl.constexpr):
    """Writes a tile into the rows of x, a descriptor or `Strided`, from `start` on."""
    if isinstance(x, tl.tensor_descriptor):
        x.store([batch, head, start, 0], tile.to(x.dtype).reshape(1, 1, BLOCK, D))
    else:
        rows = tl.arange(0, BLOCK)
        at = _addresses(x, batch, head, start, rows * _plain(x.row), D)
        tile = tile.to(x.base.dtype.element_ty).reshape(BLOCK, D)
        tl.store(at, tile, mask=_inside(x, start + rows, D))


@triton.jit
def _add_dot(acc, a, b, PRECISION: tl.constexpr):
    """acc + a b, a matmul.

    In float32 the matmul of each tile has a sum of its own, which is then added to acc. In one running sum over long
    sequences, such as 65,536 terms, too many rounding errors would add up.
    """
    if a.dtype == tl.float32:
        acc -= tl.dot(-a, b, input_precision=PRECISION)  # the compiler would fold `acc + dot` into one running sum
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _interval(
    first_ptr, end_ptr, bounds_stride, batch, start, length, BLOCK: tl.constexpr, BLOCK_OTHER: tl.constexpr
):  # fmt: skip
    """(low, stop, sight): what the tile of owners [start, start + BLOCK) sees.

    Owners are queries, and *others* are the keys that they see; or owners are keys, and others the queries that see
    them, which is called "sees" here, too.

    length      how many owners there are
    low, stop   the tile of owners sees others in [low, stop); low is rounded down to a tile of others
    sight       what `_masked` needs: (full_from, full_to, first, end). Tiles of others within [full_from, full_to) are
                seen by all of these owners, and need no mask. Each owner sees its own [first, end), two tensors
                (BLOCK,)
    The four limits of the tile are those of its first and its last owner. This is right because neither `first` nor
    `end` decreases from one owner to the next (`lmsys/attention/bounds.py`).
    """
    base = batch.to(tl.int64) * bounds_stride
    first_ptr += base
    end_ptr += base
    at = tl.minimum(start + tl.arange(0, BLOCK), length - 1)
    first, last = tl.minimum(start, length - 1), tl.minimum(start + BLOCK, length) - 1
    low, stop = tl.load(first_ptr + first), tl.load(end_ptr + last)
    stop = tl.where(low < stop, stop, 0)  # 0 if none of them sees anything
    full_from, full_to = tl.load(first_ptr + last), tl.load(end_ptr + first)
    low = low // BLOCK_OTHER * BLOCK_OTHER
    return low, stop, (full_from, full_to, tl.load(first_ptr + at), tl.load(end_ptr + at))


@triton.jit
def _keys_seen(
    first_ptr, end_ptr, bounds_stride, batch, row, Q, K,
    CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(start, stop, sight): queries [row, row + BLOCK_Q) see the keys [start, stop).

    `sight` is for `_masked`. With intervals it is the tuple of `_interval`. Without them it is an int: tiles of keys
    that begin before it need no mask.
    """
    if first_ptr is None:
        start, stop, sight = 0, K, K // BLOCK_K * BLOCK_K
        if CAUSAL:
            stop = tl.minimum(K, row + BLOCK_Q)
            sight = tl.minimum(sight, (row + 1) // BLOCK_K * BLOCK_K)
    else:
        start, stop, sight = _interval(first_ptr, end_ptr, bounds_stride, batch, row, Q, BLOCK_Q, BLOCK_K)
    return start, stop, sight


@triton.jit
def _within(others, first, end):
    """(owners, others): True where an owner sees the other."""
    return (others[None, :] >= first[:, None]) & (others[None, :] < end[:, None])


@triton.jit
def _tanh(x):
    """tanh(x) by exp2; near zero, where that loses digits by cancellation, by a polynomial.

    Among polynomials with these powers of x, this one has the smallest relative error for |x| < 0.55, 2**-24.7. Its
    last product is added to x, so that only the last addition rounds at the size of the result.
    """
    s = x * x
    near = x + x * (s * (-0.33332947 + s * (0.13320725 + s * (-0.05267179 + s * 0.01643754))))
    size = tl.abs(x)  # for negative x the quotient below would be near 2 rather than near 0, and lose a digit more
    far = 1.0 - 2.0 / (tl.exp2(size * (2 * LOG2_E)) + 1.0)
    return tl.where(size < 0.55, near, tl.where(x < 0, -far, far))


@triton.jit
def _factors(scale, softcap):
    """(ratio, factor): q kᵀ is multiplied by `ratio` before `_tanh`, and scores by `factor` before exp2."""
    return (scale, scale * LOG2_E) if softcap is None else (scale / softcap, softcap * LOG2_E)


@triton.jit
def _hide(scores, rows, cols, K, CAUSAL: tl.constexpr):
    """Scores with -inf past the last key, and if CAUSAL also after each query's own position."""
    visible = (cols < K)[None, :]
    if CAUSAL:
        visible = visible & (rows[:, None] >= cols[None, :])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _masked(scores, HERE: tl.constexpr, first_ptr, rows, col, K, sight, CAUSAL: tl.constexpr, BLOCK_K: tl.constexpr):
    """Scores of queries `rows` and keys from `col` on; with HERE they are -inf where a query does not see a key.

    A kernel calls this twice in its loop, before and after the dot q k^T, and HERE is True in one of the two calls.
    - After the dot, the usual way, it masks the scores.
    - Before the dot (`chained` in the kernels) it masks the accumulator, 0 or -inf, to which the dot is added. So no
      branch stands between this dot and those that follow. Only then does Triton give all these dots one layout, with
      warps side by side along the rows, and keep P in registers; else scores and P pass through shared memory. This is
      for tiles that move by addresses, whose dots are `mma.sync`, not for TMA. But -inf + NaN is NaN: a hidden key's
      NaN spoils the sums. With intervals they are computed again, with the mask after the dot; without, they stay NaN.

    `sight` is that of `_keys_seen`: an int, or with intervals a tuple.
    """
    if HERE:
        if first_ptr is None:
            if col >= sight:
                scores = _hide(scores, rows, col + tl.arange(0, BLOCK_K), K, CAUSAL)
        elif (col < sight[0]) | (col + BLOCK_K > sight[1]):
            scores = tl.where(_within(col + tl.arange(0, BLOCK_K), sight[2], sight[3]), scores, float("-inf"))
    return scores


@triton.jit
def _masked_keys(
    x, HERE: tl.constexpr, first_ptr, cols, row, full, sight, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr,
    HIDDEN: tl.constexpr,
):  # fmt: skip
    """x of keys `cols` and queries from `row` on; with HERE it is HIDDEN where a query does not see a key.

    This is `_masked` with keys as owners: x is the accumulator where it is called before the dot (`chained`), else P.
    With intervals `sight` is the tuple of `_interval`. Without them it is None, and queries from `full` on see all
    of these keys where CAUSAL.
    """
    if HERE and CAUSAL:  # noqa: SIM102 - decided at compile time, unlike the next `if`
        if row < full:
            x = tl.where((row + tl.arange(0, BLOCK_Q))[None, :] >= cols[:, None], x, HIDDEN)
    if HERE and first_ptr is not None:  # noqa: SIM102
        if (row < sight[0]) | (row + BLOCK_Q > sight[1]):
            x = tl.where(_within(row + tl.arange(0, BLOCK_Q), sight[2], sight[3]), x, HIDDEN)
    return x


@triton.jit(do_not_specialize=UNSPECIALISED)
def _fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, num_heads, H, G, Q, K, num_tiles,
    first_ptr, end_ptr, bounds_stride, softcap, slopes_ptr, position_ptr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    ahead,
):  # fmt: skip
    """The forward: owns BLOCK_Q queries of a head, reads q, k and v, writes their o and their log-sum-exp, natural log.

    It walks over the keys that these queries see, with an online softmax in base 2. `_fwd_again_kernel` calls it for
    the tile that is `ahead` tiles after the program's own.
    """
    head_index, batch, head, row = _owned_queries(num_heads, num_tiles, H, BLOCK_Q, CAUSAL, ahead)
    rows = row + tl.arange(0, BLOCK_Q)
    ratio, scale = _factors(scale, softcap)
    if slopes_ptr is not None:  # in units of the scores before they are scaled
        slope = tl.load(slopes_ptr + head_index) * LOG2_E / scale
        places = tl.load(position_ptr + batch.to(tl.int64) * Q + rows)
    q = _load(q_desc, batch, head, row, BLOCK_Q, D)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    # `_masked` explains `chained`. A softcap forbids it: `_tanh` would turn a mask's -inf into -1. It was timed only up
    # to D = 128.
    chained: tl.constexpr = not isinstance(q_desc, tl.tensor_descriptor) and softcap is None and D <= 128
    # Chained: 8 partial sums for each row, reduced once at the end, so that nothing moves between threads in the loop.
    total = tl.zeros([BLOCK_Q, 8] if chained else [BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    start, stop, sight = _keys_seen(first_ptr, end_ptr, bounds_stride, batch, row, Q, K, CAUSAL, BLOCK_Q, BLOCK_K)
    for again in tl.static_range(1 if first_ptr is None else 2):
        if again:  # the second turn: if the first made NaN, it starts over, else its range of keys is empty
            spoilt = _has_nan(acc)
            top, total = tl.where(spoilt, float("-inf"), top), tl.where(spoilt, 0.0, total)
            start, acc = tl.where(spoilt, start, stop), tl.where(spoilt, 0.0, acc)
        for col in tl.range(start, stop, BLOCK_K, num_stages=1 if again else None):
            k = _load(k_desc, batch, head // G, col, BLOCK_K, D)
            scores = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
            scores = _masked(scores, chained and not again, first_ptr, rows, col, K, sight, CAUSAL, BLOCK_K)
            scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
            if softcap is not None:
                scores = _tanh(scores * ratio)
            if slopes_ptr is not None:
                scores -= slope * tl.abs((col + tl.arange(0, BLOCK_K))[None, :] - places[:, None])
            scores = _spoil(scores, v_desc, batch, head // G, col, BLOCK_K, D) if again else scores
            scores = _masked(scores, again or not chained, first_ptr, rows, col, K, sight, CAUSAL, BLOCK_K)
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            base = new_top
            if first_ptr is not None:  # a query may have seen nothing yet
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(scores * scale - base[:, None])
            rescale = tl.exp2(top - base)
            if chained:
                total = total * rescale[:, None] + tl.sum(p.reshape(BLOCK_Q, BLOCK_K // 8, 8), 1)
            else:
                total = total * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            v = _load(v_desc, batch, head // G, col, BLOCK_K, D, again)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            top = new_top
    total = tl.sum(total, 1) if chained else total
    if first_ptr is not None:  # a query that sees nothing: o is 0, and the log-sum-exp -inf
        total = tl.where(total == 0.0, 1.0, total)
    _store(o_desc, batch, head, row, acc / total[:, None], BLOCK_Q, D)
    tl.store(lse_ptr + head_index.to(tl.int64) * Q + rows, (top + tl.log2(total)) * LN_2, mask=rows < Q)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _dq_kernel(
    q_desc, k_desc, v_desc, o_desc, do_desc, dq_desc, lse_ptr, lse2_ptr, delta_ptr, spoilt_ptr,
    scale, num_heads, H, G, Q, Q_PADDED, K, num_tiles,
    first_ptr, end_ptr, bounds_stride, softcap, slopes_ptr, position_ptr, dlse_ptr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    CLEAN: tl.constexpr, ahead,
):  # fmt: skip
    """The backward's first pass: owns BLOCK_Q queries of a head, and writes their dq.

    It reads q, k, v, o, do and the log-sum-exp. It also writes what `_dkdv_kernel` reads: lse2, the log-sum-exp in
    base 2, and delta = rowsum(o * do) - dlse, both padded to Q_PADDED rows. `_dq_again_kernel` calls it with CLEAN. It
    then computes the tile that is `ahead` tiles after the program's own.
    """
    head_index, batch, head, row = _owned_queries(num_heads, num_tiles, H, BLOCK_Q, CAUSAL, ahead)
    rows = row + tl.arange(0, BLOCK_Q)
    q = _load(q_desc, batch, head, row, BLOCK_Q, D)
    do = _load(do_desc, batch, head, row, BLOCK_Q, D)
    o = _load(o_desc, batch, head, row, BLOCK_Q, D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + head_index.to(tl.int64) * Q + rows, mask=rows < Q, other=0.0)
    # Rows past the end get a log-sum-exp of inf, which makes their P zero in both kernels.
    lse = tl.load(lse_ptr + head_index.to(tl.int64) * Q + rows, mask=rows < Q, other=float("inf")) * LOG2_E
    if first_ptr is not None:  # so do queries that see no key
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
    padded = head_index * Q_PADDED + rows
    tl.store(lse2_ptr + padded, lse)
    tl.store(delta_ptr + padded, delta)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    # As in `_fwd_kernel`. With CLEAN the mask comes after the dot: hidden scores are then -inf even where q is NaN.
    chained: tl.constexpr = not (CLEAN or isinstance(q_desc, tl.tensor_descriptor)) and softcap is None and D <= 128
    start, stop, sight = _keys_seen(first_ptr, end_ptr, bounds_stride, batch, row, Q, K, CAUSAL, BLOCK_Q, BLOCK_K)
    stop = tl.where(row < Q, stop, 0)
    ratio, factor = _factors(scale, softcap)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head_index) * LOG2_E / factor
        places = tl.load(position_ptr + batch.to(tl.int64) * Q + rows)
    for col in tl.range(start, stop, BLOCK_K, num_stages=1 if CLEAN else None):
        # With CLEAN nothing needs to be made NaN here: a query that sees NaN has a NaN log-sum-exp already.
        k = _load(k_desc, batch, head // G, col, BLOCK_K, D, CLEAN)
        v = _load(v_desc, batch, head // G, col, BLOCK_K, D, CLEAN)
        scores = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
        scores = _masked(scores, chained, first_ptr, rows, col, K, sight, CAUSAL, BLOCK_K)
        scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        if softcap is not None:
            scores = _tanh(scores * ratio)
            tangent = 1.0 - scores * scores
        if slopes_ptr is not None:
            scores -= slope * tl.abs((col + tl.arange(0, BLOCK_K))[None, :] - places[:, None])
        scores = _masked(scores, not chained, first_ptr, rows, col, K, sight, CAUSAL, BLOCK_K)
        p = tl.exp2(scores * factor - lse[:, None])
        ds = p * (dp - delta[:, None])
        if softcap is not None:
            ds *= tangent
        dq = _add_dot(dq, ds.to(k.dtype), k, PRECISION)
    _store(dq_desc, batch, head, row, dq * scale, BLOCK_Q, D)
    _note(spoilt_ptr, _has_nan(dq))


@triton.jit(do_not_specialize=UNSPECIALISED)
def _dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse2_desc, delta_desc, spoilt_ptr,
    scale, num_heads, H, G, Q, Q_PADDED, K, num_tiles,
    first_ptr, end_ptr, bounds_stride, softcap, slopes_ptr, position_ptr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    CLEAN: tl.constexpr, ahead,
):  # fmt: skip
    """The backward's second pass: owns BLOCK_K keys of a key/value head, and writes their dk and dv.

    It reads q, k, v, do, and the lse2 and delta of `_dq_kernel`. It walks over the queries that see these keys, of each
    of the G query heads in turn. Scores are transposed: keys by queries. CLEAN and `ahead` as in `_dq_kernel`.
    """
    head_index, tile = _owned_tile(num_heads, num_tiles, ahead)  # a key/value head
    batch, kv_head = head_index // (H // G), head_index % (H // G)
    col = tile * BLOCK_K
    cols = col + tl.arange(0, BLOCK_K)
    k = _load(k_desc, batch, kv_head, col, BLOCK_K, D)
    v = _load(v_desc, batch, kv_head, col, BLOCK_K, D)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    ratio, factor = _factors(scale, softcap)
    by_tma: tl.constexpr = isinstance(q_desc, tl.tensor_descriptor)
    chained: tl.constexpr = not by_tma and softcap is None and D <= 128 and not CLEAN  # as in `_dq_kernel`
    start, stop, full, sight = 0, Q, 0, None  # query tiles that start at `full` or later need no mask
    if CAUSAL:
        start = col // BLOCK_Q * BLOCK_Q
        full = col + BLOCK_K - 1
    if first_ptr is not None:
        start, stop, sight = _interval(first_ptr, end_ptr, bounds_stride, batch, col, K, BLOCK_K, BLOCK_Q)
    for group in range(G):
        head = kv_head * G + group
        # With CLEAN, tiles that move by addresses are not loaded ahead of their use. That would need more shared memory
        # than the tile was chosen for: 104 KiB at D = 128, where a block has 99 KiB on an RTX 3090.
        for row in tl.range(start, stop, BLOCK_Q, num_stages=1 if CLEAN and not by_tma else None):
            padded = (batch * H + head) * Q_PADDED + row
            q = _load(q_desc, batch, head, row, BLOCK_Q, D, CLEAN)
            do = _load(do_desc, batch, head, row, BLOCK_Q, D, CLEAN)
            lse = _load_vector(lse2_desc, padded, BLOCK_Q)
            hidden = tl.zeros([BLOCK_K, BLOCK_Q], tl.float32)
            hidden = _masked_keys(hidden, chained, first_ptr, cols, row, full, sight, CAUSAL, BLOCK_Q, float("-inf"))
            scores = tl.dot(k, q.T, hidden, input_precision=PRECISION)  # transposed: P and dS stay in registers
            dp = tl.dot(v, do.T, input_precision=PRECISION)
            if softcap is not None:
                scores = _tanh(scores * ratio)
            biased = scores
            if slopes_ptr is not None:
                slope = tl.load(slopes_ptr + batch * H + head) * LOG2_E / factor
                places = tl.load(position_ptr + batch.to(tl.int64) * Q + row + tl.arange(0, BLOCK_Q))
                biased -= slope * tl.abs(places[None, :] - cols[:, None])
            p = tl.exp2(biased * factor - lse[None, :])
            p = _masked_keys(p, not chained, first_ptr, cols, row, full, sight, CAUSAL, BLOCK_Q, 0.0)
            delta = _load_vector(delta_desc, padded, BLOCK_Q)
            ds = p * (dp - delta[None, :])
            if softcap is not None:
                ds *= 1.0 - scores * scores
            if CLEAN:
                # A q or do that is not finite was loaded as zeros. Its query has a NaN log-sum-exp, or a delta that is
                # NaN or infinite, so ds is not finite either. Where the query is hidden, p is 0, and ds becomes 0.
                # Elsewhere ds stays as it is, for dk, and p becomes NaN, for dv.
                ds = tl.where(p == 0.0, 0.0, ds)
                p = tl.where(tl.abs(ds) < float("inf"), p, float("nan"))
            dv = _add_dot(dv, p.to(do.dtype), do, PRECISION)
            dk = _add_dot(dk, ds.to(q.dtype), q, PRECISION)
    _store(dk_desc, batch, kv_head, col, dk * scale, BLOCK_K, D)
    _store(dv_desc, batch, kv_head, col, dv, BLOCK_K, D)
    _note(spoilt_ptr, _has_nan(dk + dv))


@triton.jit(do_not_specialize=UNSPECIALISED)
def _fwd_again_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, spoilt_ptr, scale, num_heads, H, G, Q, K, num_tiles,
    first_ptr, end_ptr, bounds_stride, softcap, slopes_ptr, position_ptr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Runs after another row's forward: if that has set the flag, computes again the tiles whose o holds NaN."""
    program = tl.program_id(0)
    if tl.load(spoilt_ptr) != 0:
        for tile in range(program * TOGETHER, tl.minimum((program + 1) * TOGETHER, num_heads * num_tiles)):
            _, batch, head, row = _owned_queries(num_heads, num_tiles, H, BLOCK_Q, CAUSAL, tile - program)
            if _has_nan(_load(o_desc, batch, head, row, BLOCK_Q, D)):
                _fwd_kernel(
                    q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, num_heads, H, G, Q, K, num_tiles,
                    first_ptr, end_ptr, bounds_stride, softcap, slopes_ptr, position_ptr,
                    BLOCK_Q, BLOCK_K, D, CAUSAL, PRECISION, tile - program,
                )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED)
def _dq_again_kernel(
    q_desc, k_desc, v_desc, o_desc, do_desc, dq_desc, lse_ptr, lse2_ptr, delta_ptr, spoilt_ptr,
    scale, num_heads, H, G, Q, Q_PADDED, K, num_tiles,
    first_ptr, end_ptr, bounds_stride, softcap, slopes_ptr, position_ptr, dlse_ptr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    ONE_FLAG: tl.constexpr,
):  # fmt: skip
    """The second launch for dq: if the flag of this program is set, computes its TOGETHER tiles again, with CLEAN.

    With ONE_FLAG, which is set for all programs, it computes only those of the tiles that hold NaN.
    """
    program = tl.program_id(0)
    if tl.load(spoilt_ptr + (0 if ONE_FLAG else program)) != 0:
        for tile in range(program * TOGETHER, tl.minimum((program + 1) * TOGETHER, num_heads * num_tiles)):
            again = True
            if ONE_FLAG:
                _, batch, head, row = _owned_queries(num_heads, num_tiles, H, BLOCK_Q, CAUSAL, tile - program)
                again = _has_nan(_load(dq_desc, batch, head, row, BLOCK_Q, D))
            if again:
                _dq_kernel(
                    q_desc, k_desc, v_desc, o_desc, do_desc, dq_desc, lse_ptr, lse2_ptr, delta_ptr, None,
                    scale, num_heads, H, G, Q, Q_PADDED, K, num_tiles,
                    first_ptr, end_ptr, bounds_stride, softcap, slopes_ptr, position_ptr, dlse_ptr,
                    BLOCK_Q, BLOCK_K, D, CAUSAL, PRECISION, True, tile - program,
                )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED)
def _dkdv_again_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse2_desc, delta_desc, spoilt_ptr,
    scale, num_heads, H, G, Q, Q_PADDED, K, num_tiles,
    first_ptr, end_ptr, bounds_stride, softcap, slopes_ptr, position_ptr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    ONE_FLAG: tl.constexpr,
):  # fmt: skip
    """The second launch for dk and dv, as `_dq_again_kernel` is that for dq."""
    program = tl.program_id(0)
    if tl.load(spoilt_ptr + (0 if ONE_FLAG else program)) != 0:
        for tile in range(program * TOGETHER, tl.minimum((program + 1) * TOGETHER, num_heads * num_tiles)):
            again = True
            if ONE_FLAG:
                head_index, n = _owned_tile(num_heads, num_tiles, tile - program)
                batch, head = head_index // (H // G), head_index % (H // G)
                dk = _load(dk_desc, batch, head, n * BLOCK_K, BLOCK_K, D)
                again = _has_nan(dk.to(tl.float32) + _load(dv_desc, batch, head, n * BLOCK_K, BLOCK_K, D))
            if again:
                _dkdv_kernel(
                    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse2_desc, delta_desc, None,
                    scale, num_heads, H, G, Q, Q_PADDED, K, num_tiles,
                    first_ptr, end_ptr, bounds_stride, softcap, slopes_ptr, position_ptr,
                    BLOCK_Q, BLOCK_K, D, CAUSAL, PRECISION, True, tile - program,
                )  # fmt: skip
