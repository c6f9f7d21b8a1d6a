"""Attention of few queries over many keys, as in decoding: split keys, partial results combined by log-sum-exp.

The row `flash_triton` calls `decode` for its forward where `decodes` is true. `plan_of` chooses the sizes; change them
there. Kernels get their arguments by place: a new one stands at the same place in the signature and in the tuple that
`decode` passes. An option of a `Pattern` that the kernels do not know must be in BEYOND.

If a program owned a tile of queries, few queries would leave most of a GPU idle. So the keys are divided among programs
as well (Flash-Decoding, Dao et al. 2023). The query heads that share a key head form one tile of queries, so that a key
is read once for all of them. Each program writes o and the log-sum-exp of its part of the keys. A second kernel weights
the parts by their log-sum-exp, always in the same order, so repeats are bitwise equal. On sm_90 and later the second
kernel starts beside the first one and waits for its end (programmatic dependent launch). Keys that are not divided need
no second kernel.

Nearly all of the time goes to reading keys and values. So a program loads its next tiles while it multiplies, into as
much of a multiprocessor's shared memory as it can have: tiles of 32 KiB on sm_90. Where tiles are smaller, as for small
head dimensions or many queries, two programs share a multiprocessor. `parts_of` divides the keys so that the GPU is
full.

Causal order, windows and offsets reach the kernel as numbers, so one binary serves them all.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmsys.attention import contract, tuning
from lmsys.attention.flash_triton_kernels import (
    LN_2,
    _addresses,
    _factors,
    _has_nan,
    _inside,
    _load,
    _plain,
    _spoil,
    _store,
    _tanh,
)
from lmsys.attention.pattern import Pattern
from lmsys.kernels.launch import (
    INTERPRETED,
    Kernel,
    arch_of,
    by_tma,
    dot_precision,
    stream_of,
    tile_argument,
    with_aligned_rows,
)

# Bytes of a tile of keys, and of one of values. The interpreter has smaller tiles, so that few keys fill several.
TILE_BYTES = 1024 if INTERPRETED else 32 * 1024
ROOM = 200 * 1024  # bytes of shared memory that hold three stages of such tiles of keys and of values
SOME_ROOM = 160 * 1024  # bytes with which a multiprocessor runs two programs with three stages of tiles half as large
MOST_ROWS = 64  # the most rows of a tile of queries: its heads times its queries
MOST_WAVES = 8  # the most waves of programs that `parts_of` considers
FULL = 0.9  # where this share of the GPU's places for programs is used, over all waves, it counts as full
BEYOND = {"documents", "prefix", "alibi"}  # options that `decode` does not know
# Arguments on whose values Triton must not specialise: one binary serves all lengths and addresses.
UNSPECIALISED = ["H_KV", "G", "Q", "K", "parts", "num_tiles", "first", "end", "H", "lengths_ptr", "offset_ptr"]
UNSPECIALISED += ["q_desc", "k_desc", "v_desc", "o_desc"]


@triton.jit
def _load_heads(x, batch, group, first, G, HEADS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr):
    """(HEADS * QUERIES, D): the queries of HEADS heads, from head `first` of a group of G heads on.

    `group` is the first head of the group among all H. `x` is q as a descriptor or as a `Strided`.
    """
    if isinstance(x, tl.tensor_descriptor):
        q = x.load([batch, group + first, 0, 0]).reshape(HEADS * QUERIES, D)
    else:
        rows = tl.arange(0, HEADS * QUERIES)
        head, query = rows // QUERIES, rows % QUERIES
        away = head * _plain(x.head).to(tl.int64) + query * _plain(x.row)
        at = _addresses(x, batch, group + first, 0, away, D)
        q = tl.load(at, mask=_inside(x, query, D) & (first + head < G)[:, None], other=0.0)
    return q


@triton.jit(do_not_specialize=UNSPECIALISED)
def _split_keys_kernel(
    q_desc, k_desc, v_desc, part_o_ptr, part_lse_ptr, lengths_ptr, offset_ptr, softcap, scale,
    H_KV, G, Q, K, parts, num_tiles, first, end,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Writes o and the log-sum-exp of one part of the keys, for one tile of queries.

    Query i sees the keys first + i <= j < end + i that are below lengths[batch] and K. Where there are offsets,
    offset[batch] is added to `first` and to `end`.

    A tile has HEADS heads by QUERIES queries, of one group. The results have the shapes (B H Q, parts, COLUMNS) and
    (B H Q, parts). The log-sum-exp of a part is in base 2, times UNIT: LN_2 where there is one part, whose results are
    final, else 1. CHAINED: `_combine_kernel` may start before this kernel has ended.
    """
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    tile, part, owner = program % num_tiles, program // num_tiles % parts, program // num_tiles // parts
    batch, kv_head = owner // H_KV, owner % H_KV
    length = K
    if lengths_ptr is not None:
        length = tl.maximum(tl.minimum(tl.load(lengths_ptr + batch), K), 0).to(tl.int32)
    if offset_ptr is not None:
        # Offsets beyond these limits change nothing.
        offset = tl.maximum(tl.minimum(tl.load(offset_ptr + batch), K), -Q).to(tl.int32)
        first += offset
        end = tl.minimum(end + offset, K)
    low = tl.maximum(first, 0)
    count = tl.maximum(tl.minimum(length, end + Q - 1) - low, 0)  # keys that some query sees
    part_keys = tl.cdiv(tl.cdiv(count, BLOCK_K), parts) * BLOCK_K
    start = part * part_keys
    stop = low + tl.minimum(count, start + part_keys)
    rows = tl.arange(0, HEADS * QUERIES)
    head, query = tile * HEADS + rows // QUERIES, rows % QUERIES
    row_first, row_end = first + query, tl.minimum(length, end + query)
    ratio, scale = _factors(scale, softcap)
    q = _load_heads(q_desc, batch, kv_head * G, tile * HEADS, G, HEADS, QUERIES, D)
    top = tl.full([HEADS * QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([HEADS * QUERIES], tl.float32)
    acc = tl.zeros([HEADS * QUERIES, D], tl.float32)
    begin = low + start
    for again in tl.static_range(2):
        if again:  # as in `_fwd_kernel`: NaN in hidden keys must not reach the result, so sums that have it are redone
            spoilt = _has_nan(acc)
            top, total = tl.where(spoilt, float("-inf"), top), tl.where(spoilt, 0.0, total)
            begin, acc = tl.where(spoilt, begin, stop), tl.where(spoilt, 0.0, acc)
        for col in tl.range(begin, stop, BLOCK_K, num_stages=1 if again else None):
            k = _load(k_desc, batch, kv_head, col, BLOCK_K, D)
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            if softcap is not None:
                scores = _tanh(scores * ratio)
            scores = _spoil(scores, v_desc, batch, kv_head, col, BLOCK_K, D) if again else scores
            cols = (col + tl.arange(0, BLOCK_K))[None, :]
            scores = tl.where((cols >= row_first[:, None]) & (cols < row_end[:, None]), scores * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a query may have seen nothing yet
            p = tl.exp2(scores - base[:, None])
            rescale = tl.exp2(top - base)
            total = total * rescale + tl.sum(p, 1)
            v = _load(v_desc, batch, kv_head, col, BLOCK_K, D, again)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
            top = new_top
    total = tl.where(total == 0.0, 1.0, total)
    at = ((owner * G + head) * Q + query).to(tl.int64) * parts + part
    mine, column = (head < G) & (query < Q), tl.arange(0, D)[None, :]
    tl.store(part_lse_ptr + at, (top + tl.log2(total)) * UNIT, mask=mine)
    stored = mine[:, None] & (column < COLUMNS)
    tl.store(part_o_ptr + at[:, None] * COLUMNS + column, acc / total[:, None], mask=stored)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _combine_kernel(
    o_desc, part_o_ptr, part_lse_ptr, lse_ptr, H, Q, parts,
    D: tl.constexpr, PARTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Writes o and the log-sum-exp of one query of one head. It reads their parts PARTS at a time.

    CHAINED: it may start before the kernel that writes the parts has ended, and waits for that end.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    top, total = float("-inf"), 0.0
    acc = tl.zeros([D], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        at = row.to(tl.int64) * parts + part
        lse = tl.load(part_lse_ptr + at, mask=part < parts, other=float("-inf"))
        o = tl.load(part_o_ptr + at[:, None] * D + tl.arange(0, D)[None, :], mask=(part < parts)[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - base)
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * o, 0)
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)
    _store(o_desc, row // (H * Q), row // Q % H, row % Q, acc / total, 1, D)
    tl.store(lse_ptr + row, (top + tl.log2(total)) * LN_2)


@dataclass(frozen=True)
class Plan:
    """How a call is divided and compiled.

    heads, queries  heads and queries of a tile of queries
    num_tiles       tiles of queries that the heads of a group need; all but the first find the keys in the L2 cache
    block_k         keys of a tile
    parts           parts that the keys of a group are divided into
    num_warps, num_stages  options of Triton's compiler
    """

    heads: int
    queries: int
    num_tiles: int
    block_k: int
    parts: int
    num_warps: int
    num_stages: int


@lru_cache(4096)
def plan_of(
    owners: int, group: int, queries: int, keys: int, tile_d: int, dtype: torch.dtype, gpu: tuple[int, int]
) -> Plan:
    """The plan for `owners` = B · Hkv groups of `group` heads, whose queries see `keys` keys of `tile_d` columns.

    `gpu`: its multiprocessors, and the bytes of shared memory that a program may have. Tiles of float32 are smaller,
    since float32 is multiplied in registers.
    """
    wide = dtype == torch.float32
    tile_queries = triton.next_power_of_2(queries)
    heads = max(triton.next_power_of_2(group), 16 // tile_queries)
    heads = min(heads, (16 if wide else MOST_ROWS) // tile_queries)
    num_tiles = triton.cdiv(group, heads)
    processors, shared_bytes = gpu
    roomy = shared_bytes >= ROOM
    large = roomy and not wide and heads * tile_queries < MOST_ROWS  # otherwise registers cannot hold so large a tile
    row_bytes = tile_d * dtype.itemsize
    small = wide or shared_bytes < SOME_ROOM
    block_k = min(128, max(16, TILE_BYTES // (1 if large else 4 if small else 2) // row_bytes))
    programs = 1 if block_k * row_bytes > TILE_BYTES // 2 else 2  # on a multiprocessor at a time
    parts = parts_of(owners * num_tiles, keys // block_k, processors * programs)
    many = not roomy and heads * tile_queries * tile_d > MOST_ROWS * 64  # without TMA four warps would spill
    warps, stages = 8 if wide or many else 4, 2 if wide and not roomy else 3
    return Plan(heads, tile_queries, num_tiles, block_k, parts, num_warps=warps, num_stages=stages)


def parts_of(owners: int, most: int, places: int) -> int:
    """The number of parts, from 1 to `most`, that the keys of each of `owners` tiles of queries are divided into.

    `places`: the programs that the GPU runs at a time. Programs take equally long, so the last wave of them should be
    as full as those before. For one wave, two, and so on up to MOST_WAVES, the most parts that fit are considered. The
    first number that fills a share FULL of the places is taken, or else the one that fills the largest share. Owners
    that fill about half of the places keep one part each: multiprocessors come in pairs that share a path to memory,
    one of a pair reads about as fast as both, and nothing has to be combined.
    """
    if FULL * places / 2 <= owners <= places / 2:
        return 1
    best, most_full = 1, 0.0
    for waves in range(1, MOST_WAVES + 1):
        parts = places * waves // owners
        full = parts * owners / (places * waves)
        if full > most_full:
            best, most_full = parts, full
        if full >= FULL:
            break
    return max(1, min(best, most))


@cache
def _gpu(device: torch.device) -> tuple[int, int]:
    """(number of multiprocessors, bytes of shared memory that a program may have).

    In Triton's interpreter these are the numbers of a small GPU, which few parts fill, so that tests can be small.
    """
    if device.type != "cuda":
        return 8, ROOM
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def forward_tensors(
    q: Tensor, k: Tensor, v: Tensor, contiguous: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, o, lse): the inputs as descriptors can take them, and empty results.

    o is contiguous if `contiguous`, else it has q's layout.
    """
    # q's layout is (B, Q, H, D) in memory if a projection wrote it.
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if contiguous else with_aligned_rows(torch.empty_like(q))
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return with_aligned_rows(q), with_aligned_rows(k), with_aligned_rows(v), o, lse


def decodes(q: Tensor, pattern: Pattern | None) -> bool:
    """True for a call that `decode` can run: at most FEW_QUERIES queries, and no documents, no prefix and no ALiBi."""
    return q.shape[2] <= contract.FEW_QUERIES and (pattern is None or not pattern.options.keys() & BEYOND)


def decode(
    q: Tensor, k: Tensor, v: Tensor, scale: float, pattern: Pattern, parts: int | None = None
) -> tuple[Tensor, Tensor]:
    """q (B, H, Q, D), k and v (B, Hkv, K, D) -> o (B, H, Q, D) and lse (B, H, Q), natural log, float32.

    `parts`: how many parts the keys are divided into; None: as `plan_of` says.
    """
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    group, tile_d = heads // kv_heads, tuning.block_d(head_dim)
    first, end, seen = _seen_by_the_first(pattern, queries, keys)
    plan = plan_of(batch * kv_heads, group, queries, seen, tile_d, q.dtype, _gpu(q.device))
    if parts:
        plan = replace(plan, parts=parts)
    parts = plan.parts
    q, k, v, o, lse = forward_tensors(q, k, v, contiguous=parts == 1)
    if parts == 1:  # the part is the result
        part_o, part_lse = o, lse
    else:
        part_o = torch.empty(lse.numel(), parts, tile_d, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(lse.numel(), parts, dtype=torch.float32, device=q.device)
    # Arguments of `_split_keys_kernel` in the order of its signature: `sizes` from H_KV to `end`, `others` all after q,
    # k and v.
    sizes = kv_heads, group, queries, keys, parts, plan.num_tiles, first, end
    softcap = None if pattern.softcap is None else float(pattern.softcap)
    offset = pattern.offset if isinstance(pattern.offset, Tensor) else None
    others = part_o, part_lse, pattern.key_lengths, offset, softcap, scale, *sizes
    with torch.cuda.device_of(q):
        split = _split_keys(plan, (q, k, v), others, tile_d)
        split(batch * kv_heads * plan.num_tiles * parts, stream_of(q), (q, k, v), others)
        if parts > 1:
            merged = part_o, part_lse, lse, heads, queries, parts
            _combine(o, merged, tile_d)(lse.numel(), stream_of(q), (o,), merged)
    return o, lse


def _seen_by_the_first(pattern: Pattern, queries: int, keys: int) -> tuple[int, int, int]:
    """(first, end, seen): query 0 sees the keys [first, end), and all queries together see `seen` keys, at least 1.

    Query i sees [first + i, end + i), cut off at 0 and `keys`. `first` and `end` are at most `keys`. `first` is at
    least -FEW_QUERIES, which is so low that no query has its left end inside of the keys. Where each batch entry has an
    offset, both are relative to that offset, without these limits.
    """
    far = queries + keys
    left, right = (far if side is None else min(side, far) for side in (pattern.left, pattern.right))
    if isinstance(pattern.offset, Tensor):
        return -left, right + 1, min(keys, left + right + queries)
    end = keys if pattern.right is None else min(pattern.offset + right + 1, keys)
    first = (
        -contract.FEW_QUERIES if pattern.left is None else max(-contract.FEW_QUERIES, min(pattern.offset - left, keys))
    )
    return first, end, max(1, min(keys, end + queries - 1) - max(first, 0))


def _can_chain(device: torch.device) -> bool:
    """True where a kernel may begin before its predecessor in the stream has ended: on sm_90 and later."""
    return arch_of(device) >= 90


_kernels: dict[tuple[Any, ...], Any] = {}  # the compiled kernels, by the keys made below


def _split_keys(plan: Plan, tensors: tuple[Tensor, ...], others: tuple[Any, ...], tile_d: int) -> Any:
    """The compiled `_split_keys_kernel` for calls like this one; `others` are its arguments after `tensors` q, k, v."""
    q, precision, (part_o, _, lengths, offset, softcap) = tensors[0], dot_precision(tensors[0]), others[:5]
    sizes = plan.heads, plan.queries, plan.block_k, plan.num_warps, plan.num_stages
    columns, is_result = part_o.shape[-1], plan.parts == 1
    form = columns, is_result, *(x is None or x.dtype for x in (lengths, offset)), softcap is None
    key = *sizes, q.dtype, q.device, q.shape[-1], precision, *form
    if key not in _kernels:
        blocks = [[1, plan.heads, plan.queries, tile_d], *2 * [[1, 1, plan.block_k, tile_d]]]
        _kernels[key] = Kernel(
            _split_keys_kernel,
            [tile_argument(x, block, by_tma(q.device)) for x, block in zip(tensors, blocks, strict=True)],
            list(others),
            HEADS=plan.heads,
            QUERIES=plan.queries,
            BLOCK_K=plan.block_k,
            D=tile_d,
            COLUMNS=columns,
            UNIT=LN_2 if is_result else 1.0,
            PRECISION=precision,
            CHAINED=not is_result and _can_chain(q.device),
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )
    return _kernels[key]


def _combine(o: Tensor, others: tuple[Any, ...], tile_d: int) -> Any:
    """The compiled `_combine_kernel` for calls like this one; `others` are its arguments after `o_desc`."""
    key = o.dtype, o.device, o.shape[-1]
    if key not in _kernels:
        options: dict[str, Any] = {"D": tile_d, "PARTS": 32, "CHAINED": _can_chain(o.device), "num_warps": 4}
        if options["CHAINED"]:
            options["launch_pdl"] = True
        result = tile_argument(o, [1, 1, 1, tile_d], by_tma(o.device))
        _kernels[key] = Kernel(_combine_kernel, [result], list(others), **options)
    return _kernels[key]
