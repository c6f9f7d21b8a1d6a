"""Attention as it is written on paper: the implementation `naive`, and the reference for all others.

The implementations are the *rows* of the table in table.py, which names `naive` and `naive_compiled`.
`lmsys/testing.py` compares results with `naive` in float64, and allows about the error of `naive` in low precision.
`log_sum_exp` and `with_sinks` also serve other rows. `contract.for_scores` makes float16 operands of scores float32,
and `contract.repeat_heads` repeats key/value heads for each query head. A change here changes what counts as right. A
new option that changes scores is applied in `masked_scores`, and in all other rows in the same order.

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
    """(scores, blind): scale · q kᵀ (B, H, Q, K), capped and biased, and -inf for keys that a query must not see.

    Row i is query `first_query + i`. `blind` is True for queries that see no key, broadcastable to (B, H, Q, 1), or
    None; the scores of such a query are not set to -inf, so that its softmax is finite (`Pattern.seen_and_blind`). For
    float16 the scores are float32, so that those beyond 65,504 stay finite. Under ALiBi they are float32, too: far from
    the query they are hundreds, which bfloat16 rounds to whole numbers.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = contract.for_scores(q) @ contract.for_scores(contract.repeat_heads(k, q.shape[1])).mT  # (B, H, Q, K)
    narrow = scores.to(q.dtype) * scale  # rounded as plain PyTorch rounds them
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
        scores = scores + added if pattern.alibi is not None else (scores + added).to(scores.dtype)
    if not pattern.hides:
        return scores, None
    seen, blind = pattern.seen_and_blind(q.shape[2], k.shape[2], q.device, first_query)
    return scores.masked_fill(~seen, float("-inf")), blind


def with_sinks(scores: Tensor, pattern: Pattern) -> Tensor:
    """Scores (B, H, Q, K) with a column for the sinks appended, (B, H, Q, K + 1); without sinks the scores alone."""
    if pattern.sinks is None:
        return scores
    sinks = pattern.sinks[..., None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1)


def log_sum_exp(q: Tensor, k: Tensor, pattern: Pattern, scale: float | None = None, first_query: int = 0) -> Tensor:
    """The log-sum-exp of each query's scores (B, H, Q), float32 or wider; -inf if it sees neither a key nor a sink."""
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

    A `pattern` replaces `causal`. A query that sees nothing has zeros as its result. With `pattern.return_lse` the
    result is (o, log-sum-exp (B, H, Q)). `first_query` is the index of q's first row, so that a block of rows can be
    computed on its own.
    """
    pattern = pattern or PLAIN[causal]
    with part("scores"):  # names a part of the call for profilers
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
    """None, or why `naive_compiled` cannot run the case."""
    return contract.why_not_plain(case) or compiled.why_no_compiler(case.device)
