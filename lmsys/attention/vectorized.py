"""Attention in carefully written PyTorch, which every device and dtype runs: the implementation `vectorized`.

It has batched matmuls and one masked softmax, and works in place where autograd allows it. It is a *row* of the table
of implementations, `table.py`. There is nothing to tune here. A new option of `Pattern` is applied to the scores in the
same order as in `naive.masked_scores`.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension, Dv that of
the values.
"""

from typing import Any

import torch

from lmsys.attention import contract, naive
from lmsys.attention.pattern import PLAIN, Pattern


def vectorized(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    pattern: Pattern | None = None,
) -> Any:
    """softmax(scale · q kᵀ) v: q (B, H, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, Dv) -> (B, H, Q, Dv).

    A `pattern` replaces `causal`. Unlike `naive` this function scales q instead of the scores, folds the G query heads
    of a key head into the rows of one matmul instead of repeating keys, and masks in place. For the backward it keeps
    one (Q, K) matrix, the softmax, and where v has a narrower dtype also the softmax in that dtype. Scores of float16
    inputs are float32 (`contract.for_scores`). With `pattern.return_lse` the result is (o, log-sum-exp (B, H, Q)).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # `blind`: a boolean tensor, True for queries that see no key, whose o is 0; None if there are no such queries.
    pattern, blind = pattern or PLAIN[causal], None
    num_kv_heads, num_queries, num_keys = k.shape[1], q.shape[2], k.shape[2]
    rows = (contract.for_scores(q) * scale).unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # (B, Hkv, G * Q, D)
    # (B, Hkv, G * Q, K), and under ALiBi at least float32, as in `naive.masked_scores`
    scores = (rows @ contract.for_scores(k).mT).to(
        rows.dtype if pattern.alibi is None else torch.promote_types(rows.dtype, torch.float32)
    )
    if pattern.softcap is not None:
        scores = torch.tanh(scores / pattern.softcap) * pattern.softcap
    # (B, H, Q, K), a view of `scores`: what is written into it in place changes them, too.
    by_head = scores.unflatten(2, (-1, num_queries)).flatten(1, 2)
    added = pattern.added(slice(0, num_queries), slice(0, num_keys), torch.promote_types(scores.dtype, torch.float32))
    if added is not None:
        by_head += added
    if pattern.hides:
        seen, blind = pattern.seen_and_blind(num_queries, num_keys, q.device)
        by_head.masked_fill_(~seen, float("-inf"))
    if pattern.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:  # the sinks are a last column, which takes its share of the softmax and has no value
        weights = torch.softmax(naive.with_sinks(by_head, pattern), dim=-1)[..., :num_keys].reshape(scores.shape)
    o = (weights.to(v.dtype) @ v).unflatten(2, (-1, num_queries)).flatten(1, 2)
    o = o if blind is None else o.masked_fill(blind, 0)
    return (o, naive.log_sum_exp(q, k, pattern, scale)) if pattern.return_lse else o
