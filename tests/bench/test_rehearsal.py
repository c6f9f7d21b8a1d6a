"""Mistakes in a benchmark's metrics or layout end a run before it measures, since both are tried on made-up records.

A layout says which tables and plots a report has. Benchmarks whose metrics or layout merely need other values than a
made-up record has must pass. Each entry of MISTAKES has a layout with a mistake, and the message.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sweeps import SWEEPS
from lmsys.bench import Benchmark, Field, Settings, fields
from lmsys.bench.results import Session
from lmsys.bench.validate import check_content
from lmsys.reports.layout import chapters, rehearse
from lmsys.reports.load import LayoutError, ValuesError, machines_in
from lmsys.reports.views import view_of
from lmsys.verify import benchmarks_in
from tests.support.harness import Telling, cases_of, results

PIVOT = ["pivot", ["time_s"], ["size"]]


def selected(cls: type[Benchmark], **grids: tuple[fields.Grid, ...]) -> Session:
    """A session that is to measure all cases of a benchmark."""
    session = Session(Settings(), fields.Sweep(grids=grids))
    session.select([(cls.name, name) for name in session.add(cls)])
    return session


def made_up(**changed: Any) -> dict[str, Any]:
    """The result with made-up records of `Telling`, of which these attributes are changed."""
    return selected(type("Changed", (Telling,), changed)).made_up()


def layout_of(*more: Any, item: list[Any] = PIVOT) -> dict[str, Any]:
    """A layout with a table or plot of the cases of each size. more: further steps that choose them."""
    block = {"of": [["cut", "telling-{size}", "{size}"], *more], "lead": [item]}
    return {"chapters": [{"title": "Sums", "blocks": [block]}]}


MISTAKES: list[tuple[dict[str, Any], str]] = [  # in a layout
    (layout_of(item=["pivot", ["tme_s"], ["size"]]), "step 'pivot': no field 'tme_s' is declared; did you mean time_s"),
    (layout_of(["cut", "x-{sise}", ""]), "step 'cut': no field 'sise' is declared; did you mean size"),
    (layout_of(["only", "sise > 1"]), "step 'only': in 'sise > 1': no field 'sise' is declared; did you mean size"),
    (
        layout_of(["fields", [{"name": "a", "unit": "s", "shown": "hs"}]]),
        "step 'fields': field 'a': shown='hs' must be",
    ),
    (layout_of(["onyl", "size > 1"]), "step 'onyl': must be one of "),
    (
        layout_of(item=[*PIVOT, {"colmns": "impl"}]),
        "step 'pivot': TypeError: pivot() got an unexpected keyword argument",
    ),
]


@pytest.mark.parametrize(("layout", "sentence"), MISTAKES)
def test_a_mistake_in_a_layout_is_named(layout: dict[str, Any], sentence: str) -> None:
    rehearse(made_up(layout=layout_of()))
    with pytest.raises(LayoutError, match=re.escape(f"the layout of 'telling', section default, {sentence}")):
        rehearse(made_up(layout=layout))


QUESTION = {"word": "sums", "title": "Fastest sum", "keys": {"size": "size"}, "bases": ["right"]}


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (layout_of() | {"prepar": []}, "'prepar' in a layout: must be one of .*; did you mean prepare"),
        ({"chapters": [{"titel": "Sums"}]}, "'titel' in a chapter: must be one of title, blocks; did you mean title"),
        (layout_of(["over", "rihgt"]), "step 'over': the row 'rihgt' to compare with: .*; did you mean right"),
        (layout_of(item=["pivot", ["tme_s!"], ["size"]]), "step 'pivot': no field 'tme_s' is .*did you mean time_s"),
        (layout_of(item=["pivot", ["time_s"], ["@?", "-sise"]]), "step 'pivot': no field 'sise' is declared"),
        (layout_of() | {"fastest": QUESTION | {"bases": ["rihgt"]}}, "under 'fastest': the row 'rihgt' to compare"),
        (layout_of() | {"fastest": QUESTION | {"keys": {"sise": "size"}}}, "under 'fastest': no field 'sise'"),
        (layout_of() | {"fastest": QUESTION | {"contends": "sise > 1"}}, "under 'fastest': no field 'sise'"),
        (layout_of() | {"fastest": QUESTION | {"baes": []}}, "under 'fastest': .*unexpected keyword argument 'baes'"),
    ],
)
def test_a_name_in_a_layout_that_nothing_reads_is_an_error(layout: dict[str, Any], sentence: str) -> None:
    """Such a name left out a table or a column, without a word."""
    rehearse(made_up(layout=layout_of(["over", "right"]) | {"fastest": QUESTION | {"way": "size"}}))
    with pytest.raises(LayoutError, match=f"the layout of 'telling'.*{sentence}"):
        rehearse(made_up(layout=layout))


def test_an_undeclared_metric_is_named() -> None:
    with pytest.raises(ValueError, match=r"benchmark 'telling': the fields \['product'\] of its records are declared"):
        made_up(metrics=lambda self, case, record, machine: {"product": record["time_s"]})


@pytest.mark.parametrize(
    ("reader", "changed"),
    [
        (
            "field 'sizes_per_s'",
            {"fields": (*Telling.fields, Field("sizes_per_s", "1/s", of=lambda record: 1 / record["tme_s"]))},
        ),
        ("field 'half'", {"fields": (*Telling.fields, Field("half", of=lambda record: record.get("tme_s", 1) / 2))}),
        ("metrics()", {"metrics": lambda self, case, record, machine: {"size": record["tme_s"]}}),
    ],
    ids=["of", "get", "metrics"],
)
def test_a_misspelt_field_is_named_where_it_is_read(reader: str, changed: dict[str, Any]) -> None:
    sentence = f"benchmark 'telling': {reader} reads the field 'tme_s': must be one of "
    with pytest.raises(ValueError, match=re.escape(sentence) + r".*\btime_s\b.*; did you mean time_s"):
        made_up(**changed)


def test_a_layout_that_no_reader_takes_is_an_error_before_the_run() -> None:
    check_content(made_up())
    with pytest.raises(ValueError, match="fastest={'word': 'sums'} has no 'title'"):
        check_content(made_up(layout=layout_of() | {"fastest": {"word": "sums"}}))
    with pytest.raises(ValueError, match="name: must be letters, digits and _; got 'tokens/s'"):
        check_content(made_up(fields=(*Telling.fields, Field("tokens/s"))))


def test_two_benchmarks_of_one_name_are_an_error() -> None:
    session = selected(Telling)
    session.add(Telling)
    with pytest.raises(ValueError, match="two benchmarks are called 'telling': "):
        session.add(type("Other", (Telling,), {}))


@pytest.mark.parametrize("value", [float("nan"), "fast"])
def test_a_value_that_no_reader_takes_is_an_error_before_the_file_is_written(value: Any) -> None:
    benchmark = type("Odd", (Telling,), {"fields": (*Telling.fields, Field("rate", of=lambda record: value))})()
    with pytest.raises(ValueError, match=f"benchmark 'telling', record '.*': rate={value!r} must be a "):
        results(benchmark, cases_of(benchmark))


def test_nan_in_a_list_is_an_error_before_the_file_is_written() -> None:
    losses = Field("losses", role="detail", of=lambda record: [1.0, math.nan])
    benchmark = type("Diverging", (Telling,), {"fields": (*Telling.fields, losses)})()
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        results(benchmark, cases_of(benchmark))


def test_a_tuple_is_written_as_a_list() -> None:
    metrics = {"metrics": lambda self, case, record, machine: {"shape": (2, 3)}}
    benchmark = type("Shaped", (Telling,), {"fields": (*Telling.fields, *fields.details("shape")), **metrics})()
    assert [record["shape"] for record in results(benchmark, cases_of(benchmark))] == [[2, 3]] * 2


PARTS = Field("parts_s", "s", role="detail")
FIRST = Field("first_s", "s", of=lambda record: record["parts_s"].get("first"))


@pytest.mark.parametrize(
    "changed",
    [
        {"metrics": lambda self, case, record, machine: {"size": record["samples_s"][0]}},
        {"metrics": lambda self, case, record, machine: {"size": machine["a fact that is measured"]}},
        {"metrics": lambda self, case, record, machine: {"size": 1 / (record["time_s"] - 1)}},
        {"fields": (*Telling.fields, PARTS, FIRST)},
        {
            "fields": (*Telling.fields, *fields.details("spread")),
            "metrics": lambda self, case, record, machine: {"spread": math.inf * (record["time_s"] - 1)},
        },
    ],
    ids=range(5),
)
def test_metrics_and_fields_that_need_more_than_a_made_up_record_are_no_mistake(
    changed: dict[str, Any],
) -> None:
    result = made_up(**changed)
    check_content(result)
    assert [record.get("first_s", 1.0) for record in result["records"]] == [1.0, 1.0]


@pytest.mark.parametrize(
    "step",
    [["only", "losses['a'] > 1"], ["checked", ["losses"]], ["unfolded", "seconds_s", []]],
    ids=lambda step: step[0],
)
def test_layouts_that_need_other_values_are_no_mistake(step: Any) -> None:
    declared = *Telling.fields, *fields.details("losses"), Field("seconds_s", "s", role="detail")
    result = made_up(fields=declared, layout=layout_of(step))
    (machine,) = machines_in(result, result["records"])
    with pytest.raises(ValuesError):
        chapters(view_of(machine, Telling.name))
    rehearse(result)


def test_a_name_that_a_step_has_made_is_known_without_cases() -> None:
    steps = ["matched", "twin", "size", "size", ["impl"]], ["only", "time_s < 0"], ["ordered", "twin"]
    rehearse(made_up(layout=layout_of(*steps)))


def test_each_section_and_row_is_tried_at_its_first_and_last_size() -> None:
    grids = tuple(fields.Grid(name, size=(1, 2, 3)) for name in ("first", "second"))
    records = selected(Telling, telling=grids).made_up()["records"]
    assert [record["id"] for record in records] == [
        f"{section}-{size}-{row}" for section in ("first", "second") for row in ("right", "also") for size in (1, 3)
    ]


# {sweep: the device whose sections are tried}. The smoke sweep tries its own: tests/benchmarks/test_smoke.py runs it.
REHEARSED = {"smoke": "cpu", "default": "cuda", "full": "cuda"}


def test_other_sweeps_have_no_section_of_their_own() -> None:
    sections = {
        (name, device): {(benchmark, grid.name) for benchmark, grids in sweep.grids.items() for grid in grids}
        for name, by_device in SWEEPS.items()
        for device, sweep in by_device.items()
    }
    for name, device in sections:
        assert sections[name, device] <= sections[name, REHEARSED[name]]


@pytest.mark.parametrize("name", ["default", "full"])
def test_our_benchmarks_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their metrics compute and their layouts draw, from made-up records alone."""
    monkeypatch.setattr("lmsys.measure.compare.attempt", lambda call, *args: (call(*args), None))
    monkeypatch.setattr("lmsys.reports.plots.to_svg", lambda *_: "")
    for benchmark in benchmarks_in(Path("benchmarks")).values():
        result = selected(type(benchmark), **SWEEPS[name][REHEARSED[name]].grids).made_up()
        check_content(result)
        for machine in machines_in(result, result["records"]):
            assert chapters(view_of(machine, benchmark.name))
            assert all(record["outcome"] == "ok" for record in machine.records)
