"""The steps that a layout may name, such as ["cut", "N{tokens}", "{section}"]: STEPS has the function of each name.

A layout is plain data in a result file that says how the report draws a benchmark (layout.py, which calls `applied`).
`applied` gives each function a view (some cases of the benchmark, views.py) and the arguments that the layout holds. A
function returns or yields views, to which the next step is applied, or tables and plots (None: there is nothing to
draw). To add a step, write a function here below `@step`; a step for a single benchmark goes into special.py. Arguments
come from result files, so they are JSON: fields are given by name, tests and values as texts that
`lmsys.reports.expressions` evaluates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any

from lmsys.bench.fields import Field, Record
from lmsys.reports import cells, expressions, items, load, plots, tables, views, words
from lmsys.values import choice

Steps = Sequence[Any]


def each_metric(draw: Any) -> Any:
    """A step that draws each of several metrics by `draw`, a function that draws one metric."""

    def drawn(view: views.View, metrics: Sequence[str], *args: Any, **options: Any) -> items.Items:
        return [draw(view, metric, *args, **options) for metric in view.chosen(metrics)]

    return drawn


# The steps of layouts, by the name that layouts use. A step that stands in this file gets its entry by the decorator
# `step`; one of another module is entered here.
STEPS: dict[str, Any] = {
    "bars": each_metric(plots.bars),
    "checked": views.View.checked,
    "cut": views.View.cut,
    "endings": tables.endings,
    "heat_map": plots.heat_map,
    "labelled": views.View.labelled,
    "lines": each_metric(plots.lines),
    "listing": tables.listing,
    "means": tables.means,
    "named": views.View.named,
    "only": views.View.only,
    "ordered": views.View.ordered,
    "over": cells.compared,
    "pivot": each_metric(tables.pivot),
    "quiet": views.View.quiet,
    "read_as": views.View.read_as,
    "said_also": views.View.remarked,
    "same_bits": tables.same_bits,
    "silent": views.View.silent,
    "styled": views.View.styled,
    "unstyled": partial(replace, styles={}),  # a view without colours and markers
}


def step(function: Any) -> Any:
    """Decorator: enters the function into STEPS by its name."""
    STEPS[function.__name__] = function
    return function


def applied(view: views.View, steps: Steps) -> list[Any]:
    """Applies one step, or several one after another, and returns the results of the last one.

    Each step is applied to every result of the step before. A mapping at the end of a step's arguments has its keyword
    arguments. ValueError for a name that is not in STEPS.
    """
    results: list[Any] = [view]
    for name, *args in [steps] if steps and isinstance(steps[0], str) else steps:
        options = args.pop() if args and isinstance(args[-1], Mapping) else {}
        inputs, results = results, []
        for part in inputs:
            sections = ", ".join(dict.fromkeys(map(str, part.column("section"))))
            with load.drawn_by_layout(view.benchmark, f", section {sections}, step {name!r}", known=part.fields):
                result = STEPS[choice(name, STEPS)](part, *args, **options)
                results += result if isinstance(result, list | Iterator) else [result]
    return results


# Steps that choose cases


@step
def if_varies(view: views.View, name: str, varies: bool = True) -> list[views.View]:
    """Gives the view itself if the field varies in its cases, or with `varies=False` if it does not; else no view."""
    return [view] * bool(view.cases and view.varies(name) == varies)


@step
def where(view: views.View, test: str, steps: Steps) -> list[views.View]:
    """Applies more steps where any case passes the test; else the view stays as it is."""
    return applied(view, steps if view.only(test).cases else ())


@step
def with_any(view: views.View, by: str, name: str) -> views.View:
    """The cases that share their value of `by` with a case that has a value of the field `name`."""
    return view.having(by, view.only(f"{name} is not None").column(by))


@step
def one_of_each(view: views.View, names: Sequence[str], most: str = "") -> views.View:
    """One case for each combination of values of these fields: the first, or that with the largest value of `most`."""
    return view.of(
        [max(part.cases, key=itemgetter(most)) if most else part.first for part in view.groups(names).values()]
    )


@step
def picked(view: views.View, place: int, stem: str, heading: str) -> list[views.View]:
    """One of the parts that `View.cut` makes of `stem` and `heading`: `place` 0 is the first, -1 the last."""
    return list(view.cut(stem, heading))[place:][:1]


@step
def facets(
    view: views.View, names: Sequence[str], others: Sequence[str] = (), stem: bool = True
) -> Iterator[views.View]:
    """Splits the view by these fields, and by each axis that is needed to tell cases apart besides them and `others`.

    File names end in the values of these fields; with `stem` the name of a field is in front of its value.
    """
    axes = view.identifying(view.chosen(names), others)
    return view.cut(
        "-".join(f"{name * stem}{{{name}}}" for name in axes),
        ", ".join(f"{name} {{{name}}}" for name in axes),
        tail=True,
    )


@step
def last_of(view: views.View, name: str) -> views.View:
    """The cases that have the last value, in reading order, of a field."""
    return view.having(name, view.values(name)[-1:])


# Steps that add cases and fields


@step
def unfolded(view: views.View, name: str, declared: Sequence[Mapping[str, Any]]) -> views.View:
    """Puts several cases in place of each: one for each entry of the list in its field `name`.

    declared  the fields of the entries, as in `fields`
    """
    return fields(view.expanded(lambda case: case[name] or ()), declared)


@step
def matched(view: views.View, name: str, axis: str, of: str, same: Sequence[str]) -> views.View:
    """Adds the field `name`: another case, whose value on `axis` is this case's value of the field `of`.

    The two cases have the same values on the axes `same`. The field is None if there is no such case.
    """
    known, names = view.index([axis] + list(same)), [of] + list(same)
    return view.adding(lambda case: {name: known.get(views.key_of(case, names))})


@step
def fields(view: views.View, declared: Sequence[Mapping[str, Any]]) -> views.View:
    """Adds fields, each declared by a mapping of `Field`'s attributes (`lmsys.bench.fields`); `of` is an expression.

    The expression gives the field's value in each case. In `label` and `about`, a name in braces stands for the first
    case's value of that field.
    """
    for field in declared:
        texts = {key: words.filled(field.get(key, ""), view.first) for key in ("label", "about")}
        of = {"of": view.expression(field["of"])} if "of" in field else {}  # a function of the case
        view = view.with_fields([Field(**dict(field) | texts | of)])
    return view


@step
def computed(view: views.View, **texts: str) -> views.View:
    """Replaces the values of declared fields by those of expressions, each given as FIELD="expression"."""
    for name, text in texts.items():
        view = view.with_fields([view.fields[name].called(of=view.expression(text))])
    return view


@step
def defaulted(view: views.View, name: str, plain: str, order: Sequence[str] = (), quiet: bool = True) -> views.View:
    """Fills in the value `plain` of an axis that older files lack.

    In reading order (the order in tables and legends) `plain` comes first, then the values in `order`, then the others.
    With `quiet`, captions leave the axis out if `plain` is its only value.
    """
    view = view.with_fields([Field(name, role="axis", of=lambda case: case.get(name) or plain)])
    values = view.values(name)
    first = list(filter(values.__contains__, [plain] + list(order)))
    view = view.read_as(name, {value: value for value in first + values})
    return view.quiet(name) if quiet and values == [plain] else view


@step
def worded(view: views.View, name: str, by: Sequence[str] = (), of: str = "") -> views.View:
    """Sets the words for a field's values, and their reading order.

    by  the fields by whose reading order the values are sorted; by default the field itself
    of  an expression for the word; by default the word stays
    """
    values = dict.fromkeys(view.ordered(*(by or [name])).column(name))
    for value in values:
        values[value] = expressions.value_of(of, {name: value}) if of else view.text(name, value)
    return view.read_as(name, values)


@step
def traits(view: views.View, row: str, trait: str) -> views.View:
    """Adds the field "{row}_{trait}": a trait of the table's row that the field `row` names."""
    table = view.table(row)
    return view.with_fields([Field(f"{row}_{trait}", role="detail", of=lambda case: table[case[row]].get(trait))])


