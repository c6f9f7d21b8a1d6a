"""The fastest row of each setting, its speed over what users would otherwise take, and over the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmsys.bench import fields, verdict
from lmsys.reports import cells, contest, expressions, items, load, plots, words

NARROW = "bfloat16", "bf16"  # the precision that most readers ask for stands first
FEW = 4  # rows: a comparison of fewer says so
# The facts of a line that its CSV leaves out.
INNER = "details", "run", "named", "unsteady", "rivals", "over_as", "next_as", "measured", "standing"
# The facts of a line where no two rows, one of them somebody else's, were undisturbed.
UNSETTLED = dict.fromkeys(("row", "called", "over", "speedup", "next", "lead", "mfu")) | {"fastest": 0}
ABOUT = (
    "The rows of a line took turns in one run; (of 2 rows) says that only two did. 1.5 × NAME means 1.5 times as fast"
    " as the row NAME, in the geometric mean over the shapes of the run. Time and rate are the fastest row's in the"
    " shape that took it longest. Point at a figure, or click on it: it names the rows,"
    f" and says in how many shapes no other row was more than {verdict.NEAR_TEXT} faster."
)
DISTURBED = "Cases that were disturbed decide nothing here, because others were not."
RIVALS = "In another run, which took no turns with this one, these took less time: {}."
UNSTEADY = (
    f"Unsteady: from p20 to p80 the samples of one of the two spread over more than {cells.STEADY:.0%} of the median."
)
WAYS = {
    "compiled": "by torch.compile",
    "graphed": "compiled, and replayed as one CUDA graph",
    "fused": "by kernels of lmsys in place of a compiler, and replayed",
    "eager": "PyTorch's own kernels, one after another",
}
COLUMNS = ["setting", "fastest row", "time", "rate", "speed", "over the next fastest"]
NEXT = 5  # its last; none where it says no more than the speed
MFU = " MFU is that of the fastest row, in the shape where it is highest."
LINE_IN = 0.29  # height of a setting and its dots
STANDING = (
    "Speed of each row as a share of the speed of the fastest one, %, by rounds in which both took turns; over several"
    " shapes, the geometric mean. Further right is faster."
)


@dataclass(frozen=True)
class Question:
    """Who is fastest, among cases that were sampled together; a line of the table for each value of `keys`.

    bases    names of rows that the fastest one is compared with: the first that was timed, else the next fastest
    contends expression that is true of the cases that do the work in question
    about    what is said of the words of its lines
    kind     the table that the rows are in
    way      the field that says how a row was run, where its ways are compared, too, and the fastest is named
    told     of `keys` those that a line tells also where all lines have one value, and other cases another
    mfu      a column tells it
    of_ours  a line may name the fastest of our own rows alone; else somebody else's must be among them
    values   expressions that give fields of the cases other values, such as those that older files mean
    before   rows that come before the `bases` where a case passes the test that stands beside them
    words    how values of fields are read
    """

    benchmark: str
    word: str
    title: str
    keys: Mapping[str, str]
    bases: Sequence[str]
    contends: str = "True"
    about: str = ""
    kind: str = ""
    way: str = ""
    told: Sequence[str] = ()
    mfu: bool = False
    of_ours: bool = False
    values: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Mapping[object, str]] = field(default_factory=dict)

    def enough(self, rows: Sequence[fields.Record]) -> bool:
        """True of rows that took turns of which a line may name the fastest: of ours alone the fastest may be slow."""
        return len({case["impl"] for case in rows}) > 1 and (self.of_ours or any(case.get("peer") for case in rows))

    def settings(self, machine: load.Machine) -> dict[tuple[object, ...], list[fields.Record]]:
        """The timed cases by the values of the keys, in reading order; a row that was wrong in a section is left out.

        They have the `values` of the question.
        """
        cases = [case for case in machine.records if case["benchmark"] == self.benchmark]
        cases = [case for case in cases if expressions.value_of(self.contends, case)]
        wrong = {(case["section"], case["impl"]) for case in cases if case["outcome"] in verdict.FAILED}
        timed = [case for case in cases if case.get("time_s") and (case["section"], case["impl"]) not in wrong]
        right = [
            case | {name: expressions.value_of(text, case) for name, text in self.values.items()} for case in timed
        ]
        settings = fields.grouped((tuple(case.get(name) or None for name in self.keys), case) for case in right)
        return {key: settings[key] for key in sorted(settings, key=lambda key: reading_order(self.words, key))}


def fastest_of(machine: load.Machine, question: Question) -> items.Table | None:
    """A line for each setting, with the row that is fastest there; None where no rows are enough."""
    settings = question.settings(machine)
    facts = {key: _line(machine, question, cases) for key, cases in settings.items()}
    lines: list[fields.Record] = [
        dict(zip(question.keys, key, strict=True)) | line for key, line in facts.items() if line
    ]
    if not lines:
        return None
    letters = enumerate(dict.fromkeys(line["run"] for line in lines))
    runs = {run: chr(ord("A") + place % 26) + str(place // 26 or "") for place, run in letters}
    heads = [_setting(question, line, _shown(question, lines, list(settings))) for line in lines]
    marks: cells.Notes = {}
    shares = bool(question.mfu) and any(line["mfu"] for line in lines)
    rows = []
    for head, line in zip(heads, lines, strict=True):
        row, *speeds = _answer(line, marks)
        measured = line["measured"] if line["fastest"] else ["", ""]
        share = f"{words.number(100 * line['mfu'])}\N{NO-BREAK SPACE}%" if line["mfu"] else ""
        rows.append([head, row, *measured, *speeds, *[share] * shares, runs[line["run"]]])
    columns = [*COLUMNS, *["MFU"] * shares, "run"]
    if not any(row[NEXT] for row in rows):
        for texts in (columns, *rows):
            del texts[NEXT]
    name = f"{machine.slug}-fastest-{load.file_name(question.word)}"
    names = load.run_names(machine, runs)
    dates = ", ".join(f"{letter} of {names[run]}" for run, letter in runs.items())
    made = load.commands(machine, runs)
    compiled = " ".join(str(line.get("compile")) for line in lines)
    ways = words.sentence("; ".join(f"{name}: {about}" for name, about in WAYS.items() if name in compiled))
    return items.Table(
        name=name,
        title=question.title,
        caption=ABOUT + question.about + f" {ways}." * bool(ways) + MFU * shares,
        columns=columns,
        rows=rows,
        data=[{name: value for name, value in line.items() if name not in INNER} for line in lines],
        notes=[
            *cells.below(marks, rows),
            f"Runs: {dates}.",
            *load.legend(machine, question.kind, set().union(*(line["named"] for line in lines))),
        ],
        keys=2,
        source=machine.about(sum(settings.values(), [])),
        best=frozenset((at, 2) for at, line in enumerate(lines) if line["fastest"]),
        details={(at, column): line["details"] for at, line in enumerate(lines) for column in range(2, len(columns))},
        plot=standing(machine, lines, heads, question.title, name, question.kind),
        runs=[(f"Run {letter}, of {made[run][0]}", made[run][1]) for run, letter in runs.items()],
    )


def _line(machine: load.Machine, question: Question, cases: Sequence[fields.Record]) -> fields.Record:
    """The facts of a setting's line; none where no rows that took turns are enough."""
    settled = list(filter(question.enough, fields.grouped((str(case["comparison"]), case) for case in cases).values()))
    if not settled:
        return {}
    first = [name for name, test in question.before.items() if any(expressions.value_of(test, case) for case in cases)]
    deciders = verdict.deciding(settled, question.enough)
    decisive = contest.Contest(machine, deciders or settled, first + list(question.bases), question.way).of_one_run()
    flags = [bool(case.get("disturbed")) for rows in settled for case in rows]
    disturbed = "all" if all(flags) else "some" if any(flags) else None
    return {"disturbed": disturbed} | decisive.line(cases) | ({} if deciders else UNSETTLED)


