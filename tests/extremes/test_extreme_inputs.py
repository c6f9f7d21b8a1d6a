"""Extreme rows of a model's weights, and extreme tokens of its head and loss (lmsys/extremes/{model,loss}.py).

Benchmarks write extreme rows before they test an update: `write_model` writes them, and `group_of` numbers them, since
each group is judged apart from ordinary rows, which are 0. A few tokens of each draw get logits of +-SCALE, which are
exact in every dtype. Any part of a draw can be written by itself, and is the same as in the whole.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmsys.config import model_config
from lmsys.extremes.loss import EVERY, SCALE, ExtremeTokens, is_extreme
from lmsys.extremes.model import EMBEDDINGS, FIRST_ID, GATE, HUGE_ROW, VALUES_OF, group_of, write_model
from lmsys.model import TransformerLM

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


def tiny_model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(model_config("tiny", context_length=8, vocab_size=1000))


def test_rows_that_are_written_are_told_apart() -> None:
    model = tiny_model()
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    write_model(after := dict(model.named_parameters()))
    for name, x in after.items():
        changed = (x != before[name]).any(dim=-1)
        expected = group_of(name, len(x)) > 0
        if name.endswith("ffn.w1.weight"):  # written in the rows of w3's group, and judged with ordinary rows
            expected = group_of(name.replace("w1", "w3"), len(x)) > 0
        assert torch.equal(changed, expected) if x.dim() > 1 else not changed, name
    group = group_of(EMBEDDINGS, 1000)
    rows = [after[EMBEDDINGS][group == number] for number in (1, 2, 3)]
    assert group[FIRST_ID] == 0 and all(len(group_rows) >= 5 for group_rows in rows)
    assert not rows[0].any() and torch.equal(rows[1], before[EMBEDDINGS][group == 2] * HUGE_ROW)
    assert bool(((rows[2].abs() == HUGE_ROW).sum(dim=1) == 1).all())


def test_what_saturated_gates_let_through_is_of_the_usual_size() -> None:
    model = tiny_model()
    ffn, x = model.layers[0].ffn, torch.randn(200, model.config.d_model)
    saturated = group_of(VALUES_OF, len(ffn.w3.weight)) == 1
    usual = (torch.relu(ffn.w1(x)) * ffn.w3(x))[:, saturated]
    write_model(dict(model.named_parameters()))
    gate, value = ffn.up(x)
    assert gate[:, saturated].abs().max() > GATE / 2 and not gate.exp().isfinite().all()
    let_through = (F.silu(gate) * value)[:, saturated]
    assert abs(let_through.std() / usual.std() - 1) < 0.05
