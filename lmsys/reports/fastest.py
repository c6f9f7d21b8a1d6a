"""The fastest row of each setting, its speed over what users would otherwise take, and over the next."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from string import ascii_uppercase
from typing import Any

from lmsys.bench.fields import Field, Record, grouped
from lmsys.bench.verdict import FAILED, NEAR, NEAR_TEXT, deciding, fastest, ratio_of, time_of, undisturbed
from lmsys.reports import plots
from lmsys.reports.cells import DETAILS, STEADY, Notes, below, geometric_mean, mark
from lmsys.reports.expressions import value_of
from lmsys.reports.load import Machine, commands, file_name, legend, run_names
from lmsys.reports.tables import Plot, Table
from lmsys.reports.views import styles_of
from lmsys.reports.words import digits, label_of, number, scaled, sentence, spread_of, unit_of

NARROW = "bfloat16", "bf16"  # the precision that most readers ask for stands first
FEW = 4  # rows: a comparison of fewer says so
# What the table of numbers leaves out of a line.
INNER = ("said", "run", "named", "unsteady", "rivals", "over_as", "next_as", "measured", "standing")
# What a line says where no two rows, one of them somebody else's, were undisturbed.
UNSETTLED = dict.fromkeys(("row", "called", "over", "speedup", "next", "lead", "mfu")) | {"fastest": 0}
ABOUT = (
    "The rows of a line took turns in one run; (of 2 rows) says that only two did. 1.5 × NAME means 1.5 times as fast"
    " as the row NAME, in the geometric mean over the shapes of the run. Time and rate are the fastest row's in the"
    " shape that took it longest. Point at a figure, or click on it: it names the rows,"
    f" and says in how many shapes no other row was more than {NEAR_TEXT} faster."
)
DISTURBED = "Cases that were disturbed decide nothing here, because others were not."
UNSTEADY = f"Unsteady: from p20 to p80 the samples of one of the two spread over more than {STEADY:.0%} of the median."
WAYS = {
    "compiled": "by torch.compile",
    "graphed": "compiled, and replayed as one CUDA graph",
    "fused": "by kernels of lmsys in place of a compiler, and replayed",
    "eager": "PyTorch's own kernels, one after another",
}


COLUMNS = ["setting", "fastest row", "time", "rate", "speed", "over the next fastest"]
MFU = " MFU is that of the fastest row, in the shape where it is highest."


TIME = Field("time_s", "s", "time", shown="ms")
LINE_IN = 0.29  # of a setting and its dots
STANDING = (
    "Speed of each row beside the fastest of the setting, %, by rounds in which both took turns; of several shapes it"
    " is the geometric mean. Right is faster."
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
    words: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)

    def enough(self, rows: Sequence[Record]) -> bool:
        """True of rows that took turns of which a line may name the fastest: of ours alone the fastest may be slow."""
        return len({one["impl"] for one in rows}) > 1 and (self.of_ours or any(one.get("peer") for one in rows))


def fastest_of(machine: Machine, question: Question) -> Table | None:
    """A line for each setting, with the row that is fastest there; None where no rows are enough."""
    own = (one for one in machine.records if one["benchmark"] == question.benchmark)
    told = ((one, question.values.items()) for one in own if value_of(question.contends, one))
    cases = [one | {name: value_of(text, one) for name, text in values} for one, values in told]
    wrong = {(one["section"], one["impl"]) for one in cases if one["outcome"] in FAILED}
    timed = [one for one in cases if one.get("time_s") and (one["section"], one["impl"]) not in wrong]
    settings = grouped((tuple(one.get(name) or None for name in question.keys), one) for one in timed)
    data: list[Record] = []
    for key in sorted(settings, key=partial(reading_order, question.words)):
        line, others = dict(zip(question.keys, key, strict=True)), settings[key]
        together = grouped((str(one["comparison"]), one) for one in others).values()
        first = [name for name, test in question.before.items() if any(value_of(test, one) for one in others)]
        bases = [*first, *question.bases]
        settled = [rows for rows in together if question.enough(rows)]
        deciders = deciding(settled, question.enough)
        comparisons = _of_one_run(deciders or settled, bases, question.way)
        if comparisons:
            flagged = sum(bool(one.get("disturbed")) for rows in settled for one in rows)
            line["disturbed"] = "all" if flagged == sum(map(len, settled)) else "some" if flagged else None
            line |= _first(machine, comparisons, bases, others, question.way)
            data.append(line if deciders else line | UNSETTLED)
    if not data:
        return None
    runs = {run: _letter(number) for number, run in enumerate(dict.fromkeys(one["run"] for one in data))}
    dates, made = run_names(machine, runs), commands(machine, runs)
    named = {name for one in data for name in one["named"]}
    asked = {name: {key[at] for key in settings} for at, name in enumerate(question.keys)}
    shown = [name for name in question.keys if len({one[name] for one in data}) > 1] or [*question.keys][:1]
    shown += [name for name in question.told if name not in shown and len(asked[name]) > 1]
    marks: Notes = {}
    shares = question.mfu and any(one["mfu"] for one in data)
    heads = [", ".join(filter(None, (_text(name, question, one[name]) for name in shown))) for one in data]
    rows = []
    for setting, one in zip(heads, data, strict=True):
        row, *speeds = _answer(one, marks)
        measured = one["measured"] if one["fastest"] else ["", ""]
        rows.append([setting, row, *measured, *speeds, *([_percent(one["mfu"])] * shares), runs[one["run"]]])
    columns = [*COLUMNS, *(["MFU"] if shares else []), "run"]
    name = f"{machine.slug}-fastest-{file_name(question.word)}"
    lines = {setting: one["standing"] for setting, one in zip(heads, data, strict=True)}
    return Table(
        name=name,
        title=question.title,
        caption=ABOUT + question.about + _ways(data) + (MFU if shares else ""),
        columns=columns,
        rows=rows,
        data=[{name: value for name, value in one.items() if name not in INNER} for one in data],
        notes=[
            *below(marks, rows),
            f"Runs: {', '.join(f'{letter} of {dates[run]}' for run, letter in runs.items())}.",
            *legend(machine, question.kind, named),
        ],
        keys=2,
        source=machine.about(timed),
        best=frozenset((row, 2) for row, one in enumerate(data) if one["fastest"]),
        details={(row, column): str(one["said"]) for row, one in enumerate(data) for column in range(2, len(columns))},
        plot=standing(machine, lines, question.title, name, question.kind),
        runs=[(f"Run {letter}, of {made[run][0]}", made[run][1]) for run, letter in runs.items()],
    )


def _ways(lines: Sequence[Record]) -> str:
    """Says what ways of compiling are that the lines have."""
    used = " ".join(str(one.get("compile")) for one in lines)
    told = [f"{name}: {about}" for name, about in WAYS.items() if name in used]
    return f" {sentence('; '.join(told))}." if told else ""


def _letter(number: int) -> str:
    return ascii_uppercase[number % 26] + (str(number // 26) if number >= 26 else "")


def _of_one_run(comparisons: Sequence[Sequence[Record]], bases: Sequence[str], way: str) -> list[Sequence[Record]]:
    """Those of the run that has the first base that any has, then most of the rows that are the fastest of a shape in
    all runs, then most shapes in which all of these took turns, then most rows; of such the latest.

    A run without what a user would otherwise take, or without rows that won elsewhere, may have left out the fastest.
    """
    shapes = grouped((_shape(one), one) for cases in comparisons for one in cases)
    winners = {_run_as(min(cases, key=time_of), way) for cases in shapes.values()}
    runs = grouped((cases[0]["run"], cases) for cases in comparisons)

    def worth(run: int) -> tuple[int, int, int, int, int]:
        found = [one for cases in runs[run] for one in cases]
        names = {name for one in found for name in _names(one)}
        place = next((i for i, base in enumerate(bases) if base in names), len(bases))
        together = [{_run_as(one, way) for one in cases} for cases in runs[run]]
        rows = set[tuple[str, ...]]().union(*together)
        return -place, len(rows & winners), sum(winners <= own for own in together), len(rows), run

    return runs[max(runs, key=worth)] if runs else []


def _names(one: Record) -> tuple[str, str | None]:
    """By these a base may name a case: a strategy is several rows, such as one for each size of buckets."""
    return one["impl"], one.get("strategy")


def reading_order(words: Mapping[str, Mapping[Any, str]], key: Sequence[object]) -> list[tuple[int, float, str]]:
    """Sorts into reading order: a narrow precision first, words as these list them, numbers by size."""
    known = [value for values in words.values() for value in values]
    found = []
    for value in key:
        first = 0 if value is None or value in NARROW else 1 + known.index(value) if value in known else 99
        found.append((first, float(value) if isinstance(value, int | float) else 0.0, str(value)))
    return found


def _first(
    machine: Machine,
    comparisons: Sequence[Sequence[Record]],
    bases: Sequence[str],
    others: Sequence[Record],
    way: str,
) -> Record:
    """The fastest row, its speed over a base and over the next; `others`: cases of the setting in all runs; `way`: the
    field by which the row's name goes on, if any."""
    found = fastest(comparisons)
    cases = [one for rows in comparisons for one in rows]
    best = _best(([one for one in shape if one["impl"] == found.row] for shape in comparisons), found.row)
    called = {", ".join((machine.called(one), *_run_as(one, way)[1:])) for one in best}
    ways = {way: " or ".join(sorted({_run_as(one, way)[1] for one in best}))} if way else {}
    rows = sorted({str(one["impl"]) for one in cases})
    run = cases[0]["run"]
    shapes = "shape" if found.comparisons == 1 else "shapes"
    near = f"in {found.first} of {found.comparisons} {shapes} no other was more than {NEAR_TEXT} faster"
    speed = _speed(comparisons, found.row, bases)
    over, following = (_best(comparisons, speed[name]) for name in ("over", "next"))
    measured = _figures(machine, best)
    in_which = [f"time and rate in its longest shape: {measured['shape']}"] if measured["shape"] else []
    inner = {
        "said": DETAILS.join([machine.run_of(cases[0]), f"{', '.join(rows)} took turns", near, *in_which]),
        "standing": _standing(comparisons, found.row, {str(one.get("strategy") or one["impl"]) for one in cases}),
        "run": run,
        "named": {str(one.get("strategy") or one["impl"]) for one in cases},
        "unsteady": any((spread_of(one) or 0.0) > STEADY for one in (*best, *over)),
        "rivals": _rivals(best, cases, others, way),
        "over_as": _as(speed["over"], over, way),
        "next_as": _as(speed["next"], following, way),
    }
    counts = {"fastest": found.first, "comparisons": found.comparisons, "rows": len(rows)}
    origin = {name: machine.runs[run].get(name) for name in ("date", "commit")}
    mfu = max((float(one.get("mfu") or 0) for one in best), default=0) or None
    told = {"row": found.row, "called": " or ".join(sorted(called)), **ways, **counts, **speed, "mfu": mfu}
    return told | measured | origin | inner


