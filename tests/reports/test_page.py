"""The page is safe: all texts of a result file are escaped, no script but its own runs, and every link leads somewhere.

EVIL is such a text. Figures carry the state of their measurement in their titles.
"""

import re
from html import escape
from pathlib import Path

from lmsys.reports import page as pages
from lmsys.reports.load import file_name
from tests.support.records import EVERY_PLOT, built, record, report, save

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(1)>&\n$x_$ | ../../evil'


def test_every_link_leads_somewhere(everything: dict[str, bytes]) -> None:
    page = everything["index.html"].decode()
    links = re.findall(r'(?:href|src)="(?!data:)([^"]+)"', page)
    assert len(links) > 100 and not [link for link in links if "//" in link]
    for link in links:
        assert f'id="{link[1:]}"' in page if link.startswith("#") else link in everything
    plots = [name for name in everything if name.endswith(".svg")]
    assert page.count("<img") == len(plots) == page.count('loading="lazy"') and "<svg" not in page
    assert all(name == "tables/records.csv" or name in links for name in everything if name != "index.html")


def test_a_single_file_holds_its_plots_and_links_to_nothing_outside_itself(in_one_file: dict[str, bytes]) -> None:
    """The file is sent without the folders tables/ and plots/."""
    page, plots = in_one_file["index.html"].decode(), [name for name in in_one_file if name.endswith(".svg")]
    assert page.count("<svg") == len(plots) == page.count('role="img"') and "<img" not in page
    links = re.findall(r'(?:href|src)="(?!data:)([^"]+)"', page)
    assert len(links) > 100 and {link for link in links if not link.startswith("#")} == set()
    assert all(f'id="{link[1:]}"' in page for link in links)


def test_ids_are_each_ones_own(everything: dict[str, bytes]) -> None:
    ids = re.findall(r' id="([^"]+)"', re.sub(r"<svg.*?</svg>", "", everything["index.html"].decode(), flags=re.S))
    assert len(ids) == len(set(ids))


def test_what_a_result_file_says_is_text(tmp_path: Path) -> None:
    """This holds for names of machines, runs, rows, grids, axes and fields, for labels and for reasons."""
    texts = {"section": EVIL, "label": EVIL, "dtype": EVIL, "id": EVIL}
    records = [
        record("attention", impl, queries=s, keys=s) | texts | {"id": f"{EVIL}{impl}{s}"}
        for impl in (EVIL, "naive")
        for s in (64, 128)
    ]
    records.append(
        record("attention", "flex", outcome="error", reason=EVIL, **{k: v for k, v in texts.items() if k != "label"})
    )
    records += [record("training", "none", corpus=EVIL, attention=EVIL), record("model", EVIL, label=EVIL)]
    records.append(record("model", "naive", size=EVIL, precision=EVIL, compile=EVIL))
    files = built(
        tmp_path / "out",
        save(tmp_path / "r.json", records, name=EVIL, commit=EVIL, command=EVIL, torch=EVIL),
        drawn=EVERY_PLOT,
    )
    page = files["index.html"].decode()
    assert "<script>alert" not in page and escape("<script>alert(1)") in page
    assert "<img src=x" not in page and escape("<img src=x onerror=alert(1)>") in page
    assert page.count("<script>") == 1 and page.count("<h2") == 2
    assert all(re.fullmatch(r"(tables|plots)/[\w-]+\.(md|csv|svg)|index\.html", name) for name in files)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "r.json"}
    for name in (name for name in files if name.endswith(".md")):
        heads = [line.count(" | ") for line in files[name].decode().splitlines() if line.startswith("|")]
        assert len(set(heads)) <= 1 or "\\|" in files[name].decode(), name
        text = re.sub(r"`[^`\n]*`", "", files[name].decode())  # within code a tag is text
        assert not re.search(r"(?<!\\)(\\\\)*[<`]", text), name
    for name in (name for name in files if name.endswith(".svg")):
        assert b"<script" not in files[name] and b"<img" not in files[name]


def test_a_word_that_begins_as_a_formula_is_none_in_a_csv(tmp_path: Path) -> None:
    """A spreadsheet would run a cell that begins with "=". In Markdown, backticks of a command do not end its code."""
    records = [record("attention", name, label=name, queries=64, keys=64) for name in ("=1+1", "@mine", "sdpa_flash")]
    files = report(tmp_path, records, command="pytest `-k` x")
    lines = [line.split(",") for name in files if name.endswith(".csv") for line in files[name].decode().splitlines()]
    assert "'=1+1" in sum(lines, []) and not [cell for line in lines for cell in line if cell.startswith(("=", "@"))]
    assert "made by: `pytest '-k' x`" in files["tables/synthetic-gpu-fastest-attention.md"].decode()


def test_long_texts_that_differ_at_the_end_name_two_files() -> None:
    names = {file_name("x" * 500 + end) for end in ("", "a", "b", "/", "ä")}
    assert len(names) == 5 and all(re.fullmatch(r"[\w-]{1,120}", name) for name in names)


def test_a_hostile_declaration_is_text_too(tmp_path: Path) -> None:
    """The name and the labels of a user's benchmark may contain braces and tags."""
    path = save(tmp_path / "r.json", [record("attention", impl) for impl in ("naive", "flex")])
    text = path.read_text().replace('"Error ratio"', '"{0}<i>{time_s}"')
    for key in ('"benchmark": ', '"fields": {'):
        text = text.replace(f'{key}"attention"', f'{key}"{{x.y}}<b>"')
    path.write_text(text)
    page = built(tmp_path / "out", path)["index.html"].decode()
    assert "{x.y}&lt;b&gt;" in page and "{0}&lt;i&gt;" in page and "<b>" not in page and "<i>" not in page


def test_templates_escape_all_but_what_is_ours() -> None:
    """Only our policy, style and script, and plots, in which matplotlib has escaped the texts, are not escaped."""
    safe = set[str]()
    for path in (pages.FOLDER / "templates").glob("*.html"):
        safe.update(re.findall(r"(\w+) *\| *safe", path.read_text()))
        assert "autoescape" not in path.read_text(), path
    assert safe == {"policy", "css", "script", "element"} and pages.TEMPLATES.autoescape is True
    shown = pages.render("course.html", folder='<b>&"', heads=["<i>"], rows=[["<u>"]], bad=(), summary=["<s>"])
    assert "&lt;b&gt;&amp;&#34;" in shown and not re.search("<[bius]>", shown)


def test_runs_that_began_in_the_same_minute_are_told_with_both_commands(tmp_path: Path) -> None:
    """A figure names its run by minute and commit. If two runs share these, both of their commands are given."""
    at = "2000-01-02T03:04:{}+00:00".format
    runs = [
        save(tmp_path / f"{second}.json", [record("attention", name)], date=at(second), command=f"pytest {name}")
        for second, name in (("05", "naive"), ("55", "flash_triton"))
    ]
    runs.append(save(tmp_path / "later.json", [record("loss", "eager")], date="2000-01-02T03:05:00+00:00"))
    page = built(tmp_path / "out", *runs)["index.html"].decode()
    options = re.findall('<option value="([^"]*)" label="run of 2000-01-02 ([^"]*), commit 0123456789">', page)
    assert sorted(options) == [("pytest", "03:05"), ("pytest naive or pytest flash_triton", "03:04")]
