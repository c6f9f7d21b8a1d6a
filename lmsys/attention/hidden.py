"""Keeps from a query what it does not see, for rows that give it a weight of zero: 0 · NaN is NaN.

Vectors that hold NaN or infinity are zeros for the row. The queries that hold such, or see such, are *spoilt*: they give
NaN. So does, in a backward, a query whose incoming gradient holds such, and a spoilt query makes NaN of the gradients of
itself and of the keys that it sees.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.attention.bounds import Bounds
from lmsys.attention.contract import repeat_heads
from lmsys.attention.pattern import Pattern

NAN = float("nan")


def kept_apart(row: Callable[..., Tensor], pattern: Pattern) -> Callable[..., Tensor]:
    """`row`, which is told `pattern`, but nothing that the pattern hides from a query changes what that query gives."""

    def apart(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        q, k, v, spoilt = _Sound.apply(q, k, v, pattern)
        return _Spoilt.apply(row(q, k, v, **options), spoilt)

    return apart


class _Sound(torch.autograd.Function):
    """q, k and v with zeros in place of vectors that are not finite, and which queries are spoilt: (B, H, Q), 0 or 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        bad_q, bad_k = _not_finite(q), _not_finite(k) | _not_finite(v)
        spoilt = bad_q | _that_see(repeat_heads(bad_k, q.shape[1]), pattern, q.shape[2])
        return _filled(q, bad_q, 0), _filled(k, bad_k, 0), _filled(v, bad_k, 0), spoilt.to(q.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.pattern = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dq, dk, dv, spoilt = grads
        bad_q = spoilt > 0
        bad_k = _that_are_seen(bad_q, ctx.pattern, dk.shape[2]).unflatten(1, (dk.shape[1], -1)).any(dim=2)
        return _filled(dq, bad_q, NAN), _filled(dk, bad_k, NAN), _filled(dv, bad_k, NAN), None


class _Spoilt(torch.autograd.Function):
    """o with NaN for spoilt queries. The gradient of `spoilt` says which are in the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(o: Tensor, spoilt: Tensor) -> Tensor:
        return _filled(o, spoilt > 0, NAN)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (spoilt,) = ctx.saved_tensors
        bad = (spoilt > 0) | _not_finite(grads[0])
        return _filled(grads[0], bad, 0), bad.to(spoilt.dtype)


def _not_finite(x: Tensor) -> Tensor:
    """Of each vector of x (..., D)."""
    return ~torch.linalg.vector_norm(x, float("inf"), dim=-1).isfinite()


def _filled(x: Tensor, bad: Tensor, value: float) -> Tensor:
    return x.masked_fill(bad.unsqueeze(-1), value)


def _that_see(bad_k: Tensor, pattern: Pattern, num_queries: int) -> Tensor:
    """Of each query (B, H, Q), whether it sees one of these keys, (B, H, K)."""
    if pattern.mask is None:
        return _meets(pattern.bounds(num_queries, bad_k.shape[2], bad_k.device), bad_k)
    return torch.einsum("bhqk,bhk->bhq", _seen(pattern, num_queries, bad_k.shape[2], bad_k.device), bad_k.float()) > 0


def _that_are_seen(bad_q: Tensor, pattern: Pattern, num_keys: int) -> Tensor:
    """Of each key (B, H, K), whether one of these queries, (B, H, Q), sees it."""
    if pattern.mask is None:
        return _meets(pattern.bounds(bad_q.shape[2], num_keys, bad_q.device).of_keys, bad_q)
    return torch.einsum("bhqk,bhq->bhk", _seen(pattern, bad_q.shape[2], num_keys, bad_q.device), bad_q.float()) > 0


def _seen(pattern: Pattern, *where: Any) -> Tensor:
    seen = pattern.seen(*where).float()
    return seen[(None,) * (4 - seen.dim())]


def _meets(bounds: Bounds, bad: Tensor) -> Tensor:
    """Whether the interval of each owner (B or 1, N) has one of `bad` (B, H, M)."""
    sums = F.pad(bad.cumsum(dim=-1), (1, 0))
    before, behind = (
        sums.gather(-1, edge.long().unsqueeze(1).expand(*bad.shape[:2], -1)) for edge in (bounds.first, bounds.end)
    )
    return behind > before
