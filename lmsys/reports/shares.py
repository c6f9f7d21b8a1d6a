"""One table of all training steps: their model FLOP utilisation, beside what of the large matmul each reaches."""

from collections.abc import Sequence

from lmsys.bench.fields import Record
from lmsys.reports.load import Machine
from lmsys.reports.tables import Block, Chapter, Table
from lmsys.reports.views import KEPT
from lmsys.reports.words import number

KEYS = {  # of a row's case, and the heads of their columns
    "size": "model",
    "context": "context",
    "batch": "batch",
    "world_size": "ranks",
    "precision": "precision",
    "compile": "compile",
    "checkpoint": "checkpoint",
    "residual": "residual",
}
PLAIN = {**KEPT, "world_size": 1, "compile": "eager"}  # of a case that does not say
SHARES = {
    "mfu": "MFU, %",
    "matmul_ceiling_fraction": "Short ceiling, %",
    "sustained_ceiling_fraction": "Sustained ceiling, %",
}
MOST_AT_ONCE = 40  # lines that are read at once, about a printed page
ABOUT = (
    "The arithmetic of a training step by the formula over its median time, as a share of three rates. MFU: of the peak"
    " that the device's maker states. Short ceiling: of a large matmul of this run, which is over before the device is"
    " hot. Sustained ceiling: of one that is kept up for seconds, under the limit of power. Of several ranks it is one"
    " rank's share. Blank: the rate is not known, as the sustained one where no sweep or option asked for it."
)


def chapters(machine: Machine) -> list[Chapter]:
    """A chapter that is this table alone, behind a click where it is long; none where no step has a share."""
    table = step_shares(machine)
    if table is None:
        return []
    block = Block("", [table]) if len(table.rows) <= MOST_AT_ONCE else Block("", [], [table])
    return [Chapter("Training steps: MFU", [block])]


def step_shares(machine: Machine) -> Table | None:
    """A line for each timed step of any benchmark, models by size; None where none has a share."""
    cases = [one for one in machine.records if _is_step(one) and any(one.get(name) is not None for name in SHARES)]
    if not cases:
        return None
    cases.sort(key=lambda one: [_place(_value(one, name)) for name in ("num_parameters", *KEYS, "benchmark", "impl")])
    names = "benchmark", "section", *KEYS, "impl", "time_s", *SHARES
    data = [{name: _value(one, name) for name in names} for one in cases]
    shares = [name for name in SHARES if any(line[name] is not None for line in data)]
    shown = [name for name in KEYS if len({line[name] for line in data}) > 1]
    told = [f"{head} {data[0][name]}" for name, head in KEYS.items() if name not in shown]
    return Table(
        name=f"{machine.slug}-mfu",
        title="MFU of every step, and its shares of what this machine reaches",
        caption=f"{ABOUT} All: {', '.join(told)}." if told else ABOUT,
        columns=["in", *(KEYS[name] for name in shown), "row", "Time, ms", *(SHARES[name] for name in shares)],
        rows=[_cells(line, shown, shares) for line in data],
        data=data,
        keys=2 + len(shown),
        source=machine.about(cases),
    )


def _is_step(one: Record) -> bool:
    """True of whole steps that have a time: benchmarks of steps alone name no mode."""
    return "mfu" in one and one.get("mode") in (None, "step") and bool(one.get("time_s"))


def _value(one: Record, name: str) -> object:
    found = one.get(name)
    return PLAIN.get(name) if found is None else found


def _place(value: object) -> tuple[bool, float, str]:
    """Sorts numbers by size, and before words."""
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if isinstance(value, int | float) else 0.0, str(value)


def _cells(line: Record, shown: Sequence[str], shares: Sequence[str]) -> list[str]:
    where = f"{line['benchmark']}, {line['section']}".replace("_", " ")
    keys = [where, *(_text(line[name]) for name in shown), str(line["impl"])]
    found = ["" if line[name] is None else number(100 * line[name]) for name in shares]
    return [*keys, number(1e3 * line["time_s"]), *found]


def _text(value: object) -> str:
    return f"{value:,}" if type(value) is int else "" if value is None else str(value)
