"""The command `lmsys bench`: prints the command line of pytest that measures a benchmark, and runs it.

For example `lmsys bench attention --row mine.py:f`. A *row* is an implementation under test. `lmsys/__main__.py` runs
this module. `line_of` reads the benchmark's name and the options of this command; all other arguments go to pytest as
they are. A new option of the command is added in `line_of`; `lmsys/commands.py` has the examples that --help shows.
"""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from lmsys import commands, values


def main() -> None:
    """Replaces this process with pytest; exits with status 2 if the arguments are wrong."""
    line = line_of(sys.argv[1:])
    print(shlex.join(["python"] + line), flush=True)
    os.execv(sys.executable, [sys.executable] + line)


def line_of(arguments: list[str]) -> list[str]:
    """The arguments of `python` that run pytest. SystemExit, with a message, if `arguments` are wrong."""
    parser = commands.parser("bench")
    parser.usage = "lmsys bench BENCHMARK [--row ROW] [-o OUT.json] [options of pytest]"
    parser.add_argument(
        "benchmark",
        metavar="BENCHMARK",
        help="attention, loss, model and so on, of benchmarks/bench_NAME.py; or a file",
    )
    parser.add_argument(
        "--row",
        action="append",
        metavar="ROW",
        help="a row by its name, or path.py:attribute, beside those that others are compared with; may be given several"
        " times (default: the rows of the sweep)",
    )
    parser.add_argument(
        "-o", "--output", metavar="OUT.json", help="the result (default: that of --resume, else BENCHMARK.json)"
    )
    given, rest = parser.parse_known_args(arguments)
    for module in ("torch", "pytest", "pytest_benchmark"):
        if find_spec(module) is None:
            parser.exit(commands.USAGE, f"{commands.missing('lmsys bench', module)}\n")
    try:
        file = file_of(given.benchmark)
        rows = [option_of_rows(file, given.row)] if given.row else []
    except ValueError as error:
        parser.error(str(error))
    # A resumed run goes on in the file that --resume names, unless -o names another.
    goes_on = any(word.partition("=")[0] in ("--resume", "--lmsys-resume") for word in rest)
    output = given.output or ("" if goes_on else f"{file.stem.removeprefix('bench_')}.json")
    options = rows + (["--benchmark-json", output] if output else []) + rest
    return ["-m", "pytest", os.path.relpath(file), "--benchmark-only"] + options


def file_of(benchmark: str) -> Path:
    """The file of a benchmark: one of the user's, or of benchmarks/ here, above here, or beside the package lmsys.

    ValueError where there is no such file.
    """
    if (file := Path(benchmark)).is_file():
        return file
    roots = [
        root for root in (Path.cwd(), *Path.cwd().parents, commands.FOLDER) if (root / "benchmarks/axes.py").is_file()
    ]
    values.hold(
        (
            roots and not file.suffix,
            f"there is no file {benchmark!r} here, and only a clone of lmsys has its benchmarks/: change to one, or"
            " install lmsys from one by pip install -e",
        )
    )
    files = {path.stem.removeprefix("bench_"): path for path in sorted(roots[0].glob("benchmarks/bench_*.py"))}
    return files[values.choice(benchmark, files)]  # it raises ValueError, with the nearest names, for an unknown one


def option_of_rows(file: Path, rows: list[str]) -> str:
    """The option of pytest that selects `rows`, and before them the table's rows with the trait `baseline`.

    Other rows are compared with those. For example "--attention=sdpa,mine.py:f". The option is that of the first axis
    in the file whose values are names of rows. ValueError where there is no such axis.
    """
    from lmsys.registry import Traits
    from lmsys.verify import benchmarks_of

    for benchmark in benchmarks_of(file).values():
        # An axis called "row" names rows of the benchmark's first table. Any other axis of rows has its table's name.
        tables = {"row": next(iter(benchmark.tables.values())), **benchmark.tables}
        for axis in [axis for axis in benchmark.axes if axis.name in tables]:
            beside = [name for name, entry in tables[axis.name].items() if Traits.of(entry).baseline]
            return f"{axis.option or f'--axis={axis.name}'}={','.join(dict.fromkeys(beside + rows))}"
    raise ValueError(f"--row {rows[0]}: {file} has no axis of rows")


if __name__ == "__main__":
    main()
