"""The format of result files: one flat record for each case, and the file that holds them. Imports no torch.

A *row* is an implementation under test, and a *case* is one row with one set of sizes. `lmsys.bench.results` writes
files in this format; reports, --resume and `lmsys verify` read them by `load` or `load_file`. `lmsys.bench.fields`
declares the fields of records, and `lmsys.bench.validate` checks them when a file is read. A result file is
pytest-benchmark's JSON with one more key, and a seal in it:
`"lmsys": {"schema": 2, "machine": {...}, "fields": {...}, "layouts": {...}, "rows": {...}, "records": [...]}`.

    machine  facts of the machine and of the run (`lmsys.measure.machine.describe`)
    fields   for each benchmark the declarations of its records' fields (`lmsys.bench.fields`), in their order
    layouts  for each benchmark that has one, how a report shows its records (`lmsys.reports.layout`); older files have
             none
    rows     for each table of rows their names, labels and traits, in the table's order

Each record has a "seal", the SHA-256 of all else in the record. Under "lmsys" there are two more keys: "others" is the
SHA-256 of pytest-benchmark's part of the file (`others_seal`), and "seal" is the SHA-256 of all else under "lmsys",
"others" included. So "seal" is still right in a copy of the file without pytest-benchmark's entries. Seals show
changes made by accident or without care. If a changed file was sealed again, `lmsys verify` finds the change only where
the file contradicts itself, or the oracle. A change of the format after which older files cannot be read needs a new
SCHEMA.

While a run lasts, the same content is appended to a journal, `<result>.partial`: a JSON line with all but the records,
then one for each record.
"""

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmsys import files, strict_json
from lmsys.bench import fields, validate
from lmsys.values import hold, shortly

SCHEMA = 2  # the version of the format; a file of another version is refused
# How a case ended: it was right, ran out of memory, cannot run here, gave a wrong result, or raised or crashed. A new
# outcome also goes into `outcome_of` of lmsys/measure/compare.py, and into OUTCOMES and MEANINGS of
# lmsys/reports/words.py.
OUTCOMES = ("ok", "oom", "unsupported", "wrong", "error")


def check_record(record: fields.Record) -> fields.Record:
    """Returns the record. ValueError unless its outcome is known, it has a time only if it is "ok", and it is JSON."""
    begin, outcome = f"record {shortly(record.get('id'))}: ", record.get("outcome")
    hold(
        (outcome in OUTCOMES, f"{begin}outcome={shortly(outcome)} must be one of {OUTCOMES}"),
        (outcome == "ok" or record.get("time_s") is None, f"{begin}outcome {outcome!r} cannot carry a time"),
    )
    json.dumps(record, allow_nan=False)
    return record


def earlier(record: fields.Record, against: fields.Record | None) -> fields.Record:
    """A sealed copy of a record under the names of an earlier state of the code: id, row and label end in `@NAME`.

    record   the record of a case that was measured in that state (--against)
    against  {"name", "commit", "margin"} of that state; None: the row is today's, and its record is returned unchanged
    """
    if against is None:
        return record
    suffix = f"@{against['name']}"
    record = record | {key: f"{record[key]}{suffix}" for key in ("id", "impl", "label")} | {"against": against}
    return record | {"seal": seal(record)}


def today(record: fields.Record) -> fields.Record:
    """A copy of an earlier row's record under the names that the row has today; any other record unchanged."""
    if not record.get("against"):
        return record
    suffix = f"@{record['against']['name']}"
    return record | {key: str(record.get(key)).removesuffix(suffix) for key in ("id", "impl", "label")}


def seal(record: fields.Record) -> str:
    """The seal of a record, or of all under "lmsys": the SHA-256 of its JSON with sorted keys, without "seal"."""
    return files.digest_of({name: value for name, value in record.items() if name != "seal"})


def others_seal(file: fields.Record) -> str:
    """SHA-256, in hexadecimal, of pytest-benchmark's part of a result file: all but what lies under "lmsys"."""
    # Through JSON, so that the values are those that a reader of the file gets.
    return files.digest_of(json.loads(json.dumps({name: value for name, value in file.items() if name != "lmsys"})))


def older_file_seal(content: fields.Record) -> str:
    """The seal as lmsys 0.1 computed it for a file: from the machine and the seals of its records, in their order."""
    return files.digest_of([content["machine"], [record.get("seal") for record in content["records"]]])


