"""Figures of a page: lines of a table, and numbers within a sentence, found by the words around them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBER = r"(\d[\d.,]*\d|\d)"


@dataclass(frozen=True)
class Table:
    """The lines of a page's table, below its head, which begins with these columns; `place` counts such tables."""

    page: str
    head: tuple[str, ...]
    lines: Sequence[Sequence[str]]
    place: int = 0

    def filled(self, text: str) -> str:
        """The page with these lines in place of those that it has. ValueError: it has no such table."""
        begin = re.escape(line(self.head).removesuffix("|"))
        tables = list(re.finditer(rf"(?<=\n){begin}.*\n\| -.*\n((?:\|.*\n)*)", text))
        if len(tables) <= self.place:
            raise ValueError(f"{self.page} has {len(tables)} tables that begin with {self.head}, not {self.place + 1}")
        start, end = tables[self.place].span(1)
        return text[:start] + "".join(f"{line(cells)}\n" for cells in self.lines) + text[end:]


@dataclass(frozen=True)
class Sentence:
    """A part of a page, wherever its lines break; each {} in it is a figure."""

    page: str
    words: str
    figures: Sequence[str] = ()

    def filled(self, text: str) -> str:
        """The page with these figures in place of those that it has. ValueError: it has no such sentence."""
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
    """The cells of all tables in Markdown, without the lines below their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
