"""Tables of the report: each case is in one cell, outcomes have reasons, speedups are honest, CSVs equal records."""

import html
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.bench.fields import Field
from lmsys.bench.verdict import ratio_of
from lmsys.reports.cells import NOT_RUN, SPEEDUP, above_ceiling, compared, geometric_mean
from lmsys.reports.load import read
from lmsys.reports.tables import pivot
from lmsys.reports.views import View, view_of
from lmsys.reports.words import head_of, number, scaled
from tests.support.records import (
    MACHINE,
    NOT,
    Record,
    cells,
    fields_of,
    hold_shown,
    numbers,
    of_everything,
    record,
    report,
    save,
)

STEM = "default-bfloat16-causal-fwd"
LENGTH = {"queries": 4096, "keys": 4096}


def view(folder: Path, records: list[dict]) -> View:
    (machine,) = read([save(folder / "r.json", records)])
    return view_of(machine, records[0]["benchmark"])


@given(st.lists(st.tuples(*[st.floats(1e-6, 1e-1)] * 3), min_size=1, max_size=12))
def test_a_speedup_is_the_median_of_per_round_ratios(rounds: list[tuple[float, ...]]) -> None:
    base, beside, later = (
        {"comparison": f"run {run}", "samples_s": list(samples)}
        for run, samples in zip((1, 1, 2), zip(*rounds, strict=True), strict=True)
    )
    assert ratio_of(base, base) == 1
    assert ratio_of(beside, base) == pytest.approx(statistics.median(b / a for b, a, _ in rounds))
    for other in (later, base | {"comparison": None}, base | {"samples_s": None}):
        assert ratio_of(other, base) is None
    one_by_one = beside | {"alone": True}, base | {"alone": True}  # as of training, whose rows run one after another
    assert ratio_of(*one_by_one) is None


@given(st.lists(st.floats(1e-3, 1e3)))
def test_a_geometric_mean_is_of_what_there_is(values: list[float]) -> None:
    mean, count = geometric_mean([None, *values])
    assert count == len(values)
    assert mean == pytest.approx(math.prod(values) ** (1 / count)) if count else math.isnan(mean)


@given(st.sets(st.tuples(*[st.integers(0, 2)] * 4), min_size=1), st.permutations(range(4)))
def test_a_pivot_has_every_case_in_one_cell(settings: set[tuple[int, ...]], order: list[int]) -> None:
    """Axes that the caller has not named, and that differ, become key columns of the table."""
    names = [("batch", "heads", "head_dim", "dtype")[place] for place in order]
    machine = read_machine([dict(zip(names, values, strict=True)) for values in settings])
    table = pivot(view_of(machine, "attention"), "time_s", names[:1], names[1])
    assert table is not None
    texts = [text for row in table.rows for text in row[table.keys :]]
    assert sum(text != NOT_RUN for text in texts) == len(settings) == len(table.data)
    assert len({tuple(row[: table.keys]) for row in table.rows}) == len(table.rows)


def read_machine(settings: list[dict[str, Any]]) -> Any:
    from lmsys.reports.load import Machine

    cases = [record("attention", "naive") | setting | {"id": str(setting), "run": 0} for setting in settings]
    return Machine("slug", "title", [MACHINE], cases, {"attention": fields_of("attention")}, {})


@pytest.mark.parametrize(
    ("field", "stored", "head", "shown"),
    [
        (Field("time_s", "s", "Time", shown="ms"), 0.5, "Time, ms", 500),
        (Field("o", "s", shown="µs"), 2e-5, "o, µs", 20),
        (Field("peak_bytes", "B", shown="GiB"), 2**31, "peak, GiB", 2),
        (Field("text_bytes", "B", shown="MB"), 3e6, "text, MB", 3),
        (Field("flops_per_s", "FLOP/s", "Rate", shown="TFLOP/s"), 2e12, "Rate, TFLOP/s", 2),
        (Field("copied", "B/s", shown="GB/s"), 3e9, "copied, GB/s", 3),
        (Field("mfu", shown="%"), 0.5, "mfu, %", 50),
        (Field("times", shown="x"), 1.5, "times, ×", 1.5),
        (Field("tokens_per_s", "tokens/s", "Rate"), 7.0, "Rate, tokens/s", 7),
    ],
)
def test_units_are_those_that_readers_see(field: Field, stored: float, head: str, shown: float) -> None:
    assert head_of(field) == head and scaled(field, stored) == pytest.approx(shown)
    assert math.isnan(scaled(field, None))