def summarize(samples_s: Sequence[float]) -> fields.Record:
    """The record's statistics of samples in seconds: median (`time_s`), mean, deviation, percentiles, least, number."""
    ordered = sorted(samples_s)
    several = ordered if len(ordered) > 1 else 2 * ordered  # quantiles and deviations need two samples
    fifths = statistics.quantiles(several, n=5, method="inclusive")
    return {
        "time_s": statistics.median(ordered),
        "mean_s": statistics.fmean(ordered),
        "std_s": statistics.stdev(several),
        "p20_s": fifths[0],
        "p80_s": fifths[-1],
        "min_s": ordered[0],
        "rounds": len(ordered),
    }


def rounded(samples_s: Sequence[float]) -> list[float]:
    """Samples rounded to six digits. Statistics are computed from these, so that readers can compute them again."""
    return [float(f"{sample:.6g}") for sample in samples_s]


class JournalError(OSError):
    """Raised when the journal can no longer be written; the records that it holds are kept."""


class Journal:
    """Appends each record to `<result>.partial` as it comes, and flushes it to disk.

    It begins with the records that are carried over from the run that --resume names. An earlier journal is replaced
    only once these records are on disk.

    result   path of the result file
    head     the content of the file under "lmsys" beside the schema, the records and the seals
    carried  the records that are carried over
    """

    def __init__(self, result: Path, head: fields.Record, carried: Iterable[fields.Record] = ()):
        self.path = result.with_name(result.name + ".partial")
        with self._telling(), files.replacing(self.path) as file:
            file.writelines(map(_line, [{"schema": SCHEMA, **head}] + list(map(check_record, carried))))

    def add(self, record: fields.Record) -> None:
        """Appends a record. JournalError if it cannot be written, ValueError as `check_record` raises it."""
        line = _line(check_record(record))
        with self._telling(), self.path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """A context that raises JournalError in place of an OSError."""
        try:
            yield
        except OSError as error:
            raise JournalError(f"{self.path} cannot be written: {error.strerror}; what it holds stands") from error


def _line(content: fields.Record) -> bytes:
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def payload(head: fields.Record, records: Iterable[fields.Record]) -> fields.Record:
    """The value of the result file's "lmsys" key, without seals; `head` has the machine, fields, layouts and rows."""
    return {"schema": SCHEMA, **head, "records": [check_record(record) for record in records]}


def load(path: Path) -> fields.Record:
    """The `{"machine", "fields", "layouts", "rows", "records"}` of a result file, or of a killed run's journal.

    ValueError, with the path, for a file that is absent, not JSON, not ours, or of another schema.
    """
    return dict(load_file(path)["lmsys"])


def load_file(path: Path) -> fields.Record:
    """A whole result file: what `load` returns under "lmsys", and pytest-benchmark's entries under "benchmarks".

    A journal has "lmsys" alone. ValueError as `load` raises it, and for "benchmarks" in a form that pytest-benchmark
    does not write.
    """
    journal = path.with_name(path.name + ".partial")
    if journal.is_file() and not (path.is_file() and path.stat().st_size):
        path = journal  # the result file is missing, or empty, which is no result
    text = files.read_text(path)
    try:
        content = {"lmsys": _from_journal(text)} if path.suffix == ".partial" else strict_json.parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    ours: Any = content.get("lmsys") if isinstance(content, dict) else None
    hold(
        (
            isinstance(ours, dict) and "schema" in ours,
            f'{path}: not a result of this bench: it has no "lmsys" key with a schema',
        )
    )
    hold(
        (
            ours["schema"] == SCHEMA,
            f"{path}: schema {shortly(ours['schema'])} is not the {SCHEMA} that this version reads: another version of"
            " lmsys wrote it",
        )
    )
    ours.setdefault("layouts", {})
    try:
        validate.check_shape("benchmarks", content.get("benchmarks", []), validate.ENTRIES)
        validate.check_content(ours)
        for record in ours["records"]:
            check_record(record)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return dict(content)


def _from_journal(text: str) -> fields.Record:
    """The journal's records; a last line cut short by a crash is left out, as that case did not end."""
    lines = text[: text.rfind("\n") + 1].splitlines()
    head, *records = [strict_json.parse_json(line) for line in lines] or [{}]
    return dict(head, records=records) if isinstance(head, dict) else {}
