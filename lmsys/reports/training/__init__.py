"""The chapters on whole trainings: which tables and plots each section of a sweep gets."""

from dataclasses import replace

from lmsys.reports.load import Machine
from lmsys.reports.page import Block, Chapter
from lmsys.reports.training import pictures, pivots
from lmsys.reports.training.cases import PEAK, RATE, SECTIONS, TIME, Slice, slices, typed


def chapters(machine: Machine, baseline: str | None) -> list[Chapter]:
    """A chapter for each section; `machine` holds records of whole trainings only."""
    machine = replace(machine, frame=typed(machine.frame))
    parts = list(slices(machine))
    return [
        Chapter(
            f"Training: {SECTIONS.get(section, section)}", [_block(part) for part in parts if part.section == section]
        )
        for section in dict.fromkeys(part.section for part in parts)
    ]


def _block(part: Slice) -> Block:
    bars = [pictures.by_strategy(part, metric) for metric in (RATE, TIME, PEAK)]
    lead = [pivots.rates(part), bars[0], pivots.speedups(part), pictures.chain(part), pivots.losses(part)]
    lead += [pictures.curves(part), pictures.differences(part)]
    more = [pivots.times(part), bars[1], pivots.peaks(part), bars[2], pivots.runs(part)]
    return Block(part.heading, [one for one in lead if one], [one for one in more if one])
