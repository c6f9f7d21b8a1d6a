"""Extreme rows of a model's weights (lmsys/extremes/model.py), which benchmarks write before they test an update.

`write_model` writes them, and `group_of` numbers them: each group is judged apart from ordinary rows, which are 0.
"""

import torch

from lmsys.config import model_config
from lmsys.extremes.model import EMBEDDINGS, FIRST_ID, GATE, HUGE_ROW, VALUES_OF, group_of, write_model
from lmsys.model import TransformerLM


def test_rows_that_are_written_are_told_apart() -> None:
    torch.manual_seed(0)
    model = TransformerLM(model_config("tiny", context_length=8, vocab_size=1000))
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
    torch.manual_seed(0)
    model = TransformerLM(model_config("tiny", context_length=8, vocab_size=1000))
    ffn, x = model.layers[0].ffn, torch.randn(200, model.config.d_model)
    saturated = group_of(VALUES_OF, len(ffn.w3.weight)) == 1
    usual = (torch.relu(ffn.w1(x)) * ffn.w3(x))[:, saturated]
    write_model(dict(model.named_parameters()))
    gate, value = ffn.up(x)
    assert gate[:, saturated].abs().max() > GATE / 2 and not gate.exp().isfinite().all()
    let_through = (torch.nn.functional.silu(gate) * value)[:, saturated]
    assert abs(let_through.std() / usual.std() - 1) < 0.05
