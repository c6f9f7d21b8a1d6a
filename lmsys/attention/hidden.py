"""Stops NaN or infinity in keys that a pattern hides from a query from reaching that query's result.

`attention` in call.py wraps a row (an implementation in the table of table.py) by `kept_apart` if the row lacks the
trait `isolates` and options hide keys. Such a row hides a key by a weight of 0, but 0 · NaN is NaN. So the row is given
zeros in place of vectors of q, k and v that hold NaN or infinity. A query that holds such a value, or sees a key or
value that does, is *spoilt*: its result is NaN. In the backward a query is spoilt too if its incoming gradient holds
NaN or infinity. A spoilt query has NaN as its own gradient, and makes the gradients of the keys and values that it
sees, of its bias and of its sinks NaN. A new option that hides keys needs no change here, since `_visibility` asks the
pattern; a new tensor with a gradient needs an argument and a result of `_FiniteInputs`.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.contract import keywords_of, repeat_heads
from lmsys.attention.pattern import Pattern


def kept_apart(
    row: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, pattern: Pattern
) -> Any:
    """The result of `row`, in which nothing that the pattern hides from a query changes the result of that query."""
    visibility = _visibility(pattern, q.shape[2], k.shape[2], q.device)
    q, k, v, bias, sinks, spoilt = _FiniteInputs.apply(q, k, v, pattern.bias, pattern.sinks, *visibility)
    if bias is not None or sinks is not None:
        pattern = replace(pattern, bias=bias, sinks=sinks)
    result = row(q, k, v, scale=scale, **keywords_of(row, pattern))
    if not pattern.return_lse:
        return _SpoiltResult.apply(result, spoilt)
    o, lse = result
    return _SpoiltResult.apply(o, spoilt), _SpoiltResult.apply(lse.unsqueeze(-1), spoilt).squeeze(-1)


def _visibility(pattern: Pattern, queries: int, keys: int, device: torch.device) -> tuple[Tensor | None, ...]:
    """(first, end, key_first, key_end, mask) for `_FiniteInputs`: which keys each query sees.

    Without a mask, a query sees the keys [first, end), both (B or 1, Q); a key is seen by the queries [key_first,
    key_end), both (B or 1, K); `mask` is None. If the pattern has a mask, the first four are None, and `mask` is
    boolean, broadcastable to (B, H, Q, K): True where all options of the pattern let the query see the key.
    """
    if pattern.mask is not None:
        return None, None, None, None, pattern.seen(queries, keys, device)
    bounds = pattern.bounds(queries, keys, device)
    of_keys = bounds.seen_by() if torch.compiler.is_compiling() else bounds.of_keys
    return bounds.first, bounds.end, of_keys.first, of_keys.end, None


class _FiniteInputs(torch.autograd.Function):
    """(q, k, v, bias, sinks, spoilt) from q, k, v, bias, sinks and `_visibility`.

    q, k and v have zeros in place of vectors that are not finite. `spoilt` (B, H, Q) has q's dtype: 1 for a query that
    is spoilt, else 0.

    Each tensor of `_visibility` is a parameter of its own, not one of `*visibility`. Give `apply` one argument for each
    parameter of `forward`: if there are fewer, and no gradient is recorded, torch.compile passes a context in the place
    of q, and fails ("AutogradFunctionContextVariable object has no attribute proxy").
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        first: Tensor | None,
        end: Tensor | None,
        key_first: Tensor | None,
        key_end: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        bad_q = _not_finite(q)
        bad_k = _not_finite(k, v)
        sees_bad = _any_seen(repeat_heads(bad_k, q.shape[1]), first, end, mask)
        spoilt = (bad_q | sees_bad).to(q.dtype)
        return _filled(q, bad_q, 0), _filled(k, bad_k, 0), _filled(v, bad_k, 0), bias, sinks, spoilt

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[7:])  # key_first, key_end, mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dq, dk, dv, dbias, dsinks, spoilt = grads  # the gradient of `spoilt` comes from `_SpoiltResult`
        bad_q = spoilt > 0
        key_first, key_end, mask = ctx.saved_tensors
        seen = _any_seen(bad_q, key_first, key_end, None if mask is None else mask.mT)  # of keys: (B, H, K)
        bad_k = seen.unflatten(1, (dk.shape[1], -1)).any(dim=2)
        if dbias is not None:
            bad_rows = _any_for(bad_q.unsqueeze(3), dbias)
            bad_columns = _any_for(seen.unsqueeze(2), dbias)
            dbias = dbias.masked_fill(bad_rows & bad_columns, torch.nan)
        if dsinks is not None:
            dsinks = dsinks.masked_fill(_any_for(bad_q.any(dim=2), dsinks), torch.nan)
        dq = _filled(dq, bad_q, torch.nan)
        dk, dv = _filled(dk, bad_k, torch.nan), _filled(dv, bad_k, torch.nan)
        return dq, dk, dv, dbias, dsinks, None, None, None, None, None


class _SpoiltResult(torch.autograd.Function):
    """o (B, H, Q, D), or the log-sum-exp (B, H, Q, 1), with NaN for the queries that are `spoilt` (B, H, Q).

    The gradient of `spoilt` is 1 for the queries that are spoilt in the backward, else 0: `_FiniteInputs` reads it.
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


def _not_finite(*tensors: Tensor) -> Tensor:
    """(...): True where the vector of one of the tensors (..., D) holds NaN or infinity."""
    # isfinite would launch four kernels in place of this comparison.
    return ~(reduce(torch.maximum, (torch.linalg.vector_norm(x, torch.inf, dim=-1) for x in tensors)) < torch.inf)


def _filled(x: Tensor, bad: Tensor, value: float) -> Tensor:
    """x (..., D) with `value` in the vectors that are `bad` (...). A masked_fill would copy x first."""
    return torch.where(bad.unsqueeze(-1), value, x)


def _any_for(bad: Tensor, x: Tensor) -> Tensor:
    """True for each element of x if `bad` is True at one of the places to which this element is broadcast.

    x and `bad` have the same number of dimensions. The result has x's shape, but 1 where `bad` has 1.
    """
    return bad.int().sum_to_size([min(pair) for pair in zip(bad.shape, x.shape, strict=True)]) > 0


def _any_seen(bad: Tensor, first: Any, end: Any, mask: Tensor | None) -> Tensor:
    """(B, H, N): True for each of N items that sees one of M items that is `bad` (B, H, M).

    N are queries and M the keys that they see, or N are keys and M the queries that see them. Each of N sees the items
    [first, end) of M, both (B or 1, N), or those where the mask is True, broadcastable to (B, H, N, M).
    """
    if mask is not None:
        return torch.einsum("bhnm,bhm->bhn", mask.bfloat16(), bad.bfloat16()) > 0
    sums = torch.nn.functional.pad(bad.cumsum(dim=-1), (1, 0))
    # How many of M are bad before the interval of each of N begins, and before it ends.
    before, behind = (sums.gather(-1, edge.long().unsqueeze(1).expand(*bad.shape[:2], -1)) for edge in (first, end))
    return behind > before
