"""Symmetric products of matrices in Triton: two of the three products of a Newton-Schulz iteration of muon.py on CUDA.

muon.py calls `takes` and, if that is True, `polynomial`. X Xᵀ is symmetric, and so is every polynomial of a symmetric
matrix. A program computes one tile of the lower triangle and stores it twice, as it is and transposed: about half of
the operations of a matmul. The third product of an iteration, of a symmetric matrix and X, is left to torch.

Tiles are square, so that a program needs tiles of one shape alone, and only tiles on the diagonal compute a number
twice. The sum of an element runs over columns in one order, whichever of its two factors comes first: results are
exactly symmetric, do not depend on how many matrices are multiplied at once, and repeats are equal bit for bit.

Columns are divided into chunks, and a tensor has the shape (N, chunks, R, width). Chunks take the place of heads in
attention, so the kernel loads and stores tiles by the functions of attention's kernels, by TMA (the copy unit of GPUs
since Hopper) or by addresses. The factor x has chunks of DEPTH columns; addend and result have chunks of SIDE columns,
the side of a tile. `tile_options` chooses SIDE and DEPTH.

Legend: N matrices, R rows, C columns, R' columns of a result: R rounded up to whole tiles.
"""

import torch
import triton
import triton.language as tl

from lmsys.attention.flash_triton_kernels import _load, _store
from lmsys.kernels.launch import arch_of, by_tma, launch, with_aligned_rows
from lmsys.measure.profile import register_kernels

# The smallest number of rows, and the fewest tiles in all. Below either of them torch's matmul is as fast: it is short,
# and the host launches it sooner. Measured on an H200: one matrix of 512 rows gains nothing, 24 of them do, and
# so does one of 1024 rows, of 36 tiles.
SMALLEST, FEWEST = 512, 36

register_kernels(r"^_symmetric_kernel$", "matmul")  # a profile counts the kernel as a matmul


@triton.jit(do_not_specialize=["x", "addend", "out", "chunks", "num_tiles"])
def _symmetric_kernel(
    x, addend, out, chunks, num_tiles, alpha, beta, diagonal,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Computes the tile (i, j) of the lower triangle of `out`, and stores it and its mirror image.

        out = alpha x xᵀ                               without ADDS
        out = alpha x xᵀ + beta addend + diagonal I    with ADDS

    x, addend and out come from the `tiles` of `launch`: they describe tensors (N, chunks, R, width), of which `_load`
    and `_store` move one tile, given by its matrix, its chunk and its first row. `chunks` is the number of chunks of x.

    The triangle's rows of tiles are taken in pairs, the first with the last: each pair has num_tiles + 1 tiles, so
    every program finds its tile by one division.
    """
    program, matrix = tl.program_id(0), tl.program_id(1)
    i, j = program // (num_tiles + 1), program % (num_tiles + 1)
    if j > i:
        i, j = num_tiles - 1 - i, j - i - 1
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for chunk in range(chunks):
        total = tl.dot(
            _load(x, matrix, chunk, i * SIDE, SIDE, DEPTH),
            tl.trans(_load(x, matrix, chunk, j * SIDE, SIDE, DEPTH)),
            total,
        )
    total *= alpha
    if ADDS:
        total += beta * _load(addend, matrix, j, i * SIDE, SIDE, SIDE).to(tl.float32)
        rows, columns = i * SIDE + tl.arange(0, SIDE), j * SIDE + tl.arange(0, SIDE)
        total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    _store(out, matrix, j, i * SIDE, total, SIDE, SIDE)
    if i > j:
        _store(out, matrix, i, j * SIDE, tl.trans(total), SIDE, SIDE)


def tile_options(count: int, rows: int, device: torch.device) -> dict[str, int]:
    """Constants, warps and stages of the kernel for `count` matrices of `rows` rows, as keywords of `launch`.

    With TMA they depend on how many tiles of 128 rows there are for each multiprocessor: few tiles are cut into
    smaller ones; tiles that all run at once load far ahead; if there are more, two run side by side. Chunks are of one
    width, so sums are made in one order: on an H200 tiles of 64 and 128 rows, with 3 to 6 stages, gave the same bits.
    """
    if not by_tma(device):
        return {"SIDE": 128, "DEPTH": 32, "num_warps": 8, "num_stages": 3}
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    tiles = num_programs(count, rows)
    side, stages = 64 if 3 * tiles <= processors else 128, 6 if tiles <= processors else 3
    return {"SIDE": side, "DEPTH": 64, "num_warps": 4, "num_stages": stages}


def num_programs(count: int, rows: int, side: int = 128) -> int:
    """How many tiles the lower triangles of `count` matrices have, the diagonal included."""
    num_tiles = triton.cdiv(rows, side)
    return count * num_tiles * (num_tiles + 1) // 2


def takes(x: torch.Tensor) -> bool:
    """True where the kernel multiplies x (N, R, C) about as fast as torch, or faster.

    This is so for large matrices in float16 or bfloat16, on GPUs of compute capability 8.0 or later.
    """
    is_large = x.shape[1] >= SMALLEST and num_programs(*x.shape[:2]) >= FEWEST
    return x.itemsize == 2 and is_large and arch_of(x.device) >= 80


def polynomial(x: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
    """a I + b x xᵀ + c (x xᵀ)², which is exactly symmetric: x (N, R, C) -> (N, R, R), in x's dtype.

    x xᵀ is rounded to that dtype, as is the result; sums are made in float32.
    """
    gram = symmetric(x)
    return symmetric(gram, alpha=c, addend=gram, beta=b, diagonal=a)[..., : x.shape[1]]


def symmetric(
    x: torch.Tensor, alpha: float = 1.0, addend: torch.Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> torch.Tensor:
    """alpha x xᵀ + beta addend + diagonal I: x (N, R, C) -> (N, R, R'), with zeros from column R on.

    addend  a symmetric result of this function, (N, R, R'); None: the product alone, without beta and diagonal
    """
    count, rows, columns = x.shape
    options = tile_options(count, rows, x.device)
    side, depth, num_tiles = options["SIDE"], options["DEPTH"], triton.cdiv(rows, options["SIDE"])
    out = x.new_empty(count, rows, num_tiles * side)
    tiles = [  # of x, addend and out; a kernel that adds nothing does not read the second
        (_in_chunks(x, depth), [1, 1, side, depth]),
        *((_in_chunks(y, side), [1, 1, side, side]) for y in (out if addend is None else addend, out)),
    ]
    launch(  # the kernel, its programs for a matrix, and its arguments from `chunks` to `diagonal`
        _symmetric_kernel,
        num_programs(1, rows, side),
        triton.cdiv(columns, depth),
        num_tiles,
        alpha,
        beta,
        diagonal,
        grid_y=count,
        tiles=tiles,
        ADDS=addend is not None,
        **options,
    )
    return out


def _in_chunks(x: torch.Tensor, width: int) -> torch.Tensor:
    """x (N, R, C) as (N, chunks, R, width), with zeros from column C on; a view where nothing is to be added."""
    x = torch.nn.functional.pad(x, (0, -x.shape[2] % width)) if x.shape[2] % width else x
    return with_aligned_rows(x.view(*x.shape[:2], -1, width).transpose(1, 2))
