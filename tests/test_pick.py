"""Laws of `lmsys pick`: of each case the row of the least time among those that were right in the last comparison.

The rows of a comparison took turns. Times of two comparisons do not tell which row is faster. A row that was disturbed
counts only where there is no other.
"""

import gzip
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.attention import ATTENTION
from lmsys.bench import record
from lmsys.pick import CASE, fastest_rows, main

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "reports" / "results" / "nvidia-h200_20261126_attention-bf16.json.gz"
ROWS = "naive", "flash_triton", "mine.py:f", "naive@abc"  # the last: naive as it was at the commit abc


@st.composite
def records(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Records of two lengths, three directions and two comparisons, some under a window."""
    drawn = st.fixed_dictionaries(
        {
            "impl": st.sampled_from(ROWS),
            "direction": st.sampled_from(["fwd", "bwd", "fwdbwd"]),
            "outcome": st.sampled_from(["ok", "ok", "ok", "wrong", "oom"]),
            "queries": st.sampled_from([64, 128]),
            "window": st.sampled_from([None, None, None, 16]),
            "comparison": st.sampled_from(["first", "second"]),
            "disturbed": st.sampled_from([None, None, "The GPU was too hot"]),
        },
        optional={"time_s": st.integers(1, 100).map(float)},  # a row is not timed in Triton's interpreter
    )
    fixed = dict.fromkeys(CASE, 1) | {"benchmark": "attention", "dtype": "float32", "causal": True}
    return [fixed | x for x in draw(st.lists(drawn, max_size=30))]


@given(records())
def test_the_fastest_of_those_that_were_right_is_picked(drawn: list[dict[str, Any]]) -> None:
    """A row of an earlier commit is left out, and so is a case under a window."""
    plain = [x for x in drawn if x["window"] is None and x["impl"] != "naive@abc"]
    expected = {}  # {(training, length): by row if it was disturbed, and its seconds}
    for length in (64, 128):
        asked = [x for x in plain if x["queries"] == length]
        right = {}
        for direction in ("fwd", "bwd", "fwdbwd"):
            of_it = [x for x in asked if x["direction"] == direction]
            last = of_it[-1]["comparison"] if of_it else None  # earlier comparisons do not count
            right[direction] = {
                x["impl"]: (x["disturbed"] is not None, x["time_s"])
                for x in of_it
                if x["outcome"] == "ok" and "time_s" in x and x["comparison"] == last
            }
        both = {}
        for row in right["fwd"].keys() & right["bwd"].keys():
            (forward, forward_s), (backward, backward_s) = right["fwd"][row], right["bwd"][row]
            both[row] = forward or backward, forward_s + backward_s
        expected[False, length] = right["fwd"]
        # Where no row has both, the two measured as one; so, too, where only those had a row without disturbance.
        calm = [times for times in (both, right["fwdbwd"]) if times and not min(times.values())[0]]
        expected[True, length] = calm[0] if calm else both or right["fwdbwd"]
    picked = fastest_rows(drawn)
    by_case = {(training, queries): row for (training, _, _, _, _, _, queries, _, _), row in picked.items()}
    assert by_case.keys() == {case for case, times in expected.items() if times}
    for case, (disturbed, time_s, row) in by_case.items():
        assert expected[case][row] == min(expected[case].values()) == (disturbed, time_s)


def test_forward_and_backward_that_were_disturbed_leave_the_two_that_were_measured_as_one() -> None:
    fixed = dict.fromkeys(CASE, 1) | {"benchmark": "attention", "outcome": "ok", "comparison": "first", "time_s": 2.0}
    disturbed = [
        fixed | {"impl": "naive", "direction": direction, "time_s": 0.5, "disturbed": "the GPU was too hot"}
        for direction in ("fwd", "bwd")
    ]
    as_one = fixed | {"impl": "sdpa_flash", "direction": "fwdbwd"}
    for others, row in (([as_one], (False, 2.0, "sdpa_flash")), ([as_one | {"disturbed": "so was this"}], None)):
        picked = {training: row for (training, *_), row in fastest_rows(disturbed + others).items()}
        assert picked[True] == (row or (True, 1.0, "naive"))


def test_the_module_names_rows_for_tensors_and_refuses_what_was_not_measured(tmp_path: Path) -> None:
    assert main([str(RESULT), "-o", str(tmp_path / "rows.py")]) == 0
    rows = runpy.run_path(str(tmp_path / "rows.py"))
    measured = record.load(RESULT)["records"]
    q = SimpleNamespace(shape=(16, 32, 1024, 64), dtype="torch.bfloat16")
    row = rows["row_for"](q, q, causal=True, training=False)
    beside = [x for x in measured if x["id"].startswith("tokens16k-B16H32Q1024K1024D64-bfloat16-causal-fwd-")]
    assert row == min((x for x in beside if x["outcome"] == "ok"), key=lambda x: x["time_s"])["impl"]
    q.shape = (1, 32, 1024, 64)
    with pytest.raises(ValueError, match="no row was measured for"):
        rows["row_for"](q, q, causal=True, training=False)


def test_a_row_that_attention_does_not_know_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(gzip.decompress(RESULT.read_bytes()))
    for x in content["lmsys"]["records"]:  # as of a user's file: the fastest row of all
        x["impl"] = "my_attention" if x["impl"] == "flash_gluon" else x["impl"]
        x["disturbed"] = "the GPU was too hot"
    (tmp_path / "mine.json").write_text(json.dumps(content))
    assert main([str(tmp_path / "mine.json"), "-o", str(tmp_path / "rows.py")]) == 0
    assert set(runpy.run_path(str(tmp_path / "rows.py"))["FASTEST"].values()) <= set(ATTENTION)
    said = capsys.readouterr().out
    assert (
        "rows; left out, as impl= knows no such row here: ['my_attention']; disturbed rows count only in cases" in said
    )
    assert said.split(": ")[1].split()[0] == said.split()[-1]  # in all cases that there are


def test_what_stands_in_a_result_is_no_code(tmp_path: Path) -> None:
    content = json.loads(gzip.decompress(RESULT.read_bytes()))
    dtype, torch = "x'\n}\nraise SystemExit('run')\n{'", '"""\nraise SystemExit'
    for x in content["lmsys"]["records"]:
        x["dtype"] = dtype
    content["lmsys"]["machine"]["torch"] = torch
    content["lmsys"].pop("seal")
    (tmp_path / "forged.json").write_text(json.dumps(content))
    assert main([str(tmp_path / "forged.json"), "-o", str(tmp_path / "rows.py")]) == 0
    written = runpy.run_path(str(tmp_path / "rows.py"))
    assert {case[1] for case in written["FASTEST"]} == {dtype} and written["MEASURED"]["torch"] == torch


def test_a_module_never_takes_the_place_of_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "attention.json"
    result.write_bytes(gzip.decompress(RESULT.read_bytes()))
    assert main([str(result), "-o", str(result)]) == 2
    assert f"{result}: a module is written, so its name must end in .py" in capsys.readouterr().err
    assert result.read_bytes() == gzip.decompress(RESULT.read_bytes())


def test_a_record_that_lacks_an_axis_is_left_out() -> None:
    whole = dict.fromkeys(CASE, 1) | {"benchmark": "attention", "direction": "fwd", "outcome": "ok", "time_s": 2.0}
    records = [
        {"impl": "naive"} | {key: value for key, value in whole.items() if key != lacks}
        for lacks in ("", "dtype", "direction")
    ]
    assert [*fastest_rows(records).values()] == [(False, 2.0, "naive")]


@pytest.mark.parametrize(
    ("text", "output"), [("{}", "rows.py"), ("[]", "rows.py"), ("no JSON", "rows.py"), (None, "."), (None, "folder.py")]
)
def test_a_file_without_attention_or_a_module_that_cannot_be_written_is_usage(
    text: str | None, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = RESULT if text is None else tmp_path / "x.json"
    if text is not None:
        result.write_text(text)
    (tmp_path / "folder.py").mkdir()
    assert main([str(result), "-o", str(tmp_path / output)]) == 2
    assert "lmsys pick: error: " in capsys.readouterr().err and not (tmp_path / "rows.py").exists()
