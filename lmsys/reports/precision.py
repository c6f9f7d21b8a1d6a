"""The chapter on mixed precision: what rounding does to a long sum, and which dtype autocast gives each tensor."""

from typing import Any

import pandas as pd

from lmsys.reports import tables
from lmsys.reports.load import Machine
from lmsys.reports.page import Block, Chapter
from lmsys.reports.plots import Plot
from lmsys.reports.tables import Table


def chapters(machine: Machine, baseline: str | None) -> list[Chapter]:
    """`machine` holds records of the precision study only."""
    found: list[Table | Plot] = [table for table in (_sums(machine), _tensors(machine)) if table]
    return [Chapter("Mixed precision", [Block("", found)])]


def _cases(machine: Machine, section: str, field: str) -> list[Any]:
    """The studies of one section, float16 first."""
    frame = machine.frame.reindex(columns=[*machine.frame.columns, *({field} - set(machine.frame.columns))])
    own = frame[(frame["section"] == section) & frame[field].map(lambda value: isinstance(value, list))]
    return sorted(own.itertuples(index=False), key=lambda case: (case.dtype != "float16", case.dtype))


def _sums(machine: Machine) -> Table | None:
    """Rows: the dtypes of a running sum and of its addends; columns: what came out, and the error."""
    cases = _cases(machine, "accumulation", "sums")
    ways = dict.fromkeys(
        (one["accumulator"], one["addend"], one["result"], one["error"]) for case in cases for one in case.sums
    )
    if not ways:
        return None
    addend, times = cases[0].addend, cases[0].times
    return Table(
        name=f"{machine.slug}-precision-accumulation",
        title=f"{addend:g} added {times:,.0f} times",
        caption=f"The running sum and what is added, by dtype; the sum is {addend * times:g} without rounding. "
        "What the addend lost when it was rounded no accumulator brings back; a sum that is itself rounded after each "
        f"step loses far more. {machine.about(_frame(cases))}",
        columns=["sum", "addend", "result", "error"],
        rows=[[total, addend, f"{result:.5f}", f"{error:+.1e}"] for total, addend, result, error in ways],
        frame=pd.DataFrame([*ways], columns=["accumulator", "addend", "result", "error"]),
        keys=2,
    )


def _tensors(machine: Machine) -> Table | None:
    """Rows: tensors of a training step; columns: the dtype that autocast gives them, for each dtype asked of it."""
    cases = _cases(machine, "autocast", "tensors")
    found = {case.dtype: {one["name"]: one["dtype"] for one in case.tensors} for case in cases}
    names = list(dict.fromkeys(name for tensors in found.values() for name in tensors))
    if not names:
        return None
    rows = [[name, *(tensors.get(name, tables.NOT_RUN) for tensors in found.values())] for name in names]
    columns = ["tensor", *(f"autocast to {dtype}" for dtype in found)]
    return Table(
        name=f"{machine.slug}-precision-autocast",
        title="Dtypes under autocast",
        caption="Tensors of one training step of a model of one block, and the dtype that each has under autocast. "
        f"{machine.about(_frame(cases))}",
        columns=columns,
        rows=rows,
        frame=pd.DataFrame(rows, columns=columns),
    )


def _frame(cases: list[Any]) -> pd.DataFrame:
    return pd.DataFrame({"run": [case.run for case in cases]})
