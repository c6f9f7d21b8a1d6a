"""Tables of what this suite and the rules of other gates see of each exhibit, and of honest rows."""

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
PLANTED = "strategy", "sharded_optimizer", "optimizer"  # kinds of the table of planted mistakes
Say = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """The answer of `lmsys.check` about a row.

    fault         the first one; None where every answer is right
    about         the question that it answers
    extreme_only  ordinary questions are all answered right: only extreme ones are not
    """

    fault: Fault | None = None
    about: str = ""
    extreme_only: bool = False


@dataclass(frozen=True)
class Row:
    """An exhibit, the verdict on it, and the names of other gates that refuse it."""

    exhibit: Exhibit
    verdict: Verdict
    seen: tuple[str, ...]

    @property
    def refused(self) -> bool:
        return self.verdict.fault is not None

    @property
    def mistake(self) -> str | None:
        """The mistake that it was refused as; None where it has another name than it must have, or none."""
        mistake = None if self.verdict.fault is None else self.verdict.fault.mistake
        return mistake if mistake is not None and (self.exhibit.mistake or "") in mistake else None

    @property
    def new(self) -> bool:
        """True where it was not seen before there were extreme inputs."""
        return self.refused and self.verdict.extreme_only


def asked(entry: Entry, kind: str) -> Verdict:
    """Asks until an ordinary question is answered wrong; of the extreme ones until the first that is."""
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
    """Other gates come first: before its questions the check makes uninitialised memory NaN, which they do not."""
    ranks, seen = Ranks(), {}
    for exhibit in exhibits:
        say(f"other gates: {exhibit.kind} {exhibit.name}")
        seen[exhibit] = tuple(seen_by(subject(exhibit.entry, exhibit.kind, ranks)))
    ranks.close()
    before_check()
    made = []
    for exhibit in exhibits:
        say(f"lmsys.check: {exhibit.kind} {exhibit.name}")
        made.append(Row(exhibit, asked(exhibit.entry, exhibit.kind), seen[exhibit]))
    return made


def honest_verdicts(honest: Sequence[tuple[str, Entry]], say: Say) -> list[tuple[str, Entry, Verdict]]:
    made = []
    for kind, entry in honest:
        say(f"lmsys.check: {kind} {entry.name}, which is right")
        made.append((kind, entry, asked(entry, kind)))
    return made


def markdown(made: Sequence[Row], honest: Sequence[tuple[str, Entry, Verdict]]) -> str:
    parts = [_summary(made), "", "### Every fault", "", _faults(made)]
    parts += ["", "### Planted mistakes of strategies and optimizers", "", _planted(made)]
    parts += ["", "### Rows that are right", "", _honest(honest)]
    return "\n".join(parts)


def _summary(made: Sequence[Row]) -> str:
    kinds = list(dict.fromkeys(row.exhibit.kind for row in made))
    lines = []
    for kind in [*kinds, "all"]:
        of = [row for row in made if kind in ("all", row.exhibit.kind)]
        counts = [len(of), sum(row.refused for row in of), sum(row.mistake is not None for row in of)]
        counts += [sum(row.new for row in of), *(sum(gate in row.seen for row in of) for gate in GATES)]
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
    told = f"{refused} of {len(lines)} are refused, and {named} of them are named."
    return f"{told}\n\n" + _table(["Kind", "Mistake", "Refused", "Named"], lines)


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
    """The page with the text between its marks. ValueError where it has none."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN!r} once, and {END!r} behind it")
    return f"{page.partition(BEGIN)[0]}{BEGIN}\n\n{text}\n\n{END}{page.partition(END)[2]}"
