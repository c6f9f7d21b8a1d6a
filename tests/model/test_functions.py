"""silu, softmax and cross-entropy equal their definitions in float64, and stay finite for huge inputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmsys.model.functions import silu, softmax
from lmsys.model.loss import cross_entropy

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 2**16)


def drawn(shape: tuple[int, ...], seed: int, std: float = 1.0) -> torch.Tensor:
    return std * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(shapes, seeds)
def test_silu_is_x_times_its_sigmoid(shape: tuple[int, ...], seed: int) -> None:
    x = drawn(shape, seed, 5.0)
    torch.testing.assert_close(silu(x), x / (1 + (-x).exp()))


@given(shapes, seeds, st.data())
def test_softmax_is_a_share_along_any_dimension(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    x, dim = drawn(shape, seed), data.draw(st.integers(-len(shape), len(shape) - 1))
    torch.testing.assert_close(softmax(x, dim), x.exp() / x.exp().sum(dim, keepdim=True))
    torch.testing.assert_close(softmax(x + 1e4, dim), softmax(x, dim), rtol=1e-9, atol=0)
    assert bool(softmax(1e30 * x.float(), dim).isfinite().all())


@given(shapes, seeds, st.integers(1, 9))
def test_cross_entropy_is_the_mean_of_minus_log_softmax(shape: tuple[int, ...], seed: int, classes: int) -> None:
    logits = drawn((*shape, classes), seed)
    targets = torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))
    expected = -softmax(logits, -1).log().gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits, targets), expected)
    assert bool(cross_entropy(1e30 * logits.float(), targets).isfinite())


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (torch.zeros(2, 4), torch.zeros(3).long(), r"targets must be class indices of shape \(2\); got shape \(3,\)"),
        (torch.zeros(1, 4), torch.tensor([4]), "from 0 to 3, or -100; got 4"),
        (torch.tensor(1.0), torch.tensor(0), "got a scalar"),
    ],
)
def test_targets_that_do_not_fit_are_named(logits: torch.Tensor, targets: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cross_entropy(logits, targets)
