"""Attention as it is written on paper. In float64 it is the oracle, in low precision the error budget.

Legend: B batch, H query heads, Hkv key/value heads, Q queries, K keys, D head dimension, Dv that of the values.
Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
"""

from typing import Any

import torch
from torch import Tensor

from lmsys.attention import compiled, contract
from lmsys.attention.pattern import PLAIN, Pattern
from lmsys.measure.profile import part


def masked_scores(
    q: Tensor, k: Tensor, pattern: Pattern, scale: float | None = None, first_query: int = 0
) -> tuple[Tensor, Tensor | None]:
    """scale · q kᵀ, capped and biased, with -inf where query `first_query + i` must not see key j: (B, H, Q, K).

    With it come the queries that see nothing, which broadcast to (B, H, Q, 1); their scores are those of all keys.
    In float32 where q is float16.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = contract.for_scores(q) @ contract.for_scores(contract.repeat_heads(k, q.shape[1])).mT  # (B, H, Q, K)
    narrow = scores.to(q.dtype) * scale  # as plain PyTorch rounds them
    scores = narrow if q.dtype == scores.dtype else torch.where(narrow.isfinite(), narrow, scores * scale)
    if pattern.softcap is not None:
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = (pattern.softcap * torch.tanh(wide / pattern.softcap)).to(scores.dtype)
    added = pattern.added(
        slice(first_query, first_query + q.shape[2]),
        slice(0, k.shape[2]),
        torch.promote_types(scores.dtype, torch.float32),
    )
    if added is not None:
        scores = (scores + added).to(scores.dtype)
    if not pattern.hides:
        return scores, None
    seen, blind = pattern.seen_and_blind(q.shape[2], k.shape[2], q.device, first_query)
    return scores.masked_fill(~seen, float("-inf")), blind


def with_sinks(scores: Tensor, pattern: Pattern) -> Tensor:
    """Scores (B, H, Q, K) with those of the sinks behind them, where there are any: (B, H, Q, K + 1)."""
    if pattern.sinks is None:
        return scores
    sinks = pattern.sinks[..., None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1)


def log_sum_exp(q: Tensor, k: Tensor, pattern: Pattern, scale: float | None = None, first_query: int = 0) -> Tensor:
    """The log-sum-exp of each query's scores (B, H, Q), float32 or wider; -inf of one that sees not even a sink."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores, blind = masked_scores(q.to(wide), k.to(wide), pattern, scale, first_query)
    scores = scores if blind is None else scores.masked_fill(blind, float("-inf"))
    return with_sinks(scores, pattern).logsumexp(dim=-1)


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    pattern: Pattern | None = None,
    first_query: int = 0,
) -> Any:
    """softmax(scale · q kᵀ) v: q (B, H, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, Dv) -> (B, H, Q, Dv).

    `pattern` says more than `causal`, and stands in its place; a query that sees nothing gives zeros.
    With `pattern.return_lse` the log-sum-exp (B, H, Q) comes with o.
    `first_query` is the index of q's first row, so that a block of rows can be attended on its own.
    """
    pattern = pattern or PLAIN[causal]
    with part("scores"):
        scores, blind = masked_scores(q, k, pattern, scale, first_query)
    with part("softmax"):
        weights = torch.softmax(with_sinks(scores, pattern), dim=-1).to(v.dtype)
    with part("values"):
        o = weights[..., : k.shape[2]] @ contract.repeat_heads(v, q.shape[1])  # a sink has no value
        o = o if blind is None else o.masked_fill(blind, 0)
    return (o, log_sum_exp(q, k, pattern, scale, first_query)) if pattern.return_lse else o


def naive_compiled(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """`naive` through torch.compile, one static graph for each case."""
    if torch.compiler.is_compiling():
        return naive(q, k, v, causal=causal, scale=scale)
    key = compiled.layout_key(q, k, v), causal, scale, torch.is_grad_enabled()
    return compiled.compile_for(naive, key)(q, k, v, causal=causal, scale=scale)


def naive_compiled_supports(case: contract.AttentionCase) -> str | None:
    return contract.why_not_plain(case) or compiled.why_no_compiler(case.device)
