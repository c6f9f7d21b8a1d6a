"""Drawing views: a style for each row, the same bytes for the same cases."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lmsys.bench.fields import Record
from lmsys.reports.canvas import (
    CEILING,
    INK,
    Plot,
    add_legend,
    add_places,
    canvas,
    legend_height,
    log_values,
    plain,
    short,
    to_svg,
)
from lmsys.reports.speedups import SPEEDUP
from lmsys.reports.styles import Style, lighter
from lmsys.reports.tables import NOT_RUN, about_of, titled
from lmsys.reports.views import View
from lmsys.reports.words import FILES, OUTCOMES, is_clocked, label_of, number, scaled, unit_of

FULL_COLOUR = 4.0  # the ratio from which a heat map's colour says no more, the same in every plot
NO_BASE = "no base"


def drawn(view: View, figure: Any, head: str, word: str, caption: str) -> Plot:
    """The finished figure as a plot of the view."""
    name = view.file(word)
    return Plot(name, titled(head, view), caption, to_svg(figure, name))


def lines(
    view: View,
    metric: str,
    axis: str,
    by: str = "impl",
    word: str = "",
    xlabel: str = "",
    ceiling: tuple[str, float] | None = None,
    beside: Sequence[tuple[Style, Mapping[float, float]]] = (),
) -> Plot | None:
    """A metric against an axis, a line for each value of `by`, and lines `beside` them; None where none has two points.

    Rates and shares are drawn from zero, and so is what is of one order of magnitude.
    """
    one = view.fields[metric]
    series = [(view.style(by, value), points) for value, points in view.series(metric, axis, by).items()] + list(beside)
    series = [(style, points) for style, points in series if points]
    if not any(len(points) > 1 for _, points in series):
        return None
    figure, axes = canvas(titled(label_of(one), view), 3.0 + legend_height(len(series)))
    for place, (style, points) in enumerate(series):
        on_top = place / len(series)  # thinner, so that a line below another that it equals still shows
        size = {"linewidth": 3.0 - 1.6 * on_top, "markersize": 7.0 - 3.0 * on_top}
        axes.plot(list(points), list(points.values()), **style.line(), **size)
    places = sorted({place for _, points in series for place in points})
    values = [value for _, points in series for value in points.values()]
    if ceiling:
        axes.axhline(ceiling[1], **CEILING)
        at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(ceiling[0], (1, ceiling[1]), (0, 3), ha="right", fontsize=9, **at)
    if places[0] > 0:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    unit = unit_of(one)[0]
    if max(values) >= 10 * min(values) and unit != "%" and not unit.endswith("/s"):
        axes.set_yscale("log")
        log_values(axes.yaxis, values)
    else:
        axes.set_ylim(0, 1.08 * max([*values, ceiling[1] if ceiling else 0]))
        axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.set(xlabel=xlabel or label_of(view.fields[axis]), ylabel=unit)
    add_legend(figure, axes)
    apart = _apart(view, axis) if is_clocked(one) and by == "impl" else ""
    caption = view.caption(about_of(one), is_clocked(one)) + apart + _lost(view, axis, by)
    return drawn(view, figure, label_of(one), word or FILES.get(metric, metric), caption)


def _apart(view: View, *axes: str) -> str:
    """A warning where the points of one place were not sampled together."""
    timed = view.only(lambda case: case["time_s"] is not None).groups(*axes).values()
    several = any(len(own.distinct("comparison")) > 1 for own in timed)
    return " Points of one place come from several runs: not comparable within a few per cent." if several else ""


def _lost(view: View, axis: str, by: str) -> str:
    """Where a line has no point because the case ran out of memory."""
    lost = view.only(lambda case: case["outcome"] == "oom").ordered(by, axis)
    found = [
        f"{view.text(by, value)} at {', '.join(own.text(axis, place) for place in own.values(axis))}"
        for (value,), own in lost.groups(by).items()
    ]
    return f" Out of memory: {'; '.join(found)}." if found else ""


def bars(view: View, metric: str, axis: str, by: str = "impl", word: str = "") -> Plot | None:
    """A group of bars for each value of an axis, a bar for each value of `by`, or its outcome's word; None without bars.

    From zero, but where values differ by more than ten times: there the axis is logarithmic.
    """
    one, groups = view.fields[metric], view.values(axis)
    cases = {(case[by], case[axis]): case for case in view.cases}
    heights = {key: scaled(one, case[metric]) for key, case in cases.items() if (case[metric] or 0) > 0}
    words = {key: OUTCOMES.get(case["outcome"], "") for key, case in cases.items() if key not in heights}
    shown = [
        value for value in view.values(by) if any(heights.get((value, g)) or words.get((value, g)) for g in groups)
    ]
    if not heights:
        return None
    head = f"{label_of(one)} by {label_of(view.fields[axis])}"
    figure, axes = canvas(titled(head, view), 3.0 + legend_height(len(shown)))
    low, high, width = min(heights.values()), max(heights.values()), 0.84 / len(shown)
    log = high >= 10 * low
    floor, top = (low / 2, high * 1.6) if log else (0.0, high * 1.1)
    for place, value in enumerate(shown):
        style = view.style(by, value)
        at = np.arange(len(groups)) + (place - (len(shown) - 1) / 2) * width
        line = [heights.get((value, group), math.nan) for group in groups]
        look = {"color": style.color, "hatch": "////" if style.dashed else None, "edgecolor": "white", "linewidth": 0}
        axes.bar(at, line, width * 0.92, label=style.label, **look)
        for x, group in zip(at, groups, strict=True):
            foot = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 8, "color": style.color}
            axes.text(x, floor * 1.1 if log else top / 50, words.get((value, group), ""), **foot)
    if log:
        axes.set_yscale("log")
        log_values(axes.yaxis, [floor, high])
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.set_ylim(floor, top)
    add_places(axes, [_short_text(view, axis, group) for group in groups])
    axes.grid(axis="x", visible=False)
    axes.set_ylabel(unit_of(one)[0])
    add_legend(figure, axes)
    apart = _apart(view, axis) if is_clocked(one) and by == "impl" else ""
    caption = view.caption(about_of(one), is_clocked(one)) + apart
    return drawn(view, figure, head, word or FILES.get(metric, metric), caption)


def _short_text(view: View, axis: str, value: Any) -> str:
    return short(value) if type(value) is int and axis not in view.words else view.text(axis, value)


def stacked(
    view: View, layers: Sequence[str], axis: str, by: str, mark: str, word: str, head: str, about: str
) -> Plot | None:
    """Groups of bars, each a stack of fields (lighter below), its sum above and a line at the field `mark`.

    A case that lacks one of them has its outcome's word instead. None without a whole stack.
    """
    cases = {(case[by], case[axis]): case for case in view.cases}
    fields, groups, values = [view.fields[name] for name in layers], view.values(axis), view.values(by)
    stacks = {key: [scaled(one, case[one.name]) for one in fields] for key, case in cases.items()}
    marks = {key: scaled(view.fields[mark], case[mark]) for key, case in cases.items()}
    sums = {key: math.fsum(stack) for key, stack in stacks.items()}
    finite = [value for value in (*sums.values(), *marks.values()) if math.isfinite(value)]
    if not any(map(math.isfinite, sums.values())):
        return None
    figure, axes = canvas(titled(head, view), 3.0 + legend_height(len(values) + len(layers)))
    width, text = 0.84 / len(values), {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 7}
    for (value, group), stack in stacks.items():
        x, total, line = (
            groups.index(group) + (values.index(value) - (len(values) - 1) / 2) * width,
            0.0,
            marks[value, group],
        )
        if not math.isfinite(sums[value, group]):
            axes.text(x, 0, f" {OUTCOMES.get(cases[value, group]['outcome'], '')}", **text)
            continue
        for layer, height in enumerate(stack):
            axes.bar(x, height, width * 0.92, total, color=_shade(view.style(by, value).color, layer, len(layers)))
            total += height
        if math.isfinite(line):
            axes.plot([x - 0.46 * width, x + 0.46 * width], [line, line], color=INK, linewidth=1.2)
        axes.text(x, max(total, line) if math.isfinite(line) else total, f" {number(total)}", **text)
    for style in (view.style(by, value) for value in values):
        axes.bar(0, 0, color=style.color, label=style.label)
    for layer, one in enumerate(fields):
        axes.bar(0, 0, color=_shade(INK, layer, len(layers)), label=label_of(one))
    axes.set_ylim(0, 1.25 * max(finite))
    add_places(axes, [view.text(axis, group) for group in groups])
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.set_ylabel(unit_of(fields[0])[0])
    add_legend(figure, axes)
    return drawn(view, figure, head, word, view.caption(about, is_clocked(fields[0])))


def _shade(color: str, layer: int, layers: int) -> str:
    """The colour, the lighter the lower the layer."""
    return lighter(color, 1 - (layer + 1) / layers)


def heat_map(view: View, axes_: Sequence[str]) -> Plot | None:
    """Speedups: a row for each row of the table, a column for each setting of some axes; None without any but 1.

    A row without any speedup is there too: its words say why.
    """
    if len({case["impl"] for case in view.cases if case[SPEEDUP]}) < 2:  # the base beside nothing
        return None
    cases = {(case["impl"], *(case[name] for name in axes_)): case for case in view.cases}
    rows, columns = view.values("impl"), view.distinct(*axes_)
    texts = [[_speed_text(view, cases.get((row, *key))) for key in columns] for row in rows]
    if len(axes_) == 1:
        heads, xlabel = [_short_text(view, axes_[0], key[0]) for key in columns], label_of(view.fields[axes_[0]])
    else:
        names = [label_of(view.fields[name]) for name in axes_]
        heads = [
            ", ".join(f"{n} {view.text(a, v)}" for n, a, v in zip(names, axes_, key, strict=True)) for key in columns
        ]
        xlabel = ""
    slanted = sum(map(len, heads)) > 36
    base = view.text("impl", view.base)
    figure, axes = canvas(
        titled(f"Speedup over {base}", view), 0.25 * len(rows) + 0.8 + (0.055 * max(map(len, heads)) if slanted else 0)
    )
    speeds = [[(cases.get((row, *key)) or {}).get(SPEEDUP) or math.nan for key in columns] for row in rows]
    full = math.log2(FULL_COLOUR)
    axes.imshow(np.log2(np.array(speeds)), cmap="RdBu", vmin=-full, vmax=full, aspect="auto", alpha=0.85)
    for y, line in enumerate(speeds):
        for x, value in enumerate(line):
            strong = math.isfinite(value) and abs(math.log2(value)) > 0.6 * full
            look = {"ha": "center", "va": "center", "fontsize": 8.5 if len(columns) <= 8 else 7}
            axes.text(x, y, texts[y][x], color="white" if strong else INK, **look)
    axes.set_xticks(range(len(heads)), heads, fontsize=9)
    axes.tick_params(axis="x", rotation=40 if slanted else 0)
    axes.set_yticks(range(len(rows)), [view.text("impl", row) for row in rows], fontsize=9)
    axes.tick_params(length=0)
    axes.set(xlabel=xlabel, facecolor="#f3f4f6")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    also = [f"Blue is faster, red slower, full colour from {FULL_COLOUR:g}×."]
    also += [f"No base: {base} has no time there."] * any(NO_BASE in line for line in texts)
    also += [f"Blank: not sampled together with {base}."] * any("" in line for line in texts)
    caption = " ".join([view.caption(about_of(view.fields[SPEEDUP]), clocked=True), *also])
    return drawn(view, figure, f"Speedup over {base}", "heat", caption)


def _speed_text(view: View, case: Record | None) -> str:
    """What stands in a cell of the heat map: the speedup, or why there is none."""
    if case is None:
        return NOT_RUN
    if case["outcome"] != "ok":
        return OUTCOMES[case["outcome"]]
    if speed := case[SPEEDUP]:
        return f"{speed:.2f}" if speed < 10 else f"{speed:.0f}"
    return "untimed" if case["time_s"] is None else NO_BASE if case["remark"] else ""


def roofline(view: View, matmul: float | None, copy: float | None) -> Plot | None:
    """Achieved TFLOP/s against FLOP/byte, under the measured ceilings (FLOP/s, bytes/s); None without points."""
    points: dict[Any, list[tuple[float, float]]] = {}
    for case in view.ordered("impl").cases:
        if case["bytes"] and case["flops_per_s"]:
            points.setdefault(case["impl"], []).append((case["flops"] / case["bytes"], case["flops_per_s"] / 1e12))
    if not points:
        return None
    figure, axes = canvas(titled("Roofline", view), 3.0 + legend_height(len(points)))
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
    add_legend(figure, axes)
    about = (
        "Achieved rate against arithmetic intensity. Bytes are ideal: each input read once, each output written once"
    )
    return drawn(view, figure, "Roofline", "roofline", view.caption(about, clocked=True))
