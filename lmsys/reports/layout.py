"""`chapters` draws the chapters of a benchmark by the layout that it declares and that its result files carry.

`__main__.build` calls `chapters` with the view of all cases of a benchmark. A layout is plain data, so that it travels
in result files; `Benchmark.layout` declares one:

    {"prepare": [STEP, ...],
     "chapters": [{"title": "Loss: {section}", "blocks": [BLOCK, ...]}]}
    BLOCK = {"title": "Loss", "of": [STEP, ...], "lead": [ITEM, ...], "more": [ITEM, ...]}, or
            {"of": [STEP, ...], "blocks": [BLOCK, ...]}

A STEP is the name of a function of `lmsys.reports.steps` and its arguments, such as ["only", "time_s is not None"]. It
takes a view (some cases of the benchmark, views.py) and gives another view or several, such as one for each value of a
field. An ITEM is one step, or a list of steps; the last step makes tables or plots, such as
["pivot", ["time_s"], ["batch"]]. A chapter is drawn for each combination of values of the fields that stand in braces
in its title. A block is drawn for each view that its "of" steps make. A block with "blocks" draws these for each view,
in place of "lead" and "more". The page shows the first table and the first plot of "lead", and folds all other items.
In a block's title, {heading} stands for a comma and what the cases of its view have in common. The steps under
"prepare" come before all chapters; every chapter is drawn from the one view that they make. Beside "chapters" there may
also be:

    "place"    a number: benchmarks are on the page in the order of these numbers
    "words"    {FIELD: {VALUE: word}}: the words for values of fields, in the order in which tables list them
    "letters"  a sentence at the end of the page's answers, such as "B is the batch, H the heads. ": more text follows
               it directly, so it ends in a space
    "fastest"  the question that the page answers first: the attributes of a `lmsys.reports.contest.Question`, without
               `benchmark`

The docstring of a step's function says what its arguments are. Lists of fields may have signs, such as "@?" for all
axes that vary, and "time_s!" for a field if any case has a value of it: `View.chosen` lists the signs. `View.cut`
explains the braces and brackets in its texts, and `lmsys.reports.expressions` says what an expression may be. `of_any`
is the layout of benchmarks that declare none. benchmarks/layouts.py has examples. A new key of a layout needs code that
reads it: here, in `load.Machine` ("place", "words") or in page.py ("letters"); and its name in `_chapters`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lmsys.reports import contest, items, load, steps, views, words
from lmsys.reports import special as special  # imported so that its steps are in `steps.STEPS`
from lmsys.values import choice, hold

Layout = Mapping[str, Any]


def chapters(view: views.View) -> list[items.Chapter]:
    """The chapters of a benchmark by its layout, or by `of_any`; and a chapter on energy, if that was measured.

    LayoutError, which is an InputError, for a layout that cannot be drawn.
    """
    layouts = [view.machine.layouts.get(view.benchmark) or of_any(view.benchmark)]
    if view.has("energy_j"):
        labels = {"impl": "row", "causal": "mask"}
        layouts.append(of_energy(view.benchmark, {name: labels[name] for name in view.fields if name in labels}))
    with load.drawn_by_layout(view.benchmark):
        return [chapter for layout in layouts for chapter in _chapters(view, layout)]


def rehearse(result: Mapping[str, Any]) -> None:
    """Draws the layouts of a result whose records are made up. LayoutError for a wrong name, text or step in a layout.

    The bench calls this before a run, so that a mistake in a layout is reported before anything is measured. An error
    that the values of these records cause is ignored: measured records may have other values.
    """
    for machine in load.machines_in(result, result["records"]):
        for name in set(machine.benchmarks) & machine.layouts.keys():
            with suppress(load.ValuesError):
                chapters(views.view_of(machine, name))
            if declared := machine.layouts[name].get("fastest"):
                with load.drawn_by_layout(name, ", under 'fastest'"):
                    contest.Question(name, **declared).hold_names(machine)


def _chapters(view: views.View, layout: Layout) -> Iterator[items.Chapter]:
    """Yields the chapters of one layout; a chapter with nothing to draw says so."""
    _hold_keys("a layout", layout, ("prepare", "chapters", "place", "words", "letters", "fastest"))
    (view,) = steps.applied(view, layout.get("prepare", ()))  # ValueError unless these steps make one view
    for declared in layout["chapters"]:
        _hold_keys("a chapter", declared, ("title", "blocks"))
        names = words.NAMES.findall(declared["title"])
        for part in view.groups(names).values():
            title = words.filled(declared["title"], part.constants(names))
            blocks = [block for inner in declared["blocks"] for block in _blocks(part, inner)]
            if not any(block.items for block in blocks):
                rows = [["there is nothing to draw: no table, and no plot has two points"]]
                blocks = [items.Block(title, [items.Table(part.file(title), title, "", ["cases"], rows, [])])]
            yield items.Chapter(title, blocks)


def _hold_keys(where: str, declared: Layout, known: Sequence[str]) -> None:
    """ValueError, with the nearest of the known keys, for any other key: nothing would read it."""
    for name in declared:
        choice(name, known, f"{name!r} in {where}: ")


def _blocks(view: views.View, declared: Layout) -> Iterator[items.Block]:
    """Yields a block for each view that the "of" steps make, or for each of these views the blocks inside this one."""
    _hold_keys("a block", declared, ("title", "of", "lead", "more", "blocks"))
    for part in steps.applied(view, declared.get("of", ())):
        for inner in declared.get("blocks", ()):
            yield from _blocks(part, inner)
        if "blocks" not in declared:
            title = words.filled(
                declared.get("title", words.sentence(part.heading)), {"heading": part.heading and f", {part.heading}"}
            )
            block = items.Block(title, *(steps.each(part, *declared.get(name, ())) for name in ("lead", "more")))
            hold(
                *((isinstance(x, items.Table | items.Plot), "an item must end in a table or plot") for x in block.items)
            )
            yield block


def of_any(name: str) -> Layout:
    """The layout of a benchmark that declares none: a block for each section, with all metrics of the benchmark.

    A section is one grid (a set of values of each axis) of the sweep that was run. Metrics are the fields of numbers
    that are shown. If there are several rows (values of `impl`), each metric has a table with the rows side by side;
    for one row there is a single table. "@?" and "-impl" together are the axes that vary, except `impl`; "*" are the
    metrics that are not named beside it.
    """
    return {
        "prepare": [["ordered", "section", "@", "impl"]],
        "chapters": [
            {
                "title": words.sentence(name.replace("_", " ")),
                "blocks": [
                    {
                        "of": [["cut", f"{name}-{{section}}", "[{section}]"], ["over", "", "impl", "any"]],
                        "lead": [
                            [["if_varies", "impl", False], ["listing", ["@?"], ["*"], "metrics", "Metrics"]],
                            [["if_varies", "impl"], ["pivot", ["time_s", "speedup", "*"], ["@?", "-impl"]]],
                            ["number_lines", ["*"]],
                        ],
                    },
                    {"lead": [["same_bits", f"{name}-same-bits"]]},
                ],
            }
        ],
    }


def of_energy(name: str, labels: Mapping[str, str]) -> Layout:
    """The layout of a chapter on the energy of a call and of a token: a table for each section.

    labels  {field: its label in these tables}
    """
    return {
        "prepare": [["labelled", labels]],
        "chapters": [
            {
                "title": f"Energy of {name.replace('_', ' ')}",
                "blocks": [
                    {
                        "of": [
                            ["only", "energy_j is not None or energy_note"],
                            ["ordered", "section", "@"],
                            ["cut", f"{name}-{{section}}", "{section}"],
                        ],
                        "lead": [
                            [
                                "listing",
                                [],
                                [
                                    "energy_j!",
                                    "energy_per_token_j!",
                                    "energy_power_w!",
                                    "energy_call_s!",
                                    "flops_per_j!",
                                    "sustained_ceiling_fraction!",
                                ],
                                "energy",
                                "Energy",
                                "Calls followed one another for a second or more on inputs that were drawn once."
                                " Energy: of a call, by the counter of the device; a note says where the integral of"
                                " its power is more than 3 % away. Pace: the time from one call to the next meanwhile."
                                " Work for energy: the arithmetic of the formula over the energy",
                            ]
                        ],
                    }
                ],
            }
        ],
    }
