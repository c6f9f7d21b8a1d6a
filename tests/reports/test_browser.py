"""The report's page in Chromium, by `nox -s browser`: no errors, bounds of size, accessibility, and its scripts.

`page_file` is the report of the committed runs on an H200, and `own_page_file` that of a smoke sweep of this machine.
The fixture `page` opens one of them.
"""

import io
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lmsys.reports.__main__ import build
from tests.support.processes import ROOT, smoke_sweep

pytestmark = pytest.mark.browser
MOST_NODES, MOST_BYTES, MOST_PRINTED = 15_000, 10**6, 25  # nodes of the DOM, bytes of the file, pages of A4
MOST_TALL = {1440: 13_000, 390: 20_000}  # {width of the screen: height of the page} in pixels
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
PAPER = "light", "dark"
BOTH = "page_file", "own_page_file"
RATES = "table-nvidia-h200-tokens16k-bfloat16-fwd-tflops"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("playwright", reason="playwright is not installed: `nox -s browser` brings it")
    return build(sorted((ROOT / "reports" / "results").glob("*.json.gz")), tmp_path_factory.mktemp("site") / "out")


@pytest.fixture(scope="module")
def own_page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    return build([smoke_sweep(folder)], folder / "out")


@pytest.fixture(scope="module")
def browser(page_file: Path) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found, unused-ignore]

    with sync_playwright() as playwright:
        installed = shutil.which("chromium") or shutil.which("google-chrome")  # None: the browser of Playwright
        browser = playwright.chromium.launch(executable_path=installed, chromium_sandbox=False)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page, by the test's parameter (the file's fixture, options of the browser). The console must show no errors."""
    name, options = getattr(request, "param", ("page_file", {"viewport": DESKTOP}))
    file, errors = request.getfixturevalue(name), []
    page = browser.new_page(**options)
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    yield page
    assert not errors
    page.close()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param((file, {"viewport": size, "color_scheme": scheme}), id=f"{file}, {size['width']}, {scheme}")
        for file, size, scheme in product(BOTH, (DESKTOP, PHONE), ("light", "dark"))
    ],
    indirect=True,
)
def test_the_first_screen_answers_and_everybody_can_read_it(page: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-not-found, unused-ignore]

    first = page.locator(".answers td").first.bounding_box()
    assert first["y"] + first["height"] < page.viewport_size["height"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    violations = Axe().run(page).response["violations"]
    assert not [
        (violation["id"], violation["help"])
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("page", [(file, {"viewport": PHONE}) for file in BOTH], indirect=True, ids=BOTH)
def test_every_answer_is_read_on_a_phone_without_scrolling_sideways(page: Any) -> None:
    cells = page.locator(".answer :is(tbody th, td)").all()
    boxes = [box for cell in cells if (box := cell.bounding_box())]
    assert len(boxes) == len(cells)
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"] for box in boxes)
    assert page.locator(".answers .wide").count() == 0


@pytest.mark.parametrize("page", [("page_file", {"viewport": PHONE})], indirect=True, ids=["phone"])
def test_what_names_a_line_stays_beside_its_last_figure_on_a_phone(page: Any) -> None:
    """It stays there when the table is scrolled to its end."""
    go_to(page, RATES)
    scroll = page.locator(f"#{RATES} .scroll.wide")
    scroll.evaluate("one => one.scrollTo(one.scrollWidth, 0)")
    line = scroll.locator("tbody tr").first
    names, last = [cell.bounding_box() for cell in line.locator("th").all()], line.locator("td").last.bounding_box()
    assert len(names) == 3 and all(box["x"] >= 0 for box in names)
    assert all(left["x"] + left["width"] <= after["x"] + 1 for left, after in pairwise([*names, last]))
    assert last["x"] + last["width"] <= PHONE["width"]


@pytest.mark.parametrize("page", [("page_file", {"color_scheme": one}) for one in PAPER], indirect=True, ids=PAPER)
def test_plots_are_drawn_on_the_paper_of_the_page(page: Any) -> None:
    """Most pixels of a plot are its background."""
    shot = Image.open(io.BytesIO(page.locator(".answer img").first.screenshot())).convert("L")
    is_dark = sum(shot.histogram()[:128]) > shot.width * shot.height / 2
    assert is_dark == page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")


def test_one_click_below_an_answer_says_its_run_and_its_command(page: Any) -> None:
    """A line has the letter of its run. The details below the table have the run's date, commit and command."""
    figure = page.locator(".answers figure:has(td)").first
    run = figure.locator("tbody tr").first.locator("td").last.inner_text()
    made = figure.locator("li", has_text=re.compile(f"^Run {run}, of [0-9-]+.*, commit "))
    assert not made.is_visible()
    figure.locator("summary").click()
    assert made.is_visible() and made.locator("code").inner_text().startswith("python -m ")


def test_a_link_leads_back_to_the_top(page: Any) -> None:
    from playwright.sync_api import expect

    for link, leads_to in (("Top", page.locator("h1")), ("Contents", page.locator("nav li").first)):
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        expect(leads_to).not_to_be_in_viewport()
        page.get_by_role("link", name=link).click()
        expect(leads_to).to_be_in_viewport()


def test_it_is_small(page: Any, page_file: Path) -> None:
    assert page_file.stat().st_size <= MOST_BYTES
    assert page.evaluate("document.getElementsByTagName('*').length") <= MOST_NODES
    for width, most in MOST_TALL.items():
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollHeight") <= most
    assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4"))) <= MOST_PRINTED


