"""Texts of table cells, with footnotes and details; and the speedups that some of them show.

`cell` makes the text of one field of one case, and numbers the footnotes that it needs in a `Notes`, which `below`
turns into lines; `detail` is what a reader gets who points at the cell. Speedups are added to a view by `compared`
(layouts call it `over`), before `tables` and `plots` draw it: medians of the ratios of rounds that were sampled
together. Their means are geometric. `tables`, `special`, `answers`, `against` and `terminal` call these functions.
"""

import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lmsys.bench import fields, verdict
from lmsys.reports import load, views, words
from lmsys.values import sentences_of

SPEEDUP = "speedup"  # the field that `compared` adds


def baselines_of(view: views.View, otherwise: str = "") -> list[str]:
    """The rows that speedups are over, of those timed in this view.

    These are the row that the user asked for by --baseline; else the rows with the trait `baseline` in their table, the
    greatest first. Then, for `otherwise` "peer", come the peers, somebody else's rows; for "any" the peers, then ours.
    """
    preferred = {name: row["baseline"] for name, row in view.table().items() if row.get("baseline")}
    rows = view.values("impl") if otherwise else []
    peers = [row for row in rows if view.styles["impl"][row].dashed]  # only the lines of peers are dashed
    ranked = sorted(preferred, key=preferred.__getitem__, reverse=True) + peers + rows * (otherwise == "any")
    timed = view.only("time_s is not None").column("impl")
    return [name for name in dict.fromkeys([view.wanted] if view.wanted else ranked) if name in timed]


def beside(view: views.View, base: str | None, axis: str = "impl", same: Sequence[str] = ()) -> views.View:
    """Adds the field `beside`: the case of the base that a case is compared with, None where it was not run.

    That case has the value `base` on `axis`, and the case's own values on the axes `same`, by default on all others.
    """
    same = same or [name for name in view.axes() if name not in (axis,) + views.OF_THE_ROW]
    bases = view.having(axis, [base]).index(same)
    return view.adding(lambda case: {"beside": bases.get(views.key_of(case, same))})


def compared(
    view: views.View,
    base: str | None = "",
    axis: str = "impl",
    otherwise: str = "",
    same: Sequence[str] = (),
    medians: bool = False,
    name: str = SPEEDUP,
) -> views.View:
    """Adds the field `name`: the speedup of each case over the case of `base` that `beside` finds for it.

    base        by default the first of `baselines_of(view, otherwise)`
    axis, same  as in `beside`

    For cases that were not sampled together with the base it is None, or with `medians` the ratio of the two medians.
    The field `remark`, a footnote, says why a timed case has no speedup. It also marks a ratio of medians, if others
    of the view were sampled together with the base.
    """
    base = base or next(iter(baselines_of(view, otherwise)), None)
    view, label = beside(view, base, axis, same), view.text(axis, base)
    for case in view.cases:
        other = case["beside"]
        case[name] = other and verdict.ratio_of(case, other)  # None unless both were sampled together
        case["remark"] = "" if base is None or case["time_s"] is None else _why_no_ratio(label, other)
    paired = any(case[name] for case in view.cases if case[axis] != base)
    for case in view.cases if medians else ():
        if case["beside"] and case[name] is None and case["time_s"] and not case["remark"]:
            case[name] = case["beside"]["time_s"] / case["time_s"]
            case["remark"] = "ratio of medians: not sampled together" if paired else ""
    how = "median of rounds sampled together" if paired or not medians else "ratio of medians, not sampled together"
    field = fields.Field(
        name,
        label=f"Speedup over {label}",
        role="detail",
        about=f"Time of {label} divided by time, {how}",
        shown="×",
    )
    return replace(view.with_fields([field]), base=base)


def _why_no_ratio(label: str, base: fields.Record | None) -> str:
    """Why there is no speedup over this case of the base, whose label is given; "" where the base was timed.

    `base` is None where it was not run.
    """
    if base is None:
        return f"{label} was not run here"
    if base["time_s"] is not None:
        return ""
    reason = f" ({base['reason']})" * bool(base["reason"])
    return f"{label} has no time here: {words.MEANINGS.get(base['outcome'], 'not timed')}{reason}"


def is_compared(view: views.View) -> bool:
    """True where any row besides the base has a speedup."""
    return any(case[SPEEDUP] is not None and case["impl"] != view.base for case in view.cases)


def geometric_mean(values: Iterable[float | None]) -> tuple[float, int]:
    """The geometric mean of the values that are not None, NaN without any, and their number."""
    known = list(filter(None, values))
    return (statistics.geometric_mean(known) if known else math.nan), len(known)


def mean_text(values: Iterable[float | None]) -> str:
    """The geometric mean as tables show it, with the number of values: "1.23 (6)"; "" without any."""
    mean, count = geometric_mean(values)
    return f"{words.number(mean)} ({count})" if count else ""


# {share of a ceiling: the ceiling in words}
CEILINGS = {"matmul_ceiling_fraction": "large matmul", "copy_ceiling_fraction": "large copy"}
RATED = {"flops_per_s": "matmul_ceiling_fraction", "bytes_per_s": "copy_ceiling_fraction"}  # {rate: share of a ceiling}
NOT_RUN = "–"  # the text of a cell whose case was not run
DETAILS = "; "  # separates the facts behind a figure
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
STEADY = 0.2  # the largest spread of the samples of a steady case, as a share of the median
UNSTEADY = f"Unsteady: from p20 to p80 its samples spread over more than {STEADY:.0%} of the median."
SAME_BITS = {None: "", True: "the same bits each time", False: "bits vary"}  # of repeated calls

