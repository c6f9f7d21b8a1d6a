"""Verdicts on two runs (`lmsys.bench.changes`): a planted change is found, and a clock's drift is not.

`compare` judges two result files beside their peers, and `compare_in_turns` a run that measured each row as it is and
as it was (`--against`). Records are made up by `run` and `in_turns`.

Both rest on how far two sets of timings are apart, whose laws come last. `between` compares timings that were taken
apart from one another, `paired` the differences of two rows in each round. Both return a `Shift`: an estimate with its
standard error, from which an interval and verdicts follow.
"""

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.bench.changes import (
    BROKEN,
    FASTER,
    FEWEST_ROUNDS,
    MENDED,
    ONLY_NOW,
    SAME,
    SLOWER,
    UNCLEAR,
    Shift,
    between,
    compare,
    compare_in_turns,
    discoveries,
    lines,
    look_changed,
    of_one_run,
    paired,
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


def test_rounds_that_drift_by_little_do_not_widen_what_runs_differ_by() -> None:
    """Rounds that drift count as few, which makes their own part of the error larger, and no other."""
    old, new = run(1, groups=1), run(2, groups=1, mine=1.15)
    for number, record in enumerate(old + new):
        drift = [1 + 1e-4 * math.sin(number + place / 9) for place in range(len(record["samples_s"]))]
        record |= {"samples_s": [record["time_s"] * step for step in drift], "between_runs": 0.01}
    (change,) = (change for change in compare(old, new) if change.new["impl"] == "mine")
    assert change.verdict == SLOWER and change.shift and change.shift.error == pytest.approx(0.01, rel=0.01)
    assert change.shift.interval[1] - change.shift.estimate == pytest.approx(0.0196, rel=0.02)


def test_runs_of_one_commit_have_no_changes() -> None:
    for seed in range(10):
        verdicts_of_seed = [change.verdict for change in compare(run(seed), run(seed + 100, clock=1 + seed / 20))]
        assert set(verdicts_of_seed) <= {SAME, UNCLEAR} and verdicts_of_seed.count(SAME) >= 0.95 * len(verdicts_of_seed)


def test_a_row_that_ran_alone_has_no_verdict() -> None:
    """Its ratio may be that of the clocks: here the second run's clock is slower by a third."""
    (change,) = compare(run(1, groups=1, rows={"mine": False}), run(2, groups=1, clock=1.3, rows={"mine": False}))
    assert change.verdict == UNCLEAR and not change.beside and change.ratio == pytest.approx(1.3, rel=0.05)


OURS, BESIDE_A_PEER = {"mine": False, "other": False}, {"mine": False, "sdpa": True}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([10] * 18 + [11] * 2, [10] * 18 + [11] * 2, UNCLEAR),
        ([10] * 18 + [11] * 2, [11] * 18 + [12] * 2, UNCLEAR),
        ([10] * 20, [11] * 20, UNCLEAR),
        ([10] * 20, [10] * 2 + [11] * 18, UNCLEAR),
        ([10] * 18 + [11] * 2, [14] * 18 + [15] * 2, SLOWER),
    ],
)
def test_a_change_by_a_tick_of_a_coarse_clock_is_not_known(before: list[int], after: list[int], verdict: str) -> None:
    """A clock of 0.1 us that reads 1.1 in place of 1.0 may have been given 1.051 in place of 1.049."""
    old, new = (run(seed, groups=1, rows=BESIDE_A_PEER) for seed in (1, 2))
    for record, ticks in zip(old + new, (before, [10] * 20, after, [10] * 20), strict=True):
        record["samples_s"] = [1e-7 * count for count in ticks]
    assert verdicts(compare(old, new))["mine"] == {verdict}


@pytest.mark.parametrize(
    ("rows", "fact", "slower", "found"),
    [
        # Only peers are taken as unchanged. A row of ours that became faster would make the other look slower.
        (OURS, {}, 0.8, {(row, UNCLEAR, "") for row in OURS}),
        # A peer beside our rows alone would be called faster where our row became slower.
        (BESIDE_A_PEER, {}, 1.1, {("mine", SLOWER, "sdpa"), ("sdpa", UNCLEAR, "")}),
        # Rows that ran one after another, or without a comparison, took no turns.
        (ROWS, {"alone": True}, 1.3, {(row, UNCLEAR, "") for row in ROWS}),
        (ROWS, {"comparison": None}, 1.3, {(row, UNCLEAR, "") for row in ROWS}),
    ],
)
def test_only_peers_that_took_turns_with_a_row_are_its_anchors(
    rows: dict[str, bool], fact: Record, slower: float, found: set[tuple[str, str, str]]
) -> None:
    old, new = ([record | fact for record in side] for side in (run(1, rows=rows), run(2, rows=rows, mine=slower)))
    assert {(change.new["impl"], change.verdict, change.beside) for change in compare(old, new)} == found


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


