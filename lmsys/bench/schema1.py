"""Result files of schema 1, read as if they were of schema 2: names that changed, and what such files leave out."""

import json
from functools import cache
from pathlib import Path

from lmsys.bench.fields import Record

NAMES: dict[str, dict[str, str | None]] = {  # of schema 2, by benchmark; None for a field that nobody reads
    "attention": {
        "matmul_fraction": "matmul_ceiling_fraction",
        "copy_fraction": "copy_ceiling_fraction",
        "mode": None,
    }
}


@cache
def _known() -> Record:
    """The fields and rows of schema 1, as they were when it ended. Frozen: nothing is ever added here."""
    return json.loads(Path(__file__).with_name("schema1.json").read_text())


def upgraded(found: Record) -> Record:
    """The content of a file of schema 1, as one of schema 2."""
    records = [_upgraded(record) if isinstance(record, dict) else record for record in found["records"]]
    return {**_known(), **found, "schema": 2, "records": records}


def _upgraded(record: Record) -> Record:
    names = NAMES.get(str(record.get("benchmark")), {})
    return {now: value for name, value in record.items() if (now := names.get(name, name)) is not None}
