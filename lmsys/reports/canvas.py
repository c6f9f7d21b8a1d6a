"""Figures in one style, and as SVG text that is the same for the same drawing."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

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


@dataclass(frozen=True)
class Plot:
    """A drawing; `name` is the stem of its file, `source` where its numbers are from."""

    name: str
    title: str
    caption: str
    svg: str
    source: str = ""

    def files(self) -> dict[str, str]:
        return {f"plots/{self.name}.svg": self.svg}


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