def _standing(comparisons: Sequence[Sequence[Record]], row: str, names: Iterable[str]) -> dict[str, float]:
    """The speed of each of these rows over that of `row`, in the geometric mean over the shapes of both."""
    ratios = {name: [ratio_of_best(rows, name, row) for rows in comparisons] for name in names}
    return {name: geometric_mean(found)[0] for name, found in sorted(ratios.items()) if any(found)}


def _best(comparisons: Iterable[Sequence[Record]], name: str | None) -> list[Record]:
    """The fastest case of a row in each comparison that has it; none where the row is None."""
    found = ([one for one in rows if name and name in _names(one)] for rows in comparisons)
    return [min(undisturbed(own), key=time_of) for own in found if own]


def _run_as(one: Record, way: str) -> tuple[str, ...]:
    """A case's row, and the way in which it was run where ways are compared."""
    return (one["impl"], str(one.get(way))) if way else (one["impl"],)


def _as(name: str | None, best: Sequence[Record], way: str) -> str:
    """A row's name, and how it was run where that is one way."""
    ways = {_run_as(one, way)[1:] for one in best}
    return ", ".join((name, *(ways.pop() if len(ways) == 1 else ()))) if name else ""


def _rivals(ours: Sequence[Record], cases: Sequence[Record], others: Sequence[Record], way: str) -> list[str]:
    """Rows that took no turns with ours, and in another run less time for the same shape; `cases`: those that did."""
    times = {_shape(one): time_of(one) for one in ours}
    faster = (one for one in others if one["run"] != ours[0]["run"] and time_of(one) * NEAR < times.get(_shape(one), 0))
    rivals = {_run_as(one, way) for one in faster} - {_run_as(one, way) for one in cases}
    return sorted(map(", ".join, rivals))


