"""Tables of cases: their cells with outcomes and footnotes, as Markdown and as CSV; and the blocks of a page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from lmsys.bench import fields, verdict
from lmsys.reports import cells, expressions, items, load, views, words

ENDINGS = ("timed", "verified, untimed", *words.MEANINGS.values())
LEFT_OUT = "Left out, as no case of it could run"
Place = tuple[int, int]  # of a cell: row and column
SPREAD = ("mean_s", "std_s", "p20_s", "p80_s", "rounds")  # stand beside a time in its CSV


def data_of(view: views.View, *names: str) -> list[fields.Record]:
    """A line for each case: its axes, how it ended, and these fields."""
    declared = replace(view, fields=views.Fields(view.machine.fields[view.benchmark])).axes()
    axes = [name for name in declared if name not in ("label", "peer")]
    return [{name: case.get(name) for name in (*axes, "outcome", *names)} for case in view.cases]


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
    field, is_speedup = view.fields[metric], metric == cells.SPEEDUP
    if not (cells.is_compared(view) if is_speedup else view.has(metric) or metric == "time_s"):
        return None
    rows = view.telling(view.chosen(rows), columns, inside) or ["section"]
    cases = view.by(*rows, columns, *[inside] * bool(inside))
    view, left_out = _with_something(view, columns)
    heads, notes, lines = view.values(columns), cells.Notes(), list[list[str]]()
    inner = [[value] for value in view.values(inside)] if inside else [[]]
    best, details = dict[Place, fields.Record](), dict[Place, str]()
    compares = words.is_clocked(field) and not is_speedup and "impl" in (columns, inside)
    for key in view.ordered(*rows).distinct(*rows):
        groups = [[cases.get((*key, head, *value)) for value in inner] for head in heads]
        line = list(chain.from_iterable(groups))
        if len(inner) == 1 and columns == "impl":
            best |= {(len(lines), len(rows) + at): case for at, case in _best(view, field, line)}
        if len(inner) == 1 and words.is_clocked(field):
            details |= {(len(lines), len(rows) + at): cells.detail(view, case) for at, case in enumerate(line)}
        beside = line if compares else []
        texts = [_group(view, metric, group, group if inside == "impl" else beside, notes) for group in groups]
        lines.append([*map(view.text, rows, key), *texts])
    footnotes = cells.below(notes, lines)
    if is_speedup and columns == "impl":
        footnotes += [f"Blank: not sampled together with {view.text('impl', view.base)}."] * ("" in chain(*lines))
        lines.append(["geometric mean (cells)", *[""] * (len(rows) - 1), *(_mean(view, head) for head in heads)])
    several = " / ".join(view.text(inside, value) for (value,) in inner) if len(inner) > 1 else ""
    return items.Table(
        name=view.file(word or words.FILES.get(metric, metric)),
        title=titled(words.head_of(field) + f" ({several})" * bool(several), view),
        caption=view.caption(about or about_of(field), words.is_clocked(field))
        + f"\nIn each cell: {several}." * bool(several),
        columns=[*view.labels(rows), *(value_head(view, columns, head) for head in heads)],
        rows=lines,
        data=data_of(view, *(data or (metric, *SPREAD * (metric in ("time_s", "mean_s"))))),
        notes=footnotes + left_out,
        keys=len(rows),
        source=view.machine.about(view.cases),
        best=frozenset(best),
        details=details,
        answer=_answer(view, field, list(best.values()), len(lines)),
    )


def _mean(view: views.View, row: str) -> str:
    """The geometric mean of a row's speedups."""
    compared = [case for case in view.cases if case["impl"] == row and case[cells.SPEEDUP]]
    return cells.mean_text(case[cells.SPEEDUP] for case in verdict.undisturbed(compared))


def _answer(view: views.View, field: fields.Field | None, winners: Sequence[fields.Record], lines: int) -> str:
    """Which row is the best in most lines of a table, and its figures there; of ours alone the best may be slow."""
    if not (winners and field) or view.machine.layouts.get(view.benchmark) and not view.has_any("peer"):
        return ""
    ((row, count),) = Counter(case["impl"] for case in winners).most_common(1)
    cases = sorted((case for case in winners if case["impl"] == row), key=lambda case: case[field.name])
    figures = words.span([words.number(words.scaled(field, case[field.name])) for case in (cases[0], cases[-1])])
    answer = f"{words.inside_a_sentence(words.label_of(field).partition(',')[0])}: {view.text('impl', row)}"
    answer += f" in {count} of {lines} lines" * (lines > 1)
    return f"best {answer}, {figures} {words.unit_of(field)[0]}" + ", disturbed" * any(
        case.get("disturbed") for case in cases
    )


def _with_something(view: views.View, columns: str) -> tuple[views.View, list[str]]:
    """The cases without columns that say of every cell that it is not supported, and a note on those."""
    ended = fields.grouped((case[columns], case["outcome"]) for case in view.cases)
    without = [value for value in view.values(columns) if set(ended[value]) == {"unsupported"}]
    if columns != "impl" or len(without) in (0, len(ended)):
        return view, []
    names = ", ".join(view.text(columns, value) for value in without)
    return view.only(lambda case: case[columns] not in without), [f"{LEFT_OUT}: {names}. “Not run here” says why."]


