"""Drawing: figures to SVG text that is the same for the same data, in one style per implementation."""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from lmsys.reports.tables import number

WIDTH_IN = 5.0  # about a phone's width at matplotlib's 72 points an inch, so that text keeps its size there
PALETTE = (
    "#6b7280 #a16207 #65a30d #9333ea #f59e0b #dc2626 #be185d #7c2d12"  # solid: ours
    " #9ca3af #0891b2 #2563eb #16a34a #1e3a8a #38bdf8 #0f766e"  # dashed: peers
    " #db2777 #111827 #84cc16 #c026d3"
).split()
FULL_COLOUR = 4.0  # the ratio from which a heat map's colour says no more, the same in every plot
MARKERS = "osD^vPX*<>hpd8H"
CEILING = {"color": "#111827", "linewidth": 1.0, "linestyle": (0, (1, 1.5)), "zorder": 1}
STYLE = {
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
}


@dataclass(frozen=True)
class Plot:
    """A drawing; `name` is the stem of its file."""

    name: str
    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Look:
    """How one implementation looks in every plot."""

    label: str
    color: str
    dashed: bool
    marker: str

    def line(self) -> dict[str, Any]:
        style = (0, (4, 1.6)) if self.dashed else "-"
        return {"label": self.label, "color": self.color, "marker": self.marker, "linestyle": style}


def assign_looks(labels: Mapping[str, tuple[str, bool]], order: Sequence[str]) -> dict[str, Look]:
    """A look for each implementation, given `(label, peer)` by name, that does not depend on who else is there.

    Names outside `order` take the places after it.
    """
    places = [*order, *sorted(labels.keys() - set(order))]
    found = {}
    for place, name in enumerate(places):
        if name in labels:
            label, peer = labels[name]
            found[name] = Look(label, PALETTE[place % len(PALETTE)], peer, MARKERS[place % len(MARKERS)])
    return found


def canvas(title: str, height_in: float) -> tuple[Any, Any]:
    """A figure in our style and its axes; " · " in the title begins a line."""
    matplotlib.rcdefaults()  # a matplotlibrc of the user's must not change the bytes
    matplotlib.rcParams.update(STYLE)
    figure = Figure(figsize=(WIDTH_IN, 0.3 + height_in), layout="constrained")
    figure.suptitle(title.replace(" · ", "\n"), x=0.01, ha="left", fontsize=10)
    return figure, figure.add_subplot()


