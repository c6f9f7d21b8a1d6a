"""FlashAttention-2 in plain PyTorch: tiles, online softmax, a backward that recomputes P.

This is the algorithm of all FlashAttention implementations here in its most readable form. A *row* is an implementation
in the table of `table.py`. `custom_ops.flash` makes the row `flash_torch` of `flash_forward` and `flash_backward`; the
row `flash_triton_torch_bwd` has the same backward. `tests/attention/test_seeded_faults.py` finds some lines of this
file by their exact text: if you change one of these, change it there, too.

No (Q, K) matrix is ever held. Forward and backward visit square tiles of queries and keys, skip tiles that are wholly
hidden, and mask only those at an edge (`Bounds`). The backward gets q, k, v, o and the log-sum-exp of the scaled
scores. Sums are accumulated in float32 (float64 for float64).

Source: Dao 2023, "FlashAttention-2" (arXiv 2307.08691), Algorithms 1 and 2.
Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N = B * Hkv, Q queries, K keys, D head
dimension; R = G * (queries of a tile) rows and C = (keys of a tile) columns; P the softmax weights, dP and dS the
gradients of P and of the scores.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmsys.attention import compiled, contract, custom_ops
from lmsys.attention.bounds import Bounds
from lmsys.attention.pattern import INTERVALS, PLAIN, Pattern, tile_of

# Scores of one tile over all heads: 64 MiB, 4 MiB. Larger tiles need more memory, smaller ones more launches.
TILE_SCORES = {"cuda": 2**24, "cpu": 2**20}
MIN_TILE, MAX_TILE = 64, 2048  # rows or columns


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _operand(x: Tensor) -> torch.dtype:
    """The dtype of matmul operands: on CUDA that of x, as matmuls add up in float32 there; elsewhere that of sums."""
    return x.dtype if x.is_cuda else _wide(x.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The batched product a b of two operands (N, ., .), accumulated and returned in float32 (float64 for float64)."""
    return torch.bmm(a, b) if a.dtype == _wide(a.dtype) else torch.bmm(a, b, out_dtype=torch.float32)


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    """(B, H, S, ...) as (N, G, S, ...), with N = B * Hkv = `num_groups`."""
    return x.reshape(num_groups, -1, *x.shape[2:])


def _hide(scores: Tensor, visible: Tensor) -> Tensor:
    """Scores (N, R, C) with -inf where `visible` (B or 1, queries, C) is False, which holds for all heads."""
    by_entry = scores.view(visible.shape[0], -1, *visible.shape[1:])
    return by_entry.masked_fill(~visible.unsqueeze(1), float("-inf")).view_as(scores)


def _by_head(scores: Tensor, added: Tensor) -> Tensor:
    """A view of scores (N, R, C) to which `added` (B or 1, H or 1, queries, C or 1) broadcasts.

    It is (B, H, queries, C), or (1, B H, queries, C) where `added` is one for all entries and heads.
    """
    heads = added.shape[1]
    return scores.view(*((-1, heads) if heads > 1 else (added.shape[0], -1)), added.shape[2], scores.shape[2])


