"""Reads result files as one result: `read` takes their paths and returns a `Machine` for each machine in them.

A record, also called a case, is a dict: one row (an implementation) as it was measured with one value for each axis. A
`Machine` has the records of one machine, the declarations of their fields, the tables that rows come from, and the runs
that records are from, with their commits and commands. `__main__` and `against` call `read`. For a run that has no file
yet, `terminal` and `layout.rehearse` call `machines_in`, which makes its `Machine`. All other modules of
`lmsys.reports` get a `Machine` and open no result file. The last functions turn facts of runs into words: titles,
dates, commits, commands and the labels of rows. To show another fact of runs in captions, add it to FACTS.
"""

import difflib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmsys.bench import record
from lmsys.bench.fields import COMMON, IDENTITY, Field, Record, grouped
from lmsys.reports.words import VALUES
from lmsys.values import hold

# Runs that agree in these facts are of one machine (`hardware_of`). Versions, driver, commit and the host of a GPU may
# differ: captions name them.
HARDWARE = ("name", "device", "gpu", "gpu_count", "capability")
LAST = 1000  # where a benchmark stands on the page if its layout states no place
LONGEST_NAME = 120  # of a file, in characters
# {fact of a run: its name in captions}
FACTS = {"driver": "driver", "cuda": "CUDA", "torch": "torch", "triton": "triton", "python": "Python"}
Fields = dict[str, dict[str, Field]]  # by benchmark and name, in declared order
Rows = dict[str, dict[str, Record]]  # by kind of table, such as "attention", and name, in the table's order
# (date, facts of the run and its machine as JSON). Runs are sorted by date; the date is "" if it is unknown,
# and in `machines_in`, whose records all belong to one run.
Run = tuple[str, str]


class InputError(ValueError):
    """Raised when the files given cannot be reported; the message is one line that names the value."""


class LayoutError(InputError):
    """Raised where a layout cannot be drawn; the message names the benchmark, and the section and step if known."""


class ValuesError(LayoutError):
    """Raised where a layout fails on the values of these records. It may be right, and work with other records."""


def no_field(name: str, known: Collection[str]) -> str:
    """A sentence about a name that no field has: it says which of the known fields have similar names."""
    near = " or ".join(difflib.get_close_matches(name, known) or known)
    return f"no field {name!r} is declared; did you mean {near}?"


@contextmanager
def drawn_by_layout(benchmark: str, place: str = "", known: Collection[str] | None = None) -> Iterator[None]:
    """A context in which errors that a layout causes become a LayoutError, since a file may have any layout.

    A KeyError, a ValueError, and a TypeError by which a step refuses its arguments mean that the layout is wrong. An
    ArithmeticError, an AttributeError, and any other TypeError or LookupError become a ValuesError: the layout may be
    right, and fail on these records alone.

    place  the part of the layout that is drawn, for the message
    known  the fields that a misspelt name may have meant
    """
    try:
        yield
    except LayoutError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if known is not None and isinstance(error, KeyError):
            message = no_field(str(error.args[0]), known)
        is_wrong = isinstance(error, KeyError | ValueError) or re.match(r"\S+\(\) (got|takes|missing) ", str(error))
        raise (LayoutError if is_wrong else ValuesError)(f"the layout of {benchmark!r}{place}: {message}") from error