def _shape(one: Record) -> str:
    """The comparison without its date."""
    return str(one["comparison"]).partition(" ")[0]


def _speed(comparisons: Sequence[Sequence[Record]], row: str, bases: Sequence[str]) -> Record:
    """The speed over the first of the bases that took turns with the row, and over the next: the fastest other one."""
    impls = {str(one["impl"]) for rows in comparisons for one in rows}
    found = {name: [ratio_of_best(rows, row, name) for rows in comparisons] for name in {*bases, *impls} if name != row}
    speeds = {name: geometric_mean(ratios) for name, ratios in found.items() if any(ratios)}
    if not speeds:
        return {"over": None, "speedup": None, "next": None, "lead": None}
    following = min(sorted(impls & {*speeds}), key=lambda name: (-speeds[name][1], speeds[name][0]))  # of most shapes
    base = next((name for name in bases if name in speeds), following)
    return {"over": base, "speedup": speeds[base][0], "next": following, "lead": speeds[following][0]}


def ratio_of_best(rows: Sequence[Record], ours: str, theirs: str) -> float | None:
    """Theirs over ours, of the fastest case of each row or strategy, such as the best size of buckets; None without."""
    found = [one for name in (ours, theirs) for one in _best([rows], name)]
    return ratio_of(*found) if len(found) == 2 else None