def _best(
    view: views.View, field: fields.Field, line: Sequence[fields.Record | None]
) -> list[tuple[int, fields.Record]]:
    """The place and case of the best value among those that were sampled together, as `_group` marks the others.

    None where no value is better than another. Cases that do not what the benchmark asks for are no rivals of others.
    """
    timed = [case for case in line if case and case["time_s"] and case.get(field.name) is not None]
    base = _base(view, timed)
    together = [case for case in timed if base and case["comparison"] == base["comparison"]]
    if len(together) < 2 or field.unit not in ("s", "B") and not _more_is_better(field):
        return []
    contenders = contending(view.machine, together)
    best = (max if _more_is_better(field) else min)(case[field.name] for case in verdict.undisturbed(contenders))
    return [(at, case) for at, case in enumerate(line) if case and case in contenders and case[field.name] == best]


def contending(machine: load.Machine, cases: Sequence[fields.Record]) -> Sequence[fields.Record]:
    """The cases that do what their benchmark asks who is fastest in; all of them where none does."""
    tests = {name: layout.get("fastest", {}).get("contends", "True") for name, layout in machine.layouts.items()}
    return [case for case in cases if expressions.value_of(tests.get(case["benchmark"], "True"), case)] or cases


def _more_is_better(field: fields.Field) -> bool:
    return field.unit.endswith("/s") or field.name in (cells.SPEEDUP, "mfu", *cells.CEILINGS)


def value_head(view: views.View, name: str, value: Any) -> str:
    """The head of a column: a number says of what it is, and so does a yes or no."""
    is_bare = isinstance(value, int | float) and value not in view.words.get(name, ())
    return f"{words.label_of(view.fields[name])} " * is_bare + view.text(name, value)


def _group(
    view: views.View,
    metric: str,
    group: Sequence[fields.Record | None],
    beside: Sequence[fields.Record | None],
    notes: cells.Notes,
) -> str:
    """One cell, of one case or of several. Marked is what was not sampled together with those beside it."""
    timed = [case for case in beside if case and case["time_s"] is not None]
    base = _base(view, timed)
    texts = [cells.cell(view, metric, case, notes) for case in group]
    for place, case in enumerate(group):
        if base and case in timed and case["comparison"] != base["comparison"]:
            run = f"another run than {view.text('impl', base['impl'])}"
            texts[place] += cells.mark(notes, f"measured in {run}: not comparable within a few per cent")
    if len(group) == 1:
        return texts[0]
    return " / ".join(text or "·" for text in texts) if any(group) else cells.NOT_RUN


def _base(view: views.View, timed: Sequence[fields.Record]) -> fields.Record | None:
    """The case that others have to be sampled with: that of the base, else the first."""
    return next((case for case in timed if case["impl"] == view.base), timed[0] if timed else None)


def about_of(field: fields.Field) -> str:
    """A field in words, with its unit."""
    unit, _ = words.unit_of(field)
    return (field.about or words.sentence(words.label_of(field))) + (f", {unit}" if unit else "")


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
    shown = [view.fields[name] for name in metrics]
    rows, details = list[list[str]](), dict[Place, str]()
    clocked = [at for at, field in enumerate(shown, len(keys)) if words.is_clocked(field)]
    for case in view.cases:
        details |= dict.fromkeys([(len(rows), at) for at in clocked], cells.detail(view, case))
        figures = [cells.cell(view, name, case, notes, ending=name == metrics[0]) for name in metrics]
        rows.append([*map(view.of([case]).text, keys, views.key_of(case, keys)), *figures])
    best = dict[Place, fields.Record]()
    is_single = len(view.distinct("id")) == len(view.cases)  # else a case has several lines
    for (comparison,) in view.distinct("comparison") if is_single else ():
        line = [case if case["comparison"] == comparison else None for case in view.cases]
        for column, field in enumerate(shown, len(keys)):
            best |= {(row, column): case for row, case in _best(view, field, line)}
    abouts = [_told(words.sentence(words.label_of(field)), field.about) for field in shown if field.about]
    return items.Table(
        name=view.file(view.filled(word)),
        title=titled(view.filled(title), view),
        caption=view.caption(about or ". ".join(abouts), bool(clocked)),
        columns=[*view.labels(keys), *map(words.head_of, shown)],
        rows=rows,
        data=data_of(view, *(data or metrics), *SPREAD * bool({"time_s", "mean_s"} & {*metrics})),
        notes=cells.below(notes, rows),
        keys=len(keys),
        source=view.machine.about(view.cases),
        best=frozenset(best),
        details=details,
        answer=_answer(
            view,
            next(filter(words.is_clocked, shown), None),
            [case for (_, column), case in best.items() if column in clocked[:1]],
            len(view.distinct("comparison")),
        ),
    )


def _told(label: str, about: str) -> str:
    return about if about.startswith(f"{label}:") else f"{label}: {words.inside_a_sentence(about)}"


def endings(view: views.View, *keys: str, word: str, title: str) -> items.Table:
    """How the cases of each row ended."""
    keys = tuple(view.chosen(keys))
    heads, data, rows = ("cases", *ENDINGS), list[fields.Record](), list[list[str]]()
    for key, part in view.groups(*keys).items():
        counts = Counter(words.MEANINGS.get(case["outcome"], ENDINGS[case["time_s"] is None]) for case in part.cases)
        counts["cases"] = len(part.cases)
        data.append(dict(zip(keys, key, strict=True)) | {head: counts[head] for head in heads})
        rows.append([*map(part.text, keys, key), *(f"{counts[head]:,}" if counts[head] else "" for head in heads)])
    return items.Table(
        name=view.file(word),
        title=title,
        caption="How the cases ended.",
        source=view.machine.about(view.cases),
        columns=[*view.labels(keys), *heads],
        rows=rows,
        data=data,
        keys=len(keys),
    )
