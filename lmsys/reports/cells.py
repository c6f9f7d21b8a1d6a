"""Makes the texts of table cells, with their footnotes and details, and adds speedups to the cases of a view.

A case is one record of a result file: one row (an implementation) as it was measured with one value for each axis. A
view is some cases of one benchmark (views.py). Rows were sampled together if they took turns, round by round, in one
run.

`cell` makes the text of one field of one case. It numbers the footnotes that the text needs in a `Notes`, which `below`
turns into lines below the table. `detail` makes the text for a reader who points at the cell. `compared` (`over` in
layouts) adds speedups to a view before tables.py and plots.py draw it. A speedup is the median over rounds of the ratio
of two rows' times; means of speedups are geometric. All modules of `lmsys.reports` that draw tables or plots call these
functions.

A new footnote of a field is an entry of `remarks` in `cell`. A new condition of the machine, such as a clock, is an
entry of STATE. A new ceiling, a rate that the machine reached in the same run and that footnotes
name, is an entry of CEILINGS and RATED; `lmsys.measure.machine` measures it, and `lmsys.bench.fields` declares a row's
share of it.
"""

import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lmsys.bench import fields, verdict
from lmsys.reports import load, views, words
from lmsys.values import choice, sentences_of

SPEEDUP = "speedup"  # the field that `compared` adds


def baselines_of(view: views.View, otherwise: str = "") -> list[str]:
    """The names of the rows of this view that speedups may be relative to, the preferred one first.

    If the user named a row by --baseline, that row is the only one. Else the rows with the trait `baseline` in their
    table come first, the greatest value of the trait first. If `otherwise` is "peer", the peers (somebody else's rows)
    follow; if it is "any", the peers and then our rows. Rows without a time in this view are left out.
    """
    preferred = {name: row["baseline"] for name, row in view.table().items() if row.get("baseline")}
    rows = view.values("impl") if otherwise else []
    peers = [row for row in rows if view.styles["impl"][row].dashed]  # only the lines of peers are dashed
    ranked = sorted(preferred, key=preferred.__getitem__, reverse=True) + peers + rows * (otherwise == "any")
    timed = view.only("time_s is not None").column("impl")
    return [name for name in dict.fromkeys([view.wanted] if view.wanted else ranked) if name in timed]


def beside(view: views.View, base: str | None, axis: str = "impl", same: Sequence[str] = ()) -> views.View:
    """Adds the field `beside`: the case of the base that a case is compared with, None where it was not run.

    The base's case has the value `base` on `axis`. On the axes `same`, by default all other axes, the two cases have
    the same values. ValueError for a base that is no row of the table.
    """
    if base and (rows := view.table(axis) if axis in ("impl", *view.machine.rows) else {}):
        choice(base, {**rows, **dict.fromkeys(view.values(axis))}, f"the row {base!r} to compare with: ")
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
    otherwise   as in `baselines_of`
    medians     True: a case that was not sampled together with the base gets the ratio of the two medians, not None

    Also adds the field `remark`, a footnote. It says why a timed case has no speedup; or, if other cases of the view
    were sampled together with the base, that this speedup is a ratio of medians.
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
    """Says why there is no speedup over a case of the base; "" if this case was timed.

    label  the label of the base
    base   its case; None: it was not run
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
# {rate: the field of CEILINGS that states it as a share of its ceiling}
RATED = {"flops_per_s": "matmul_ceiling_fraction", "bytes_per_s": "copy_ceiling_fraction"}
NOT_RUN = "–"  # the text of a cell whose case was not run
DETAILS = "; "  # separates the facts that `detail` joins
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
    """The lines below a table: its footnotes, and the meaning of a dash if a cell of its `rows` has one."""
    lines = [f"{str(number).translate(SUPERSCRIPT)} {text}" for text, number in notes.items()]
    return lines + [f"{NOT_RUN} not run."] * any(NOT_RUN in text for row in rows for text in row)


def cell(view: views.View, name: str, case: fields.Record | None, notes: Notes, ending: bool = True) -> str:
    """The text of a cell: the field `name` of a case, with superscripts of footnotes.

    case    None: it was not run
    notes   the table's footnotes, to which those of this cell are added
    ending  True: the cell of a case that failed also says how it ended, and an empty cell says why it has no time
    """
    if case is None:
        return NOT_RUN
    text, reason = shown(view, name, case), case["reason"] or ""
    if ending and case["outcome"] != "ok":
        meaning = words.MEANINGS[case["outcome"]] + f": {reason}" * bool(reason)
        return f"{text} {words.OUTCOMES[case['outcome']]}".strip() + mark(notes, meaning)
    if ending and not text and case["time_s"] is None and reason:
        return "untimed" + mark(notes, reason)
    remarks = {SPEEDUP: case.get("remark"), "energy_j": case.get("energy_note")}  # {field: its footnote}
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
    """The footnote on a rate above its ceiling, or on a share of a ceiling above 1; "" if there is nothing to note.

    A ceiling is the rate that a large matmul or copy reached in the same run.
    """
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
    """The facts behind a timed figure: rounds, spread, error, state of the machine, and run; "" if it has no time."""
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
