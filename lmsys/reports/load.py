"""Result files into one tidy table: a row for each case, with the machine and the run that it came from."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from lmsys.bench import record
from lmsys.bench.fields import Record

GIB = 2**30
# What makes two runs runs of one machine. Versions, driver, commit and the host of a GPU may differ between runs:
# captions name them.
HARDWARE = ("name", "device", "gpu", "gpu_count", "capability")
# Asking a case again replaces its answer; asking it under a memory limit is another question.
IDENTITY = ("benchmark", "section", "id", "memory_limit_bytes")


class InputError(ValueError):
    """What the user gave cannot be reported; the message is one line that names the value."""


@dataclass(frozen=True)
class Machine:
    """One machine's part of the results.

    slug    its name in file names
    title   its name on the page
    runs    the machine facts of each run, oldest first; `frame["run"]` counts into it
    frame   its records, in an order that does not depend on how they were split over files
    """

    slug: str
    title: str
    runs: tuple[Record, ...]
    frame: pd.DataFrame

    def only(self, rows: pd.Series) -> "Machine":
        """The same machine with some of its rows."""
        return replace(self, frame=self.frame[rows].reset_index(drop=True))

    def runs_of(self, frame: pd.DataFrame) -> list[Record]:
        """The runs that these rows come from."""
        return [self.runs[run] for run in sorted(set(frame["run"]))]

    def about(self, frame: pd.DataFrame) -> str:
        """Machine, versions, commit and date of these rows, in one sentence."""
        facts = list(dict.fromkeys(_about(run) for run in self.runs_of(frame)))
        return f"{self.title}; " + "; also ".join(facts) + "."

    def ceiling(self, frame: pd.DataFrame, dtype: str | None = None) -> float | None:
        """The best measured ceiling of these rows' runs: matmul FLOP/s in a dtype, or copy bytes/s without one."""
        found = []
        for run in self.runs_of(frame):
            ceilings = run.get("ceilings") or {}
            value = (ceilings.get("matmul_flops_per_s") or {}).get(dtype) if dtype else ceilings.get("copy_bytes_per_s")
            found += [float(value)] if value else []
        return max(found, default=None)


@dataclass(frozen=True)
class Results:
    """Every record of every file in one frame, and the machines that they were measured on."""

    frame: pd.DataFrame
    machines: tuple[Machine, ...]


def read(paths: Iterable[Path]) -> Results:
    """One result of many files; for a case that several hold, the run of the latest date wins, whatever their order.

    InputError, with the file, for one that is absent, not ours or of a later version, and when there are
    no records at all.
    """
    paths = list(paths)
    cases: dict[tuple[object, ...], tuple[str, str, Record]] = {}
    # The sort is stable: among files of one date, such as the parts of one run, the last named wins.
    for found in sorted(map(_load, paths), key=lambda found: _date(found["machine"])):
        machine = found["machine"]
        cores = None if machine.get("device") == "cuda" else machine.get("cores")
        hardware = json.dumps([*(machine.get(key) for key in HARDWARE), cores])
        for case in found["records"]:
            key = (hardware, *(case.get(field) for field in IDENTITY))
            cases[key] = (hardware, json.dumps(machine, sort_keys=True), case)
    if not cases:
        raise InputError(f"nothing to report: no records in {', '.join(map(str, paths)) or 'no files'}")
    return _results(list(cases.values()))


def _load(path: Path) -> Record:
    try:
        return record.load(path)
    except ValueError as error:
        raise InputError(" ".join(str(error).split())) from error


def _date(machine: Record) -> str:
    """When the run began (ISO 8601 in UTC, so text sorts as time); "" sorts an undated run first."""
    return str(machine.get("date") or "")


def _results(cases: Sequence[tuple[str, str, Record]]) -> Results:
    taken: Counter[str] = Counter()
    machines: list[Machine] = []
    for hardware in sorted({hardware for hardware, _, _ in cases}):
        own = [(run, case) for owner, run, case in cases if owner == hardware]
        runs = sorted({run for run, _ in own}, key=lambda run: (_date(json.loads(run)), run))
        facts = [json.loads(run) for run in runs]
        title = _title(facts[-1])
        slug = file_name(title.lower())
        taken[slug] += 1
        slug += f"-{taken[slug]}" if taken[slug] > 1 else ""
        rows = [{"machine": slug, "run": runs.index(run), **case} for run, case in own]
        rows.sort(key=lambda row: tuple(str(row.get(field)) for field in IDENTITY))
        machines.append(Machine(slug, title, tuple(facts), pd.DataFrame(rows)))
    # Built from the rows, not from the frames: concatenating would let pandas guess types per machine.
    frame = pd.DataFrame([row for machine in machines for row in machine.frame.to_dict("records")])
    return Results(frame, tuple(machines))


def file_name(text: str) -> str:
    """The text as part of a file name: nothing but letters, digits and `_-` whatever a result file says."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-") or "unnamed"


def _title(machine: Record) -> str:
    name = str(machine.get("name") or "unnamed machine")
    if machine.get("device") == "cuda":
        count = machine.get("gpu_count") or 1
        return f"{count} × {name}" if count > 1 else name
    return f"{name}, {machine['cores']} cores" if machine.get("cores") else name


def _about(run: Record) -> str:
    named = [("driver", "driver"), ("CUDA", "cuda"), ("torch", "torch"), ("triton", "triton"), ("Python", "python")]
    versions = [f"{label} {run[key]}" for label, key in named if run.get(key)]
    if run.get("device") == "cuda" and run.get("cores"):
        versions.insert(0, f"{run['cores']} CPU cores")
    commit = str(run.get("commit") or "unknown")[:10] + (" with local changes" if run.get("dirty") else "")
    return ", ".join([*versions, f"commit {commit}", str(run.get("date") or "undated")[:10]])
