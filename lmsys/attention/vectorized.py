"""Attention as careful PyTorch writes it: batched matmuls, one masked softmax, in place where autograd allows.

Legend: B batch, H query heads, Hkv key/value heads, G = H / Hkv, Q queries, K keys, D head dimension, Dv that of
the values.
"""

import torch
from torch import Tensor

from lmsys.attention.contract import for_scores
from lmsys.attention.pattern import PLAIN, Pattern


def vectorized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    pattern: Pattern | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v: q (B, H, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, Dv) -> (B, H, Q, Dv).

    `pattern` stands in the place of `causal`. Beside `naive` it scales q instead of the scores, folds the G query heads
    of a key head into its rows instead of repeating keys, masks in place, and keeps one (Q, K) matrix for the backward:
    the softmax.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    pattern, blind = pattern or PLAIN[causal], None
    num_kv_heads, num_queries, num_keys = k.shape[1], q.shape[2], k.shape[2]
    rows = (for_scores(q) * scale).unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # (B, Hkv, G * Q, D)
    scores = rows @ for_scores(k).mT  # (B, Hkv, G * Q, K)
    if pattern.softcap is not None:
        scores = torch.tanh(scores / pattern.softcap) * pattern.softcap
    if pattern.hides:
        seen, blind = pattern.seen_and_blind(num_queries, num_keys, q.device)
        scores.unflatten(2, (-1, num_queries)).flatten(1, 2).masked_fill_(~seen, float("-inf"))
    o = (torch.softmax(scores, dim=-1).to(v.dtype) @ v).unflatten(2, (-1, num_queries)).flatten(1, 2)
    return o if blind is None else o.masked_fill(blind, 0)