@pytest.mark.parametrize(("unit", "shown"), [("s", "parsecs"), ("B", "mibs"), ("", "ms"), ("s", "Hs")])
def test_a_unit_that_nobody_can_convert_to_is_an_error_where_it_is_declared(unit: str, shown: str) -> None:
    """The error names the right units. Otherwise a column would show numbers in a unit that its head does not name."""
    with pytest.raises(ValueError, match=f"field 'far': shown='{shown}' must be one of .*{unit or '%'}"):
        Field("far", unit, shown=shown)


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (1.2, "1.20"), (12345.6, "12,346"), (0.0, "0"), (0.9996, "1.00")]
)
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert number(value) == text


ANOTHER_RUN = "¹ measured in another run than sdpa_flash: not comparable within a few per cent"
# {law: (records, the rows of these tables with some of their cells, lines of text that files have)}
SHOWN: dict[str, tuple[list[Record], dict[str, list[dict[str, Any]]], dict[str, str]]] = {
    "outcomes are cells with reasons": (
        [
            record("attention", "naive", time_s=1e-3),
            record("attention", "sdpa_cudnn", outcome="unsupported", reason="head_dim 64 | no\n## really"),
            record("attention", "flex", outcome="oom"),
            record("attention", "mine", outcome="wrong", reason="dk is off", error_ratio=37.2),
            record("attention", "flash_triton", time_s=None, reason="verified in Triton's interpreter"),
            record("attention", "naive", outcome="error", reason="it broke", **LENGTH),
            record("attention", "sdpa_flash", **LENGTH),
            record("attention", "sdpa_cudnn", **LENGTH),
            record("attention", "flash_attn_2", outcome="unsupported", reason="no wheel"),
        ],
        {
            f"{STEM}-time": [
                {
                    "naive": "1.00",
                    "flash_triton": "untimed¹",
                    "mine": "wrong²",
                    "sdpa_flash": NOT_RUN,
                    "sdpa_cudnn": "n/a³",
                    "flex": "OOM⁴",
                },
                {"naive": "error⁵", "mine": NOT_RUN},
            ],
            f"{STEM}-error": [{"mine": "37.2 wrong¹"}, {}],
            "attention-implementations": [
                *[{}] * 2,
                {"name": "mine", "whose": "ours", "cases": "1", "timed": "", "wrong result": "1"},
                *[{}] * 4,
            ],
        },
        {
            f"tables/synthetic-gpu-{STEM}-time.md": (
                "| S | naive | flash_triton | mine | sdpa_flash | sdpa_cudnn | flex |\n"
                "Left out, as no case of it could run: flash_attn_2.\n– not run\nwrong result: dk is off\n"
                "not supported: head_dim 64 \\| no ## really\nerror: it broke"
            )
        },
    ),
    "times of another run are marked, not memory, and have no speedup": (
        [
            record("attention", impl, time_s=1e-3, flops_per_s=1e12, peak_bytes=2**20, comparison=run)
            for run, rows in (("first", ("naive", "sdpa_flash", "flash_triton")), ("second", ("sdpa_cudnn", "flex")))
            for impl in rows
        ],
        {
            **{
                f"{STEM}-{metric}": [{"naive": "1.00", "flash_triton": "1.00", "sdpa_cudnn": "1.00¹", "flex": "1.00¹"}]
                for metric in ("time", "tflops")
            },
            f"{STEM}-peak": [dict.fromkeys(("naive", "flash_triton", "sdpa_cudnn", "flex"), "1.00")],
            f"{STEM}-speedup": [{"naive": "1.00", "sdpa_cudnn": ""}, {"naive": "1.00 (1)", "sdpa_cudnn": ""}],
        },
        {
            f"tables/synthetic-gpu-{STEM}-time.md": ANOTHER_RUN,
            f"tables/synthetic-gpu-{STEM}-tflops.md": ANOTHER_RUN,
            f"tables/synthetic-gpu-{STEM}-speedup.md": "Blank: not sampled together with sdpa_flash.",
        },
    ),
    "a memory limit makes another question": (
        [
            record("attention", "naive", time_s=1e-3),
            record("attention", "naive", outcome="oom", reason="limit", memory_limit_bytes=24 * 2**30),
        ],
        {f"{STEM}-time": [{"naive": "1.00"}], f"{STEM}-24gib-time": [{"naive": "OOM¹"}]},
        {f"tables/synthetic-gpu-{STEM}-24gib-time.md": "memory limit 24 GiB"},
    ),
    "a baseline without a time is named as the reason": (
        [
            record("attention", "sdpa_flash"),
            record("attention", "naive"),
            record("attention", "sdpa_flash", outcome="oom", reason="needs 64 GiB", **LENGTH),
            record("attention", "naive", **LENGTH),
            record("attention", "naive", queries=8192, keys=8192),
        ],
        {f"{STEM}-speedup": [{}, {"naive": "no baseline¹"}, {"naive": "no baseline³"}, {}]},
        {
            f"tables/synthetic-gpu-{STEM}-speedup.md": (
                f"sdpa_flash has no time here: out of memory (needs 64 GiB)\nsdpa_flash was not run here\n{NOT}Blank"
            )
        },
    ),
    **{
        f"there is no speedup where rows are {name}": (
            [record("attention", first), record("attention", second, **values)],
            {"speedup": [], "heat": [], "summary": []},
            {},
        )
        for name, first, second, values in (
            ("none timed", "flash_triton", "naive", {"outcome": "oom"}),
            ("none beside it", "sdpa_flash", "flash_triton", {"comparison": "another run"}),
            ("none but it", "sdpa_flash", "naive", {"outcome": "wrong"}),
        )
    },
}


