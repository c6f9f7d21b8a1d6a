"""`lines`, `bars` and `heat_map` draw plots of a view, which is some cases of one benchmark (`views.py`).

A case is one record of a result file: one row (an implementation) as it was measured with one value for each axis.
Layouts call these functions as steps (`steps.STEPS`). Each returns an `items.Plot`, an SVG text with title and caption,
or None if there is too little to draw. The same cases give the same bytes.

To add a plot, write a function that begins with `canvas`, which makes axes in the style of all plots, and ends with
`drawn`, which turns them into an `items.Plot`, and enter it in `steps.STEPS`. special.py makes its plots in this way,
too; answers.py calls `to_svg` in place of `drawn`. Colours of rows come from the view's `styles`.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from lmsys.bench.fields import Field
from lmsys.reports import cells, items, tables, views, words

WIDTH_IN = 5.0  # about a phone's width at matplotlib's 72 points an inch, so that text keeps its size there
INK = "#111827"  # the colour of text and of ceilings
# The style of the dotted line of a ceiling, as arguments of matplotlib.
CEILING = {"color": INK, "linewidth": 1.0, "linestyle": (0, (1, 1.5)), "zorder": 1}
RC = {  # matplotlib's settings, for all plots
    "font.family": "DejaVu Sans",  # comes with matplotlib: text is laid out alike on every machine
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.6,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a result file must not begin a formula
}
# {colour: its replacement on a dark page}: paper, ink, black, grid, and rows that LIFT, below, would leave too dark
DARK = {
    "#ffffff": "#111827",
    INK: "#e5e7eb",
    "#000000": "#e5e7eb",
    "#e5e7eb": "#374151",
    "#111122": "#f3f4f6",
    "#111188": "#5d5dae",
    "#442255": "#765e83",
    "#552222": "#835e5e",
}
FULL_COLOUR = 4.0  # from this speedup (or its inverse) on, the colour in a heat map stays the same
ON_COLOUR = "#1f2937"  # text on a heat map's cells, which stay pale on a dark page
LIFT = 0.25  # the share of white mixed into colours not in DARK on a dark page, so that a row keeps its hue
MOST_DOTS = 40  # a line with more points has no markers
MOST_PLACES = 6  # the most labels of an x axis whose values are evenly spaced; fewer values have a label each


def canvas(height_in: float) -> Any:
    """matplotlib's axes in the style of all plots; the height, in inches, is without title and legend.

    Each call resets matplotlib's settings (rcParams) for the whole process.
    """
    matplotlib.rcdefaults()  # a matplotlibrc of the user's must not change the bytes
    matplotlib.rcParams.update(RC)
    return Figure(figsize=(WIDTH_IN, 0.3 + height_in), layout="constrained").add_subplot()


def to_svg(axes: Any, name: str, title: str) -> str:
    """The SVG text of a drawing, with legend and title.

    name   makes the ids in the SVG unique on a page
    title  " · " in it begins a new line
    """
    axes.figure.suptitle(title.replace(" · ", "\n"), x=0.01, ha="left", fontsize=10)
    add_legend(axes)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        axes.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    # Group ids repeat from plot to plot and would clash where several plots stand in one page.
    text = re.sub(r'<g id="[^"]*">', "<g>", file.getvalue())
    dark = f"text:not([style*='fill:']){{fill:{DARK[INK]}}}" + "".join(
        f"[style*='{part}: {color}']{{{part}:{DARK.get(color) or words.lighter(color, LIFT)}!important}}"
        for color in sorted(set(re.findall("#[0-9a-f]{6}", text)))
        for part in ("fill", "stroke")
    )
    text = text.replace("<defs>", f"<style>@media screen and (prefers-color-scheme:dark){{{dark}}}</style>\n <defs>", 1)
    # Readers may not have the font: Verdana has about the same widths, and any font without serifs beats the default.
    return text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def add_legend(axes: Any) -> None:
    """Puts a legend below the drawing, for which the figure grows: in two columns, or in one if two are too wide."""
    figure, (handles, labels) = axes.figure, axes.get_legend_handles_labels()
    height = figure.get_figheight()
    for columns in (2, 1) if labels else ():
        figure.set_figheight(height + 0.2 * math.ceil(len(labels) / columns) + 0.1)
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()


def crowded(labels: Sequence[str]) -> bool:
    """True if labels side by side on an x axis would overlap unless slanted: it has room for 45 characters."""
    return len(labels) * max(map(len, labels), default=0) > 45


def add_places(axes: Any, labels: Sequence[str]) -> None:
    """Labels the x axis: the first label stands at 0, the next at 1, and so on."""
    slanted = crowded(labels)
    axes.set_xticks(range(len(labels)), labels, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    axes.set_xlim(-0.5, len(labels) - 0.5)  # else a word in place of a missing bar could be outside


def short(length: float, _: object = None) -> str:
    """The label of a length on an axis: 512, 1,000, and powers of two from 1,024 on as 1k, 64k.

    matplotlib also passes the place of the label on the axis, which is not used.
    """
    is_power = length >= 1024 and length % 1 == 0 and int(length).bit_count() == 1
    return f"{length / 1024:g}k" if is_power else f"{length:,.10g}"


def plain(value: float, _: object = None) -> str:
    """The label of a number on an axis: 0.05, 500, 5,000, and from 10,000 on 10k. `_` is as in `short`."""
    return f"{value:,.10g}" if value < 10_000 else f"{value / 1000:,.10g}k"


def scale_values(axes: Any, values: Sequence[float], log: bool, room: float) -> None:
    """Scales the y axis for these positive values: from 0 to `room` times the greatest, or with `log` logarithmically.

    A logarithmic axis has about six labels: the more decades it covers, the fewer it has in each.
    """
    if not log:
        axes.set_ylim(0, room * max(values))
    else:
        axes.set_yscale("log")
        decades = math.log10(max(values) / min(values))
        steps = [(1.0, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)]  # labels of one decade
        subs = next((subs for subs in steps if len(subs) * decades <= 6), steps[-1])
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(plain)


def drawn(view: views.View, axes: Any, head: str, word: str, caption: str) -> items.Plot:
    """The plot that is drawn on these axes; `head` begins its title, and `word` ends its file's name."""
    name, title = view.file(word), tables.titled(head, view)
    return items.Plot(name, title, caption, to_svg(axes, name, title))