def test_what_is_behind_a_click_comes_with_it_and_with_a_link(page: Any) -> None:
    from playwright.sync_api import expect

    folded = "[...document.querySelectorAll('template')].map(one => one.content.querySelector('[id]')).find(Boolean).id"
    hidden = page.evaluate(folded)
    assert page.locator(f"#{hidden}").count() == 0
    page.evaluate("id => location.hash = id", hidden)
    page.locator(f"#{hidden}").wait_for(state="visible")
    chapter = page.locator(".chapter:not([open]):has(> details > template)").last
    chapter.evaluate("one => one.open = true")
    closed = page.locator(".chapter[open] > details:has(> template)")
    before = closed.count()
    closed.last.locator("summary").click()
    expect(closed).to_have_count(before - 1)  # waits, since details open only after the click has returned


def test_rows_are_filtered_and_lines_sorted(page: Any) -> None:
    go_to(page, RATES)
    table = page.locator(f"#{RATES} table")
    heads = table.locator("thead th:visible")
    page.locator("#only").fill("gluon, cudnn")
    assert heads.all_inner_texts()[-2:] == ["flash_gluon", "sdpa_cudnn"]
    head, at = table.locator("thead th", has_text="flash_gluon"), heads.all_inner_texts().index("flash_gluon")
    for order, reverse in (("descending", True), ("ascending", False)):
        head.click()
        shown = [float(line.locator(":visible").nth(at).inner_text()) for line in table.locator("tbody tr").all()]
        assert head.get_attribute("aria-sort") == order and shown == sorted(shown, reverse=reverse)
    page.locator("#only").fill("")
    assert heads.count() == len(table.locator("thead th").all())


def test_the_filter_opens_what_it_finds_and_closes_it_again(page: Any) -> None:
    """Chapters without such a row stay as they are, and so does a chapter that the reader has opened."""
    chapters = page.locator(".chapter")
    by_hand = chapters.filter(has_text="Mixed precision").first
    by_hand.locator("summary").first.click()
    for asked, title in (("tiktoken", "Tokenizers"), ("chunked", "Head and loss")):
        page.locator("#only").fill(asked)
        opened = page.locator(".chapter[open]").filter(has=page.locator("h3", has_text=title))
        assert opened.count() == 1 and 2 <= page.locator(".chapter[open]").count() <= 4
        assert opened.locator("th:visible", has_text=asked).count() > 0
    page.locator("#only").fill("")
    assert page.locator(".chapter[open] > summary h3").all_inner_texts() == ["Mixed precision"]
    assert "Mixed" in page.url or page.url.endswith(by_hand.get_attribute("id"))


def test_a_row_that_is_only_behind_more_is_opened_too(page: Any) -> None:
    behind = """[...document.querySelectorAll('.chapter')].flatMap(chapter => {
      const names = [...document.getElementById('rows').options].map(one => one.value);
      const shown = part => [...part.querySelectorAll('th')].map(cell => cell.textContent);
      const outside = shown(chapter);
      const inside = [...chapter.querySelectorAll('template')].flatMap(one => shown(one.content));
      return inside.filter(name => names.includes(name) && !outside.some(one => one.includes(name)));
    })[0]"""
    name = page.evaluate(behind)
    page.locator("#only").fill(name)
    assert page.locator(".chapter[open] th:visible", has_text=name).count() > 0


def test_paper_has_what_is_folded(page: Any) -> None:
    page.emulate_media(media="print")
    assert page.locator(".chapter:not([open]) table:visible").count() > 50


@pytest.mark.parametrize("page", [("page_file", {"java_script_enabled": False})], indirect=True, ids=["no scripts"])
def test_chapters_open_without_scripts(page: Any) -> None:
    chapter = page.locator(".chapter").nth(1)
    assert chapter.locator("table:visible").count() == 0
    chapter.locator("summary").first.click()
    assert chapter.locator("table:visible").count() == 1


def go_to(page: Any, name: str) -> None:
    """Follows a link within the page."""
    page.evaluate("id => location.hash = id", name)
    page.locator(f"#{name}").wait_for(state="visible")


def test_a_link_shows_what_its_sender_saw(page: Any) -> None:
    """The link restores the filter and what was open; all else stays folded."""
    page.locator("#only").fill("gluon, cudnn")
    page.locator(".chapter[open] details.block:not([open])").last.locator("summary").first.click()
    opened = page.locator("details.block[open]").count()
    page.wait_for_url(re.compile("#[^&]+&rows="))
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    assert (
        page.locator("#only").input_value() == "gluon, cudnn" and page.locator("details.block[open]").count() == opened
    )
    assert page.locator(f"#{RATES} thead th:visible").all_inner_texts()[-2:] == ["flash_gluon", "sdpa_cudnn"]
    assert page.locator("#asked").inner_text() == "Rows: gluon, cudnn"
    page.evaluate("id => location.hash = id", RATES)
    page.wait_for_url(re.compile("&rows="))
    page.locator("#only").fill("")
    assert "rows" not in page.url and page.url.endswith(f"#{RATES}")


def test_a_figure_says_what_stands_behind_it(page: Any) -> None:
    go_to(page, RATES)
    figure = page.locator(f"#{RATES} td[title]").first
    figure.click()
    sentence = page.locator("#said").inner_text()
    assert figure.get_attribute("title") in sentence and re.search(r"\d+ rounds; p20 to p80 .* run of \d{4}-", sentence)
    assert len(re.findall("; made by: python -m pytest ", sentence)) == 1
