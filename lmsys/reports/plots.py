"""Drawing views in one style: a look for each row, and as SVG text that is the same for the same cases."""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from lmsys.bench.fields import Field, Record
from lmsys.reports.cells import NOT_RUN, SPEEDUP, is_compared
from lmsys.reports.tables import Plot, about_of, titled
from lmsys.reports.views import Style, View, lighter
from lmsys.reports.words import FILES, OUTCOMES, is_clocked, label_of, number, scaled, sentence, unit_of

WIDTH_IN = 5.0  # about a phone's width at matplotlib's 72 points an inch, so that text keeps its size there
INK = "#111827"
CEILING = {"color": INK, "linewidth": 1.0, "linestyle": (0, (1, 1.5)), "zorder": 1}
RC = {
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
    "text.parse_math": False,  # a dollar sign of a result file is a dollar sign
}
FULL_COLOUR = 4.0  # the ratio from which a heat map's colour says no more, the same in every plot
NO_BASE = "no base"
MOST_PLACES = 6  # on an axis that counts, such as one of steps; a shorter one is of places that were chosen


def canvas(height_in: float) -> Any:
    """Axes in our style, of a figure so high without its legend."""
    matplotlib.rcdefaults()  # a matplotlibrc of the user's must not change the bytes
    matplotlib.rcParams.update(RC)
    return Figure(figsize=(WIDTH_IN, 0.3 + height_in), layout="constrained").add_subplot()


def to_svg(axes: Any, name: str, title: str) -> str:
    """The drawing with its title, in which " · " begins a line, and its legend: the same bytes for the same drawing."""
    axes.figure.suptitle(title.replace(" · ", "\n"), x=0.01, ha="left", fontsize=10)
    add_legend(axes)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        axes.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    # Group ids repeat from plot to plot and would clash where several plots stand in one page.
    text = re.sub(r'<g id="[^"]*">', "<g>", file.getvalue())
    # Where the font is not installed: its twin in width, or at least no serifs.
    return text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def add_legend(axes: Any) -> None:
    """Puts a legend below the drawing, which grows by as much: in two columns, or one where two are too wide."""
    figure, (handles, labels) = axes.figure, axes.get_legend_handles_labels()
    height = figure.get_figheight()
    for columns in (2, 1) if labels else ():
        figure.set_figheight(height + 0.2 * math.ceil(len(labels) / columns) + 0.1)
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()


def crowded(labels: Sequence[str]) -> bool:
    """True where labels of places side by side would run into one another unless they are slanted."""
    return len(labels) * max(map(len, labels), default=0) > 45


def add_places(axes: Any, labels: Sequence[str]) -> None:
    """Names for the places 0, 1, ... of the x axis."""
    slanted = crowded(labels)
    axes.set_xticks(range(len(labels)), labels, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    axes.set_xlim(-0.5, len(labels) - 0.5)  # bars without a height would not widen it to the words in their places


def short(length: float) -> str:
    """A length for an axis: 512, 1,000, and powers of two as 1k, 64k."""
    power = length >= 1024 and length % 1 == 0 and int(length).bit_count() == 1
    return f"{length / 1024:g}k" if power else f"{length:,.10g}"


def plain(value: float, _: object = None) -> str:
    """A number on an axis: 0.05, 500, 5,000, and 10k from there on."""
    return f"{value:,.10g}" if value < 10_000 else f"{value / 1000:,.10g}k"


def log_values(axis: Any, values: Iterable[float]) -> None:
    """Plain numbers on a logarithmic axis: as many steps between the decades as the range has room for."""
    finite = [value for value in values if value > 0]
    decades = math.log10(max(finite) / min(finite))
    steps = [(1.0, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)]
    subs = next((subs for subs in steps if len(subs) * decades <= 6), steps[-1])
    axis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(plain))


def scale_values(axes: Any, values: Sequence[float], log: bool, room: float) -> None:
    """The y axis for these values: logarithmic, or from zero with room above them."""
    if log:
        axes.set_yscale("log")
        log_values(axes.yaxis, values)
    else:
        axes.set_ylim(0, room * max(values))
        axes.yaxis.set_major_formatter(FuncFormatter(plain))


