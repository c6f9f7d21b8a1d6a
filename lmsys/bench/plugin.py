"""pytest's side of a run: options, collection, progress, replay into pytest-benchmark, the result file.

Nothing happens, and torch is not imported, until a test of a benchmark is collected or one of the fixtures is used.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lmsys.bench import options
from lmsys.bench.benchmark import Settings
from lmsys.bench.fields import Sweep
from lmsys.bench.record import JournalError
from lmsys.bench.results import Key, Session, read_results
from lmsys.values import choice

SESSION = pytest.StashKey[Session]()
CLAIM = pytest.StashKey[Callable[[], None]]()  # ends this run's claim to its output
FAULT = pytest.StashKey[str]()  # what is wrong with the options, told when collection ends


class Hooks:
    """Hooks by which a repository's conftest tells the plugin about itself."""

    @pytest.hookspec(firstresult=True)
    def pytest_lmsys_sweeps(self) -> Mapping[str, Mapping[str, Sweep]]:
        """Sweeps by name, each by device ("cpu", "cuda"); without it every benchmark runs its axes' defaults."""
        raise NotImplementedError


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lmsys", "benchmarks (comma lists; an axis not named keeps its sweep's values)")
    group.addoption("--sweep", default="default", help="a named set of sizes to run")
    group.addoption(
        "--axis", action="append", default=[], metavar="NAME=A,B", help="values for an axis of a benchmark, by its name"
    )
    group.addoption("--memory-limit", metavar="SIZE", help="cap the GPU's allocator, such as 24GiB")
    group.addoption(
        "--resume", metavar="OUT.json", help="take what this result holds as done; alone, go on in that file"
    )
    group.addoption(
        "--deadline",
        metavar="SECONDS",
        default="600",
        help="a row that takes longer to compile or to answer is ended (one that has run before: after 30 s, or 20 "
        "times what it should take)",
    )
    group.addoption("--retry-crashed", action="store_true", help="--resume runs again what crashed or hung, too")
    group.addoption("--no-isolation", action="store_true", help="run rows in pytest's own process, for a debugger")
    group.addoption(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="measure each group in N fresh processes: how far do runs differ?",
    )
    group.addoption(
        "--energy", action="store_true", help="measure also the energy of each case's calls, in a pass of seconds"
    )
    group.addoption(
        "--against",
        metavar="REF",
        help="measure each row also as it was, at a git reference or in a folder: did it become slower?",
    )
    group.addoption("--margin", metavar="SHARE", help="of --against: a smaller change is none (default: 0.02)")
    group.addoption("--nvtx", action="store_true", help="call each case in NVTX ranges of its id; no case is timed")
    group.addoption("--fail-on", metavar="OUTCOMES", help="exit with 1 where a case ends so, such as oom,error")


class RecordedTimer:
    """pytest-benchmark's timer while it replays: it reads 0 and a sample in turn, so each difference is the sample."""

    __name__ = "recorded"

    def replay(self, samples: Iterable[float]) -> None:
        self._ticks = iter([tick for sample in samples for tick in (0.0, sample)])

    def __call__(self) -> float:
        return next(self._ticks)


@pytest.fixture
def recorded_timer(request: pytest.FixtureRequest) -> RecordedTimer:
    """The timer that pytest-benchmark's fixture, made after this one, replays samples by."""
    marker = request.node.get_closest_marker("benchmark")
    timer = RecordedTimer()
    options = {**(marker.kwargs if marker else {}), "timer": timer}
    request.node.add_marker(pytest.mark.benchmark(**options), append=False)
    return timer


@pytest.fixture
def measured(request: pytest.FixtureRequest, recorded_timer: RecordedTimer, benchmark: Any) -> Callable[[str], None]:
    """`measured(cell)`: check, warm, time and record the case's whole group, and replay the case's own samples.

    Out of memory, unsupported, wrong and failed rows are cells of the table: the test is skipped with the reason.
    """
    session = request.config.stash[SESSION]

    def measure(cell: str) -> None:
        key = request.function.benchmark.name, cell
        if key in session.carried:
            pytest.skip(f"already measured: {session.carried[key]['outcome']}")
        try:
            result = session.result(key)
        except KeyboardInterrupt:  # of which pytest-benchmark would say that its fixture was not used
            request.config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used at all")
            raise
        except JournalError as error:  # a full disk: whatever else is measured would be lost
            pytest.exit(str(error), returncode=1)
        found = result.record
        if result.samples is None and not (found["outcome"] == "ok" and benchmark.disabled):
            pytest.skip(f"{found['outcome']}: {found['reason']}")
        benchmark.extra_info |= {name: value for name, value in found.items() if not isinstance(value, list | dict)}
        benchmark.group, _, _ = found["comparison"].partition(" ")
        replay(benchmark, recorded_timer, result.samples or [0.0])

    return measure


@pytest.fixture
def device_benchmark(
    request: pytest.FixtureRequest, recorded_timer: RecordedTimer, benchmark: Any
) -> Callable[..., Any]:
    """`device_benchmark(fn)`: time one function by the device's clock; nothing is checked. Returns what fn returned.

    On CUDA by events, the cache cleared before each call; on a CPU by wall time. It runs in this process.
    --benchmark-min-rounds and --benchmark-max-time say how often.
    """
    import torch

    from lmsys.measure.clock import clock_of
    from lmsys.measure.compare import interleave
    from lmsys.measure.step import Step

    def measure(fn: Callable[[], Any]) -> Any:
        clock = clock_of("cuda" if torch.cuda.is_available() else "cpu")
        config, result = request.config, fn()
        found = interleave(
            {"fn": Step(lambda _: fn())},
            clock,
            seconds=float(config.getoption("benchmark_max_time")),
            min_rounds=config.getoption("benchmark_min_rounds"),
        )
        if found.failures:
            raise RuntimeError(f"the function failed while it was timed: {found.failures['fn'][1]}")
        benchmark.extra_info["clock"] = clock.name
        replay(benchmark, recorded_timer, found.samples["fn"])
        return result

    return measure


def replay(benchmark: Any, timer: RecordedTimer, samples: list[float]) -> None:
    """Hands pytest-benchmark these samples as its own."""
    timer.replay(samples)
    benchmark.pedantic(lambda: None, rounds=len(samples))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cls = getattr(metafunc.function, "benchmark", None)
    if cls is None or "cell" not in metafunc.fixturenames:
        return
    ids: list[str] = []
    try:
        ids = _session(metafunc.config).add(cls)
    except ValueError as error:
        metafunc.config.stash.setdefault(FAULT, str(error))
    metafunc.parametrize("cell", [pytest.param(one, id=one) for one in ids])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects benchmarks that have no case in this sweep, where others have some: pytest would skip them."""
    ours = [item for item in items if _benchmark_of(item)]
    empty = [item for item in ours if not _has_case(item)]
    if empty and len(empty) < len(ours):
        config.hook.pytest_deselected(items=empty)
        items[:] = [item for item in items if item not in empty]


def pytest_collection_finish(session: pytest.Session) -> None:
    config, items = session.config, [item for item in session.items if _benchmark_of(item)]
    if FAULT in config.stash:
        raise pytest.UsageError(config.stash[FAULT])
    if SESSION not in config.stash:
        return
    ours = config.stash[SESSION]
    known = {axis.name for benchmark in ours.benchmarks.values() for axis in benchmark.axes}
    for text in config.getoption("axis"):
        try:
            choice(text.partition("=")[0], known)
        except ValueError as error:
            raise pytest.UsageError(f"--axis {text}: {error}") from None
    keys: list[Key] = [(_benchmark_of(item).name, item.callspec.params["cell"]) for item in items]
    if ours.texts and items and not any(map(_has_case, items)):
        said = " ".join(f"{name} {text}" for name, text in ours.texts.items())
        raise pytest.UsageError(f"{said}: what is selected has no case for these values")
    try:
        ours.select(keys)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _benchmark_of(item: pytest.Item) -> Any:
    return getattr(getattr(item, "function", None), "benchmark", None)


def _has_case(item: pytest.Item) -> bool:
    return isinstance(item.callspec.params["cell"], str)  # pytest puts a mark for none


def _session(config: pytest.Config) -> Session:
    """This run's session, opened when the first benchmark is collected. ValueError for options that are wrong."""
    if SESSION in config.stash:
        return config.stash[SESSION]
    if FAULT in config.stash:
        raise ValueError(config.stash[FAULT])
    import torch

    from lmsys.bench.ranks import joined

    group = joined()  # under torchrun each rank has a GPU of its own from here on
    options.refuse(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sweep, nvtx = _sweep(config, device), options.nvtx(config.getoption("nvtx"), device)
    session = Session(
        Settings(
            device=device,
            sweep=config.getoption("sweep"),
            seconds_per_row=options.seconds_per_row(config, sweep),
            min_rounds=options.min_rounds(config),
            timed=_is_timed(config) and not nvtx,
            memory_limit_bytes=options.memory_limit(config.getoption("memory_limit"), device),
            deadline_s=options.deadline(config.getoption("deadline")),
            nvtx=nvtx,
            energy=config.getoption("energy"),
            sustained=config.getoption("energy") or sweep.sustained,
            command="python -m pytest " + shlex.join(str(one) for one in config.invocation_params.args),
        ),
        sweep,
        options.output(config),
        options.texts(config),
        lambda text: _say(config, text),
        fail_on=options.outcomes(config.getoption("fail_on")),
        isolated=not (config.getoption("no_isolation") or config.getoption("collectonly") or group is not None),
        retries=config.getoption("retry_crashed"),
        repeats=options.repeats(config, group is not None),
        checkout=options.checkout(config, group is not None),
        margin=options.margin(config.getoption("margin")),
    )
    if resumed := config.getoption("resume"):
        _resume(session, Path(resumed))
    if group is not None and group.rank > 0:
        session.output, session.say = None, lambda _: None  # one rank tells and writes
    if session.output:
        config.stash[CLAIM] = options.claim_writable(session.output)
    benchmarks: Any = config._benchmarksession
    benchmarks.json = None  # the file is ours to write: whole, or not at all
    config.stash[SESSION] = session
    return session


def _is_timed(config: pytest.Config) -> bool:
    disabled = config.getoption("benchmark_disable") and not config.getoption("benchmark_enable")
    return not (disabled or config.getoption("collectonly"))


def _sweep(config: pytest.Config, device: str) -> Sweep:
    sweeps: Mapping[str, Mapping[str, Sweep]] = config.hook.pytest_lmsys_sweeps() or {"default": {device: Sweep()}}
    name = config.getoption("sweep")
    try:
        return sweeps[choice(name, sweeps)][device]
    except ValueError as error:
        raise ValueError(f"--sweep {name!r}: {error}") from None


def _resume(session: Session, path: Path) -> None:
    try:
        for found, entries in read_results(path):
            session.resume(found, entries)
    except ValueError as error:
        raise ValueError(f"--resume {path}: {str(error).removeprefix(f'{path}: ')}") from error
    session.output = session.output or path


def _say(config: pytest.Config, text: str) -> None:
    """A line for the user now, whether or not pytest captures what tests print."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.write_line(text)
        reporter.flush()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    if SESSION in config.stash:
        machine_info.pop("node", None)  # results are published, and the host's name is nobody's affair


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    if SESSION in config.stash:
        found = config.stash[SESSION].runner.machine  # $LMSYS_COMMIT goes before what git says
        commit_info |= {"id": found["commit"], "dirty": found["dirty"]}


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: list[dict[str, Any]]) -> None:
    """Leaves our cases out of what pytest-benchmark makes tables of, unless an option asks for these.

    Our own summary tells of them. Other tests of the same run keep their tables.
    """
    if SESSION in config.stash and not options.wants_tables(config):
        ours = config.stash[SESSION].results.keys()
        facts = [(one["extra_info"].get("benchmark"), one["extra_info"].get("id")) for one in benchmarks]
        benchmarks[:] = [one for one, key in zip(benchmarks, facts, strict=True) if key not in ours]


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    if SESSION in config.stash:
        config.stash[SESSION].complete(output_json)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if (found := config.stash.get(SESSION, None)) is None:
        return
    try:
        if found.output and found.records:
            found.save(_content(config))
            found.say("" if found.faults else f"wrote the result to {found.output}")
    finally:
        found.close()
        if CLAIM in config.stash:
            config.stash[CLAIM]()
    if found.failing and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _content(config: pytest.Config) -> dict[str, Any]:
    """The JSON of pytest-benchmark, also where no row was timed, which it would not write."""
    benchmarks: Any = config._benchmarksession
    commit_info = config.hook.pytest_benchmark_generate_commit_info(config=config)
    config.hook.pytest_benchmark_update_commit_info(config=config, commit_info=commit_info)
    content = config.hook.pytest_benchmark_generate_json(
        config=config,
        benchmarks=benchmarks.benchmarks,
        include_data=True,
        machine_info=benchmarks.get_machine_info(),
        commit_info=commit_info,
    )
    config.hook.pytest_benchmark_update_json(config=config, benchmarks=benchmarks.benchmarks, output_json=content)
    return dict(content)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    session = terminalreporter.config.stash.get(SESSION, None)
    if session and session.records:
        from lmsys.reports import terminal

        terminalreporter.section("cases")
        for line in (
            *terminal.lines(session.content, terminalreporter.verbosity > 0, session.contends),
            *session.summary(),
        ):
            terminalreporter.write_line(line)
