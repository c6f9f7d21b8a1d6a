"""`Table` and `Sentence`: places on a page that hold measured numbers, found by the words around them.

`attention.py`, `steps.py` and `notebooks.py` make them. `__main__.py` calls `filled`, which puts the new numbers into
the page's text, and writes the page. Another kind of place is a class here with `page` and `filled`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBER = r"(\d[\d.,]*\d|\d)"  # such as 1.25 or 16,384; it ends with a digit, so that the end of a sentence stays


@dataclass(frozen=True)
class Table:
    """The lines of a table in Markdown on a page.

    page   the page's path, relative to the root of the repository
    head   the first cells of the table's head, by which the table is found
    lines  the cells of each line below the head
    place  which of the page's tables with this head is meant; 0: the first
    """

    page: str
    head: tuple[str, ...]
    lines: Sequence[Sequence[str]]
    place: int = 0

    def filled(self, text: str) -> str:
        """The page's text, with these lines in the table in place of the old ones. ValueError if there is no table."""
        begin = re.escape(line(self.head).removesuffix("|"))
        tables = list(re.finditer(rf"(?<=\n){begin}.*\n\| -.*\n((?:\|.*\n)*)", text))
        if len(tables) <= self.place:
            raise ValueError(f"{self.page} has {len(tables)} tables that begin with {self.head}, not {self.place + 1}")
        start, end = tables[self.place].span(1)
        return text[:start] + "".join(f"{line(cells)}\n" for cells in self.lines) + text[end:]


@dataclass(frozen=True)
class Sentence:
    """A piece of text on a page, with numbers in it.

    page     the page's path, relative to the root of the repository
    words    the text, by which it is found; on the page its lines may break anywhere. Each {} stands for a number
    figures  the numbers, in order, as texts. Without any, `filled` only checks that the page has the words
    """

    page: str
    words: str
    figures: Sequence[str] = ()

    def filled(self, text: str) -> str:
        """The page's text with these numbers in place of the old ones. ValueError unless it has the words just once."""
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
    """The cells, line by line, of all tables in a Markdown text, without the lines of dashes below the heads."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