def drawn(view: View, axes: Any, head: str, word: str, caption: str) -> Plot:
    """The drawing on these axes, as a plot of the view."""
    name, title = view.file(word), titled(head, view)
    return Plot(name, title, caption, to_svg(axes, name, title), view.source)


def lines(
    view: View,
    metric: str,
    axis: str,
    by: str = "impl",
    word: str = "",
    xlabel: str = "",
    ceiling: tuple[str, float] | None = None,
    beside: Sequence[tuple[Style, Mapping[Any, float]]] = (),
) -> Plot | None:
    """A metric against an axis, a line for each value of `by`, and lines `beside` them; None where none has two points.

    Rates and shares are drawn from zero, and so is what is of one order of magnitude.
    """
    one, (unit, _) = view.fields[metric], unit_of(view.fields[metric])
    series = [(view.style(by, value), points) for value, points in view.series(metric, axis, by).items()] + list(beside)
    series = [(style, points) for style, points in series if points]
    if not any(len(points) > 1 for _, points in series):
        return None
    places = [place for place in view.values(axis) if any(place in points for _, points in series)]
    numbers = all(type(place) in (int, float) for place in places)
    axes = canvas(3.0)
    for order, (style, points) in enumerate(series):
        on_top = order / len(series)  # thinner, so that a line below another that it equals still shows
        size = {"linewidth": 3.0 - 1.6 * on_top, "markersize": 7.0 - 3.0 * on_top}
        at = [place if numbers else places.index(place) for place in points]
        axes.plot(at, list(points.values()), **style.line(), **size)
    values = [value for _, points in series for value in points.values()]
    if ceiling:
        axes.axhline(ceiling[1], **CEILING)
        on_axes = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        above = sum(value > ceiling[1] for value in values) if ceiling[0] else 0
        text = f"{ceiling[0]}, {above} figures above it" if above else ceiling[0]
        axes.annotate(text, (1, ceiling[1]), (0, 3), ha="right", fontsize=9, **on_axes)
    if not numbers:
        add_places(axes, [view.text(axis, place) for place in places])
    else:
        counted = len(places) > MOST_PLACES and all(b - a == 1 for a, b in pairwise(places))
        axes.set_xscale("log", base=2) if places[0] > 0 and not counted else None
        axes.xaxis.set_major_locator(FixedLocator(places, MOST_PLACES if counted else None))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    log = max(values) >= 10 * min(values) and unit != "%" and not unit.endswith("/s")
    scale_values(axes, [*values, *([ceiling[1]] if ceiling and not log else [])], log, 1.08)
    axes.set(xlabel=xlabel or label_of(view.fields[axis]), ylabel=unit)
    caption = view.caption(about_of(one), is_clocked(one)) + _apart(view, one, axis, by) + _lost(view, axis, by)
    return drawn(view, axes, sentence(label_of(one)), word or FILES.get(metric, metric), caption)


def _apart(view: View, one: Field, axis: str, by: str) -> str:
    """A warning where the points of one place were not sampled together."""
    timed = view.only(lambda case: case["time_s"] is not None).groups(axis).values()
    several = is_clocked(one) and by == "impl" and any(len(own.distinct("comparison")) > 1 for own in timed)
    return " Points of one place come from several runs: not comparable within a few per cent." if several else ""


def _lost(view: View, axis: str, by: str) -> str:
    """Where a line has no point because the case ran out of memory."""
    lost = view.only(lambda case: case["outcome"] == "oom").ordered(by, axis)
    found = [
        f"{view.text(by, value)} at {', '.join(own.text(axis, place) for place in own.values(axis))}"
        for (value,), own in lost.groups(by).items()
    ]
    return f" Out of memory: {'; '.join(found)}." if found else ""


