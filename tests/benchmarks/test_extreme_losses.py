"""Extreme tokens in the benchmark of the loss: every call is judged on some, and older records are repeated without.

An extreme token has logits far from 0. Draws of an older version (BEFORE) had no such tokens.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_loss import Loss
from benchmarks.loss import LossDraws, _evidence, indices, slices_of
from lmsys.draws import VERSION, Draws
from lmsys.extremes import BEFORE
from lmsys.model.functions import widened
from lmsys.model.loss import linear_cross_entropy
from tests.benchmarks.test_bench_loss import PRECISIONS, drawn, records
from tests.support.cheats import CLOCK, seen


def test_records_of_draws_without_extremes_are_repeated_as_they_were_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LossDraws, "fill", Draws.fill)
        patch.setattr("lmsys.draws.VERSION", BEFORE)
        record = records(row=("chunked",))["chunked"]
    assert record["proof"]["generator"] == BEFORE and record["proof"]["calls"]
    later = record | {"proof": record["proof"] | {"generator": VERSION}}
    for call in record["proof"]["calls"]:
        assert list(Loss().repeat(record, call)) == [record["d_model"]]  # elements, and no sentence
        assert "off by" in next(iter(Loss().repeat(later, call)))


def test_extreme_tokens_are_looked_at_in_every_call_and_often_recorded() -> None:
    inputs = drawn(tokens=600, vocab_size=400)
    of_tokens, of_classes = inputs.groups
    rows = []
    for draw in range(20):
        tokens, classes = (indices(some) for some in slices_of(inputs, key=draw))
        assert len(set(tokens)) == len(tokens) >= 56 and len(set(classes)) == 64
        assert of_tokens[tokens].sum() and of_classes[classes].sum()
        zeros = torch.zeros(len(tokens), 16)
        rows.append(of_tokens[tokens][_evidence(draw, of_tokens[tokens], zeros, zeros.double())["row"]].item())
    assert 5 < sum(rows) < 15


def without_maximum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = widened(F.linear(hidden, weight))
    return (logits.exp().sum(dim=1).log() - logits.gather(1, targets[:, None])[:, 0]).mean()


def from_zero(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Takes 0 as the maximum if all logits are negative: the exponentials of logits far below 0 are then all 0."""
    logits = widened(F.linear(hidden, weight))
    top = logits.amax(dim=1, keepdim=True).clamp(min=0)
    return ((logits - top).exp().sum(dim=1).log() + (top - logits.gather(1, targets[:, None]))[:, 0]).mean()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("row", [without_maximum, from_zero])
def test_rows_that_only_normal_logits_pass_are_wrong(row: Any, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmsys.model.loss.linear_cross_entropy", row)
    record = records(row=("chunked",), precision=(precision,))["chunked"]
    assert record["outcome"] == "wrong" and "loss" in record["reason"] and "NaN or inf" in record["reason"]


def test_a_row_that_overflows_only_while_it_is_timed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(*inputs: Tensor) -> Tensor:
        return without_maximum(*inputs) if seen(CLOCK) else linear_cross_entropy(*inputs)

    monkeypatch.setattr("lmsys.model.loss.linear_cross_entropy", row)
    record = records(row=("chunked",))["chunked"]
    assert record["outcome"] == "wrong" and "in timed call" in record["reason"]
