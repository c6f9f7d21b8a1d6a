"""The steps of layouts: each makes views of a view, or draws tables and plots (`lmsys.reports.layout`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any

from lmsys.bench.fields import Field, Record
from lmsys.reports import cells, expressions, items, plots, tables, versus, views, words
from lmsys.values import choice

Steps = Sequence[Any]
STEPS: dict[str, Any] = {
    "checked": views.View.checked,
    "cut": views.View.cut,
    "endings": tables.endings,
    "heat_map": plots.heat_map,
    "labelled": views.View.labelled,
    "listing": tables.listing,
    "means": versus.means,
    "named": views.View.named,
    "only": views.View.only,
    "ordered": views.View.ordered,
    "quiet": views.View.quiet,
    "read_as": views.View.read_as,
    "rivals": versus.rivals,
    "said_also": views.View.remarked,
    "same_bits": versus.same_bits,
    "silent": views.View.silent,
    "styled": views.View.styled,
    "unstyled": partial(replace, styles={}),
}


def step(function: Any) -> Any:
    """Declares a step by the name of its function."""
    STEPS[function.__name__] = function
    return function


def figures(view: views.View, item: Steps) -> items.Items:
    """The tables and plots of an item: a list of steps, or one step alone."""
    return applied(view, [item] if isinstance(item[0], str) else item)


def applied(view: views.View, steps: Steps) -> list[Any]:
    """The result of steps that are applied to a view, one after another."""
    results: list[Any] = [view]
    for name, *args in steps:
        step = STEPS[choice(name, STEPS, f"a step {name!r} of the layout of {view.benchmark!r}: ")]
        options = args.pop() if args and isinstance(args[-1], Mapping) else {}
        inputs, results = results, []
        for part in inputs:
            result = step(part, *args, **options)
            results += result if isinstance(result, list) else [result]
    return results


# Steps that choose cases


@step
def if_varies(view: views.View, name: str, varies: bool = True) -> list[views.View]:
    """The view, if a field varies in it, or if it does not; else none."""
    return [view] * bool(view.cases and view.varies(name) == varies)


@step
def where(view: views.View, test: str, steps: Steps) -> list[views.View]:
    """Takes more steps where a case passes the test."""
    return applied(view, steps if view.only(test).cases else ())


@step
def with_any(view: views.View, by: str, name: str) -> views.View:
    """The cases of those values of `by` of which any case has a value of a field."""
    return view.having(by, view.only(f"{name} is not None").column(by))


@step
def one_of_each(view: views.View, names: Sequence[str], most: str = "") -> views.View:
    """The first case of each group by these fields, or that with the most of a field."""
    groups = view.groups(names).values()
    return view.of([max(part.cases, key=itemgetter(most)) if most else part.first for part in groups])


@step
def picked(view: views.View, place: int, stem: str, heading: str) -> list[views.View]:
    """One of the parts that `View.cut` makes: the first is 0, the last -1."""
    return view.cut(stem, heading)[place:][:1]


@step
def facets(view: views.View, names: Sequence[str], others: Sequence[str] = (), stem: bool = True) -> list[views.View]:
    """Parts by these fields, and by axes that tell apart what the others do not; `stem`: files say their names."""
    axes = view.identifying(view.chosen(names), others)
    ends = [f"{name * stem}{{{name}}}" for name in axes]
    return view.cut("-".join(ends), ", ".join(f"{name} {{{name}}}" for name in axes), tail=True)


@step
def last_of(view: views.View, name: str) -> views.View:
    """The cases with the last value of a field, in reading order."""
    return view.having(name, view.values(name)[-1:])


# Steps that add cases and fields


@step
def unfolded(view: views.View, name: str, declared: Sequence[Mapping[str, Any]]) -> views.View:
    """A case for each line of a list that the cases hold, with fields of these lines."""
    return fields(view.expanded(lambda case: case[name] or ()), declared)


@step
def matched(view: views.View, name: str, axis: str, of: str, same: Sequence[str]) -> views.View:
    """Adds the case that has this case's value of the field `of` on an axis, and is alike on the axes `same`."""
    known, names = view.index([axis] + list(same)), [of] + list(same)
    return view.adding(lambda case: {name: known.get(views.key_of(case, names))})