def to_svg(figure: Any, name: str) -> str:
    """The drawing as text: the same bytes for the same figure and name."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    # Group ids repeat from plot to plot and would clash where several plots stand in one page.
    text = re.sub(r'<g id="[^"]*">', "<g>", file.getvalue())
    # Where the font is not installed: its twin in width, or at least no serifs.
    return text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def add_legend(figure: Any, axes: Any) -> None:
    """What `axes` labels, below the drawing, in two columns; `legend_height` is the room that it takes.

    Where two are wider than the drawing it is one, and the drawing grows by as much.
    """
    handles, labels = axes.get_legend_handles_labels()
    place = {"handles": handles, "labels": labels, "loc": "outside lower center"}
    legend = figure.legend(**place, ncols=2 if len(labels) > 1 else 1)
    if legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        figure.legend(**place, ncols=1)
        figure.set_figheight(figure.get_figheight() + legend_height(2 * len(labels)) - legend_height(len(labels)))


def legend_height(entries: int) -> float:
    return 0.2 * math.ceil(entries / 2) + 0.1


def crowded(labels: Sequence[str]) -> bool:
    """Whether labels of places side by side run into one another unless they are slanted."""
    return len(labels) * max(map(len, labels), default=0) > 45


def short(length: float) -> str:
    """A sequence length for an axis: 512, 1k, 64k."""
    return f"{length / 1024:g}k" if length >= 1024 and length % 1024 == 0 else f"{length:,.0f}"


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


def lines(
    name: str,
    title: str,
    caption: str,
    series: Mapping[str, Mapping[int, float]],
    style: Mapping[str, Look],
    unit: str,
    xlabel: str,
    log: bool = True,
    ceiling: tuple[str, float] | None = None,
) -> Plot | None:
    """A value against sequence length, a line for each implementation; None where no line would have two points."""
    series = {impl: points for impl, points in series.items() if points}
    if not any(len(points) > 1 for points in series.values()):
        return None
    figure, axes = canvas(title, 3.0 + legend_height(len(series)))
    for place, (impl, points) in enumerate(series.items()):
        on_top = place / len(series)  # thinner, so that a line below another that it equals still shows
        size = {"linewidth": 3.0 - 1.6 * on_top, "markersize": 7.0 - 3.0 * on_top}
        axes.plot(list(points), list(points.values()), **style[impl].line(), **size)
    lengths = sorted({length for points in series.values() for length in points})
    values = [value for points in series.values() for value in points.values()]
    if ceiling:
        axes.axhline(ceiling[1], **CEILING)
        axes.annotate(
            ceiling[0], (1, ceiling[1]), (0, 3), ("axes fraction", "data"), "offset points", ha="right", fontsize=9
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(round(value))))
    if log:
        axes.set_yscale("log")
        log_values(axes.yaxis, values)
    else:
        axes.set_ylim(0, 1.08 * max([*values, ceiling[1] if ceiling else 0]))
        axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.set(xlabel=xlabel, ylabel=unit)
    add_legend(figure, axes)
    return Plot(name, title, caption, to_svg(figure, name))


def heat_map(
    name: str,
    title: str,
    caption: str,
    values: Sequence[Sequence[float]],
    texts: Sequence[Sequence[str]],
    rows: Sequence[str],
    columns: Sequence[str],
    xlabel: str,
) -> Plot:
    """Ratios around 1, a row for each implementation and a column for each shape; `texts` stand in the cells."""
    slanted = sum(map(len, columns)) > 36
    figure, axes = canvas(title, 0.25 * len(rows) + 0.8 + (0.055 * max(map(len, columns)) if slanted else 0))
    shades = np.log2(np.array(values, dtype=float))
    span = math.log2(FULL_COLOUR)
    axes.imshow(shades, cmap="RdBu", vmin=-span, vmax=span, aspect="auto", alpha=0.85)
    size = 8.5 if len(columns) <= 8 else 7
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            strong = math.isfinite(value) and abs(math.log2(value)) > 0.6 * span
            axes.text(
                x, y, texts[y][x], ha="center", va="center", fontsize=size, color="white" if strong else "#111827"
            )
    axes.set_xticks(range(len(columns)), columns, fontsize=9)
    axes.tick_params(axis="x", rotation=40 if slanted else 0)
    axes.set_xlabel(xlabel)
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.set_facecolor("#f3f4f6")
    axes.spines[:].set_visible(False)
    return Plot(name, title, caption, to_svg(figure, name))


def roofline(
    name: str,
    title: str,
    caption: str,
    points: Mapping[str, Sequence[tuple[float, float]]],
    style: Mapping[str, Look],
    matmul: float | None,
    copy: float | None,
) -> Plot | None:
    """Achieved TFLOP/s against FLOP/byte, under the measured ceilings (FLOP/s, bytes/s); None without points."""
    points = {impl: found for impl, found in points.items() if found}
    if not points:
        return None
    figure, axes = canvas(title, 3.0 + legend_height(len(points)))
    for impl, found in points.items():
        axes.plot(*zip(*found, strict=True), **{**style[impl].line(), "linestyle": "none", "alpha": 0.85})
    intensities = [x for found in points.values() for x, _ in found]
    rates = [y for found in points.values() for _, y in found]
    ridge = matmul / copy if matmul and copy else None
    left = min([*intensities, *([ridge] if ridge else [])]) / 4  # room for the label of the slope
    right = max([*intensities, *([ridge] if ridge else [])]) * 1.6
    note = {"textcoords": "offset points", "fontsize": 9}
    if matmul:
        axes.plot([ridge or left, right], [matmul / 1e12] * 2, **CEILING)
        label = f"matmul {number(matmul / 1e12)} TFLOP/s"
        axes.annotate(label, (right, matmul / 1e12), xytext=(0, 3), ha="right", **note)
        rates.append(matmul / 1e12)
    if copy:
        end = min(ridge or right, right)
        axes.plot([left, end], [left * copy / 1e12, end * copy / 1e12], **CEILING)
        label = f"copy {number(copy / 1e9)} GB/s"
        axes.annotate(label, (left, left * copy / 1e12), xytext=(6, -4), va="top", **note)
        rates.append(left * copy / 1e12)
    axes.set(xscale="log", yscale="log", xlim=(left, right), xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s")
    axes.set_ylim(min(rates) / 1.6, max(rates) * 1.8)
    log_values(axes.xaxis, [left, right])
    log_values(axes.yaxis, rates)
    add_legend(figure, axes)
    return Plot(name, title, caption, to_svg(figure, name))