def bars(
    view: View,
    metrics: Sequence[str],
    axis: str,
    by: str = "impl",
    word: str = "",
    mark: str = "",
    head: str = "",
    about: str = "",
) -> Plot | None:
    """A group of bars for each value of an axis, a bar for each value of `by`; None without bars.

    Several metrics stand one upon another, lighter below, with their sum above and a line at the field `mark`. Where a
    case lacks one of them stands its outcome's word. From zero, but where single metrics differ by more than ten times:
    there the axis is logarithmic.
    """
    fields, groups = [view.fields[name] for name in metrics], view.values(axis)
    cases = {(case[by], case[axis]): case for case in view.cases}
    stacks = {key: [scaled(one, case[one.name]) for one in fields] for key, case in cases.items()}
    sums = {key: math.fsum(stack) for key, stack in stacks.items() if math.fsum(stack) > 0}
    if not sums:
        return None
    words = {key: OUTCOMES.get(case["outcome"], "") for key, case in cases.items() if key not in sums}
    marks = {key: scaled(view.fields[mark], cases[key][mark]) for key in sums} if mark else {}
    tops = {key: max(total, marks.get(key, 0.0)) for key, total in sums.items()}
    shown = [
        value for value in view.values(by) if any(key[0] == value and (key in sums or words[key]) for key in cases)
    ]
    several, low, high, width = len(fields) > 1, min(sums.values()), max(tops.values()), 0.84 / len(shown)
    log = not several and high >= 10 * low
    axes = canvas(3.0)
    upright = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 7}
    for key in (key for key in cases if key[0] in shown):
        style = view.style(by, key[0])
        x = groups.index(key[1]) + (shown.index(key[0]) - (len(shown) - 1) / 2) * width
        if key not in sums:
            axes.text(x, low * 0.55 if log else high / 50, words[key], color=style.color, **upright)
            continue
        for layer, height in enumerate(stacks[key]):
            look = _look(style.color, layer, len(fields)) | {"hatch": "////" if style.dashed else None}
            axes.bar(x, height, 0.92 * width, math.fsum(stacks[key][:layer]), **look)
        if several:
            axes.text(x, tops[key], f" {number(sums[key])}", **upright)
            axes.plot([x - 0.46 * width, x + 0.46 * width], [marks.get(key, math.nan)] * 2, color=INK, linewidth=1.2)
    for style in (view.style(by, value) for value in shown):
        axes.bar(0, 0, label=style.label, hatch="////" if style.dashed else None, **_look(style.color, 0, 1))
    for layer, one in enumerate(fields if several else ()):
        axes.bar(0, 0, label=label_of(one), **_look(INK, layer, len(fields)))
    scale_values(axes, [low / 2, high], log, 1.25 if several else 1.1)
    if log:
        axes.set_ylim(low / 2, high * 1.6)
    add_places(axes, [_short_text(view, axis, group) for group in groups])
    axes.grid(axis="x", visible=False)
    axes.set_ylabel(unit_of(fields[0])[0])
    caption = view.caption(about or about_of(fields[0]), is_clocked(fields[0])) + _apart(view, fields[0], axis, by)
    head = head or sentence(f"{label_of(fields[0])} by {label_of(view.fields[axis])}")
    return drawn(view, axes, head, word or FILES.get(metrics[0], metrics[0]), caption)


def _look(color: str, layer: int, layers: int) -> dict[str, Any]:
    """How a layer of a bar is drawn: the lighter the lower."""
    return {"color": lighter(color, 1 - (layer + 1) / layers), "edgecolor": "white", "linewidth": 0}


def _short_text(view: View, axis: str, value: Any) -> str:
    return short(value) if type(value) is int and value not in view.words.get(axis, ()) else view.text(axis, value)