@dataclass(frozen=True)
class Machine:
    """One machine's part of the results.

    slug     its name in file names
    title    its name on the page
    runs     the facts of each run and of the machine in it, oldest first; a record's "run" is an index into this list
    records  its cases, in an order that does not depend on how they were split over files
    fields   the declarations of fields, by benchmark and name
    rows     the rows of each table, by kind of table and name, with their traits
    layouts  by benchmark its layout (`lmsys.reports.layout`), if it declares one
    """

    slug: str
    title: str
    runs: Sequence[Record]
    records: Sequence[Record]
    fields: Fields
    rows: Rows
    layouts: Mapping[str, Record] = field(default_factory=dict)

    @property
    def benchmarks(self) -> list[str]:
        """The records' benchmarks whose fields are declared, sorted by the "place" in their layouts, then by name."""
        names = {str(case["benchmark"]) for case in self.records} & self.fields.keys()
        return sorted(names, key=lambda name: (self.layouts.get(name, {}).get("place", LAST), name))

    def words_of(self, *benchmarks: str) -> dict[str, Mapping[Any, str]]:
        """{field: {value: word}}, in the order in which tables list values.

        The words are those of `words.VALUES` and of the layouts of these benchmarks.
        """
        words = dict(VALUES)
        for name in benchmarks:
            for field_name, words_of_layout in self.layouts.get(name, {}).get("words", {}).items():
                words[field_name] = {**words.get(field_name, {}), **words_of_layout}
        return words

    def called(self, case: Record) -> str:
        """The name of a case's row as users type it.

        The row "auto" runs the fastest row that can run the case, and the case's label says which one it was. Then the
        name has both rows: "auto: flash_gluon".
        """
        impl, label = str(case["impl"]), str(case.get("label") or "")
        if not label.startswith(f"{impl}: "):
            return impl
        names = {row.get("label"): name for table in self.rows.values() for name, row in table.items()}
        stood_for = label.removeprefix(f"{impl}: ")
        return f"{impl}: {names.get(stood_for, stood_for)}"

    def runs_of(self, cases: Iterable[Record]) -> list[Record]:
        """The machine facts of the runs that these cases come from."""
        return [self.runs[run] for run in sorted({case["run"] for case in cases})]

    def about(self, cases: Iterable[Record]) -> str:
        """A sentence with the machine, versions, commits and dates of these cases; equal versions are named once."""
        dates = dict[str, list[str]]()
        for run in self.runs_of(cases):
            cores = [f"{run['cores']} CPU cores"] if run.get("device") == "cuda" and run.get("cores") else []
            versions = ", ".join(cores + [f"{label} {run[key]}" for key, label in FACTS.items() if run.get(key)])
            dates.setdefault(versions, []).append(f"{commit_of(run)}, {str(run.get('date') or 'undated')[:10]}")
        parts = (", ".join(filter(None, [versions] + list(dict.fromkeys(dated)))) for versions, dated in dates.items())
        return f"{self.title}; {'; also '.join(parts)}."


def read(paths: Iterable[Path]) -> list[Machine]:
    """The machines of these result files.

    If several files have the same case, the run of the latest date counts, whatever the order of the files. InputError
    if there are no records, and, with the path, for a file that is absent, is no result file, or has another schema.
    """
    paths, fields, rows, layouts = list(paths), Fields(), Rows(), dict[str, Record]()
    # {(hardware, identity of a case): (hardware, its run, its record)}
    cases: dict[tuple[object, ...], tuple[str, Run, Record]] = {}
    # Dates are ISO 8601 in UTC, so their texts sort by time, and an undated run is the first. The sort is stable: among
    # files of one date, such as the parts of one run, the file that is named last wins.
    for result in sorted(map(_load, paths), key=lambda result: str(result["machine"].get("date") or "")):
        machine = result["machine"]
        for benchmark, declared in result["fields"].items():
            fields.setdefault(benchmark, {}).update(declared)
        layouts |= result["layouts"]
        for kind, table in result["rows"].items():
            before = rows.get(kind, {})
            # Rows get the order of the later file. A file has fewer traits of rows without a case in it, so the traits
            # of earlier files are kept.
            rows[kind] = table | before | {name: before.get(name, {}) | row for name, row in table.items()}
        hardware = hardware_of(machine)
        run = str(machine.get("date") or ""), json.dumps(machine, sort_keys=True)
        for case in result["records"]:
            cases[hardware, tuple(map(case.get, IDENTITY))] = hardware, run, case
    hold((cases, f"nothing to report: no records in {', '.join(map(str, paths)) or 'no files'}"), error=InputError)
    return list(machines_of(list(cases.values()), fields, rows, layouts))


def hardware_of(machine: Mapping[str, Any]) -> str:
    """The facts by which a machine is known, as JSON: those of HARDWARE and, on a CPU, the number of cores."""
    cores = None if machine.get("device") == "cuda" else machine.get("cores")
    return json.dumps([machine.get(key) for key in HARDWARE] + [cores])


def _load(path: Path) -> Record:
    """A result file's content, as `by_name` gives it. InputError, with the path, for a file that cannot be read."""
    try:
        return by_name(record.load(path))
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: not a result of this bench: its fields or rows are not what they should be"
        ) from error
    except ValueError as error:
        message = " ".join(str(error).split())
        raise InputError(message if message.startswith(str(path)) else f"{path}: {message}") from error


def by_name(result: Record) -> Record:
    """The content of a result file, with mappings by name in place of its lists of fields and rows."""
    return result | {
        "fields": {
            name: {field["name"]: Field(**field) for field in declared} for name, declared in result["fields"].items()
        },
        "rows": {kind: {row["name"]: row for row in table} for kind, table in result["rows"].items()},
    }


