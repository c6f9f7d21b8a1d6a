"""The one renderer: from the layout that a benchmark declares, and its result file carries, to chapters of a page.

A layout is plain data:

    {"prepare": [STEP, ...],
     "chapters": [{"title": "Loss: {section}", "blocks": [BLOCK, ...]}]}
    BLOCK = {"of": [STEP, ...], "lead": [ITEM, ...], "more": [ITEM, ...]}

A STEP is a name of `lmsys.reports.steps` and its arguments, such as ["only", "time_s is not None"]: it makes a view of
a view, or several, such as one for each value of a field. An ITEM is a list of steps of which the last makes tables or
plots, such as ["pivot", ["time_s"], ["batch"]]. A chapter is drawn for each value of the fields that stand in braces in
its title, and a block for each view that its steps make. Beside "chapters" there may be:

    "place"    a number: benchmarks stand on the page in this order
    "words"    {FIELD: {VALUE: words}}: how values of fields are read, in reading order
    "letters"  what letters mean, at the end of the answers
    "fastest"  the question that the page answers first (`lmsys.reports.contest.Question`)

What a name in a list of fields may look like says `View.chosen`; an expression, `lmsys.reports.expressions`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lmsys.reports import items, load, steps, views, words
from lmsys.reports import special as special  # which declares steps, too
from lmsys.values import choice

Layout = Mapping[str, Any]


def chapters(view: views.View) -> list[items.Chapter]:
    """All that a report has of a benchmark, by its layout, or by its fields alone; and the energy, if it was measured.

    InputError where the layout is none.
    """
    layouts = [view.machine.layouts.get(view.benchmark) or of_any(view.benchmark)]
    if view.has("energy_j"):
        labels = {"impl": "row", "causal": "mask"}
        layouts.append(of_energy(view.benchmark, {name: labels[name] for name in view.fields if name in labels}))
    with load.drawn_by_layout(view.benchmark):
        return [chapter for layout in layouts for chapter in _chapters(view, layout)]


def _chapters(view: views.View, layout: Layout) -> Iterator[items.Chapter]:
    (view,) = steps.applied(view, layout.get("prepare", ()))
    for declared in layout["chapters"]:
        names = words.NAMES.findall(declared["title"])
        for part in view.groups(names).values():
            title = words.filled(declared["title"], part.constants(names))
            blocks = [block for inner in declared["blocks"] for block in _blocks(part, inner)]
            if not any(block.items for block in blocks):
                rows = [["there is nothing to draw: no table, and no plot has two points"]]
                blocks = [items.Block(title, [items.Table(part.file(title), title, "", ["cases"], rows, [])])]
            yield items.Chapter(title, blocks)


def _blocks(view: views.View, declared: Layout) -> Iterator[items.Block]:
    for name in declared:
        choice(name, ("title", "of", "lead", "more", "blocks"), f"{name!r} in a block: ")
    for part in steps.applied(view, declared.get("of", ())):
        for inner in declared.get("blocks", ()):
            yield from _blocks(part, inner)
        if "blocks" not in declared:
            title = words.filled(declared.get("title", part.title), {"heading": part.heading and f", {part.heading}"})
            lead, more = (steps.each(part, *declared.get(name, ())) for name in ("lead", "more"))
            yield items.Block(title, lead, more)


def of_any(name: str) -> Layout:
    """The layout of a benchmark that declares none: a block for each grid, by the fields that it declares.

    There is a table of each metric, rows of the table side by side; of one row there is a table of all metrics.
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
    """The energy of a call and of a token: a table for each grid."""
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
