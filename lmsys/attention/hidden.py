"""Keeps from a query what it does not see, for rows that give it a weight of zero: 0 · NaN is NaN.

Vectors that hold NaN or infinity are zeros for the row. The queries that hold such, or see such, are *spoilt*: they
give NaN. In a backward those are spoilt too whose incoming gradient holds such, and a spoilt query makes NaN of the
gradients of itself and of the keys that it sees.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmsys.attention.contract import repeat_heads
from lmsys.attention.pattern import Pattern


def kept_apart(
    row: Callable[..., Tensor], pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, /, **options: Any
) -> Tensor:
    """The result of `row`; nothing that `pattern` hides from a query changes what that query gives."""
    # Where none is recorded, torch.compile counts the arguments that a Function takes.
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    sound = _Sound.apply if recorded or not torch.compiler.is_compiling() else _Sound.forward
    q, k, v, spoilt = sound(q, k, v, *_sight(pattern, q.shape[2], k.shape[2], q.device))
    return _Spoilt.apply(row(q, k, v, **options), spoilt)


def _sight(pattern: Pattern, *where: Any) -> tuple[Tensor, ...]:
    """Who sees whom: first and end of the keys of a query, and of the queries of a key; or a mask (B, H, Q, K)."""
    if pattern.mask is None:
        bounds = pattern.bounds(*where)
        of_keys = bounds.seen_by() if torch.compiler.is_compiling() else bounds.of_keys
        return bounds.first, bounds.end, of_keys.first, of_keys.end
    return (pattern.seen(*where),)


class _Sound(torch.autograd.Function):
    """q, k, v with zeros in place of vectors that are not finite, and which queries are spoilt: (B, H, Q), 0 or 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *sight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        bad_q, bad_k = _not_finite(q), _not_finite(k) | _not_finite(v)
        see_bad = _any_of(repeat_heads(bad_k, q.shape[1]), sight[:2], "bhqk,bhk->bhq")
        return _filled(q, bad_q, 0), _filled(k, bad_k, 0), _filled(v, bad_k, 0), (bad_q | see_bad).to(q.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dq, dk, dv, spoilt = grads
        bad_q, sight = spoilt > 0, ctx.saved_tensors
        bad_k = _any_of(bad_q, sight[-2:], "bhqk,bhq->bhk").unflatten(1, (dk.shape[1], -1)).any(dim=2)
        return (
            _filled(dq, bad_q, torch.nan),
            _filled(dk, bad_k, torch.nan),
            _filled(dv, bad_k, torch.nan),
            *(None for _ in sight),
        )


class _Spoilt(torch.autograd.Function):
    """o with NaN for spoilt queries. The gradient of `spoilt` says which are in the backward."""

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


def _any_of(bad: Tensor, sight: tuple[Tensor, ...], product: str) -> Tensor:
    """True for each query, or key, (B, H, N), that sees one of `bad` (B, H, M), or is seen by one.

    By the ends of their intervals (B or 1, N), or by the `product` with a mask.
    """
    if len(sight) == 1:
        return torch.einsum(product, sight[0].bfloat16(), bad.bfloat16()) > 0
    sums = F.pad(bad.cumsum(dim=-1), (1, 0))
    before, behind = (sums.gather(-1, edge.long().unsqueeze(1).expand(*bad.shape[:2], -1)) for edge in sight)
    return behind > before
