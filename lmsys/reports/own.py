"""Which row is the fastest, asked of somebody's own benchmark in the words of its declarations."""

from collections.abc import Iterator

from lmsys.reports.chapters import CHAPTERS
from lmsys.reports.fastest import Question, several
from lmsys.reports.load import Machine, file_name
from lmsys.reports.views import UNSAID, view_of
from lmsys.reports.words import label_of

MOST_LINES = 24  # of an answer: of more settings, numbers count as shapes, over which a line is the mean


def questions(machine: Machine) -> Iterator[Question]:
    """One for each benchmark that has no chapter of its own; its settings are the axes in which its cases differ."""
    for name in sorted({str(one["benchmark"]) for one in machine.records} & machine.fields.keys() - CHAPTERS.keys()):
        view = view_of(machine, name)
        axes = [axis for axis in view.axes() if axis not in (*UNSAID, "impl") and view.varies(axis)]
        words = [axis for axis in axes if isinstance(view.cases[0][axis], str)]
        keys = axes if len(view.distinct(*axes)) <= MOST_LINES else words
        yield Question(
            benchmark=name,
            word=file_name(name),
            title=f"Fastest {name.replace('_', ' ')}",
            keys={axis: label_of(view.fields[axis]) for axis in keys or ["section"]},
            bases=[row for row, facts in view.table().items() if facts.get("baseline")],
            kind=next((kind for kind, rows in machine.rows.items() if view.values("impl")[0] in rows), ""),
            enough=several,
        )
