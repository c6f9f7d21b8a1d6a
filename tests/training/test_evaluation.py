"""`lmsys.training.evaluation`: the mean loss over tokens for any batch size, and that of a unigram model.

A unigram model predicts each token by how frequent it is in the text.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsys.config import ModelConfig
from lmsys.model import TransformerLM
from lmsys.training.data import fixed_windows
from lmsys.training.evaluation import Evaluation, evaluate, unigram
from tests.support.training_runs import random_ids

CONFIG = ModelConfig(8, 16, 1, 2, vocab_size=30, context_length=12, attention="naive")
SOURCE = random_ids(30, 500)


@settings(max_examples=15)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 12))
def test_every_token_counts_the_same(batch_size: int, count: int, context: int) -> None:
    torch.manual_seed(0)
    model = TransformerLM(CONFIG, dtype=torch.float64)
    windows = fixed_windows(SOURCE, context, count)
    evaluation = evaluate(model, windows, batch_size)
    logits = model(torch.from_numpy(windows[0])).flatten(0, 1)
    expected = F.cross_entropy(logits, torch.from_numpy(windows[1]).flatten()).item()
    assert math.isclose(evaluation.loss, expected, rel_tol=1e-9) and evaluation.tokens == windows[1].size
    assert math.isclose(evaluation.perplexity, math.exp(expected), rel_tol=1e-9)


def test_the_mode_and_gradients_are_left_as_they_were() -> None:
    model, windows = TransformerLM(CONFIG), fixed_windows(SOURCE, 4, 3)
    for training in (True, False):
        evaluate(model.train(training), windows, 2)
        assert model.training is training and all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        evaluate(model, windows, 0)
    model.loss = lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        evaluate(model.train(), windows, 2)
    assert model.training


def test_autocast_is_used() -> None:
    model, windows = TransformerLM(CONFIG), fixed_windows(SOURCE, 8, 4)
    rounded = evaluate(model, windows, 4, lambda: torch.autocast("cpu", torch.bfloat16))
    assert 0 < abs(rounded.loss - evaluate(model, windows, 4).loss) < 0.05


def test_a_huge_loss_has_infinite_perplexity() -> None:
    assert Evaluation(1e4, 1).perplexity == math.inf
    assert math.isnan(Evaluation(math.nan, 1).perplexity)


def test_a_unigram_model_predicts_by_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmsys.training.evaluation._READ", 7)  # tokens are counted 7 at a time
    source = random_ids(5, 200)
    windows = fixed_windows(source, 10, 8)
    counts = 1 + np.bincount(source.read(0, 200), minlength=6)  # as if each of 6 tokens were there once more
    expected = np.mean([-math.log(counts[token] / 206) for token in windows[1].flatten()])
    assert math.isclose(unigram(source, windows, 6).loss, expected, rel_tol=1e-12)