def _with_heights(view: views.View, metric: str) -> views.View:
    """Adds the field "drawn", the height at which a case is drawn: the metric in the unit that readers see.

    It is None if the metric is not above zero, or if the case has no value of it.
    """
    field = view.fields[metric].called(name="drawn")
    _, factor = words.unit_of(field)
    return view.with_fields([field.called(of=lambda case: case[metric] * factor if case[metric] > 0 else None)])


def lines(
    view: views.View,
    metric: str,
    axis: str,
    by: str = "impl",
    word: str = "",
    xlabel: str = "",
    ceilings: Mapping[str, Any] | None = None,
) -> items.Plot | None:
    """A plot of a metric against an axis, a line for each value of `by`; None if no line has two points.

    metric, axis, by  names of fields
    word              ends the file's name; by default the metric's word in `words.FILES`
    xlabel            by default the axis' label
    ceilings          {metric: (words, height)} for a dotted line that no point should be above; words and height may
                      also be names of fields that hold them

    The y axis begins at zero for rates, shares, and values within one order of magnitude, else it is logarithmic.
    """
    field, (unit, _) = view.fields[metric], words.unit_of(view.fields[metric])
    positive = _with_heights(view, metric).only("drawn")
    groups, places = positive.ordered(axis).groups([by]), positive.values(axis)
    if not any(part.varies(axis) for part in groups.values()):
        return None
    numbers = set(map(type, places)) <= {int, float}
    axes, values = canvas(3.0), list[float]()
    for order, value in enumerate(positive.values(by)):
        points = dict(zip(groups[value,].column(axis), groups[value,].column("drawn"), strict=True))
        values += points.values()
        on_top = order / len(groups)  # later lines are thinner, so that an equal line below them still shows
        dots = {"markersize": 7.0 - 3.0 * on_top} if len(points) <= MOST_DOTS else {"marker": ""}
        at = list(points if numbers else map(places.index, points))
        axes.plot(at, list(points.values()), **view.style(by, value).line() | dots, linewidth=3.0 - 1.6 * on_top)
    log = max(values) >= 10 * min(values) and unit != "%" and not unit.endswith("/s")
    text, height = (view.first.get(name, name) for name in (ceilings or {}).get(metric, ("", None)))
    if height:
        _add_ceiling(axes, text, height, above=sum(value > height for value in values))
        values += [height] * (not log)  # a logarithmic axis need not reach the ceiling
    scale_values(axes, values, log, room=1.08)
    if numbers:
        _scale_places(axes, places)
    else:
        add_places(axes, [view.text(axis, place) for place in places])
    axes.set(xlabel=xlabel or words.label_of(view.fields[axis]), ylabel=unit)
    caption = _caption(view, field, axis, by, tables.about_of(field)) + _out_of_memory(view, axis, by)
    return drawn(view, axes, words.sentence(words.label_of(field)), word or words.FILES.get(metric, metric), caption)


def _add_ceiling(axes: Any, text: str, height: float, above: int) -> None:
    """Draws a dotted line at a height, with its words, and with the number of points `above` it."""
    axes.axhline(height, **CEILING)
    if text and above:
        text += f", {above} figures above it"
    axes.annotate(
        text,
        (1, height),
        (0, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )


def _scale_places(axes: Any, places: Sequence[float]) -> None:
    """Scales the x axis for these numbers: by powers of two, or linearly where many stand at even steps."""
    counted = len(places) > MOST_PLACES and len(set(np.diff(places))) == 1
    if places[0] > 0 and not counted:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(places, MOST_PLACES if counted else None))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(short)


def _caption(view: views.View, field: Field, axis: str, by: str, about: str) -> str:
    """The caption, with a warning if points at the same value of the axis were not sampled together."""
    clocked, timed = words.is_clocked(field), view.only("time_s is not None").groups([axis]).values()
    apart = clocked and by == "impl" and any(part.varies("comparison") for part in timed)
    return (
        view.caption(about, clocked)
        + " Points of one place come from several runs: not comparable within a few per cent." * apart
    )