@pytest.mark.parametrize("law", SHOWN)
def test_tables_show_what_became_of_each_case(law: str, tmp_path: Path) -> None:
    records, tables, texts = SHOWN[law]
    hold_shown(report(tmp_path, records), tables, texts)


def test_the_best_of_each_line_is_marked(tmp_path: Path) -> None:
    """It is the best of rows that were sampled together. A line with a single time has no mark."""
    took = {"naive": 3e-3, "sdpa_flash": 1e-3, "flash_triton": 2e-3}
    records = [record("attention", impl, time_s, flops_per_s=1e12 / time_s) for impl, time_s in took.items()]
    records += [record("attention", "sdpa_flash", **LENGTH)]
    made = view(tmp_path, records)
    times, rates = (pivot(made, name, ["queries"]) for name in ("time_s", "flops_per_s"))
    assert times is not None and rates is not None
    for table in (times, rates):
        assert [table.columns[column] for _, column in table.best] == ["sdpa_flash"]
        assert {row for row, _ in table.best} == {0}
    assert report(tmp_path, records)["index.html"].decode().count('class="best"') >= 1


def test_the_best_was_sampled_with_the_base(tmp_path: Path) -> None:
    """Faster figures of another run do not count, since they cannot be compared with the base."""
    records = [record("attention", impl, s) for impl, s in (("sdpa_flash", 3e-3), ("flash_gluon", 2e-3))]
    records += [record("attention", impl, 1e-3, comparison="another run") for impl in ("naive", "flash_triton")]
    table = pivot(replace(view(tmp_path, records), base="sdpa_flash"), "time_s", ["queries"])
    assert table is not None and [table.columns[column] for _, column in table.best] == ["flash_gluon"]


@pytest.mark.parametrize(("share", "marked"), [(0.9, False), (1.0, False), (1.3, True)])
def test_a_rate_above_the_measured_ceiling_is_marked(share: float, marked: bool) -> None:
    case = record("attention", "flash_triton", matmul_ceiling_fraction=share, copy_ceiling_fraction=0.1)
    for name in ("flops_per_s", "matmul_ceiling_fraction"):
        assert bool(above_ceiling(name, case)) == marked
    assert above_ceiling("time_s", case) == above_ceiling("bytes_per_s", case) == ""


def test_the_baseline_is_the_tables_or_the_users(tmp_path: Path) -> None:
    records = [
        record("attention", "naive", 4e-3),
        record("attention", "sdpa_flash", 2e-3),
        record("attention", "flex", 1e-3),
    ]
    for arguments, expected in (((), ["0.500", "1.00", "2.00"]), (("--baseline", "naive"), ["1.00", "2.00", "4.00"])):
        row, _ = cells(report(tmp_path, records, *arguments), f"{STEM}-speedup")
        assert [row[head] for head in ("naive", "sdpa_flash", "flex")] == expected