def learnt(records: list[Record], spreads: dict[str, float]) -> list[Record]:
    """These records, as a sweep writes them that has learnt how far repeated runs of a case differ: {id: spread}."""
    return [record | {"between_runs": spreads.get(record["id"])} for record in records]


def test_what_a_sweep_has_learnt_from_repeats_counts_too() -> None:
    """A change within the spread between repeated runs is none."""
    old, new = run(8), run(9, mine=1.07)
    assert verdicts(compare(old, new))["mine"] == {SLOWER}
    alike = {f"{group}-mine": 0.02 for group in range(10)}
    assert SLOWER not in verdicts(compare(learnt(old, alike), learnt(new, alike)))["mine"]
    but_one = dict.fromkeys(alike, 0.001) | {"0-mine": 5.0}
    changes = compare(learnt(old, but_one), learnt(new, but_one))
    assert [change.verdict for change in changes if change.new["impl"] == "mine"].count(SLOWER) == 9


def test_the_same_runs_give_the_same_verdicts() -> None:
    forwards = [(change.new["id"], change.verdict, change.ratio) for change in compare(run(1), run(2))]
    assert forwards == [
        (change.new["id"], change.verdict, change.ratio) for change in compare(run(1)[::-1], run(2)[::-1])
    ]


MARGIN = 0.02  # of the runs that `in_turns` makes


def in_turns(seed: int, noise: float = 0.005, **factors: float) -> list[Record]:
    """A run that measured each row as it was and as it is today, in turns, while the clock moved much.

    noise    the spread of today's samples
    factors  {row: a factor on its times today}
    """
    against = {"name": "0123456789", "commit": "0123456789abcdef", "margin": MARGIN}
    rng, records = random.Random(seed), []
    for old in run(seed, clock=1 + seed):
        samples = [rng.gauss(1, noise) * factors.get(old["impl"], 1.0) * sample for sample in old["samples_s"]]
        records += [earlier(old | {"label": old["impl"]}, against), old | {"samples_s": samples}]
    return records


@pytest.mark.parametrize(("factor", "verdict"), [(1.03, SLOWER), (1 / 1.03, FASTER), (1.005, SAME)])
def test_rows_that_took_turns_with_themselves_need_no_peer(factor: float, verdict: str) -> None:
    changes = compare_in_turns(in_turns(1, mine=factor), MARGIN)
    by_row = verdicts(changes)
    assert by_row.pop("mine") == {verdict} and set().union(*by_row.values()) == {SAME}
    assert len(changes) == 40 and {change.beside for change in changes} == {f"{row}@0123456789" for row in ROWS}
    assert verdict == SAME or changes[0].ratio == pytest.approx(factor, rel=0.005)


@pytest.mark.parametrize(("margin", "verdict"), [(0.02, SLOWER), (0.06, SAME), (0.0, SLOWER)])
def test_a_change_within_the_margin_is_none(margin: float, verdict: str) -> None:
    assert verdicts(compare_in_turns(in_turns(1, mine=1.03), margin))["mine"] == {verdict}


@pytest.mark.parametrize(
    ("ended", "printed"),
    [
        (
            {0: ("wrong", "q is off"), 3: ("oom", "no room")},
            {
                0: "1 broken, 1 mended, 38 same, by a margin of 0.02",
                2: "broken 0-other: no room",
                3: "mended 0-mine: q is off",
            },
        ),
        (
            {0: ("unsupported", "the earlier state cannot run it")},
            {0: "1 only now, 39 same, by a margin of 0.02", 2: "only now 0-mine: the earlier state cannot run it"},
        ),
    ],
)
def test_a_row_that_was_wrong_is_mended_and_one_that_is_now_is_broken(
    ended: dict[int, tuple[str, str]], printed: dict[int, str]
) -> None:
    """One that could not be run there was not mended. In the records each row of today is behind its earlier state."""
    records = in_turns(1)
    for number, (outcome, reason) in ended.items():
        records[number] |= {"outcome": outcome, "samples_s": None, "reason": reason}
    found = list(lines(compare_in_turns(records, MARGIN), MARGIN))
    assert {number: " ".join(found[number].split()) for number in printed} == printed


