"""reports/published/ has exactly the files that the documentation links to, as `python -m reports` makes them.

If a test fails, build the report again and copy the files, as its message says. A new report is added to RUNS.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmsys.reports import page, plots
from lmsys.reports.__main__ import build
from lmsys.reports.items import Part, Plot, Table
from tests.support.pages import PAGES, links
from tests.support.processes import ROOT

PUBLISHED = Path("reports/published")
RUNS = {"nvidia-h200": "*.json.gz", "nvidia-h200-energy": "energy/*.json.gz"}  # {report: its runs in reports/results}
REAL_TO_SVG, REAL_WRITE = plots.to_svg, page.write  # the test replaces these two


def shown(report: str) -> set[str]:
    """The files of a report that pages of the documentation link to or show, relative to its folder."""
    linked = {Path(path) for page in PAGES for path, _ in links(page)}
    folder = PUBLISHED / report
    return {path.relative_to(folder).as_posix() for path in linked if path.is_relative_to(folder)}


def test_there_is_no_other_report() -> None:
    assert {path.name for path in (ROOT / PUBLISHED).iterdir()} == set(RUNS)


@pytest.mark.parametrize("report", RUNS)
def test_what_pages_show_is_what_the_committed_runs_say(
    report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, folder = shown(report), ROOT / PUBLISHED / report
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == wanted

    def to_svg(axes: Any, name: str, title: str) -> str:
        """Draws only plots that pages show; all of them take a minute."""
        return REAL_TO_SVG(axes, name, title) if f"plots/{name}.svg" in wanted else '<svg width="1pt" height="1pt">'

    def write(out: Path, parts: Sequence[Part], *others: Any) -> Path:
        """Writes the page. AssertionError if two different tables, or two different plots, have the same name."""
        named: dict[tuple[type, str], Table | Plot] = {}
        for _, answers, chapters in parts:
            for block in (answers, *(block for chapter in chapters for block in chapter.blocks)):
                for item in block.items:
                    assert named.setdefault((type(item), item.name), item) == item, f"{item.name} is two"
        assert named
        return REAL_WRITE(out, parts, *others)

    monkeypatch.setattr(plots, "to_svg", to_svg)
    monkeypatch.setattr(page, "write", write)
    build(sorted((ROOT / "reports" / "results").glob(RUNS[report])), tmp_path / "site")
    ids = Counter(re.findall(r'id="([^"]+)"', (tmp_path / "site" / "index.html").read_text()))
    assert [name for name, count in ids.items() if count > 1] == []
    for name in wanted:
        assert _without_shapes(tmp_path / "site" / name) == _without_shapes(folder / name), (
            f"{name}: run `python -m reports -o site reports/results/{RUNS[report]}`, and copy it"
        )


def _without_shapes(path: Path) -> str:
    """The file's text without shapes and sizes, which differ between versions of matplotlib."""
    return re.sub(
        r' d="[^"]*"| (?:x|y|width|height|viewBox|style|transform|points|id)="[^"]*"|\{[^}]*\}', "", path.read_text()
    )