@step
def beside_baseline(view: views.View, axis: str, same: Sequence[str], base: str = "") -> views.View:
    """Adds the field `base`, the row to compare with, and `beside`, the case of that row (`cells.beside`).

    axis, same  as in `cells.beside`
    base        the row; by default the one with the trait `baseline` in the table of the field `axis`
    """
    base = base or next((name for name, row in view.table(axis).items() if row.get("baseline")), "")
    return cells.beside(view, base, axis, same).adding({"base": base})


@step
def points(view: views.View, step: str, value: str, values: str, at: str = "") -> views.View:
    """Puts a case in place of each point of a curve, with its coordinates in the fields `step` and `value`.

    The field `values` of a case has the list of the curve's heights, and the field `at` the list of its places, by
    default 1, 2, 3, ...
    """

    def points_of(case: Record) -> list[Record]:
        places = (case[at] or ()) if at else count(1)
        return [{step: x, value: y} for x, y in zip(places, case[values] or (), strict=False)]

    return view.expanded(points_of)


@step
def melted(view: views.View, what: str, value: str, **names: str) -> views.View:
    """Puts several cases in place of each: one for each FIELD=word of `names`.

    what   the field that gets the word
    value  the field that gets the value of FIELD
    """
    return view.expanded(lambda case: [{what: word, value: case[name]} for name, word in names.items()])


