"""`Agreement`: ranks compare which collective comes next. If they differ, no rank begins one, and all get an error.

Each collective has a number, and a step is a list of these numbers; one below 0 has no collective, but is compared too.
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
    """The orders of both ranks: one order in all steps, but in the last rank 1 may depart from it, or end early."""
    usual, count = draw(orders), draw(st.sampled_from([1, 2, 3, 4]))
    other = usual[: draw(st.integers(0, len(usual)))] + draw(st.just([]) | orders)
    return [usual] * count, [*[usual] * (count - 1), draw(st.sampled_from([usual, other, other]))]


@on_first(2)
def _follow(group: Any, by_rank: tuple[Orders, Orders]) -> tuple[str, list[int], int] | None:
    """Trains on one rank: (error, differences, comparisons).

    error        the text of the error, or "nothing raised"
    differences  for each collective: the difference between the numbers that the two ranks gave it, 0 if none
    comparisons  how many all-reduces `Agreement` itself made
    """
    rank = dist.get_rank()
    differences: list[int] = []
    begun: list[int] = []  # a 1 for each all-reduce

    def counting(real: Any) -> Any:
        return lambda x, *args, **options: begun.append(1) or real(x, *args, **options)

    def collective(number: int) -> None:
        """An all-reduce that yields the difference between the ranks' numbers; none for a number below 0."""
        if number < 0:
            return
        extremes = torch.tensor([number, -number])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)  # (the largest number, minus the smallest)
        differences.append(int(extremes.sum()))

    def train() -> None:
        agreement = Agreement(group, collective)
        for order in by_rank[rank]:
            for number in order:
                agreement.on(number)
                collective(number)
            agreement.end()

    with use((dist, "all_reduce", counting)):
        error = error_of(train)
    return error, differences, len(begun) - len(differences)


@settings(max_examples=30)
@given(by_rank=steps_of_two_ranks())
def test_no_collective_is_begun_by_one_rank_only_and_all_get_the_error(
    ranks: WorkerGroup, by_rank: tuple[Orders, Orders]
) -> None:
    results = ranks.run(_follow, by_rank)[:2]
    expected = "nothing raised" if by_rank[0] == by_rank[1] else f"RuntimeError: {APART}"
    for error, differences, _ in results:
        assert error == expected and not any(differences)


@settings(max_examples=10)
@given(order=orders, count=st.integers(2, 6))
def test_an_order_of_two_steps_is_then_compared_once_a_step(ranks: WorkerGroup, order: list[int], count: int) -> None:
    for _, differences, comparisons in ranks.run(_follow, ([order] * count,) * 2)[:2]:
        assert len(differences) == count * sum(number >= 0 for number in order)
        # In two steps each number and the end are compared, in all later steps only the end.
        assert comparisons == 2 * (len(order) + 1) + (count - 2)