@step
def fields(view: views.View, declared: Sequence[Mapping[str, Any]]) -> views.View:
    """Adds fields; a name in braces in a label is what the first case has of it."""
    for field in declared:
        texts = {key: words.filled(field.get(key, ""), view.first) for key in ("label", "about")}
        of = {"of": partial(expressions.value_of, field["of"])} if "of" in field else {}
        view = view.with_fields([Field(**dict(field) | texts | of)])
    return view


@step
def computed(view: views.View, **texts: str) -> views.View:
    """Gives declared fields other values."""
    for name, text in texts.items():
        view = view.redeclared([name], of=partial(expressions.value_of, text))
    return view


@step
def defaulted(view: views.View, name: str, plain: str, order: Sequence[str] = (), quiet: bool = True) -> views.View:
    """An axis that older files do not say: its default for these, which comes first in reading order; captions leave it
    out where it has the default throughout."""
    view = view.with_fields([Field(name, role="axis", of=lambda case: case.get(name) or plain)])
    values = view.values(name)
    first = list(filter(values.__contains__, [plain] + list(order)))
    view = view.read_as(name, {value: value for value in first + values})
    return view.quiet(name) if quiet and values == [plain] else view


@step
def worded(view: views.View, name: str, by: Sequence[str] = (), of: str = "") -> views.View:
    """Words for the values of a field, an expression of the field, in the reading order of the fields `by`."""
    values = dict.fromkeys(view.ordered(*(by or [name])).column(name))
    for value in values:
        values[value] = expressions.value_of(of, {name: value}) if of else view.text(name, value)
    return view.read_as(name, values)


@step
def traits(view: views.View, row: str, trait: str) -> views.View:
    """Adds a trait of the row that a field names."""
    table = view.table(row)
    return view.with_fields([Field(f"{row}_{trait}", role="detail", of=lambda case: table[case[row]].get(trait))])


@step
def over(view: views.View, base: str = "", axis: str = "impl", otherwise: str = "", **options: Any) -> views.View:
    """Adds speedups over a base: that of the name, else the row that the table says; `otherwise` "peer": else somebody
    else's; "any": else any row, somebody else's first."""
    return cells.compared(view, base or cells.baseline_of(view, _others(view, otherwise)), axis, **options)


def _others(view: views.View, otherwise: str) -> list[str]:
    rows = view.values("impl") if otherwise else []
    peers = [row for row in rows if view.styles["impl"][row].dashed]
    return peers + rows if otherwise == "any" else peers


@step
def beside_baseline(view: views.View, axis: str, same: Sequence[str], base: str = "") -> views.View:
    """Adds, as `beside`, the case of the baseline of a table, or of the `base`, and its name as `base`."""
    base = base or next((name for name, row in view.table(axis).items() if row.get("baseline")), "")
    return cells.beside(view, base, axis, same).with_facts(base=base)


@step
def least(view: views.View, name: str, of: str, by: str, among: str) -> views.View:
    """Adds the least value of a field among the cases that have `among`, by another field."""
    groups = view.only(f"{among} and {of}").groups([by])
    known = {key: min(part.column(of)) for (key,), part in groups.items()}
    return view.adding(lambda case: {name: known.get(case[by])})


@step
def greatest(view: views.View, name: str, of: str) -> views.View:
    """Adds the greatest value of a field; 0 where no case has any."""
    return view.with_facts(**{name: max(filter(None, view.column(of)), default=0)})


@step
def points(view: views.View, step: str, value: str, values: str, at: str = "") -> views.View:
    """A case for each point of a curve that the cases hold, at the places of another list, else 1, 2, ..."""

    def line(case: Record) -> list[Record]:
        places = (case[at] or ()) if at else count(1)
        return [{step: x, value: y} for x, y in zip(places, case[values] or (), strict=False)]

    return view.expanded(line)


@step
def pairs(view: views.View, name: str, other: str, how: str) -> views.View:
    """A case for each other row that a mapping of the cases names, and one for the row itself."""

    def lines(case: Record) -> list[Record]:
        return [{other: row, how: word} for row, word in ({case["impl"]: "itself"} | case[name]).items()]

    return view.only(name).expanded(lines)


@step
def melted(view: views.View, what: str, value: str, **names: str) -> views.View:
    """A case for each of several fields, with its word and its value."""
    return view.expanded(lambda case: [{what: word, value: case[name]} for name, word in names.items()])