def _out_of_memory(view: views.View, axis: str, by: str) -> str:
    """A sentence on the points that are missing because their cases ran out of memory; "" if none did."""
    facts = []
    for (value,), part in view.only("outcome == 'oom'").ordered(by, axis).groups([by]).items():
        facts.append(f"{view.text(by, value)} at {', '.join(part.text(axis, place) for place in part.values(axis))}")
    return f" Out of memory: {'; '.join(facts)}." if facts else ""


def bars(
    view: views.View, metric: str, axis: str, by: str = "impl", word: str = "", head: str = "", about: str = ""
) -> items.Plot | None:
    """A plot with a group of bars for each value of an axis, and in it a bar for each value of `by`; None without bars.

    A word in place of a bar says how its case ended. The y axis begins at zero, or it is logarithmic if the highest bar
    is at least ten times as high as the lowest.

    metric, axis, by   names of fields
    word, head, about  replace what the metric gives for the file's name, the title and the caption
    """
    field, groups = view.fields[metric], view.values(axis)
    last = _with_heights(view.of(list(view.index([by, axis]).values())), metric)  # the last case of each bar
    if not (heights := last.only("drawn").column("drawn")):
        return None
    low, high = min(heights), max(heights)
    log = high >= 10 * low
    rows = last.only("drawn or ended(outcome)").values(by)
    axes, width = canvas(3.0), 0.84 / len(rows)
    for at, value in enumerate(rows):
        style, offset = view.style(by, value), (at - (len(rows) - 1) / 2) * width
        cases = {
            groups.index(place) + offset: case for (place,), case in last.having(by, [value]).index([axis]).items()
        }
        axes.bar(  # a case without a height has no bar, but its row still has a colour in the legend
            list(cases),
            [case["drawn"] or math.nan for case in cases.values()],
            0.92 * width,
            label=style.label,
            color=style.color,
            edgecolor="white",
            linewidth=0,
            hatch="////" if style.dashed else None,
        )
        bottom = low * 0.55 if log else high / 50
        for place, case in cases.items():
            if not case["drawn"] and case["outcome"] in words.OUTCOMES:
                text, look = words.OUTCOMES[case["outcome"]], {"fontsize": 7, "color": style.color}
                axes.text(place, bottom, text, rotation=90, ha="center", va="bottom", **look)
    scale_values(axes, [low / 2, high], log, room=1.1)
    if log:
        axes.set_ylim(low / 2, high * 1.6)
    bare = {place for place in groups if type(place) is int and place not in view.words.get(axis, ())}
    add_places(axes, [short(place) if place in bare else view.text(axis, place) for place in groups])
    axes.grid(axis="x", visible=False)
    axes.set_ylabel(words.unit_of(field)[0])
    caption = _caption(view, field, axis, by, about or tables.about_of(field))
    head = head or words.sentence(f"{words.label_of(field)} by {words.label_of(view.fields[axis])}")
    return drawn(view, axes, head, word or words.FILES.get(metric, metric), caption)


def heat_map(view: views.View, settings: Sequence[str]) -> items.Plot | None:
    """A heat map of speedups over the base: a line for each row, a column for each combination of values of `settings`.

    None if no row has a speedup. A cell without a speedup says how its case ended.

    settings  names of fields, as in `View.chosen`
    """
    if not cells.is_compared(view):
        return None
    settings, rows = view.chosen(settings), view.values("impl")
    parts = view.groups(settings).values()
    heads = [", ".join(part.texts(settings, part.first)) for part in parts]
    axes = canvas(0.25 * len(rows) + (2.0 if crowded(heads) else 0.8))
    speeds = np.full((len(rows), len(heads)), math.nan)
    cases = [part.index(["impl"]) for part in parts]
    for y, x in np.ndindex(speeds.shape):
        case = cases[x].get((rows[y],))
        speed = case and case[cells.SPEEDUP]
        text = words.OUTCOMES.get(case["outcome"], f"{speed:.3g}" if speed else "") if case else cells.NOT_RUN
        speeds[y, x] = speed or math.nan
        axes.text(x, y, text, color=ON_COLOUR, ha="center", va="center", fontsize=8)
    full = math.log2(FULL_COLOUR)
    axes.imshow(np.log2(speeds), cmap="RdBu", vmin=-full, vmax=full, aspect="auto", alpha=0.6)
    add_places(axes, heads)
    axes.set_yticks(range(len(rows)), [view.text("impl", row) for row in rows], fontsize=9)
    axes.set(xlabel=", ".join(view.labels(settings)), facecolor="#f3f4f6")
    axes.grid(False)
    base = view.text("impl", view.base)
    caption = view.caption(tables.about_of(view.fields[cells.SPEEDUP]), clocked=True)
    caption += f" Blue is faster, red slower, full colour from {FULL_COLOUR:g}×. Blank: not timed beside {base}."
    return drawn(view, axes, f"Speedup over {base}", "heat", caption)