def _tile_size(num_heads: int, longest: int, device: str) -> int:
    """Rows and columns of a tile: the largest power of two for which `num_heads` tiles have at most TILE_SCORES scores.

    It lies between MIN_TILE and MAX_TILE, and is no larger than `longest`, the longer of both lengths, needs.
    """
    fits = math.isqrt(TILE_SCORES[device] // num_heads)
    return max(MIN_TILE, min(MAX_TILE, 1 << (longest - 1).bit_length(), 1 << max(fits, 1).bit_length() - 1))


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    tile: int | None = None,
    pattern: Pattern | None = None,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: q (B, H, Q, D), k and v (B, Hkv, K, D) -> o (B, H, Q, D) and lse (B, H, Q) in natural log.

    A `pattern` replaces `causal`. A query that sees nothing has a log-sum-exp of -inf. `tile`: the side of a tile.
    """
    num_groups, (num_queries, num_keys) = k.shape[0] * k.shape[1], (q.shape[2], k.shape[2])
    tile = tile or _tile_size(q.shape[0] * q.shape[1], max(num_queries, num_keys), q.device.type)
    pattern = pattern or PLAIN[causal]
    bounds = pattern.bounds(num_queries, num_keys, q.device)
    k, v = (x.reshape(num_groups, num_keys, -1) for x in (k, v))
    q_groups = _grouped(q, num_groups)  # (N, G, Q, D)
    o = torch.empty_like(q_groups)
    lse = torch.empty(q_groups.shape[:-1], dtype=_wide(q.dtype), device=q.device)  # (N, G, Q)
    heads_last = partial(torch.unflatten, dim=1, sizes=(q_groups.shape[1], -1))
    for row in range(0, num_queries, tile):
        rows = slice(row, min(row + tile, num_queries))
        o_tile, lse_tile = _attend_rows(q_groups[:, :, rows], k, v, rows, bounds, scale, pattern, tile)
        o[:, :, rows] = heads_last(o_tile)
        lse[:, :, rows] = heads_last(lse_tile)
    return o.view(q.shape), lse.view(q.shape[:-1])


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, bounds: Bounds, scale: float, pattern: Pattern, tile: int
) -> tuple[Tensor, Tensor]:
    """(o (N, R, D), lse (N, R)) of a tile of queries (N, G, R / G, D), by online softmax over the keys (N, K, D).

    `rows` are the numbers of the queries, `tile` the number of keys in a tile. Tiles that `bounds` hides are skipped.
    """
    operand = _operand(q)
    q = q.flatten(1, 2).to(operand)
    acc = torch.zeros(q.shape, dtype=_wide(q.dtype), device=q.device)  # (N, R, D), not yet divided by total
    top = torch.full_like(acc[..., :1], float("-inf"))  # (N, R, 1), running maximum
    total = torch.zeros_like(top)  # running sum of exp(score - top)
    for column, masked in bounds.walk(rows.start, rows.stop, tile):
        columns = slice(column, min(column + tile, k.shape[1]))
        k_tile, v_tile = (x[:, columns].to(operand) for x in (k, v))
        scores = _dot(q, k_tile.mT).mul_(scale)  # (N, R, C)
        if pattern.softcap is not None:
            scores.div_(pattern.softcap).tanh_().mul_(pattern.softcap)
        if (added := pattern.added(rows, columns, scores.dtype)) is not None:
            _by_head(scores, added).add_(added)  # changes `scores`, of which this is a view
        if masked:
            scores = _hide(scores, bounds.visible(rows, columns))
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        base = new_top.masked_fill(new_top == float("-inf"), 0)  # -inf: the query has seen no key yet
        p = scores.sub_(base).exp_()
        rescale = torch.exp(top - base)
        total = total * rescale + p.sum(dim=-1, keepdim=True)
        acc = acc.mul_(rescale).add_(_dot(p.to(operand), v_tile))
        top = new_top
    return acc / total.masked_fill(total == 0, 1), (top + total.log()).squeeze(-1)


def _tile_weights(
    scores: Tensor,
    dp: Tensor,
    lse: Tensor,
    delta: Tensor,
    *others: Tensor,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """(P, scale · dS) of one tile, (N, R, C) in `dtype`, from scores = q kᵀ and dp = do vᵀ. torch.compile fuses it.

    `lse` and `delta` are (N, R). `others` has what is added to the scores (a bias or ALiBi), if anything, and then
    `visible`, as `_hide` takes it, if the tile needs a mask. The gradient of what is added is a third result.
    """
    scores = scores * scale
    if softcap is not None:
        capped = torch.tanh(scores / softcap)
        scores = capped * softcap
    for x in others:
        scores = _hide(scores, x) if x.dtype == torch.bool else (_by_head(scores, x) + x).view_as(scores)
    p = torch.exp(scores - lse.unsqueeze(-1))
    dbias = ds = p * (dp - delta.unsqueeze(-1))
    if softcap is not None:
        ds = ds * (1 - capped * capped)
    return p.to(dtype), (ds * scale).to(dtype), *([dbias] if others and others[0].dtype != torch.bool else [])


def _tile_weights_compiled(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """`_tile_weights`, compiled once for each set of layouts and options."""
    key = compiled.layout_key(*tensors), tuple(sorted(options.items(), key=lambda item: item[0]))
    return compiled.compile_for(_tile_weights, key)(*tensors, **options)


def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    scale: float | None = None,
    tile: int | None = None,
    pattern: Pattern | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Algorithm 2: dq, dk, dv from q, o, do (B, H, Q, D), k, v (B, Hkv, K, D) and lse (B, H, Q), or all (B, S, D).

    `dlse` is the gradient of the log-sum-exp. Under a pattern with a bias, the gradient of the bias is the fourth
    result. `tile` is as in `flash_forward`. On CUDA `_tile_weights` is compiled.

    The outer loop visits key tiles, the inner one the query tiles that see a key tile. dk and dv of the key tile are
    summed in the inner loop, dq over the outer one. There are no atomics, so results are bitwise repeatable.
    """
    shapes, scale = (q.shape, k.shape, v.shape), q.shape[-1] ** -0.5 if scale is None else scale
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # P of a query that sees nothing becomes 0
    lse = lse.reshape(contract.as_4d(q).shape[:-1])
    q, k, v, o, do = map(contract.as_4d, (q, k, v, o, do))
    num_groups, (num_queries, num_keys) = k.shape[0] * k.shape[1], (q.shape[2], k.shape[2])
    pattern = pattern or PLAIN[causal]
    bounds = pattern.bounds(num_queries, num_keys, q.device)
    tile = tile or _tile_size(q.shape[0] * q.shape[1], max(num_queries, num_keys), q.device.type)
    wide, operand = _wide(q.dtype), _operand(q)
    tile_weights = _tile_weights_compiled if q.is_cuda else _tile_weights
    delta = (o.to(wide) * do.to(wide)).sum(dim=-1)  # (B, H, Q), row sums of P * dP
    delta = _grouped(delta if dlse is None else delta - dlse, num_groups)  # dS = P * (dP - delta + dlse)
    dbias = None if pattern.bias is None else torch.zeros_like(pattern.bias, dtype=wide)
    # From here on q and do are (N, G, Q, D), lse and delta (N, G, Q), k and v (N, K, D).
    q, do, lse = (_grouped(x, num_groups) for x in (q, do, lse))
    k, v = (x.reshape(num_groups, num_keys, -1) for x in (k, v))
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for column in range(0, num_keys, tile):
        columns = slice(column, min(column + tile, num_keys))
        k_tile, v_tile = (x[:, columns].to(operand) for x in (k, v))
        dk_tile, dv_tile = (torch.zeros(k_tile.shape, dtype=wide, device=k.device) for _ in range(2))
        for row, masked in bounds.of_keys.walk(columns.start, columns.stop, tile):
            rows = slice(row, min(row + tile, num_queries))
            q_tile, do_tile = (x[:, :, rows].flatten(1, 2).to(operand) for x in (q, do))
            added = pattern.added(rows, columns, wide)
            p, ds, *dbias_of_tile = tile_weights(
                _dot(q_tile, k_tile.mT),
                _dot(do_tile, v_tile.mT),
                lse[:, :, rows].flatten(1),
                delta[:, :, rows].flatten(1),
                *([] if added is None else [added]),
                *([bounds.visible(rows, columns)] if masked else []),
                scale=scale,
                softcap=pattern.softcap,
                dtype=operand,
            )
            dv_tile += _dot(p.mT, do_tile)
            dk_tile += _dot(ds.mT, q_tile)
            dq[:, :, rows] += _dot(ds, k_tile).unflatten(1, (q.shape[1], -1))
            if dbias is not None:
                part = tile_of(dbias, rows, columns)
                part += _by_head(dbias_of_tile[0], added).sum_to_size(part.shape)  # `part` is a view of dbias
        dk[:, columns] = dk_tile
        dv[:, columns] = dv_tile
    grads = [x.reshape(shape) for x, shape in zip((dq.to(q.dtype), dk, dv), shapes, strict=True)]
    return *grads, *([] if dbias is None or pattern.bias is None else [dbias.to(pattern.bias.dtype)])


FlashTorch, flash_torch = custom_ops.flash("flash_torch", "FlashTorch", flash_forward, flash_backward)


def flash_torch_supports(case: contract.AttentionCase) -> str | None:
    """None, or why the row cannot run `case`: `table.py` names this function.

    The functions here know no sinks: `custom_ops.flash` has lse.py merge these into o and the log-sum-exp.
    """
    compiles = case.device == "cuda" and case.grad
    return contract.why_not_plain(case, *INTERVALS, "bias", "alibi", "sinks", "return_lse") or (
        compiled.why_no_compiler(case.device) if compiles else None
    )
