"""The figures of a page: lines of a table, and numbers in a sentence, found by the words around them.

The other modules here make them, and `__main__.py` writes them by `filled`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBER = r"(\d[\d.,]*\d|\d)"


@dataclass(frozen=True)
class Table:
    """The lines of a page's table.

    head   the first columns of its head, by which it is found
    lines  the cells of the lines below the head
    place  which table with such a head, if the page has several; 0: the first
    """

    page: str
    head: tuple[str, ...]
    lines: Sequence[Sequence[str]]
    place: int = 0

    def filled(self, text: str) -> str:
        """The page's text with these lines in place of its own. ValueError if it has no such table."""
        begin = re.escape(line(self.head).removesuffix("|"))
        tables = list(re.finditer(rf"(?<=\n){begin}.*\n\| -.*\n((?:\|.*\n)*)", text))
        if len(tables) <= self.place:
            raise ValueError(f"{self.page} has {len(tables)} tables that begin with {self.head}, not {self.place + 1}")
        start, end = tables[self.place].span(1)
        return text[:start] + "".join(f"{line(cells)}\n" for cells in self.lines) + text[end:]


@dataclass(frozen=True)
class Sentence:
    """A part of a page with figures.

    words    the text, however its lines break on the page; each {} stands for a figure
    figures  the figures, in order
    """

    page: str
    words: str
    figures: Sequence[str] = ()

    def filled(self, text: str) -> str:
        """The page's text with these figures in place of its own. ValueError unless it has the words once."""
        words = re.escape(self.words).replace(r"\ ", r"\s+").replace(r"\{\}", NUMBER)
        matches = list(re.finditer(words, text))
        if len(matches) != 1:
            raise ValueError(f"{self.page} has {len(matches)} times, not once: {self.words}")
        for number, figure in reversed(list(enumerate(self.figures, 1))):
            start, end = matches[0].span(number)
            text = text[:start] + figure + text[end:]
        return text


def line(cells: Sequence[str]) -> str:
    """A line of a table in Markdown."""
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def cells_of(text: str) -> list[list[str]]:
    """The cells, line by line, of all tables in a Markdown text, without the dashes below their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