def _shown(question: Question, lines: Sequence[fields.Record], settings: Sequence[Sequence[object]]) -> list[str]:
    """The keys that lines tell: those that vary among them, or else the first; and some that vary among all cases."""
    shown = [name for name in question.keys if len({line[name] for line in lines}) > 1] or list(question.keys)[:1]
    asked = dict(zip(question.keys, map(set, zip(*settings, strict=True)), strict=True))
    return shown + [name for name in question.told if name not in shown and len(asked[name]) > 1]


def _setting(question: Question, line: fields.Record, names: Sequence[str]) -> str:
    """A line's setting as the report has it; a number says of what it is."""
    texts = []
    for name in names:
        value = line[name]
        head = f"{question.keys[name]}\N{NO-BREAK SPACE}" * (type(value) in (int, float))
        texts.append(head + question.words.get(name, {}).get(value, "" if value is None else str(value)))
    return ", ".join(filter(None, texts))


def reading_order(words: Mapping[str, Mapping[object, str]], key: Sequence[object]) -> list[tuple[int, float, str]]:
    """Sorts into reading order: a narrow precision first, words as these list them, numbers by size."""
    known = [value for values in words.values() for value in values]
    places = []
    for value in key:
        first = 0 if value is None or value in NARROW else 1 + known.index(value) if value in known else 99
        places.append((first, float(value) if isinstance(value, int | float) else 0.0, str(value)))
    return places


