"""The chapters on attention: which tables and plots each section of a sweep gets."""

from dataclasses import replace
from typing import Any

from lmsys.reports.attention import pictures, pivots
from lmsys.reports.attention.cases import (
    COMPILE,
    ERROR,
    PEAK,
    RATE,
    SAVED,
    SPEEDUP,
    TIME,
    Slice,
    looks,
    merged,
    section_title,
    slices,
    typed,
)
from lmsys.reports.attention.shapes import SHAPE
from lmsys.reports.load import Machine
from lmsys.reports.page import Block, Chapter
from lmsys.reports.plots import Plot
from lmsys.reports.tables import Table

# Sections whose tables hold several implementations in one cell, as `a / b / c`.
JOINED = {
    "flash": ["naive", "flash_triton_torch_bwd", "flash_triton"],
    "eager_compiled": ["naive", "naive_compiled"],
}
BARS = ("tiers", "by_length")
GLANCE = ("tokens16k",)  # sections whose few cells, of both masks, stand in one table of rates


def chapters(machine: Machine, baseline: str | None) -> list[Chapter]:
    """An overview, then a chapter for each section; `machine` holds attention records only."""
    machine = replace(machine, frame=typed(machine.frame))
    look = looks(machine.frame)
    parts = list(slices(machine, look, baseline))
    overview = [Block("", [pivots.implementations(machine, look)])]
    found = [Chapter("Attention", overview)]
    for section in dict.fromkeys(part.section for part in parts):
        own = [part for part in parts if part.section == section]
        title = f"Attention: {section_title(section)}"
        if summary := pivots.summary(own):
            overview.insert(-1, Block(section_title(section), [summary], chapter=title))
        glance = [Block(part.heading, _present(pivots.pivot(part, RATE))) for part in merged(own) if section in GLANCE]
        first_saved = _first_saved(own) if section == "eager_compiled" else []
        found.append(Chapter(title, glance + [_block(part, saved=part.stem in first_saved) for part in own]))
    return found


def _block(part: Slice, saved: bool) -> Block:
    wanted = JOINED.get(part.section, [])
    joined = _present(pivots.joined(part, TIME, wanted), pivots.joined(part, SAVED, wanted) if saved else None)
    time = _present(pivots.pivot(part, TIME))
    speedup = _present(pivots.pivot(part, SPEEDUP))
    rest = _present(*(pivots.pivot(part, metric) for metric in (RATE, PEAK, SAVED, ERROR, COMPILE)))
    bars = _present(*pictures.tiers(part)) if part.section in BARS else []
    heat, roofline = _present(*pictures.speedups(part)), _present(*pictures.roofline(part))
    if not joined:
        lead = [*time, *speedup, *bars, *_present(*pictures.against_length(part)), *heat]
        # One shape is a handful of points in one place: its roofline says little more than the table.
        single = len(part.frame[SHAPE].drop_duplicates()) == 1
        return Block(part.heading, lead if single else lead + roofline, rest + roofline if single else rest)
    # Many head dimensions: their long tables, and all plots but those of time, wait behind a click.
    lead = [*joined, *_present(*pictures.against_length(part, [TIME])), *heat]
    return Block(
        part.heading,
        lead,
        [*time, *speedup, *rest, *_present(*pictures.against_length(part, [RATE, PEAK])), *roofline],
    )


def _first_saved(parts: list[Slice]) -> list[str]:
    """One slice for each dtype and mask: what is saved for backward does not depend on the direction timed."""
    first: dict[tuple[Any, ...], str] = {}
    for part in parts:
        if part.frame["saved_bytes"].notna().any():
            first.setdefault(tuple(part.frame[["dtype", "causal", "memory_limit_bytes"]].iloc[0]), part.stem)
    return list(first.values())


def _present(*items: Table | Plot | None) -> list[Table | Plot]:
    return [item for item in items if item is not None]