STATE = (  # of the machine while a case was sampled: field, label, unit
    ("sm_clock_mhz", "SM clock", "MHz"),
    ("memory_clock_mhz", "memory clock", "MHz"),
    ("cpu_clock_mhz", "CPU clock", "MHz"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "°C"),
)

Notes = dict[str, int]  # the footnotes of a table, each with its number


def mark(notes: Notes, text: str) -> str:
    """Adds a footnote, unless it is there already, and returns the superscript that refers to it."""
    return str(notes.setdefault(textwrap.shorten(text, 160, placeholder=" …"), len(notes) + 1)).translate(SUPERSCRIPT)


def below(notes: Notes, rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines below a table with these rows: its footnotes, and the meaning of a dash if a cell has one."""
    lines = [f"{str(number).translate(SUPERSCRIPT)} {text}" for text, number in notes.items()]
    return lines + [f"{NOT_RUN} not run."] * any(NOT_RUN in text for row in rows for text in row)


def cell(view: views.View, name: str, case: fields.Record | None, notes: Notes, ending: bool = True) -> str:
    """The text of a cell: the field `name` of a case, with superscripts of footnotes. case None: it was not run.

    With `ending` the cell of a case that failed also says how it ended, and an empty one of an untimed case says why.
    """
    if case is None:
        return NOT_RUN
    text, reason = shown(view, name, case), case["reason"] or ""
    if ending and case["outcome"] != "ok":
        meaning = words.MEANINGS[case["outcome"]] + f": {reason}" * bool(reason)
        return f"{text} {words.OUTCOMES[case['outcome']]}".strip() + mark(notes, meaning)
    if ending and not text and case["time_s"] is None and reason:
        return "untimed" + mark(notes, reason)
    remarks = {SPEEDUP: case.get("remark"), "energy_j": case.get("energy_note")}  # the footnote that a field brings
    remark = remarks.get(name, above_ceiling(name, case)) or ""
    text = text or ("no baseline" if name == SPEEDUP else "not measured") * bool(remark)
    is_clocked = text and words.is_clocked(view.fields[name])
    beside = name == SPEEDUP and case.get("beside") or {}
    disturbed = case.get("disturbed") or beside.get("disturbed")
    footnotes = sentences_of(
        (True, remark),
        (is_clocked and (words.spread_of(case) or 0.0) > STEADY, UNSTEADY),
        (is_clocked and disturbed, f"Disturbed: {disturbed}."),
    )
    return text + "".join([mark(notes, footnote) for footnote in footnotes])


def above_ceiling(name: str, case: fields.Record) -> str:
    """The footnote on a rate, or a share of a ceiling, above what this machine reached at its best; "" for others."""
    share = RATED.get(name, name)
    if share not in CEILINGS or (case.get(share) or 0.0) <= 1:
        return ""
    return f"Above the {CEILINGS[share]} that was measured in this run, before and after: one of the two is not right."


def shown(view: views.View, name: str, case: fields.Record) -> str:
    """A field's value as tables show it: an axis with all its digits, a metric with three."""
    field, value = view.fields[name], case[name]
    if value is None or field.role == "axis" or not isinstance(value, (int, float)):
        return view.text(name, value)
    if isinstance(value, int) and not words.unit_of(field)[0]:
        return words.exact(value)
    text = words.number(words.scaled(field, value))
    if name == "mean_s" and case["std_s"] is not None:
        text += f" ± {words.number(words.scaled(field, case['std_s']))}"
    return text


def detail(view: views.View, case: fields.Record | None) -> str:
    """The facts behind a timed figure: rounds, spread, error, state of the machine, and run; "" without a time."""
    if case is None or case["time_s"] is None:
        return ""
    time, spread = view.fields["time_s"], words.spread_of(case)
    low, high = (words.number(words.scaled(time, case.get(name))) for name in ("p20_s", "p80_s"))
    return DETAILS.join(
        sentences_of(
            (case.get("rounds"), f"{case.get('rounds')} rounds"),
            (spread is not None, f"p20 to p80 {low} to {high} {words.unit_of(time)[0]}"),
            (
                case.get("error_ratio") is not None,
                f"error {words.number(case.get('error_ratio') or 0)} of what is allowed",
            ),
            (True, ", ".join(_conditions(view, case))),
            (True, case.get("energy_note") or ""),
            (True, SAME_BITS[case.get("repeatable")]),
            (True, load.run_told(view.machine.runs[case["run"]])),
        )
    )


def _conditions(view: views.View, case: fields.Record) -> list[str]:
    """The state of the machine while the case was sampled; the memory clock only where it was not at its highest."""
    usual = (view.machine.runs[case["run"]].get("settings") or {}).get("max_memory_mhz")
    facts = case | {"memory_clock_mhz": None} if case.get("memory_clock_mhz") == usual else case
    reasons, processes, share = map(case.get, ("clock_reasons", "other_processes", "others_cpu_share"))
    return [
        *state_of(facts),
        *sentences_of(
            (reasons, f"clock held by {reasons}"),
            (processes, f"other processes that had the device: {processes}"),
            ((share or 0) >= 0.005, f"other programs took {share or 0:.0%} of the CPU"),
        ),
    ]


def state_of(facts: fields.Record) -> list[str]:
    """The clocks, power and temperature that are known, in words."""
    return [f"{label} {words.exact(round(facts[name]))} {unit}" for name, label, unit in STATE if facts.get(name)]
