"""Verdicts on two runs (`lmsys.bench.changes`): a planted change is found, and a clock's drift is not.

`compare` judges two result files beside their peers, and `compare_in_turns` a run that measured each row as it is and
as it was (`--against`). Records are made up by `run` and `in_turns`.
"""

import math
import random
from typing import Any

import pytest

from lmsys.bench.changes import (
    BROKEN,
    FASTER,
    MENDED,
    ONLY_NOW,
    SAME,
    SLOWER,
    UNCLEAR,
    compare,
    compare_in_turns,
    lines,
    look_changed,
    of_one_run,
    spreads_between,
)
from lmsys.bench.record import earlier, today

Record = dict[str, Any]
ROWS = {"mine": False, "other": False, "sdpa": True, "sdpa_math": True}  # {row: True for a peer}


def run(
    seed: int, groups: int = 10, rounds: int = 50, clock: float = 1.0, rows: dict[str, bool] = ROWS, **slower: float
) -> list[Record]:
    """The records of a run: in each group, the rows' samples of a round share the pace of a clock that drifts.

    clock   a factor on all times
    slower  {row: a factor on its times}
    """
    rng, records = random.Random(seed), []
    for group in range(groups):
        pace = [clock * (1 + 0.03 * math.sin(number / 9 + seed)) for number in range(rounds)]
        for row, peer in rows.items():
            base = 1e-3 * (1 + group) * slower.get(row, 1.0)
            samples = [base * step * rng.gauss(1, 0.005) for step in pace]
            records.append(
                {
                    "benchmark": "attention",
                    "section": "s",
                    "id": f"{group}-{row}",
                    "impl": row,
                    "peer": peer,
                    "comparison": f"{group} {seed}",
                    "outcome": "ok",
                    "reason": None,
                    "samples_s": samples,
                    "time_s": samples[0],
                }  # fmt: skip
            )
    return records


def verdicts(changes: list[Any]) -> dict[str, set[str]]:
    """{row: the verdicts on its cases}."""
    by_row: dict[str, set[str]] = {}
    for change in changes:
        by_row.setdefault(change.new["impl"], set()).add(change.verdict)
    return by_row


@pytest.mark.parametrize(("factor", "verdict"), [(1.08, SLOWER), (1 / 1.08, FASTER), (1.01, SAME)])
def test_a_planted_change_is_found_whatever_the_clock_does(factor: float, verdict: str) -> None:
    changes = compare(run(1), run(2, clock=1.3, mine=factor))
    by_row = verdicts(changes)
    assert by_row.pop("mine") == {verdict}
    assert set().union(*by_row.values()) == {SAME}
    assert len(changes) == 40 and all(change.beside in ("sdpa", "sdpa_math") for change in changes)
    assert changes[0].new["impl"] == "mine" or verdict == SAME
    assert changes[0].ratio == pytest.approx(factor, rel=0.01) or verdict == SAME


def test_runs_of_one_commit_have_no_changes() -> None:
    for seed in range(10):
        verdicts_of_seed = [change.verdict for change in compare(run(seed), run(seed + 100, clock=1 + seed / 20))]
        assert set(verdicts_of_seed) <= {SAME, UNCLEAR} and verdicts_of_seed.count(SAME) >= 0.95 * len(verdicts_of_seed)


def test_a_row_that_ran_alone_has_no_verdict() -> None:
    """Its ratio may be that of the clocks: here the second run's clock is slower by a third."""
    (change,) = compare(run(1, groups=1, rows={"mine": False}), run(2, groups=1, clock=1.3, rows={"mine": False}))
    assert change.verdict == UNCLEAR and not change.beside and change.ratio == pytest.approx(1.3, rel=0.05)


def test_beside_rows_of_ours_nobody_knows_which_has_changed() -> None:
    """Only peers are taken as unchanged. A row of ours that became faster would make the other look slower."""
    rows = {"mine": False, "other": False}
    changes = compare(run(1, rows=rows), run(2, rows=rows, mine=0.8))
    assert verdicts(changes) == {"mine": {UNCLEAR}, "other": {UNCLEAR}} and not any(change.beside for change in changes)


def test_rows_that_ran_one_after_another_are_no_anchors() -> None:
    old, new = ([record | {"alone": True} for record in side] for side in (run(1), run(2, mine=1.3)))
    assert {change.verdict for change in compare(old, new)} == {UNCLEAR}


def test_without_a_comparison_nothing_took_turns() -> None:
    old, new = ([record | {"comparison": None} for record in side] for side in (run(1), run(2, mine=1.3)))
    assert {change.verdict for change in compare(old, new)} == {UNCLEAR}


