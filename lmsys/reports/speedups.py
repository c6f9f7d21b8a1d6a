"""How much faster one case is than another: from rounds that were sampled together, and their geometric means."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lmsys.bench.fields import Field, Record
from lmsys.bench.verdict import ratio_of
from lmsys.reports.views import Fields, View
from lmsys.reports.words import MEANINGS, number

SPEEDUP = "speedup"


def bases_of(view: View, otherwise: Iterable[str] = ()) -> list[str]:
    """The rows that speeds are relative to, of those timed here: the user's choice, else those that the table names."""
    preferred = {name: row["baseline"] for name, row in view.table().items() if row.get("baseline")}
    names = [view.wanted] if view.wanted else [*sorted(preferred, key=lambda name: -preferred[name]), *otherwise]
    timed = {case["impl"] for case in view.cases if case["time_s"] is not None}
    return [name for name in dict.fromkeys(names) if name in timed]


def base_of(view: View, otherwise: Iterable[str] = ()) -> str | None:
    """The first of these, None without any."""
    return next(iter(bases_of(view, otherwise)), None)


def beside(view: View, base: str | None, axis: str = "impl", same: Sequence[str] = ()) -> View:
    """Adds, as `beside`, the case that has `base` on an axis and is alike on the axes `same`, else on all others.

    None where that was not run.
    """
    same = same or [name for name in view.axes() if name not in (axis, "label", "peer")]
    bases = {tuple(case[name] for name in same): case for case in view.cases if case[axis] == base}
    return replace(
        view, cases=[{**case, "beside": bases.get(tuple(case[name] for name in same))} for case in view.cases]
    )


def compared(
    view: View,
    base: str | None,
    axis: str = "impl",
    same: Sequence[str] = (),
    medians: bool = False,
    name: str = SPEEDUP,
) -> View:
    """Adds the speedup, as the field `name`, over what is `beside` each case.

    Of cases that were not sampled together there is none, or with `medians` the ratio of their medians. `remark` says
    why a timed case has none, or that its speedup is such a ratio while others' are not.
    """
    view, label = beside(view, base, axis, same), view.text(axis, base)
    for case in view.cases:
        other = case["beside"]
        case[name] = other and ratio_of(case, other)
        case["remark"] = "" if base is None or case["time_s"] is None else _no_base(label, other)
    paired = any(case[name] for case in view.cases if case[axis] != base)
    for case in view.cases if medians else ():
        if case["beside"] and case[name] is None and case["time_s"] and not case["remark"]:
            case[name] = case["beside"]["time_s"] / case["time_s"]
            case["remark"] = "ratio of medians: not sampled together" if paired else ""
    how = "median of rounds sampled together" if paired or not medians else "ratio of medians, not sampled together"
    about = f"Time of {label} divided by time, {how}"
    field = Field(name, label=f"Speedup over {label}", role="detail", about=about, shown="×")
    return replace(view, base=base, fields=Fields(view.fields | {name: field}))


def _no_base(label: str, base: Record | None) -> str:
    """Why nothing has a speedup over this case of the base, None where it was not run; "" where it was timed."""
    if base is None:
        return f"{label} was not run here"
    if base["time_s"] is not None:
        return ""
    ended = MEANINGS.get(base["outcome"], "not timed")
    return f"{label} has no time here: {ended}" + (f" ({base['reason']})" if base["reason"] else "")


def is_compared(view: View) -> bool:
    """True where more than the base itself has a speedup."""
    return any(case[SPEEDUP] is not None and case["impl"] != view.base for case in view.cases)


def geometric_mean(values: Iterable[float | None]) -> tuple[float, int]:
    """The geometric mean of the values that there are, NaN of none, and how many."""
    found = [value for value in values if value]
    return (statistics.geometric_mean(found) if found else math.nan), len(found)


def mean_text(values: Iterable[float | None]) -> str:
    """The geometric mean as tables show it, with how many it is of."""
    mean, count = geometric_mean(values)
    return f"{number(mean)} ({count})" if count else ""
