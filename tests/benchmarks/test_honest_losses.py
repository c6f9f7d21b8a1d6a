"""Losses as people write them are right for any seed, in the benchmark of the loss as in `lmsys check`.

The loss is the mean cross-entropy of the logits hidden @ weight.T. A new way to write it is a function in HONEST.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.loss import Inputs, LossDraws, odd_inputs, references
from lmsys.check.kinds import RIGHT, check
from lmsys.check.question import Options
from lmsys.registry import Entry


def by_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def by_log_sum_exp(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return (torch.logsumexp(logits, dim=-1) - logits.gather(1, targets[:, None])[:, 0]).mean()


def by_maximum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The log-softmax by hand, with the largest logit subtracted before the exponential."""
    logits = F.linear(hidden, weight).float()
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return F.nll_loss(shifted - shifted.exp().sum(dim=-1, keepdim=True).log(), targets)


HONEST = by_cross_entropy, by_log_sum_exp, by_maximum
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.mark.parametrize("loss", HONEST)
@given(seed=st.integers(0, 2**31), precision=st.sampled_from(("fp32", "bf16", "fp16")))
@settings(max_examples=20)
def test_an_honest_loss_is_right_in_the_benchmark(loss: Loss, seed: int, precision: str) -> None:
    drawn = Inputs(200, 16, 300, precision, "cpu")
    LossDraws(drawn, seed).fill(seed)
    for inputs in (drawn, odd_inputs(precision, "cpu", seed)):
        inputs.exact, inputs.plain = references(inputs.in_blocks)
        ratios = inputs.check(inputs.run(loss))
        assert all(ratio <= 1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("loss", HONEST)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(("float32", "bfloat16", "float16")))
@settings(max_examples=5)
def test_an_honest_loss_is_right_in_the_check(loss: Loss, seed: int, dtype: str) -> None:
    assert check(Entry("loss", f"{__name__}:{loss.__name__}"), Options(seed=seed, dtypes=(dtype,)), "loss") == RIGHT
