"""The options of a run, read and checked: ValueError, with the option and its value, for what cannot be.

Imports torch only to cap the memory of a GPU.
"""

import math
import os
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmsys.bench.benchmark import DEFAULT_ROUNDS
from lmsys.bench.checkout import Checkout
from lmsys.bench.fields import OPTION, Sweep
from lmsys.bench.record import OUTCOMES
from lmsys.bench.results import MARGIN_IN_TURNS
from lmsys.files import claim
from lmsys.values import choice, finite, whole

REPLAYED = "what is replayed is already measured"
TOGETHER = "rows are sampled side by side; --benchmark-max-time sets how long"
REFUSED = {
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
ABOUT_TABLES = tuple(
    f"--benchmark-{option}"
    for option in "columns sort group-by name time-unit compare compare-fail histogram verbose".split()
)


def refuse(config: pytest.Config) -> None:
    """ValueError for options of pytest-benchmark that mean nothing here, or that need what is not installed."""
    for option, reason in REFUSED.items():
        if _given(config, option):
            raise ValueError(f"{option} is not for these benchmarks: {reason}")
    if config.getoption("benchmark_histogram") and find_spec("pygal") is None:
        raise ValueError("--benchmark-histogram needs pygal, which is not installed: python -m pip install pygal")


def wants_tables(config: pytest.Config) -> bool:
    """True where the user gave an option that is about pytest-benchmark's own tables, or needs them made."""
    return any(_given(config, option) for option in ABOUT_TABLES)


def texts(config: pytest.Config) -> dict[str, str]:
    named = {name.removeprefix(OPTION): text for name, text in vars(config.option).items() if name.startswith(OPTION)}
    texts = {option: text for option, text in named.items() if text is not None}
    for one in config.getoption("axis"):
        name, equals, text = one.partition("=")
        if not equals:
            raise ValueError(f"--axis {one!r}: must read NAME=A,B, as in --axis size=256,512")
        texts[name] = text
    return texts


def output(config: pytest.Config) -> Path | None:
    output = config.getoption("benchmark_json")  # a path, or before pytest-benchmark 5.3.1 an open file
    return output if output is None or isinstance(output, Path) else Path(getattr(output, "name", output))


def seconds_per_row(config: pytest.Config, sweep: Sweep) -> float:
    if not _given(config, "--benchmark-max-time"):
        return sweep.seconds_per_row
    seconds = float(config.getoption("benchmark_max_time"))
    if not 0 <= seconds < math.inf:
        raise ValueError(f"--benchmark-max-time {seconds}: must be a finite number of seconds, 0 or more")
    return seconds


def min_rounds(config: pytest.Config) -> int:
    if not _given(config, "--benchmark-min-rounds"):
        return DEFAULT_ROUNDS
    if (rounds := config.getoption("benchmark_min_rounds")) < DEFAULT_ROUNDS:
        raise ValueError(f"--benchmark-min-rounds {rounds}: a median needs at least {DEFAULT_ROUNDS} samples")
    return int(rounds)


def outcomes(text: str | None) -> tuple[str, ...]:
    try:
        return tuple(choice(one.strip(), OUTCOMES[1:]) for one in text.split(",")) if text else ()
    except ValueError as error:
        raise ValueError(f"--fail-on {text!r}: {error}") from None


def deadline(text: str) -> float:
    try:
        return finite("--deadline", float(text), above=0)
    except ValueError:
        raise ValueError(f"--deadline {text!r}: must be a finite number of seconds, more than 0") from None


def repeats(config: pytest.Config, on_ranks: bool) -> int:
    count = whole("--repeat", config.getoption("repeat"), least=1)
    if config.getoption("nvtx") or config.getoption("benchmark_disable"):
        return 1  # nothing is timed
    if count > 1 and (on_ranks or config.getoption("no_isolation")):
        raise ValueError(f"--repeat {count} needs fresh processes, which --no-isolation and torchrun do not have")
    return count


def checkout(config: pytest.Config, on_ranks: bool) -> Checkout | None:
    """The state that --against names, unpacked until pytest ends."""
    if (text := config.getoption("against")) is None:
        if config.getoption("margin") is not None:
            raise ValueError(f"--margin {config.getoption('margin')} is of verdicts: name what to compare by --against")
        return None
    for option, is_given in (
        ("--no-isolation", config.getoption("no_isolation")),
        ("torchrun", on_ranks),
        ("--nvtx", config.getoption("nvtx")),
        ("--repeat", config.getoption("repeat") != 1),
    ):
        if is_given:
            raise ValueError(f"--against {text}: {option} cannot be with it: its rows run in a process of their own")
    found = Checkout(text)
    config.add_cleanup(found.close)
    return found


def margin(text: str | None) -> float:
    try:
        return MARGIN_IN_TURNS if text is None else finite("--margin", float(text), above=0, most=1)
    except ValueError:
        raise ValueError(f"--margin {text!r}: must be a share above 0 and of at most 1, such as 0.02") from None


def memory_limit(text: str | None, device: str) -> int | None:
    from lmsys.measure.memory import parse_size

    if text is None:
        return None
    try:
        limit = parse_size(text)
    except ValueError as error:
        raise ValueError(f"--memory-limit {error}") from None
    if device != "cuda":
        raise ValueError(f"--memory-limit {text} caps the CUDA allocator, and this machine has no CUDA device")
    return limit


def nvtx(asked: bool, device: str) -> bool:
    if asked and device != "cuda":
        raise ValueError("--nvtx marks the kernels of a GPU for nsys and ncu, and this machine has no CUDA device")
    return asked


def claim_writable(output: Path) -> Callable[[], None]:
    """`lmsys.files.claim` of an output that can be written: before anything is measured, not after."""
    if output.exists() and not output.is_file():
        raise ValueError(f"cannot write the result to {output}: it is there, and it is no file")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        release = claim(output)
        existed = output.exists()  # asked under the claim: until then another run may write it
        try:
            output.open("ab").close()
        except OSError:
            release()
            raise
    except OSError as error:
        raise ValueError(f"cannot write the result to {output}: {error.strerror}") from error
    if not existed:
        output.unlink()
    return release


def _given(config: pytest.Config, option: str) -> bool:
    """True where the user wrote the option, even with the value that is its default."""
    words = [
        *config.getini("addopts"),
        *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
        *config.invocation_params.args,
    ]
    return any(str(word).partition("=")[0] == option for word in words)
