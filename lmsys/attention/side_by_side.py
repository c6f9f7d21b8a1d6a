"""Queries, keys and values as parts of one tensor, which their projection has written, and gradients that lie alike.

Legend: B batch, H query heads, Hkv key/value heads, N = H + 2 Hkv, S length, D head dimension.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def whole_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The contiguous tensor (B, S, N, D) of which q (B, H, S, D), k and v (B, Hkv, S, D) are the heads, in this order.

    None where they are not.
    """
    (batch, heads, length, head_dim), (_, kv_heads, _, _) = q.shape, k.shape
    row = (heads + 2 * kv_heads) * head_dim
    if q.stride(2) != row or not k.shape == v.shape == (batch, kv_heads, length, head_dim):
        return None
    first, strides = q.storage_offset(), (length * row, head_dim, row, 1)
    offsets = first, first + heads * head_dim, first + (heads + kv_heads) * head_dim
    if any(x.stride() != strides or x.storage_offset() != at for x, at in zip((q, k, v), offsets, strict=True)):
        return None
    if len({x.untyped_storage().data_ptr() for x in (q, k, v)}) != 1:
        return None
    return q.as_strided((batch, length, heads + 2 * kv_heads, head_dim), (length * row, row, head_dim, 1))


def gradients_like(
    q: Tensor, k: Tensor, v: Tensor, like: Callable[[Tensor], Tensor], together: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty dq, dk and dv: parts of one tensor where q, k and v are, so that the projection's backward finds one.

    Else `like` makes each of its input, also where a row of a head is no multiple of 16 bytes, as descriptors need it,
    and where not `together`: a custom operator has told beforehand how its results lie.
    """
    whole = whole_of(q, k, v) if together else None
    if whole is None or q.shape[-1] * q.element_size() % 16:
        return like(q), like(k), like(v)
    heads, kv_heads = q.shape[1], k.shape[1]
    dq, dk, dv = torch.empty_like(whole).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    return dq, dk, dv
