"""The fastest row of each setting, its speed over what users would otherwise take, and over the next."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from lmsys.bench.fields import Record, grouped
from lmsys.bench.verdict import FAILED, NEAR, NEAR_TEXT, deciding, fastest, ratio_of, time_of, undisturbed
from lmsys.reports import standing
from lmsys.reports.cells import DETAILS, STEADY, Notes, below, geometric_mean, mark
from lmsys.reports.load import Machine, commands, legend, run_names
from lmsys.reports.tables import Table
from lmsys.reports.views import KEPT
from lmsys.reports.words import VALUES, number, sentence, spread_of

PATTERNS = "documents", "window", "softcap"  # which SDPA takes as a dense mask, or not at all
NARROW = "bfloat16", "bf16"  # the precision that most readers ask for stands first
FEW = 4  # rows: a comparison of fewer says so
OLDER = KEPT | {"compile": "eager"}  # what files mean that do not say it
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


def several(rows: Sequence[Record]) -> bool:
    return len({one["impl"] for one in rows}) > 1


def beside_a_peer(rows: Sequence[Record]) -> bool:
    """True of several rows with somebody else's among them: of ours alone the fastest may be slow."""
    return several(rows) and any(one.get("peer") for one in rows)


@dataclass(frozen=True)
class Question:
    """Who is fastest, among cases that were sampled together; a line of the table for each value of `keys`.

    bases    names of rows that the fastest one is compared with: the first that was timed, else the next fastest
    contends true of the cases that do the work in question
    about    what is said of the words of its lines
    kind     the table that the rows are in
    way      the field that says how a row was run, where its ways are compared, too, and the fastest is named
    told     of `keys` those that a line tells also where all lines have one value, and other cases another
    mfu      a column tells it
    enough   true of rows that took turns of which a line may name the fastest
    """

    benchmark: str
    word: str
    title: str
    keys: Mapping[str, str]
    bases: Sequence[str]
    contends: Callable[[Record], bool] = lambda _: True
    about: str = ""
    kind: str = "attention"
    way: str = ""
    told: Sequence[str] = ()
    mfu: bool = False
    enough: Callable[[Sequence[Record]], bool] = beside_a_peer


ATTENTION = {"direction": "direction", "dtype": "dtype", "head_dim": "D", "causal": "mask", "kind": "kind"}
MODEL = {"size": "model", "precision": "precision", "residual": "stream"}
QUESTIONS = (
    Question(
        "attention",
        "attention",
        "Fastest attention",
        ATTENTION,
        ("sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_math", "naive"),
        about=" D is the size of a head, Q the number of queries, K that of keys.",
    ),
    Question(
        "model",
        "step",
        "Fastest training step",
        {**MODEL, "checkpoint": "checkpointing"},
        ("llama_tuned", "llama", "sdpa", "sdpa_flash"),
        lambda one: one.get("mode") == "step",
        about=" Each row counts by the fastest of the ways in which it was run, which its name tells. A narrow residual"
        " stream is held in the dtype of matmuls, a wide one in float32. Only steps of one kind are compared, and only"
        " where somebody else's are among them.",
        way="compile",
        told=("residual",),
        mfu=True,
    ),
    Question(
        "data_parallel",
        "data-parallel",
        "Fastest data parallelism",
        {**MODEL, "compile": "run", "world_size": "ranks"},
        ("torch_ddp_tuned", "torch_ddp", "torch_fsdp2", "torch_fsdp2_zero2", "torch_zero1", "naive"),
        lambda one: (
            one.get("strategy") != "none"
            and one.get("world_size") not in (None, 1)
            and one.get("comm_dtype") != "bfloat16"
        ),
        kind="strategy",
    ),
)


def fastest_of(machine: Machine, question: Question) -> Table | None:
    """A line for each setting, with the row that is fastest there; None where no rows are enough."""
    cases = [one for one in machine.records if one["benchmark"] == question.benchmark and question.contends(one)]
    wrong = {(one["section"], one["impl"]) for one in cases if one["outcome"] in FAILED}
    timed = [one for one in cases if one.get("time_s") and (one["section"], one["impl"]) not in wrong]
    settings = grouped((tuple(_value(one, name) for name in question.keys), one) for one in timed)
    data: list[Record] = []
    for key in sorted(settings, key=reading_order):
        line, others = dict(zip(question.keys, key, strict=True)), settings[key]
        together = grouped((str(one["comparison"]), one) for one in others).values()
        hidden = any(one.get(name) for one in others for name in PATTERNS)
        bases = ("flex", *question.bases) if hidden else question.bases  # what PyTorch has for patterns
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
    name = f"{machine.slug}-fastest-{question.word}"
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
        plot=standing.drawn(machine, lines, question.title, name, question.kind),
        runs=[(f"Run {letter}, of {made[run][0]}", made[run][1]) for run, letter in runs.items()],
    )


def _ways(lines: Sequence[Record]) -> str:
    """Says what ways of compiling are that the lines have."""
    used = " ".join(str(one.get("compile")) for one in lines)
    told = [f"{name}: {about}" for name, about in WAYS.items() if name in used]
    return f" {sentence('; '.join(told))}." if told else ""


def _letter(number: int) -> str:
    return ascii_uppercase[number % 26] + (str(number // 26) if number >= 26 else "")


def _value(one: Record, name: str) -> object:
    """A case's value in a setting."""
    return ", ".join(_kinds(one)) or None if name == "kind" else one.get(name) or OLDER.get(name)


def _kinds(one: Record) -> Iterator[str]:
    """Says by what a case of attention differs from one with as many keys as queries, and key heads as query heads."""
    if one.get("documents"):
        yield "documents"
    if window := one.get("window"):
        yield f"window {window:,}"
    if one.get("softcap"):
        yield "capped scores"
    if one.get("deterministic"):
        yield "deterministic"
    if one.get("offset"):
        yield "decoding"
    elif one.get("queries") != one.get("keys"):
        yield "Q\N{NO-BREAK SPACE}≠\N{NO-BREAK SPACE}K"
    elif one.get("kv_heads") != one.get("heads"):
        yield "grouped heads"


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


def reading_order(key: Sequence[object]) -> list[tuple[int, float, str]]:
    """Sorts into reading order: a narrow precision first, words as the report lists them, numbers by size."""
    known = [value for words in VALUES.values() for value in words]
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
    measured = standing.figures(machine, best)
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
    return (one["impl"], str(_value(one, way))) if way else (one["impl"],)


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
    said = str(VALUES.get(name, {}).get(value, "" if value is None else value))
    return f"{question.keys[name]}\N{NO-BREAK SPACE}{said}" if type(value) in (int, float) else said
