"""The pytest plugin, which runs benchmarks as tests: it connects pytest to a `lmsys.bench.results.Session`.

pytest loads this module by its entry point (pyproject.toml) and calls the hooks below: for options, collection, tables
at the end and the result file. The session does the work of a run; `lmsys.bench.options` declares and reads the
options, and `_session` here makes the session from them: a new option is used there. A *row* is an implementation under
test, and a *case*, a test for pytest, is one row with one set of sizes. Our runner measures the samples of a case.
They are then *replayed*: pytest-benchmark times an empty function by `RecordedTimer`, which returns the samples in
place of times. Nothing happens, and torch is not imported, until a test of a benchmark is collected or one of the
fixtures is used.
"""

import os
import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from lmsys.bench import fields, options, results, validate
from lmsys.bench.benchmark import Benchmark, Settings
from lmsys.bench.record import JournalError
from lmsys.measure import host
from lmsys.values import choice, hold

SESSION = pytest.StashKey[results.Session]()
FAULT = pytest.StashKey[str]()  # what is wrong with the options; `pytest_collection_finish` reports it


class Hooks:
    """Hooks that the conftest of a repository of benchmarks may implement."""

    @pytest.hookspec(firstresult=True)
    def pytest_lmsys_sweeps(self) -> Mapping[str, Mapping[str, fields.Sweep]] | None:
        """{name of a sweep: {"cpu" or "cuda": sweep}}; without this hook benchmarks run the defaults of their axes."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser, options.LONG)


class RecordedTimer:
    """pytest-benchmark's timer while it replays: it returns 0 and a sample in turn, so each difference is a sample."""

    __name__ = "recorded"  # the timer's name in pytest-benchmark's JSON

    def replay(self, benchmark: Any, samples: Sequence[float]) -> None:
        """Hands pytest-benchmark these samples as its own."""
        self._ticks = iter([tick for sample in samples for tick in (0.0, sample)])
        benchmark.pedantic(lambda: None, rounds=len(samples))

    def __call__(self) -> float:
        return next(self._ticks)


@pytest.fixture
def lmsys_timer(request: pytest.FixtureRequest) -> RecordedTimer:
    """The timer that pytest-benchmark's fixture, which is made after this one, reads samples from.

    The test gets it by a marker `benchmark`, which keeps all other arguments of the test's own marker.
    """
    marker = request.node.get_closest_marker("benchmark")
    timer = RecordedTimer()
    request.node.add_marker(pytest.mark.benchmark(**(marker.kwargs if marker else {}) | {"timer": timer}), append=False)
    return timer


@pytest.fixture
def lmsys_measured(request: pytest.FixtureRequest, lmsys_timer: RecordedTimer, benchmark: Any) -> Callable[[str], None]:
    """`lmsys_measured(cell)`: measures the case with this id and its whole group, and replays the case's own samples.

    The group, the cases that share inputs, is measured when the test of its first case calls this. A case that is out
    of memory, unsupported, wrong or failed has a result, too: its test is skipped with the reason.
    """
    session = request.config.stash[SESSION]

    def measure(cell: str) -> None:
        key = request.function.benchmark.name, cell
        if key in session.carried:
            pytest.skip(f"already measured: {session.carried[key]['outcome']}")
        try:
            record = session.result(key)
        except KeyboardInterrupt:  # pytest-benchmark would warn that its fixture was not used
            request.config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used at all")
            raise
        except JournalError as error:  # a full disk: whatever else is measured would be lost
            pytest.exit(str(error), returncode=1)
        samples = record.get("samples_s")
        if samples is None and not (record["outcome"] == "ok" and benchmark.disabled):
            pytest.skip(f"{record['outcome']}: {record['reason']}")
        benchmark.extra_info |= {name: value for name, value in record.items() if not isinstance(value, list | dict)}
        benchmark.group, _, _ = record["comparison"].partition(" ")  # behind the space is the date of the run
        lmsys_timer.replay(benchmark, samples or [0.0])

    return measure