def _answer(line: fields.Record, notes: cells.Notes) -> list[str]:
    """The row, its speed over the base, and over the next where that is another, in words."""
    disturbed = ", all of them disturbed" * (line["disturbed"] == "all")
    if line["disturbed"] == "some":
        disturbed = cells.mark(notes, DISTURBED)
    if not line["fastest"]:  # each was slower than another, as may be where samples spread
        return [f"not settled{disturbed}", "", ""]
    row = line["called"] + f" (of {line['rows']} rows)" * (line["rows"] < FEW) + disturbed
    if line["rivals"]:
        row += cells.mark(notes, RIVALS.format(", ".join(line["rivals"])))
    speed = _times(line["speedup"], line["over_as"])
    if speed and line["unsteady"]:
        speed += cells.mark(notes, UNSTEADY)
    return [row, speed, "" if line["next"] == line["over"] else _times(line["lead"], line["next_as"])]


def _times(speed: float | None, name: str) -> str:
    return f"{words.number(speed)}\N{NO-BREAK SPACE}× {name}" if speed else ""


def standing(
    machine: load.Machine, lines: Sequence[fields.Record], heads: Sequence[str], title: str, name: str, kind: str
) -> items.Plot | None:
    """A strip of dots for each setting, a dot for each row; None where nobody stands beside the fastest.

    `kind`: the table of the rows' looks.
    """
    rows = set[str]().union(*(line["standing"] for line in lines))
    if len(rows) < 2:
        return None
    peers = {str(case.get("strategy") or case["impl"]): bool(case.get("peer")) for case in machine.records}
    looks = [{"row": row, "peer": peers[row]} for row in rows]
    axes = plots.canvas(LINE_IN * len(lines) + 0.4)
    for row, style in words.styles_of(looks, "row", "row", "", machine.rows.get(kind, {})).items():
        dots = [(100 * line["standing"][row], at) for at, line in enumerate(lines) if row in line["standing"]]
        axes.plot(*zip(*dots, strict=True), **style.line() | {"linestyle": "none", "alpha": 0.85, "clip_on": False})
    for place, head in enumerate(heads):
        axes.text(0, place - 0.17, head, va="bottom", fontsize=8)
    axes.set(xlim=(0, 104), ylim=(len(lines) - 0.5, -0.9), yticks=range(len(lines)), yticklabels=[], xlabel="%")
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    return items.Plot(name, title, STANDING, plots.to_svg(axes, name, title))