@step
def repeated(view: views.View, **facts: Any) -> views.View:
    """The cases twice: first with these facts in place of their own."""
    return view.of(list(view.with_facts(**facts).cases) + list(view.cases))


@step
def products(view: views.View, names: Sequence[Sequence[str]]) -> views.View:
    """Captions say which products of two fields are constant while the first of the two varies."""
    constant = []
    for pair in names:
        known = {a * b for a, b in view.distinct(pair) if type(a) is type(b) is int}
        if len(known) == 1 and view.varies(pair[0]):
            constant.append(f"{'·'.join(pair)} = {known.pop():,}")
    return replace(view, remark=", ".join(constant))


@step
def peak(view: views.View, dtype: str) -> views.View:
    """Adds the best matmul of these runs in the dtype that a field names, TFLOP/s, and words for it."""
    rate = (view.machine.ceiling(view.cases, view.first[dtype]) or 0.0) / 1e12 or None
    return view.with_facts(peak=rate, peak_text=rate and f"matmul {words.number(rate)} TFLOP/s")


# Steps that make tables and plots


def of_each_metric(draw: Any) -> Any:
    """The step that draws each of the chosen metrics."""

    def drawn(view: views.View, metrics: Sequence[str], *args: Any, **options: Any) -> items.Items:
        return [draw(view, metric, *args, **options) for metric in view.chosen(metrics)]

    return drawn


for make in (tables.pivot, plots.bars, plots.lines):
    STEPS[make.__name__] = of_each_metric(make)


@step
def number_lines(view: views.View, metrics: Sequence[str]) -> items.Items:
    """Each metric against the axis that has most numbers, a plot for each setting of the others."""
    numbers = [name for name in view.chosen(["@?", "-impl"]) if set(map(type, view.values(name))) <= {int, float}]
    if not numbers:
        return []
    axis = max(numbers, key=lambda name: len(view.values(name)))
    parts = facets(view, ["@?", "-impl", f"-{axis}"], [axis, "impl"], stem=False)
    return [plots.lines(part, metric, axis) for metric in view.chosen(metrics) for part in parts]


@step
def over_bases(
    view: views.View, keys: Steps, title: str, same: Steps = (), otherwise: str = "", shares: bool = False
) -> items.Table | None:
    """All metrics, with the speed over each base; with `shares` also the peak of memory beside that of the base."""
    metrics, bases = view.metrics(), cells.baselines_of(view, _others(view, otherwise))
    for base in bases:
        view = cells.compared(view, base, name=f"speedup_over_{base}", same=same)
        share = {"name": f"peak_of_{base}", "label": f"peak, share of {view.text('impl', base)}", "shown": "%"}
        view = fields(view, [share | {"of": 'peak_bytes / beside["peak_bytes"]'}])
        metrics += [f"peak_of_{base}"] * shares
    speedups = [f"speedup_over_{base}" for base in bases]
    return tables.listing(view, keys, metrics[:1] + speedups + metrics[1:], "", title)


@step
def parts_summary(view: views.View, parts: Steps, word: str, title: str) -> items.Table | None:
    """Geometric means of the speedups of each part that some steps make, by row."""
    compared_parts: list[views.View] = []
    for steps in parts:
        compared_parts += filter(cells.is_compared, applied(view, steps))
    bases = list(dict.fromkeys(part.text("impl", part.base) for part in compared_parts))
    cases: list[Record] = []
    for part in compared_parts:
        head = part.title + f", over {part.text('impl', part.base)}" * (len(bases) > 1)
        cases += part.with_facts(part=head).cases
    return versus.means(view.of(cases), "impl", "part", word, title.replace("{bases}", " or ".join(bases)))


@step
def either(view: views.View, *items: Steps) -> items.Items:
    """The first of these that draws anything."""
    return next(filter(any, map(partial(figures, view), items)), [])


@step
def each(view: views.View, *items: Steps) -> items.Items:
    """All that these draw."""
    return sum(map(partial(figures, view), items), [])


@step
def if_drawn(view: views.View, first: Steps, then: Steps) -> items.Items:
    """The figures of the second, where the first draws anything."""
    return figures(view, then) if any(figures(view, first)) else []
