"""`python -m dev.figures` writes the figures of README and docs again, from the committed runs.

A table gets new lines, and a sentence new numbers; words stay as they are. Look at `git diff` afterwards: where a
figure has moved, the words around it may be wrong. `tests/dev/test_figures.py` fails if a page has other figures than
its runs. A new figure is a `Table` or a `Sentence` (`pages.py`) in `attention.py`, `steps.py` or `notebooks.py`.
"""

from collections.abc import Iterator
from itertools import chain

from dev.figures import attention, notebooks, steps
from dev.figures.pages import ROOT


def pages() -> Iterator[tuple[str, str]]:
    """(page, text) for each page with figures; the text has the figures that the committed runs give."""
    texts: dict[str, str] = {}
    for figure in chain(attention.figures(), steps.figures(), notebooks.figures()):
        text = texts.get(figure.page) or (ROOT / figure.page).read_text()
        texts[figure.page] = figure.filled(text)
    yield from texts.items()


if __name__ == "__main__":
    for page, text in pages():
        (ROOT / page).write_text(text)
