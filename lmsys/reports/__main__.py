"""`python -m lmsys.reports RESULT.json ... [-o DIR] [--baseline NAME]`: tables, plots and a page from result files.

Several files, such as the parts of a split run or the journals (*.partial) of interrupted ones, are reported as one; for
a case that several hold, the run of the latest date wins. Ends with exit code 2 and one line on stderr when something
given cannot be used.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from lmsys.reports import BUILDERS, page
from lmsys.reports.load import InputError, Results, read


def main(
    arguments: Sequence[str] | None = None,
    results: Sequence[Path] = (),
    output: Path = Path("site"),
    program: str = "python -m lmsys.reports",
) -> int:
    """Build the report; the exit code. `results` and `output` stand where the arguments name none."""
    parser = argparse.ArgumentParser(program, description="Tables, plots and a page from result files.")
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT.json", help="result files, reported as one")
    parser.add_argument("-o", "--output", type=Path, default=output, metavar="DIR", help=f"default: {output}")
    parser.add_argument(
        "--baseline", metavar="NAME", help="what speedups are relative to (default: sdpa_flash or naive)"
    )
    options = parser.parse_args(arguments)
    try:
        print(build(options.results or results, options.output, options.baseline))
    except InputError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    return 0


def build(paths: Sequence[Path], out: Path, baseline: str | None = None) -> Path:
    """Report these result files into the folder `out`; the path of the page. InputError says what cannot be used."""
    if not paths:
        raise InputError("nothing to report: name the result files")
    results = read(paths)
    _check_baseline(results, baseline)
    kinds = results.frame["benchmark"].value_counts()
    strangers = [f"{kinds[kind]} records of {kind!r}" for kind in sorted(set(kinds.index) - BUILDERS.keys())]
    if len(strangers) == len(kinds):
        raise InputError(f"nothing to report: {', '.join(strangers)}, and this version knows {', '.join(BUILDERS)}")
    parts = []
    for machine in results.machines:
        own = [(name, rows) for name in BUILDERS if (rows := machine.frame["benchmark"] == name).any()]
        chapters = [chapter for name, rows in own for chapter in BUILDERS[name](machine.only(rows), baseline)]
        parts += [(machine, chapters)] if chapters else []
    page.prepare(out)
    lists = [name for name, values in results.frame.items() if values.map(lambda value: isinstance(value, list)).any()]
    csv = results.frame.drop(columns=lists).to_csv(index=False, lineterminator="\n")
    notes = [f"Not shown: {', '.join(strangers)}, which this version cannot report."] if strangers else []
    return page.write(out, parts, csv, notes)


def _check_baseline(results: Results, baseline: str | None) -> None:
    names = sorted(set(results.frame["impl"]))
    if baseline is not None and baseline not in names:
        near = difflib.get_close_matches(baseline, names, n=3) or names
        raise InputError(f"unknown baseline {baseline!r}; did you mean {', '.join(near)}?")


if __name__ == "__main__":
    sys.exit(main())
