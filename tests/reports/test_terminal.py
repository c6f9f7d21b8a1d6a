"""The tables that a run prints at its end (`lmsys.reports.terminal`): few lines, with the figures of the page.

A run answers questions such as "which row is fastest?". A question is about the cases that were sampled together (a
comparison), or, if there are many cases, about all of a direction, forward or backward. A time that was taken while
something disturbed the machine answers a question only if all times of that question are such. Records are made up.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

from hypothesis import assume, given
from hypothesis import strategies as st

from lmsys.bench import verdict
from lmsys.bench.record import earlier
from lmsys.reports.answers import fastest_of, questions
from lmsys.reports.items import Table
from lmsys.reports.load import by_name, machines_of
from lmsys.reports.terminal import MOST, lines
from lmsys.reports.words import number
from tests.support.records import Record, content_of, of_everything, record

ROWS = "flash_triton", "sdpa", "naive", "flex"  # two are peers
TIMES = st.tuples(st.floats(1e-5, 1e-2), st.booleans())  # (seconds, True if the machine was disturbed)
DRAWN = st.dictionaries(
    st.tuples(st.sampled_from(["fwd", "bwd"]), st.sampled_from([64, 128]), st.sampled_from(ROWS)), TIMES, min_size=1
)


def records_of(drawn: dict[tuple[str, int, str], tuple[float, bool]]) -> list[Record]:
    """Records from {(direction, length, row): (seconds, True if the machine was disturbed)}."""
    return [
        record("attention", row, seconds, direction=way, queries=size, keys=size, disturbed="busy" if flag else None)
        for (way, size, row), (seconds, flag) in drawn.items()
    ]


def printed_of(records: list[Record], every: bool = False, width: int = 120) -> list[str]:
    """The printed lines. `every`: with all cases; `width`: of the terminal, in characters."""
    return list(lines(content_of(records), every, lambda _: {"contends": True, "own": False}, width))


def tables(printed: list[str]) -> Iterator[list[str]]:
    """The lines of each table, without its title and heads."""
    while "" in printed:
        end = printed.index("")
        yield printed[2:end]
        printed = printed[end + 1 :]


@given(DRAWN, st.sampled_from([2, MOST]))
def test_a_disturbed_row_comes_first_only_if_all_were_disturbed(drawn: Any, most: int) -> None:
    """With few cases each size is a question; with many cases all sizes of a direction are one question."""
    records = records_of(drawn)
    by_figure = {(case["impl"], number(1e3 * case["time_s"])): case for case in records}
    assume(len(by_figure) == len(records))
    with mock.patch("lmsys.reports.terminal.MOST", most):
        (table,) = tables(printed_of(records))
    lines = [line.split("\N{MULTIPLICATION SIGN}")[0].split() for line in table]
    shown = [by_figure[words] for line in lines for words in pairwise(line) if words in by_figure]  # a row and its time
    key_of = "comparison" if len(records) <= most else "direction"
    assert {case[key_of] for case in shown} == {case[key_of] for case in records}
    for question in {case[key_of] for case in shown}:
        undisturbed = [case for case in records if case[key_of] == question and not case["disturbed"]]
        assert not next(case for case in shown if case[key_of] == question)["disturbed"] or not undisturbed


@given(DRAWN)
def test_the_page_answers_from_undisturbed_cases_alone(drawn: Any) -> None:
    """If all of a direction were disturbed, it answers from them, and says so."""
    records = records_of(drawn)
    of_undisturbed, of_all = answers([record for record in records if not record["disturbed"]]), answers(records)
    for way, answer in of_all.items():
        flags = {
            bool(record["disturbed"])
            for record in records
            if record["direction"] == way and can_answer([other for other in records if alike(record, other)])
        }
        if flags == {True}:
            assert answer["disturbed"] == "all" and answer["row"]
        else:
            expected = of_undisturbed.get(way, {"row": None, "speedup": None, "over": None})
            assert {name: answer[name] for name in ("row", "speedup", "over")} == {
                name: expected[name] for name in ("row", "speedup", "over")
            }
            assert answer["disturbed"] == ("some" if True in flags else None)


def alike(record: Record, other: Record) -> bool:
    """True if two cases were sampled together."""
    return bool(record["comparison"] == other["comparison"])


def can_answer(cases: list[Record]) -> bool:
    """True if there are several cases, and one is of a peer (an implementation of others)."""
    return len(cases) > 1 and any(record["peer"] for record in cases)


def fastest(records: list[Record]) -> Table | None:
    """The page's table of the fastest row of each direction."""
    content = by_name(content_of(records))
    cases = [("", ("", "{}"), record) for record in records]
    machines = list(machines_of(cases, content["fields"], content["rows"], content["layouts"]))
    return fastest_of(machines[0], next(questions(machines[0]))) if machines else None


def answers(records: list[Record]) -> dict[str, Record]:
    """The answer of the page for each direction."""
    table = fastest(records)
    return {str(answer["direction"]): dict(answer) for answer in table.data} if table else {}


def test_lines_say_that_all_were_disturbed() -> None:
    records = records_of({("fwd", 64, row): (1e-3 * (1 + at), True) for at, row in enumerate(ROWS)})
    (table,) = tables(printed_of(records))
    assert all(line.endswith("disturbed") for line in table) and len(table) == len(ROWS)
    page = fastest(records)
    assert page and page.rows[0][1] == "flash_triton, all of them disturbed"


