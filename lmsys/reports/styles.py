"""The look of rows: a row has one colour, one marker and one label in every plot of a report."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmsys.bench.fields import Record

PALETTE = (  # of rows whose table gives them no colour; tests hold that everybody can tell them apart
    "#99bbff #cc6611 #445511 #7700ee #ddaa00 #ff88aa #111188 #552222 #994477"
    " #442255 #9977ff #aaaa55 #4455aa #bb77bb #008855"
).split()
MARKERS = "osD^vPX*<>hpd8H"


@dataclass(frozen=True)
class Style:
    """The look of one value of a field: dashed and hatched is what is not ours.

    label  its name in legends and tables, as one types it; where cases say their own, in the field `said_by`, that
    """

    label: str
    color: str
    dashed: bool = False
    marker: str = "o"
    said_by: str = ""

    def line(self) -> dict[str, Any]:
        style = (0, (4, 1.6)) if self.dashed else "-"
        return {"label": self.label, "color": self.color, "marker": self.marker, "linestyle": style}


def styles_of(
    cases: Iterable[Record], name: str, row: str, label: str, table: Mapping[str, Record]
) -> dict[Any, Style]:
    """A style for each value of the field `name`, in reading order: that of the table, with peers last.

    The field `row` says which row of the table it is: several values of one row are lighter shades of its colour.
    """
    first = {case[name]: case for case in cases}
    rows = {value: str(case[row]) for value, case in first.items()}
    places = {key: place for place, key in enumerate([*table, *sorted(set(rows.values()) - table.keys())])}
    peers = {value: bool(table.get(rows[value], case).get("peer")) for value, case in first.items()}
    styles: dict[Any, Style] = {}
    variants: Counter[str] = Counter()
    for value in sorted(first, key=lambda value: (peers[value], places[rows[value]], _natural(value))):
        known, place = table.get(rows[value], {}), places[rows[value]]
        color = lighter(known.get("color") or PALETTE[place % len(PALETTE)], min(0.22 * variants[rows[value]], 0.7))
        variants[rows[value]] += 1
        styles[value] = Style(str(value), color, peers[value], MARKERS[place % len(MARKERS)], label)
    return styles


def lighter(color: str, share: float) -> str:
    """The colour mixed with as much white."""
    channels = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(channel + share * (255 - channel)):02x}" for channel in channels)


def _natural(value: Any) -> list[tuple[int, Any]]:
    """Numbers inside of a name in their own order: 25MiB before 100MiB."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", str(value))]
