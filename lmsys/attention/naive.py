"""Attention as it is written on paper. In float64 it is the oracle, in low precision the error budget.

Legend: B batch, H query heads, Hkv key/value heads, Q queries, K keys, D head dimension, Dv that of the values.
Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
"""

import torch
from torch import Tensor

from lmsys.attention.compiled import compile_for, layout_key, why_no_compiler
from lmsys.attention.contract import AttentionCase, repeat_heads, seen_and_blind, why_not_plain
from lmsys.measure.profile import part


def masked_scores(q: Tensor, k: Tensor, *, causal: bool, scale: float | None = None, first_query: int = 0) -> Tensor:
    """scale · q kᵀ, with -inf where query `first_query + i` must not see key j: (B, H, Q, K)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ repeat_heads(k, q.shape[1]).mT * scale  # (B, H, Q, K)
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(first_query)
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    mask: Tensor | None = None,
    first_query: int = 0,
) -> Tensor:
    """softmax(scale · q kᵀ) v: q (B, H, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, Dv) -> (B, H, Q, Dv).

    `mask`, broadcastable to (B, H, Q, K), is True where a query sees a key; one that sees none gives zeros.
    `first_query` is the position of q's first row, so that a block of rows can be attended on its own.
    """
    with part("scores"):
        scores = masked_scores(q, k, causal=causal, scale=scale, first_query=first_query)
        if mask is not None:
            seen, blind = seen_and_blind(mask, causal, q.shape[2], k.shape[2], first_query)
            scores = scores.masked_fill(~seen, float("-inf"))
    with part("softmax"):
        weights = torch.softmax(scores, dim=-1)
    with part("values"):
        o = weights @ repeat_heads(v, q.shape[1])
        return o if mask is None else o.masked_fill(blind, 0)


def naive_compiled(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """`naive` through torch.compile, one static graph for each case."""
    if torch.compiler.is_compiling():
        return naive(q, k, v, causal=causal, scale=scale)
    key = layout_key(q, k, v), causal, scale, torch.is_grad_enabled()
    return compile_for(naive, key)(q, k, v, causal=causal, scale=scale)


def naive_compiled_supports(case: AttentionCase) -> str | None:
    return why_not_plain(case) or why_no_compiler(case.device)