def test_a_peer_of_too_few_rounds_is_no_anchor() -> None:
    """A single round has no spread."""
    old, new = run(1, groups=1), run(2, groups=1, mine=1.3)
    for side in (old, new):
        side[3]["samples_s"] = side[3]["samples_s"][:1]
    (of_mine,) = (change for change in compare(old, new) if change.new["impl"] == "mine")
    assert of_mine.beside == "sdpa" and of_mine.verdict == SLOWER


def test_intervals_hold_what_they_say_where_there_are_many_anchors_and_few_rounds() -> None:
    rows = {"mine": False, **{f"peer{number}": True for number in range(8)}}
    held, trials = 0, 0
    for seed in range(12):
        for change in compare(run(seed, 20, 12, rows=rows), run(seed + 50, 20, 12, rows=rows)):
            if change.new["impl"] == "mine" and change.interval:
                held, trials = held + (change.interval[0] <= 1 <= change.interval[1]), trials + 1
    assert trials == 240 and held / trials > 0.92


def test_of_too_few_rounds_a_case_is_unclear() -> None:
    sides = run(1, rounds=4), run(2, rounds=4, mine=1.3)
    changes = compare(*sides)
    assert len(changes) == 40 and {(change.verdict, change.ratio) for change in changes} == {(UNCLEAR, None)}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ("ok", "wrong", BROKEN),
        ("ok", "unsupported", BROKEN),
        ("oom", "ok", MENDED),
        ("error", "ok", MENDED),
        ("unsupported", "ok", ONLY_NOW),
    ],
)
def test_how_a_case_ended_counts_first(before: str, after: str, verdict: str) -> None:
    old, new = run(1), run(2, sdpa=1.2)
    for side, outcome in ((old, before), (new, after)):
        side[0]["outcome"] = outcome
        if outcome != "ok":
            side[0]["samples_s"] = None
    changes = compare(old, new)
    (of_case,) = (change for change in changes if change.new["id"] == "0-mine")
    assert of_case.verdict == verdict and (changes[0] is of_case) == (verdict == BROKEN)


def test_cases_of_one_run_alone_are_not_compared() -> None:
    old, new = run(1), [record for record in run(2) if record["impl"] != "mine"]
    assert {change.new["impl"] for change in compare(old, new)} == {"other", "sdpa", "sdpa_math"}
    gone, added = of_one_run(old, new)
    assert {record["impl"] for record in gone} == {"mine"} and not added and of_one_run(new, old) == ([], gone)


def test_what_was_wrong_in_both_is_no_figure() -> None:
    """A file may have samples of a wrong row. Such a row has no verdict, and as a peer is no anchor."""
    old, new = run(1), run(2, sdpa=1.5)
    for record in (*old, *new):
        record["outcome"] = "wrong" if record["impl"] == "sdpa" else "ok"
    changes = compare(old, new)
    assert {change.verdict for change in changes if change.new["impl"] == "sdpa"} == {UNCLEAR}
    assert {change.beside for change in changes if change.new["impl"] == "mine"} == {"sdpa_math"}


def test_a_peer_beside_our_rows_alone_has_no_verdict() -> None:
    """Otherwise the peer would be called faster where our row became slower."""
    rows = {"mine": False, "sdpa": True}
    by_row = verdicts(compare(run(1, rows=rows), run(2, rows=rows, mine=1.1)))
    assert by_row == {"mine": {SLOWER}, "sdpa": {UNCLEAR}}


def test_what_a_sweep_has_learnt_from_repeats_counts_too() -> None:
    """Records keep the spread between repeated runs as `between_runs`, and a change within it is none."""
    old, new = run(8), run(9, mine=1.07)
    assert verdicts(compare(old, new))["mine"] == {SLOWER}
    for record in (*old, *new):
        record["between_runs"] = 0.02 if record["impl"] == "mine" else None
    assert SLOWER not in verdicts(compare(old, new))["mine"]
    for record in (*old, *new):
        record["between_runs"] = 5.0 if record["id"] == "0-mine" else 0.001 if record["impl"] == "mine" else None
    assert [change.verdict for change in compare(old, new) if change.new["impl"] == "mine"].count(SLOWER) == 9


def test_the_same_runs_give_the_same_verdicts() -> None:
    forwards = [(change.new["id"], change.verdict, change.ratio) for change in compare(run(1), run(2))]
    assert forwards == [
        (change.new["id"], change.verdict, change.ratio) for change in compare(run(1)[::-1], run(2)[::-1])
    ]


