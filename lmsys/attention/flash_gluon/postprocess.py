"""The kernel after the backward: dq in its own dtype and layout.

Legend: H query heads, Q queries, D head dimension.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["H", "Q", "Q_PADDED", "stride_b", "stride_h", "stride_q"])
def postprocess_kernel(
    dq32_ptr, dq_ptr, sm_scale, H, Q, Q_PADDED, stride_b, stride_h, stride_q,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq = sm_scale * dq32; the last tiles first, which the L2 cache may still hold."""
    tl.extra.cuda.gdc_wait()
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles = Q_PADDED // ROWS
    bh = program // tiles
    rows = program % tiles * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, D)
    inside = (rows < Q)[:, None]
    flat = tl.load(dq32_ptr + program.to(tl.int64) * ROWS * D + tl.arange(0, ROWS * D))  # see `add_registers`
    dq = flat.reshape(D // 64, 8, 4, 8, 4, 2, 2).permute(2, 5, 3, 0, 1, 4, 6).reshape(ROWS, D)
    place = (bh // H).to(tl.int64) * stride_b + (bh % H).to(tl.int64) * stride_h + rows.to(tl.int64) * stride_q
    tl.store(dq_ptr + place[:, None] * 8 + cols[None, :], dq * sm_scale, mask=inside)
