"""Makes the summary at the end of a run: `lines`, which the pytest plugin (`lmsys.bench.plugin`) prints.

For each setting the summary lists the rows (implementations) that ran, the fastest first, in the words of the page. A
setting is a section (a grid) of the sweep with values of those axes that are words, such as direction, dtype and mask.
Axes that are numbers are sizes: if the lines of all sizes would be more than MOST, only the largest size is shown: of
it the fastest rows, and those of the reader's own files. Rows that could not run are left out: the plugin prints the
reasons below. `_table` chooses the columns; ABOUT explains them.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import wrap

from lmsys.bench import fields, record, verdict
from lmsys.reports import cells, load, tables, views, words

MOST = 20  # the most lines of a benchmark, those of the reader's own rows aside, unless `every` case is asked for
NARROW = 18  # the fewest characters that a setting gets, in a narrow terminal
# {field: head of its column}, for fields whose unit is no head.
SHARES = {"mfu": "MFU %"} | {name: f"{ceiling.removeprefix('large ')} %" for name, ceiling in cells.CEILINGS.items()}
HEADS = SHARES | {fields.ERROR.name: "error"}
ABOUT = (
    "The fastest row comes first; of many sizes the largest is shown that was not disturbed, if any, and of many rows "
    "the fastest and those of your files (pytest -v shows all). Speed is over the fastest other row, of somebody "
    "else's if any took turns, by rounds; level: by medians the other is the faster one. error: over what is allowed, "
    "at most 1 where right. wrong: the reason stands below. disturbed: the machine was busy or slowed."
)


def lines(
    result: fields.Record, every: bool, standing: Callable[[fields.Record], fields.Record], width: int = 0
) -> Iterator[str]:
    """Yields the lines of a table for each benchmark of which a case was timed.

    result    machine, fields, rows and records, as in a result file
    every     True (pytest -v): all cases that ran are shown, not only MOST lines of each benchmark
    standing  standing(record) is {"contends": True if its row does the same work as the others of its comparison,
              "own": True if its row is from a file of the reader's}
    width     characters of a line; by default those of this terminal
    """
    width = width or shutil.get_terminal_size((100, 24)).columns
    for machine in load.machines_in(
        result, (case for case in result["records"] if case["outcome"] not in ("unsupported", "oom"))
    ):
        names = dict.fromkeys(case["benchmark"] for case in machine.records if case["time_s"])
        for name in names:
            view = views.view_of(machine, name).adding(standing)
            yield from _table(view, width, every or len(view.cases) <= MOST)
        yield from wrap(ABOUT, width) if names else ()


def _table(view: views.View, width: int, every: bool) -> Iterator[str]:
    """Yields the lines of a benchmark's table: all comparisons if `every`, else the largest one of each setting.

    A comparison is the cases of one setting and size that were sampled together.
    """
    of_rows = set(views.NOT_IN_CAPTIONS) | {"impl"}  # the loop adds the axes in which rows of a comparison differ
    for part in view.groups(["comparison"]).values():
        of_rows.update(filter(part.varies, view.axes()))
    of_settings = [name for name in view.axes() if name not in of_rows]
    axes = sorted(of_settings, key=lambda name: (type(view.first[name]) in (int, float), -len(view.values(name))))
    without_sizes = ["section"] + [name for name in axes if type(view.first[name]) not in (int, float)]
    settings = view.ordered(*axes).groups(["comparison"] if every else without_sizes).values()
    parts = [max(part.groups(["comparison"]).values(), key=_size) for part in settings][: None if every else MOST]
    axes = list(filter(view.of([part.first for part in parts]).varies, axes))
    rates = [name for name, field in view.fields.items() if field.unit.endswith("/s") and view.has(name)]
    figures = ["time_s"] + rates[:1] + list(filter(view.has, SHARES))[:1]
    figures += [fields.ERROR.name] * (every and view.has(fields.ERROR.name))
    most = len(view.cases) if every else max(1, MOST // len(parts))
    # For each setting: (its words, its lines).
    groups = [(_words(part, part.first, axes), list(_lines(part, figures, most))) for part in parts]
    yield f"{view.benchmark.replace('_', ' ')}: {sum(len(rows) for _, rows in groups)} of {len(view.cases)} that ran"
    heads = [HEADS.get(name) or words.unit_of(view.fields[name])[0] for name in figures]
    yield from _aligned([("", [["row"] + heads + ["speed", ""]])] + groups, width)
    yield ""


def _size(part: views.View) -> tuple[bool, float]:
    """A key that sorts comparisons by size, told by the time of the fastest row; wholly disturbed ones come first."""
    timed = verdict.undisturbed(part.only("time_s").cases)
    return any(not case["disturbed"] for case in timed), min(map(verdict.time_of, timed), default=0.0)


def _words(part: views.View, case: fields.Record, names: Iterable[str]) -> str:
    """A case's values of these fields, joined by commas; a number has its field's label in front of it."""
    known = [(name, case[name]) for name in names if case[name] is not None]
    return ", ".join(value if isinstance(value, str) else tables.value_head(part, name, value) for name, value in known)


def _lines(part: views.View, figures: Sequence[str], most: int) -> Iterator[list[str]]:
    """Yields the cells of a line for each row, the fastest first: name, figures, speed over another, how it ended.

    part  the cases of one comparison
    most  the most lines; rows of the reader's own are shown in any case

    A row of an earlier state of the code, `ROW@COMMIT`, follows the same row of today, and its speed is over that one.
    """
    names = part.identifying(["impl"])
    contenders = part.only("time_s and contends").cases
    by_id = {case["id"]: case for case in part.cases}
    # By a case's id: the case of today's row, which is itself unless it is of an earlier state.
    today = {name: by_id.get(record.today(case)["id"], case) for name, case in by_id.items()}

    def place(case: fields.Record) -> tuple[object, ...]:
        """A key that sorts by time; at the end disturbed rows, rows that do other work, and rows without a time."""
        current = today[case["id"]]
        return (
            not current["time_s"],
            not current["contends"],
            bool(current["disturbed"]),
            current["time_s"] or 0.0,
            case is not current,
        )

    ranked = sorted(part.cases, key=place)
    for case in ranked[:most] + [case for case in ranked[most:] if today[case["id"]]["own"]]:
        base = today[case["id"]]
        if base is case and case["contends"]:
            rivals = [rival for rival in contenders if rival["impl"] != case["impl"]]
            rivals = [rival for rival in rivals if rival["peer"]] or rivals
            base = min(verdict.undisturbed(rivals), key=verdict.time_of, default=case)
        ratio = None if base is case else verdict.ratio_of(case, base)
        speed = f"{words.number(ratio)} × {base['impl']}" if ratio else ""
        # By rounds one of the two is faster, and by medians the other one.
        if ratio and (ratio < 1) != (case["time_s"] > base["time_s"]):
            speed = f"level with {base['impl']}"
        disturbed = case["disturbed"] or (speed and base["disturbed"])
        ending = "ran" if case["error_ratio"] is None else "disturbed" if disturbed else "right"
        if case["outcome"] != "ok":
            ending = f"{words.MEANINGS[case['outcome']]}: {case['reason']}"
        yield [_words(part, case, names), *(cells.shown(part, x, case) for x in figures), speed, ending]


def _aligned(groups: Sequence[tuple[str, Sequence[Sequence[str]]]], width: int) -> Iterator[str]:
    """Yields aligned lines of at most `width` characters.

    groups  for each setting (its words, the cells of each of its lines); its words are wrapped beside these lines
    """
    columns = zip(*(line for _, rows in groups for line in rows), strict=True)
    row, *wide, _ = (max(map(len, column)) for column in columns)
    free = width - row - sum(wide) - len(wide) - len("    disturbed")  # two gaps of two spaces, and the last column
    first = min(max(NARROW, free), max(len(setting) for setting, _ in groups))
    for setting, rows in groups:
        words = wrap(setting, max(NARROW, first), max_lines=len(rows), placeholder=" …")
        for text, (name, *figures, ending) in zip(words + [""] * len(rows), rows, strict=False):
            aligned = " ".join(map(str.rjust, figures, wide)) + "  "
            line = f"{text.ljust(first)}  {name.ljust(row)} {aligned * any(figures)}"
            outcome, colon, _ = ending.partition(":")
            is_short = len(line + ending) <= width or not colon
            yield f"{line}{ending if is_short else outcome}"[:width].rstrip()
