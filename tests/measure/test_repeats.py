"""Calls are repeated to see if they give the same bits (lmsys/measure/repeats.py).

`apart` compares two dictionaries of tensors bit by bit, and returns {name: largest difference} of the tensors that are
not the same. `repeated` calls a function several times, and compares each result with the first.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmsys.measure.repeats import BITS, LEAST, MOST, apart, repeated

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A random tensor that depends on the seed alone."""
    return (4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@given(
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_a_change_of_any_bit_is_seen(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    outputs = {"x": drawn(shape, dtype, seed), "y": drawn(shape, dtype, seed + 1)}
    changed = {name: x.clone().mT.contiguous().mT if x.dim() > 1 else x.clone() for name, x in outputs.items()}
    assert apart(outputs, changed) == {}
    at = data.draw(st.integers(0, changed["y"].numel() - 1), label="at")
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 2), label="bit")
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), shape))
    changed["y"].view(BITS[dtype.itemsize])[place] ^= 1 << bit
    difference = abs(float(outputs["y"][place]) - float(changed["y"][place]))
    assert apart(outputs, changed) == {"y": pytest.approx(difference if math.isfinite(difference) else 0.0)}


def test_bits_are_compared_not_values() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), math.nan)
    assert apart({"x": nan}, {"x": nan.clone()}) == {}
    assert apart({"x": zero}, {"x": -zero}) == {"x": 0.0}
    assert apart({"x": nan}, {"x": zero}) == {"x": 0.0}


def test_the_largest_difference_of_all_calls_counts() -> None:
    sizes = iter([0.0, 0.25, 2.0, 0.5])
    first, calls, differ = repeated(lambda: {"x": torch.full((2,), next(sizes)), "y": torch.ones(())})
    assert calls == LEAST == 3 and differ == {"x": 2.0} and first["x"].tolist() == [0.0, 0.0]


def test_more_calls_are_made_while_there_is_time() -> None:
    assert repeated(dict, 60.0) == ({}, MOST, {})


def test_a_row_that_writes_into_one_buffer_is_seen() -> None:
    buffer = torch.zeros(2)
    assert repeated(lambda: {"x": buffer.add_(1)})[2] == {"x": 2.0}
