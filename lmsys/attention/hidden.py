"""Keeps from a query what it does not see, for rows that give it a weight of zero: 0 · NaN is NaN.

Vectors that hold NaN or infinity are zeros for the row. The queries that hold such, or see such, are *spoilt*: they
give NaN. In a backward those are spoilt too whose incoming gradient holds such, and a spoilt query makes NaN of the
gradients of itself, of the keys that it sees, and of its bias and sinks.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.attention.contract import keywords_of, repeat_heads
from lmsys.attention.pattern import Pattern


def kept_apart(
    row: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, pattern: Pattern
) -> Any:
    """The result of `row`, in which nothing that the pattern hides from a query changes the result of that query."""
    # Where none is recorded, torch.compile counts the arguments that a Function takes.
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    sound = _Sound.apply if recorded or not torch.compiler.is_compiling() else _Sound.forward
    sight = _sight(pattern, q.shape[2], k.shape[2], q.device)
    q, k, v, bias, sinks, spoilt = sound(q, k, v, pattern.bias, pattern.sinks, *sight)
    if bias is not None or sinks is not None:
        pattern = replace(pattern, bias=bias, sinks=sinks)
    result = row(q, k, v, scale=scale, **keywords_of(row, pattern))
    if not pattern.return_lse:
        return _Spoilt.apply(result, spoilt)
    o, lse = result
    return _Spoilt.apply(o, spoilt), _Spoilt.apply(lse.unsqueeze(-1), spoilt).squeeze(-1)


def _sight(pattern: Pattern, *where: Any) -> tuple[Tensor, ...]:
    """Who sees whom: first and end of the keys of a query, and of the queries of a key; or a mask (B, H, Q, K)."""
    if pattern.mask is None:
        bounds = pattern.bounds(*where)
        of_keys = bounds.seen_by() if torch.compiler.is_compiling() else bounds.of_keys
        return bounds.first, bounds.end, of_keys.first, of_keys.end
    return (pattern.seen(*where),)


class _Sound(torch.autograd.Function):
    """q, k, v with zeros in place of vectors that are not finite, bias and sinks, and which queries are spoilt.

    The last is (B, H, Q), 0 or 1.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *sight: Tensor
    ) -> tuple[Tensor | None, ...]:
        bad_q = _not_finite(q)
        bad_k = _not_finite(k) | _not_finite(v)
        sees_bad = _any_of(repeat_heads(bad_k, q.shape[1]), sight[:2], "bhqk,bhk->bhq")
        spoilt = (bad_q | sees_bad).to(q.dtype)
        return _filled(q, bad_q, 0), _filled(k, bad_k, 0), _filled(v, bad_k, 0), bias, sinks, spoilt

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[5:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dq, dk, dv, dbias, dsinks, spoilt = grads
        bad_q, sight = spoilt > 0, ctx.saved_tensors
        seen = _any_of(bad_q, sight[-2:], "bhqk,bhq->bhk")
        bad_k = seen.unflatten(1, (dk.shape[1], -1)).any(dim=2)
        if dbias is not None:
            bad_rows = _any_for(bad_q.unsqueeze(3), dbias)
            bad_columns = _any_for(seen.unsqueeze(2), dbias)
            dbias = dbias.masked_fill(bad_rows & bad_columns, torch.nan)
        if dsinks is not None:
            dsinks = dsinks.masked_fill(_any_for(bad_q.any(dim=2), dsinks), torch.nan)
        dq = _filled(dq, bad_q, torch.nan)
        dk, dv = _filled(dk, bad_k, torch.nan), _filled(dv, bad_k, torch.nan)
        return dq, dk, dv, dbias, dsinks, *[None] * len(sight)


class _Spoilt(torch.autograd.Function):
    """o, or the log-sum-exp (B, H, Q, 1), with NaN for spoilt queries.

    The gradient of `spoilt` says which are in the backward.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(o: Tensor, spoilt: Tensor) -> Tensor:
        return _filled(o, spoilt > 0, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (spoilt,) = ctx.saved_tensors
        bad = (spoilt > 0) | _not_finite(grads[0])
        return _filled(grads[0], bad, 0), bad.to(spoilt.dtype)


def _not_finite(x: Tensor) -> Tensor:
    """True for each vector of x (..., D) that holds NaN or infinity."""
    return ~torch.linalg.vector_norm(x, float("inf"), dim=-1).isfinite()


def _filled(x: Tensor, bad: Tensor, value: float) -> Tensor:
    return x.masked_fill(bad.unsqueeze(-1), value)


def _any_for(bad: Tensor, x: Tensor) -> Tensor:
    """True where one of `bad` is for an element of x, which broadcasts as it does."""
    return bad.int().sum_to_size([min(pair) for pair in zip(bad.shape, x.shape, strict=True)]) > 0


def _any_of(bad: Tensor, sight: tuple[Tensor, ...], product: str) -> Tensor:
    """True for each query, or key, (B, H, N), that sees one of `bad` (B, H, M), or is seen by one.

    By the ends of their intervals (B or 1, N), or by the `product` with a mask.
    """
    if len(sight) == 1:
        return torch.einsum(product, sight[0].bfloat16(), bad.bfloat16()) > 0
    sums = F.pad(bad.cumsum(dim=-1), (1, 0))
    before, behind = (sums.gather(-1, edge.long().unsqueeze(1).expand(*bad.shape[:2], -1)) for edge in sight)
    return behind > before
