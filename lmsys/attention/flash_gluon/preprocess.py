"""The kernels that `launch.py` runs before and after `backward_kernel`, in plain Triton.

`preprocess_kernel` computes delta, the row sums of o * do, writes the log-sum-exp in base 2, and zeroes the heads of dq
that no CTA (program) of the backward zeroes. `postprocess_kernel` writes the float32 dq in q's dtype and layout. If the
order of `hopper.add_registers` changes, the permutation in `postprocess_kernel` must change with it; a new scalar in
`parameters` also needs a place in NUM_PARAMETERS of `launch.py`.

Strides (`o_b`, `o_h`, `o_q` of o, and so on) are in units of 8 numbers of 2 bytes. The kernels multiply them by 8, and
so Triton knows that rows begin at multiples of 16 bytes.

Legend: B batch, H query heads, G = H / key heads, Q queries, D head dimension; num_heads = B H.
"""

import triton
import triton.language as tl


@triton.jit
def _owned_rows(Q_PADDED, ROWS: tl.constexpr):
    """(program, bh, rows): this program's number, counted from the last one; its head among all B H; its queries.

    `rows` are the (ROWS,) numbers of its queries in that head.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles = Q_PADDED // ROWS
    return program, program // tiles, program % tiles * ROWS + tl.arange(0, ROWS)


@triton.jit(
    do_not_specialize=[
        "num_heads", "H", "G", "Q", "Q_PADDED", "num_key_tiles", "at_once", "num_semaphores", "num_cleared",
        "o_b", "o_h", "o_q", "do_b", "do_h", "do_q",
    ]
)  # fmt: skip
def preprocess_kernel(
    o_ptr, do_ptr, lse_ptr, lse2_ptr, delta_ptr, dq32_ptr, dq_semaphore, parameters, sm_scale,
    num_heads, H, G, Q, Q_PADDED, num_key_tiles, at_once, num_semaphores, num_cleared,
    o_b, o_h, o_q, do_b, do_h, do_q,
    ROWS: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Writes delta and the base-2 log-sum-exp (B H, Q_PADDED), float32, and all else that `backward_kernel` reads.

    The rest is zeros in dq_semaphore and in the first `num_cleared` heads of dq (B H, Q_PADDED, D), and five scalars in
    `parameters`: key heads, tiles of keys, key heads of all batch entries, how many of these are worked on at once, and
    the bits of sm_scale. Under a pattern a sixth is 0, the flag for NaN. Programs take the last tiles first, so that at
    the end the L2 cache holds the heads that `backward_kernel` begins with.
    """
    tl.extra.cuda.gdc_launch_dependents()  # `backward_kernel` may begin; it waits by gdc_wait before it reads
    program, bh, rows = _owned_rows(Q_PADDED, ROWS)
    cols = tl.arange(0, D)
    inside = rows < Q
    batch, head = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    o_rows = (batch * o_b + head * o_h + rows.to(tl.int64) * o_q) * 8
    do_rows = (batch * do_b + head * do_h + rows.to(tl.int64) * do_q) * 8
    o = tl.load(o_ptr + o_rows[:, None] + cols[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    do = tl.load(do_ptr + do_rows[:, None] + cols[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    # Rows past the end get a log-sum-exp of inf, which makes their P zero.
    lse = tl.load(lse_ptr + bh.to(tl.int64) * Q + rows, mask=inside, other=float("inf"))
    if BOUNDED:  # a pattern is given: queries that see no key have a log-sum-exp of -inf, and get inf as well
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
    padded = bh * Q_PADDED + rows
    tl.store(lse2_ptr + padded, lse * 1.4426950408889634)
    tl.store(delta_ptr + padded, tl.sum(o * do, 1))
    if bh < num_cleared:
        tl.store(dq32_ptr + (padded.to(tl.int64) * D)[:, None] + cols[None, :], tl.zeros([ROWS, D], tl.float32))
    per_program = tl.cdiv(num_semaphores, tl.num_programs(0))
    for first in range(0, per_program, 128):
        semaphore = program * per_program + first + tl.arange(0, 128)
        last = tl.minimum((program + 1) * per_program, num_semaphores)
        tl.store(dq_semaphore + semaphore, tl.zeros([128], tl.int32), mask=semaphore < last)
    if program == 0:  # as arguments, these would occupy registers of `backward_kernel` from its beginning to its end
        tl.store(parameters, H // G)
        tl.store(parameters + 1, num_key_tiles)
        tl.store(parameters + 2, num_heads // G)
        tl.store(parameters + 3, at_once)
        tl.store(parameters + 4, sm_scale.to(tl.int32, bitcast=True))
        if BOUNDED:
            tl.store(parameters + 5, 0)


@triton.jit(do_not_specialize=["spoilt_ptr", "H", "Q", "Q_PADDED", "stride_b", "stride_h", "stride_q"])
def postprocess_kernel(
    dq32_ptr, dq_ptr, spoilt_ptr, sm_scale, H, Q, Q_PADDED, stride_b, stride_h, stride_q,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Writes dq (B, H, Q, D) = sm_scale * dq32, whose tiles have the order of `hopper.add_registers`.

    ROWS must be 64, the rows of such a tile. The last tiles come first: the L2 cache may still hold them. spoilt_ptr is
    None without a pattern; else 1 is stored there if dq holds NaN.
    """
    tl.extra.cuda.gdc_wait()
    program, bh, rows = _owned_rows(Q_PADDED, ROWS)
    cols = tl.arange(0, D)
    inside = (rows < Q)[:, None]
    flat = tl.load(dq32_ptr + program.to(tl.int64) * ROWS * D + tl.arange(0, ROWS * D))
    # Undoes the order of `add_registers`, whose comments name these: (tiles of 64 columns, 8 groups, 4 warps, 8 rows, 4
    # threads, 2 halves, 2 numbers) become rows (warps, halves, rows) and columns (tiles, groups, threads, numbers).
    dq = flat.reshape(D // 64, 8, 4, 8, 4, 2, 2).permute(2, 5, 3, 0, 1, 4, 6).reshape(ROWS, D)
    place = (bh // H).to(tl.int64) * stride_b + (bh % H).to(tl.int64) * stride_h + rows.to(tl.int64) * stride_q
    tl.store(dq_ptr + place[:, None] * 8 + cols[None, :], dq * sm_scale, mask=inside)
    if spoilt_ptr is not None:
        tl.store(spoilt_ptr, 1, mask=tl.max(tl.max((dq != dq).to(tl.int32), 1), 0) > 0)