def test_ratios_of_medians_are_told_apart(tmp_path: Path) -> None:
    apart = {"context": 1024, "comparison": "other"}
    records = [record("model", "auto", seconds, compile=way) for way, seconds in (("eager", 0.3), ("compiled", 0.1))]
    records += [
        record("model", "auto", 0.2, compile="eager", **apart),
        record("model", "auto", 0.1, compile="compiled", context=1024),
    ]
    speedups = compared(view(tmp_path, records), "eager", "compile", same=("context",), medians=True)
    speeds = {(case["context"], case["compile"]): (case[SPEEDUP], case["remark"]) for case in speedups.cases}
    assert speeds[512, "compiled"] == (pytest.approx(3.0), "")
    assert speeds[1024, "compiled"][1] == "ratio of medians: not sampled together"
    assert speeds[1024, "compiled"][0] == pytest.approx(records[2]["time_s"] / records[3]["time_s"])
    assert "median of rounds sampled together" in speedups.fields[SPEEDUP].about


def test_csvs_hold_the_numbers_of_the_records(everything: dict[str, bytes]) -> None:
    """A line about a case equals one record in all fields that both have, which are at least six."""
    records = [{name: "" if value is None else str(value) for name, value in case.items()} for case in of_everything()]
    # Lines with these columns are about an item of a list in a record, or a fit over several records.
    other_columns = {"name", "where", "accumulator", "latency_s"}
    checked = 0
    for name in re.findall(r"^tables/synthetic-gpu-(.*)\.csv$", "\n".join(everything), re.MULTILINE):
        for line in numbers(everything, name):
            if "outcome" in line and not other_columns & line.keys():
                shared = [(record, line.keys() & record.keys()) for record in records]
                same = [len(fields) for record, fields in shared if all(record[key] == line[key] for key in fields)]
                assert max(same, default=0) >= 6, line
                checked += len(line)
    assert checked > 3000  # cells of tables


CAPTION = """Median time, ms. Forward, bfloat16, causal; B 2, H 8, S 512 to 65,536, D 64.
CUDA events, cache cleared before each call, at least 10 rounds, SM clock 1,800 MHz
Synthetic GPU; 2 CPU cores, driver 000.00, CUDA 0.0, torch 0.0.0
commit 0123456789, 2000-01-02"""
OF_STEPS = """In each cell: eager / compiled.
Whole step;\N{SPACE}
context 512 to 1,024
precision bf16
auto: sdpa_flash"""


def test_captions_fix_what_is_constant(everything: dict[str, bytes]) -> None:
    lines = {
        f"{STEM}-time": CAPTION,
        f"{STEM}-peak": "Peak memory of forward above",
        "model-default-step-time-bf16-auto": OF_STEPS,
    }
    hold_shown(everything, {}, {f"tables/synthetic-gpu-{name}.md": facts for name, facts in lines.items()})


def test_captions_of_a_group_name_their_cases_once(everything: dict[str, bytes]) -> None:
    """A caption on the page says what its table shows, or links to a caption that does.

    It names the cases unless a table before it under the same heading has. The caption in the table's file has all.
    """
    page, groups = html.unescape(everything["index.html"].decode()), []
    for group in re.split("<h[1-4]", page):
        captions = re.findall(r'<figure id="table-([^"]+)">.*?<figcaption>(.*?)(?: <a |</figcaption>)', group)
        for name, caption in captions:
            whole = everything[f"tables/{name}.md"].decode().splitlines()[2]
            about = re.split(r"(?<=\.) ", caption)[0]  # some captions only say where the table is from
            if elsewhere := re.match('<a href="#([^"]+)">What this shows.</a>', caption):
                (about,) = re.findall(f'<figure id="{elsewhere[1]}">.*?<figcaption>(.*?\\.) ', page)[:1]
            assert whole.startswith(about if about else "Synthetic GPU; "), name
        groups.append([caption for _, caption in captions])
    (times,) = (captions for captions in groups if any("B 2, H 8, S 512 to 65,536, D 64" in text for text in captions))
    assert len(times) > 3 and sum("B 2, H 8, S 512 to 65,536, D 64" in text for text in times) == 1
