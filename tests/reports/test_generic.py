"""Reports of a user's benchmark: a further metric, a benchmark without a layout, and one with a layout of its own.

The benchmarks are really run, and their result files are written as a session writes them.
"""

import ast
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_attention import Attention
from lmsys.bench.benchmark import Benchmark
from lmsys.bench.fields import COMMON, Field, declared
from lmsys.bench.record import payload
from tests.support.harness import cases_of, results
from tests.support.processes import ROOT
from tests.support.records import MACHINE, Record, built, cells


class Intense(Attention):
    """Attention with a further metric, "intensity"."""

    fields = (
        *Attention.fields,
        Field(
            "intensity",
            label="Intensity",
            about="Operations for each byte",
            of=lambda record: record["flops"] / record["bytes"],
        ),
    )


def reported(folder: Path, benchmark: Benchmark, records: list[dict[str, Any]]) -> dict[str, bytes]:
    """The report of what a runner has recorded, in a result file as a session writes it."""
    fields = {benchmark.name: [field.to_json() for field in declared(COMMON, benchmark.fields).values()]}
    rows = {kind: [row.to_json() for row in table.values()] for kind, table in benchmark.tables.items()}
    layouts = {benchmark.name: benchmark.layout} if benchmark.layout else {}
    content = {"lmsys": payload({"machine": MACHINE, "fields": fields, "layouts": layouts, "rows": rows}, records)}
    (folder / "r.json").write_text(json.dumps(content))
    return built(folder / "out", folder / "r.json")


@pytest.fixture(scope="module")
def matmul() -> Any:
    """The benchmark of docs/examples/bench_matmul.py."""
    return runpy.run_path(str(ROOT / "docs" / "examples" / "bench_matmul.py"))["Matmul"]


def measured(benchmark: Benchmark, *sizes: int) -> list[Record]:
    """The records of the row "matmul" at these sizes, without what other programs did meanwhile."""
    runs = [results(benchmark, cases_of(benchmark, size=(size,), dtype=("float32",))[:1]) for size in sizes]
    return [record | {"disturbed": None} for (record,) in runs]


def beside(records: list[Record], factor: float = 1.0) -> list[Record]:
    """These records, and those of another row, "mine", whose samples are so many times as long."""
    mine = [record | {"impl": "mine", "label": "mine", "id": f"{record['id']}-mine"} for record in records]
    return records + [x | {"samples_s": [factor * sample for sample in x["samples_s"]]} for x in mine]


def test_a_metric_declared_in_the_benchmark_is_a_table_of_its_chapter(tmp_path: Path) -> None:
    shapes = {"length": ((16, 16), (32, 32)), "head_dim": (16,), "dtype": ("float32",), "causal": (True,)}
    benchmark = Intense()
    cases = cases_of(benchmark, attention=("naive", "sdpa_math"), direction=("fwd",), **shapes)
    groups = {case.group: [other for other in cases if other.group == case.group] for case in cases}
    records = [record for group in groups.values() for record in results(benchmark, group)]
    files = reported(tmp_path, benchmark, records)
    rows = cells(files, "s-float32-causal-fwd-intensity")
    assert [row["S"] for row in rows] == ["16", "32"]
    for row, length in zip(rows, (16, 32), strict=True):
        (known,) = {record["intensity"] for record in records if record["queries"] == length}
        assert float(row["naive"]) == float(row["sdpa_math"]) == round(known, 3 - len(str(int(known))))
    text = files["tables/synthetic-gpu-s-float32-causal-fwd-intensity.md"].decode()
    assert "### Intensity · Forward, float32, causal" in text and "Operations for each byte." in text


def test_a_benchmark_of_ones_own_is_reported_by_its_declarations(matmul: Any, tmp_path: Path) -> None:
    class Repeated(matmul):  # type: ignore[misc]
        def outputs(self, candidate: Any, setup: Any, element: int | None = None) -> dict[str, Any]:
            return {"product": candidate.call(*setup.tensors.values())}

    benchmark = Repeated()
    records = measured(benchmark, 8, 16, 32)
    files = reported(tmp_path, benchmark, records)
    assert cells(files, "matmul-same-bits") == [{"impl": "matmul", "repeated": "yes (3)"}]
    rows = cells(files, "matmul-s-metrics")
    assert [row["size"] for row in rows] == ["8", "16", "32"] and "Rate, TFLOP/s" in rows[0]
    assert "plots/synthetic-gpu-matmul-s-time.svg" in files and b">Matmul</h3>" in files["index.html"]
    files = reported(tmp_path, benchmark, beside(records, 2))
    page = files["index.html"].decode()
    body = page.partition("<body>")[2]
    assert not [word for word in ("Everyday sizes", "heads", "flash_gluon", "sdpa", "attention") if word in body]
    fastest = cells(files, "fastest-matmul")
    assert [row["setting"] for row in fastest] == ["size 8", "size 16", "size 32"]
    assert all(row["fastest row"] == "matmul (of 2 rows)" and row["speed"][:4] == "2.00" for row in fastest)
    assert "plots/synthetic-gpu-fastest-matmul.svg" in files and page.index("Fastest matmul") < page.index("<nav>")
    *rows, mean = cells(files, "matmul-s-speedup")
    # ¹ marks unsteady figures, which real measurements may have.
    times = [(row["matmul"].rstrip("¹"), row["mine"].rstrip("¹")) for row in rows]
    assert times == [("1.00", "0.500")] * 3
    assert mean["mine"] == "0.500 (3)" and {"Error ratio", "Rate, TFLOP/s"} == {
        files[f"tables/synthetic-gpu-matmul-s-{name}.md"].decode().splitlines()[0][4:].split(" · ")[0]
        for name in ("error", "tflops")
    }


def test_a_layout_of_ones_own_travels_with_the_result(
    matmul: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layout is that of docs/report.md: sections with titles, a table, a plot. Mistakes in it are named."""
    example = re.search(r"layout = (\{.*?^\})", (ROOT / "docs" / "report.md").read_text(), re.DOTALL | re.MULTILINE)
    assert example
    layout = ast.literal_eval(example[1])
    benchmark = type("Shown", (matmul,), {"layout": layout})()
    records = beside([record | {"section": "large"} for record in measured(benchmark, 8, 16)])
    files = reported(tmp_path, benchmark, records)
    assert "Matmul: Large matrices</h3>" in files["index.html"].decode()
    assert [row["size"] for row in cells(files, "matmul-float32-speedup")] == ["8", "16", "geometric mean (cells)"]
    assert "plots/synthetic-gpu-matmul-float32-tflops.svg" in files
    block = layout["chapters"][0]["blocks"][0]
    block["lead"][0][0] = "pivvot"
    for wrong, meant in ((block, "did you mean pivot"), ({"leads": []}, "did you mean lead?")):
        layout["chapters"][0]["blocks"][0] = wrong
        with pytest.raises(AssertionError):
            reported(tmp_path, benchmark, records)
        assert meant in capsys.readouterr().err


@pytest.mark.parametrize("lead", [[["lines", ["time_s"], "size", {}]], []])
def test_a_chapter_with_nothing_to_draw_says_so(lead: list[Any], matmul: Any, tmp_path: Path) -> None:
    """Its only item is a plot, which cases of a single size do not fill; or its block declares no items."""
    chapter = {"title": "Large matrices", "blocks": [{"of": [["cut", "matmul", ""]], "lead": lead}]}
    benchmark = type("Shown", (matmul,), {"layout": {"chapters": [chapter]}})()
    files = reported(tmp_path, benchmark, measured(benchmark, 8))
    assert "there is nothing to draw" in files["index.html"].decode()
