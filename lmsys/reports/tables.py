"""Tables of cases: their cells with outcomes and footnotes, as Markdown and as CSV; and the blocks of a page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from lmsys.bench.fields import Field, Record, grouped
from lmsys.bench.verdict import undisturbed
from lmsys.reports import cells, expressions, items, load, views
from lmsys.reports.words import (
    FILES,
    MEANINGS,
    head_of,
    inside_a_sentence,
    is_clocked,
    label_of,
    number,
    scaled,
    sentence,
    span,
    unit_of,
)

ENDINGS = ("timed", "verified, untimed", *MEANINGS.values())
LEFT_OUT = "Left out, as no case of it could run"
SPREAD = ("mean_s", "std_s", "p20_s", "p80_s", "rounds")  # stand beside a time in its CSV


def data_of(view: views.View, *names: str) -> list[Record]:
    """A line for each case: its axes, how it ended, and these fields."""
    axes = [
        one.name
        for one in view.machine.fields[view.benchmark].values()
        if one.role == "axis" and one.name not in ("label", "peer") and view.has(one.name)
    ]
    fields = dict.fromkeys([*axes, "outcome", *names])
    return [{name: case.get(name) for name in fields} for case in view.cases]


def pivot(
    view: views.View,
    metric: str,
    rows: Sequence[str],
    columns: str = "impl",
    inside: str = "",
    word: str = "",
    about: str = "",
    data: Sequence[str] = (),
) -> items.Table | None:
    """A metric; rows: the values of some fields, columns: those of another, in a cell: those of `inside`, as a / b.

    An axis that is none of these, but tells cases apart, is one more field of the rows. None without a number to show,
    unless it is the table of times, which says how cases ended. `data` are the fields of the CSV where the metric is
    text.
    """
    one = view.fields[metric]
    if not (cells.is_compared(view) if metric == cells.SPEEDUP else view.has(metric) or metric == "time_s"):
        return None
    rows = view.telling(view.chosen(rows), columns, inside) or ["section"]
    cases = {(*(case[name] for name in rows), case[columns], case.get(inside)): case for case in view.cases}
    view, left_out = _with_something(view, columns)
    heads, inner, notes = view.values(columns), view.values(inside) if inside else [None], cells.Notes()
    lines: list[list[str]] = []
    best: dict[tuple[int, int], Record] = {}
    details: dict[tuple[int, int], str] = {}
    compares = is_clocked(one) and metric != cells.SPEEDUP and "impl" in (columns, inside)
    for key in view.ordered(*rows).distinct(*rows):
        found = [[cases.get((*key, head, value)) for value in inner] for head in heads]
        line = [case for group in found for case in group] if compares else []
        texts = [_group(view, metric, group, group if inside == "impl" else line, notes) for group in found]
        if columns == "impl" and len(inner) == 1:
            firsts = _best(view, one, [group[0] for group in found])
            best |= {(len(lines), len(rows) + at): case for at, case in firsts}
        if is_clocked(one) and len(inner) == 1:
            details |= {(len(lines), len(rows) + at): cells.detail(view, group[0]) for at, group in enumerate(found)}
        lines.append([*map(view.text, rows, key), *texts])
    blank = []
    if metric == cells.SPEEDUP and columns == "impl":
        blank = [f"Blank: not sampled together with {view.text('impl', view.base)}."] * any(
            "" in line for line in lines
        )
        of_heads = [
            undisturbed([case for case in view.cases if case[columns] == head and case[cells.SPEEDUP]])
            for head in heads
        ]
        means = [cells.mean_text(case[cells.SPEEDUP] for case in cases) for cases in of_heads]
        lines.append(["geometric mean (cells)", *[""] * (len(rows) - 1), *means])
    several = " / ".join(view.text(inside, value) for value in inner) if len(inner) > 1 else ""
    inside_a_cell = f"\nIn each cell: {several}." if several else ""
    return items.Table(
        name=view.file(word or FILES.get(metric, metric)),
        title=titled(head_of(one) + (f" ({several})" if several else ""), view),
        caption=view.caption(about or about_of(one), is_clocked(one)) + inside_a_cell,
        columns=[*(label_of(view.fields[name]) for name in rows), *(value_head(view, columns, head) for head in heads)],
        rows=lines,
        data=data_of(view, *(data or (metric, *(SPREAD if metric in ("time_s", "mean_s") else ())))),
        notes=[*cells.below(notes, lines), *blank, *left_out],
        keys=len(rows),
        source=view.machine.about(view.cases),
        best=frozenset(best),
        details=details,
        answer=_answer(view, one, list(best.values()), len(lines)),
    )


def _answer(view: views.View, one: Field, winners: Sequence[Record], lines: int) -> str:
    """Which row is the best in most lines of a table, and its figures there; of ours alone the best may be slow."""
    if not winners or view.machine.layouts.get(view.benchmark) and not view.has_any("peer"):
        return ""
    ((row, count),) = Counter(case["impl"] for case in winners).most_common(1)
    cases = sorted((case for case in winners if case["impl"] == row), key=itemgetter(one.name))
    figures = span([number(scaled(one, case[one.name])) for case in (cases[0], cases[-1])])
    disturbed = any(case.get("disturbed") for case in cases)
    words = f"{inside_a_sentence(label_of(one).partition(',')[0])}: {view.text('impl', row)}"
    where = f" in {count} of {lines} lines" * (lines > 1)
    return f"best {words}{where}, {figures} {unit_of(one)[0]}" + ", disturbed" * disturbed


def _with_something(view: views.View, columns: str) -> tuple[views.View, list[str]]:
    """The cases without columns that say of every cell that it is not supported, and a note on those."""
    ended = grouped((case[columns], case["outcome"]) for case in view.cases)
    without = [value for value in view.values(columns) if set(ended[value]) == {"unsupported"}]
    if columns != "impl" or len(without) in (0, len(ended)):
        return view, []
    names = ", ".join(view.text(columns, value) for value in without)
    return view.only(lambda case: case[columns] not in without), [f"{LEFT_OUT}: {names}. “Not run here” says why."]


def _best(view: views.View, one: Field, line: Sequence[Record | None]) -> list[tuple[int, Record]]:
    """The place and case of the best value among those that were sampled together, as `_group` marks the others.

    None where no value is better than another. Cases that do not what the benchmark asks for are no rivals of others.
    """
    timed = [(at, case) for at, case in enumerate(line) if case and case["time_s"] and case.get(one.name) is not None]
    against = _against(view, [case for _, case in timed])
    together = [(at, case) for at, case in timed if against and case["comparison"] == against["comparison"]]
    if len(together) < 2 or one.unit not in ("s", "B") and not _more_is_better(one):
        return []
    contenders = contending(view.machine, [case for _, case in together])
    best = (max if _more_is_better(one) else min)(case[one.name] for case in undisturbed(contenders))
    return [(at, case) for at, case in together if case[one.name] == best and case in contenders]


def contending(machine: load.Machine, cases: Sequence[Record]) -> Sequence[Record]:
    """The cases that do what their benchmark asks who is fastest in; all of them where none does."""
    tests = {name: layout.get("fastest", {}).get("contends", "True") for name, layout in machine.layouts.items()}
    return [case for case in cases if expressions.value_of(tests.get(case["benchmark"], "True"), case)] or cases


def _more_is_better(one: Field) -> bool:
    return one.unit.endswith("/s") or one.name in (cells.SPEEDUP, "mfu", *cells.CEILINGS)


def value_head(view: views.View, name: str, value: Any) -> str:
    """The head of a column: a number says of what it is, and so does a yes or no."""
    is_bare = isinstance(value, int | float) and value not in view.words.get(name, ())
    return f"{label_of(view.fields[name])} " * is_bare + view.text(name, value)


def _group(
    view: views.View, metric: str, group: Sequence[Record | None], beside: Sequence[Record | None], notes: cells.Notes
) -> str:
    """One cell, of one case or of several. Marked is what was not sampled together with those beside it."""
    timed = [case for case in beside if case and case["time_s"] is not None]
    against = _against(view, timed)
    texts = [cells.cell(view, metric, case, notes) for case in group]
    for place, case in enumerate(group):
        if case and against and case in timed and case["comparison"] != against["comparison"]:
            other = view.text("impl", against["impl"])
            texts[place] += cells.mark(
                notes, f"measured in another run than {other}: not comparable within a few per cent"
            )
    if len(group) > 1 and not any(group):
        return cells.NOT_RUN
    return " / ".join(text or "·" for text in texts) if len(group) > 1 else texts[0]


def _against(view: views.View, timed: Sequence[Record]) -> Record | None:
    """The case that others have to be sampled with: the base, else the first."""
    return next((case for case in timed if case["impl"] == view.base), timed[0] if timed else None)


def about_of(field: Field) -> str:
    """A field in words, with its unit."""
    unit, _ = unit_of(field)
    return (field.about or sentence(label_of(field))) + (f", {unit}" if unit else "")


def titled(head: str, view: views.View) -> str:
    return f"{head} · {view.title}" if view.heading else head


def listing(
    view: views.View,
    keys: Sequence[str],
    metrics: Sequence[str],
    word: str,
    title: str,
    about: str = "",
    data: Sequence[str] = (),
) -> items.Table | None:
    """Rows: cases; columns: what tells them apart, then metrics, of which the first says how a case ended."""
    if not view.cases:
        return None
    keys, metrics, notes = view.telling(view.chosen(keys)), view.chosen(metrics), cells.Notes()
    fields = [view.fields[name] for name in metrics]
    rows: list[list[str]] = []
    details: dict[tuple[int, int], str] = {}
    clocked = [len(keys) + at for at, one in enumerate(fields) if is_clocked(one)]
    for case in view.cases:
        details |= dict.fromkeys([(len(rows), at) for at in clocked], cells.detail(view, case))
        found = [cells.cell(view, name, case, notes, ending=name == metrics[0]) for name in metrics]
        rows.append([*replace(view, cases=[case]).constants(keys).values(), *found])
    best: dict[tuple[int, int], Record] = {}
    single = len({case["id"] for case in view.cases}) == len(view.cases)  # else a case has several lines
    for rivals in view.groups("comparison") if single else ():
        line = [case if case["comparison"] == rivals[0] else None for case in view.cases]
        for at, one in enumerate(fields):
            best |= {(row, len(keys) + at): case for row, case in _best(view, one, line)}
    winners = [case for (_, at), case in best.items() if at in clocked[:1]]
    return items.Table(
        name=view.file(view.filled(word)),
        title=titled(view.filled(title), view),
        caption=view.caption(
            about or ". ".join(_told(sentence(label_of(one)), one.about) for one in fields if one.about),
            any(map(is_clocked, fields)),
        ),
        columns=[*(label_of(view.fields[name]) for name in keys), *map(head_of, fields)],
        rows=rows,
        data=data_of(view, *(data or metrics), *(SPREAD if {"time_s", "mean_s"} & {*metrics} else ())),
        notes=cells.below(notes, rows),
        keys=len(keys),
        source=view.machine.about(view.cases),
        best=frozenset(best),
        details=details,
        answer=_answer(view, fields[clocked[0] - len(keys)], winners, len(view.distinct("comparison")))
        if winners
        else "",
    )


def _told(label: str, about: str) -> str:
    return about if about.startswith(f"{label}:") else f"{label}: {inside_a_sentence(about)}"


def endings(view: views.View, *keys: str, word: str, title: str) -> items.Table:
    """How the cases of each row ended."""
    keys = tuple(view.chosen(keys))
    counts, data, rows = ("cases", *ENDINGS), [], []
    for key, own in view.groups(*keys).items():
        found = {"cases": len(own.cases), **Counter(map(_ending, own.cases))}
        data.append({**dict(zip(keys, key, strict=True)), **{name: found.get(name, 0) for name in counts}})
        rows.append([*map(own.text, keys, key), *(f"{found[name]:,}" if name in found else "" for name in counts)])
    return items.Table(
        name=view.file(word),
        title=title,
        caption="How the cases ended.",
        source=view.machine.about(view.cases),
        columns=[*(label_of(view.fields[key]) for key in keys), *counts],
        rows=rows,
        data=data,
        keys=len(keys),
    )


def _ending(case: Record) -> str:
    return {**MEANINGS, "ok": ENDINGS[case["time_s"] is None]}[case["outcome"]]
