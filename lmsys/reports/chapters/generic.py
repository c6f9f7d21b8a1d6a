"""Any benchmark that has no chapter of its own: its grids, by the fields that it declares."""

from lmsys.reports import bits, plots
from lmsys.reports.canvas import Plot
from lmsys.reports.cells import SPEEDUP, base_of, compared
from lmsys.reports.tables import Block, Chapter, listing, pivot
from lmsys.reports.views import View
from lmsys.reports.words import sentence


def chapters(view: View) -> list[Chapter]:
    """A block for each grid."""
    axes = [name for name in view.axes() if name not in ("section", "impl", "label", "peer")]
    parts = view.ordered("section", *axes, "impl").cut(f"{view.benchmark}-{{section}}", "{section}")
    last = Block("", [bits.table(view, f"{view.benchmark}-same-bits")])
    return [Chapter(sentence(view.benchmark.replace("_", " ")), [*(_block(part, axes) for part in parts), last])]


def _block(part: View, axes: list[str]) -> Block:
    """A table of each metric, rows of the table side by side; of one row a table of all metrics."""
    free = [name for name in axes if part.varies(name)]
    rows = part.values("impl")
    part = compared(part, base_of(part, otherwise=sorted(rows, key=lambda row: not part.styles["impl"][row].dashed)))
    metrics = part.metrics()
    if len(rows) == 1:
        tables = [listing(part, free, metrics, word="metrics", title="Metrics")]
    else:
        tables = [pivot(part, metric, free) for metric in [*metrics[:1], SPEEDUP, *metrics[1:]]]
    return Block(part.title, tables, _lines(part, free, metrics))


def _lines(part: View, free: list[str], metrics: list[str]) -> list[Plot | None]:
    """Each metric against the axis that has most numbers, a plot for each setting of the others."""
    numbers = [name for name in free if all(type(value) in (int, float) for value in part.values(name))]
    if not numbers:
        return []
    axis = max(numbers, key=lambda name: len(part.values(name)))
    others = [name for name in free if name != axis]
    facets = part.cut("-".join(f"{{{n}}}" for n in others), ", ".join(f"{n} {{{n}}}" for n in others), tail=True)
    return [plots.lines(facet, metric, axis) for metric in metrics for facet in facets]
