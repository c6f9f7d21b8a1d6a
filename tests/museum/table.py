"""Makes the tables of docs/museum.md: which exhibits `lmsys check` and other gates refuse, and verdicts on right rows.

`__main__.py` calls `rows`, `honest_verdicts` and `markdown`. A new table is a function that `markdown` calls; a new
column of an exhibit is added in `_faults`.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from lmsys.check.kinds import KINDS
from lmsys.check.question import Fault, Options
from lmsys.registry import Entry
from tests.museum.exhibit import Exhibit
from tests.museum.gates import GATES, seen_by, subject
from tests.museum.ranks import Ranks

BEGIN, END = "<!-- python -m tests.museum --write -->", "<!-- the end of what it writes -->"
PLANTED = "strategy", "sharded_optimizer", "optimizer"  # kinds in the table of planted mistakes, which has each name
Say = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """The verdict of `lmsys check` on a row.

    fault         the first fault; None if every answer is right
    about         the question (a case of the check) that showed the fault
    extreme_only  True if only extreme inputs showed it: all ordinary questions were answered right
    """

    fault: Fault | None = None
    about: str = ""
    extreme_only: bool = False


@dataclass(frozen=True)
class Row:
    """An exhibit, the verdict of `lmsys check` on it, and in `seen` the names of other gates that refuse it."""

    exhibit: Exhibit
    verdict: Verdict
    seen: tuple[str, ...]

    @property
    def refused(self) -> bool:
        return self.verdict.fault is not None

    @property
    def mistake(self) -> str | None:
        """The name of the mistake in the verdict; None if there is none, or if the exhibit asks for another one."""
        mistake = None if self.verdict.fault is None else self.verdict.fault.mistake
        return mistake if mistake is not None and (self.exhibit.mistake or "") in mistake else None

    @property
    def new(self) -> bool:
        """True if only extreme inputs show it."""
        return self.refused and self.verdict.extreme_only


def verdict_on(entry: Entry, kind: str) -> Verdict:
    """The verdict on a row: questions are asked until an ordinary one is answered wrong, or until none is left.

    After the first extreme question that is answered wrong, no other extreme one is asked.
    """
    extreme: Verdict | None = None
    with closing(KINDS[kind].questions(entry, Options())) as questions:  # type: ignore[type-var]
        for question in questions:
            if question.reason is not None or (question.extreme and extreme is not None):
                continue
            fault = question.judge()
            if fault is not None and not question.extreme:
                return Verdict(fault, question.about)
            if fault is not None:
                extreme = Verdict(fault, question.about, extreme_only=True)
    return extreme or Verdict()


def rows(exhibits: Sequence[Exhibit], say: Say, before_check: Callable[[], None] = lambda: None) -> list[Row]:
    """The rows of all exhibits. `say` gets lines of progress; `before_check` is called before the first check.

    Other gates are asked first, since `before_check` makes uninitialised memory NaN, which other projects do not do.
    """
    ranks, seen = Ranks(), {}
    for exhibit in exhibits:
        say(f"other gates: {exhibit.kind} {exhibit.name}")
        seen[exhibit] = tuple(seen_by(subject(exhibit.entry, exhibit.kind, ranks)))
    ranks.close()
    before_check()
    made = []
    for exhibit in exhibits:
        say(f"lmsys.check: {exhibit.kind} {exhibit.name}")
        made.append(Row(exhibit, verdict_on(exhibit.entry, exhibit.kind), seen[exhibit]))
    return made


def honest_verdicts(honest: Sequence[tuple[str, Entry]], say: Say) -> list[tuple[str, Entry, Verdict]]:
    """(kind, row, verdict) for each honest row."""
    made = []
    for kind, entry in honest:
        say(f"lmsys.check: {kind} {entry.name}, which is right")
        made.append((kind, entry, verdict_on(entry, kind)))
    return made


def markdown(made: Sequence[Row], honest: Sequence[tuple[str, Entry, Verdict]]) -> str:
    """All tables of the page, with their headings."""
    parts = [_summary(made), "", "### Every fault", "", _faults(made)]
    parts += ["", "### Planted mistakes of strategies and optimizers", "", _planted(made)]
    parts += ["", "### Rows that are right", "", _honest(honest)]
    return "\n".join(parts)


def _summary(made: Sequence[Row]) -> str:
    kinds = list(dict.fromkeys(row.exhibit.kind for row in made))
    lines = []
    for kind in [*kinds, "all"]:
        chosen = [row for row in made if kind in ("all", row.exhibit.kind)]
        counts = [len(chosen), sum(row.refused for row in chosen), sum(row.mistake is not None for row in chosen)]
        counts += [sum(row.new for row in chosen), *(sum(gate in row.seen for row in chosen) for gate in GATES)]
        lines.append([kind.replace("_", " "), *map(str, counts)])
    header = ["", "Faults", "Refused here", "Named", "By extreme inputs alone", *GATES]
    return _table(header, lines)


def _faults(made: Sequence[Row]) -> str:
    lines = []
    for row in made:
        exhibit = row.exhibit
        refused = row.verdict.fault.mistake or "refused, without a name" if row.verdict.fault else "**not refused**"
        mark = "by extreme inputs alone" if row.new else ""
        gates = ["seen" if gate in row.seen else "" for gate in GATES]
        name = f"`{exhibit.name}` ({exhibit.kind.replace('_', ' ')})"
        lines.append([name, _link(exhibit.reference), exhibit.symptom, refused, mark, *gates])
    return _table(["Fault", "Published", "What its users saw", "Refused here as", "", *GATES], lines)


def _planted(made: Sequence[Row]) -> str:
    lines = [
        [
            row.exhibit.kind.replace("_", " "),
            f"`{row.exhibit.name}`",
            "yes" if row.refused else "**no**",
            row.mistake or "no name",
        ]
        for row in made
        if row.exhibit.kind in PLANTED
    ]
    named = sum(line[-1] != "no name" for line in lines)
    refused = sum(line[2] == "yes" for line in lines)
    counts = f"{refused} of {len(lines)} are refused, and {named} of them are named."
    return f"{counts}\n\n" + _table(["Kind", "Mistake", "Refused", "Named"], lines)


def _honest(honest: Sequence[tuple[str, Entry, Verdict]]) -> str:
    accused = sum(verdict.fault is not None for _, _, verdict in honest)
    lines = [
        [
            kind.replace("_", " "),
            f"`{entry.name}`",
            "right" if verdict.fault is None else f"**accused** ({verdict.about})",
        ]
        for kind, entry, verdict in honest
    ]
    return f"{accused} of {len(lines)} are accused.\n\n" + _table(["Kind", "Row", "Verdict"], lines)


def _link(reference: str) -> str:
    name, separator, number = reference.partition("#")
    return f"[{reference}](https://github.com/{name}/issues/{number})" if separator else reference


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


def written(page: str, text: str) -> str:
    """The page with `text` between BEGIN and END. ValueError unless it has each of these marks once."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN!r} once, and {END!r} behind it")
    return f"{page.partition(BEGIN)[0]}{BEGIN}\n\n{text}\n\n{END}{page.partition(END)[2]}"
