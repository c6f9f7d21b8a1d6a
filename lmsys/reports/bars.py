"""Drawing bars: grouped, and grouped with each bar a stack of layers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.ticker import FuncFormatter

from lmsys.reports.plots import Look, Plot, add_legend, canvas, crowded, legend_height, log_values, plain, to_svg
from lmsys.reports.tables import number


def bars(
    name: str,
    title: str,
    caption: str,
    tiers: Sequence[str],
    values: Mapping[str, Sequence[float]],
    words: Mapping[str, Sequence[str]],
    style: Mapping[str, Look],
    unit: str,
) -> Plot | None:
    """A group of bars for each tier, a bar for each implementation, or its outcome's word; None without bars.

    From zero, but where values differ by more than ten times: there the axis is logarithmic.
    """
    values = {impl: line for impl, line in values.items() if any(map(math.isfinite, line)) or any(words[impl])}
    finite = [value for line in values.values() for value in line if math.isfinite(value)]
    if not finite:
        return None
    figure, axes = canvas(title, 3.0 + legend_height(len(values)))
    width = 0.84 / len(values)
    log = max(finite) >= 10 * min(finite)
    floor, top = (min(finite) / 2, max(finite) * 1.6) if log else (0.0, max(finite) * 1.1)
    foot = floor * 1.1 if log else top / 50
    for place, (impl, line) in enumerate(values.items()):
        look = style[impl]
        at = np.arange(len(tiers)) + (place - (len(values) - 1) / 2) * width
        hatch = "////" if look.dashed else None
        axes.bar(
            at, line, width * 0.92, label=look.label, color=look.color, hatch=hatch, edgecolor="white", linewidth=0
        )
        for x, value, word in zip(at, line, words[impl], strict=True):
            if not math.isfinite(value) and word:
                axes.text(x, foot, word, rotation=90, ha="center", va="bottom", fontsize=8, color=look.color)
    if log:
        axes.set_yscale("log")
        log_values(axes.yaxis, [floor, max(finite)])
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.set_ylim(floor, top)
    slanted = crowded(tiers)
    axes.set_xticks(range(len(tiers)), tiers, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    axes.set_xlim(-0.5, len(tiers) - 0.5)  # bars without a height would not widen it to the words in their places
    axes.grid(axis="x", visible=False)
    axes.set_ylabel(unit)
    add_legend(figure, axes)
    return Plot(name, title, caption, to_svg(figure, name))


def stacked(
    name: str,
    title: str,
    caption: str,
    groups: Sequence[str],
    stacks: Mapping[str, Sequence[Sequence[float]]],
    words: Mapping[str, Sequence[str]],
    marks: Mapping[str, Sequence[float]],
    style: Mapping[str, Look],
    layers: Sequence[str],
    unit: str,
) -> Plot | None:
    """Groups of bars from zero, each a stack of layers (lighter below), its sum above and a line at its mark.

    `stacks[variant][group]` has a value for each layer; where one is missing the group's word stands instead.
    None without a whole stack.
    """
    sums = {variant: [math.fsum(stack) for stack in line] for variant, line in stacks.items()}
    finite = [value for line in [*sums.values(), *marks.values()] for value in line if math.isfinite(value)]
    if not any(math.isfinite(value) for line in sums.values() for value in line):
        return None
    figure, axes = canvas(title, 3.0 + legend_height(len(stacks) + len(layers)))
    width = 0.84 / len(stacks)
    for place, (variant, line) in enumerate(stacks.items()):
        shades = [_shade(style[variant].color, layer, len(layers)) for layer in range(len(layers))]
        at = np.arange(len(groups)) + (place - (len(stacks) - 1) / 2) * width
        for x, stack, word, mark in zip(at, line, words[variant], marks[variant], strict=True):
            _stack(axes, x, width * 0.92, stack, shades, mark, word)
        axes.bar(0, 0, color=style[variant].color, label=style[variant].label)
    for layer, label in enumerate(layers):
        axes.bar(0, 0, color=_shade("#111827", layer, len(layers)), label=label)
    axes.set_ylim(0, 1.25 * max(finite))
    axes.set_xlim(-0.5, len(groups) - 0.5)
    slanted = crowded(groups)
    axes.set_xticks(range(len(groups)), groups, rotation=45 if slanted else 0, ha="right" if slanted else "center")
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    axes.set_ylabel(unit)
    add_legend(figure, axes)
    return Plot(name, title, caption, to_svg(figure, name))


def _stack(
    axes: Any, x: float, width: float, stack: Sequence[float], shades: Sequence[Any], mark: float, word: str
) -> None:
    """One bar with its sum above, or the word in its place."""
    total = math.fsum(stack)
    text = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 7}
    if not math.isfinite(total):
        axes.text(x, 0, f" {word}", **text)
        return
    for layer, value in enumerate(stack):
        axes.bar(x, value, width, math.fsum(stack[:layer]), color=shades[layer])
    if math.isfinite(mark):
        axes.plot([x - width / 2, x + width / 2], [mark, mark], color="#111827", linewidth=1.2)
    axes.text(x, max(total, mark) if math.isfinite(mark) else total, f" {number(total)}", **text)


def _shade(color: str, layer: int, layers: int) -> tuple[float, ...]:
    """The colour, mixed with the more white the lower the layer."""
    strength = (layer + 1) / layers
    return tuple(1 - strength * (1 - channel) for channel in to_rgb(color))
