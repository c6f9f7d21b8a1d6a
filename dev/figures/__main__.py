"""Figures of README and docs, of the committed runs that they tell of: `python -m dev.figures` writes them anew.

A table gets new lines, and a sentence new numbers; words are left as they are. Look at what `git diff` shows: where a
figure has moved, a sentence may be wrong in words.
"""

from collections.abc import Iterator
from itertools import chain

from dev.figures import attention, notebooks, steps
from dev.figures.pages import ROOT


def pages() -> Iterator[tuple[str, str]]:
    """Each page that has figures of runs, with the figures that the runs give now."""
    texts: dict[str, str] = {}
    for figure in chain(attention.figures(), steps.figures(), notebooks.figures()):
        text = texts.get(figure.page) or (ROOT / figure.page).read_text()
        texts[figure.page] = figure.filled(text)
    yield from texts.items()


if __name__ == "__main__":
    for page, text in pages():
        (ROOT / page).write_text(text)
