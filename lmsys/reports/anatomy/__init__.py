"""The chapters on where the time and the memory of a model go."""

from dataclasses import replace

from lmsys.reports.anatomy import memories, pictures, times
from lmsys.reports.anatomy.cases import CALLS, View, typed
from lmsys.reports.load import Machine
from lmsys.reports.page import Block, Chapter
from lmsys.reports.plots import Plot
from lmsys.reports.tables import Table


def chapters(machine: Machine, baseline: str | None) -> list[Chapter]:
    """All cases beside one another, then each setting for itself; `machine` holds anatomy records only."""
    view = View(replace(machine, frame=typed(machine.frame)), typed(machine.frame))
    opened = view.only(view.frame["time_s"].notna())
    settings = list(opened.settings())
    memory = _present(memories.peaks(view), memories.predictions(view))
    return [
        Chapter("Where time goes", [Block("", [times.shares(view), times.clocks(view)]), *map(_time, settings)]),
        Chapter("Where memory goes", [*([Block("", memory)] if memory else []), *map(_memory, settings)]),
    ]


def _time(view: View) -> Block:
    lead = _present(
        *(times.parts(view, mode) for mode in reversed(CALLS)), times.inside_attention(view), pictures.shares(view)
    )
    return Block(view.heading, lead, [times.kernels(view, case) for case in view.cases])


def _memory(view: View) -> Block:
    steps_first = sorted(view.cases, key=lambda case: case.mode != "step")
    lines = [pictures.timeline(view, case) for case in steps_first]
    return Block(view.heading, _present(*lines), _present(*(memories.allocations(view, case) for case in steps_first)))


def _present(*items: Table | Plot | None) -> list[Table | Plot]:
    return [item for item in items if item is not None]
