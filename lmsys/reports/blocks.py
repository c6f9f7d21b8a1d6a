"""Blocks of tables and plots, in chapters: a page is made of these."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmsys.reports.canvas import Plot
from lmsys.reports.load import Machine
from lmsys.reports.tables import Table
from lmsys.reports.views import View

Items = list[Table | Plot | None]


@dataclass(frozen=True)
class Block:
    """Tables and plots of one subject: `lead` is read at once, `more` behind a click. The title leads to `chapter`."""

    title: str
    lead: Sequence[Table | Plot | None]
    more: Sequence[Table | Plot | None] = ()
    chapter: str = ""

    @property
    def items(self) -> list[Table | Plot]:
        return [item for item in (*self.lead, *self.more) if item]


@dataclass(frozen=True)
class Chapter:
    title: str
    blocks: Sequence[Block]


Part = tuple[Machine, Block, Sequence[Chapter]]  # the block holds the answers


def with_overview(
    title: str, last: Sequence[Table | None], view: View, section: Callable[[str, View], tuple[Items, list[Block]]]
) -> list[Chapter]:
    """An overview, then a chapter for each grid: `section` makes what the overview shows of it, and its blocks."""
    overview, found = [Block("", last)], []
    for (name,), own in view.groups("section").items():
        glance, blocks = section(name, own)
        heading = own.text("section", name)
        found.append(Chapter(f"{title}: {heading}", blocks))
        overview.insert(-1, Block(heading, glance, chapter=found[-1].title))
    return [Chapter(title, overview), *found]