def test_cases_of_other_runs_took_no_turns() -> None:
    """After `--resume` a file has cases of two runs. A record's `comparison` names its run."""
    records = [record | ({"comparison": "another"} if record.get("against") else {}) for record in in_turns(1)]
    assert not compare_in_turns(records, MARGIN)


def test_what_looks_changed_once_and_not_again_is_no_change() -> None:
    """Two processes of the same code may differ by the place of their memory, and the next two may not."""
    same, slower, also_slower = in_turns(1), in_turns(2, mine=1.04), in_turns(3, mine=1.04)
    assert look_changed(slower) and not look_changed(same)
    assert verdicts(compare_in_turns(slower, MARGIN))["mine"] == {SLOWER}
    once = learnt(slower, spreads_between([same, slower]))
    assert SLOWER not in verdicts(compare_in_turns(once, MARGIN))["mine"]
    twice = learnt(also_slower, spreads_between([slower, also_slower]))
    assert verdicts(compare_in_turns(twice, MARGIN))["mine"] == {SLOWER}


def test_a_file_with_rows_as_they_were_is_compared_to_others_by_those_of_today() -> None:
    old, new = run(1), in_turns(2, mine=1.5)
    assert {change.new["id"] for change in compare(old, new)} == {record["id"] for record in old}
    assert not any(change.new.get("against") for change in compare(old, new)) and not of_one_run(old, new)[1]
    assert [today(record)["id"] for record in new[::2]] == [record["id"] for record in new[1::2]]


samples = st.lists(st.floats(-1, 1), min_size=FEWEST_ROUNDS, max_size=30)


@given(old=samples, new=samples, by=st.floats(-3, 3))
def test_the_estimate_is_what_is_added_to_one_side(old: list[float], new: list[float], by: float) -> None:
    shift, moved, back = between(old, new), between(old, [value + by for value in new]), between(new, old)
    assert shift and moved and back
    assert moved.estimate == pytest.approx(shift.estimate + by, abs=1e-9)
    assert back.estimate == pytest.approx(-shift.estimate, abs=1e-9)
    assert back.error == pytest.approx(shift.error, abs=1e-9)


@given(differences=samples, by=st.floats(-3, 3))
def test_the_paired_estimate_is_what_is_added_to_each_round(differences: list[float], by: float) -> None:
    shift, moved, back = (paired(list(map(f, differences))) for f in (float, lambda x: x + by, lambda x: -x))
    assert shift and moved and back
    assert moved.estimate == pytest.approx(shift.estimate + by, abs=1e-9)
    assert back.estimate == pytest.approx(-shift.estimate, abs=1e-9)
    assert back.error == pytest.approx(shift.error, abs=1e-9) and back.freedom == pytest.approx(shift.freedom)


def test_a_coarse_clock_is_no_drift() -> None:
    """Equal timings in a row do not show that rounds resemble one another."""
    assert paired([0.1] * 9 + [0.2]).freedom == paired([0.2] + [0.1] * 9).freedom == 9
    rng = random.Random(5)
    degrees = [paired([rng.choice([0.1, 0.2]) for _ in range(40)]).freedom for _ in range(100)]
    assert sum(degrees) / 100 > 30


def test_a_few_slow_rounds_do_not_move_the_estimate() -> None:
    steady = [0.001 * (number % 7) for number in range(100)]
    for shift in (between(steady, [*steady[:90], *[5.0] * 10]), paired([*[0.0] * 90, *[5.0] * 10])):
        assert shift and abs(shift.estimate) < 0.002


def noise(rng: random.Random, count: int, alike: float) -> list[float]:
    """`count` timings of which each resembles the one before; `alike` is their correlation, from 0 to below 1."""
    timings = [rng.gauss(0, 1)]
    while len(timings) < count:
        timings.append(alike * timings[-1] + math.sqrt(1 - alike * alike) * rng.gauss(0, 1))
    return [0.01 * value for value in timings]


