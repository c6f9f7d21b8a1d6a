"""The chapters on data parallelism: which tables and plots each section of a sweep gets."""

from dataclasses import replace

from lmsys.reports.load import Machine
from lmsys.reports.page import Block, Chapter
from lmsys.reports.parallel import pictures, pivots
from lmsys.reports.parallel.cases import SECTIONS, Slice, slices, typed
from lmsys.reports.plots import Plot
from lmsys.reports.tables import Table


def chapters(machine: Machine, baseline: str | None) -> list[Chapter]:
    """A chapter for each section; `machine` holds data-parallel records only."""
    machine = replace(machine, frame=typed(machine.frame))
    parts = list(slices(machine))
    found = []
    for section in dict.fromkeys(part.section for part in parts):
        peers = pivots.against_peers(machine, section)
        blocks = [Block("Beside torch's own", [peers])] if peers else []
        blocks += [_block(part) for part in parts if part.section == section]
        found.append(Chapter(f"Data parallel: {SECTIONS.get(section, section)}", blocks))
    return found


def _block(part: Slice) -> Block:
    rates = pictures.by_strategy(part, "tokens_per_s", 1.0, "tokens/s", "Rate", "rate")
    exposed = pictures.by_strategy(part, "exposed_s", 1e3, "ms", "Exposed communication", "exposed")
    lead = [pivots.by_batch(part), pivots.steps(part), pivots.memory(part), rates, exposed]
    more = [pictures.memory_by_kind(part), pictures.scaling(part), pictures.timelines(part)]
    return Block(part.heading, _present([*lead, *more]))


def _present(items: list[Table | Plot | None]) -> list[Table | Plot]:
    return [item for item in items if item is not None]
