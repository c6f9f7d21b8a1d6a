"""`python -m tests.museum`: which published silent faults `lmsys check` refuses, and which other projects' rules do.

It takes minutes. With --write it writes the tables of docs/museum.md. The exit code is 1 if a fault is not refused, or
if a right implementation is. In the museum, an exhibit is a published fault. `exhibit.py` defines it, the files named
after kinds of implementations contain exhibits, `gates.py` has the rules of other projects ("gates"), and `table.py`
makes the tables.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from lmsys.check.kinds import KINDS
from lmsys.check.question import poison
from tests.museum.families import exhibits, honest
from tests.museum.table import Row, honest_verdicts, markdown, rows, written

PAGE = Path(__file__).parents[2] / "docs" / "museum.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.museum", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kind", choices=KINDS, help="exhibits and rows of one kind; default: all")
    parser.add_argument("--markdown", action="store_true", help="the tables of the page")
    parser.add_argument("--write", action="store_true", help=f"write them into {PAGE.name}")
    given = parser.parse_args(arguments)
    if given.write and given.kind:
        parser.error("--write needs all kinds: leave --kind out")
    made = rows(exhibits(given.kind), _say, before_check=lambda: poison(setattr))
    right = honest_verdicts(honest(given.kind), _say)
    if given.write:
        PAGE.write_text(written(PAGE.read_text(), markdown(made, right)))
    elif given.markdown:
        print(markdown(made, right))
    else:
        for row in made:
            print(_line(row))
        for kind, entry, verdict in right:
            print(f"{kind} {entry.name}: {'right' if verdict.fault is None else f'ACCUSED: {verdict.about}'}")
    missed, accused = [row for row in made if not row.refused], [row for row in right if row[2].fault is not None]
    _say(f"{len(made) - len(missed)} of {len(made)} refused, {len(accused)} of {len(right)} right rows accused")
    return 1 if missed or accused else 0


def _line(row: Row) -> str:
    """A line for the terminal: the exhibit, the mistake that the check names, and the gates that refuse it."""
    verdict = "NOT REFUSED" if row.verdict.fault is None else row.verdict.fault.mistake or "refused, without a name"
    new, others = ", not seen before" if row.new else "", ", ".join(row.seen) or "none"
    return f"{row.exhibit.kind} {row.exhibit.name}: {verdict}{new}; other gates: {others}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
