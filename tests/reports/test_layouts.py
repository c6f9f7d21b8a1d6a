"""A mistake in a layout ends the report with a line that names the benchmark, the section, the step and what is right.

A layout is data by which a benchmark declares how a report shows its records (lmsys/reports/layout.py). It is a list of
steps, such as ["pivot", ["time_s"], ["tokens"]], which draws a table of a field by another. A new kind of step gets
misspelt cases here.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lmsys.reports.__main__ import main
from tests.support.records import built, content_of, record

CUT = ["cut", "loss-N{tokens}", "{precision}"]
TABLE = ["pivot", ["time_s"], ["tokens"]]


def saved(path: Path, *steps: Any, item: Any = TABLE, title: str = "Loss") -> Path:
    """A result file of two rows of the loss, in a section "large": `steps` prepare the records, `item` shows them."""
    content = content_of([record("loss", impl, section="large") for impl in ("eager", "chunked")])
    content["layouts"]["loss"] = {"chapters": [{"title": title, "blocks": [{"of": list(steps), "lead": [item]}]}]}
    path.write_text(json.dumps({"lmsys": content}))
    return path


def test_a_layout_without_mistakes_is_drawn(tmp_path: Path) -> None:
    """It has the kinds of steps that are misspelt below, so that those are refused for the misspelling alone."""
    field = {"name": "twice", "role": "detail", "of": "2 * tokens"}
    steps = CUT, ["only", "time_s is not None"], ["said_also", 'f"{tokens} tokens"'], ["fields", [field]]
    steps = *steps, ["computed", {"twice": "tokens + twice"}], ["ordered", "impl"]
    files = built(tmp_path / "out", saved(tmp_path / "r.json", *steps, title="Loss: {section}"))
    assert "tables/synthetic-gpu-loss-N16384-time.csv" in files


@pytest.mark.parametrize(
    ("step", "name", "right"),
    [
        (["cut", "loss-N{tokns}", "{precision}"], "tokns", "tokens"),
        (["cut", "loss", "{precison}"], "precison", "precision"),
        (["cut", "loss", "[of {precison}]"], "precison", "precision"),
        (["only", "tme_s is not None"], "tme_s", "time_s"),
        (["only", "xyzzy"], "xyzzy", "id or benchmark or section or impl or device"),
        (["said_also", "vocab_sise"], "vocab_sise", "vocab_size"),
        (["fields", [{"name": "twice", "of": "2 * tokns"}]], "tokns", "tokens"),
        (["computed", {"tokens": "2 * tokns"}], "tokns", "tokens"),
        (["computed", {"tokns": "2 * tokens"}], "tokns", "tokens"),
        (["ordered", "precison"], "precison", "precision"),
        (["facets", ["precison"]], "precison", "precision"),
        (["where", "tokns > 1", [CUT]], "tokns", "tokens"),
        (["pivot", ["tme_s"], ["tokens"]], "tme_s", "time_s"),
        (["pivot", ["time_s"], ["tokns"]], "tokns", "tokens"),
        (["listing", ["tokens"], ["tme_s"], "all", "All"], "tme_s", "time_s"),
    ],
)
def test_an_error_names_a_misspelt_field_and_the_nearest_one(
    step: Any, name: str, right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_drawn = step[0] in ("pivot", "listing")
    result = saved(tmp_path / "r.json", *([] if is_drawn else [step]), item=step if is_drawn else TABLE)
    assert main([str(result), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"the layout of 'loss', section large, step '{step[0]}': " in error and error.count("\n") == 1
    assert f"no field '{name}' is declared; did you mean {right}" in error


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (["fields", [{"name": "share", "shown": "per cent"}]], "shown='per cent' must be one of %, x, ×"),
        (["cutt", "loss", ""], "did you mean cut"),
        (["pivot", ["time_s"]], "missing 1 required positional argument: 'rows'"),
        (["only", "tokens +"], "must be an expression"),
    ],
)
def test_an_error_names_the_step_of_other_mistakes(
    step: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(saved(tmp_path / "r.json", item=step)), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"the layout of 'loss', section large, step '{step[0]}': " in error and message in error


def test_an_item_that_draws_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last step makes fewer records, not a table or plot."""
    result = saved(tmp_path / "r.json", item=[["only", "time_s is not None"]])
    assert main([str(result), "-o", str(tmp_path / "out")]) == 2
    assert "the layout of 'loss': an item must end in a table or plot" in capsys.readouterr().err