@pytest.fixture
def lmsys_device_benchmark(
    request: pytest.FixtureRequest, lmsys_timer: RecordedTimer, benchmark: Any
) -> Callable[..., Any]:
    """`lmsys_device_benchmark(fn)`: time one function by the device's clock, and return what it returned.

    Nothing is checked. On CUDA the clock is events, with the cache cleared before each call; on a CPU it is wall time.
    The function runs in this process. --benchmark-min-rounds and --benchmark-max-time say how often.
    """
    import torch

    from lmsys.measure.clock import clock_of
    from lmsys.measure.compare import interleave
    from lmsys.measure.step import Step

    def measure(fn: Callable[[], Any]) -> Any:
        clock = clock_of("cuda" if torch.cuda.is_available() else "cpu")
        config, result = request.config, fn()
        sampled = interleave(
            {"fn": Step(lambda _: fn())},
            clock,
            seconds=float(config.getoption("benchmark_max_time")),
            min_rounds=config.getoption("benchmark_min_rounds"),
        )
        if sampled.failures:
            raise RuntimeError(f"the function failed while it was timed: {sampled.failures['fn'][1]}")
        benchmark.extra_info["clock"] = clock.name
        lmsys_timer.replay(benchmark, sampled.samples["fn"])
        return result

    return measure


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test for each case of a benchmark; the parameter `cell` is the case's id. Leaves other tests alone."""
    if (cls := _benchmark_of(metafunc)) is None:
        return
    ids: list[str] = []
    try:
        ids = _session(metafunc.config).add(cls)
    except ValueError as error:
        metafunc.config.stash.setdefault(FAULT, str(error))
    metafunc.parametrize("cell", [pytest.param(name, id=name) for name in ids])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects benchmarks without a case in this sweep if others have some; pytest would report them as skipped."""
    ours = [item for item in items if _benchmark_of(item)]
    empty = [item for item in ours if not _has_case(item)]
    if empty and len(empty) < len(ours):
        config.hook.pytest_deselected(items=empty)
        items[:] = [item for item in items if item not in empty]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Raises pytest's UsageError for wrong options and cases, before any file is opened for writing."""
    config, items = session.config, [item for item in session.items if _benchmark_of(item)]
    try:
        hold((FAULT not in config.stash, config.stash.get(FAULT, "")))
        if SESSION in config.stash:
            _select(config, config.stash[SESSION], items)
    except (ValueError, OSError) as error:  # also a name that is too long for a file
        raise pytest.UsageError(options.as_typed(config, str(error))) from None


def _select(config: pytest.Config, ours: results.Session, items: Sequence[pytest.Item]) -> None:
    """Gives the session the cases that pytest has selected, and locks its output file. ValueError if that fails."""
    known = {axis.name for benchmark in ours.benchmarks.values() for axis in benchmark.axes}
    for text in config.getoption("lmsys_axis"):
        choice(text.partition("=")[0], known, f"--axis {text}: ")
    keys: list[results.Key] = [
        (_benchmark_of(item).name, item.callspec.params["cell"]) for item in items if _has_case(item)
    ]
    selected = sorted({name for name, _ in keys})
    axes = [axis for name in selected for axis in ours.benchmarks[name].axes]
    names = {key for axis in axes for key in (axis.option, axis.name)}
    for name, text in ours.texts.items() if keys else ():
        there = ", ".join(sorted({axis.option or axis.name for axis in axes}))
        hold((name in names, f"{name} {text}: {' and '.join(selected)} has no such axis; there are {there}"))
    asked = " ".join(f"{name} {text}" for name, text in ours.texts.items())
    hold((keys or not (items and asked), f"{asked}: what is selected has no case for these values"))
    if ours.sections and not items:
        asked = f"-k {config.option.keyword!r}" if config.option.keyword else "the command"
        ours.say(f"{asked} selects no case. There are, by sections, {ours.sections}")
    if keys:
        options.check_group_by(config.getoption("benchmark_group_by"), ours.facts(keys))
    resumed = config.getoption("lmsys_resume")
    if ours.output:
        # Locked before it is read: until then another run may still write it.
        config.add_cleanup(options.claim_writable(ours.output))
        goes_on = resumed is not None and resumed.resolve() == ours.output.resolve()
        if not goes_on and not config.option.collectonly:
            options.check_free(ours.output, ours.settings.command)
    if resumed:
        _resume(ours, resumed)
    ours.select(keys)
    if not config.option.collectonly:  # mistakes in metrics and layouts are reported now, not after the run
        content = ours.made_up()
        validate.check_content(content)  # a file that no reader takes would lose the run
        with suppress(ImportError):  # where there is no matplotlib, no report is built
            from lmsys.reports import layout

            layout.rehearse(content)


