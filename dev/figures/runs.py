"""Reads committed results of runs and published tables, and groups and compares their records.

The modules of this folder that make figures for the pages call these functions. A run is one result file of the bench,
in reports/results; a record is the result of one case in it.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from dev.figures.pages import ROOT, cells_of
from lmsys.bench.verdict import ratio_of
from lmsys.files import read_text

RESULTS = ROOT / "reports" / "results"
H100, H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"
Record = dict[str, Any]


def path_of(name: str, machine: str, folder: str) -> Path:
    """The path of the committed file MACHINE_DATE_NAME, such as nvidia-h200_20261126_attention-bf16.json.gz.

    There must be exactly one, of any date: else ValueError.

    folder  a folder in reports/results; "" is reports/results itself
    """
    (path,) = (RESULTS / folder).glob(f"{machine}_*_{name}")
    return path


@cache
def run(name: str, machine: str = H100, folder: str | None = None) -> Record:
    """The part "lmsys" of a result file, and "ended", the time at which the run ended.

    name    the file's name without machine, date and ending, such as "attention-bf16"
    folder  as in `path_of`; None: the folder of the runs that the machine's published report is made of
    """
    folder = {H100: "h100", H200: ""}[machine] if folder is None else folder
    content = json.loads(read_text(path_of(f"{name}.json.gz", machine, folder)))
    return {"ended": content.get("datetime"), **content["lmsys"]}


def records(name: str, machine: str = H100, folder: str | None = None, **values: Any) -> list[Record]:
    """The records of a run in which each field of `values` has the given value."""
    return [record for record in run(name, machine, folder)["records"] if values.items() <= record.items()]


def grouped(cases: Iterable[Record], *fields: str, row: str = "impl") -> dict[Any, dict[str, Record]]:
    """{value of `fields`: {value of the field `row`: record}}; the value is a tuple if there are several fields.

    Records that agree in `fields` and in `row` replace one another: the last one stays.
    """
    groups: dict[Any, dict[str, Record]] = {}
    for record in cases:
        key = tuple(record[field] for field in fields) if len(fields) > 1 else record[fields[0]]
        groups.setdefault(key, {})[record[row]] = record
    return groups


def ratio(ours: Record, theirs: Record) -> float:
    """How many times as fast the row of `ours` is as that of `theirs`. ValueError if they were not sampled together."""
    speed = ratio_of(ours, theirs)
    if speed is None:
        raise ValueError(f"{ours['id']} and {theirs['id']} were not sampled together, so they have no ratio")
    return speed


def mean(ratios: Iterable[float]) -> str:
    """The geometric mean, with two decimals."""
    return f"{geometric_mean(ratios):.2f}"


def speedups(groups: Iterable[Mapping[str, Record]], ours: str, *theirs: str) -> list[float]:
    """For each group {row: record}, how many times as fast the row `ours` is as the fastest of the rows `theirs`."""
    return [min(rows[name]["time_s"] for name in theirs) / rows[ours]["time_s"] for rows in groups]


def bounds(values: Iterable[float], form: Callable[[float], str] = "{:.2f}".format) -> tuple[str, str]:
    """The smallest and the largest value, as texts."""
    values = list(values)
    return form(min(values)), form(max(values))


@cache
def published(table: str) -> list[list[str]]:
    """The cells of a table in the published report of the H200, line by line, the head first.

    table  the name of the file, without its ending
    """
    return cells_of((ROOT / "reports" / "published" / H200 / "tables" / f"{table}.md").read_text())


def cell(table: str, key: list[str], column: str) -> str:
    """The first word of a cell of a published table: of the only line whose first cells are `key`, in a column."""
    head, *body = published(table)
    (line,) = (line for line in body if line[: len(key)] == key)
    return line[head.index(column)].split()[0]