# Steps that make tables and plots


@step
def number_lines(view: views.View, metrics: Sequence[str]) -> items.Items:
    """Plots each metric against the axis with the most values, of those whose values are all numbers.

    There is a plot for each combination of values of the other axes; in it each row is a line. Nothing is drawn if no
    axis has only numbers.
    """
    numbers = [name for name in view.chosen(["@?", "-impl"]) if set(map(type, view.values(name))) <= {int, float}]
    if not numbers:
        return []
    axis = max(numbers, key=lambda name: len(view.values(name)))
    parts = list(facets(view, ["@?", "-impl", f"-{axis}"], [axis, "impl"], stem=False))
    return [plots.lines(part, metric, axis) for metric in view.chosen(metrics) for part in parts]


@step
def over_bases(
    view: views.View,
    keys: Sequence[str],
    title: str,
    same: Sequence[str] = (),
    otherwise: str = "",
    shares: bool = False,
) -> items.Table | None:
    """A table of all metrics and of the speedups over each baseline.

    keys       fields of the first columns
    same       as in `cells.beside`
    otherwise  as in `cells.baselines_of`
    shares     True: the table also has the peak memory as a share of each baseline's
    """
    metrics, bases = view.metrics(), cells.baselines_of(view, otherwise)
    for base in bases:
        view = cells.compared(view, base, name=f"speedup_over_{base}", same=same)
        share = {"name": f"peak_of_{base}", "label": f"peak, share of {view.text('impl', base)}", "shown": "%"}
        view = fields(view, [share | {"of": 'peak_bytes / beside["peak_bytes"]'}])
        metrics += [f"peak_of_{base}"] * shares
    return tables.listing(
        view,
        keys,
        metrics[:1] + [f"speedup_over_{base}" for base in bases] + metrics[1:],  # speedups follow the first metric
        word="",
        title=title,
    )


@step
def parts_summary(view: views.View, parts: Sequence[Steps], word: str, title: str) -> items.Table | None:
    """A table of geometric mean speedups: a line for each row, a column for each part of the view.

    parts  lists of steps, each of which makes one part or several, with speedups (step "over")
    word   ends the file's name
    title  may have {bases} in it: the rows that the speedups are relative to
    """
    compared_parts: list[views.View] = list(filter(cells.is_compared, each(view, *parts)))
    bases = list(dict.fromkeys(part.text("impl", part.base) for part in compared_parts))
    cases: list[Record] = []
    for part in compared_parts:
        head = words.sentence(part.heading) + f", over {part.text('impl', part.base)}" * (len(bases) > 1)
        cases += part.adding({"part": head}).cases
    return tables.means(
        view.of(cases), row="impl", column="part", word=word, title=title.replace("{bases}", " or ".join(bases))
    )


@step
def either(view: views.View, *items: Steps) -> items.Items:
    """The tables and plots of the first item that makes any. An item is one step, or a list of steps."""
    return next(filter(any, map(partial(applied, view), items)), [])


@step
def each(view: views.View, *items: Steps) -> list[Any]:
    """All views, tables or plots that these items make; items are as in `either`."""
    return sum(map(partial(applied, view), items), [])


@step
def if_drawn(view: views.View, first: Steps, then: Steps) -> items.Items:
    """The tables and plots of the item `then`, if the item `first` makes any."""
    return applied(view, then) if any(applied(view, first)) else []
