"""Where all rows of a question stand: the fastest one's time and rate, and everybody's speed beside it as one plot."""

from collections.abc import Mapping, Sequence

from lmsys.bench.fields import Field, Record
from lmsys.bench.verdict import time_of
from lmsys.reports import plots
from lmsys.reports.load import Machine
from lmsys.reports.tables import Plot
from lmsys.reports.views import styles_of
from lmsys.reports.words import digits, label_of, number, scaled, unit_of

TIME = Field("time_s", "s", "time", shown="ms")
LINE_IN = 0.29  # of a setting and its dots
ABOUT = (
    "Speed of each row beside the fastest of the setting, %, by rounds in which both took turns; of several shapes it"
    " is the geometric mean. Right is faster."
)


def figures(machine: Machine, cases: Sequence[Record]) -> Record:
    """Time and rate of a row in the case that takes it longest, of these; `measured`: the two in words; `shape`: which.

    The rate is the first that its benchmark declares; without one there is no word for it.
    """
    case, fields = max(cases, key=time_of), machine.fields[cases[0]["benchmark"]].values()
    rates = [one for one in fields if one.role == "metric" and one.unit.endswith("/s") and case.get(one.name)][:1]
    sizes = [one for one in fields if one.role == "axis" and len({case.get(one.name) for case in cases}) > 1]
    shape = ", ".join(f"{label_of(one)} {digits(case[one.name])}" for one in sizes)
    measured = [f"{number(scaled(one, case[one.name]))}\N{NO-BREAK SPACE}{unit_of(one)[0]}" for one in (TIME, *rates)]
    return {one.name: case[one.name] for one in (TIME, *rates)} | {"shape": shape, "measured": [*measured, ""][:2]}


def drawn(machine: Machine, lines: Mapping[str, Mapping[str, float]], title: str, name: str, kind: str) -> Plot | None:
    """A strip of dots for each setting, a dot for each row; None where nobody stands beside the fastest.

    `lines`: of each setting the speed of each row over that of its fastest; `kind`: the table of the rows' looks.
    """
    table, rows = machine.rows.get(kind, {}), {row for speeds in lines.values() for row in speeds}
    peers = {str(case.get("strategy") or case["impl"]): bool(case.get("peer")) for case in machine.records}
    styles = styles_of([{"row": row, "peer": peers[row]} for row in rows], "row", "row", "", table)
    if len(rows) < 2:
        return None
    axes = plots.canvas(LINE_IN * len(lines) + 0.4)
    for row, style in styles.items():
        dots = [(100 * speeds[row], place) for place, speeds in enumerate(lines.values()) if row in speeds]
        axes.plot(*zip(*dots, strict=True), **{**style.line(), "linestyle": "none", "alpha": 0.85}, clip_on=False)
    for place, setting in enumerate(lines):
        axes.text(0, place - 0.17, setting, va="bottom", fontsize=8)
    axes.set(xlim=(0, 104), ylim=(len(lines) - 0.5, -0.9), yticks=[*range(len(lines))], yticklabels=[], xlabel="%")
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    return Plot(name, title, ABOUT, plots.to_svg(axes, name, title))
