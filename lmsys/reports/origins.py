"""The origin of a table's lines: the runs that they come from, the command of each, and what the rows' names mean."""

from collections.abc import Iterable

from lmsys.reports.load import Machine, commit_of

DAY, MINUTE, SECOND = 10, 16, 19  # a date's characters up to these


def run_names(machine: Machine, runs: Iterable[int]) -> dict[int, str]:
    """The date of each of these runs, with the time of day where the day alone would not tell them apart."""
    dates = {run: str(machine.runs[run].get("date") or "undated") for run in sorted(set(runs))}
    for length in (DAY, MINUTE, SECOND):
        names = {run: f"{date[:DAY]} {date[DAY + 1 : length]}".strip() for run, date in dates.items()}
        if len(set(names.values())) == len(names):
            return names
    return {run: f"{name} (run {run + 1})" for run, name in names.items()}


def commands(machine: Machine, runs: Iterable[int]) -> dict[int, tuple[str, str]]:
    """The date and commit of each of these runs, and the command that made it."""
    told = {}
    for run, name in run_names(machine, runs).items():
        facts = machine.runs[run]
        told[run] = f"{name}, {commit_of(facts)}", str(facts.get("command") or "an unknown command")
    return told


def legend(machine: Machine, kind: str, names: Iterable[str]) -> list[str]:
    """Explains these rows as their table does: ours in one sentence, others' in another, in the table's order."""
    table, names = machine.rows.get(kind, {}), set(names)
    ordered = [*(name for name in table if name in names), *sorted(names - table.keys())]
    found: dict[str, list[str]] = {"Our rows": [], "Others’ rows": []}
    for name in ordered:
        row = table.get(name, {})
        label = str(row.get("label") or name)
        found["Others’ rows" if row.get("peer") else "Our rows"].append(name if label == name else f"{name} ({label})")
    return [f"{whose}: {', '.join(told)}." for whose, told in found.items() if told]
