"""Cells of tables: what a case's place says, the notes below, and what more is known of it."""

import textwrap
from collections.abc import Iterable, Sequence

from lmsys.bench.fields import Record
from lmsys.reports.speedups import SPEEDUP
from lmsys.reports.views import View
from lmsys.reports.words import MEANINGS, OUTCOMES, exact, is_clocked, number, scaled, spread_of, unit_of

CEILINGS = {"matmul_ceiling_fraction": "large matmul", "copy_ceiling_fraction": "large copy"}
RATED = {  # the rates that a share of a ceiling stands for
    "matmul_ceiling_fraction": ("matmul_ceiling_fraction", "flops_per_s"),
    "copy_ceiling_fraction": ("copy_ceiling_fraction", "bytes_per_s"),
}
NOT_RUN = "–"
DETAILS = "; "  # stands between the facts behind a figure
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
STEADY = 0.2  # of the median: how far the samples of a steady case spread at most
UNSTEADY = f"Unsteady: from p20 to p80 its samples spread over more than {STEADY:.0%} of the median."

STATE = (  # what is told of the machine: field, label, unit
    ("sm_clock_mhz", "SM clock", "MHz"),
    ("memory_clock_mhz", "memory clock", "MHz"),
    ("cpu_clock_mhz", "CPU clock", "MHz"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "°C"),
)

Notes = dict[str, int]  # the reasons that stand below a table, each once, by number


def mark(notes: Notes, text: str) -> str:
    """The superscript that refers to this reason."""
    text = textwrap.shorten(text, 160, placeholder=" …")
    return str(notes.setdefault(text, len(notes) + 1)).translate(SUPERSCRIPT)


def below(notes: Notes, rows: Iterable[Sequence[str]]) -> list[str]:
    """The notes below these rows: the reasons, and what a dash means where there is one."""
    dash = [f"{NOT_RUN} not run."] if any(NOT_RUN in text for row in rows for text in row) else []
    return [f"{str(number).translate(SUPERSCRIPT)} {text}" for text, number in notes.items()] + dash


def cell(view: View, name: str, case: Record | None, notes: Notes, ending: bool = True) -> str:
    """A field of one case (None: not run); with `ending` also how the case ended, if without a number."""
    if case is None:
        return NOT_RUN
    text, reason = shown(view, name, case), case["reason"] or ""
    if ending and case["outcome"] != "ok":
        meaning = MEANINGS[case["outcome"]] + (f": {reason}" if reason else "")
        return f"{text} {OUTCOMES[case['outcome']]}".strip() + mark(notes, meaning)
    if ending and not text and case["time_s"] is None and reason:
        return "untimed" + mark(notes, reason)
    own = {SPEEDUP: "remark", "energy_j": "energy_note"}.get(name)
    remark = case.get(own) if own else above_ceiling(name, case)
    if remark:
        text = (text or ("no baseline" if name == SPEEDUP else "not measured")) + mark(notes, remark)
    if text and is_clocked(view.fields[name]):
        text += mark(notes, UNSTEADY) if (spread_of(case) or 0.0) > STEADY else ""
        text += mark(notes, f"Disturbed: {case['disturbed']}.") if case.get("disturbed") else ""
    return text


def above_ceiling(name: str, case: Record) -> str:
    """The note on a rate that is above what was measured as this machine's best; empty for others."""
    share = next((share for share, names in RATED.items() if name in names), None)
    if share is None or (case.get(share) or 0.0) <= 1:
        return ""
    return f"Above the {CEILINGS[share]} that was measured in this run, before and after: one of the two is not right."


def shown(view: View, name: str, case: Record) -> str:
    """A field's value as tables show it: of axes all digits, of metrics three."""
    one, value = view.fields[name], case[name]
    if value is None or one.role == "axis" or not isinstance(value, (int, float)):
        return view.text(name, value)
    text = exact(value) if isinstance(value, int) and not unit_of(one)[0] else number(scaled(one, value))
    return f"{text} ± {number(scaled(one, case['std_s']))}" if name == "mean_s" and case["std_s"] is not None else text


def detail(view: View, case: Record | None) -> str:
    """The facts behind a figure: its rounds, spread, error, the state of the machine, and the run that it is from.

    Empty for no figure.
    """
    if case is None or case["time_s"] is None:
        return ""
    told, unit = [], unit_of(view.fields["time_s"])[0]
    if case.get("rounds"):
        told.append(f"{case['rounds']} rounds")
    if spread_of(case) is not None:
        low, high = (number(scaled(view.fields["time_s"], case[name])) for name in ("p20_s", "p80_s"))
        told.append(f"p20 to p80 {low} to {high} {unit}")
    if case.get("error_ratio") is not None:
        told.append(f"error {number(case['error_ratio'])} of what is allowed")
    told += [", ".join(conditions)] if (conditions := _conditions(view, case)) else []
    told += [case["energy_note"]] if case.get("energy_note") else []
    if case.get("repeatable") is not None:
        told.append("the same bits each time" if case["repeatable"] else "bits vary")
    told.append(view.machine.run_of(case))
    return DETAILS.join(told)


def _conditions(view: View, case: Record) -> list[str]:
    """The state of the machine while the case was sampled; a memory clock only where it was not at its highest."""
    settings = view.machine.runs[case["run"]].get("settings") or {}
    usual = {"memory_clock_mhz": settings.get("max_memory_mhz")}
    known = [(case.get(name), label, unit) for name, label, unit in STATE if case.get(name) != usual.get(name)]
    told = [f"{label} {exact(round(value))} {unit}" for value, label, unit in known if value]
    if case.get("clock_reasons"):
        told.append(f"clock held by {case['clock_reasons']}")
    if case.get("other_processes"):
        told.append(f"other processes that had the device: {case['other_processes']}")
    if (share := case.get("others_cpu_share") or 0.0) >= 0.005:
        told.append(f"other programs took {share:.0%} of the CPU")
    return told
