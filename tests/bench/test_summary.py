"""A run ends with counts, the fastest rows, what could not run, and what was wrong."""

from typing import Any

from lmsys.bench.summary import MOST_REASONS, lines


def one(impl: str, outcome: str = "ok", time_s: float | None = 1.0, reason: str | None = None, **more: Any) -> Any:
    facts = {"id": f"{impl}-{more.get('comparison', 'a')}", "benchmark": "attention", "comparison": "a", "impl": impl}
    return facts | {"outcome": outcome, "reason": reason, "time_s": time_s, "direction": "fwd"} | more


def test_the_fastest_is_of_what_was_sampled_together() -> None:
    records = [
        one("naive", time_s=2.0),
        one("flash"),
        one("naive", comparison="b"),
        one("flash", time_s=2.0, comparison="b"),
    ]
    records += [one("flash", time_s=1.0, comparison="c"), one("naive", time_s=3.0, comparison="c")]
    records += [one("alone", comparison="d", time_s=1e-9), one("flash", direction="bwd", comparison="e")]
    assert list(lines(records)) == [
        "8 ok",
        "fastest, attention fwd: flash in 2, naive in 1 of 3 comparisons",
    ]


def test_a_row_that_does_other_work_is_no_rival() -> None:
    records = [one("none", time_s=0.1), one("naive"), one("flat", time_s=2.0)]
    found = list(lines(records, lambda record: record["impl"] != "none"))
    assert found == ["3 ok", "fastest, attention fwd: naive in 1 of 1 comparison"]


def test_a_reason_is_told_once_with_its_rows() -> None:
    records = [one(impl, "unsupported", None, "runs on CUDA") for impl in ("a", "b", "a")]
    records += [one("c", "oom", None, "no room")]
    assert list(lines(records)) == [
        "1 oom, 3 unsupported",
        "unsupported, 3 cases of a, b: runs on CUDA",
        "oom, 1 case of c: no room",
    ]
    records = [one("a", "unsupported", None, f"reason {i}") for i in range(MOST_REASONS + 2)]
    assert list(lines(records))[-1] == "... and 2 more reasons: the report lists them"


def test_what_is_wrong_is_told_last() -> None:
    records = [one("a", "wrong", None, "o is off", error_ratio=12.345), one("b")]
    assert list(lines(records))[-1] == "wrong a-a (error ratio 12.3): o is off"
