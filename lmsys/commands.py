"""The commands of `lmsys`, their help by example, and how to install what is missing. Imports no torch.

`lmsys/__main__.py` runs the modules of COMMANDS, and the `main` of each gets its argument parser from `parser` here. If
a package is not installed, commands and `lmsys.registry` get the advice how to install it from `missing` and
`with_extra`. A new command is a module that `python -m` can run, and an entry of COMMANDS.
"""

import argparse
import importlib.metadata
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

PIP = "python -m pip install"
FOLDER = Path(__file__).parents[1]  # the root of a checkout, or the folder where packages are installed
USAGE = 2  # exit status of a command that cannot begin
EXTRAS = {"matplotlib": "report", "pytest": "bench", "pytest_benchmark": "bench"}  # module: the extra that installs it


@dataclass(frozen=True)
class Command:
    """A command of `lmsys`.

    module    the module that `python -m` runs
    about     a sentence that says what the command does
    examples  {command line: what it does}
    """

    module: str
    about: str
    examples: dict[str, str]


COMMANDS = {
    "bench": Command(
        "lmsys.bench",
        "Measures the rows of a benchmark side by side, by a line of pytest that is printed first.",
        {
            "lmsys bench attention": "every row that the sweep of this machine names",
            "lmsys bench attention --row mine.py:my_attention": "yours beside those that others are compared with",
            "lmsys bench attention --row mine.py:my_attention --dtype bfloat16 -k causal": "options of pytest follow",
            "lmsys bench bench_matmul.py": "a benchmark of your own",
        },
    ),
    "check": Command(
        "lmsys.check",
        "Is it right? Of the first failure: where, what, and which mistake.",
        {
            "lmsys check mine.py:my_attention": "your kernel, in seconds",
            "lmsys check flash_triton --head-dim 128": "a row by its name",
            "lmsys check mine.py:MyAdamW --kind optimizer": "an optimizer",
            "lmsys check --all": "every row that this machine can run, in minutes",
        },
    ),
    "course": Command(
        "lmsys.course",
        "What of an assignment of CS336 is right, wrong, or not written.",
        {
            "lmsys course assignment2-systems": "a checkout as it is: each part by its adapter",
            "lmsys course assignment2-systems --part attention": "the parts that have this in their name",
            "lmsys course assignment1-basics --html right.html": "and as a page",
            "lmsys course assignment2-systems --measure speed": "then how fast the right parts are: speed/site",
        },
    ),
    "report": Command(
        "lmsys.reports",
        "Tables, plots and a page from result files.",
        {
            "lmsys report attention.json -o site": "a page of a run: site/index.html",
            "lmsys report --before old.json new.json -o changes": "two runs: which cases became slower",
        },
    ),
    "verify": Command(
        "lmsys.verify",
        "Recomputes what result files say, on any machine.",
        {"lmsys verify attention.json": "its figures, rates and judged calls, from its samples and inputs"},
    ),
    "leaderboard": Command(
        "lmsys.leaderboard",
        "One page of many result files of one workload, each verified first.",
        {
            "lmsys leaderboard results -o site": "files are ranked by speed over the row naive: site/index.html",
            "lmsys leaderboard results -o site --anchor sdpa": "or over another row that every file has",
        },
    ),
    "pick": Command(
        "lmsys.pick",
        "A Python module for a model of yours: by shape, the attention row that was fastest in a result.",
        {"lmsys pick attention.json -o rows.py": "then attention(..., impl=rows.row_for(q, k, ...))"},
    ),
    "train": Command(
        "lmsys.training",
        "From text to a trained model.",
        {
            "lmsys train": "a small model on the text of Python's library, in minutes on a CPU",
            "lmsys train --corpus README.md --steps 5": "five steps on a text of yours",
            "lmsys train --ranks 2 --strategy zero1": "on two GPUs, or two processes of a CPU",
        },
    ),
}


def parser(name: str, program: str = "") -> argparse.ArgumentParser:
    """The parser of a command: its help ends with its examples. program: another name to show for the command."""
    command = COMMANDS[name]
    return argparse.ArgumentParser(
        prog=program or f"lmsys {name}",
        description=command.about,
        epilog="examples:" + "".join(f"\n  {line}\n      {about}" for line, about in command.examples.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def path(text: str) -> Path:
    """The path that an argument names, for argparse. An empty one, as of a variable that is not set, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; to name the current folder, write .")
    return Path(text)


def refused(program: str, error: Exception) -> int:
    """Prints why the program cannot do what it was asked; returns its exit status."""
    print(f"{program}: error: {error}", file=sys.stderr)
    return USAGE


def missing(command: str, module: str) -> str:
    """The error message about a module that a command needs and that is not installed, with how to install it."""
    advice = with_extra(EXTRAS[module]) if module in EXTRAS else f"{PIP} {module}"
    return f"{command} needs {module}, which is not installed here: {advice}"


def with_extra(extra: str) -> str:
    """The shell command that installs lmsys with an extra, from where lmsys came: a checkout, a URL, or an index."""
    if (FOLDER / "pyproject.toml").is_file():
        return f"{PIP} -e {shlex.quote(f'{FOLDER}[{extra}]')}"
    source = next(
        (installed.read_text("direct_url.json") for installed in importlib.metadata.distributions(name="lmsys")), None
    )
    if source is None:  # pip writes direct_url.json unless a package comes from an index
        return f"{PIP} 'lmsys[{extra}]'"
    origin = json.loads(source)
    scheme = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    return f"{PIP} 'lmsys[{extra}] @ {scheme}{origin['url']}'"