def _resume(session: results.Session, path: Path) -> None:
    """Gives the session the records of a result file and its journal. ValueError names --resume and the file."""
    try:
        for content, entries in results.read_results(path):
            session.resume(content, entries)
    except ValueError as error:
        raise ValueError(f"--resume {path}: {str(error).removeprefix(f'{path}: ')}") from error


def _benchmark_of(test: Any) -> Any:
    """The benchmark class of a test that `lmsys.bench.bench` has made; None for any other test."""
    cls = getattr(getattr(test, "function", None), "benchmark", None)
    return cls if isinstance(cls, type) and issubclass(cls, Benchmark) and "cell" in test.fixturenames else None


def _has_case(item: pytest.Item) -> bool:
    return isinstance(item.callspec.params["cell"], str)  # a benchmark without cases has pytest's mark here


def _session(config: pytest.Config) -> results.Session:
    """This run's session, made when the first benchmark is collected. ValueError for wrong options."""
    if SESSION in config.stash:
        return config.stash[SESSION]
    import torch

    from lmsys.bench.ranks import joined

    group = joined()  # under torchrun each rank has a GPU of its own from here on
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.refuse(config, device)
    name, nvtx = config.getoption("lmsys_sweep"), config.getoption("lmsys_nvtx")
    sweeps = config.hook.pytest_lmsys_sweeps() or {"default": {device: fields.Sweep()}}
    by_device = sweeps[choice(name, sweeps, f"--sweep {name!r}: ")]
    sweep: fields.Sweep = by_device[choice(device, by_device, f"--sweep {name!r} for device {device!r}: ")]
    disabled = config.getoption("benchmark_disable") and not config.getoption("benchmark_enable")
    session = results.Session(
        Settings(
            device=device,
            sweep=name,
            seconds_per_row=options.seconds_per_row(config, sweep),
            min_rounds=options.min_rounds(config),
            timed=not (disabled or nvtx or config.getoption("collectonly")),
            memory_limit_bytes=options.memory_limit(config.getoption("lmsys_memory_limit"), device),
            deadline_s=options.number(
                "--deadline", config.getoption("lmsys_deadline"), "a finite number of seconds, more than 0", above=0
            ),
            nvtx=nvtx,
            energy=config.getoption("lmsys_energy"),
            apart=options.own_process(config, group is not None),
            checks_files=not config.getoption("lmsys_no_check"),
            sustained=config.getoption("lmsys_energy") or sweep.sustained,
            command="python -m pytest " + shlex.join(str(word) for word in config.invocation_params.args),
        ),
        sweep=sweep,
        output=options.output(config),
        texts=options.texts(config),
        say=lambda text: _say(config, text),
        fail_on=options.outcomes(config.getoption("lmsys_fail_on")),
        isolated=not (config.getoption("lmsys_no_isolation") or config.getoption("collectonly") or group is not None),
        retries=config.getoption("lmsys_retry_crashed"),
        repeats=options.repeats(config, group is not None),
        checkout=options.checkout(config, group is not None),
        margin=options.margin(config.getoption("lmsys_margin")),
    )
    config.add_cleanup(session.close)
    if session.isolated and device == "cpu":
        _ease_waiting(session.say, host.others_now())
    if group is not None and group.rank > 0:
        session.output, session.say = None, lambda _: None  # rank 0 alone prints lines and writes the result
    config._benchmarksession.json = None  # the file is ours to write: whole, or not at all
    config.stash[SESSION] = session
    return session


