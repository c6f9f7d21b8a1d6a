"""The table of same bits: which rows repeat bit for bit, and give an element of a batch alone what it gets in it."""

from collections.abc import Callable, Mapping, Sequence

from lmsys.bench.fields import BATCH_INVARIANT, REPEATABLE, Field, Record
from lmsys.reports.cells import Notes, below, mark
from lmsys.reports.tables import Table, data_of
from lmsys.reports.views import View
from lmsys.reports.words import label_of, number

ABOUT = (
    "Same bits. Repeated: whether several calls on the same inputs gave the same bits; alone: whether an element of "
    "the batch gave the same bits without the others. No: the tensors that did not. In brackets: cases"
)
QUESTIONS = {"repeated": (REPEATABLE.name, "differ"), "alone": (BATCH_INVARIANT.name, "alone")}
FLAT = (
    Field("calls", role="detail", of=lambda case: case["same_bits"]["calls"]),
    Field("differing", role="detail", of=lambda case: " ".join(case["same_bits"]["differ"])),
    Field("largest_difference", role="detail", of=lambda case: max(case["same_bits"]["differ"].values(), default=None)),
    Field("differing_alone", role="detail", of=lambda case: " ".join(case["same_bits"]["alone"])),
)


def table(view: View, word: str, by: Mapping[str, Callable[[Record], bool]] | None = None) -> Table | None:
    """A line for each row, of what was called again; `by`: the heads of columns, and which cases each is about."""
    view = view.only(lambda case: case["outcome"] == "ok" and case.get("same_bits"))
    view = view.with_fields(REPEATABLE, BATCH_INVARIANT, *FLAT).ordered("impl")
    columns = [
        (f"{head}, {question}".lstrip(", "), test, answer, tensors)
        for head, test in (by or {"": lambda _: True}).items()
        for question, (answer, tensors) in QUESTIONS.items()
    ]
    notes: Notes = {}
    rows = [
        [view.text("impl", impl)]
        + [_cell([*filter(test, own.cases)], answer, tensors, notes) for _, test, answer, tensors in columns]
        for (impl,), own in view.groups("impl").items()
    ]
    heads = [label_of(view.fields["impl"]), *(head for head, *_ in columns)]
    used = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    if not used:
        return None
    lines = [[row[at] for at in used] for row in rows]
    return Table(
        name=view.file(word),
        title="Same bits",
        caption=view.caption(ABOUT),
        columns=[heads[at] for at in used],
        rows=lines,
        data=data_of(view, REPEATABLE.name, BATCH_INVARIANT.name, *(one.name for one in FLAT)),
        notes=below(notes, lines),
        source=view.source,
    )


def _cell(cases: Sequence[Record], answer: str, tensors: str, notes: Notes) -> str:
    """yes (12), or no: dq (3 of 12); notes say by how much, and what failed. Empty where no case was asked."""
    known = [case for case in cases if case[answer] is not None]
    bad = [case for case in known if not case[answer]]
    failures = {case["same_bits"].get("failure"): None for case in cases if case[answer] is None}
    untold = "".join(mark(notes, f"Not known of all cases: {why}.") for why in failures if why)
    if not bad:
        return (f"yes ({len(known)})" if known else "") + untold
    most: dict[str, float] = {}
    for case in bad:
        for name, size in case["same_bits"][tensors].items():
            most[name] = max(size, most.get(name, 0.0))
    told = ", ".join(f"{name} by at most {number(size)}" for name, size in most.items())
    return f"no: {', '.join(most)} ({len(bad)} of {len(known)})" + mark(notes, f"Differs: {told}.") + untold
