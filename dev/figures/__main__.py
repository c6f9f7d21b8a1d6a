"""`python -m dev.figures` writes the figures in README and docs again, from the results that are committed.

A figure here is a measured number in a page's text or table. The results are in reports/results. Maintainers run this
after they have committed a new result: tables get new lines, sentences get new numbers, and all other words stay. Look
at `git diff` afterwards: if a number has changed, the words around it may be wrong. `tests/dev/test_figures.py` fails
if a page and its results differ. A new figure is a `Table` or a `Sentence` (`pages.py`) in `attention.py`, `steps.py`
or `notebooks.py`.
"""

from collections.abc import Iterator
from itertools import chain

from dev.figures import attention, notebooks, steps
from dev.figures.pages import ROOT


def pages() -> Iterator[tuple[str, str]]:
    """Yields (path, text) for each page with figures, the text with the figures that the committed results give."""
    texts: dict[str, str] = {}
    for figure in chain(attention.figures(), steps.figures(), notebooks.figures()):
        text = texts.get(figure.page) or (ROOT / figure.page).read_text()
        texts[figure.page] = figure.filled(text)
    yield from texts.items()


if __name__ == "__main__":
    for page, text in pages():
        (ROOT / page).write_text(text)
