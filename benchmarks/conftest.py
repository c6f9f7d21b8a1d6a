"""The measuring fixture, and pytest's side of a run: options, progress, replay, the result file."""

import json
import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.axes import parse_axes, parse_model_axes, parse_parallel_axes, parse_training_axes, sweep_called
from benchmarks.model_cells import AUTO, LLAMA, rows_called
from benchmarks.ranks import joined
from benchmarks.sections import Axes, Sweep
from benchmarks.session import ResultFile, Session, Settings, cap_gpu_memory, read_results
from lmsys.attention import ATTENTION
from lmsys.measure.machine import commit
from lmsys.measure.memory import parse_size
from lmsys.registry import Entry

MIN_ROUNDS = 10
REFUSED = {
    "--benchmark-timer": "the clock is the device's: CUDA events on a GPU, perf_counter on a CPU",
    "--benchmark-min-time": "each sample is one call; --benchmark-max-time sets how long a row is sampled",
    "--benchmark-calibration-precision": "each sample is one call, nothing is calibrated",
    "--benchmark-precision": "rows are sampled side by side; --benchmark-max-time sets how long",
    "--benchmark-confidence": "rows are sampled side by side; --benchmark-max-time sets how long",
    "--benchmark-warmup": "every row is compiled, tuned and warm before its first sample",
    "--benchmark-warmup-iterations": "every row is compiled, tuned and warm before its first sample",
    "--benchmark-disable-gc": "what is replayed is already measured",
    "--benchmark-cprofile": "what is replayed is already measured; profile the row itself",
    "--benchmark-cprofile-loops": "what is replayed is already measured; profile the row itself",
    "--benchmark-cprofile-top": "what is replayed is already measured; profile the row itself",
    "--benchmark-cprofile-dump": "what is replayed is already measured; profile the row itself",
}
AXES = ("batch", "heads", "length", "tiers", "head_dim", "dtype", "causal", "direction")
PARALLEL_AXES = ("strategy", "world_size", "bucket_mb", "comm_dtype", "sharded_optimizer")
TRAINING_AXES = ("epochs", "train_tokens", "val_tokens")
MODEL_AXES = ("size", "context", "batch", "precision", "mode", "compile")
SESSION = pytest.StashKey[Session]()
SWEEP = pytest.StashKey[tuple[Sweep, Axes]]()
MODEL = pytest.StashKey[dict[str, Any]]()  # the axes that the user named, as fields of a ModelSection
PARALLEL = pytest.StashKey[dict[str, Any]]()  # the same of a ParallelSection
TRAINING = pytest.StashKey[dict[str, Any]]()  # the same of a TrainingSection
ROWS = pytest.StashKey[tuple[list[Entry], bool]]()  # of the attention table, and whether the user named them
MODEL_ROWS = pytest.StashKey[list[Entry] | None]()  # what the user named to ask a model with


class RecordedTimer:
    """pytest-benchmark's timer while it replays: it reads 0 and a sample in turn, so each difference is the sample."""

    __name__ = "recorded"

    def replay(self, samples: Iterable[float]) -> None:
        self._ticks = iter([tick for sample in samples for tick in (0.0, sample)])

    def __call__(self) -> float:
        return next(self._ticks)


def cell_params(ids: Iterable[str]) -> list[Any]:
    """Parameters for `parametrize("cell", ...)`: strings, each with a timer of its own to be replayed by."""
    return [pytest.param(one, id=one, marks=pytest.mark.benchmark(timer=RecordedTimer())) for one in ids]


