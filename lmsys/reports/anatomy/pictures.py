"""Plots of opened models: shares of the kinds of kernels, and memory in the course of a call."""

from typing import Any

from matplotlib.ticker import FuncFormatter

from lmsys.reports import tables
from lmsys.reports.anatomy.cases import KINDS, View, case_name, memory_unit, variant
from lmsys.reports.anatomy.times import setting_stem
from lmsys.reports.plots import Plot, add_legend, canvas, legend_height, plain, to_svg

COLOURS = dict(zip(KINDS, "#2563eb #9333ea #b45309 #dc2626 #0891b2 #16a34a #9ca3af".split(), strict=True))
PHASES = {"forward": "#2563eb", "backward": "#dc2626", "optimizer": "#16a34a"}
HELD = "#9ca3af"
NARROW = 0.06  # a segment with less of the bar has no room for its number


def shares(view: View) -> Plot | None:
    """A bar for each case of one setting, divided by kind of kernel; None without any."""
    cases = [case for case in view.cases if case.kernel_s > 0]
    if not cases:
        return None
    kinds = [kind for kind in KINDS if any(getattr(case, f"{kind}_share") > 0 for case in cases)]
    title = f"Time by kind of kernel, % · {view.heading}"
    figure, axes = canvas(title, 0.52 * len(cases) + legend_height(len(kinds)) + 0.4)
    for row, case in enumerate(cases):
        left = 0.0
        for kind in kinds:
            share = getattr(case, f"{kind}_share")
            axes.barh(row, share, 0.5, left, color=COLOURS[kind], label=kind if row == 0 else None)
            if share >= NARROW:
                at = left + share / 2
                axes.text(at, row, f"{100 * share:.0f}", ha="center", va="center", color="white", fontsize=8.5)
            left += share
        axes.text(0, row - 0.3, case_name(case), va="bottom", fontsize=8.5)
        axes.text(1, row - 0.3, f"{tables.number(1e3 * case.kernel_s)} ms", va="bottom", ha="right", fontsize=8.5)
    axes.set(xlim=(0, 1), ylim=(len(cases) - 0.6, -0.75), yticks=[])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    add_legend(figure, axes)
    caption = view.caption("Share of the time of all kernels in one call, %; that time to the right above each bar.")
    name = view.stem(setting_stem(view), "shares")
    return Plot(name, title, caption, to_svg(figure, name))


def timeline(view: View, case: Any) -> Plot | None:
    """Memory in use in the course of a call, a colour for each phase; None where none was recorded."""
    points = [(at, case.held_bytes + size, one["name"]) for one in case.timeline for at, size in one["points"]]
    if len(points) < 2:
        return None
    most = max(size for _, size, _ in points)
    unit, scale = memory_unit(most)
    title = f"Memory in the course of {_call(case)}, {unit} · {view.heading}, {variant(case)}"
    figure, axes = canvas(title, 2.6 + legend_height(1 + len(case.timeline)))
    end = points[-1][0] * 1e3
    axes.fill_between([0, end], case.held_bytes / scale, color=HELD, alpha=0.55, linewidth=0, label="held before")
    before = (0.0, case.held_bytes / scale)
    for phase in case.timeline:
        line = [before, *((1e3 * at, (case.held_bytes + size) / scale) for at, size in phase["points"])]
        xs, ys = zip(*line, strict=True)
        colour = PHASES.get(phase["name"], "#111827")
        axes.plot(xs, ys, drawstyle="steps-post", color=colour, linewidth=1.0)
        axes.fill_between(
            xs, case.held_bytes / scale, ys, step="post", color=colour, alpha=0.3, linewidth=0, label=phase["name"]
        )
        before = line[-1]
    axes.axhline(most / scale, color="#111827", linewidth=0.8, linestyle=(0, (1, 1.5)))
    axes.text(0, most / scale, f" peak {tables.number(most / scale)} {unit}", va="bottom", fontsize=9)
    axes.set(xlim=(0, end), ylim=(0, 1.14 * most / scale), xlabel="ms", ylabel=unit)
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    add_legend(figure, axes)
    own = view.only(view.frame["id"] == case.id)
    caption = own.caption(
        f"Memory in use, {unit}, after each event of the allocator, the first at 0 ms; held before are the weights "
        "and, in a step, the optimizer's state. Time is the host's, slowed by the recording. Of many events the "
        "extremes are drawn."
    )
    name = own.stem(case.id, "timeline")
    return Plot(name, title, caption, to_svg(figure, name))


def _call(case: Any) -> str:
    return "one step" if case.mode == "step" else "one inference"