def heat_map(view: View, settings: Sequence[str]) -> Plot | None:
    """Speedups: a row for each row of the table, a column for each setting of some axes; None without any but 1.

    A row without any speedup is there too: its words say why.
    """
    if not is_compared(view):
        return None
    cases = {(case["impl"], *(case[name] for name in settings)): case for case in view.cases}
    rows, columns, base = view.values("impl"), view.distinct(*settings), view.text("impl", view.base)
    texts = [[_speed_text(cases.get((row, *key))) for key in columns] for row in rows]
    speeds = [[(cases.get((row, *key)) or {}).get(SPEEDUP) or math.nan for key in columns] for row in rows]
    heads = [", ".join(_short_text(view, *one) for one in zip(settings, key, strict=True)) for key in columns]
    slanted = 0.055 * max(map(len, heads)) if sum(map(len, heads)) > 36 else 0
    axes = canvas(0.25 * len(rows) + 0.8 + slanted)
    full = math.log2(FULL_COLOUR)
    axes.imshow(np.log2(np.array(speeds)), cmap="RdBu", vmin=-full, vmax=full, aspect="auto", alpha=0.85)
    for (y, x), value in np.ndenumerate(np.array(speeds)):
        strong = math.isfinite(value) and abs(math.log2(value)) > 0.6 * full
        look = {"ha": "center", "va": "center", "fontsize": 8.5 if len(columns) <= 8 else 7}
        axes.text(x, y, texts[y][x], color="white" if strong else INK, **look)
    axes.set_xticks(range(len(heads)), heads, fontsize=9)
    axes.tick_params(axis="x", rotation=40 if slanted else 0)
    axes.set_yticks(range(len(rows)), [view.text("impl", row) for row in rows], fontsize=9)
    axes.tick_params(length=0)
    axes.set(xlabel=", ".join(label_of(view.fields[name]) for name in settings), facecolor="#f3f4f6")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    also = [f"Blue is faster, red slower, full colour from {FULL_COLOUR:g}×."]
    also += [f"No base: {base} has no time there."] * any(NO_BASE in line for line in texts)
    also += [f"Blank: not sampled together with {base}."] * any("" in line for line in texts)
    caption = " ".join([view.caption(about_of(view.fields[SPEEDUP]), clocked=True), *also])
    return drawn(view, axes, f"Speedup over {base}", "heat", caption)


def _speed_text(case: Record | None) -> str:
    """The text of a cell of the heat map: the speedup, or why there is none."""
    if case is None or case["outcome"] != "ok":
        return OUTCOMES[case["outcome"]] if case else NOT_RUN
    if speed := case[SPEEDUP]:
        return f"{speed:.2f}" if speed < 10 else f"{speed:.0f}"
    return "untimed" if case["time_s"] is None else NO_BASE if case["remark"] else ""


def roofline(view: View) -> Plot | None:
    """Achieved TFLOP/s against FLOP/byte, under the measured ceilings, of cases of one dtype; None without points."""
    matmul, copy = view.machine.ceiling(view.cases, view.cases[0]["dtype"]), view.machine.ceiling(view.cases)
    points: dict[Any, list[tuple[float, float]]] = {}
    for case in view.ordered("impl").cases:
        if case["bytes"] and case["flops"] and case["flops_per_s"]:
            points.setdefault(case["impl"], []).append((case["flops"] / case["bytes"], case["flops_per_s"] / 1e12))
    if not points:
        return None
    axes = canvas(3.0)
    for impl, found in points.items():
        axes.plot(*zip(*found, strict=True), **{**view.style("impl", impl).line(), "linestyle": "none", "alpha": 0.85})
    ridge = [matmul / copy] if matmul and copy else []
    intensities, rates = ([point[i] for found in points.values() for point in found] for i in (0, 1))
    left, right = min(intensities + ridge) / 4, max(intensities + ridge) * 1.6  # room for the label of the slope
    note = {"textcoords": "offset points", "fontsize": 9}
    if matmul:
        axes.plot([*(ridge or [left]), right], [matmul / 1e12] * 2, **CEILING)
        axes.annotate(f"matmul {number(matmul / 1e12)} TFLOP/s", (right, matmul / 1e12), (0, 3), ha="right", **note)
        rates.append(matmul / 1e12)
    if copy:
        end = min([*ridge, right])
        axes.plot([left, end], [left * copy / 1e12, end * copy / 1e12], **CEILING)
        axes.annotate(f"copy {number(copy / 1e9)} GB/s", (left, left * copy / 1e12), (6, -4), va="top", **note)
        rates.append(left * copy / 1e12)
    axes.set(xscale="log", yscale="log", xlim=(left, right), xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s")
    axes.set_ylim(min(rates) / 1.6, max(rates) * 1.8)
    log_values(axes.xaxis, [left, right])
    log_values(axes.yaxis, rates)
    about = (
        "Achieved rate against arithmetic intensity. Bytes are ideal: each input read once, each output written once"
    )
    return drawn(view, axes, "Roofline", "roofline", view.caption(about, clocked=True))