@pytest.fixture
def measured(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Callable[[str], None]:
    """`measured(cell)`: gate, warm, time and record the cell's whole group, and replay the cell's own samples.

    Out of memory, unsupported, wrong and failed rows are cells of the table: the test is skipped with the reason.
    """
    session = request.config.stash[SESSION]

    def measure(cell: str) -> None:
        if cell in session.carried:
            pytest.skip(f"already measured: {session.carried[cell]['outcome']}")
        result = session.result(cell)
        found = result.record
        if result.samples is None and not (found["outcome"] == "ok" and benchmark.disabled):
            pytest.skip(f"{found['outcome']}: {found['reason']}")
        benchmark.extra_info |= {name: value for name, value in found.items() if not isinstance(value, list)}
        benchmark.group, _, _ = found["comparison"].partition(" ")
        samples = result.samples or [0.0]
        timer = request.node.get_closest_marker("benchmark").kwargs["timer"]
        timer.replay(samples)
        benchmark.pedantic(lambda: None, rounds=len(samples))

    return measure


def pytest_configure(config: pytest.Config) -> None:
    for option, reason in REFUSED.items():
        if _given(config, option):
            raise pytest.UsageError(f"{option} is not for these benchmarks: {reason}")
    try:
        session = _open_session(config)
        names = (*AXES, *MODEL_AXES, *PARALLEL_AXES, *TRAINING_AXES)
        axes = {f"--{name.replace('_', '-')}": config.getoption(name) for name in names}
        config.stash[MODEL], config.stash[PARALLEL] = parse_model_axes(axes), parse_parallel_axes(axes)
        config.stash[TRAINING] = parse_training_axes(axes)
        config.stash[SWEEP] = sweep_called(session.settings.sweep, session.settings.device), parse_axes(axes)
        named = config.getoption("attention")
        rows = None if named is None else rows_called(named.split(","))
        only_attention = [*ATTENTION.values()] if rows is None else [row for row in rows if row not in (AUTO, LLAMA)]
        config.stash[ROWS], config.stash[MODEL_ROWS] = (only_attention, named is not None), rows
        if resumed := config.getoption("resume"):
            _resume(session, Path(resumed))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    if (group := joined()) is not None and group.rank > 0:
        session.output, session.settings.say = None, lambda _: None  # one rank tells and writes
        config.option.benchmark_json = None
    if session.output:
        _check_writable(session.output)
        config.option.benchmark_json = ResultFile(session.output)
    config.stash[SESSION] = session


def _check_writable(output: Path) -> None:
    """Before anything is measured, not after."""
    existed = output.exists()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("ab").close()
    except OSError as error:
        raise pytest.UsageError(f"cannot write the result to {output}: {error.strerror}") from error
    if not existed:
        output.unlink()


def _resume(session: Session, path: Path) -> None:
    try:
        for found, entries in read_results(path):
            session.resume(found, entries)
    except ValueError as error:
        raise ValueError(f"--resume {path}: {error}") from error
    session.output = session.output or path


def _open_session(config: pytest.Config) -> Session:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    joined()  # under torchrun each rank has a GPU of its own from here on
    name = config.getoption("sweep")
    seconds = sweep_called(name, device).seconds_per_row
    settings = Settings(
        device=device,
        sweep=name,
        seconds_per_row=float(config.getoption("benchmark_max_time"))
        if _given(config, "--benchmark-max-time")
        else seconds,
        min_rounds=_min_rounds(config),
        timed=config.getoption("benchmark_enable") or not config.getoption("benchmark_disable"),
        memory_limit_bytes=_limit_memory(config.getoption("memory_limit"), device),
        command="python -m pytest " + shlex.join(str(one) for one in config.invocation_params.args),
    )
    output = config.getoption("benchmark_json")
    path = output if output is None or isinstance(output, Path) else Path(output.name)
    settings.say = lambda text: _say(config, text)
    return Session(settings, path)


def _min_rounds(config: pytest.Config) -> int:
    if not _given(config, "--benchmark-min-rounds"):
        return MIN_ROUNDS
    if (rounds := config.getoption("benchmark_min_rounds")) < MIN_ROUNDS:
        raise ValueError(f"--benchmark-min-rounds {rounds}: a median needs at least {MIN_ROUNDS} samples")
    return int(rounds)


def _limit_memory(text: str | None, device: str) -> int | None:
    if text is None:
        return None
    limit = parse_size(text)
    if device != "cuda":
        raise ValueError(f"--memory-limit {text} caps the CUDA allocator, and this machine has no CUDA device")
    cap_gpu_memory(limit)
    return limit


def _given(config: pytest.Config, option: str) -> bool:
    """Whether the user wrote the option, even with the value that is its default."""
    words = [
        *config.getini("addopts"),
        *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
        *config.invocation_params.args,
    ]
    return any(str(word).partition("=")[0] == option for word in words)


def _say(config: pytest.Config, text: str) -> None:
    """A line for the user now, whether or not pytest captures what tests print."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.write_line(text)
        reporter.flush()


def pytest_collection_finish(session: pytest.Session) -> None:
    cells = [item.callspec.params["cell"] for item in session.items if "cell" in getattr(item, "fixturenames", ())]
    named = session.config.getoption("attention")
    if named and cells and not any(isinstance(cell, str) for cell in cells):  # without any, pytest puts a mark
        raise pytest.UsageError(f"--attention {named}: what is selected has no cell for these rows")
    session.config.stash[SESSION].select(cells)


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)  # results are published, and the host's name is nobody's affair


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    found = commit()  # $LMSYS_COMMIT goes before what git says
    commit_info |= {"id": found["commit"], "dirty": found["dirty"]}


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    config.stash[SESSION].complete(output_json)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The result is safe once pytest-benchmark has written it, which it leaves undone when no row was timed."""
    config = session.config
    found = config.stash[SESSION]
    found.settings.ranks.close()
    if found.output is None or not found.records:
        return
    if not found.saved:
        _write_untimed(config, found.output)
    found.output.with_name(found.output.name + ".partial").unlink(missing_ok=True)


def _write_untimed(config: pytest.Config, output: Path) -> None:
    machine_info = config.hook.pytest_benchmark_generate_machine_info(config=config)
    config.hook.pytest_benchmark_update_machine_info(config=config, machine_info=machine_info)
    content = config.hook.pytest_benchmark_generate_json(
        config=config,
        benchmarks=[],
        include_data=True,
        machine_info=machine_info,
        commit_info=config.hook.pytest_benchmark_generate_commit_info(config=config),
    )
    config.hook.pytest_benchmark_update_json(config=config, benchmarks=[], output_json=content)
    output.write_text(json.dumps(content, indent=4))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = list(terminalreporter.config.stash[SESSION].summary())
    if lines:
        terminalreporter.section("cells")
    for line in lines:
        terminalreporter.write_line(line)