def machines_in(result: Mapping[str, Any], records: Iterable[Record]) -> Iterator[Machine]:
    """Yields the `Machine` of some records of one result, which may be that of a run that has not written its file."""
    named, run = by_name(dict(result)), ("", json.dumps(result["machine"]))
    return machines_of([("", run, case) for case in records], named["fields"], named["rows"], result["layouts"])


def machines_of(
    cases: Sequence[tuple[str, Run, Record]], fields: Fields, rows: Rows, layouts: Mapping[str, Record]
) -> Iterator[Machine]:
    """Yields each machine with its cases. `cases`: (hardware, run, record); equal hardware is one machine."""
    taken: Counter[str] = Counter()
    for _, of_machine in sorted(grouped((hardware, (run, case)) for hardware, run, case in cases).items()):
        runs = sorted({run for run, _ in of_machine})
        facts = [json.loads(text) for _, text in runs]
        title = title_of(facts[-1])
        slug = file_name(title.lower())
        taken[slug] += 1
        slug += f"-{taken[slug]}" if taken[slug] > 1 else ""
        records = [
            {**dict.fromkeys(field.name for field in COMMON), **case, "machine": slug, "run": runs.index(run)}
            for run, case in sorted(of_machine, key=lambda pair: [str(pair[1].get(name)) for name in IDENTITY])
        ]
        yield Machine(slug, title, facts, records, fields, rows, layouts)


def file_name(text: str) -> str:
    """The text as part of a file name: letters, digits, `_` and `-`, at most LONGEST_NAME of them."""
    name = re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-") or "unnamed"
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}-{digest[:8]}"


def matmul_rates(run: Mapping[str, Any]) -> dict[str, float]:
    """{dtype: the rate of a large matmul, as the run has measured it, in FLOP/s}; {} if it measured none."""
    return (run.get("ceilings") or {}).get("matmul_flops_per_s") or {}


def title_of(machine: Mapping[str, Any]) -> str:
    """The name of a machine on a page: "2 × NAME" of GPUs, "NAME, 8 cores" of a CPU."""
    name, count = str(machine.get("name") or "unnamed machine"), machine.get("gpu_count") or 1
    if machine.get("device") == "cuda":
        return f"{count} × {name}" if count > 1 else name
    return f"{name}, {machine['cores']} cores" if machine.get("cores") else name


def run_told(run: Record) -> str:
    """A run in words: its date to the minute, and its commit."""
    return f"run of {str(run.get('date') or 'no date')[:16].replace('T', ' ')}, {commit_of(run)}"


def commit_of(run: Mapping[str, Any]) -> str:
    """A run's commit in words, with a note if the code had local changes."""
    return f"commit {str(run.get('commit') or 'unknown')[:10]}" + (" with local changes" if run.get("dirty") else "")


def run_names(machine: Machine, runs: Iterable[int]) -> dict[int, str]:
    """The date of each of these runs, with the time of day where the day alone would not tell them apart."""
    dates = {run: str(machine.runs[run].get("date") or "undated") for run in sorted(set(runs))}
    for length in (10, 16, 19):  # characters of an ISO 8601 date up to the day, the minute, the second
        names = {run: f"{date[:10]} {date[11:length]}".strip() for run, date in dates.items()}
        if len(set(names.values())) == len(names):
            return names
    return {run: f"{name} (run {run + 1})" for run, name in names.items()}


def commands(machine: Machine, runs: Iterable[int]) -> dict[int, tuple[str, str]]:
    """{index of a run: (its date and commit in words, the command that made it)}."""
    return {
        run: (f"{name}, {commit_of(machine.runs[run])}", str(machine.runs[run].get("command") or "an unknown command"))
        for run, name in run_names(machine, runs).items()
    }


def legend(machine: Machine, kind: str, names: Iterable[str]) -> list[str]:
    """Sentences that explain names of rows by the labels in their table: one on our rows, one on others' rows.

    kind  the kind of the table: a key of `Machine.rows`
    """
    table, names = machine.rows.get(kind, {}), set(names)
    rows: dict[str, list[str]] = {"Our rows": [], "Others’ rows": []}
    for name in list(filter(names.__contains__, table)) + sorted(names - table.keys()):
        row = table.get(name, {})
        label = str(row.get("label") or name)
        rows["Others’ rows" if row.get("peer") else "Our rows"].append(name if label == name else f"{name} ({label})")
    return [f"{whose}: {', '.join(labels)}." for whose, labels in rows.items() if labels]
