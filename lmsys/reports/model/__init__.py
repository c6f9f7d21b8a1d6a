"""The chapters on whole models: which tables and plots each section of a sweep gets."""

from collections.abc import Iterator
from dataclasses import replace

from lmsys.reports.load import Machine
from lmsys.reports.model import beside, pictures, pivots
from lmsys.reports.model.cases import (
    FIRST,
    FITS,
    FRACTION,
    MFU,
    PEAK,
    TIME,
    TOKENS,
    TOTAL,
    WARM_UP,
    Slice,
    groups,
    section_title,
    side_by_side,
    slices,
    typed,
)
from lmsys.reports.page import Block, Chapter
from lmsys.reports.plots import Plot
from lmsys.reports.tables import Table

PEERS = "peers"  # sets our model beside somebody else's, which is read in one table


def chapters(machine: Machine, baseline: str | None) -> list[Chapter]:
    """An overview, then a chapter for each section; `machine` holds model records only."""
    machine = replace(machine, frame=typed(machine.frame))
    overview = [Block("", [pivots.shapes(machine), pivots.outcomes(machine)])]
    found = [Chapter("Model", overview)]
    parts = list(slices(machine))
    for section in dict.fromkeys(part.section for part in parts):
        own = [part for part in parts if part.section == section]
        title = f"Model: {section_title(section)}"
        if section == WARM_UP:
            found.append(Chapter(title, [_warm_up(part) for part in own]))
            continue
        whole = [beside.peer(part.of_mode(part.modes()[-1])) for part in own]
        glance = _present(*whole, *(pivots.best(part) for part in own if section != PEERS), pivots.summary(own))
        if glance:
            overview.insert(-1, Block(section_title(section), glance, chapter=title))
        found.append(Chapter(title, [block for part in own for block in _blocks(part, baseline)]))
    return found


def _warm_up(part: Slice) -> Block:
    heading = ", ".join(filter(None, ["By steps of warm-up", part.heading]))
    part = replace(part, heading=heading)
    return Block(heading, [pivots.warm_up(part, frame) for frame in groups(part.frame, [])])


def _blocks(part: Slice, baseline: str | None) -> Iterator[Block]:
    """The phases of a step beside one another, then every mode for itself."""
    if stacked := _present(*pictures.phases(part)):
        yield Block(", ".join(filter(None, ["Step by phase", part.heading])), stacked)
    for mode in part.modes():
        yield _block(part.of_mode(mode), baseline)


def _block(part: Slice, baseline: str | None) -> Block:
    cuts = side_by_side(part.frame)
    times = _present(*(pivots.grid(part, TIME, frame, axis) for axis, frame in cuts))
    speedups = _present(*(pivots.speedup(part, frame, axis, baseline) for axis, frame in cuts))
    compiled = groups(part.frame, ["compile"])
    rates, share, fraction, peaks, totals, first = (
        _present(*(pivots.grid(part, metric, frame, "compile") for frame in compiled))
        for metric in (TOKENS, MFU, FRACTION, PEAK, TOTAL, FIRST)
    )
    utilised, of_matmul, memory = (
        _present(*pictures.against_context(part, metric)) for metric in (MFU, FRACTION, TOTAL if totals else PEAK)
    )
    side, predicted = _present(beside.peer(part)), _present(beside.predicted(part))
    if part.section == PEERS and side:
        return Block(part.heading, side, [*times, *peaks, *fraction, *first])
    if part.section == FITS and (peaks or predicted):
        rest = [*times, *speedups, *rates, *share, *fraction, *first, *utilised, *of_matmul]
        return Block(part.heading, [*predicted, *totals, *peaks, *memory], rest)
    lead, more = [*side, *times, *speedups], [*predicted, *fraction, *first, *of_matmul]
    looked_at = [*rates, *share, *totals, *peaks, *utilised, *memory]  # at once of a whole step, else behind a click
    if part.modes() == ["step"]:
        return Block(part.heading, lead + looked_at, more)
    return Block(part.heading, lead, looked_at + more)


def _present(*items: Table | Plot | None) -> list[Table | Plot]:
    return [item for item in items if item is not None]
