"""The lines at the end of a run (`lmsys.bench.verdict`): counts, cases that could not run, wrong rows, the fastest row.

A row is an implementation, and a comparison is the list of cases that were sampled together. `deciding` chooses the
cases from which `fastest` finds the fastest row: a case that was measured while other programs disturbed the machine
does not count if others can decide.
"""

from statistics import geometric_mean
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lmsys.bench.verdict import MOST_REASONS, NEAR, deciding, fastest, lines

ROWS = "flash_triton", "sdpa_flash", "naive"


def record(impl: str, outcome: str = "ok", time_s: float | None = 1.0, reason: str | None = None, **more: Any) -> Any:
    """The record of a case. impl: its row; more: other fields."""
    facts = {"id": f"{impl}-{more.get('comparison', 'a')}", "benchmark": "attention", "comparison": "a", "impl": impl}
    return facts | {"outcome": outcome, "reason": reason, "time_s": time_s, "direction": "fwd"} | more


def test_the_fastest_row_is_told_from_rows_that_were_sampled_together() -> None:
    both = [
        [record("naive", time_s=2.0), record("flash")],
        [record("naive", comparison="b"), record("flash", comparison="b")],
    ]
    last = [record("flash", time_s=1.0, comparison="c"), record("naive", time_s=3.0, comparison="c")]
    assert fastest([*both, last]) == ("flash", 3, 3)


def test_no_row_is_first_where_each_is_slower_than_another() -> None:
    # There are three rounds. Each row wins two of them against one other row, and loses two against the third.
    samples = {"a": [1.0, 2.0, 3.0], "b": [2.0, 3.0, 1.0], "c": [3.0, 1.0, 2.0]}
    _, first, _ = fastest([[record(name, time_s=2.0, samples_s=times) for name, times in samples.items()]])
    assert first == 0


WRONG = record("a", "wrong", None, "o is off", error_ratio=12.345)


@pytest.mark.parametrize(
    ("records", "printed"),
    [
        (
            [record(row, disturbed=text) for row, text in (("a", "a"), ("b", "b"), ("c", "b"), ("d", None))],
            ["3 cases are flagged, because the machine was disturbed: b"],
        ),
        ([record("a", disturbed="a")], ["1 case is flagged, because the machine was disturbed: a"]),
        # A reason is printed once, with its rows.
        (
            [*(record(row, "unsupported", None, "runs on CUDA") for row in "aba"), record("c", "oom", None, "no room")],
            ["1 oom, 3 unsupported", "not run, 3 cases of a, b: runs on CUDA", "not run, 1 case of c: out of memory"],
        ),
        (
            [record("a", "unsupported", None, f"reason {number}") for number in range(MOST_REASONS + 2)],
            ["... and 2 more reasons: the report lists them"],
        ),
        # Wrong rows are printed last.
        ([WRONG, record("b")], ["wrong a-a (error ratio 12.3): o is off"]),
        (
            [WRONG, record("a", "wrong", None, "dq is off", comparison="b"), record("b", "error", None, "crashed")],
            ["wrong a-a (error ratio 12.3): o is off; and 1 more of a", "error b-a: crashed"],
        ),
    ],
    ids=range(6),
)
def test_the_last_lines_of_a_run(records: list[Any], printed: list[str]) -> None:
    assert list(lines(records))[-len(printed) :] == printed


# For each comparison and row: (time in seconds, True if the machine was disturbed), or None for a row without a case.
FLAGS = st.lists(st.tuples(*[st.tuples(st.floats(1e-6, 1e-1), st.booleans()) | st.none()] * len(ROWS)), max_size=4)


@given(FLAGS)
def test_disturbed_cases_do_not_count_where_others_can_decide(drawn: list[Any]) -> None:
    """The oracle: undisturbed cases decide alone if there are any, else all cases decide."""
    comparisons = [
        [
            record(row, time_s=cell[0], disturbed="busy" if cell[1] else None, comparison=str(number))
            for row, cell in zip(ROWS, line, strict=True)
            if cell
        ]
        for number, line in enumerate(drawn)
    ]
    several = [cases for cases in comparisons if len(cases) > 1]
    chosen = deciding(comparisons, lambda cases: len(cases) > 1)
    calm = [[case for case in cases if not case["disturbed"]] for cases in several]
    assert chosen == ([cases for cases in calm if len(cases) > 1] if any(calm) else several)
    if chosen:
        winner, _, _ = fastest(chosen)
        flags = [case["disturbed"] for cases in chosen for case in cases if case["impl"] == winner]
        assert not any(flags) or not any(calm)


@given(st.lists(st.tuples(*[st.none() | st.floats(1e-6, 1e-1)] * len(ROWS)), min_size=1, max_size=3))
def test_the_fastest_row_is_one_that_fewest_rows_beat(times: list[tuple[float | None, ...]]) -> None:
    """Each row may be beaten by another, if not all were sampled together. times: seconds by comparison and row."""
    comparisons = [{row: s for row, s in zip(ROWS, line, strict=True) if s} for line in times]
    comparisons = [seconds for seconds in comparisons if len(seconds) > 1]
    assume(comparisons)
    fastest_row, first, sampled = fastest(
        [[record(row, time_s=s) for row, s in seconds.items()] for seconds in comparisons]
    )

    def faster(row: str) -> int:
        """The number of rows that are faster than `row` where both were sampled."""
        both = [[x[row] / x[other] for x in comparisons if {row, other} <= x.keys()] for other in ROWS]
        return sum(bool(ratios) and geometric_mean(ratios) > NEAR for ratios in both)

    assert faster(fastest_row) == min(faster(row) for row in ROWS if any(row in x for x in comparisons))
    assert sampled == sum(fastest_row in x for x in comparisons) >= first
