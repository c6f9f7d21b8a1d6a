"""`Agreement`: ranks compare which collective comes next, so that none begins one alone, and all get an error instead.

A step is a list of numbers of collectives; negative numbers stand for agreements without a collective.
"""

from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsys.parallel.collectives import APART, END, Agreement
from lmsys.parallel.group import WorkerGroup
from tests.support.ranks import error_of, on_first, use

Orders = list[list[int]]  # the numbers of collectives, step by step
orders = st.lists(st.integers(-2, 3).filter(lambda x: x != END), min_size=1, max_size=5)


@st.composite
def steps_of_two_ranks(draw: st.DrawFn) -> tuple[Orders, Orders]:
    """The orders of both ranks. In its last step rank 1 may depart from the order, or end early."""
    usual, count = draw(orders), draw(st.sampled_from([1, 2, 3, 4]))
    other = usual[: draw(st.integers(0, len(usual)))] + draw(st.just([]) | orders)
    return [usual] * count, [*[usual] * (count - 1), draw(st.sampled_from([usual, other, other]))]


@on_first(2)
def _follow(group: Any, by_rank: tuple[Orders, Orders]) -> tuple[str, list[int], int] | None:
    """(the error or "nothing raised", [0 if both ranks began the same] by collective, number of other all-reduces)"""
    rank = dist.get_rank()
    met: list[int] = []
    begun: list[int] = []

    def counting(real: Any) -> Any:
        return lambda x, *args, **options: begun.append(1) or real(x, *args, **options)

    def collective(number: int) -> None:
        """Compares the ranks' numbers; a number below 0 has no collective."""
        if number < 0:
            return
        both = torch.tensor([number, -number])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        met.append(int(both.sum()))

    def train() -> None:
        agreement = Agreement(group, collective)
        for order in by_rank[rank]:
            for number in order:
                agreement.on(number)
                collective(number)
            agreement.end()

    with use((dist, "all_reduce", counting)):
        error = error_of(train)
    return error, met, len(begun) - len(met)


@settings(max_examples=30)
@given(by_rank=steps_of_two_ranks())
def test_no_collective_is_begun_by_one_rank_only_and_all_are_told(
    ranks: WorkerGroup, by_rank: tuple[Orders, Orders]
) -> None:
    (told, met, _), (other, others_met, _) = ranks.run(_follow, by_rank)[:2]
    assert told == other == ("nothing raised" if by_rank[0] == by_rank[1] else f"RuntimeError: {APART}")
    assert not any(met + others_met)


@settings(max_examples=10)
@given(order=orders, count=st.integers(2, 6))
def test_an_order_that_has_come_twice_is_compared_once_a_step(ranks: WorkerGroup, order: list[int], count: int) -> None:
    for _, met, more in ranks.run(_follow, ([order] * count,) * 2)[:2]:
        assert len(met) == count * sum(number >= 0 for number in order)
        assert more == 2 * (len(order) + 1) + (count - 2)
