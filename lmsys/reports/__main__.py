"""`lmsys report`: makes tables, plots and a page from result files of the bench.

    lmsys report RESULT.json ... [-o DIR] [--baseline NAME] [--single-file]
    lmsys report --before OLD.json NEW.json ... [-o DIR] [--margin 0.05]
    lmsys report --before BOTH.json [-o DIR] [--margin 0.02]

Several files, such as the parts of a split run or the journals (*.partial) of interrupted ones, are reported as one;
for a case that several hold, the run of the latest date wins. With --before, two runs of one machine are compared
case by case, and the exit code is 1 if a case became slower or broke. BOTH.json is from a run with --against, which
measured the code of today and an earlier state of it, in turns. If an argument cannot be used, the exit code is 2 and
stderr has one line that says why.

A case is one record of a result file: one row (an implementation) as it was measured with one value for each axis.
`python -m reports` calls `main`, too. To add an option, add it to OPTIONS and to docs/report.md, and let `main` pass it
to `build`, which calls the other modules in order. An option for two runs goes to OF_TWO_RUNS, and `_compare` reads it.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmsys import commands
from lmsys.bench.changes import MARGIN, lines
from lmsys.reports import against, answers, items, layout, load, page, views
from lmsys.values import choice, finite, hold

OPTIONS: dict[str, dict[str, Any]] = {  # of argparse
    "results": {"nargs": "*", "type": Path, "metavar": "RESULT.json", "help": "result files, reported as one"},
    "-o --output": {"type": commands.path, "metavar": "DIR", "help": "default: %(default)s"},
    "--baseline": {"metavar": "NAME", "help": "the row that speeds are relative to (default: as its table says)"},
    "--single-file": {"action": "store_true", "help": "the page holds its plots: one file to send"},
}
OF_TWO_RUNS: dict[str, dict[str, Any]] = {  # options of argparse for comparing a run with an earlier one
    "--before": {"type": Path, "metavar": "OLD.json", "help": "the run before: which cases became slower?"},
    "--margin": {
        "type": float,
        "metavar": "SHARE",
        "help": f"a smaller share of the time is no change (default: {MARGIN}, or that of the sweep)",
    },
    "--anyway": {"action": "store_true", "help": "compare across machines, versions and clocks"},
}


def main(
    arguments: Sequence[str] | None = None,
    results: Sequence[Path] = (),
    output: Path = Path("site"),
    program: str = "",
) -> int:
    """Runs the command and returns its exit code.

    arguments        the arguments of the command line; None: those of this process
    results, output  the result files and the folder if the arguments name none
    program          the name of the program in messages; "": the name of the command

    `python -m reports` gives all but the first.
    """
    parser = commands.parser("report", program)
    for group, options_of in ((parser, OPTIONS), (parser.add_argument_group("two runs of one machine"), OF_TWO_RUNS)):
        for name, more in options_of.items():
            group.add_argument(*name.split(), **more)
    parser.set_defaults(output=output)
    options = parser.parse_args(arguments)
    try:
        if options.margin is not None:
            finite("--margin", options.margin, above=0, most=1)
        if options.before:
            return _compare(options)  # the exit code
        hold(
            *(
                (not getattr(options, name), f"--{name} is of two runs: name the run before by --before")
                for name in ("margin", "anyway")
            )
        )
        print(build(options.results or results, options.output, options.baseline, options.single_file))
    except ValueError as error:
        return commands.refused(parser.prog, error)
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Compares two runs, or the two states of the code that one run measured; returns the exit code."""
    hold((not options.baseline and not options.single_file, "--baseline and --single-file are of one run's report"))
    comparison = (
        against.read_both([options.before], options.results, margin=options.margin or MARGIN, anyway=options.anyway)
        if options.results
        else against.read_one(options.before, options.margin)
    )
    print(*lines(comparison.changes, comparison.margin), *against.of_one_side(comparison), sep="\n", flush=True)
    print(against.write(comparison, options.output))
    return int(any(change.is_bad for change in comparison.changes))


def build(paths: Sequence[Path], out: Path, baseline: str | None = None, single_file: bool = False) -> Path:
    """Writes the report of these result files into the folder `out`, and returns the path of its page.

    baseline     the row that speeds are relative to; None: the one that the table of rows chooses (trait `baseline`)
    single_file  True: the page holds its plots
    ValueError names a file or row that cannot be used.
    """
    hold((paths, "nothing to report: name the result files"), error=load.InputError)
    machines = load.read(paths)
    records = [case for machine in machines for case in machine.records]
    if baseline is not None:
        choice(baseline, sorted({case["impl"] for case in records}), f"unknown baseline {baseline!r}: ")
    counts = Counter(case["benchmark"] for case in records)
    undeclared = [f"{counts[name]} records of {name!r}" for name in sorted(counts) if name not in machines[0].fields]
    hold(
        (
            len(undeclared) < len(counts),
            f"nothing to report: {', '.join(undeclared)}, and nothing declares their fields",
        ),
        error=load.InputError,
    )
    parts = []
    for measured in machines:
        changes = against.in_turns(measured)  # None unless the run measured an earlier state of the code as well
        machine = changes.sides["after"] if changes else measured
        of_benchmarks = (layout.chapters(views.view_of(machine, name, baseline)) for name in machine.benchmarks)
        chapters = sum(of_benchmarks, answers.step_chapters(machine))  # that of training steps is first
        answer = answers.answers(machine)
        if changes:
            block, first = against.block_and_chapters(changes)
            answer = items.Block(answer.title, list(block.lead) + list(answer.lead), answer.more)
            chapters = first + chapters
        parts.append((machine, answer, chapters))
    notes = [f"Not shown: {', '.join(undeclared)}, since nothing declares their fields."] if undeclared else []
    # A part is (machine, answers, chapters). A machine without chapters is left out.
    return page.write(out, [part for part in parts if part[2]], items.csv_of(records), notes, single_file)


if __name__ == "__main__":
    sys.exit(main())
