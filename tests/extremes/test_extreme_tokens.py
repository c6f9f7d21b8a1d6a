"""Extreme tokens of a language model's head and loss (lmsys/extremes/loss.py).

A few tokens of each draw get logits of +-SCALE, which are exact in every dtype. Any part of a draw can be written by
itself, and is the same as in the whole.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmsys.extremes.loss import EVERY, SCALE, ExtremeTokens, is_extreme

WIDTH = 64


def drawn(draw: int, tokens: int, classes: int) -> tuple[ExtremeTokens, Tensor, Tensor, Tensor]:
    """(extreme tokens, hidden states, weight, targets): ordinary ones, but the weight has its extreme rows already."""
    torch.manual_seed(draw)
    hidden, weight = torch.randn(tokens, WIDTH), torch.randn(classes, WIDTH) * WIDTH**-0.5
    targets, extreme = torch.randint(classes, (tokens,)), ExtremeTokens.of(draw, tokens, classes)
    extreme.write_weight(weight)
    return extreme, hidden, weight, targets


@given(draw=st.integers(0, 1000), tokens=st.integers(1, 700), classes=st.integers(2, 50))
def test_extreme_tokens_are_written_and_no_others(draw: int, tokens: int, classes: int) -> None:
    extreme, hidden, weight, targets = drawn(draw, tokens, classes)
    before = hidden.clone(), targets.clone()
    extreme.write_tokens(hidden, weight, targets)
    marks = is_extreme(extreme.tokens, tokens).bool()
    assert torch.equal(hidden[~marks], before[0][~marks]) and torch.equal(targets[~marks], before[1][~marks])
    assert bool((hidden[marks] == SCALE * weight[extreme.classes[-1]]).all())
    assert 1 <= marks.sum() <= tokens / EVERY + 1
    assert targets[marks].tolist() == list(extreme.classes[:-1]) and set(extreme.classes) <= set(range(classes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_their_logits_are_extreme_and_exact(dtype: torch.dtype) -> None:
    extreme, hidden, weight, targets = drawn(7, 1000, 500)
    extreme.write_tokens(hidden, weight, targets)
    marks = is_extreme(extreme.tokens, 1000).bool()
    logits = F.linear(hidden[marks].to(dtype), weight.to(dtype)).float()
    assert len(logits) >= 7 and bool((logits.amin(dim=1) == -SCALE).all())
    assert bool((logits.gather(1, targets[marks, None]) == -SCALE).all())
    assert bool((logits.argmax(dim=1) == extreme.classes[-1]).all()) and bool((logits.amax(dim=1) == SCALE).all())
    assert F.cross_entropy(logits, targets[marks]).item() == 2 * SCALE
    assert not logits.exp().sum(dim=1).isfinite().any()  # so a loss that subtracts no maximum overflows


def test_a_vocabulary_of_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size=1 must be at least 2"):
        ExtremeTokens.of(0, 10, 1)