def _ease_waiting(say: Callable[[str], None], others_share: float | None) -> None:
    """On a busy CPU, warns the user, and has threads of later workers sleep while they wait for one another.

    By default such threads spin for milliseconds, perhaps on the very core that the other thread needs; calls then take
    ten times as long.
    """
    if others_share is not None and others_share > host.BUSY:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        say(
            f"this machine is busy: other programs take {others_share:.0%} of its CPU, and figures that they disturb"
            " are marked. For figures that count, end this run by Ctrl-C, and begin again when the machine is idle"
        )


def _say(config: pytest.Config, text: str) -> None:
    """Prints a line for the user at once, whether or not pytest captures output; nothing with -p no:terminal."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    capture: Any = config.pluginmanager.get_plugin("capturemanager")  # None with -p no:capture
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(options.as_typed(config, text))
            reporter.flush()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    if SESSION in config.stash:
        machine_info.pop("node", None)  # results are published: the host's name is dropped


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: list[dict[str, Any]]) -> None:
    """Leaves our cases out of pytest-benchmark's tables, unless an option asks for these tables.

    Our own summary shows these cases; other tests of the same run keep their tables. If our cases stay in the tables,
    --benchmark-group-by=param:NAME may name fields of their records, which are added to "params" here.
    """
    if SESSION not in config.stash:
        return
    keys = config.stash[SESSION].results.keys()
    ours = [x for x in benchmarks if (x["extra_info"].get("benchmark"), x["extra_info"].get("id")) in keys]
    for entry in ours:
        entry["params"] = entry["extra_info"] | entry["params"]
    if not options.wants_tables(config):
        benchmarks[:] = [entry for entry in benchmarks if entry not in ours]


@pytest.hookimpl(optionalhook=True, trylast=True)  # last: the seal covers what other plugins write
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    if SESSION in config.stash:
        machine = config.stash[SESSION].runner.machine  # it has the commit of $LMSYS_COMMIT if set, else of git
        output_json["commit_info"] |= {"id": machine["commit"], "dirty": machine["dirty"]}
        config.stash[SESSION].complete(output_json)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Writes the result as soon as the last test has run, whatever fails later; nothing where no test may run."""
    config = session.config
    collection_failed = session.testsfailed and not config.option.continue_on_collection_errors
    try:
        return (yield)
    finally:
        ours = config.stash.get(SESSION, None)
        if ours and ours.output and ours.records and not (config.option.collectonly or collection_failed):
            ours.save(_content(config))
            # The summary says if the file could not be written. The empty line ends the line of progress.
            ours.say("" if ours.faults else f"wrote the result to {ours.output}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Makes a run without failed tests fail where its results say so (`Session.failing`)."""
    ours = session.config.stash.get(SESSION, None)
    if ours and ours.failing and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _content(config: pytest.Config) -> dict[str, Any]:
    """The content of the result file: pytest-benchmark's JSON, completed by our part.

    It is made here, since pytest-benchmark makes none if no row was timed.
    """
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
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """Prints the tables of the cases, and how the run ended."""
    session = terminalreporter.config.stash.get(SESSION, None)
    if session and session.records and exitstatus != pytest.ExitCode.USAGE_ERROR:
        from lmsys.reports import terminal

        terminalreporter.section("cases")
        for line in (
            *terminal.lines(session.content, every=terminalreporter.verbosity > 0, standing=session.standing),
            *session.summary(),
        ):
            terminalreporter.write_line(options.as_typed(terminalreporter.config, line))
