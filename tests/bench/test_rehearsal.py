"""Mistakes in a benchmark's metrics or layout end a run before it measures, since both are tried on made-up records.

A layout says which tables and plots a report has. Benchmarks whose metrics or layout merely need other values than a
made-up record has must pass. Each entry of MISTAKES has a layout with a mistake, and the message.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.sweeps import SWEEPS
from lmsys.bench import Benchmark, Field, Settings, fields
from lmsys.bench.results import Session
from lmsys.reports.layout import chapters, rehearse
from lmsys.reports.load import ValuesError, machines_in
from lmsys.reports.views import view_of
from lmsys.verify import benchmarks_in
from tests.bench.test_plugin import EXAMPLE, SMALL, run
from tests.support.harness import Telling

# Is put into docs/examples/bench_matmul.py: `of` adds steps to the layout, and `item` is its table or plot.
LAYOUT = """
    layout = {{
        "chapters": [
            {{
                "title": "Products",
                "blocks": [{{"of": [["cut", "matmul-{{dtype}}", "{{dtype}}"]{of}], "lead": [{item}]}}],
            }}
        ]
    }}

    def metrics(self, case, record, machine):
        return {metrics}

    def cases("""
PIVOT = '["pivot", ["time_s"], ["size"]]'


def write(folder: Path, of: str = "", item: str = PIVOT, metrics: str = "{}") -> None:
    """Writes the example's benchmark, with this layout and these metrics, into the folder."""
    text = EXAMPLE.read_text().replace("\n    def cases(", LAYOUT.format(of=of, item=item, metrics=metrics), 1)
    (folder / EXAMPLE.name).write_text(text)


MISTAKES: list[tuple[dict[str, str], str]] = [
    ({"item": '["pivot", ["tme_s"], ["size"]]'}, "step 'pivot': no field 'tme_s' is declared; did you mean time_s"),
    ({"of": ', ["cut", "x-{sise}", ""]'}, "step 'cut': no field 'sise' is declared; did you mean size"),
    ({"of": ', ["only", "sise > 1"]'}, "step 'only': in 'sise > 1': no field 'sise' is declared; did you mean size"),
    (
        {"of": ', ["fields", [{"name": "a", "unit": "s", "shown": "hs"}]]'},
        "step 'fields': field 'a': shown='hs' must be",
    ),
    ({"of": ', ["onyl", "size > 1"]'}, "step 'onyl': must be one of "),
]


@pytest.mark.parametrize(("wrong", "sentence"), MISTAKES)
def test_a_mistake_in_a_layout_ends_the_run_before_it_measures(
    wrong: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    write(tmp_path, **wrong)
    ended = run(tmp_path, *SMALL, "--lmsys-no-isolation", "--benchmark-json", "out.json")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR and "Traceback" not in ended.stderr, ended.stderr
    assert f"ERROR: the layout of 'matmul', section default, {sentence}" in ended.stderr
    assert "sampling" not in ended.stdout and not (tmp_path / "out.json").exists()


def test_an_undeclared_metric_ends_the_run_before_it_measures(tmp_path: Path) -> None:
    """The run has a worker process for its rows."""
    write(tmp_path, metrics="{'product': record['time_s']}")
    ended = run(tmp_path, *SMALL, "--benchmark-json", "out.json")
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR and "Traceback" not in ended.stderr, ended.stderr
    assert "ERROR: benchmark 'matmul': the fields ['product'] of its records are declared nowhere" in ended.stderr
    assert "sampling" not in ended.stdout and not (tmp_path / "out.json").exists()


def test_a_run_without_a_mistake_is_measured(tmp_path: Path) -> None:
    write(tmp_path)
    ended = run(tmp_path, *SMALL, "--lmsys-no-isolation", "--benchmark-json", "out.json")
    assert ended.returncode == 0 and (tmp_path / "out.json").exists(), ended.stdout + ended.stderr


def selected(cls: type[Benchmark], **grids: tuple[fields.Grid, ...]) -> Session:
    """A session that is to measure all cases of a benchmark."""
    session = Session(Settings(), fields.Sweep(grids=grids))
    session.select([(cls.name, name) for name in session.add(cls)])
    return session


class WithSize(Telling):
    fields = fields.columns("size")


@pytest.mark.parametrize(
    "metrics",
    [
        lambda record, machine: {"size": record["losses"][0]},
        lambda record, machine: {"size": machine["a fact that is measured"]},
        lambda record, machine: {"size": 1 / (record["time_s"] - 1)},
    ],
)
def test_metrics_that_need_more_than_a_made_up_record_are_no_mistake(metrics: Any) -> None:
    class Honest(WithSize):
        def metrics(self, case: Any, record: Any, machine: Any) -> Any:
            return metrics(record, machine)

    assert len(selected(Honest).made_up()["records"]) == 2


@pytest.mark.parametrize(
    "step",
    [["only", "losses['a'] > 1"], ["checked", ["losses"]], ["unfolded", "seconds_s", []]],
    ids=lambda step: step[0],
)
def test_layouts_that_need_other_values_are_no_mistake(step: Any) -> None:
    class Honest(WithSize):
        fields = (*WithSize.fields, *fields.details("losses"), Field("seconds_s", "s", role="detail"))
        layout = {"chapters": [{"title": "All", "blocks": [{"of": [step], "lead": [["pivot", ["time_s"], ["size"]]]}]}]}

    result = selected(Honest).made_up()
    (machine,) = machines_in(result, result["records"])
    with pytest.raises(ValuesError):
        chapters(view_of(machine, Honest.name))
    rehearse(result)


def test_derived_fields_that_need_other_values_are_no_mistake() -> None:
    class Honest(WithSize):
        fields = (
            *WithSize.fields,
            Field("parts_s", "s", role="detail"),
            Field("first_s", "s", of=lambda record: record["parts_s"].get("first")),
        )

    assert {record["first_s"] for record in selected(Honest).made_up()["records"]} == {1.0}


def test_each_section_and_row_is_tried_at_its_first_and_last_size() -> None:
    grids = tuple(fields.Grid(name, size=(1, 2, 3)) for name in ("first", "second"))
    records = selected(WithSize, telling=grids).made_up()["records"]
    assert [record["id"] for record in records] == [
        f"{section}-{size}-{row}" for section in ("first", "second") for row in ("right", "also") for size in (1, 3)
    ]


GRIDS = [(name, device) for name, by_device in SWEEPS.items() for device in by_device]


@pytest.mark.parametrize("sweep", GRIDS, ids="-".join)
def test_our_benchmarks_pass(sweep: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their metrics compute and their layouts draw, from made-up records alone."""
    monkeypatch.setattr("lmsys.measure.compare.attempt", lambda call, *args: (call(*args), None))
    monkeypatch.setattr("lmsys.reports.plots.to_svg", lambda *_: "")
    name, device = sweep
    for benchmark in benchmarks_in(Path("benchmarks")).values():
        result = selected(type(benchmark), **SWEEPS[name][device].grids).made_up()
        for machine in machines_in(result, result["records"]):
            assert chapters(view_of(machine, benchmark.name))
            assert all(record["outcome"] == "ok" for record in machine.records)
