"""Peers under a pattern: they are told what it says. Their packages need GPUs, and stubs stand for them."""

import sys
import types
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from lmsys.attention import ATTENTION, AttentionCase, Documents, Pattern, peers
from lmsys.attention.naive import naive

PACKED = Documents([5, 1, 10])
EACH = Documents([[16], [7, 9]])
PATTERNS = {
    "causal": Pattern(True),
    "window": Pattern(True, 4),
    "offset": Pattern(True, 9, offset=3),
    "documents": Pattern(documents=PACKED),
    "causal documents": Pattern(True, documents=PACKED),
    "documents of each": Pattern(True, 6, documents=EACH),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_flex_masks_what_the_pattern_hides(name: str) -> None:
    pattern = PATTERNS[name]
    mask_mod = peers._mask_mod(pattern.causal, pattern.window, pattern.offset, pattern.documents)
    found = create_mask(mask_mod, 2, None, 16, 16, device="cpu")
    assert torch.equal(found, pattern.seen(16, 16, torch.device("cpu")).expand_as(found))


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None, causal: bool, window_size: Any = (-1, -1)
) -> Tensor:
    """flash_attn_func by its documentation: (B, S, H, D), causal at the bottom right, a window of keys to the left."""
    left, right = window_size
    assert right == 0 if left >= 0 else right == -1
    pattern = Pattern(causal, left + 1 if left >= 0 else None, offset=k.shape[1] - q.shape[1])
    return naive(*(x.transpose(1, 2) for x in (q, k, v)), scale=softmax_scale, pattern=pattern).transpose(1, 2)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """flash_attn_varlen_func by its documentation, on (tokens, H, D); with a log-sum-exp, as version 4 gives it."""
    assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max_seqlen_k == max(lengths) and sum(lengths) == len(q)
    sequences = zip(*(x.unsqueeze(0).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([dense(*one, **options)[0] for one in sequences]), torch.empty(0)


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "offset"])
def test_flash_attn_is_told_what_the_pattern_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = types.SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    q, k, v = torch.randn(2, 4, 16, 8), *torch.randn(2, 2, 2, 16, 8)
    found = peers.flash_attn_2(q, k, v, scale=0.3, pattern=PATTERNS[name])
    torch.testing.assert_close(found, naive(q, k, v, scale=0.3, pattern=PATTERNS[name]))
    if name == "window":  # the last queries, as in decoding
        few = partial(naive, q[:, :, 11:], k, v, pattern=Pattern(True, 4, offset=11))
        torch.testing.assert_close(peers.flash_attn_2(q[:, :, 11:], k, v, pattern=Pattern(True, 4, offset=11)), few())


def test_flash_attn_says_which_patterns_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=dense))
    case = AttentionCase(1, 2, 2, 4, 16, 64, "bfloat16", causal=True, device="cuda", capability=(9, 0))
    why_not = ATTENTION["flash_attn_2"].why_not
    assert why_not(replace(case, offset=12, window=4)) is None
    assert "needs the offset K - Q" in why_not(case) and "needs the offset K - Q" in why_not(replace(case, offset=3))
    assert why_not(replace(case, offset=12, softcap=2.0, key_lengths=True)) == "knows no key_lengths and no softcap"
