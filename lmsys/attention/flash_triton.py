"""FlashAttention-2 in Triton: one forward kernel, and a backward of two that needs no atomics.

The table of implementations, `table.py`, names two functions of this file, `flash_triton` and `flash_triton_torch_bwd`;
an entry of that table is called a *row*. The row `flash_gluon` calls `mend_forward` and `mend_backward`. Tiles to
choose from are in `tuning.py`: add one there. `flash_triton_kernels.py` says what a new argument of a kernel needs.

Forward (Dao 2023, arXiv 2307.08691, Algorithm 1): a program owns a tile of queries, that is, it alone computes
their results. It walks over the keys that they see, and writes o and the log-sum-exp once. Backward (Algorithm 2) in
two passes that recompute P: programs of `_dq_kernel` own tiles of queries, those of `_dkdv_kernel` own tiles of keys.
So every sum is computed by one program in one order, and repeats are bitwise equal. The price is 7 matmuls in place
of 5.

The kernels are in `flash_triton_kernels.py`. Under a `Pattern` (windows, documents) the same source is compiled to
other binaries, which read where the keys of a query begin and end, and walk over the tiles between. The forward of few
queries, as in decoding, is in `flash_triton_decode.py`.

Choices, each measured on one H200 with bfloat16 inputs:
- All tiles, and the row vectors of the backward (the log-sum-exp and delta), move through tensor descriptors (TMA).
  These also fill a tile with zeros where it lies outside of the tensor, so no length needs to be a multiple of a tile.
  Loading the row vectors by pointers cost up to 70 registers and spilled. Where descriptors are slow (`by_tma`) the
  same kernels move tiles by addresses, which Triton turns into asynchronous copies. That form was compiled for other
  cards, but timed only on an H100, as sm_80 code.
- One loop, with the mask under a branch, instead of a masked and an unmasked loop: fewer registers, one prologue.
  Where tiles move by addresses, the first product is added to the mask: see `_masked`.
- `_dq_kernel` runs first. It writes delta = rowsum(o * do), and the log-sum-exp in base 2 and padded, for
  `_dkdv_kernel`.
- Under a causal mask the tiles of queries that see most keys come first, in groups of heads whose keys and values stay
  in L2 together.
- `_Launch` computes once what all calls of one shape share, and descriptors are kept, since in short calls the GPU
  waits for the host.
`docs/flash_triton.md` has other forms and tiles, with their times, and says what limits the speed.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension, P the softmax
weights.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from lmsys.attention import contract, custom_ops, flash_torch, flash_triton_decode, flash_triton_kernels
from lmsys.attention.bounds import Bounds
from lmsys.attention.pattern import INTERVALS, PLAIN, Pattern
from lmsys.attention.tuning import Tile, block_d, candidates, tune
from lmsys.kernels.launch import INTERPRETED, Kernel, by_tma, dot_precision, stream_of, tile_argument, with_aligned_rows
from lmsys.kernels.tritons import version

INTERPRETED_SCORES = 2**18  # the most scores for which the interpreter is used: with more a check takes minutes
ROW_PADDING = 128  # delta and the log-sum-exp are padded to a multiple of it; it is a multiple of every BLOCK_Q
# By name: the kernel, and for each of its descriptors what a tile holds: "q" rows of queries, "k" rows of keys,
# "vector" one number for each query.
KERNELS = {
    "fwd": (flash_triton_kernels._fwd_kernel, ["q", "k", "k", "q"]),
    "dq": (flash_triton_kernels._dq_kernel, ["q", "k", "k", "q", "q", "q"]),
    "dkdv": (flash_triton_kernels._dkdv_kernel, ["q", "k", "k", "q", "k", "k", "vector", "vector"]),
}
# By name: the kernel of a second launch, which computes tiles with NaN again (the argument `again` of `_run`).
AGAIN = {
    "fwd": flash_triton_kernels._fwd_again_kernel,
    "dq": flash_triton_kernels._dq_again_kernel,
    "dkdv": flash_triton_kernels._dkdv_again_kernel,
}
FLAGGED, WITH_NAN = "flagged", "with NaN"  # the tiles that a second launch computes again: see `_run`
MAX_LAUNCHES = 4096  # the most that are kept; each has about 1 KiB
# The *extent*: the arguments of kernels that describe a pattern, in the kernels' order; only `_dq_kernel` has dlse_ptr.
# Without a pattern all are None.
EXTENT = "first_ptr", "end_ptr", "bounds_stride", "softcap", "slopes_ptr", "position_ptr", "dlse_ptr"
Extent = tuple[Any, ...]  # values for EXTENT, some of them None; () where all would be None

_kernels: dict[tuple[Any, ...], Any] = {}  # compiled kernels, by the keys made in `_Launch`
_launches: dict[tuple[Any, ...], "_Launch"] = {}  # by the keys made in `_run`


def _padded(queries: int) -> int:
    """The length of delta and of the log-sum-exp of a head with so many queries: a multiple of ROW_PADDING."""
    return -(-queries // ROW_PADDING) * ROW_PADDING  # triton.cdiv takes 2 us


class _Launch:
    """A kernel with a tile, for calls of one shape: they share its grid, its sizes and its binary.

    The arguments are those of `_run`; `precision` is the result of `dot_precision`.
    """

    def __init__(
        self,
        name: str,
        tensors: tuple[Tensor, ...],
        others: tuple[Any, ...],
        extent: Extent,
        causal: bool,
        precision: str,
        again: str,
        tile: Tile,
    ):
        function, tiled_by = KERNELS[name]
        q, k = tensors[:2]
        (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
        lengths, rows = [queries, keys], queries
        if name != "fwd":
            rows = (others[1] if name == "dq" else tensors[-1]).numel() // (batch * heads)  # of lse2, or of delta
            lengths = [queries, rows, keys]
        if name == "dkdv":
            owners, num_tiles = batch * kv_heads, triton.cdiv(keys, tile.block_k)
        else:  # dq also writes the padding of delta and the log-sum-exp: the tiles of dkdv may have more queries
            owners, num_tiles = batch * heads, triton.cdiv(rows, tile.block_q)
        self.grid = triton.cdiv(owners * num_tiles, flash_triton_kernels.TOGETHER.value if again else 1)
        # Kernels take arguments by place: descriptors, `others`, `sizes`, `extent`, in the order of their signatures.
        self.sizes = owners, heads, heads // kv_heads, *lengths, num_tiles
        tile_d = block_d(head_dim)
        key = name, tile, q.dtype, head_dim, causal, precision, heads // kv_heads, q.device, _form(extent), again
        if key not in _kernels:
            q_block, k_block = ([1, 1, rows, tile_d] for rows in (tile.block_q, tile.block_k))
            blocks = {"q": q_block, "k": k_block, "vector": [tile.block_q]}
            _kernels[key] = Kernel(
                AGAIN[name] if again else function,
                [tile_argument(x, blocks[by], by_tma(q.device)) for x, by in zip(tensors, tiled_by, strict=True)],
                [*others, *self.sizes, *extent],
                **({} if extent else {name: None for name in EXTENT if name in function.arg_names}),
                # The kernels of AGAIN set the first two themselves.
                **({} if again else {"ahead": None}),
                **({} if name == "fwd" else {"ONE_FLAG": again == WITH_NAN} if again else {"CLEAN": False}),
                BLOCK_Q=tile.block_q,
                BLOCK_K=tile.block_k,
                D=tile_d,
                CAUSAL=causal,
                PRECISION=precision,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        self.kernel = _kernels[key]

    def __call__(self, tensors: tuple[Tensor, ...], others: tuple[Any, ...], extent: Extent) -> None:
        """Launches the kernel on the current stream."""
        self.kernel(self.grid, stream_of(tensors[0]), tensors, (*others, *self.sizes, *extent))


def _length_class(length: int) -> int:
    """The length rounded up: lengths of one class share a tuned tile."""
    return max(128, triton.next_power_of_2(length))


def _form(extent: Extent, names: tuple[str, ...] = EXTENT) -> tuple[str, ...]:
    """The names of the arguments in `extent` that are not None: kernels are compiled for each such set of them."""
    # () where `extent` is empty. `strict=False`: only `_dq_kernel` has the last name.
    return extent and tuple(name for name, x in zip(names, extent, strict=False) if x is not None)


def _extent(pattern: Pattern, bounds: Bounds | None, q: Tensor, *dlse: Tensor | None) -> Extent:
    """The values for EXTENT.

    `bounds`: intervals of keys or of queries; None where `causal` alone decides who sees what. `dlse`: only for
    `_dq_kernel`, the gradient of the log-sum-exp, or None.
    """
    interval: Extent = (
        (None, None, None)
        if bounds is None
        else (bounds.first, bounds.end, 0 if len(bounds.first) == 1 else bounds.first.shape[1])
    )
    slopes = position = None
    if pattern.alibi is not None:
        slopes = pattern.alibi.float().expand(q.shape[:2]).contiguous()
        places = pattern.position(q.shape[2], q.device).to(torch.int32)
        position = torch.nn.functional.pad(places.expand(q.shape[0], -1).flatten(), (0, ROW_PADDING))
    extent = *interval, None if pattern.softcap is None else float(pattern.softcap), slopes, position, *dlse
    return extent if _form(extent) else ()


def _run(
    name: str,
    tensors: tuple[Tensor, ...],
    others: tuple[Any, ...],
    causal: bool,
    tile: Tile | None,
    extent: Extent = (),
    again: str = "",
) -> None:
    """Launches the kernel `name` of KERNELS.

    `tensors`: those that the kernel gets as descriptors, q and k first. `others`: pointers, then the scale.
    `extent`: see EXTENT; () where there is no pattern. If it has intervals, `causal` is False, as they include the
    causal order. `again`: empty, or which tiles of earlier launches are computed again: FLAGGED, those whose flag in
    `spoilt_ptr` is set, or WITH_NAN, if the one flag there is set, those that hold NaN.
    """
    q, k = tensors[:2]
    precision = dot_precision(q)
    key = name, q.shape, k.shape, q.dtype, q.device, causal, *map(type, extent), precision, again, tile
    launch = _launches.get(key)
    if launch is None:

        @cache
        def launch_with(tile: Tile) -> _Launch:
            return _Launch(name, tensors, others, extent, causal, precision, again, tile)

        def run_with(tile: Tile) -> None:
            launch_with(tile)(tensors, others, extent)

        # extent[2:] leaves out first_ptr and end_ptr: both are given exactly when bounds_stride is, so in the key of a
        # tuned tile that name stands for all three.
        launch = launch_with(tile or _tuned(name, q, k, causal, precision, _form(extent[2:], EXTENT[2:]), run_with))
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        # While a graph is captured nothing can be timed, so this tile may be a guess: do not keep it.
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            _launches[key] = launch
    launch(tensors, others, extent)


def _tuned(
    name: str,
    q: Tensor,
    k: Tensor,
    causal: bool,
    precision: str,
    extent: tuple[str, ...],
    launch: Callable[[Tile], None],
) -> Tile:
    """The fastest tile for a kernel in calls like this one; `launch` runs the kernel with a tile.

    precision  as `dot_precision` gives it
    extent     the names of the arguments that describe the pattern
    """
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    tile_d = block_d(head_dim)
    # Tile(block_q, block_k, num_warps, num_stages).
    tiles = (Tile(32, 32, 4, 1),) if INTERPRETED else candidates(name, q.dtype, tile_d, precision, by_tma(q.device))
    owners_class = min(256, triton.next_power_of_2(batch * (kv_heads if name == "dkdv" else heads)))
    shape = tile_d, causal, _length_class(queries), _length_class(keys), owners_class
    return tune((name, q.dtype, precision, *shape, *extent), tiles, launch, q.device)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    tile: Tile | None = None,
    pattern: Pattern | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, H, Q, D), k and v (B, Hkv, K, D) -> o (B, H, Q, D) and lse (B, H, Q), natural log, float32."""
    if tile is None and flash_triton_decode.decodes(q, pattern):
        return flash_triton_decode.decode(q, k, v, scale, pattern or PLAIN[causal])
    q, k, v, o, lse = flash_triton_decode.forward_tensors(q, k, v)
    with torch.cuda.device_of(q):
        extent: Extent = ()
        if pattern is not None:
            bounds = pattern.bounds(q.shape[2], k.shape[2], q.device) if pattern.bounded else None
            causal, extent = pattern.causal and bounds is None, _extent(pattern, bounds, q)
        _run("fwd", (q, k, v, o), (lse, scale), causal, tile, extent)
    return o, lse


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    scale: float,
    tile: Tile | None = None,
    pattern: Pattern | None = None,
    together: bool = True,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, H, Q, D), dk and dv (B, Hkv, K, D).

    `together` is passed to `custom_ops.gradients_like`. `dlse` (B, H, Q), the gradient of the log-sum-exp, comes from
    `lse.WithLse`.
    """
    if q.is_cuda:
        # autograd runs this in a thread of its own, where possibly no CUDA context is bound yet. Triton binds one on
        # launch, but descriptors are encoded before. This call binds it, also while a CUDA graph is captured.
        torch.cuda.is_current_stream_capturing()
    dq, dk, dv = custom_ops.gradients_like(q, k, v, lambda x: with_aligned_rows(torch.empty_like(x)), together)
    q, k, v, o, do = map(with_aligned_rows, (q, k, v, o, do))
    rows = q.shape[0] * q.shape[1] * _padded(q.shape[2])
    lse2, delta = (torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(2))
    with torch.cuda.device_of(q):
        # launches: the `again` of each launch. spoilt: the tensor of `spoilt_ptr`. bounds: the pattern's intervals.
        # of_queries, of_keys: the values for EXTENT of `_dq_kernel`, whose programs own queries, and of `_dkdv_kernel`,
        # whose programs own keys.
        launches, spoilt, bounds, of_queries, of_keys = ("",), None, None, (), ()
        if pattern is not None:
            bounds = pattern.bounds(q.shape[2], k.shape[2], q.device) if pattern.bounded else None
            causal = pattern.causal and bounds is None
            of_queries = _extent(pattern, bounds, q, None if dlse is None else dlse.contiguous())
            of_keys = _extent(pattern, bounds and bounds.of_keys, q)
        if bounds is not None:
            launches = "", FLAGGED  # the second launch computes again the tiles whose sums are NaN
            # An upper bound: there are never more flags than rows. They are not cleared between the two kernels, so
            # dkdv also computes tiles again whose flags only dq has set, which costs a little time.
            spoilt = q.new_zeros(max(x.shape[:-1].numel() for x in (q, k)), dtype=torch.bool)
        for again in launches:
            _run("dq", (q, k, v, o, do, dq), (lse, lse2, delta, spoilt, scale), causal, tile, of_queries, again)
        for again in launches:
            _run("dkdv", (q, k, v, do, dk, dv, lse2, delta), (spoilt, scale), causal, tile, of_keys, again)
    return dq, dk, dv


def mend_forward(
    tensors: tuple[Tensor, ...], lse: Tensor, spoilt: Tensor, scale: float, pattern: Pattern, bounds: Bounds
) -> None:
    """Computes again, in place, the tiles of another row's o and lse that NaN in hidden keys may have spoilt.

    tensors  q, k, v, o, as `with_aligned_rows` returns them
    spoilt   (1,) int64: if it is not 0, tiles whose o holds NaN are computed again
    bounds   the intervals of the pattern
    """
    _mend("fwd", tensors, (lse, spoilt, scale), _extent(pattern, bounds, tensors[0]))


def mend_backward(
    tensors: tuple[Tensor, ...], vectors: tuple[Tensor, ...], scale: float, pattern: Pattern, bounds: Bounds
) -> None:
    """Computes again, in place, tiles of another row's gradients, as `mend_forward` does with o.

    tensors  q, k, v, o, do, dq, dk, dv, as `with_aligned_rows` returns them
    vectors  lse, lse2, delta and spoilt. lse2 and delta are as `_dq_kernel` writes them, but each head is padded to a
             multiple of 64 queries, always to the same one for a shape and dtype: launches are kept by these
    """
    q, k, v, o, do, dq, dk, dv = tensors
    _, lse2, delta, spoilt = vectors
    _mend("dq", (q, k, v, o, do, dq), (*vectors, scale), _extent(pattern, bounds, q, None))
    _mend("dkdv", (q, k, v, do, dk, dv, lse2, delta), (spoilt, scale), _extent(pattern, bounds.of_keys, q))


def _mend(name: str, tensors: tuple[Tensor, ...], others: tuple[Any, ...], extent: Extent) -> None:
    """Launches a kernel of AGAIN after another row's kernel. Its tile is not tuned: without NaN it computes nothing."""
    q = tensors[0]
    tiles = candidates(name, q.dtype, block_d(q.shape[-1]), dot_precision(q), by_tma(q.device))
    _run(name, tensors, others, False, next(tile for tile in tiles if tile.block_q <= 64), extent, WITH_NAN)


