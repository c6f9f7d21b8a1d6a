"""`check_plain` accepts a result that is a plain tensor with memory of its own, and refuses others with the reason.

The tensor must have the shape, dtype and device of LIKE. A new kind of bad result is a case of the last test.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmsys.bench.plain import check_plain
from lmsys.measure.step import Failed

LIKE = torch.zeros(2, 3, 4)


class Subclass(Tensor):
    """A tensor of another class, which adds nothing."""


@given(st.permutations(range(3)))
def test_any_order_of_dimensions_in_memory_is_plain(order: list[int]) -> None:
    shape = [LIKE.shape[i] for i in order]
    back = [order.index(i) for i in range(3)]
    check_plain("o", torch.zeros(shape).permute(back), LIKE, [LIKE])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.zeros(2, 3, 4).as_subclass(Subclass), "plain torch.Tensor"),
        (None, "plain torch.Tensor"),
        ((LIKE,), "plain torch.Tensor"),
        (torch.nn.Parameter(torch.zeros(2, 3, 4)), "plain torch.Tensor"),
        (torch.zeros(2, 3, 5), r"shape \(2, 3, 4\)"),
        (torch.zeros(2, 3, 4, dtype=torch.float64), "dtype torch.float32"),
        (torch.zeros(2, 3, 4, device="meta"), "device cpu"),
        (torch.zeros(2, 3, 4).to_sparse(), "layout"),
        (torch.zeros(2, 3, 1).expand(2, 3, 4), "without gaps"),
        (torch.zeros(2, 3, 8)[..., ::2], "without gaps"),
        (LIKE, "overlaps an input"),
        (LIKE.view(-1)[:24].view(2, 3, 4), "overlaps an input"),
    ],
    ids=range(12),
)
def test_anything_else_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(Failed, match=reason) as refused:
        check_plain("o", value, LIKE, [LIKE])
    assert refused.value.failure[0] == "wrong"
