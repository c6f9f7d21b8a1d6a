"""The plugin leaves other people's test suites alone, although pytest loads it wherever lmsys is installed.

Tests write a suite into an empty folder, and run pytest there WITH the plugin and WITHOUT it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmsys.bench.options import OPTIONS
from tests.bench.test_plugin import run
from tests.support.processes import PATIENCE_S, ROOT

WITH, WITHOUT = ("-p", "lmsys.bench.plugin"), ("-p", "no:lmsys.bench.plugin")


CONFTEST = """
import pytest

pytest_plugins = ["lmsys.bench.plugin"]
NAMES = {names}


def pytest_addoption(parser):
    for name in NAMES:
        parser.addoption(f"--{{name}}", default="theirs")


@pytest.fixture
def measured(request):
    return [request.config.getoption(f"--{{name}}") for name in NAMES]


@pytest.fixture
def device_benchmark():
    return "theirs"
"""
SUITE = """
import pytest


def test_options_and_fixtures(measured, device_benchmark):
    assert set(measured) == {"theirs", "mine"} and device_benchmark == "theirs"


def test_attribute():
    pass


test_attribute.benchmark = "of another tool"


@pytest.mark.parametrize("cell", [1, 2])
def test_cell(cell):
    assert cell


test_cell.benchmark = dict
"""


def test_a_suite_with_the_same_names_starts_and_has_its_own(tmp_path: Path) -> None:
    """The suite has options and fixtures with the plugin's names, and functions with an attribute `benchmark`.

    Its conftest loads the plugin once more.
    """
    (tmp_path / "conftest.py").write_text(CONFTEST.format(names=[*OPTIONS]))
    (tmp_path / "test_theirs.py").write_text(SUITE)
    ended = run(tmp_path, *WITH, "--resume", "mine", plugin=False)
    assert ended.returncode == 0 and "4 passed" in ended.stdout, ended.stdout + ended.stderr


def test_no_option_or_fixture_of_the_plugin_is_without_its_prefix(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text("def test_nothing():\n    pass\n")

    for asked, words, prefix in (("--help", r"^  (--[\w-]+)", "--lmsys-"), ("--fixtures", r"^(\w+)", "lmsys_")):
        printed = (run(tmp_path, *plugin, asked, plugin=False).stdout for plugin in (WITH, WITHOUT))
        here, elsewhere = (set(re.findall(words, text, re.MULTILINE)) for text in printed)
        added = here - elsewhere
        assert added and all(word.startswith(prefix) for word in added), added


# Uses of pytest-benchmark, after its own tests: once, in a loop, with a setup, in groups, failing, and unused. The last
# test fails if the plugin imports what it needs only once it is used.
BENCHMARKS = """
import sys
import time
from functools import partial

import pytest


@pytest.mark.benchmark(group="one", min_rounds=3, max_time=0.01, timer=time.perf_counter)
def test_fast(benchmark):
    assert benchmark(lambda: 7) == 7
    benchmark.extra_info["foo"] = "bar"


@pytest.mark.parametrize("size", [1, 2])
def test_parametrized(benchmark, size):
    assert benchmark.pedantic(sorted, args=([size],), rounds=3, iterations=2) == [size]


def test_setup(benchmark):
    benchmark.pedantic(len, setup=lambda: (([],), {}), rounds=3)


def test_weave(benchmark):
    class Foo:
        def bar(self):
            return 3
    assert benchmark(Foo().bar) == 3


def test_twice(benchmark):
    benchmark(int)
    with pytest.raises(Exception):
        benchmark(int)


def test_fails(benchmark):
    benchmark(partial(int, "x"))


def test_not_used(benchmark):
    pass


def test_plain():
    assert not {"torch", "numpy", "triton"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    "options",
    [
        ("--benchmark-autosave", "--benchmark-compare"),
        *(
            pytest.param(options, marks=pytest.mark.long)
            for options in (
                ("--benchmark-group-by=param:size", "-k", "parametrized"),
                ("--benchmark-disable", "-n", "2"),
                ("--benchmark-skip",),
            )
        ),
    ],
    ids=lambda options: " ".join(options) or "none",
)
def test_benchmarks_of_others_are_the_same_with_it_and_without(options: tuple[str, ...], tmp_path: Path) -> None:
    def ended(plugin: tuple[str, ...]) -> tuple[Any, ...]:
        folder = tmp_path / plugin[1].replace(":", "")
        folder.mkdir()
        (folder / "test_theirs.py").write_text(BENCHMARKS)
        quickly = "--benchmark-max-time", "0.01", "--benchmark-json", "out.json"
        done = run(folder, *plugin, "-rA", *options, *quickly, plugin=False)
        starts = ("PASSED", "FAILED", "ERROR", "SKIPPED", "test_", "benchmark", "---")
        lines = [line for line in done.stdout.splitlines() if line.startswith(starts)]
        words = sorted(line.split(" - ")[0] for line in lines if line.startswith(starts[:4]))
        result = folder / "out.json"
        content = json.loads(result.read_text()) if result.exists() else {"benchmarks": []}
        kept = "name", "group", "params", "extra_info"
        entries = [{key: entry[key] for key in kept} for entry in content["benchmarks"]]
        return done.returncode, words, entries, content.keys()

    with_it = ended(WITH)
    assert with_it == ended(WITHOUT)
    assert "PASSED test_theirs.py::test_plain" in with_it[1] or "-k" in options


def test_the_plugin_is_loaded_without_what_its_extra_installs(tmp_path: Path) -> None:
    """The suite uses pytest alone, in an environment where lmsys is installed without its extra "bench"."""
    (tmp_path / "test_theirs.py").write_text("def test_nothing():\n    pass\n")
    for missing in ("torch", "numpy", "pytest_benchmark", "matplotlib"):
        (tmp_path / "hidden" / missing).mkdir(parents=True, exist_ok=True)
        (tmp_path / "hidden" / missing / "__init__.py").write_text("raise ImportError('hidden')\n")
    path = os.pathsep.join([str(tmp_path / "hidden"), str(ROOT)])
    line = [sys.executable, "-m", "pytest", "-q", "-p", "lmsys.bench.plugin", "-p", "no:hypothesispytest"]
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert ended.returncode == 0 and "1 passed" in ended.stdout, ended.stdout + ended.stderr