def in_turns(seed: int, margin: float = 0.02, noise: float = 0.005, **factors: float) -> list[Record]:
    """A run that measured each row as it was and as it is today, in turns, while the clock moved much.

    noise    the spread of today's samples
    factors  {row: a factor on its times today}
    """
    against = {"name": "0123456789", "commit": "0123456789abcdef", "margin": margin}
    rng, records = random.Random(seed), []
    for old in run(seed, clock=1 + seed):
        samples = [rng.gauss(1, noise) * factors.get(old["impl"], 1.0) * sample for sample in old["samples_s"]]
        records += [earlier(old | {"label": old["impl"]}, against), old | {"samples_s": samples}]
    return records


@pytest.mark.parametrize(("factor", "verdict"), [(1.03, SLOWER), (1 / 1.03, FASTER), (1.005, SAME)])
def test_rows_that_took_turns_with_themselves_need_no_peer(factor: float, verdict: str) -> None:
    changes = compare_in_turns(in_turns(1, mine=factor))
    by_row = verdicts(changes)
    assert by_row.pop("mine") == {verdict} and set().union(*by_row.values()) == {SAME}
    assert len(changes) == 40 and {change.beside for change in changes} == {f"{row}@0123456789" for row in ROWS}
    assert verdict == SAME or changes[0].ratio == pytest.approx(factor, rel=0.005)


def test_the_margin_is_that_of_the_run_unless_another_is_asked_for() -> None:
    assert verdicts(compare_in_turns(in_turns(1, mine=1.03)))["mine"] == {SLOWER}
    assert verdicts(compare_in_turns(in_turns(1, 0.06, mine=1.03)))["mine"] == {SAME}
    assert verdicts(compare_in_turns(in_turns(1, 0.06, mine=1.03), 0.01))["mine"] == {SLOWER}
    assert verdicts(compare_in_turns(in_turns(1, 0.06, mine=1.03), 0.0))["mine"] == {SLOWER}


def test_a_row_that_was_wrong_is_mended_and_one_that_is_now_is_broken() -> None:
    records = in_turns(1)
    records[0] |= {"outcome": "wrong", "samples_s": None, "reason": "q is off"}
    records[3] |= {"outcome": "oom", "samples_s": None, "reason": "no room"}
    changed = {(change.old["impl"], change.verdict) for change in compare_in_turns(records) if change.is_changed}
    assert changed == {("mine@0123456789", MENDED), ("other@0123456789", BROKEN)}
    printed = list(lines(compare_in_turns(records), 0.02))
    assert printed[0] == "1 broken, 1 mended, 38 same, by a margin of 0.02"
    assert printed[2].endswith("0-other: no room") and printed[3].endswith("0-mine: q is off")


def test_a_row_that_could_not_be_run_there_was_not_mended() -> None:
    records = in_turns(1)
    records[0] |= {"outcome": "unsupported", "samples_s": None, "reason": "the earlier state cannot run it"}
    printed = list(lines(compare_in_turns(records), 0.02))
    assert printed[0] == "1 only now, 39 same, by a margin of 0.02"
    assert printed[2].startswith("only now ") and printed[2].endswith("0-mine: the earlier state cannot run it")


def test_cases_of_other_runs_took_no_turns() -> None:
    """After `--resume` a file has cases of two runs. A record's `comparison` names its run."""
    records = [record | ({"comparison": "another"} if record.get("against") else {}) for record in in_turns(1)]
    assert not compare_in_turns(records)


def test_what_looks_changed_once_and_not_again_is_no_change() -> None:
    """Two processes of the same code may differ by the place of their memory, and the next two may not."""
    first, again, lasting = in_turns(1, mine=1.0), in_turns(2, mine=1.04), in_turns(3, mine=1.04)
    assert look_changed(again) and not look_changed(first)
    assert verdicts(compare_in_turns(again))["mine"] == {SLOWER}
    spreads = spreads_between([first, again])
    for record in again:
        record["between_runs"] = spreads.get(record["id"])
    assert SLOWER not in verdicts(compare_in_turns(again))["mine"]
    first = in_turns(4, mine=1.04)
    spreads = spreads_between([first, lasting])
    for record in lasting:
        record["between_runs"] = spreads.get(record["id"])
    assert verdicts(compare_in_turns(lasting))["mine"] == {SLOWER}


def test_a_file_with_rows_as_they_were_is_compared_to_others_by_those_of_today() -> None:
    old, new = run(1), in_turns(2, mine=1.5)
    assert {change.new["id"] for change in compare(old, new)} == {record["id"] for record in old}
    assert not any(change.new.get("against") for change in compare(old, new)) and not of_one_run(old, new)[1]
    assert [today(record)["id"] for record in new[::2]] == [record["id"] for record in new[1::2]]
