"""Pytest's options for a run of benchmarks: declares them, and reads and checks them for `lmsys.bench.plugin`.

To add an option, add an entry to OPTIONS and read it in `plugin._session`; if its value has to be parsed or checked,
add a function here for that. A wrong value raises a ValueError that names the option and the value: `values.hold`
raises it if a condition is false. A *row* is an implementation under test, a *case* is one row with one set of sizes, a
*group* is the cases that share inputs, and an *axis* is a quantity that a benchmark varies, such as length. Imports no
torch.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lmsys.bench import benchmark, fields, record, results
from lmsys.bench.checkout import Checkout
from lmsys.files import claim
from lmsys.values import choice, finite, hold, shortly, whole

LONG = "--lmsys-"  # prefix of the options' long names
OPTIONS: dict[str, dict[str, Any]] = {  # {name without a prefix: keywords of argparse's add_argument}
    "sweep": {"default": "default", "help": "a named set of sizes to run"},
    "axis": {
        "action": "append",
        "default": [],
        "metavar": "NAME=A,B",
        "help": "values for an axis of a benchmark, by its name",
    },
    "memory-limit": {"metavar": "SIZE", "help": "cap the GPU's allocator, such as 24GiB"},
    "resume": {
        "type": Path,
        "metavar": "OUT.json",
        "help": "take what this result holds as done; alone, go on in that file",
    },
    "deadline": {
        "metavar": "SECONDS",
        "default": "600",
        "help": "a row that takes longer to compile or to answer is ended (in a timed call: after 30 s, or 20 times "
        "what all samples of its comparison should take)",
    },
    "retry-crashed": {"action": "store_true", "help": "--resume runs again what crashed or hung, too"},
    "no-check": {"action": "store_true", "help": "do not ask rows from files what lmsys check asks first"},
    "no-isolation": {"action": "store_true", "help": "run rows in pytest's own process, for a debugger"},
    "own-process": {
        "action": "store_true",
        "help": "attention rows run in processes of their own, and are judged from outside; Linux",
    },
    "repeat": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "measure each group in N fresh processes: how far do runs differ?",
    },
    "energy": {"action": "store_true", "help": "measure also the energy of each case's calls, in a pass of seconds"},
    "against": {
        "metavar": "REF",
        "help": "measure each row also as it was, at a git reference or in a folder: did it become slower?",
    },
    "margin": {"metavar": "SHARE", "help": "of --against: a smaller change is none (default: 0.02)"},
    "nvtx": {"action": "store_true", "help": "call each case in NVTX ranges of its id; no case is timed"},
    "fail-on": {"metavar": "OUTCOMES", "help": "exit with 1 where a case ends so, such as wrong,error"},
}

MOST_ROUNDS = 100_000  # the largest --benchmark-min-rounds: with some zeros too many a run would never end
# Reasons that several options in REFUSED have. "Replayed": pytest-benchmark gets samples that our runner has measured
# (`lmsys.bench.plugin`).
REPLAYED = "what is replayed is already measured"
TOGETHER = "rows are sampled side by side; --benchmark-max-time sets how long"
REFUSED = {  # options of pytest-benchmark that mean nothing here, and why
    "--benchmark-timer": "the clock is the device's: CUDA events on a GPU, perf_counter on a CPU",
    "--benchmark-min-time": "each sample is one call; --benchmark-max-time sets how long a row is sampled",
    "--benchmark-calibration-precision": "each sample is one call, nothing is calibrated",
    "--benchmark-precision": TOGETHER,
    "--benchmark-confidence": TOGETHER,
    "--benchmark-warmup": "every row is compiled, tuned and warm before its first sample",
    "--benchmark-warmup-iterations": "every row is compiled, tuned and warm before its first sample",
    "--benchmark-disable-gc": REPLAYED,
    "--benchmark-cprofile": f"{REPLAYED}; profile the row itself",
    "--benchmark-cprofile-loops": f"{REPLAYED}; profile the row itself",
    "--benchmark-cprofile-top": f"{REPLAYED}; profile the row itself",
    "--benchmark-cprofile-dump": f"{REPLAYED}; profile the row itself",
}
ABOUT_TABLES = tuple(  # options for which pytest-benchmark must make its own tables
    f"--benchmark-{option}"
    for option in "columns sort group-by name time-unit compare compare-fail histogram verbose".split()
)
UNITS = {  # {unit of memory: bytes}
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}


def add_options(parser: pytest.Parser, prefix: str = "--", axes: Iterable[fields.Axis] = ()) -> None:
    """Adds all options, with `prefix` before their names, and an option for each of `axes`.

    The plugin calls it with LONG: no other plugin has names such as --lmsys-sweep. A conftest whose folder holds
    benchmarks calls it in its pytest_addoption, so that there the short names, such as --sweep, work too.
    """
    group = parser.getgroup("lmsys", "benchmarks (comma lists; an axis not named keeps its sweep's values)")
    for name, more in OPTIONS.items():
        group.addoption(prefix + name, dest="lmsys_" + name.replace("-", "_"), **more)
    for axis in axes:
        group.addoption(axis.option, dest=fields.OPTION + axis.option, help=axis.help, metavar=axis.metavar)


def as_typed(config: pytest.Config, text: str) -> str:
    """The text with its options named as this run of pytest knows them: --sweep stays, or becomes --lmsys-sweep.

    Where no conftest has called `add_options`, only the long names exist.
    """
    # Where a conftest has added --axis, both names give one list. Otherwise --axis gives None, as pytest does not know
    # it, or the value of another plugin's option.
    if config.getoption("--axis", None) is config.getoption("lmsys_axis"):
        return text
    # Whole words alone: neither --lmsys-sweep nor --benchmark-axis nor --axis-of are changed.
    return re.sub(rf"(?<![\w-])--(?=({'|'.join(OPTIONS)})\b(?!-))", LONG, text)


def refuse(config: pytest.Config, device: str) -> None:
    """Raises ValueError for options of pytest-benchmark in REFUSED, and for those that lack a package or a GPU here."""
    hold(
        *(
            (not _given(config, option), f"{option} is not for these benchmarks: {reason}")
            for option, reason in REFUSED.items()
        ),
        (
            not config.getoption("benchmark_histogram") or find_spec("pygal") is not None,
            "--benchmark-histogram needs pygal, which is not installed: python -m pip install pygal",
        ),
        (
            device == "cuda" or not config.getoption("lmsys_nvtx"),
            "--nvtx marks the kernels of a GPU for nsys and ncu, and this machine has no CUDA device",
        ),
    )


def check_group_by(text: str, names: Iterable[str]) -> None:
    """Raises ValueError for values of --benchmark-group-by at which pytest-benchmark would fail at the run's end.

    text   the value of the option, a comma list
    names  the parameters that "param:NAME" may name
    """
    known = "group name func fullname fullfunc param".split() + [f"param:{name}" for name in names]
    for grouping in text.split(","):
        choice(grouping, known, f"--benchmark-group-by {grouping}: ")


def wants_tables(config: pytest.Config) -> bool:
    """True where the user gave an option in ABOUT_TABLES: one for which pytest-benchmark must make its own tables."""
    return any(_given(config, option) for option in ABOUT_TABLES)


def texts(config: pytest.Config) -> dict[str, str]:
    """The values of axes on the command line, {option such as "--length", or name of an axis: text}.

    `fields.given_axes` parses them. ValueError for an --axis that does not read NAME=A,B.
    """
    texts = {
        name.removeprefix(fields.OPTION): text
        for name, text in vars(config.option).items()
        if name.startswith(fields.OPTION) and text is not None
    }
    for given in config.getoption("lmsys_axis"):
        name, equals, text = given.partition("=")
        hold((equals, f"--axis {given!r}: must read NAME=A,B, as in --axis size=256,512"))
        texts[name] = text
    return texts


def seconds_per_row(config: pytest.Config, sweep: fields.Sweep) -> float:
    """The seconds for which each row is sampled: --benchmark-max-time if given, else those of the sweep."""
    option, text = "--benchmark-max-time", str(config.getoption("benchmark_max_time"))
    if not _given(config, option):
        return sweep.seconds_per_row
    return number(option, text, "a finite number of seconds, 0 or more", least=0)


def min_rounds(config: pytest.Config) -> int:
    """The least number of samples of each row: --benchmark-min-rounds if given, else the default of benchmarks."""
    option = "--benchmark-min-rounds"
    rounds = int(config.getoption("benchmark_min_rounds")) if _given(config, option) else benchmark.DEFAULT_ROUNDS
    hold(
        (
            rounds >= benchmark.DEFAULT_ROUNDS,
            f"{option} {rounds}: a median needs at least {benchmark.DEFAULT_ROUNDS} samples",
        ),
        (rounds <= MOST_ROUNDS, f"{option} {rounds}: a result holds at most {MOST_ROUNDS:,} samples of a case"),
    )
    return rounds


def outcomes(text: str | None) -> tuple[str, ...]:
    """The outcomes that --fail-on names: any but "ok", the first of `record.OUTCOMES`."""
    return tuple(
        choice(name.strip(), record.OUTCOMES[1:], f"--fail-on {text!r}: ") for name in (text.split(",") if text else ())
    )


def number(option: str, text: str, right: str, **bounds: float) -> float:
    """The finite number that the text of an option stands for.

    right   what a right value is, for the message of the ValueError
    bounds  as `values.finite` takes them: `above`, `least`, `most`
    """
    try:
        return finite(option, float(text), **bounds)
    except ValueError:
        raise ValueError(f"{option} {text!r}: must be {right}") from None


def repeats(config: pytest.Config, on_ranks: bool) -> int:
    """How often each group is measured, by --repeat. ValueError for more than 1 if there can be no fresh processes.

    on_ranks  torchrun has started this process
    """
    count = whole("--repeat", config.getoption("lmsys_repeat"), least=1)
    if config.getoption("lmsys_nvtx") or config.getoption("benchmark_disable"):
        return 1  # nothing is timed
    hold(
        (
            count == 1 or not (on_ranks or config.getoption("lmsys_no_isolation")),
            f"--repeat {count} needs fresh processes, which --no-isolation and torchrun do not have",
        )
    )
    return count


def own_process(config: pytest.Config, on_ranks: bool) -> bool:
    """True if --own-process is given and pytest does more than collect.

    ValueError where it is given and rows cannot have processes of their own.

    on_ranks  torchrun has started this process
    """
    others = {
        "--no-isolation": config.getoption("lmsys_no_isolation"),
        "torchrun": on_ranks,
        "--against": config.getoption("lmsys_against"),
        "--nvtx": config.getoption("lmsys_nvtx"),
        "this system (it needs Linux)": not hasattr(os, "memfd_create"),
    }
    asked: bool = config.getoption("lmsys_own_process")
    hold(*((not (asked and is_given), f"--own-process cannot be with {what}") for what, is_given in others.items()))
    return asked and not config.getoption("collectonly")


def checkout(config: pytest.Config, on_ranks: bool) -> Checkout | None:
    """The earlier state of the code that --against names, or None. Its folder is removed when pytest ends.

    ValueError for --margin without --against, and for options that exclude --against.

    on_ranks  torchrun has started this process
    """
    text, share = config.getoption("lmsys_against"), config.getoption("lmsys_margin")
    if text is None:
        hold((share is None, f"--margin {share} is of verdicts: name what to compare by --against"))
        return None
    others = {
        "--no-isolation": config.getoption("lmsys_no_isolation"),
        "torchrun": on_ranks,
        "--nvtx": config.getoption("lmsys_nvtx"),
        "--repeat": config.getoption("lmsys_repeat") != 1,
    }
    hold(
        *(
            (not is_given, f"--against {text}: {option} cannot be with it: its rows run in a process of their own")
            for option, is_given in others.items()
        )
    )
    folder = tempfile.TemporaryDirectory(prefix="lmsys-against-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    return Checkout(text, Path(folder.name))


def margin(text: str | None) -> float:
    """The margin of --against, as a share: a smaller change of time counts as no change. None: the default."""
    if text is None:
        return results.MARGIN_IN_TURNS
    return number("--margin", text, "a share above 0 and of at most 1, such as 0.02", above=0, most=1)


def memory_limit(text: str | None, device: str) -> int | None:
    """The bytes that "24GiB", "512MiB" or "16GB" name; None without the option."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?i?B)", text.strip())
    size = round(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    hold(
        (
            size > 0,
            f"--memory-limit {shortly(text)} is not a size; write a positive number and a unit, such as 24GiB, 512MiB"
            " or 16GB",
        ),
        (device == "cuda", f"--memory-limit {text} caps the CUDA allocator, and this machine has no CUDA device"),
    )
    return size


def output(config: pytest.Config) -> Path | None:
    """The file of the result: that of --benchmark-json, else that of --resume; None if neither is given.

    For --benchmark-json pytest-benchmark 5.2, which GPU images still have, gives a file that it has opened.
    """
    given = config.getoption("benchmark_json") or config.getoption("lmsys_resume")
    return given if given is None or isinstance(given, Path) else Path(getattr(given, "name", given))


def check_free(output: Path, command: str) -> None:
    """Raises ValueError if this command would overwrite the result of another command, or the journal of a killed run.

    The result of the same command may be replaced, since it answers the same question.
    """
    journal = output.with_name(output.name + ".partial")
    hold(
        (
            not journal.is_file(),
            f"{journal} has the records of a run that was ended: go on by --resume {output}, or remove it",
        )
    )
    if not output.is_file() or not output.stat().st_size:
        return
    try:
        earlier = record.load(output)["machine"].get("command")
    except ValueError as error:
        raise ValueError(f"{error}: it is left as it is; write elsewhere, or remove it") from None
    hold(
        (
            earlier == command,
            f"{output} is the result of another command, {earlier!r}: write elsewhere, go on in it by --resume"
            f" {output}, or remove it",
        )
    )


def claim_writable(output: Path) -> Callable[[], None]:
    """Makes this process the only one that writes the output. Returns the function that ends this claim.

    The plugin calls it before anything is measured. ValueError where the output cannot be written, or where
    another process writes it.
    """
    hold(
        (
            output.is_file() or not output.exists(),
            f"cannot write the result to {output}: it is there, and it is no file",
        ),
        (
            os.access(output, os.W_OK) or not output.exists(),
            f"cannot write the result to {output}: Permission denied",
        ),
    )
    try:
        output.resolve().parent.mkdir(parents=True, exist_ok=True)  # a link is followed when the result is written
        return claim(output)
    except OSError as error:
        raise ValueError(f"cannot write the result to {output}: {error.strerror}") from error


def _given(config: pytest.Config, option: str) -> bool:
    """True where the user wrote the option, even with the value that is its default."""
    by_variable, typed = shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), config.invocation_params.args
    return any(str(word).partition("=")[0] == option for word in (*config.getini("addopts"), *by_variable, *typed))