@pytest.mark.parametrize("alike", [0.0, 0.6])
def test_the_interval_holds_the_true_shift_about_as_often_as_it_says(alike: float) -> None:
    rng = random.Random(1)
    hits, trials = {"between": 0, "paired": 0}, 300
    for _ in range(trials):
        old, new = noise(rng, 60, alike), [value + 0.02 for value in noise(rng, 60, alike)]
        differences = [b - a for a, b in zip(old, new, strict=True)]
        for name, shift in (("between", between(old, new)), ("paired", paired(differences))):
            assert shift
            hits[name] += shift.interval[0] <= 0.02 <= shift.interval[1]
    assert all(count / trials > 0.92 for count in hits.values())


@pytest.mark.parametrize(
    ("alike", "rounds", "most"),
    [(0.0, 10, 0.05), (0.5, 10, 0.07), (0.8, 10, 0.12), (0.8, 20, 0.09), (0.8, 40, 0.09), (0.95, 40, 0.1)],
)
def test_few_rounds_that_resemble_one_another_rarely_look_changed(alike: float, rounds: int, most: float) -> None:
    """The true shift is the margin, so that 5 % of the trials may look changed. Bounds are
    larger where so few rounds cannot show how alike they are."""
    rng, margin = random.Random(3), 0.02
    trials = [[3 * value for value in noise(rng, rounds, alike)] for _ in range(400)]
    shifts = [paired([value + margin for value in differences]) for differences in trials]
    assert sum(shift.p_beyond(margin) <= 0.05 for shift in shifts) / len(shifts) <= most


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.8])
def test_a_change_is_found_where_rounds_are_many(alike: float) -> None:
    rng = random.Random(4)
    shifts = [paired([0.05 + 3 * value for value in noise(rng, 200, alike)]) for _ in range(60)]
    assert sum(shift.p_beyond(0.02) <= 0.05 for shift in shifts) >= 58


@pytest.mark.parametrize(("by", "least", "most"), [(0.02, 0.0, 0.05), (0.04, 0.74, 1.0)])
def test_ten_rounds_of_two_runs_show_twice_the_margin(by: float, least: float, most: float) -> None:
    """Both samples give degrees of freedom. The margin itself, 2 %, is called a change in 5 % of the trials at most."""
    rng, trials = random.Random(6), 200
    shifts = [between(noise(rng, 10, 0), [by + value for value in noise(rng, 10, 0)]) for _ in range(trials)]
    assert least <= sum(shift.p_beyond(0.02) <= 0.05 for shift in shifts) / trials <= most


@pytest.mark.parametrize(("freedom", "t"), [(2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (1e6, 1.960)])
def test_intervals_and_p_values_are_those_of_student(freedom: float, t: float) -> None:
    shift = Shift(0.0, 1.0, freedom)
    assert t <= shift.interval[1] + 0.0005 and shift.interval[1] == pytest.approx(t, rel=0.06 / freedom**0.5)
    assert Shift(shift.interval[1], 1.0, freedom).p_beyond(0.0) == pytest.approx(0.05, abs=1e-9)
    assert Shift(0.0, 1.0, freedom).p_beyond(0.5) == pytest.approx(1.0)


def test_few_of_the_reported_changes_are_false() -> None:
    """In each of 40 trials 20 cases change by three times the margin, 80 by the margin, so that they must not count."""
    rng, called, false = random.Random(2), 0, 0
    for _ in range(40):
        shifts = [0.06 if number < 20 else 0.02 for number in range(100)]
        chances = [Shift(rng.gauss(shift, 0.01), 0.01).p_beyond(0.02) for shift in shifts]
        counted = discoveries(chances, 0.05)
        called += sum(counted)
        false += sum(counted[20:])
    assert called > 0.9 * 800 and false / called < 0.06


def test_timings_without_noise_leave_no_doubt() -> None:
    assert Shift(0.1, 0.0).p_beyond(0.05) == 0 and Shift(0.01, 0.0).p_beyond(0.05) == 1
    assert Shift(0.1, 1e-200, 2.0).p_beyond(0.05) == 0 and Shift(0.01, 1e-200, 2.0).p_beyond(0.05) == 1
    assert discoveries([], 0.05) == [] and discoveries([0.0, 1.0], 0.05) == [True, False]
    assert between([0.5] * 10, [0.5] * 10) == Shift(0.0, 0.0, freedom=18.0)
    assert between([0.5] * 10, [0.5] * 1000).freedom == pytest.approx(9.09)
