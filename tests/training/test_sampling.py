"""`get_batch`: random windows are pieces of the ids, with uniform starts, for any array or tensor of integers."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmsys.training.sampling import get_batch

KINDS = [np.uint8, np.uint16, np.int32, np.int64, torch.int32, torch.uint8]


def row(length: int, kind: object) -> np.ndarray | torch.Tensor:
    """The ids 0, 1, 2, ... as an array, or a tensor, of this dtype."""
    return torch.arange(length, dtype=kind) if isinstance(kind, torch.dtype) else np.arange(length).astype(kind)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 50), st.sampled_from(KINDS))
def test_windows_are_pieces_of_the_row(batch: int, context: int, spare: int, kind: object) -> None:
    inputs, targets = get_batch(row(context + 1 + spare, kind), batch, context)
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (batch, context)
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(context))


def test_every_start_is_as_likely_and_the_last_one_is_among_them() -> None:
    draws, starts = 20_000, 13
    inputs, _ = get_batch(row(20, np.uint16), draws, 7, generator=torch.Generator().manual_seed(0))
    counts = np.bincount(inputs[:, 0].numpy(), minlength=starts)
    deviation = (draws / starts * (1 - 1 / starts)) ** 0.5
    assert len(counts) == starts and abs(counts - draws / starts).max() < 5 * deviation


def test_a_generator_decides_the_batch() -> None:
    first, second = (get_batch(row(99, np.int64), 8, 4, "cpu", torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((row(8, np.int64), 1, 8), "8 ids are too few: context_length=8 needs 9"),
        ((row(8, np.int64), 0, 4), "batch_size=0 must be at least 1"),
        ((row(8, np.int64), 2, 0), "context_length=0 must be at least 1"),
        ((np.zeros((4, 4), np.int64), 2, 2), "array or tensor of integers; got int64 of shape (4, 4)"),
        ((torch.zeros(9), 2, 2), "got float32 of shape (9,)"),
        ((np.zeros(9, bool), 2, 2), "got bool of shape (9,)"),
        (([1, 2, 3], 2, 2), "ids=[1, 2, 3] must be of type numpy.ndarray | torch.Tensor"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        get_batch(*arguments)