# If FlashTriton.apply is given a `tile`, all three kernels use it.
FlashTriton, flash_triton = custom_ops.flash(
    "flash_triton", "FlashTriton", _forward, _backward, registered=partial(_backward, together=False)
)
# The Triton forward with a compiled PyTorch backward: the step before a Triton backward in Stanford's course CS336.
FlashTritonTorchBackward, flash_triton_torch_bwd = custom_ops.flash(
    "flash_triton_torch_bwd", "FlashTritonTorchBackward", _forward, flash_torch.flash_backward
)


def flash_triton_supports(case: contract.AttentionCase) -> str | None:
    """None, or why the row cannot run `case`: `table.py` names this function."""
    if reason := contract.why_not_plain(case, *INTERVALS, "alibi", "sinks", "return_lse"):
        return reason
    if case.head_dim > 256:
        return f"head_dim {case.head_dim} is above 256, the largest tile that shared memory holds"
    if case.dtype == "float64":
        return "float64 has no tensor-core path; use naive"
    if case.device == "cuda":
        if case.capability is not None and case.capability < (8, 0):
            return f"needs compute capability 8.0 or later; this GPU has {case.capability[0]}.{case.capability[1]}"
        few = case.queries <= contract.FEW_QUERIES or case.options
        fails = few and case.capability and case.capability[0] == 10 and version().startswith(("3.6", "3.7"))
        return (
            "Triton 3.6.0 fails to compile options, and few queries, for this GPU's compute capability 10; 3.8.0"
            f" compiles them; this is {version()}"
            if fails
            else None
        )
    if not INTERPRETED:
        return "runs on CUDA; on CPU only in Triton's interpreter (TRITON_INTERPRET=1), for verification"
    if case.dtype == "bfloat16":
        return "Triton's interpreter computes bfloat16 wrongly"
    return (
        f"Triton's interpreter is too slow above {INTERPRETED_SCORES:,} scores (batch x heads x queries x keys)"
        if case.batch * case.heads * case.queries * case.keys > INTERPRETED_SCORES
        else None
    )