def _answer(one: Record, notes: Notes) -> list[str]:
    aside = (
        mark(notes, DISTURBED) if one["disturbed"] == "some" else ", all of them disturbed" if one["disturbed"] else ""
    )
    if not one["fastest"]:  # each was slower than another, as may be where samples spread
        return [f"not settled{aside}", "", ""]
    others = f"In another run, which took no turns with this one, these took less time: {', '.join(one['rivals'])}."
    few = f" (of {one['rows']} rows)" if one["rows"] < FEW else ""
    row = one["called"] + few + aside + (mark(notes, others) if one["rivals"] else "")
    speed, lead = _times(one["speedup"], one["over_as"]), _times(one["lead"], one["next_as"])
    return [row, speed + (mark(notes, UNSTEADY) if speed and one["unsteady"] else ""), lead]


def _percent(share: float | None) -> str:
    return f"{number(100 * share)}\N{NO-BREAK SPACE}%" if share else ""


def _times(speed: float | None, name: str) -> str:
    return f"{number(speed)}\N{NO-BREAK SPACE}× {name}" if speed else ""


def _text(name: str, question: Question, value: object) -> str:
    """A word as the report has it; a number says of what it is."""
    said = str(question.words.get(name, {}).get(value, "" if value is None else value))
    return f"{question.keys[name]}\N{NO-BREAK SPACE}{said}" if type(value) in (int, float) else said


def _figures(machine: Machine, cases: Sequence[Record]) -> Record:
    """Time and rate of a row in the case that takes it longest, of these; `measured`: the two in words; `shape`: which.

    The rate is the first that its benchmark declares; without one there is no word for it.
    """
    case, fields = max(cases, key=time_of), machine.fields[cases[0]["benchmark"]].values()
    rates = [one for one in fields if one.role == "metric" and one.unit.endswith("/s") and case.get(one.name)][:1]
    sizes = [one for one in fields if one.role == "axis" and len({case.get(one.name) for case in cases}) > 1]
    shape = ", ".join(f"{label_of(one)} {digits(case[one.name])}" for one in sizes)
    measured = [f"{number(scaled(one, case[one.name]))}\N{NO-BREAK SPACE}{unit_of(one)[0]}" for one in (TIME, *rates)]
    return {one.name: case[one.name] for one in (TIME, *rates)} | {"shape": shape, "measured": [*measured, ""][:2]}


def standing(
    machine: Machine, lines: Mapping[str, Mapping[str, float]], title: str, name: str, kind: str
) -> Plot | None:
    """A strip of dots for each setting, a dot for each row; None where nobody stands beside the fastest.

    `lines`: of each setting the speed of each row over that of its fastest; `kind`: the table of the rows' looks.
    """
    table, rows = machine.rows.get(kind, {}), {row for speeds in lines.values() for row in speeds}
    peers = {str(case.get("strategy") or case["impl"]): bool(case.get("peer")) for case in machine.records}
    styles = styles_of([{"row": row, "peer": peers[row]} for row in rows], "row", "row", "", table)
    if len(rows) < 2:
        return None
    axes = plots.canvas(LINE_IN * len(lines) + 0.4)
    for row, style in styles.items():
        dots = [(100 * speeds[row], place) for place, speeds in enumerate(lines.values()) if row in speeds]
        axes.plot(*zip(*dots, strict=True), **{**style.line(), "linestyle": "none", "alpha": 0.85}, clip_on=False)
    for place, setting in enumerate(lines):
        axes.text(0, place - 0.17, setting, va="bottom", fontsize=8)
    axes.set(xlim=(0, 104), ylim=(len(lines) - 0.5, -0.9), yticks=[*range(len(lines))], yticklabels=[], xlabel="%")
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    return Plot(name, title, STANDING, plots.to_svg(axes, name, title))