def test_tables_are_short_in_any_terminal_and_hold_every_case_if_asked_to() -> None:
    everything = of_everything()
    for width in (80, 100, 160):
        printed = printed_of(everything, width=width)
        assert max(map(len, printed)) <= width or width == 80  # 80 characters have no room for two long names
        assert all(0 < len(table) <= MOST for table in tables(printed))
    full = [line for table in tables(printed_of(everything, every=True, width=250)) for line in table]
    ran = [case for case in everything if case["outcome"] not in ("unsupported", "oom")]
    timed = {case["benchmark"] for case in ran if case["time_s"]}
    assert len(full) == sum(case["benchmark"] in timed for case in ran)
    for case in ran:
        if case["benchmark"] == "attention" and case["time_s"]:
            assert any(case["impl"] in line.split() and number(1e3 * case["time_s"]) in line.split() for line in full)


def test_speedups_are_over_the_best_peer_and_a_wrong_row_says_why() -> None:
    """The best peer, flex, is compared with the next one, sdpa."""
    records = [record("attention", name, s) for name, s in {"naive": 1e-3, "sdpa": 3e-3, "flex": 2e-3}.items()]
    records += [record("attention", "flash_triton", outcome="wrong", reason="o is 3 times the allowed error")]
    (table,) = tables(printed_of(records))
    assert [line.split()[0] for line in table] == ["naive", "flex", "sdpa", "flash_triton"]
    assert "2.00 × flex" in table[0] and "1.50 × sdpa" in table[1] and "0.667 × flex" in table[2]
    assert table[3].endswith("wrong result: o is 3 times the allowed error")


def test_an_earlier_state_of_a_row_follows_it_with_its_speedup_over_it() -> None:
    """`--against` measures an earlier state of a row, which is named ROW@STATE."""
    against = {"name": "1a2b3c", "commit": "1a2b3c", "margin": 0.02}
    times = {"naive": 4e-3, "sdpa": 2e-3, "flex": 3e-3}
    records = [record("attention", name, seconds) for name, seconds in times.items()]
    for name, seconds in {"sdpa": 1e-3, "naive": 8e-3}.items():
        records.append(earlier(record("attention", name, seconds), against))
    printed = lines(content_of(records), False, lambda case: {"contends": not case["against"], "own": False}, 120)
    (table,) = tables(list(printed))
    assert [line.split()[0] for line in table] == ["sdpa", "sdpa@1a2b3c", "flex", "naive", "naive@1a2b3c"]
    assert "2.00 × sdpa" in table[1] and "0.500 × naive" in table[4]
    assert "1.50 × flex" in table[0] and "0.500 × sdpa" in table[3]


def test_only_the_table_with_all_cases_has_error_ratios() -> None:
    records = [record("attention", name, 1e-3 * at, error_ratio=0.1 * at) for at, name in enumerate(ROWS, 1)]
    printed = printed_of(records)
    (table,) = tables(printed)
    assert printed[1].split() == ["row", "ms", "TFLOP/s", "error", "speed"]
    assert [line.split()[3] for line in table] == [number(case["error_ratio"]) for case in records]
    with mock.patch("lmsys.reports.terminal.MOST", 2):
        assert "error" not in printed_of(records)[1]


def test_the_largest_undisturbed_of_many_sizes_is_shown() -> None:
    drawn = {("fwd", 2**size, row): (1e-5 * 2**size, size > 12) for size in range(5, 15) for row in ROWS}
    records = records_of(drawn)
    (table,), largest = tables(printed_of(records)), [record for record in records if record["queries"] == 2**12]
    assert [line.split()[1] for line in table] == [number(1e3 * record["time_s"]) for record in largest]
    assert not any("disturbed" in line for line in table)


def test_a_row_of_the_readers_own_is_shown_in_each_setting_however_slow_or_wrong() -> None:
    """MOST lines have room for the 2 fastest of 4 rows in each of 8 settings, and the reader's own is the slowest."""
    settings = [(way, dtype, causal) for way in ("fwd", "bwd") for dtype in ("float32", "float16") for causal in (0, 1)]
    records = [
        record("attention", row, (1 + at) * 1e-3, direction=way, dtype=dtype, causal=bool(causal))
        for way, dtype, causal in settings
        for at, row in enumerate(("sdpa", "flex", "naive", "mine"))
    ]
    records += [record("attention", "mine_too", outcome="wrong", reason="o is off", direction="fwd")]
    printed = lines(content_of(records), False, lambda case: {"contends": True, "own": "mine" in case["impl"]}, 120)
    (table,) = tables(list(printed))
    words = [line.split("\N{MULTIPLICATION SIGN}")[0].split() for line in table]
    shown = Counter(row for line in words for row in ("sdpa", "flex", "naive", "mine", "mine_too") if row in line)
    assert shown == {"sdpa": 8, "flex": 8, "mine": 8, "mine_too": 1}


def test_without_a_time_there_is_no_table() -> None:
    assert printed_of([record("attention", "naive", outcome="wrong", reason="o is off")]) == []
    assert printed_of([record("attention", "naive", outcome="oom")]) == []


def test_a_reason_that_is_cut_is_repeated_below_the_table() -> None:
    reason = "gradient of hidden, of 517 classes is 3.48 times the allowed error"
    records = [record("attention", "sdpa", 1e-3), record("attention", "naive", outcome="wrong", reason=reason)]
    (wide,), (narrow,) = ([line for line in printed_of(records, width=size) if "naive" in line] for size in (160, 70))
    assert wide.endswith(f"wrong result: {reason}") and narrow.endswith("wrong result")
    assert any(line.endswith(reason) for line in verdict.lines(records))
