"""Symmetric products of matrices in Triton: two of the three products of a Newton-Schulz iteration of muon.py on CUDA.

X Xᵀ is symmetric, and so is every polynomial of a symmetric matrix. A program computes one tile of the lower triangle
and stores it twice, as itself and transposed: about half of the operations of a matmul. The third product of an
iteration, of a symmetric matrix and X, is left to torch.

Tiles are square, so that a program needs tiles of one shape alone, and no number is computed twice but within tiles on
the diagonal. The sum of an element runs over columns in one order, whichever of its two factors comes first: results
are exactly symmetric, do not depend on how many matrices are multiplied at once, and repeats are equal bit for bit.

Legend: N matrices, R rows, C columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmsys.attention.flash_triton_kernels import _addresses, _plain
from lmsys.kernels.launch import Kernel, arch_of, by_tma, describable, described, stream_of
from lmsys.measure.profile import register_kernels

SMALLEST = 256  # rows below which a matmul of torch is as fast: it is short, and the host launches it sooner
DTYPES = torch.bfloat16, torch.float16

_kernels: dict[tuple[Any, ...], Any] = {}

register_kernels(r"^_symmetric_kernel$", "matmul")


@triton.jit
def _at(x, matrix, row, column, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """(addresses, which are inside) of a tile of x, a `Strided`."""
    rows, columns = tl.arange(0, SIDE), column + tl.arange(0, DEPTH)
    addresses = _addresses(x, 0, matrix, row, rows * _plain(x.row), DEPTH) + column
    return addresses, (row + rows < _plain(x.rows))[:, None] & (columns < x.columns)[None, :]


@triton.jit
def _load(x, matrix, row, column, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """The tile (SIDE, DEPTH) of a matrix of x, a descriptor or `Strided`; zeros outside of the matrix."""
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([0, matrix, row, column]).reshape(SIDE, DEPTH)
    else:
        addresses, inside = _at(x, matrix, row, column, SIDE, DEPTH)
        tile = tl.load(addresses, mask=inside, other=0.0)
    return tile


@triton.jit
def _store(x, matrix, row, column, tile, SIDE: tl.constexpr):
    if isinstance(x, tl.tensor_descriptor):
        x.store([0, matrix, row, column], tile.to(x.dtype).reshape(1, 1, SIDE, SIDE))
    else:
        addresses, inside = _at(x, matrix, row, column, SIDE, SIDE)
        tl.store(addresses, tile.to(x.base.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["x", "addend", "out", "columns", "num_tiles"])
def _symmetric_kernel(
    x, addend, out, columns, num_tiles, alpha, beta, diagonal,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """The tile (i, j) of the lower triangle, and its mirror image, of out = alpha x xᵀ, and with ADDS of

        alpha x xᵀ + beta addend + diagonal I.

    The triangle's rows of tiles are taken in pairs, the first with the last, of num_tiles + 1 tiles together. So every
    program finds its tile by one division.
    """
    program, matrix = tl.program_id(0), tl.program_id(1)
    i, j = program // (num_tiles + 1), program % (num_tiles + 1)
    if j > i:
        i, j = num_tiles - 1 - i, j - i - 1
    row, column = i * SIDE, j * SIDE
    product = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, columns, DEPTH):
        left = _load(x, matrix, row, start, SIDE, DEPTH)
        right = _load(x, matrix, column, start, SIDE, DEPTH)
        product = tl.dot(left, tl.trans(right), product)
    product *= alpha
    if ADDS:
        product += beta * _load(addend, matrix, row, column, SIDE, SIDE).to(tl.float32)
        within = tl.arange(0, SIDE)
        product += tl.where((row + within)[:, None] == (column + within)[None, :], diagonal, 0.0)
    _store(out, matrix, row, column, product, SIDE)
    if i > j:
        _store(out, matrix, column, row, tl.trans(product), SIDE)


def tile_options(rows: int, tma: bool) -> dict[str, int]:
    """Constants, warps and stages of the kernel for matrices of so many rows, whatever their number."""
    if tma:
        return {"SIDE": 128, "DEPTH": 64, "num_warps": 4, "num_stages": 3}
    return {"SIDE": 128, "DEPTH": 32, "num_warps": 8, "num_stages": 3}


def takes(x: Tensor) -> bool:
    """True where the kernel computes products of x (N, R, C) faster than torch, or nearly so."""
    return x.dtype in DTYPES and x.shape[1] >= SMALLEST and arch_of(x.device) >= 80


def symmetric(
    x: Tensor, alpha: float = 1.0, addend: Tensor | None = None, beta: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """alpha x xᵀ + beta addend + diagonal I, which is exactly symmetric: x (N, R, C) -> (N, R, R), in x's dtype.

    addend  symmetric (N, R, R); None: the product alone, and no diagonal
    Sums are made in float32, and rounded once.
    """
    x = describable(x[None])
    _, count, rows, columns = x.shape
    out = describable(x.new_empty(1, count, rows, rows))
    tensors = x, out if addend is None else describable(addend[None]), out
    tma, options = by_tma(x.device), tile_options(rows, by_tma(x.device))
    num_tiles = triton.cdiv(rows, options["SIDE"])
    others = columns, num_tiles, alpha, beta, diagonal
    with torch.cuda.device_of(x):
        key = x.device, x.dtype, addend is None, *options.values(), *(() if tma else (rows, columns))
        if key not in _kernels:
            blocks = [1, 1, options["SIDE"], options["DEPTH"]], *2 * ([1, 1, options["SIDE"], options["SIDE"]],)
            examples = [described(y, block, tma) for y, block in zip(tensors, blocks, strict=True)]
            _kernels[key] = Kernel(_symmetric_kernel, examples, list(others), ADDS=addend is not None, **options)
        triangle = num_tiles * (num_tiles + 1) // 2
        _kernels[key](triangle, stream_of(x), tensors, others, count)
    return out[0]
