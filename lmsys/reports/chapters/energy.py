"""Energy: what a call and a token cost, for each grid whose energy was measured; of any benchmark."""

from lmsys.reports.tables import Block, Chapter, listing
from lmsys.reports.views import View

SHOWN = (
    *("energy_j", "energy_per_token_j", "energy_power_w", "energy_call_s", "flops_per_j"),
    "sustained_ceiling_fraction",
)
LABELS = {"impl": "row", "causal": "mask"}
ABOUT = (
    "Calls followed one another for a second or more on inputs that were drawn once. Energy: of a call, by the counter "
    "of the device; a note says where the integral of its power is more than 3 % away. Pace: the time from one call to "
    "the next meanwhile. Work for energy: the arithmetic of the formula over the energy"
)


def chapters(view: View) -> list[Chapter]:
    """A table for each grid; nothing where no energy was measured."""
    if not view.has("energy_j"):
        return []
    view = view.labelled(**{name: label for name, label in LABELS.items() if name in view.fields})
    asked = view.only(lambda case: case["energy_j"] is not None or case["energy_note"])
    keys = [name for name in view.axes() if name not in ("section", "label", "peer")]
    parts = asked.ordered("section", *keys).cut(f"{view.benchmark}-{{section}}", "{section}")
    tables = {part.title: listing(part, [], _shown(part), "energy", "Energy", ABOUT) for part in parts}
    title = f"Energy of {view.benchmark.replace('_', ' ')}"
    return [Chapter(title, [Block(title, [table]) for title, table in tables.items()])]


def _shown(part: View) -> list[str]:
    return [name for name in SHOWN if part.has(name)]
